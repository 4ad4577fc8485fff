"""Page-aligned reserve ahead of speculative writes."""

from typing import Any, NamedTuple

from jspec.state.dense import ceil_div, namespace, replace, set_at
from jspec.state.ledger import KVLedger, num_pages_held


class Reserved(NamedTuple):
    """What `reserve` granted. `K` is `max_new_pages`."""

    granted: Any  # bool[R]    active rows whose reserve is in place; the others must not be launched
    first_page: Any  # i32[R]     page-table column of the first new page
    new_pages: Any  # i32[R, K]  -1 padded


def max_new_pages(*, alloc_len: int, depth: int, page_size: int) -> int:
    """`K`: most pages one call of `reserve` can add to a row, since the committed length never leads the allocated one."""
    return -(-(depth + 1) * alloc_len // page_size)


def is_short(ledger: KVLedger, active, *, reserve_len: int):
    """`bool[R]`: of these rows, those whose reserve is not in place."""
    return active & (ledger.kv_committed_len + reserve_len > ledger.kv_allocated_len)


def pages_short(ledger: KVLedger, active, *, reserve_len: int):
    """`i32[]`: pages that a `reserve` of these rows would take."""
    xp, page = namespace(ledger.kv_committed_len), ledger.page_size
    wanted = ceil_div(ledger.kv_committed_len + reserve_len, page)
    wanted = wanted * (wanted <= ledger.page_table.shape[1])
    return xp.sum(xp.maximum(wanted - num_pages_held(ledger), 0) * active, dtype=xp.int32)


def reserve(ledger: KVLedger, active, *, alloc_len: int, depth: int) -> tuple[KVLedger, Reserved]:
    """Raises `kv_allocated_len` of active rows to a page boundary at least `(depth + 1) * alloc_len` past `kv_committed_len`.

    Planned from the committed length because the device frontier, up to one verify further per unsettled launch, is unknown to the host. The
    bound is tight: with one window less, a run of full accepts writes past the allocation (TensorRT-LLM pull request 16280).

    Args:
        ledger: the KV ledger.
        active: bool[R], rows about to be launched.
        alloc_len: 1 + the highest offset one step writes, in tokens.
        depth: unsettled launches when the plan is made.

    Returns:
        The ledger and a `Reserved`.

    Requires: `kv_committed_len <= kv_allocated_len` in every row; a row whose reserve does not fit its page table is not granted.
    Ensures: `kv_allocated_len` of granted rows is page aligned and never shrinks; pages are conserved. Where pages run short, rows that need
        some are granted in row order until they end; a row that is not granted keeps what it has.
    Clock: `kv_allocated_len`; also written by `prepare_extend` and `release`.
    Source: SGLang Spec V2 `prepare_for_decode` (reserve of two windows, allocation from the allocated length).
    """
    xp, page = namespace(ledger.kv_committed_len), ledger.page_size
    held = num_pages_held(ledger)
    wanted = ceil_div(ledger.kv_committed_len + (depth + 1) * alloc_len, page)
    active = active & (wanted <= ledger.page_table.shape[1])
    count = xp.maximum(wanted - held, 0) * active
    before = xp.cumulative_sum(count, dtype=xp.int32)
    granted = active & ((before <= ledger.num_free) | (count == 0))
    count = count * granted
    k = xp.arange(max_new_pages(alloc_len=alloc_len, depth=depth, page_size=page), dtype=xp.int32)
    new = k < count[:, None]
    # Every earlier row with new pages is granted too, so the sum before a granted row is what was taken before it.
    place = (count - before + (ledger.num_free - 1))[:, None] - k
    pages = xp.where(new, ledger.free_pages[place * new], -1)
    rows = xp.arange(count.shape[0], dtype=xp.int32)[:, None]
    index = (rows * new, (held[:, None] + k) * new)
    ledger = replace(
        ledger,
        kv_allocated_len=xp.where(granted, (held + count) * page, ledger.kv_allocated_len),
        num_free=ledger.num_free - xp.sum(count, dtype=xp.int32),
        page_table=set_at(ledger.page_table, index, xp.maximum(pages, 0)),
    )
    return ledger, Reserved(granted, held, pages)
