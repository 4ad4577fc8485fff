"""The whole way from a target to a draft on disk: text, features, vocabulary, training, export. Each part keeps its results, so a killed job goes on."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any, NamedTuple

import jax

from jspec.bench.prompts import PROMPT_SETS, check_readable, load_prompt_sets
from jspec.models.block_draft import KINDS as BLOCK_KINDS
from jspec.models.block_draft import BlockDraftConfig, init_block_params
from jspec.models.draft_files import AnyDraft, load_draft, save_draft
from jspec.models.eagle_config_file import default_capture_layers
from jspec.models.eagle_draft import EagleConfig
from jspec.models.frozen_kv_draft import FrozenKVConfig
from jspec.models.json_files import read_json
from jspec.models.llama import LlamaConfig
from jspec.models.loading import LoadedModel
from jspec.models.lora import LoraConfig, LoraParts, load_lora_parts, save_lora
from jspec.models.target import TargetModel
from jspec.models.tensor_files import RECORD
from jspec.training.batches import split_held_out
from jspec.training.features import write_features
from jspec.training.prompts import word_runs
from jspec.training.shards import Sequences, open_shards
from jspec.training.text import TextSequence, read_answers, text_chunks, write_answers
from jspec.training.train import train
from jspec.training.train_job import FROZEN_KV, UNO, TrainJob
from jspec.training.vocabulary import choose_vocabulary

Progress = Callable[[str], Callable[..., Iterable]]
"""`progress(what)(iterable, total=n)` yields the items of `iterable`."""


class JobResult(NamedTuple):
    """A draft, where it lies, and its figures."""

    draft: AnyDraft | LoraParts
    out: pathlib.Path
    record: dict[str, Any]  # also in `training.json` beside the draft


def run_job(job: TrainJob, model: LoadedModel, *, progress: Progress | None = None) -> JobResult:
    """Do whatever of `job` is not done yet.

    Raises:
        ValueError, OSError: an input is missing, damaged, or of something else.
    """
    show = progress or (lambda what: lambda items, total: items)
    facts, options = model.target.facts, job.options
    _llama(model.target)
    captures = _capture_layers(job, facts.num_layers)
    folder = job.features
    if folder is None:
        folder = job.work_dir / "features"
        sequences = _make_text(job, model, show("Answers"))
        cached = cached_layers(captures, facts.num_layers)
        write_features(
            folder, model.target, sequences, model=model.name, capture_layers=cached, progress=show("Features")
        )
    stored = open_shards(
        folder,
        model=model.name,
        capture_layers=captures,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
    )
    start = _start(job, model.target)
    token_ids = _vocabulary(job, model.target, stored) if start is None else ids_of(start)
    config: Any
    if job.kind == UNO:
        config = LoraConfig(rank=job.rank, alpha=job.alpha, base=model.name, block_size=job.block_size)
    else:
        vocab_size = facts.vocab_size if token_ids is None else len(token_ids)
        config = draft_config(job, model.target, capture_layers=captures, draft_vocab_size=vocab_size)
    trained = train(
        config,
        model.target,
        stored,
        options,
        work_dir=job.work_dir,
        token_ids=token_ids,
        start=None if start is None else _own(start, config, job.init),
        progress=show("Training"),
    )
    record = _record(job, model, stored, trained.held_out)
    out = job.out or job.work_dir / "draft"
    if job.kind == UNO:
        save_lora(out, *trained.draft, storage=job.storage, record=record)
    else:
        save_draft(out, trained.draft, model.target, storage=job.storage, record=record)
    return JobResult(trained.draft, out, record)


def _llama(target: TargetModel) -> LlamaConfig:
    """Raises ValueError unless the target is one that drafts are shaped after."""
    if not isinstance(target.config, LlamaConfig):
        raise ValueError(f"a draft is trained after a Llama-family target, not after {type(target.config).__name__}")
    return target.config


def draft_config(
    job: TrainJob, target: TargetModel, *, capture_layers: tuple[int, ...], draft_vocab_size: int
) -> EagleConfig | BlockDraftConfig | FrozenKVConfig:
    """A draft shaped like layers of the target: heads, norms and position encoding, so that it can start from them."""
    facts, config = target.facts, _llama(target)
    sizes: dict[str, Any] = {
        "kind": job.kind,
        "vocab_size": facts.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "hidden_size": facts.hidden_size,
        "intermediate_size": job.intermediate_size or config.intermediate_size,
        "num_heads": config.num_heads,
        "num_kv_heads": facts.num_kv_heads,
        "head_dim": facts.head_dim,
        "context_len": facts.context_len,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
    }
    if job.kind == FROZEN_KV:
        del sizes["kind"]
        own = {"hidden_size": job.hidden_size, "intermediate_size": job.intermediate_size or 4 * job.hidden_size}
        last = (facts.num_layers - 1,) * job.num_layers
        return FrozenKVConfig(**(sizes | own), target_hidden_size=facts.hidden_size, kv_layers=last)
    if job.kind in BLOCK_KINDS:
        markov: dict[str, Any] = {"markov_rank": job.markov_rank, "markov_head": job.markov_head, "confidence": True}
        return BlockDraftConfig(
            **sizes,
            **(markov if job.kind == "dspark" else {}),
            num_layers=job.num_layers,
            capture_layers=capture_layers,
            block_size=job.block_size,
            mask_token_id=job.mask_token_id,
            window=job.window,
            qk_norm=config.qk_norm,
        )
    multi = job.kind == "multi-layer"
    return EagleConfig(
        **sizes,
        capture_layers=capture_layers if job.kind == "eagle3" else (),
        num_modules=job.num_modules if multi else 1,
        chained=multi and job.chained,
    )


def _start(job: TrainJob, target: TargetModel) -> AnyDraft | LoraParts | None:
    """What `job` goes on from."""
    if job.init is None:
        return None
    return load_lora_parts(job.init, target) if job.kind == UNO else load_draft(job.init, target, dtype="float32")


def ids_of(draft: AnyDraft | LoraParts) -> Any:
    """i32[Vd], or None where the draft's vocabulary is the target's."""
    return None if isinstance(draft, LoraParts) else draft.params["shared"].get("token_ids")


def _own(start: AnyDraft | LoraParts, config: Any, path: pathlib.Path | None) -> Any:
    """Parameters to start from. A "dspark" draft may start from a "dflash" one: its heads are new then.

    Raises:
      ValueError: `start` has other sizes than what is to be trained.
    """
    kinds = () if isinstance(start, LoraParts) else (config.kind, start.config.kind)
    new_heads = kinds == ("dspark", "dflash")
    theirs_of = {field.name: getattr(start.config, field.name) for field in dataclasses.fields(start.config)}
    if new_heads:
        theirs_of |= {name: getattr(config, name) for name in ("kind", "markov_rank", "markov_head", "confidence")}
        theirs_of["block_size"] = getattr(start.config, "num_drafts", None)
    for field in dataclasses.fields(config):
        ours, theirs = getattr(config, field.name), theirs_of.get(field.name)
        if ours != theirs:
            raise ValueError(
                f"init={str(path)!r} has {field.name}={theirs}, the draft to train has {ours}: give the options that it was trained with"
            )
    if isinstance(start, LoraParts):
        return start.parts
    own = start.params["own"]
    return init_block_params(jax.random.key(0), config) | own if new_heads else own


def _capture_layers(job: TrainJob, num_layers: int) -> tuple[int, ...]:
    """Layers whose hidden states a draft is trained on. Those of an assistant are what goes into the layer that it asks."""
    if job.kind == UNO:
        return ()
    if job.kind == FROZEN_KV:
        return (max(num_layers - 2, 0),)
    if job.capture_layers:
        return job.capture_layers
    # A target of a few layers has no low, middle and high: they are moved into what there is.
    return tuple(sorted({min(max(i, 0), num_layers - 1) for i in default_capture_layers(num_layers)}))


def cached_layers(captures: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """Layers whose hidden states are cached: those asked for, and that before the last, which a draft over the target's own KV reads."""
    return tuple(sorted({*captures, max(num_layers - 2, 0)}))


def _make_text(job: TrainJob, model: LoadedModel, progress: Callable[..., Iterable]) -> list[TextSequence]:
    tokenizer = check_readable(model, None)
    unseen = word_runs(_unseen_texts(job.unseen))
    text = dataclasses.replace(job.text, max_len=min(job.text.max_len, model.target.facts.context_len))
    file = job.work_dir / "answers.jsonl"
    write_answers(file, model.target, tokenizer, text, unseen=unseen, progress=progress)
    answers = read_answers(file, tokenizer, text, unseen=unseen)
    return answers + text_chunks(job.text_files, tokenizer, text, unseen=unseen)


def _unseen_texts(names: tuple[str, ...] | None) -> list[str]:
    texts = []
    for name in PROMPT_SETS if names is None else names:
        try:
            texts += load_prompt_sets([name])[0].texts
        except ValueError:
            if names is not None:
                raise
            # Not installed, so not measured on here.
    return texts


def _vocabulary(job: TrainJob, target: TargetModel, stored: Sequences) -> Any:
    """i32[Vd], or None for the target's whole vocabulary."""
    facts = target.facts
    if job.kind == UNO or job.draft_vocab_size >= facts.vocab_size:
        return None
    train_on, _ = split_held_out(stored, every=job.options.held_out_every)
    sequences = (TextSequence(stored.tokens[i], int(stored.prompt_lens[i])) for i in train_on)
    return choose_vocabulary(
        sequences, size=job.draft_vocab_size, vocab_size=facts.vocab_size, always=facts.eos_token_ids
    )


def _record_of(draft: pathlib.Path) -> dict[str, Any]:
    """What is known of how another draft came to be."""
    file = draft / RECORD
    return {"draft": draft.name, **(read_json(file) if file.exists() else {})}


def _record(job: TrainJob, model: LoadedModel, stored: Sequences, held_out: dict[str, Any]) -> dict[str, Any]:
    """How the draft came to be, without where on this machine."""
    text = None if job.features is not None else dataclasses.asdict(job.text)
    return {
        "jspec": version("jspec"),
        "model": model.name,
        "kind": job.kind,
        "sequences": len(stored),
        "tokens": sum(len(tokens) for tokens in stored.tokens),
        "text": text,
        "text_files": [pathlib.Path(name).name for name in job.text_files],
        "init": None if job.init is None else _record_of(job.init),
        "options": dataclasses.asdict(job.options),
        "held_out": held_out,
    }
