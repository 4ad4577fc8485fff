"""What runs next: prompts if any can start, with the running requests along, else one step of every running request that still needs it."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jspec.scheduler.admit import admit, may_admit, preempt
from jspec.scheduler.prefix_cache import evictable
from jspec.scheduler.reserve import Reserved, is_short, max_new_pages, pages_short, reserve
from jspec.scheduler.retract import Left, decayed_ratio, leave, make_room
from jspec.state.batches import ForwardMode, ScheduleBatch
from jspec.state.dense import add_at, replace, set_at
from jspec.state.ledger import KVLedger, num_pages_held
from jspec.state.requests import FinishReason, RequestTable, is_filling
from jspec.state.results import Launched, record
from jspec.state.scheduler_state import Limits, SchedulerState


class Planned(NamedTuple):
    """What a plan came to."""

    state: SchedulerState
    batch: ScheduleBatch | None  # None when nothing can run until something is settled or submitted
    left: tuple[Left, ...]  # requests that lost their rows


def launchable(requests: RequestTable, ledger: KVLedger, launched: tuple[Launched, ...]):
    """`bool[R]` running rows whose unsettled launches do not already bring their last token: each of these emits at least one."""
    expected = requests.output_len
    for item in launched:
        in_flight = (requests.epoch[item.rows] == item.epochs) & (item.rows > 0) & item.emits
        expected = add_at(expected, item.rows, in_flight)
    filled = ledger.kv_committed_len >= requests.fill_len
    return (requests.serial > 0) & filled & (expected < requests.max_new_tokens)


def _reserve_where_short(ledger: KVLedger, active: np.ndarray, limits: Limits) -> tuple[KVLedger, Reserved]:
    """`reserve`, unless every reserve is in place already, as in most steps of a small batch: then it would change nothing."""
    sizes = {"alloc_len": limits.alloc_len, "depth": limits.depth}
    if is_short(ledger, active, reserve_len=limits.reserve_len).any():
        return reserve(ledger, active, **sizes)
    none = np.full((active.shape[0], max_new_pages(page_size=ledger.page_size, **sizes)), -1, np.int32)
    return ledger, Reserved(active, num_pages_held(ledger), none)


def _decode_batch(
    state: SchedulerState, active: np.ndarray, forward_iter, limits: Limits
) -> tuple[SchedulerState, ScheduleBatch | None]:
    """One step of the active rows, their reserves in place. `launched` is not touched."""
    ledger, reserved = _reserve_where_short(state.ledger, active, limits)
    rows = reserved.granted.nonzero()[0].astype(np.int32)
    if not len(rows):
        return state, None
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
        goes_on=zeros.astype(bool),
        forward_mode=ForwardMode.DECODE,
    )
    requests = replace(state.requests, last_launch=set_at(state.requests.last_launch, rows, forward_iter))
    return replace(state, requests=requests, ledger=ledger), batch


def _plan_step(state: SchedulerState, limits: Limits) -> Planned:
    """A step of every launchable row, not yet on record; requests leave if their pages do not suffice for all."""
    active = launchable(state.requests, state.ledger, state.launched)
    left: tuple[Left, ...] = ()
    most = max_new_pages(alloc_len=limits.alloc_len, depth=limits.depth, page_size=state.ledger.page_size)
    if state.ledger.num_free < most * active.shape[0]:  # else there is room for anything
        state, active, left = make_room(state, active, limits=limits)
    state, batch = _decode_batch(state, active, state.forward_iter + np.int32(1), limits)
    if batch is not None and not left:
        state = replace(state, new_token_ratio=decayed_ratio(state.new_token_ratio, limits))
    return Planned(state, batch, left)


def _on_record(state: SchedulerState, batch: ScheduleBatch) -> SchedulerState:
    return replace(state, launched=(*state.launched, record(batch)), forward_iter=batch.forward_iter)


def plan_decode(state: SchedulerState, *, limits: Limits) -> Planned:
    """Plans one DECODE step of every launchable row; requests leave if their pages do not suffice for all.

    Args:
        state: the scheduler's state, on NumPy arrays.
        limits: numbers to plan with.

    Returns:
        A `Planned`; its batch's `new_pages` is the page-table delta. The batch carries no frontier: the launch reads it from the FutureMap.

    Ensures: `kv_allocated_len >= kv_committed_len + reserve_len` for every row of the batch.
    Clock: `kv_allocated_len` through `reserve`; `last_launch`.
    """
    state, batch, left = _plan_step(state, limits)
    return Planned(state if batch is None else _on_record(state, batch), batch, left)


def _with_tails(
    state: SchedulerState, batch: ScheduleBatch, active: np.ndarray, limits: Limits
) -> tuple[SchedulerState, ScheduleBatch]:
    """The EXTEND batch just planned, and in it a step of one token of every active row: the frontier each starts from is read inside the launch.

    Source: SGLang `mix_with_running`; the late binding is its `resolve_forward_inputs`.
    """
    state, active, _ = make_room(state, active, limits=limits)  # the pages were set aside: nobody leaves
    state, tails = _decode_batch(state, active, batch.forward_iter, limits)
    if tails is None:
        return state, batch
    bound = np.maximum(batch.kv_bound, tails.kv_bound)
    batch = replace(batch, tails=tails, kv_bound=bound, forward_mode=ForwardMode.MIXED)
    return replace(state, launched=(*state.launched[:-1], record(batch))), batch


def _end_aborted_prompts(state: SchedulerState) -> tuple[SchedulerState, tuple[Left, ...]]:
    """A request that is to be aborted in the middle of its prompt ends now: there may be no launch of it to wait for."""
    left: tuple[Left, ...] = ()
    for row in np.nonzero(is_filling(state.requests, state.ledger.kv_committed_len) & state.requests.to_finish)[0]:
        state, gone = leave(state, int(row), FinishReason.ABORT)
        left = (*left, gone)
    return state, left


def plan_prefill(state: SchedulerState, *, limits: Limits) -> Planned:
    """The next prompts, if any can start or go on, with the running requests along as tails if `limits.mixed` says so.

    Args:
        state: the scheduler's state, on NumPy arrays.
        limits: numbers to plan with.

    Source: SGLang `get_new_batch_prefill`.
    """
    left: tuple[Left, ...] = ()
    if not (state.requests.serial > 0).any():
        state = replace(state, new_token_ratio=np.float32(limits.new_token_ratio))
    if state.requests.to_finish.any():
        state, left = _end_aborted_prompts(state)

    def set_aside(state: SchedulerState) -> int:
        active = launchable(state.requests, state.ledger, state.launched)
        return int(pages_short(state.ledger, active, reserve_len=limits.reserve_len))

    if not may_admit(state):
        return Planned(state, None, left)
    state, gone = preempt(state, limits=limits, set_aside=set_aside)
    active = launchable(state.requests, state.ledger, state.launched)
    needed = set_aside(state)
    room = int(state.ledger.num_free) + int(evictable(state.ledger, state.prefix_cache).sum())
    # Where the running rows lack pages nobody starts: some of them will have to leave.
    state, batch = admit(state, limits=limits, set_aside=needed) if needed <= room else (state, None)
    if batch is not None and limits.mixed:
        state, batch = _with_tails(state, batch, active, limits)
    return Planned(state, batch, left + gone)


def _end_if_stuck(planned: Planned) -> Planned:
    """Where nothing can run, and nothing is under way: prompts that no page is left for, and nobody who could leave some."""
    state, batch, left = planned
    if batch is None and not any(item.rows.size for item in state.launched):
        for row in np.nonzero(state.requests.serial)[0]:
            state, ended = leave(state, int(row), FinishReason.OUT_OF_PAGES)
            left = (*left, ended)
    return Planned(state, batch, left)


def plan(state: SchedulerState, *, limits: Limits) -> Planned:
    """The next launch: prefill goes before decode.

    Args:
        state: the scheduler's state, on NumPy arrays.
        limits: numbers to plan with.

    Source: SGLang `get_next_batch_to_run`.
    """
    return plan_ranks((state,), limits=limits)[0]


def plan_ranks(states: Sequence[SchedulerState], *, limits: Limits) -> tuple[Planned, ...]:
    """The next launch of ranks that run their forwards together: a batch for each, or for none.

    Modes never meet in one launch. Where a rank has prompts, the running rows of the others ride as the tails of a MIXED batch without prompts, each by its
    one pending token, if `limits.mixed` says so, and wait otherwise. A rank with nothing to run runs an IDLE batch: what the launch does with the tokens
    of all ranks, it does with every rank.

    Args:
        states: of each rank, on NumPy arrays.
        limits: numbers to plan with.

    Source: SGLang's data-parallel attention: prefill on any rank is agreed on before decode is chosen, other ranks idle; a plain decode batch may be viewed
        as extends of one token. Here the view holds for every worker, since tails are bound late.
    """
    planned = [plan_prefill(state, limits=limits) for state in states]
    prefills = any(batch is not None for _, batch, _ in planned)
    for i, (state, batch, left) in enumerate(planned):
        if batch is None and prefills and not limits.mixed:
            planned[i] = Planned(state, None, left)  # its rows wait, and are not stuck
        elif batch is None:
            step = _plan_tails(state, limits) if prefills else plan_decode(state, limits=limits)
            planned[i] = _end_if_stuck(step._replace(left=left + step.left))
    if all(batch is None for _, batch, _ in planned):
        return tuple(planned)
    return tuple(_idle(item, limits) if item.batch is None else item for item in planned)


def _plan_tails(state: SchedulerState, limits: Limits) -> Planned:
    """A rank without prompts, in a launch where another has some."""
    state, tails, left = _plan_step(state, limits)
    if tails is None:
        return Planned(state, None, left)
    no_prompts = _no_rows(tails.forward_iter, num_columns=state.ledger.page_table.shape[1])
    batch = replace(no_prompts, tails=tails, kv_bound=tails.kv_bound, forward_mode=ForwardMode.MIXED)
    return Planned(_on_record(state, batch), batch, left)


def _idle(planned: Planned, limits: Limits) -> Planned:
    state, _, left = planned
    columns = max_new_pages(alloc_len=limits.alloc_len, depth=limits.depth, page_size=state.ledger.page_size)
    batch = _no_rows(state.forward_iter + np.int32(1), num_columns=columns)
    return Planned(_on_record(state, batch), batch, left)


def _no_rows(forward_iter, *, num_columns: int) -> ScheduleBatch:
    """An IDLE batch."""
    none = np.zeros(0, np.int32)
    return ScheduleBatch(
        forward_iter=forward_iter,
        rows=none,
        epochs=none,
        serials=none,
        prefix_lens=none,
        extend_lens=none,
        expected_iter=none,
        first_page=none,
        new_pages=np.zeros((0, num_columns), np.int32),
        kv_bound=np.int32(0),
        goes_on=none.astype(bool),
        forward_mode=ForwardMode.IDLE,
    )
