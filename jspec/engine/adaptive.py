"""How deep each launch drafts: chosen from settled steps only, so that no launch waits for another."""

import numpy as np

from jspec.scheduler import Depth, DepthRules, observe, slot_of


def depth_of(depths: tuple[Depth, ...], rules: DepthRules, batch_size: int, *, full: int) -> int:
    """The depth that a decode batch is to draft at; `full` where nothing is to be chosen."""
    return depths[slot_of(rules, batch_size)].depth if depths else full


def after_settle(
    depths: tuple[Depth, ...], rules: DepthRules, correct: np.ndarray, *, batch_size: int, depth: int
) -> tuple[Depth, ...]:
    """The choices after a decode launch was settled. `correct`: accepted drafts of its live rows; `depth`: what it drafted at."""
    if not correct.size:
        return depths
    return observe(depths, rules, batch_size=batch_size, depth=depth, accepted=float(correct.mean()))
