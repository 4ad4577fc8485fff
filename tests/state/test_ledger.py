"""An empty ledger, and what is counted on it."""

import jax
import numpy as np
import pytest

from jspec.scheduler import prepare_extend
from jspec.state import Limits, init_ledger, init_state, num_pages_held, total_pages
from jspec.state.invariants import check


def test_an_empty_ledger():
    ledger = init_ledger(max_running=3, num_pages=5, pages_per_row=4, page_size=16)
    assert ledger.page_table.shape == (4, 4) and not ledger.page_table.any()
    assert ledger.free_pages.tolist() == [5, 4, 3, 2, 1, 0] and ledger.num_free == total_pages(ledger) == 5
    for lens in (ledger.kv_committed_len, ledger.kv_allocated_len, ledger.cache_protected_len):
        assert lens.tolist() == [0] * 4
    assert ledger.page_locks.tolist() == [0] * 6
    assert all(leaf.dtype == np.int32 for leaf in jax.tree.leaves(ledger))


def test_page_1_is_given_out_first_and_page_0_never():
    ledger = init_ledger(max_running=1, num_pages=3, pages_per_row=3, page_size=1)
    _, pages = prepare_extend(ledger, np.array([1], np.int32), np.array([3], np.int32))
    assert pages.tolist() == [[1, 2, 3]]


@pytest.mark.parametrize(("length", "held"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (48, 3)])
def test_num_pages_held(length, held):
    ledger = init_ledger(max_running=1, num_pages=3, pages_per_row=3, page_size=16)
    rows, lens = np.array([1], np.int32), np.array([length], np.int32)
    assert num_pages_held(prepare_extend(ledger, rows, lens)[0]).tolist() == [0, held]


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_a_row_of_the_table_holds_the_context_and_the_reserve(page_size):
    limits = Limits(context_len=50, alloc_len=5, depth=1, max_prefill_tokens=9, max_prefill_rows=9)
    state = init_state(limits=limits, max_running=2, num_pages=7, page_size=page_size)
    width = state.ledger.page_table.shape[1]
    assert (width - 1) * page_size < 60 <= width * page_size
    assert state.launched == () and state.forward_iter == 0 and not state.waiting and not state.admitted
    cache = state.prefix_cache
    assert cache.depth.tolist() == cache.last_used.tolist() == [0] * 8 and cache.clock == 0
    assert not cache.pages and not cache.keys and not np.shares_memory(cache.depth, cache.last_used)
    assert state.new_token_ratio.dtype == np.float32 and state.new_token_ratio == np.float32(limits.new_token_ratio)
    check(state, limits=limits, frontier=np.zeros(3, np.int32))
