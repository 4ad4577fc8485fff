"""One file per algorithm. A worker is a value: pure functions and the static facts that the scheduler plans with."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

from jspec.config import EngineConfig
from jspec.models.draft import DraftModel
from jspec.models.eagle_files import load_draft
from jspec.models.shipped_drafts import find_draft
from jspec.models.target import TargetModel
from jspec.spec_workers.base import DeviceSizes, DeviceState, PhaseOutput, SpecWorker, VerifyKind
from jspec.spec_workers.chain import Proposal, chain
from jspec.spec_workers.eagle import eagle
from jspec.spec_workers.eagle_sizes import EagleSizes
from jspec.spec_workers.multi_layer_eagle import multi_layer_eagle
from jspec.spec_workers.ngram import ngram
from jspec.spec_workers.plain import plain


class Algorithm(NamedTuple):
    """An entry of the list of workers."""

    summary: str
    build: Callable[[TargetModel, EngineConfig], SpecWorker]
    draft_kinds: tuple[str, ...] = ()  # kinds of draft model it runs; () where it needs none
    options: tuple[str, ...] = ()  # fields of EngineConfig that it heeds


def _ngram(target: TargetModel, config: EngineConfig) -> SpecWorker:
    return ngram(target, **_given(config, "num_draft_tokens"))


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


def _acceptance(config: EngineConfig) -> dict[str, Any]:
    return {"rejection_sampling": config.rejection_sampling, "lossy_threshold": config.lossy_threshold}


def _given(config: EngineConfig, *names: str) -> dict[str, int]:
    """The options that were set: a factory knows its defaults."""
    return {name: value for name in names if (value := getattr(config, name)) is not None}


def _load(target: TargetModel, config: EngineConfig) -> DraftModel:
    path = _draft_path(config)
    dtype = target.embedding(target.params).dtype
    draft = load_draft(path, target, dtype=dtype)
    kinds = ALGORITHMS[config.algorithm].draft_kinds
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
}


def build_worker(target: TargetModel, config: EngineConfig) -> SpecWorker:
    """The worker that `config.algorithm` names.

    Raises:
        ValueError: unknown algorithm, an option that it does not know, sizes or a draft that do not fit.
        FileNotFoundError: no draft.
    """
    check_algorithm(config)
    return ALGORITHMS[config.algorithm].build(target, config)


def check_algorithm(config: EngineConfig) -> None:
    """Checks what can be checked before anything is loaded.

    Raises:
        ValueError: an unknown algorithm, an option that it would not heed, or a draft that is needed and not given.
        FileNotFoundError: the draft's directory does not exist.
    """
    if config.algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm={config.algorithm!r} is unknown: choose one of {', '.join(ALGORITHMS)}")
    for name in _unheeded(config):
        who = [repr(other) for other, algorithm in ALGORITHMS.items() if name in algorithm.options]
        raise ValueError(
            f"{name}={getattr(config, name)} means nothing to algorithm={config.algorithm!r}: leave it out, or choose {' or '.join(who)}"
        )
    if ALGORITHMS[config.algorithm].draft_kinds and not (path := _draft_path(config)).is_dir():
        raise FileNotFoundError(f"draft={str(path)!r} is no directory: give the one that holds the draft's config.json")


def for_algorithm(config: EngineConfig, algorithm: str) -> EngineConfig:
    """`config` for another algorithm, without the options that this one would not heed: for comparing several."""
    config = dataclasses.replace(config, algorithm=algorithm)
    unheeded = _unheeded(config)
    kept = {field.name: getattr(config, field.name) for field in dataclasses.fields(EngineConfig)}
    return EngineConfig(**{name: value for name, value in kept.items() if name not in unheeded})


def _unheeded(config: EngineConfig) -> list[str]:
    """Options of workers that are set and that the chosen one does not know."""
    known = ALGORITHMS[config.algorithm].options if config.algorithm in ALGORITHMS else ()
    defaults = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    names = sorted({name for algorithm in ALGORITHMS.values() for name in algorithm.options} - set(known))
    return [name for name in names if getattr(config, name) != defaults[name]]


__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "DeviceSizes",
    "DeviceState",
    "EagleSizes",
    "PhaseOutput",
    "Proposal",
    "SpecWorker",
    "VerifyKind",
    "build_worker",
    "chain",
    "check_algorithm",
    "eagle",
    "for_algorithm",
    "multi_layer_eagle",
    "ngram",
    "plain",
]
