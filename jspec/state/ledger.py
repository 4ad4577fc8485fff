"""The KV ledger: which pages each row holds, how far its KV is right, and how far its writes may go."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jspec.state.dense import ceil_div


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVLedger:
    """Pages `1..N` are shared by all rows; page 0 is the sink for padding and never given out. A page is free, or one row's, or the prefix cache's, which
    any number of rows may read.

    Per row `0 <= cache_protected_len <= kv_committed_len <= kv_allocated_len`: the prefix cache owns the first part, the KV of the second is
    right, the third may be written by speculation. Released means `kv_allocated_len == 0`.
    """

    cache_protected_len: Any  # i32[R]     page aligned; owned by the prefix cache
    kv_committed_len: Any  # i32[R]     writer: settle (decode), prepare_extend and share_prefix (prompt)
    kv_allocated_len: Any  # i32[R]     writer: share_prefix, prepare_extend, reserve, release
    page_table: Any  # i32[R, P]  pages of a row in position order; 0 beyond `num_pages_held`
    free_pages: Any  # i32[N + 1] a stack; entries [0, num_free) are free, the last entry is a sink
    num_free: Any  # i32[]
    page_locks: Any  # i32[N + 1] rows that hold a page of the prefix cache: it may not be evicted
    page_size: int = dataclasses.field(metadata={"static": True})


def init_ledger(*, max_running: int, num_pages: int, pages_per_row: int, page_size: int) -> KVLedger:
    """An empty ledger of `num_pages` free pages. Page 1 is given out first."""
    rows = max_running + 1
    return KVLedger(
        cache_protected_len=np.zeros(rows, np.int32),
        kv_committed_len=np.zeros(rows, np.int32),
        kv_allocated_len=np.zeros(rows, np.int32),
        page_table=np.zeros((rows, pages_per_row), np.int32),
        free_pages=np.append(np.arange(num_pages, 0, -1, dtype=np.int32), np.int32(0)),
        num_free=np.int32(num_pages),
        page_locks=np.zeros(num_pages + 1, np.int32),
        page_size=page_size,
    )


def num_pages_held(ledger: KVLedger):
    """`i32[R]` pages in each row's table, those owned by the prefix cache included."""
    return ceil_div(ledger.kv_allocated_len, ledger.page_size)


def total_pages(ledger: KVLedger) -> int:
    """`N`: pages that exist, the sink not counted."""
    return ledger.free_pages.shape[0] - 1
