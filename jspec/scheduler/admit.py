"""Waiting requests become an EXTEND batch, first come first served, only when they can run to their end."""

import numpy as np

from jspec.scheduler.extend import prepare_extend
from jspec.state.batches import ForwardMode, ScheduleBatch
from jspec.state.dense import ceil_div, namespace, replace, set_at
from jspec.state.ledger import total_pages
from jspec.state.requests import Waiting
from jspec.state.results import record
from jspec.state.scheduler_state import Limits, SchedulerState


def pages_to_finish(prompt_len, max_new_tokens, *, limits: Limits, page_size: int):
    """Pages a request holds at most, from prefill to its end: `i32[...]` for lengths of that shape.

    The last plan that can launch it sees `max_new_tokens - 1` outputs, hence `prompt_len + max_new_tokens - 2` committed, and reserves from there. A
    request of one token ends with its prefill and never reserves.
    """
    xp = namespace(prompt_len)
    last = prompt_len + xp.where(max_new_tokens > 1, max_new_tokens - 2 + limits.reserve_len, 0)
    return ceil_div(last, page_size)


def submit(state: SchedulerState, request: Waiting) -> SchedulerState:
    """Puts a request at the end of the queue. The shell has checked that it can ever fit (`pages_to_finish`)."""
    return replace(state, waiting=state.waiting.append(request))


def _select(state: SchedulerState, limits: Limits) -> tuple[list[Waiting], np.ndarray]:
    """The requests at the head of the queue that fit rows, pages and token budget now, and the rows they get."""
    requests, page = state.requests, state.ledger.page_size
    free_rows = np.nonzero(requests.serial[1:] == 0)[0] + 1
    if not len(free_rows):
        return [], free_rows
    running = np.where(
        requests.serial > 0,
        pages_to_finish(requests.prompt_len, requests.max_new_tokens, limits=limits, page_size=page),
        0,
    )
    pages = total_pages(state.ledger) - int(running.sum())
    tokens = limits.max_prefill_tokens
    chosen: list[Waiting] = []
    for request in state.waiting:
        need = int(
            pages_to_finish(
                np.int32(request.prompt_len), np.int32(request.max_new_tokens), limits=limits, page_size=page
            )
        )
        fits = need <= pages and (request.prompt_len <= tokens or not chosen)
        if not fits or len(chosen) == min(len(free_rows), limits.max_prefill_rows):
            break  # nobody overtakes: a request that waits for pages gets the next that come free
        chosen.append(request)
        pages, tokens = pages - need, tokens - request.prompt_len
    return chosen, free_rows[: len(chosen)].astype(np.int32)


def admit(state: SchedulerState, *, limits: Limits) -> tuple[SchedulerState, ScheduleBatch | None]:
    """Plans one EXTEND batch from the queue's head, or None if nobody can start now.

    Without retraction a running request must never lack a page, so a request is admitted only if every running one, and it, can reach
    `max_new_tokens` with their reserves in place.

    Args:
        state: the scheduler's state, on NumPy arrays.
        limits: numbers to plan with.

    Returns:
        The state, and the batch: whole prompts, rows ascending.

    Ensures: first come first served; pages promised to running requests never exceed the pool; `kv_committed_len == prompt_len` in the new rows.
    Clock: takes rows; `kv_committed_len` and `kv_allocated_len` through `prepare_extend`.
    Source: SGLang `PrefillAdder` (first come first served), with full reservation in place of its adaptive new-token ratio.
    """
    if not state.waiting:
        return state, None
    chosen, rows = _select(state, limits)
    if not chosen:
        return state, None
    prompt_lens = np.array([r.prompt_len for r in chosen], np.int32)
    serials = np.array([r.serial for r in chosen], np.int32)
    stops = np.full((len(chosen), state.requests.stop_token_ids.shape[1]), -1, np.int32)
    for i, request in enumerate(chosen):
        stops[i, : len(request.stop_token_ids)] = request.stop_token_ids
    forward_iter = state.forward_iter + np.int32(1)
    requests = replace(
        state.requests,
        serial=set_at(state.requests.serial, rows, serials),
        prompt_len=set_at(state.requests.prompt_len, rows, prompt_lens),
        max_new_tokens=set_at(
            state.requests.max_new_tokens, rows, np.array([r.max_new_tokens for r in chosen], np.int32)
        ),
        stop_token_ids=set_at(state.requests.stop_token_ids, rows, stops),
        last_launch=set_at(state.requests.last_launch, rows, forward_iter),
    )
    ledger, new_pages = prepare_extend(state.ledger, rows, prompt_lens)
    zeros = np.zeros(len(chosen), np.int32)
    batch = ScheduleBatch(
        forward_iter=forward_iter,
        rows=rows,
        epochs=requests.epoch[rows],
        serials=serials,
        prefix_lens=zeros,
        extend_lens=prompt_lens,
        expected_iter=zeros,
        first_page=zeros,
        new_pages=new_pages,
        kv_bound=prompt_lens.max(),
        forward_mode=ForwardMode.EXTEND,
    )
    waiting = state.waiting.popleft(len(chosen))
    state = replace(
        state,
        requests=requests,
        ledger=ledger,
        waiting=waiting,
        launched=(*state.launched, record(batch)),
        forward_iter=forward_iter,
    )
    return state, batch
