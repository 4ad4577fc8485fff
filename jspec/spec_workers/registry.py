"""The list of workers: what each is for, which options it heeds, and how it is built of a configuration."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

from jspec.config import EngineConfig
from jspec.corpus import check_is_file, read_documents
from jspec.models.draft_files import AnyDraft, load_draft
from jspec.models.loading import SMOLLM2, model_name
from jspec.models.lora import load_lora
from jspec.models.shipped_drafts import find_draft
from jspec.models.target import TargetModel
from jspec.models.tokenizer import Tokenizer
from jspec.spec_workers.base import SpecWorker
from jspec.spec_workers.dflash import dflash
from jspec.spec_workers.dspark import dspark
from jspec.spec_workers.dspark_budget import load_sps, load_sts
from jspec.spec_workers.eagle import eagle
from jspec.spec_workers.eagle_sizes import EagleSizes
from jspec.spec_workers.frozen_kv_mtp import frozen_kv_mtp
from jspec.spec_workers.multi_layer_eagle import multi_layer_eagle
from jspec.spec_workers.ngram import ngram
from jspec.spec_workers.ngram_corpus import ngram_corpus
from jspec.spec_workers.plain import plain
from jspec.spec_workers.uno import uno

ENTRY_POINTS = "jspec.algorithms"
"""Group of entry points under which a package offers an `Algorithm` of its own."""


class Algorithm(NamedTuple):
    """An entry of the list of workers."""

    summary: str
    build: Callable[..., SpecWorker]  # `build(target: TargetModel, config: EngineConfig)`
    draft_kinds: tuple[str, ...] = ()  # kinds of draft model it runs; () where it needs none
    options: tuple[str, ...] = ()  # fields of EngineConfig that it heeds
    reads_text: bool = False  # it is built with the model's tokenizer, too: `build(target, config, tokenizer)`


def _ngram(target: TargetModel, config: EngineConfig) -> SpecWorker:
    return ngram(target, **_given(config, "num_draft_tokens"))


def _ngram_corpus(target: TargetModel, config: EngineConfig, tokenizer: Tokenizer | None) -> SpecWorker:
    options = _given(config, "num_draft_tokens", "corpus_share")
    if config.corpus is not None:
        encode = None if tokenizer is None else functools.partial(tokenizer.encode, add_special_tokens=False)
        options["documents"] = read_documents(config.corpus, vocab_size=target.facts.vocab_size, encode=encode)
    return ngram_corpus(target, name=config.algorithm, **options)


def _eagle(target: TargetModel, config: EngineConfig) -> SpecWorker:
    depths: tuple[int, ...] = tuple(sorted({d for _, slot in config.adaptive_steps for d in slot}))
    steps = _given(config, "num_steps", "num_draft_tokens")
    if depths:
        if "num_steps" in steps and config.num_steps not in depths:
            raise ValueError(f"num_steps={config.num_steps} must be one of the depths of adaptive_steps={depths}")
        steps = {"num_steps": depths[-1]}
    sizes = EagleSizes(topk=config.topk, depths=depths, min_draft_prob=config.min_draft_prob, **steps)
    draft = _load(target, config)
    return eagle(target, draft, name=config.algorithm, sizes=sizes, **_acceptance(config))


def _multi_layer(target: TargetModel, config: EngineConfig) -> SpecWorker:
    draft = _load(target, config)
    steps = draft.facts.num_modules if config.num_steps is None else config.num_steps
    if config.num_draft_tokens not in (None, steps + 1):
        raise ValueError(
            f"num_draft_tokens={config.num_draft_tokens} must be num_steps + 1 = {steps + 1} for {config.algorithm!r}: leave it out"
        )
    return multi_layer_eagle(target, draft, num_steps=steps, **_acceptance(config))


def _dflash(target: TargetModel, config: EngineConfig) -> SpecWorker:
    draft = _block(target, config)
    return dflash(target, draft, cache=config.draft_cache, **_acceptance(config))


def _dspark(target: TargetModel, config: EngineConfig) -> SpecWorker:
    draft = _block(target, config)
    sts = None if config.sts is None else load_sts(config.sts, num_drafts=draft.config.num_drafts)
    return dspark(
        target,
        draft,
        ragged_verify=config.ragged_verify,
        sps=None if config.sps is None else load_sps(config.sps),
        temperatures=None if sts is None else sts.temperatures,
        cache=config.draft_cache,
    )


def _block(target: TargetModel, config: EngineConfig) -> Any:
    draft: Any = _load(target, config)
    width = draft.config.num_drafts + 1
    if config.num_draft_tokens not in (None, width):
        raise ValueError(
            f"num_draft_tokens={config.num_draft_tokens} must be {width}, what the draft's blocks hold with the pending token: leave it out"
        )
    return draft


def _frozen_kv(target: TargetModel, config: EngineConfig) -> SpecWorker:
    sizes = EagleSizes(topk=config.topk, **_given(config, "num_steps", "num_draft_tokens"))
    return frozen_kv_mtp(target, _load(target, config), sizes=sizes, lossy_threshold=config.lossy_threshold)


def _uno(target: TargetModel, config: EngineConfig) -> SpecWorker:
    # A model elsewhere may be called anything.
    lora = load_lora(_draft_path(config), target, base=model_name(SMOLLM2) if config.model == SMOLLM2 else "")
    options: dict[str, Any] = {"topk": config.topk, "rejection_sampling": config.rejection_sampling}
    options["block_size" if config.topk == 1 else "num_draft_tokens"] = config.num_draft_tokens
    return uno(target, lora, **options)


def _acceptance(config: EngineConfig) -> dict[str, Any]:
    return {"rejection_sampling": config.rejection_sampling, "lossy_threshold": config.lossy_threshold}


def _given(config: EngineConfig, *names: str) -> dict[str, Any]:
    """The options that were set: a factory knows its defaults."""
    return {name: value for name in names if (value := getattr(config, name)) is not None}


def _load(target: TargetModel, config: EngineConfig) -> Any:
    path = _draft_path(config)
    dtype = target.embedding(target.params).dtype
    draft: AnyDraft = load_draft(path, target, dtype=dtype)
    kinds = algorithms()[config.algorithm].draft_kinds
    if draft.config.kind not in kinds:
        raise ValueError(
            f"draft={str(path)!r} is of kind {draft.config.kind!r}, but algorithm={config.algorithm!r} runs {' or '.join(map(repr, kinds))}"
        )
    return draft


def _draft_path(config: EngineConfig) -> pathlib.Path:
    return find_draft(config.algorithm, config.model) if config.draft is None else pathlib.Path(config.draft)


_DEPTH = ("num_steps", "num_draft_tokens", "draft", "rejection_sampling", "lossy_threshold")

ALGORITHMS: dict[str, Algorithm] = {
    "plain": Algorithm("no speculation: one token a step", lambda target, config: plain(target)),
    "ngram": Algorithm(
        "prompt lookup on the device: the text so far proposes its continuation", _ngram, options=("num_draft_tokens",)
    ),
    "ngram-corpus": Algorithm(
        "prompt lookup in what other requests said and in a file, on the host, and in the text so far, as one tree",
        _ngram_corpus,
        options=("num_draft_tokens", "corpus", "corpus_share"),
        reads_text=True,
    ),
    "eagle3": Algorithm(
        "a draft layer over fused features of the target, as a chain or a tree",
        _eagle,
        ("eagle3",),
        (*_DEPTH, "topk", "adaptive_steps", "min_draft_prob"),
    ),
    "eagle": Algorithm(
        "EAGLE-1/2: a draft layer over the target's last hidden state, with the target's head",
        _eagle,
        ("eagle",),
        (*_DEPTH, "topk", "adaptive_steps", "min_draft_prob"),
    ),
    "multi-layer-eagle": Algorithm(
        "one draft module for each position ahead, all run right after the verify",
        _multi_layer,
        ("multi-layer",),
        _DEPTH,
    ),
    "dflash": Algorithm(
        "a few draft layers over the target's hidden states fill in a block of tokens at once",
        _dflash,
        ("dflash",),
        ("num_draft_tokens", "draft", "rejection_sampling", "lossy_threshold", "draft_cache"),
    ),
    "dspark": Algorithm(
        "DFlash's block, walked by a Markov head; of all drafts it verifies the likeliest, as many as pay",
        _dspark,
        ("dspark",),
        ("num_draft_tokens", "draft", "ragged_verify", "sps", "sts", "draft_cache"),
    ),
    "frozen-kv-mtp": Algorithm(
        "an assistant without KV of its own asks the target's, as a chain or a tree",
        _frozen_kv,
        ("frozen-kv-mtp",),
        ("num_steps", "num_draft_tokens", "topk", "draft", "lossy_threshold"),
    ),
    "uno": Algorithm(
        "the model drafts for itself, rows of noise going through an adapter: two forwards a step, two tokens at least",
        _uno,
        ("uno",),
        ("num_draft_tokens", "topk", "draft", "rejection_sampling"),
    ),
}


@functools.cache
def algorithms() -> Mapping[str, Algorithm]:
    """Every worker by name: those of jspec, and those that installed packages offer.

    Raises:
        ValueError: a package offers a name that is taken.
        TypeError: it offers something that is no `Algorithm`.
    """
    found = dict(ALGORITHMS)
    for point in entry_points(group=ENTRY_POINTS):
        if point.name in found:
            raise ValueError(f"{_offer(point)}: the name is taken: the package must choose another")
        algorithm = point.load()
        if not isinstance(algorithm, Algorithm):
            raise TypeError(
                f"{_offer(point)} is a {type(algorithm).__name__}: it must be a jspec.spec_workers.Algorithm"
            )
        found[point.name] = algorithm
    return found


def _offer(point: EntryPoint) -> str:
    return f"entry point {point.name!r} of group {ENTRY_POINTS!r} ({point.value})"


def build_worker(target: TargetModel, config: EngineConfig, tokenizer: Tokenizer | None = None) -> SpecWorker:
    """The worker that `config.algorithm` names. `tokenizer`: the model's, for those that read text.

    Raises:
        ValueError: unknown algorithm, an option that it does not know, sizes or a draft that do not fit.
        FileNotFoundError: no draft, or no corpus.
    """
    check_algorithm(config)
    chosen = algorithms()[config.algorithm]
    return chosen.build(target, config, tokenizer) if chosen.reads_text else chosen.build(target, config)


def check_algorithm(config: EngineConfig) -> None:
    """Checks what can be checked before anything is loaded.

    Raises:
        ValueError: an unknown algorithm, an option that it would not heed, or a draft that is needed and not given.
        FileNotFoundError: the draft's directory, or the corpus, does not exist.
    """
    if config.algorithm not in algorithms():
        raise ValueError(f"algorithm={config.algorithm!r} is unknown: choose one of {', '.join(algorithms())}")
    for name in _unheeded(config):
        who = [repr(other) for other, algorithm in algorithms().items() if name in algorithm.options]
        raise ValueError(
            f"{name}={getattr(config, name)} means nothing to algorithm={config.algorithm!r}: leave it out, or choose {' or '.join(who)}"
        )
    if algorithms()[config.algorithm].draft_kinds and not (path := _draft_path(config)).is_dir():
        raise FileNotFoundError(f"draft={str(path)!r} is no directory: give the one that holds the draft's config.json")
    if config.corpus is not None:
        check_is_file(config.corpus)


def for_algorithm(config: EngineConfig, algorithm: str) -> EngineConfig:
    """`config` for another algorithm, without the options that this one would not heed: for comparing several."""
    config = dataclasses.replace(config, algorithm=algorithm)
    unheeded = _unheeded(config)
    kept = {field.name: getattr(config, field.name) for field in dataclasses.fields(EngineConfig)}
    return EngineConfig(**{name: value for name, value in kept.items() if name not in unheeded})


def _unheeded(config: EngineConfig) -> list[str]:
    """Options of workers that are set and that the chosen one does not know."""
    known = algorithms()[config.algorithm].options if config.algorithm in algorithms() else ()
    defaults = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    names = sorted({name for algorithm in algorithms().values() for name in algorithm.options} - set(known))
    return [name for name in names if getattr(config, name) != defaults[name]]
