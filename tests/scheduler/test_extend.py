"""Pages of a prompt."""

import numpy as np
import pytest
from oracles import ceil_to, freeze

from jspec.scheduler import prepare_extend
from jspec.state import init_ledger

I32 = np.int32


def empty(*, num_pages=20, page_size=4, rows=4):
    return freeze(init_ledger(max_running=rows, num_pages=num_pages, pages_per_row=8, page_size=page_size))


def test_a_prompt_is_committed_when_planned():
    ledger, new_pages = prepare_extend(empty(), np.array([2, 3], I32), np.array([9, 4], I32))
    assert ledger.kv_committed_len.tolist() == ledger.kv_allocated_len.tolist() == [0, 0, 9, 4, 0]
    assert new_pages.tolist() == [[1, 2, 3] + [-1] * 5, [4] + [-1] * 7]
    assert ledger.page_table[2].tolist() == [1, 2, 3] + [0] * 5
    assert ledger.page_table[3].tolist() == [4] + [0] * 7
    assert ledger.num_free == 16
    assert ledger.free_pages[: ledger.num_free].tolist() == list(range(20, 4, -1))
    assert not ledger.cache_protected_len.any()


def test_padding_takes_nothing():
    before = empty()
    ledger, new_pages = prepare_extend(before, np.array([0, 1, 0, 0], I32), np.array([0, 5, 0, 0], I32))
    alone, _ = prepare_extend(before, np.array([1], I32), np.array([5], I32))
    for name in ("kv_committed_len", "kv_allocated_len", "page_table", "num_free", "free_pages"):
        assert np.array_equal(getattr(ledger, name), getattr(alone, name)), name
    assert (new_pages[[0, 2, 3]] == -1).all()


def test_no_rows_no_change():
    before = empty()
    ledger, new_pages = prepare_extend(before, np.zeros(0, I32), np.zeros(0, I32))
    assert ledger.num_free == before.num_free and new_pages.shape == (0, 8)
    assert np.array_equal(ledger.page_table, before.page_table)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_any_length_gets_whole_pages(page_size):
    for length in (1, page_size - 1, page_size, page_size + 1, 3 * page_size):
        if length < 1 or length > 8 * page_size:
            continue
        ledger, new_pages = prepare_extend(empty(page_size=page_size), np.array([1], I32), np.array([length], I32))
        assert (new_pages >= 0).sum() == ceil_to(length, page_size) // page_size == 20 - ledger.num_free


def test_the_last_page_can_be_taken():
    ledger, new_pages = prepare_extend(empty(num_pages=3), np.array([1, 2], I32), np.array([8, 3], I32))
    assert ledger.num_free == 0
    assert sorted(page for page in new_pages.reshape(-1).tolist() if page >= 0) == [1, 2, 3]
