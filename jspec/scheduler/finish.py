"""Results and aborts at the level of the whole state: settle one launch, free what ended, take back what was asked."""

import enum

import numpy as np

from jspec.scheduler.release import release
from jspec.scheduler.settle import Settled, settle
from jspec.state.dense import replace, set_at
from jspec.state.requests import FinishReason
from jspec.state.results import GenerationBatchResult, Launched
from jspec.state.scheduler_state import SchedulerState


def settle_oldest(state: SchedulerState, result: GenerationBatchResult) -> tuple[SchedulerState, Launched, Settled]:
    """Settles the oldest unsettled launch with its result and releases the requests that ended with it.

    Args:
        state: the scheduler's state, on NumPy arrays; `launched` is not empty.
        result: the outcome of `state.launched[0]`.

    Returns:
        The state, the launch and what it did.

    Clock: see `settle` and `release`.
    """
    launched = state.launched[0]
    requests, ledger, settled = settle(state.requests, state.ledger, launched, result)
    finished = launched.rows[settled.finish_reason != FinishReason.NONE]
    if len(finished):
        requests, ledger = release(requests, ledger, finished)
    state = replace(state, requests=requests, ledger=ledger, launched=state.launched[1:])
    return state, launched, settled


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
