"""When pages run short: cached prefixes go first, then requests, which wait again and lose nothing but a step under way."""

import dataclasses
from typing import NamedTuple

import numpy as np
from pyrsistent import PDeque, pdeque

from jspec.scheduler.prefix_cache import evict, evictable
from jspec.scheduler.release import release
from jspec.scheduler.reserve import is_short, pages_short
from jspec.state.dense import replace
from jspec.state.requests import FinishReason, Waiting, is_filling
from jspec.state.scheduler_state import Limits, SchedulerState

RETRACT_DECODE_STEPS = 20
"""Tokens that each surviving request is expected to want at once, in the ratio after a retraction (SGLang's constant)."""


class Left(NamedTuple):
    """A request that lost its row in a plan."""

    row: int
    serial: int
    output_len: int  # tokens it has; a step under way is not among them
    reason: FinishReason  # NONE: it was retracted, and waits again
    for_priority: bool = False  # it makes way for a request of higher priority; else pages ran short


def enqueue(waiting: PDeque, request: Waiting, *, first: bool = False) -> PDeque:
    """The queue with one more request: behind those of its priority, or `first` among them. Those of a higher one stay ahead."""
    ahead = [other for other in waiting if other.priority > request.priority] if first else None
    if ahead is None and (not waiting or waiting.right.priority >= request.priority):
        return waiting.append(request)
    if ahead is None:
        ahead = [other for other in waiting if other.priority >= request.priority]
    if not ahead:
        return waiting.appendleft(request)
    behind = list(waiting)[len(ahead) :]
    return pdeque([*ahead, request, *behind])


def leave(state: SchedulerState, row: int, reason: FinishReason) -> tuple[SchedulerState, Left]:
    """Takes a request off its row: for good, or (NONE) to the head of the queue with the tokens it has. A result under way will find no one.

    Clock: see `release`. What the prefix cache holds of its prompt stays there.
    Source: SGLang `release_req`, `reset_for_retract`.
    """
    serial, output_len = int(state.requests.serial[row]), int(state.requests.output_len[row])
    waiting = state.waiting
    if reason is FinishReason.NONE:
        again = dataclasses.replace(state.admitted[serial], output_len=output_len)
        waiting = enqueue(waiting, again, first=True)
    requests, ledger = release(state.requests, state.ledger, np.array([row], np.int32))
    state = replace(state, requests=requests, ledger=ledger, waiting=waiting, admitted=state.admitted.remove(serial))
    return state, Left(row, serial, output_len, reason)


def last_to_keep(state: SchedulerState, rows: np.ndarray) -> int:
    """Which of the rows is to go first: of the lowest priority the one with the fewest outputs, among equals the longest prompt, then the newest. One that
    is to be aborted goes before all."""
    requests = state.requests
    keys = (
        -requests.serial[rows],
        -requests.prompt_len[rows],
        requests.output_len[rows],
        requests.priority[rows],
        ~requests.to_finish[rows],
    )
    return int(rows[np.lexsort(keys)[0]])


def retract(state: SchedulerState, row: int) -> tuple[SchedulerState, Left]:
    """Takes a request off its row, to wait again; one that is to be aborted ends at once."""
    return leave(state, row, FinishReason.ABORT if state.requests.to_finish[row] else FinishReason.NONE)


def make_room(
    state: SchedulerState, active: np.ndarray, *, limits: Limits
) -> tuple[SchedulerState, np.ndarray, tuple[Left, ...]]:
    """Sees to it that the reserves of the active rows fit: from free pages, then from the prefix cache, then from other requests.

    Args:
        state: the scheduler's state, on NumPy arrays.
        active: bool[R], rows about to be launched.
        limits: numbers to plan with.

    Returns:
        The state, the rows that can be launched, and who had to leave.

    Ensures: the reserves of the rows returned fit. The last request is not retracted: it waits for those that are about to end, and alone it ends with
        OUT_OF_PAGES, which the check at submission prevents.
    Source: SGLang `check_decode_mem`, `retract_decode`.
    """
    if not is_short(state.ledger, active, reserve_len=limits.reserve_len).any():
        return state, active, ()
    need = pages_short(state.ledger, active, reserve_len=limits.reserve_len)
    left: list[Left] = []
    while need > state.ledger.num_free + (spare := int(evictable(state.ledger, state.prefix_cache).sum())):
        rows = np.nonzero(active | is_filling(state.requests, state.ledger.kv_committed_len))[0]
        row = last_to_keep(state, rows)
        if len(rows) > 1:
            state, gone = retract(state, row)
        elif (state.requests.serial > 0).sum() > 1:
            gone = None
        else:
            state, gone = leave(state, row, FinishReason.OUT_OF_PAGES)
        if gone is not None:
            left.append(gone)
        active = active.copy()
        active[row] = False
        need = pages_short(state.ledger, active, reserve_len=limits.reserve_len)
    if short := max(int(need) - int(state.ledger.num_free), 0):
        ledger, cache = evict(state.ledger, state.prefix_cache, min(short, spare))
        state = replace(state, ledger=ledger, prefix_cache=cache)
    if any(gone.reason is FinishReason.NONE for gone in left):
        ratio = max(np.float32(limits.min_new_token_ratio), ratio_after_retraction(state, active))
        state = replace(state, new_token_ratio=ratio)
    return state, active, tuple(left)


def ratio_after_retraction(state: SchedulerState, active: np.ndarray) -> np.float32:
    """Share of its tokens that a request is now expected to want: as far as the survivors are, and a little more."""
    requests = state.requests
    wanted = int(requests.output_len[active].sum()) + RETRACT_DECODE_STEPS * int(active.sum())
    return np.float32(min(1.0, wanted / (int(requests.max_new_tokens[active].sum()) + 1)))


def decayed_ratio(ratio: np.float32, limits: Limits) -> np.float32:
    """The ratio after one more decode plan without a retraction."""
    step = (limits.new_token_ratio - limits.min_new_token_ratio) / limits.ratio_steps
    return np.float32(max(limits.min_new_token_ratio, float(ratio) - step))
