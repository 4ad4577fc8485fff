"""A request leaves: its pages return, its row is free, its epoch moves on."""

from jspec.state.dense import add_at, count_at, namespace, replace, set_at
from jspec.state.ledger import KVLedger, num_pages_held
from jspec.state.requests import RequestTable


def release(requests: RequestTable, ledger: KVLedger, rows) -> tuple[RequestTable, KVLedger]:
    """Returns everything the rows hold past `cache_protected_len`, speculative tail included, in one piece, and unlocks what is before.

    A launch already under way may still write into these pages; whoever gets them writes later, since launches are ordered on the device.

    Args:
        requests, ledger: host state.
        rows: i32[F], distinct rows to free; 0 is padding.

    Returns:
        The table and the ledger.

    Ensures: `kv_allocated_len == 0` in the rows; their epoch is one higher, so a late result changes nothing; pages are conserved.
    Clock: `kv_allocated_len`, `epoch`.
    Source: SGLang `release_kv_cache` (one bulk free from the committed length's page to the allocated one).
    """
    xp, page = namespace(ledger.kv_allocated_len), ledger.page_size
    protected = ledger.cache_protected_len[rows] // page
    held = num_pages_held(ledger)[rows]
    col = xp.arange(ledger.page_table.shape[1], dtype=xp.int32)[None, :]
    leaving = (col >= protected[:, None]) & (col < held[:, None])
    count = xp.where(rows > 0, held - protected, 0)
    first = ledger.num_free + xp.cumulative_sum(count, dtype=xp.int32) - count
    sink = ledger.free_pages.shape[0] - 1
    place = xp.where(leaving, first[:, None] + col - protected[:, None], sink)
    ledger = replace(
        ledger,
        free_pages=set_at(ledger.free_pages, place, xp.where(leaving, ledger.page_table[rows], 0)),
        num_free=ledger.num_free + xp.sum(count, dtype=xp.int32),
        page_locks=count_at(ledger.page_locks, ledger.page_table[rows], -1, col < protected[:, None]),
        page_table=set_at(ledger.page_table, rows, 0),
        cache_protected_len=set_at(ledger.cache_protected_len, rows, 0),
        kv_committed_len=set_at(ledger.kv_committed_len, rows, 0),
        kv_allocated_len=set_at(ledger.kv_allocated_len, rows, 0),
    )
    requests = replace(
        requests,
        epoch=add_at(requests.epoch, rows, xp.where(rows > 0, 1, 0)),
        serial=set_at(requests.serial, rows, 0),
        prompt_len=set_at(requests.prompt_len, rows, 0),
        output_len=set_at(requests.output_len, rows, 0),
        fill_len=set_at(requests.fill_len, rows, 0),
        priority=set_at(requests.priority, rows, 0),
        max_new_tokens=set_at(requests.max_new_tokens, rows, 0),
        stop_token_ids=set_at(requests.stop_token_ids, rows, -1),
        to_finish=set_at(requests.to_finish, rows, False),
        last_launch=set_at(requests.last_launch, rows, 0),
    )
    return requests, ledger
