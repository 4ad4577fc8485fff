"""How deep each launch drafts: chosen from settled steps only, so that no launch waits for another."""

import numpy as np

from jspec.scheduler import Depth, DepthRules, observe, slot_of
from jspec.state.batches import ForwardMode, ScheduleBatch
from jspec.state.results import Launched


def depth_of(depths: tuple[Depth, ...], rules: DepthRules, batch: ScheduleBatch, *, full: int) -> int:
    """The depth that `batch` is to draft at; `full` where nothing is to be chosen."""
    if not depths or batch.forward_mode is not ForwardMode.DECODE:
        return full
    return depths[slot_of(rules, batch.rows.shape[0])].depth


def after_settle(
    depths: tuple[Depth, ...], rules: DepthRules, launched: Launched, correct: np.ndarray, *, depth: int
) -> tuple[Depth, ...]:
    """The choices after a launch was settled. `correct`: accepted drafts of its live rows; `depth`: what it drafted at."""
    if not depths or launched.forward_mode is not ForwardMode.DECODE or not correct.size:
        return depths
    return observe(depths, rules, batch_size=launched.rows.shape[0], depth=depth, accepted=float(correct.mean()))
