"""Every fact that must hold between two transitions, as one function. Tests and `EngineConfig.checked` call it after each of them."""

import numpy as np

from jspec.state.ledger import num_pages_held
from jspec.state.requests import has_started, is_filling, seqlen
from jspec.state.scheduler_state import Limits, SchedulerState


class InvariantError(AssertionError):
    """A transition broke the state. Names the invariant, the rows and the values."""


def _require(holds, name: str, **values) -> None:
    holds = np.asarray(holds)
    if not holds.all():
        where = np.nonzero(~holds.reshape(-1))[0][:8].tolist()
        shown = ", ".join(
            f"{k}={np.asarray(v).reshape(-1)[where].tolist() if np.ndim(v) else v}" for k, v in values.items()
        )
        raise InvariantError(f"{name} fails at index {where}: {shown}")


def unsettled_launches(state: SchedulerState) -> np.ndarray:
    """`i32[R]` launches under way that still count for the row: those that will bring it tokens."""
    count = np.zeros_like(state.requests.epoch)
    for launched in state.launched:
        alive = (state.requests.epoch[launched.rows] == launched.epochs) & (launched.rows > 0) & launched.emits
        np.add.at(count, launched.rows[alive], 1)
    return count


def check(state: SchedulerState, *, limits: Limits, frontier=None, max_accept: int | None = None) -> None:
    """Raises `InvariantError` unless the state is sound.

    Args:
        state: on NumPy arrays.
        limits: the numbers it is planned with.
        frontier: i32[R] or None, `FutureMap.new_seq_lens` as of the newest launch, where a test can read it.
        max_accept: most tokens one step may emit; with `frontier`, bounds its lead.

    Source: the clocks and the conservation law of SGLang Spec V2's scheduler and its memory checker (`check_integrity`).
    """
    requests, ledger = state.requests, state.ledger
    held, page = num_pages_held(ledger), ledger.page_size
    alive = requests.serial > 0
    committed, allocated, protected = ledger.kv_committed_len, ledger.kv_allocated_len, ledger.cache_protected_len
    n = seqlen(requests)

    # Clocks of one row.
    _require((protected >= 0) & (protected <= committed) & (committed <= allocated), "protected <= committed <= allocated",
             protected=protected, committed=committed, allocated=allocated)  # fmt: skip
    _require(protected % page == 0, "cache_protected_len is page aligned", protected=protected)
    _require(held <= ledger.page_table.shape[1], "allocation fits the row's page table", held=held)
    _require(~alive | (committed > 0), "a running request has KV", committed=committed)
    _require(alive | (allocated == 0), "a free row holds no KV", allocated=allocated)
    started, filling = has_started(requests), is_filling(requests, committed)
    _require(
        ~started | (n == committed + 1),
        "seqlen == kv_committed_len + 1 (the pending bonus token)",
        seqlen=n,
        committed=committed,
    )
    _require(
        started | ~alive | (n == requests.fill_len),
        "a request without a new token has what its prefill covers",
        seqlen=n,
        fill_len=requests.fill_len,
    )
    _require(filling.sum() <= 1, "one prompt at most goes in chunks", rows=np.nonzero(filling)[0])
    _require(~filling | ((committed == allocated) & (committed % page == 0)), "a chunk ends at a page's end",
             committed=committed, allocated=allocated)  # fmt: skip
    decoded = alive & (allocated > requests.fill_len)
    _require(~decoded | (allocated % page == 0), "a reserved length is page aligned", allocated=allocated)
    _require(
        ~alive | (requests.output_len < requests.max_new_tokens),
        "a running request has tokens to go",
        output_len=requests.output_len,
    )
    _require(~alive | (requests.prompt_len + requests.max_new_tokens <= limits.context_len), "a request fits the context",
             prompt_len=requests.prompt_len, max_new_tokens=requests.max_new_tokens)  # fmt: skip

    # Pages: each is free, held by one row, or cached, and all are there.
    columns, cache = np.arange(ledger.page_table.shape[1])[None, :], state.prefix_cache
    shared = columns < (protected // page)[:, None]
    used = ledger.page_table[~shared & (columns < held[:, None])]
    cached = np.nonzero(cache.depth)[0]
    _require(
        (ledger.page_table == 0) == (columns >= held[:, None]),
        "the page table ends where the allocation ends",
        table=ledger.page_table,
    )
    pages = np.sort(np.concatenate([ledger.free_pages[: int(ledger.num_free)], used, cached]))
    _require(pages.size == ledger.free_pages.size - 1, "free + cached + held == total",
             free=ledger.num_free, cached=cached.size, held=used.size)  # fmt: skip
    _require(pages == np.arange(1, pages.size + 1), "every page is in one place", pages=pages)

    depth = cache.depth[np.clip(ledger.page_table, 0, cache.depth.size - 1)]
    _require(~shared | (depth == columns + 1), "the protected part of a row is a cached prefix", depth=depth)
    in_range = np.clip(ledger.page_table[shared], 0, ledger.page_locks.size - 1)
    locks = np.bincount(in_range, minlength=ledger.page_locks.size)
    _require(
        ledger.page_locks == locks, "a page is locked once a row that reads it", locks=ledger.page_locks, rows=locks
    )
    _require(cached.size == len(cache.pages) == len(cache.keys), "the cache's two indexes agree", cached=cached.size)
    _require([cache.pages.get(cache.keys.get(p)) == p for p in cached.tolist()], "a key names its page", cached=cached)

    # Rows and launches.
    _require(
        (requests.serial[0] == 0) & (requests.epoch[0] == 0) & (allocated[0] == 0),
        "row 0 is nobody's",
        serial=requests.serial[0],
    )
    serials = requests.serial[alive]
    _require(np.unique(serials).size == serials.size, "a request holds one row", serials=serials)
    _require(set(state.admitted) == set(serials.tolist()), "who holds a row is on record", admitted=len(state.admitted))
    priorities = np.array([request.priority for request in state.waiting])
    _require(priorities[:-1] >= priorities[1:], "the queue goes by priority", priorities=priorities)
    waiting = [request.serial for request in state.waiting]
    _require(not set(waiting) & set(serials.tolist()), "a request waits or runs, not both", waiting=len(waiting))
    _require(
        len(state.launched) <= limits.depth + 1,
        "at most depth + 1 launches are unsettled",
        launched=len(state.launched),
    )
    _require(requests.last_launch <= state.forward_iter, "no launch of the future", last_launch=requests.last_launch)
    count = unsettled_launches(state)
    _require(count <= limits.depth + 1, "at most depth + 1 launches of a row are unsettled", count=count)
    _require(
        ~alive | started | filling | (count > 0), "a request without output has its prefill under way", count=count
    )

    if frontier is not None:
        lead = np.where(alive, np.asarray(frontier) - committed, 0)
        _require((lead >= 0) & (lead <= count * (max_accept or limits.alloc_len)), "the frontier leads by what is unsettled",
                 lead=lead, unsettled=count)  # fmt: skip
        _require(
            ~alive | (np.asarray(frontier) <= allocated),
            "the frontier stays in the allocation",
            frontier=frontier,
            allocated=allocated,
        )
