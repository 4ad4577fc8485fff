"""What runs next: a prefill if one can start, else one step of every running request that still needs it."""

import numpy as np

from jspec.scheduler.admit import admit
from jspec.scheduler.reserve import Reserved, max_new_pages, reserve
from jspec.state.batches import ForwardMode, ScheduleBatch
from jspec.state.dense import add_at, namespace, replace, set_at
from jspec.state.ledger import KVLedger, num_pages_held
from jspec.state.requests import RequestTable
from jspec.state.results import Launched, record
from jspec.state.scheduler_state import Limits, SchedulerState


def launchable(requests: RequestTable, launched: tuple[Launched, ...]):
    """`bool[R]` running rows whose unsettled launches do not already bring their last token: each of these emits at least one."""
    xp = namespace(requests.output_len)
    expected = requests.output_len
    for item in launched:
        in_flight = (requests.epoch[item.rows] == item.epochs) & (item.rows > 0)
        expected = add_at(expected, item.rows, xp.astype(in_flight, xp.int32))
    return (requests.serial > 0) & (expected < requests.max_new_tokens)


def _reserve_where_short(ledger: KVLedger, active: np.ndarray, limits: Limits) -> tuple[KVLedger, Reserved]:
    """`reserve`, unless every reserve is in place already, as in most steps of a small batch: then it would change nothing."""
    sizes = {"alloc_len": limits.alloc_len, "depth": limits.depth}
    short = ledger.kv_committed_len + limits.reserve_len > ledger.kv_allocated_len
    if (short & active).any():
        return reserve(ledger, active, **sizes)
    none = np.full((active.shape[0], max_new_pages(page_size=ledger.page_size, **sizes)), -1, np.int32)
    return ledger, Reserved(active, num_pages_held(ledger), none)


def plan_decode(state: SchedulerState, *, limits: Limits) -> tuple[SchedulerState, ScheduleBatch | None]:
    """Plans one DECODE step of every launchable row, or None if there is none.

    Args:
        state: the scheduler's state, on NumPy arrays.
        limits: numbers to plan with.

    Returns:
        The state and the batch; its `new_pages` is the page-table delta. The batch carries no frontier: the launch reads it from the FutureMap.

    Ensures: `kv_allocated_len >= kv_committed_len + reserve_len` for every row of the batch.
    Clock: `kv_allocated_len` through `reserve`; `last_launch`.
    """
    active = launchable(state.requests, state.launched)
    ledger, reserved = _reserve_where_short(state.ledger, active, limits)
    rows = np.nonzero(reserved.granted)[0].astype(np.int32)
    if not len(rows):
        return state, None
    forward_iter = state.forward_iter + np.int32(1)
    zeros = np.zeros(len(rows), np.int32)
    batch = ScheduleBatch(
        forward_iter=forward_iter,
        rows=rows,
        epochs=state.requests.epoch[rows],
        serials=state.requests.serial[rows],
        prefix_lens=zeros,
        extend_lens=zeros,
        expected_iter=state.requests.last_launch[rows],
        first_page=reserved.first_page[rows],
        new_pages=reserved.new_pages[rows],
        kv_bound=ledger.kv_allocated_len[rows].max(),
        forward_mode=ForwardMode.DECODE,
    )
    requests = replace(state.requests, last_launch=set_at(state.requests.last_launch, rows, forward_iter))
    state = replace(
        state, requests=requests, ledger=ledger, launched=(*state.launched, record(batch)), forward_iter=forward_iter
    )
    return state, batch


def plan(state: SchedulerState, *, limits: Limits) -> tuple[SchedulerState, ScheduleBatch | None]:
    """The next launch: prefill goes before decode. None when nothing can run until something is settled or submitted."""
    state, batch = admit(state, limits=limits)
    return (state, batch) if batch is not None else plan_decode(state, limits=limits)
