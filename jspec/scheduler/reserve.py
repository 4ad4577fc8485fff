"""Page-aligned reserve ahead of speculative writes."""

import dataclasses
from typing import Any, NamedTuple

from jspec.state.dense import namespace, round_up, set_at
from jspec.state.ledger import KVLedger, num_pages_held


class Reserved(NamedTuple):
    """What `reserve` granted. `K` is `max_new_pages`."""

    granted: Any  # bool[R]    active rows whose reserve is in place; the others must not be launched
    first_page: Any  # i32[R]     page-table column of the first new page
    new_pages: Any  # i32[R, K]  -1 padded


def max_new_pages(*, alloc_len: int, depth: int, page_size: int) -> int:
    """`K`: most pages one call of `reserve` can add to a row, since the committed length never leads the allocated one."""
    return -(-(depth + 1) * alloc_len // page_size)


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

    Requires: `kv_committed_len <= kv_allocated_len` in every row.
    Ensures: `kv_allocated_len` of granted rows is page aligned and never shrinks; pages are conserved. Where pages run short, rows are granted in
        row order until they end; a row that is not granted keeps what it has.
    Clock: `kv_allocated_len`; also written by `prepare_extend` and `release`.
    Source: SGLang Spec V2 `prepare_for_decode` (reserve of two windows, allocation from the allocated length).
    """
    xp, page = namespace(ledger.kv_committed_len), ledger.page_size
    allocated = ledger.kv_allocated_len
    wanted = round_up(ledger.kv_committed_len + (depth + 1) * alloc_len, page)
    wanted = xp.where(active, xp.maximum(allocated, wanted), allocated)
    held = num_pages_held(ledger)
    count = xp.where(active, wanted // page - held, 0)
    before = xp.cumulative_sum(count, dtype=xp.int32)
    granted = active & (before <= ledger.num_free)
    count = xp.where(granted, count, 0)
    taken = xp.sum(count, dtype=xp.int32)
    first = xp.cumulative_sum(count, dtype=xp.int32) - count
    k = xp.arange(max_new_pages(alloc_len=alloc_len, depth=depth, page_size=page), dtype=xp.int32)
    new = k[None, :] < count[:, None]
    stack = xp.where(new, ledger.num_free - 1 - first[:, None] - k[None, :], ledger.free_pages.shape[0] - 1)
    pages = ledger.free_pages[stack]
    rows = xp.arange(count.shape[0], dtype=xp.int32)[:, None]
    table = set_at(
        ledger.page_table,
        (xp.where(new, rows, 0), xp.where(new, held[:, None] + k[None, :], 0)),
        xp.where(new, pages, 0),
    )
    ledger = dataclasses.replace(
        ledger,
        kv_allocated_len=xp.where(granted, wanted, allocated),
        num_free=ledger.num_free - taken,
        page_table=table,
    )
    return ledger, Reserved(granted, held, xp.where(new, pages, -1))
