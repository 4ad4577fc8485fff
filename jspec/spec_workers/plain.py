"""Decoding without speculation, as a worker of verify width 1."""

from jspec.models.target import TargetModel
from jspec.spec_workers.base import SpecWorker
from jspec.spec_workers.chain import chain


def plain(target: TargetModel) -> SpecWorker:
    """One token a step: the identity element of speculation, and the baseline of every equality test.

        resolve -> forward -> sample -> PUBLISH, stash

    Args:
        target: the model.
    """
    return chain("plain", target)
