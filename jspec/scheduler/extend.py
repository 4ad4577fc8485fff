"""The ledger side of a prefill: pages for prompt tokens, shared or new, and the one place besides settle that commits KV."""

from jspec.state.dense import ceil_div, count_at, namespace, replace, set_at
from jspec.state.ledger import KVLedger, num_pages_held


def share_prefix(ledger: KVLedger, rows, pages) -> KVLedger:
    """Gives each row the pages of a prefix that the cache holds, and locks them: their KV is right already.

    Args:
        ledger: the KV ledger.
        rows: i32[B], distinct rows that hold nothing; 0 is padding.
        pages: i32[B, P], cached pages in position order, 0 behind the last; all 0 for padding and where nothing matched.

    Returns:
        The ledger.

    Ensures: `cache_protected_len == kv_committed_len == kv_allocated_len`, the length of the prefix.
    Clock: `cache_protected_len`; `kv_committed_len` and `kv_allocated_len` of prompt tokens.
    Source: SGLang `init_next_round_input` (`prefix_indices`, `inc_lock_ref`).
    """
    xp = namespace(ledger.kv_committed_len)
    length = xp.sum(pages > 0, axis=1, dtype=xp.int32) * ledger.page_size
    return replace(
        ledger,
        cache_protected_len=set_at(ledger.cache_protected_len, rows, length),
        kv_committed_len=set_at(ledger.kv_committed_len, rows, length),
        kv_allocated_len=set_at(ledger.kv_allocated_len, rows, length),
        page_table=set_at(ledger.page_table, rows, pages),
        page_locks=count_at(ledger.page_locks, pages, 1, pages > 0),
    )


def prepare_extend(ledger: KVLedger, rows, end_lens) -> tuple[KVLedger, object]:
    """Gives each row the pages it lacks for positions `[0, end_lens)` and commits these: their number is known when planned.

    Args:
        ledger: the KV ledger.
        rows: i32[B], distinct rows; 0 is padding.
        end_lens: i32[B], tokens of the prefilled sequence, not below what the row has committed; 0 for padding.

    Returns:
        The ledger and `pages: i32[B, P]`, all pages of the rows, -1 padded.

    Requires: the pages are free (admission counts them); the row is new, or its prefill so far ends at a page's end.
    Ensures: `kv_committed_len == kv_allocated_len == end_lens`; the allocated length is page aligned only after the first `reserve`.
    Clock: `kv_committed_len`, for prompt tokens only; settle writes it for decode.
    Source: SGLang `prepare_for_extend`.
    """
    xp, page = namespace(ledger.kv_committed_len), ledger.page_size
    held = num_pages_held(ledger)[rows]
    end = ceil_div(end_lens, page)
    count = end - held
    first = xp.cumulative_sum(count, dtype=xp.int32) - count
    k = xp.arange(ledger.page_table.shape[1], dtype=xp.int32)
    new = (k[None, :] >= held[:, None]) & (k[None, :] < end[:, None])
    stack = xp.where(
        new, ledger.num_free - 1 - first[:, None] - (k[None, :] - held[:, None]), ledger.free_pages.shape[0] - 1
    )
    pages = xp.where(new, ledger.free_pages[stack], ledger.page_table[rows])
    ledger = replace(
        ledger,
        kv_committed_len=set_at(ledger.kv_committed_len, rows, end_lens),
        kv_allocated_len=set_at(ledger.kv_allocated_len, rows, end_lens),
        page_table=set_at(ledger.page_table, rows, pages),
        num_free=ledger.num_free - xp.sum(count, dtype=xp.int32),
    )
    return ledger, xp.where(k[None, :] < end[:, None], pages, -1)
