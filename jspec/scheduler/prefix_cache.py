"""Pages shared by prefix: found, kept, and given up."""

import numpy as np

from jspec.state.dense import count_at, replace, set_at
from jspec.state.ledger import KVLedger
from jspec.state.prefix_cache import PrefixCache


def match_prefix(cache: PrefixCache, keys: tuple[bytes, ...], *, most: int) -> list[int]:
    """Pages of the longest cached prefix, at most so many."""
    pages: list[int] = []
    for key in keys[:most]:
        page = cache.pages.get(key)
        if page is None:
            break
        pages.append(page)
    return pages


def touch(cache: PrefixCache, pages) -> PrefixCache:
    """The pages of one prefix were used now, all of them: so none is used later than the one before it."""
    clock = cache.clock + np.int32(1)
    return replace(cache, clock=clock, last_used=set_at(cache.last_used, pages, clock))


def evictable(ledger: KVLedger, cache: PrefixCache):
    """`bool[N + 1]` cached pages that no row holds. Who holds a page holds all before it, so those behind an evictable page are evictable too."""
    return (cache.depth > 0) & (ledger.page_locks == 0)


def cache_prefix(
    ledger: KVLedger, cache: PrefixCache, row: int, keys: tuple[bytes, ...], *, running: bool
) -> tuple[KVLedger, PrefixCache]:
    """Hands the first pages of a row to the cache, where they stay locked by the row.

    Args:
        ledger, cache: host state.
        row: a row whose first `len(keys)` pages are full of KV that is right.
        keys: names of these pages; those the cache has from this row already come first.
        running: the row goes on. A page whose prefix another page already stands for is given up for that one, which the page table on the device does not
            learn: of a running row, it and what is behind it stay its own.

    Clock: `cache_protected_len`.
    Source: SGLang `cache_unfinished_req` and `cache_finished_req`. There a running row's table is rewritten to the tree's pages; here it keeps its
        duplicate until it ends.
    """
    first = int(ledger.cache_protected_len[row]) // ledger.page_size
    table = ledger.page_table[row].copy()
    new, double = [], []
    for i in range(first, len(keys)):
        page = cache.pages.get(keys[i])
        if page is None:
            new.append(i)
        elif running:
            keys = keys[:i]
            break
        else:
            double.append(int(table[i]))
            table[i] = page
    if len(keys) <= first:
        return ledger, touch(cache, table[: len(keys)]) if keys else cache
    pages, names = cache.pages.evolver(), cache.keys.evolver()
    for i in new:
        pages[keys[i]], names[int(table[i])] = int(table[i]), keys[i]
    cache = replace(
        cache,
        depth=set_at(cache.depth, table[new], np.array(new, np.int32) + 1),
        pages=pages.persistent(),
        keys=names.persistent(),
    )
    free = int(ledger.num_free) + np.arange(len(double))
    ledger = replace(
        ledger,
        cache_protected_len=set_at(ledger.cache_protected_len, row, len(keys) * ledger.page_size),
        page_table=set_at(ledger.page_table, row, table),
        page_locks=count_at(ledger.page_locks, table[first : len(keys)], 1, np.True_),
        free_pages=set_at(ledger.free_pages, free, double),
        num_free=ledger.num_free + np.int32(len(double)),
    )
    return ledger, touch(cache, table[: len(keys)])


def evict(ledger: KVLedger, cache: PrefixCache, count: int) -> tuple[KVLedger, PrefixCache]:
    """Frees `count` evictable pages, or as many as there are: least recently used first, and of one prefix from its end.

    Source: SGLang `RadixCache.evict` (leaves first, by last access).
    """
    pages = np.nonzero(evictable(ledger, cache))[0]
    order = np.lexsort((-cache.depth[pages], cache.last_used[pages]))
    pages = pages[order[: max(count, 0)]].astype(np.int32)
    if not len(pages):
        return ledger, cache
    by_key, names = cache.pages.evolver(), cache.keys.evolver()
    for page in pages.tolist():
        by_key.remove(names[page])
        names.remove(page)
    cache = replace(cache, depth=set_at(cache.depth, pages, 0), pages=by_key.persistent(), keys=names.persistent())
    ledger = replace(
        ledger,
        free_pages=set_at(ledger.free_pages, int(ledger.num_free) + np.arange(len(pages)), pages),
        num_free=ledger.num_free + np.int32(len(pages)),
    )
    return ledger, cache
