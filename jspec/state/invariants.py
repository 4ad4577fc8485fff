"""Every fact that must hold between two transitions, as one function. Tests and `EngineConfig.checked` call it after each of them."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jspec.state.dense import ceil_div
from jspec.state.scheduler_state import Limits, SchedulerState


class InvariantError(AssertionError):
    """A transition broke the state. Names the invariant, the rows and the values."""


@functools.lru_cache(maxsize=8)
def _numbers(count: int) -> np.ndarray:
    """`0, 1, ...`"""
    return np.arange(count)


def _require(holds, name: str, **values) -> None:
    if holds if isinstance(holds, bool) else holds.all():
        return
    where = np.nonzero(~np.asarray(holds).reshape(-1))[0][:8].tolist()
    shown = ", ".join(
        f"{k}={np.asarray(v).reshape(-1)[where].tolist() if np.ndim(v) else v}" for k, v in values.items()
    )
    raise InvariantError(f"{name} fails at index {where}: {shown}")


def _require_of_rows(facts: Iterable[tuple[np.ndarray, str, dict[str, Any]]]) -> None:
    """`_require` for many facts of one shape: each alone would cost more than all of them together."""
    facts = tuple(facts)
    if not np.concatenate([holds for holds, _, _ in facts]).all():
        for holds, name, values in facts:
            _require(holds, name, **values)


def _of_last(check: Callable[..., Any]) -> Callable[..., Any]:
    """`check`, which remembers what it found of the values that it was last given: states share what no transition has changed."""
    last: list[tuple[tuple[Any, ...], Any]] = []

    @functools.wraps(check)
    def remembered(*values):
        if last and all(a is b for a, b in zip(last[0][0], values, strict=True)):
            return last[0][1]
        found = check(*values)
        last[:] = [(values, found)]
        return found

    return remembered


@_of_last
def _check_pages(table, free_pages, num_free, allocated, protected, page_locks, page: int, depth, pages, keys) -> None:
    """Each page is free, held by one row, or cached, and all are there; the parts are those of a ledger and of a prefix cache."""
    columns, held = _numbers(table.shape[1]), ceil_div(allocated, page)
    shared, within = columns < (protected // page)[:, None], columns < held[:, None]
    used, cached = table[within & ~shared], np.nonzero(depth)[0]
    _require((table != 0) == within, "the page table ends where the allocation ends", table=table)
    found = np.concatenate([free_pages[: int(num_free)], used, cached])
    found.sort()
    _require(found.size == free_pages.size - 1, "free + cached + held == total",
             free=num_free, cached=cached.size, held=used.size)  # fmt: skip
    _require(found == _numbers(found.size + 1)[1:], "every page is in one place", pages=found)
    if shared.any():
        seen = depth[np.minimum(np.maximum(table, 0), depth.size - 1)]
        _require(~shared | (seen == columns + 1), "the protected part of a row is a cached prefix", depth=seen)
    in_range = np.minimum(np.maximum(table[shared], 0), page_locks.size - 1)
    locks = np.bincount(in_range, minlength=page_locks.size)
    _require(page_locks == locks, "a page is locked once a row that reads it", locks=page_locks, rows=locks)
    _check_names(depth, pages, keys)


@_of_last
def _check_names(depth, pages, keys) -> None:
    """The two indexes of a prefix cache agree."""
    cached = np.nonzero(depth)[0]
    _require(cached.size == len(pages) == len(keys), "the cache's two indexes agree", cached=cached.size)
    # A look-up in a persistent map takes ten times as long.
    page_of, key_of = dict(pages.iteritems()), dict(keys.iteritems())
    named = np.array([page_of.get(key_of.get(page)) == page for page in cached.tolist()], bool)
    _require(named, "a key names its page", cached=cached)


@_of_last
def _waiting_serials(waiting) -> frozenset[int]:
    """Numbers of the requests that wait; their queue goes by priority."""
    priorities = np.array([request.priority for request in waiting])
    _require(priorities[:-1] >= priorities[1:], "the queue goes by priority", priorities=priorities)
    return frozenset(request.serial for request in waiting)


@functools.lru_cache(maxsize=16)
def _check_clocks(columns: bytes, dtype: np.dtype, page: int, pages_per_row: int, context_len: int) -> np.ndarray:
    """The clocks of each row, given by value: most states have those of one before. `bool[R]`: rows whose prefill is all planned, and not settled."""
    numbers = np.frombuffer(columns, dtype).reshape(8, -1)
    serial, prompt_len, output_len, fill_len, max_new_tokens, protected, committed, allocated = numbers
    alive, n = serial > 0, prompt_len + output_len
    # Of two facts, `a <= b` says that a implies b.
    started, filling = alive & (n > fill_len), alive & (committed < fill_len)
    unstarted, decoded = alive ^ started, alive & (allocated > fill_len)
    protected_aligned, committed_aligned, allocated_aligned = numbers[5:] % page == 0
    in_order, in_allocation = numbers[6:] >= numbers[5:7]
    clocks = {"protected": protected, "committed": committed, "allocated": allocated}
    _require_of_rows((
        (in_order & in_allocation & (protected >= 0), "protected <= committed <= allocated", clocks),
        (protected_aligned, "cache_protected_len is page aligned", clocks),
        (allocated <= pages_per_row * page, "allocation fits the row's page table", clocks),
        (alive <= (committed > 0), "a running request has KV", clocks),
        (alive | (allocated == 0), "a free row holds no KV", clocks),
        (started <= (n == committed + 1), "seqlen == kv_committed_len + 1 (the pending bonus token)", {"seqlen": n, **clocks}),
        (unstarted <= (n == fill_len), "a request without a new token has what its prefill covers", {"seqlen": n, "fill_len": fill_len}),
        (filling <= (np.count_nonzero(filling) <= 1), "one prompt at most goes in chunks", clocks),
        (filling <= (committed_aligned & (committed == allocated)), "a chunk ends at a page's end", clocks),
        (decoded <= allocated_aligned, "a reserved length is page aligned", clocks),
        (alive <= (output_len < max_new_tokens), "a running request has tokens to go", {"emitted": output_len}),
        (alive <= (prompt_len + max_new_tokens <= context_len), "a request fits the context",
         {"prompt_len": prompt_len, "max_new_tokens": max_new_tokens}),
    ))  # fmt: skip
    return unstarted > filling


@_of_last
def _check_owners(serial, admitted, waiting) -> None:
    """Who holds a row, and who waits."""
    serials = serial[serial > 0].tolist()
    running = set(serials)
    _require(len(running) == len(serials), "a request holds one row", serials=np.array(serials))
    _require(set(admitted) == running, "who holds a row is on record", admitted=len(admitted))
    queued = _waiting_serials(waiting)
    _require(queued.isdisjoint(running), "a request waits or runs, not both", waiting=len(queued))


@functools.lru_cache(maxsize=16)
def _num_unsettled(epoch: bytes, *launches: tuple[bytes, bytes, bytes]) -> np.ndarray:
    """`i32[R]`: how many of the launches (rows, epochs, whether the row emits) still count for each row."""
    epochs = np.frombuffer(epoch, np.int32)
    count = np.zeros(epochs.shape, np.int32)
    for parts in launches:
        rows, planned_for, emits = (
            np.frombuffer(*part) for part in zip(parts, (np.int32, np.int32, bool), strict=True)
        )
        alive = (epochs[rows] == planned_for) & (rows > 0) & emits
        count += np.bincount(rows[alive], minlength=count.size).astype(np.int32)
    count.flags.writeable = False
    return count


def unsettled_launches(state: SchedulerState) -> np.ndarray:
    """`i32[R]` launches under way that still count for the row: those that will bring it tokens."""
    launches = [(item.rows.tobytes(), item.epochs.tobytes(), item.emits.tobytes()) for item in state.launched]
    return _num_unsettled(state.requests.epoch.tobytes(), *launches)


def check(state: SchedulerState, *, limits: Limits, frontier=None, max_accept: int | None = None) -> None:
    """Raises `InvariantError` unless the state is sound.

    Args:
        state: on NumPy arrays.
        limits: the numbers it is planned with.
        frontier: i32[R] or None, `FutureMap.new_seq_lens` as of the newest launch, where a test can read it.
        max_accept: most tokens one step may emit; with `frontier`, bounds its lead.

    Source: the clocks and the conservation law of SGLang Spec V2's scheduler and its memory checker (`check_integrity`).
    """
    requests, ledger, cache = state.requests, state.ledger, state.prefix_cache
    protected, committed, allocated = ledger.cache_protected_len, ledger.kv_committed_len, ledger.kv_allocated_len
    columns = np.concatenate((
        requests.serial, requests.prompt_len, requests.output_len, requests.fill_len, requests.max_new_tokens,
        protected, committed, allocated,
    ))  # fmt: skip
    sizes = (ledger.page_size, ledger.page_table.shape[1], limits.context_len)
    unsettled_prefill = _check_clocks(columns.tobytes(), columns.dtype, *sizes)
    count = unsettled_launches(state)
    _require(
        len(state.launched) <= limits.depth + 1,
        "at most depth + 1 launches are unsettled",
        launched=len(state.launched),
    )
    _require_of_rows((
        (requests.last_launch <= state.forward_iter, "no launch of the future", {"last_launch": requests.last_launch}),
        (count <= limits.depth + 1, "at most depth + 1 launches of a row are unsettled", {"count": count}),
        (unsettled_prefill <= (count > 0), "a request without output has its prefill under way", {"count": count}),
    ))  # fmt: skip
    _check_pages(
        ledger.page_table, ledger.free_pages, ledger.num_free, allocated, protected, ledger.page_locks, ledger.page_size,
        cache.depth, cache.pages, cache.keys,
    )  # fmt: skip
    _require(
        bool((requests.serial[0] == 0) & (requests.epoch[0] == 0) & (allocated[0] == 0)),
        "row 0 is nobody's",
        serial=requests.serial[0],
    )
    _check_owners(requests.serial, state.admitted, state.waiting)

    if frontier is not None:
        alive = requests.serial > 0
        lead = np.where(alive, np.asarray(frontier) - committed, 0)
        _require((lead >= 0) & (lead <= count * (max_accept or limits.alloc_len)), "the frontier leads by what is unsettled",
                 lead=lead, unsettled=count)  # fmt: skip
        _require(
            ~alive | (np.asarray(frontier) <= allocated),
            "the frontier stays in the allocation",
            frontier=frontier,
            allocated=allocated,
        )
