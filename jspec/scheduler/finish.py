"""Results and aborts at the level of the whole state: settle one launch, free what ended, take back what was asked."""

import enum
from collections.abc import Mapping

import numpy as np

from jspec.scheduler.prefix_cache import cache_prefix
from jspec.scheduler.release import release
from jspec.scheduler.settle import Settled, settle
from jspec.state.dense import replace, set_at
from jspec.state.requests import FinishReason
from jspec.state.results import GenerationBatchResult, Launched
from jspec.state.scheduler_state import SchedulerState


def settle_oldest(state: SchedulerState, result: GenerationBatchResult) -> tuple[SchedulerState, Launched, Settled]:
    """Settles the oldest unsettled launch with its result, and hands the pages of prompts that are now computed to the prefix cache.

    Args:
        state: the scheduler's state, on NumPy arrays; `launched` is not empty.
        result: the outcome of `state.launched[0]`.

    Returns:
        The state, the launch and what it did. Requests that ended still hold their rows: `retire` must follow.

    Clock: see `settle` and `cache_prefix`.
    """
    launched = state.launched[0]
    requests, ledger, settled = settle(state.requests, state.ledger, launched, result)
    cache = state.prefix_cache
    if launched.forward_mode.is_prefill:
        page = ledger.page_size
        going_on = settled.live & (settled.finish_reason == FinishReason.NONE) & (launched.end_lens >= page)
        for i in np.nonzero(going_on)[0].tolist():
            row = int(launched.rows[i])
            keys = state.admitted[int(requests.serial[row])].page_keys[: int(launched.end_lens[i]) // page]
            ledger, cache = cache_prefix(ledger, cache, row, keys, running=True)
    state = replace(state, requests=requests, ledger=ledger, prefix_cache=cache, launched=state.launched[1:])
    return state, launched, settled


def retire(state: SchedulerState, page_keys: Mapping[int, tuple[bytes, ...]]) -> SchedulerState:
    """Frees requests that have ended. What they leave to the prefix cache is named by its content, which the shell knows.

    Args:
        state: the scheduler's state, on NumPy arrays.
        page_keys: by row, names of the pages that the request leaves behind, from the first on: at most its committed pages; () for one that
            failed.

    Clock: see `cache_prefix` and `release`.
    Source: SGLang `release_kv_cache`, `cache_finished_req`.
    """
    ledger, cache, admitted = state.ledger, state.prefix_cache, state.admitted
    for row, keys in page_keys.items():
        keys = keys[: int(ledger.kv_committed_len[row]) // ledger.page_size]
        ledger, cache = cache_prefix(ledger, cache, row, keys, running=False)
        admitted = admitted.remove(int(state.requests.serial[row]))
    requests, ledger = release(state.requests, ledger, np.array(list(page_keys), np.int32))
    return replace(state, requests=requests, ledger=ledger, prefix_cache=cache, admitted=admitted)


class Aborted(enum.Enum):
    """What `abort` found."""

    UNKNOWN = "unknown"  # never submitted, or ended already: nothing changed
    WAITING = "waiting"  # held no row; it has left the queue
    RUNNING = "running"  # ends at its next settle, whose tokens it keeps


def abort(state: SchedulerState, serial: int) -> tuple[SchedulerState, Aborted]:
    """Ends a request: at once if it waits, at its next settle if it runs, since a launch may be under way with it. Idempotent.

    Args:
        state: the scheduler's state, on NumPy arrays.
        serial: submission number, from 1.

    Clock: `to_finish`.
    Source: SGLang `Scheduler.abort_request` (waiting requests leave at once, running ones get `to_finish`).
    """
    rows = np.nonzero(state.requests.serial == serial)[0]
    if serial > 0 and len(rows):
        requests = replace(state.requests, to_finish=set_at(state.requests.to_finish, rows, True))
        return replace(state, requests=requests), Aborted.RUNNING
    for request in state.waiting:
        if request.serial == serial:
            return replace(state, waiting=state.waiting.remove(request)), Aborted.WAITING
    return state, Aborted.UNKNOWN
