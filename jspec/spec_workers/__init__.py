"""One file per algorithm. A worker is a value: pure functions and the static facts that the scheduler plans with."""

from collections.abc import Callable
from typing import NamedTuple

from jspec.config import EngineConfig
from jspec.models.target import TargetModel
from jspec.spec_workers.base import DeviceSizes, DeviceState, PhaseOutput, SpecWorker, VerifyKind
from jspec.spec_workers.chain import Proposal, chain
from jspec.spec_workers.ngram import ngram
from jspec.spec_workers.plain import plain


class Algorithm(NamedTuple):
    """An entry of the list of workers."""

    summary: str
    build: Callable[[TargetModel, EngineConfig], SpecWorker]


ALGORITHMS: dict[str, Algorithm] = {
    "plain": Algorithm("no speculation: one token a step", lambda target, config: plain(target)),
    "ngram": Algorithm(
        "prompt lookup on the device: the text so far proposes its continuation",
        lambda target, config: ngram(target, num_draft_tokens=config.num_draft_tokens),
    ),
}


def build_worker(target: TargetModel, config: EngineConfig) -> SpecWorker:
    """The worker that `config.algorithm` names.

    Raises:
        ValueError: unknown algorithm.
    """
    if config.algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm={config.algorithm!r} is unknown: choose one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[config.algorithm].build(target, config)


__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "DeviceSizes",
    "DeviceState",
    "PhaseOutput",
    "Proposal",
    "SpecWorker",
    "VerifyKind",
    "build_worker",
    "chain",
    "ngram",
    "plain",
]
