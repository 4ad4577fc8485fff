"""How deep to draft, from what was accepted lately."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class DepthRules:
    """When the depth changes. A slot holds the candidates from a batch size on.

    Source: SGLang's adaptive speculative steps, strategy "ema".
    """

    slots: tuple[tuple[int, tuple[int, ...]], ...]  # (first batch size, candidate depths), both ascending
    smoothing: float = 0.2  # weight of the newest step in the running mean
    warm_up: int = 10  # settled steps before the first decision
    interval: int = 5  # settled steps between decisions
    down_hysteresis: float = -0.25  # added to the bound below which the depth falls
    up_hysteresis: float = 0.0  # added to the bound above which it rises


@dataclasses.dataclass(frozen=True, kw_only=True)
class Depth:
    """The choice of one slot: a value, advanced by `observe`."""

    depth: int  # to draft at
    accepted: float = 0.0  # running mean of accepted drafts a request
    num_settled: int = 0  # steps that went into it


def initial_depths(rules: DepthRules, num_steps: int) -> tuple[Depth, ...]:
    """One choice a slot: the deepest candidate that is at most `num_steps`, else the shallowest.

    The running mean starts where it argues for that depth.
    """
    starts = []
    for _, candidates in rules.slots:
        depth = max((d for d in candidates if d <= num_steps), default=candidates[0])
        starts.append(Depth(depth=depth, accepted=float(depth)))
    return tuple(starts)


def slot_of(rules: DepthRules, batch_size: int) -> int:
    """Index of the slot that a batch of this size falls into."""
    return sum(first <= batch_size for first, _ in rules.slots) - 1


def observe(depths: tuple[Depth, ...], rules: DepthRules, *, batch_size: int, depth: int, accepted: float):
    """The choices after a settled step.

    A candidate `d` whose next lower one is `e` is left downwards when the mean is at most `e - 0.5 + down_hysteresis` (0.5 + down_hysteresis where `e` is 0),
    and upwards when the mean exceeds `d - 0.5 + up_hysteresis`. From 0 it therefore rises at every decision: that is how drafting is tried again.

    Args:
        depths: one a slot.
        rules: see there.
        batch_size: rows of the step.
        depth: what the step drafted at. It was launched before the newest decision, perhaps: its count says what such a depth brings, at most.
        accepted: accepted drafts a request, mean over the step's live rows.
    """
    slot = slot_of(rules, batch_size)
    old, candidates = depths[slot], rules.slots[slot][1]
    mean = old.accepted + rules.smoothing * (accepted - old.accepted)
    new = dataclasses.replace(old, accepted=mean, num_settled=old.num_settled + 1)
    since = new.num_settled - rules.warm_up
    if depth == old.depth and since >= 0 and since % rules.interval == 0:
        new = dataclasses.replace(new, depth=_decide(new, candidates, rules))
    return (*depths[:slot], new, *depths[slot + 1 :])


def _decide(now: Depth, candidates: tuple[int, ...], rules: DepthRules) -> int:
    def falls_to(lower: int) -> bool:
        return now.accepted <= (lower - 0.5 if lower else 0.5) + rules.down_hysteresis

    place = candidates.index(now.depth)
    while place > 0 and falls_to(candidates[place - 1]):
        place -= 1
    if candidates[place] < now.depth:
        return candidates[place]
    if place + 1 < len(candidates) and now.accepted > now.depth - 0.5 + rules.up_hysteresis:
        return candidates[place + 1]  # one step at a time: what lies beyond was never seen
    return now.depth
