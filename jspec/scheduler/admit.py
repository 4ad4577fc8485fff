"""Waiting requests become an EXTEND batch: in order, a chunk of a long prompt at a time, as pages and token budget allow."""

import itertools
from typing import NamedTuple

import numpy as np

from jspec.scheduler.extend import prepare_extend, share_prefix
from jspec.scheduler.prefix_cache import evict, evictable, match_prefix, touch
from jspec.scheduler.retract import Left, enqueue, last_to_keep, retract
from jspec.state.batches import ForwardMode, ScheduleBatch
from jspec.state.dense import ceil_div, namespace, replace, set_at
from jspec.state.requests import Waiting, has_started, is_filling
from jspec.state.results import record
from jspec.state.scheduler_state import Limits, SchedulerState

MOST_NEW_TOKENS = 4096
"""Of the tokens a request may still emit, as many are counted when pages are promised (SGLang's `CLIP_MAX_NEW_TOKENS`)."""

WORTH_WAITING_FOR = 32
"""Tokens of a prompt that another request must be about to compute, for this one to wait until they are cached (as in SGLang)."""

MOST_COMPARED = 128
"""A longer queue is served first come first served whatever the policy: comparing all prefixes would take too long (as in SGLang)."""


def pages_to_finish(prompt_len, max_new_tokens, *, limits: Limits, page_size: int):
    """Pages a request holds at most, from prefill to its end: `i32[...]` for lengths of that shape.

    The last plan that can launch it sees `max_new_tokens - 1` outputs, hence `prompt_len + max_new_tokens - 2` committed, and reserves from there. A
    request of one token ends with its prefill and never reserves.
    """
    xp = namespace(prompt_len)
    last = prompt_len + xp.where(max_new_tokens > 1, max_new_tokens - 2 + limits.reserve_len, 0)
    return ceil_div(last, page_size)


def submit(state: SchedulerState, request: Waiting) -> SchedulerState:
    """Puts a request at the end of the queue, behind those of its priority. The shell has checked that it can ever fit (`pages_to_finish`)."""
    return replace(state, waiting=enqueue(state.waiting, request))


def chunk_len(start: int, end: int, budget: int, *, page_size: int, lookahead: int) -> int:
    """Tokens of `[start, end)` to prefill now: all, or as many whole pages as the budget holds, with at least `lookahead` left for later; 0: none.

    Source: SGLang `add_chunked_req` (page-aligned cuts); `lookahead` is the next prompt token that its EAGLE draft is given at a chunk's end.
    """
    if end - start <= budget:
        return end - start
    return max(min(start + budget, end - lookahead) // page_size * page_size - start, 0)


class _Chosen(NamedTuple):
    """A row of the batch to be."""

    row: int
    start: int  # tokens that are ready
    end: int  # tokens that are ready after this batch
    request: Waiting | None  # a new one; None where a prompt goes on
    shared: list[int]  # pages of the prefix cache it begins with


class _Budget:
    """What is left to give away in one plan: tokens of the batch, pages, and tokens that may be promised."""

    def __init__(self, state: SchedulerState, limits: Limits, set_aside: int):
        requests, ledger = state.requests, state.ledger
        self.limits, self.page = limits, ledger.page_size
        self.unlocked = evictable(ledger, state.prefix_cache)
        self.tokens = limits.max_prefill_tokens
        self.pages = int(ledger.num_free) + int(self.unlocked.sum()) - set_aside
        alive = requests.serial > 0
        to_go = np.minimum(requests.max_new_tokens - requests.output_len, MOST_NEW_TOKENS) * alive
        self.promised = int(to_go.sum()) * float(state.new_token_ratio) + float(
            ((requests.fill_len - ledger.kv_committed_len) * is_filling(requests, ledger.kv_committed_len)).sum()
        )
        self.anybody = bool(alive.any())

    def cut(self, start: int, end: int) -> int:
        """Where a prefill from `start` would have to stop; `start` if it cannot begin."""
        sizes = {"page_size": self.page, "lookahead": self.limits.lookahead}
        return start + chunk_len(start, end, self.tokens, **sizes)

    def take(self, chosen: _Chosen) -> bool:
        """Takes what the row needs, if it is there."""
        locked = [page for page in chosen.shared if self.unlocked[page]]
        new = -(-chosen.end // self.page) - -(-chosen.start // self.page)
        if new + len(locked) > self.pages:
            return False
        if chosen.request is None:
            self.promised -= chosen.end - chosen.start
        else:
            to_go = chosen.request.max_new_tokens - chosen.request.output_len
            wants = chosen.request.fill_len - chosen.start + self.page
            wants += max(min(to_go, MOST_NEW_TOKENS), self.limits.reserve_len if to_go > 1 else 0)
            # Alone, a request starts whatever it may want: it will get all there is.
            if self.anybody and wants + self.promised > (self.pages - len(locked)) * self.page:
                return False
            self.promised += wants - (chosen.end - chosen.start)
        self.tokens -= chosen.end - chosen.start
        self.pages -= new + len(locked)
        self.unlocked[locked] = False
        self.anybody = True
        return True


def _in_order(state: SchedulerState, limits: Limits):
    """Waiting requests, first to start first."""
    if limits.policy != "longest-prefix" or not 1 < len(state.waiting) <= MOST_COMPARED:
        return state.waiting
    cache = state.prefix_cache

    def rank(request: Waiting):
        return -request.priority, -len(match_prefix(cache, request.page_keys, most=len(request.page_keys)))

    return sorted(state.waiting, key=rank)


def _new_row(state: SchedulerState, request: Waiting, row: int, budget: _Budget) -> _Chosen:
    """How a waiting request would begin. At least its last token is computed, however much is cached."""
    most = (request.fill_len - 1) // state.ledger.page_size
    shared = match_prefix(state.prefix_cache, request.page_keys, most=most)
    start = len(shared) * state.ledger.page_size
    return _Chosen(row, start, budget.cut(start, request.fill_len), request, shared)


def _free_rows(state: SchedulerState) -> np.ndarray:
    return np.nonzero(state.requests.serial[1:] == 0)[0] + 1


def may_admit(state: SchedulerState) -> bool:
    """Whether a prompt goes on, or somebody waits and a row is free, or could be taken. Spares a full batch with a queue the counting of pages."""
    if is_filling(state.requests, state.ledger.kv_committed_len).any():
        return True
    if not state.waiting:
        return False
    return bool((state.requests.serial[1:] == 0).any()) or len(_less_urgent(state, state.waiting.left)) > 0


def preempt(state: SchedulerState, *, limits: Limits, set_aside) -> tuple[SchedulerState, tuple[Left, ...]]:
    """Retracts requests of a lower priority until the first waiting one can start, if that is for want of a row or of pages. None, if all of them would
    not do.

    Args:
        set_aside: `state -> pages` that the running rows need for their next step.

    Source: SGLang `preempt_to_schedule`.
    """
    if not state.waiting:
        return state, ()
    head, before, left = state.waiting.left, state, list[Left]()
    while len(rows := _less_urgent(state, head)) and not _can_start(state, head, limits, set_aside):
        state, gone = retract(state, last_to_keep(state, rows))
        left.append(gone._replace(for_priority=True))
    return (state, tuple(left)) if left and _can_start(state, head, limits, set_aside) else (before, ())


def _less_urgent(state: SchedulerState, head: Waiting) -> np.ndarray:
    """Rows of a lower priority that do not end anyway."""
    requests = state.requests
    return np.nonzero((requests.serial > 0) & (requests.priority < head.priority) & ~requests.to_finish)[0]


def _can_start(state: SchedulerState, head: Waiting, limits: Limits, set_aside) -> bool:
    """Whether a row, the pages, and a place in the next batch are there for a waiting request."""
    free = _free_rows(state)
    if not len(free):
        return False
    budget = _Budget(state, limits, set_aside(state))
    for row in np.nonzero(is_filling(state.requests, state.ledger.kv_committed_len))[0].tolist():
        start, end = int(state.ledger.kv_committed_len[row]), int(state.requests.fill_len[row])
        if budget.cut(start, end) < end:
            return False  # its chunks come first
    return budget.take(_new_row(state, head, int(free[0]), budget))


def _select(state: SchedulerState, limits: Limits, set_aside: int) -> list[_Chosen]:
    """The prompt that is under way, and the first of the queue that fit."""
    filling = np.nonzero(is_filling(state.requests, state.ledger.kv_committed_len))[0]
    free_rows = _free_rows(state)
    if not len(filling) and not (state.waiting and len(free_rows)):
        return []
    budget = _Budget(state, limits, set_aside)
    chosen: list[_Chosen] = []
    for row in filling.tolist():
        start, end = int(state.ledger.kv_committed_len[row]), int(state.requests.fill_len[row])
        goes_on = _Chosen(row, start, budget.cut(start, end), None, [])
        if not budget.take(goes_on):
            return []
        chosen.append(goes_on)
        if goes_on.end < end:
            return chosen
    # What is being prefilled now will be cached soon: whoever could share it waits for it instead of computing it again.
    page = state.ledger.page_size
    settling = (state.requests.serial > 0) & ~has_started(state.requests)
    soon = {key for serial in state.requests.serial[settling].tolist() for key in state.admitted[serial].page_keys}
    for request in _in_order(state, limits):
        if len(chosen) == limits.max_prefill_rows or not len(free_rows):
            break
        new = _new_row(state, request, int(free_rows[0]), budget)
        following = request.page_keys[len(new.shared) : (request.fill_len - 1) // page]
        gain = page * sum(1 for _ in itertools.takewhile(soon.__contains__, following))
        if new.end == new.start or gain >= WORTH_WAITING_FOR or not budget.take(new):
            break  # nobody overtakes: a request that waits for pages gets the next that come free
        chosen.append(new)
        free_rows = free_rows[1:]
        soon.update(request.page_keys)
        if new.end < request.fill_len:
            break
    return chosen


def _enter(state: SchedulerState, new: list[_Chosen]) -> SchedulerState:
    """New requests get their rows, and the cached pages they begin with."""
    rows = np.array([item.row for item in new], np.int32)
    entering = [item.request for item in new if item.request is not None]

    def column(values):
        return np.array(values, np.int32)

    stops = np.full((len(new), state.requests.stop_token_ids.shape[1]), -1, np.int32)
    for i, request in enumerate(entering):
        stops[i, : len(request.stop_token_ids)] = request.stop_token_ids
    old = state.requests
    requests = replace(
        old,
        serial=set_at(old.serial, rows, column([r.serial for r in entering])),
        prompt_len=set_at(old.prompt_len, rows, column([r.prompt_len for r in entering])),
        output_len=set_at(old.output_len, rows, column([r.output_len for r in entering])),
        fill_len=set_at(old.fill_len, rows, column([r.fill_len for r in entering])),
        priority=set_at(old.priority, rows, column([r.priority for r in entering])),
        max_new_tokens=set_at(old.max_new_tokens, rows, column([r.max_new_tokens for r in entering])),
        stop_token_ids=set_at(old.stop_token_ids, rows, stops),
    )
    pages = np.zeros((len(new), state.ledger.page_table.shape[1]), np.int32)
    cache = state.prefix_cache
    for i, item in enumerate(new):
        pages[i, : len(item.shared)] = item.shared
        if item.shared:
            cache = touch(cache, np.array(item.shared))
    waiting = state.waiting
    if entering == [request for request, _ in zip(waiting, entering, strict=False)]:
        waiting = waiting.popleft(len(entering))
    else:
        for request in entering:
            waiting = waiting.remove(request)
    admitted = state.admitted.update({request.serial: request for request in entering})
    ledger = share_prefix(state.ledger, rows, pages)
    return replace(state, requests=requests, ledger=ledger, prefix_cache=cache, waiting=waiting, admitted=admitted)


def admit(state: SchedulerState, *, limits: Limits, set_aside: int = 0) -> tuple[SchedulerState, ScheduleBatch | None]:
    """Plans one EXTEND batch: the next chunk of the prompt under way, then requests from the queue's head. None if nobody can start.

    Requests are admitted that are expected to fit together: running ones count with `new_token_ratio` of what they may still emit, new ones with all of it
    (up to MOST_NEW_TOKENS). Where that was too many, `make_room` retracts.

    Args:
        state: the scheduler's state, on NumPy arrays.
        limits: numbers to plan with.
        set_aside: pages that the running rows need for their next step.

    Returns:
        The state, and the batch: prompts or chunks of them, at most one of which goes on.

    Ensures: the queue's order is kept; `kv_committed_len` is the end of what is prefilled; every prompt computes at least one position.
    Clock: takes rows; `kv_committed_len` and `kv_allocated_len` through `share_prefix` and `prepare_extend`; `output_len` of a retracted request.
    Source: SGLang `PrefillAdder`, `prepare_for_extend`.
    """
    chosen = _select(state, limits, set_aside)
    if not chosen:
        return state, None
    if new := [item for item in chosen if item.request is not None]:
        state = _enter(state, new)
    rows, starts, ends = (np.array(column, np.int32) for column in zip(*(item[:3] for item in chosen), strict=True))
    page = state.ledger.page_size
    needed = int((ceil_div(ends, page) - ceil_div(starts, page)).sum())
    ledger, cache = state.ledger, state.prefix_cache
    if needed > ledger.num_free:
        ledger, cache = evict(ledger, cache, needed - int(ledger.num_free))
    ledger, pages = prepare_extend(ledger, rows, ends)
    forward_iter = state.forward_iter + np.int32(1)
    requests = replace(state.requests, last_launch=set_at(state.requests.last_launch, rows, forward_iter))
    zeros = np.zeros(len(rows), np.int32)
    batch = ScheduleBatch(
        forward_iter=forward_iter,
        rows=rows,
        epochs=requests.epoch[rows],
        serials=requests.serial[rows],
        prefix_lens=starts,
        extend_lens=ends - starts,
        expected_iter=zeros,
        first_page=zeros,
        new_pages=pages,
        kv_bound=ends.max(),
        goes_on=ends < requests.fill_len[rows],
        forward_mode=ForwardMode.EXTEND,
    )
    state = replace(
        state,
        requests=requests,
        ledger=ledger,
        prefix_cache=cache,
        launched=(*state.launched, record(batch)),
        forward_iter=forward_iter,
    )
    return state, batch
