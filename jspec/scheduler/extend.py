"""The ledger side of a prefill: pages for the prompt, and the one place besides settle that commits KV."""

from jspec.state.dense import ceil_div, namespace, replace, set_at
from jspec.state.ledger import KVLedger


def prepare_extend(ledger: KVLedger, rows, end_lens) -> tuple[KVLedger, object]:
    """Gives each row the pages for positions `[0, end_lens)` and commits them: their number is known when planned.

    Args:
        ledger: the KV ledger.
        rows: i32[B], distinct rows that hold nothing; 0 is padding.
        end_lens: i32[B], tokens of the prefilled sequence; 0 for padding.

    Returns:
        The ledger and `new_pages: i32[B, P]`, -1 padded.

    Requires: the pages are free (admission counts them), and the rows hold none.
    Ensures: `kv_committed_len == kv_allocated_len == end_lens`; the allocated length is page aligned only after the first `reserve`.
    Clock: `kv_committed_len`, for prompt tokens only; settle writes it for decode.
    Source: SGLang `prepare_for_extend`.
    """
    xp, page = namespace(ledger.kv_committed_len), ledger.page_size
    count = ceil_div(end_lens, page)
    first = xp.cumulative_sum(count, dtype=xp.int32) - count
    k = xp.arange(ledger.page_table.shape[1], dtype=xp.int32)
    new = k[None, :] < count[:, None]
    stack = xp.where(new, ledger.num_free - 1 - first[:, None] - k[None, :], ledger.free_pages.shape[0] - 1)
    pages = ledger.free_pages[stack]
    ledger = replace(
        ledger,
        kv_committed_len=set_at(ledger.kv_committed_len, rows, end_lens),
        kv_allocated_len=set_at(ledger.kv_allocated_len, rows, end_lens),
        page_table=set_at(ledger.page_table, rows, xp.where(new, pages, 0)),
        num_free=ledger.num_free - xp.sum(count, dtype=xp.int32),
    )
    return ledger, xp.where(new, pages, -1)
