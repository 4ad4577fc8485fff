"""Pages of a prompt: shared or new, all at once or a chunk at a time."""

import numpy as np
import pytest
from oracles import ceil_to, freeze

from jspec.scheduler import prepare_extend, share_prefix
from jspec.state import init_ledger, num_pages_held

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


# --- a chunk at a time -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_prompt_in_chunks_ends_where_it_would_at_once(page_size):
    """Lengths and pages, whatever the cuts; each time all pages of the row are told."""
    rng = np.random.default_rng(page_size)
    for _ in range(8):
        length = int(rng.integers(1, 8 * page_size + 1))
        cuts = np.nonzero(rng.random(9) < 0.5)[0] * page_size
        whole, all_pages = prepare_extend(empty(page_size=page_size), np.array([2], I32), np.array([length], I32))
        ledger = empty(page_size=page_size)
        for end in [*(cut for cut in cuts if 0 < cut < length), length]:
            ledger, pages = prepare_extend(freeze(ledger), np.array([2], I32), np.array([end], I32))
            held = ceil_to(end, page_size) // page_size
            assert pages[0, :held].tolist() == all_pages[0, :held].tolist() and (pages[0, held:] == -1).all()
            assert ledger.kv_committed_len[2] == ledger.kv_allocated_len[2] == end
            assert ledger.num_free == 20 - held
        for name in ("kv_committed_len", "kv_allocated_len", "cache_protected_len", "page_table", "num_free"):
            assert np.array_equal(getattr(ledger, name), getattr(whole, name)), name


def test_a_chunk_and_a_new_prompt_in_one_batch():
    """Row 3 goes on by a page and a half, row 1 begins: each new page is taken once, and row 2 keeps what it has."""
    ledger, _ = prepare_extend(empty(), np.array([2, 3], I32), np.array([5, 8], I32))
    ledger, pages = prepare_extend(freeze(ledger), np.array([3, 1, 0], I32), np.array([14, 6, 0], I32))
    assert pages.tolist() == [[3, 4, 5, 6] + [-1] * 4, [7, 8] + [-1] * 6, [-1] * 8]
    assert ledger.page_table[:, :5].tolist() == [[0] * 5, [7, 8, 0, 0, 0], [1, 2, 0, 0, 0], [3, 4, 5, 6, 0], [0] * 5]
    assert ledger.kv_committed_len.tolist() == ledger.kv_allocated_len.tolist() == [0, 6, 5, 14, 0]
    assert ledger.free_pages[: ledger.num_free].tolist() == list(range(20, 8, -1))


# --- a prefix that is cached -------------------------------------------------------------------------------------------


def table_of(*rows):
    """Pages of some rows as `share_prefix` takes them."""
    return np.array([[*pages, *[0] * (8 - len(pages))] for pages in rows], I32)


def test_a_shared_prefix_is_committed_and_locked():
    """Pages 1 to 3 hold a prompt of row 1. Row 2 begins with two of them, row 4 with one, row 3 with none."""
    before, _ = prepare_extend(empty(), np.array([1], I32), np.array([12], I32))
    before = freeze(before)
    ledger = share_prefix(before, np.array([2, 4, 3], I32), table_of([1, 2], [1], []))
    assert ledger.kv_committed_len.tolist() == ledger.kv_allocated_len.tolist() == [0, 12, 8, 0, 4]
    assert ledger.cache_protected_len.tolist() == [0, 0, 8, 0, 4]
    assert ledger.page_table[:, :4].tolist() == [[0] * 4, [1, 2, 3, 0], [1, 2, 0, 0], [0] * 4, [1, 0, 0, 0]]
    assert ledger.page_locks.tolist() == [0, 2, 1] + [0] * 18
    assert num_pages_held(ledger).tolist() == [0, 3, 2, 0, 1]
    assert ledger.num_free == before.num_free and np.array_equal(ledger.free_pages, before.free_pages)


def test_locks_add_up():
    once = share_prefix(empty(), np.array([2], I32), table_of([5, 9]))
    twice = share_prefix(freeze(once), np.array([1, 4], I32), table_of([5, 9, 7], [5]))
    assert {page: int(count) for page, count in enumerate(twice.page_locks) if count} == {5: 3, 9: 2, 7: 1}


def test_padding_shares_nothing():
    before = empty()
    ledger = share_prefix(before, np.array([0, 3, 0], I32), table_of([], [4, 6], []))
    alone = share_prefix(before, np.array([3], I32), table_of([4, 6]))
    for name in (
        "kv_committed_len", "kv_allocated_len", "cache_protected_len", "page_table", "page_locks", "num_free"
    ):  # fmt: skip
        assert np.array_equal(getattr(ledger, name), getattr(alone, name)), name
    assert not ledger.page_table[0].any() and ledger.page_locks[0] == 0


def test_nothing_shared_changes_nothing():
    before = empty()
    for rows in ([], [1, 2]):
        ledger = share_prefix(before, np.array(rows, I32), table_of(*[[]] * len(rows)).reshape(-1, 8))
        for name in ("kv_committed_len", "kv_allocated_len", "cache_protected_len", "page_table", "page_locks"):
            assert np.array_equal(getattr(ledger, name), getattr(before, name)), name


def test_a_prefill_goes_on_behind_what_is_shared():
    """The shared pages are told with the new ones, and stay protected: what the row computes is its own."""
    ledger, _ = prepare_extend(empty(), np.array([3], I32), np.array([12], I32))
    ledger = share_prefix(freeze(ledger), np.array([1, 2], I32), table_of([1, 2], [1]))
    ledger, pages = prepare_extend(freeze(ledger), np.array([1, 2], I32), np.array([13, 5], I32))
    assert pages.tolist() == [[1, 2, 4, 5] + [-1] * 4, [1, 6] + [-1] * 6]
    assert ledger.kv_committed_len.tolist() == ledger.kv_allocated_len.tolist() == [0, 13, 5, 12, 0]
    assert ledger.cache_protected_len.tolist() == [0, 8, 4, 0, 0]
    assert ledger.page_locks[:4].tolist() == [0, 2, 1, 0] and ledger.num_free == 20 - 6
