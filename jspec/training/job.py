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
from jspec.models.eagle_draft import KINDS as EAGLE_KINDS
from jspec.models.eagle_draft import EagleConfig
from jspec.models.frozen_kv_draft import FrozenKVConfig
from jspec.models.json_files import read_json
from jspec.models.llama import LlamaConfig
from jspec.models.loading import LoadedModel
from jspec.models.target import TargetModel
from jspec.models.tensor_files import RECORD, check_storage
from jspec.training.batches import split_held_out
from jspec.training.features import write_features
from jspec.training.options import TrainOptions
from jspec.training.prompts import word_runs
from jspec.training.shards import Sequences, open_shards
from jspec.training.text import TextOptions, TextSequence, read_answers, text_chunks, write_answers
from jspec.training.train import train
from jspec.training.vocabulary import choose_vocabulary

FROZEN_KV = FrozenKVConfig.kind
KINDS = (*EAGLE_KINDS, *BLOCK_KINDS, FROZEN_KV)
"""Kinds of draft that can be trained."""
ONLY_FOR = {
    "capture_layers": ("eagle3", *BLOCK_KINDS),
    "num_modules": ("multi-layer",),
    "chained": ("multi-layer",),
    "num_layers": (*BLOCK_KINDS, FROZEN_KV),
    "hidden_size": (FROZEN_KV,),
    "block_size": BLOCK_KINDS,
    "mask_token_id": BLOCK_KINDS,
    "window": BLOCK_KINDS,
    "markov_rank": ("dspark",),
    "markov_head": ("dspark",),
}
"""Fields of `TrainJob` that shape only some kinds of draft."""

Progress = Callable[[str], Callable[..., Iterable]]
"""`progress(what)(iterable, total=n)` yields the items of `iterable`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainJob:
    """What to train, on what, and where to put it.

    Raises:
        ValueError: naming the field, its value and the rule.
    """

    kind: str
    """One of `KINDS`: see `EagleConfig` and `BlockDraftConfig`."""
    work_dir: pathlib.Path
    out: pathlib.Path | None = None
    """Directory of the draft; by default `draft` in `work_dir`."""
    text: TextOptions = dataclasses.field(default_factory=TextOptions)
    text_files: tuple[str, ...] = ()
    features: pathlib.Path | None = None
    """Shards that exist already: then no text is made and the target is not run."""
    unseen: tuple[str, ...] | None = None
    """Prompt sets that training must not see. None: every one that is installed."""
    capture_layers: tuple[int, ...] | None = None
    """Of "eagle3", "dflash" and "dspark"; by default `default_capture_layers`."""
    draft_vocab_size: int = 8192
    """At most the target's vocabulary is used."""
    intermediate_size: int | None = None
    """By default the target's."""
    num_modules: int = 3
    """Of "multi-layer"."""
    chained: bool = False
    """Of "multi-layer"."""
    num_layers: int = 2
    """Of "dflash", "dspark" and "frozen-kv-mtp"."""
    hidden_size: int = 256
    """Of "frozen-kv-mtp"."""
    block_size: int = 8
    """Of "dflash", the pending token among them, and of "dspark", which proposes so many."""
    mask_token_id: int = 0
    """Of "dflash" and "dspark": a token that no text holds."""
    window: int | None = None
    """Of "dflash" and "dspark": positions that a row sees, see `BlockDraftConfig.window`. None: all."""
    markov_rank: int = 32
    """Of "dspark"."""
    markov_head: str = "vanilla"
    """Of "dspark"."""
    init: pathlib.Path | None = None
    """A draft to start from instead of the target's own layer: same sizes and vocabulary."""
    storage: str = "float32"
    options: TrainOptions = dataclasses.field(default_factory=TrainOptions)

    def __post_init__(self):
        check_storage(self.storage)
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} must be one of {', '.join(KINDS)}")
        if self.features is not None and self.text_files:
            raise ValueError(
                f"features={str(self.features)!r} and text_files={self.text_files} both say what to train on: give one of them"
            )
        for name in self.unseen or ():
            if name not in PROMPT_SETS:
                raise ValueError(f"unseen={name!r} is unknown: choose among {', '.join(PROMPT_SETS)}")


class JobResult(NamedTuple):
    """A draft, where it lies, and its figures."""

    draft: AnyDraft
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
    start = None if job.init is None else load_draft(job.init, model.target, dtype="float32")
    token_ids = _vocabulary(job, model.target, stored) if start is None else ids_of(start)
    config = draft_config(
        job,
        model.target,
        capture_layers=captures,
        draft_vocab_size=facts.vocab_size if token_ids is None else len(token_ids),
    )
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


def ids_of(draft: AnyDraft) -> Any:
    """i32[Vd], or None where the draft's vocabulary is the target's."""
    return draft.params["shared"].get("token_ids")


def _own(start: AnyDraft, config: Any, path: pathlib.Path | None) -> Any:
    """Parameters to start from. A "dspark" draft may start from a "dflash" one: its heads are new then.

    Raises:
      ValueError: `start` has other sizes than what is to be trained.
    """
    new_heads = config.kind == "dspark" and start.config.kind == "dflash"
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
    own = start.params["own"]
    return init_block_params(jax.random.key(0), config) | own if new_heads else own


def _capture_layers(job: TrainJob, num_layers: int) -> tuple[int, ...]:
    """Layers whose hidden states a draft is trained on. Those of an assistant are what goes into the layer that it asks."""
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
    if job.draft_vocab_size >= facts.vocab_size:
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
