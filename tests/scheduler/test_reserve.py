"""The reserve ahead of speculative writes: pages, order, shortage."""

import numpy as np
import pytest
from oracles import ceil_to, freeze, next_allocated

from jspec.scheduler import max_new_pages, pages_short, prepare_extend, reserve
from jspec.state import init_ledger, num_pages_held

I32 = np.int32


def ledger_with(prompt_lens, *, page_size, num_pages, pages_per_row=64):
    """Rows 1.. hold prompts of these lengths; 0 leaves a row free."""
    ledger = init_ledger(
        max_running=len(prompt_lens), num_pages=num_pages, pages_per_row=pages_per_row, page_size=page_size
    )
    rows = [row for row, length in enumerate(prompt_lens, 1) if length]
    lens = [length for length in prompt_lens if length]
    return freeze(prepare_extend(freeze(ledger), np.array(rows, I32), np.array(lens, I32))[0])


def all_pages(ledger):
    """Every page of the pool, by where it is."""
    held = num_pages_held(ledger)
    used = [page for row, count in enumerate(held) for page in ledger.page_table[row, :count].tolist()]
    return sorted(used + ledger.free_pages[: ledger.num_free].tolist())


def test_only_active_rows_grow():
    ledger = ledger_with([20, 20, 0], page_size=4, num_pages=40)
    after, reserved = reserve(ledger, np.array([False, False, True, False]), alloc_len=4, depth=1)
    assert after.kv_allocated_len.tolist() == [0, 20, 28, 0]
    assert after.kv_committed_len.tolist() == [0, 20, 20, 0]
    assert reserved.granted.tolist() == [False, False, True, False]
    assert reserved.first_page[2] == 5
    assert (reserved.new_pages[[0, 1, 3]] == -1).all()
    assert after.page_table[2, 5:7].tolist() == reserved.new_pages[2].tolist()
    assert (after.page_table[[0, 1, 3]] == ledger.page_table[[0, 1, 3]]).all()
    assert after.num_free == ledger.num_free - 2
    assert all_pages(after) == list(range(1, 41))


def test_nobody_active_changes_nothing():
    ledger = ledger_with([20, 7], page_size=4, num_pages=40)
    after, reserved = reserve(ledger, np.zeros(3, bool), alloc_len=4, depth=1)
    for name in ("kv_allocated_len", "kv_committed_len", "page_table", "num_free", "free_pages"):
        assert np.array_equal(getattr(after, name), getattr(ledger, name)), name
    assert not reserved.granted.any() and (reserved.new_pages == -1).all()


def test_a_reserve_in_place_is_not_taken_twice():
    ledger = ledger_with([20, 33], page_size=16, num_pages=40)
    active = np.array([False, True, True])
    once, _ = reserve(ledger, active, alloc_len=4, depth=1)
    twice, reserved = reserve(freeze(once), active, alloc_len=4, depth=1)
    assert reserved.granted.tolist() == active.tolist() and (reserved.new_pages == -1).all()
    assert twice.kv_allocated_len.tolist() == once.kv_allocated_len.tolist() and twice.num_free == once.num_free


def test_an_allocation_never_shrinks():
    ledger = ledger_with([10], page_size=4, num_pages=40)
    active = np.array([False, True])
    wide, _ = reserve(ledger, active, alloc_len=10, depth=1)
    narrow, reserved = reserve(freeze(wide), active, alloc_len=1, depth=0)
    assert wide.kv_allocated_len[1] == narrow.kv_allocated_len[1] == 32
    assert reserved.granted[1] and (reserved.new_pages == -1).all() and narrow.num_free == wide.num_free


@pytest.mark.parametrize(
    ("spare", "granted"),
    [(0, []), (1, []), (2, [1]), (3, [1]), (4, [1, 2]), (5, [1, 2]), (6, [1, 2, 4])],
)
def test_when_pages_run_short_rows_are_granted_in_order(spare, granted):
    ledger = ledger_with([4, 8, 0, 4], page_size=4, num_pages=4 + spare)
    assert ledger.num_free == spare
    after, reserved = reserve(ledger, np.array([False, True, True, False, True]), alloc_len=4, depth=1)
    assert np.nonzero(reserved.granted)[0].tolist() == granted
    for row in (1, 2, 4):
        grew = after.kv_allocated_len[row] - ledger.kv_allocated_len[row]
        assert grew == (8 if row in granted else 0)
        assert (reserved.new_pages[row] >= 0).sum() == grew // 4
    assert all_pages(after) == list(range(1, 5 + spare))


def test_after_a_refusal_only_rows_that_need_nothing_go_on():
    """One page is left. Row 1 takes it, row 2 lacks one, row 3 has room in its last page, row 4 would need one, too."""
    ledger = ledger_with([4, 8, 5, 4], page_size=4, num_pages=7)
    assert ledger.num_free == 1
    after, reserved = reserve(ledger, np.array([False, True, True, True, True]), alloc_len=3, depth=0)
    assert reserved.granted.tolist() == [False, True, False, True, False]
    assert after.kv_allocated_len.tolist() == [0, 8, 8, 8, 4]
    assert after.num_free == 0


def test_a_wide_need_does_not_let_a_narrow_one_pass():
    """Row 1 lacks one of two pages; row 2, behind it, would be content with the one there is."""
    ledger = ledger_with([8, 5], page_size=4, num_pages=5)
    after, reserved = reserve(ledger, np.array([False, True, True]), alloc_len=5, depth=0)
    assert reserved.granted.tolist() == [False, False, False] and after.num_free == 1


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_random_ledgers_against_one_row_at_a_time(page_size, depth):
    rng = np.random.default_rng([7, page_size, depth])
    for _ in range(8):
        lens = (rng.integers(0, 80, 6) * (rng.random(6) < 0.8)).tolist()
        pages = [ceil_to(length, page_size) // page_size for length in lens]
        ledger = ledger_with(
            lens, page_size=page_size, num_pages=sum(pages) + int(rng.integers(0, 40)), pages_per_row=128
        )
        state = [[length, length] for length in lens]  # C, A
        free = int(ledger.num_free)
        for _ in range(4):
            width = int(rng.integers(1, 9))
            active = np.append(False, (rng.random(6) < 0.7) & (np.array(lens) > 0))
            lacking = pages_short(freeze(ledger), active, reserve_len=(depth + 1) * width)
            assert lacking == sum(
                (next_allocated(allocated, committed, (depth + 1) * width, page_size) - ceil_to(allocated, page_size))
                // page_size
                for row, (committed, allocated) in enumerate(state, 1)
                if active[row]
            )
            enough, had = lacking <= free, free
            ledger, reserved = reserve(freeze(ledger), active, alloc_len=width, depth=depth)
            short = False
            for row, (committed, allocated) in enumerate(state, 1):
                if not active[row]:
                    assert not reserved.granted[row]
                    continue
                wanted = next_allocated(allocated, committed, (depth + 1) * width, page_size)
                need = (wanted - ceil_to(allocated, page_size)) // page_size
                short = short or need > free
                assert reserved.granted[row] == (need == 0 or not short)
                if reserved.granted[row]:
                    new = [page for page in reserved.new_pages[row].tolist() if page >= 0]
                    first = ceil_to(allocated, page_size) // page_size
                    assert len(new) == need and reserved.first_page[row] == first
                    assert ledger.page_table[row, first : first + need].tolist() == new
                    state[row - 1][1], free = wanted, free - need
            assert reserved.new_pages.shape == (7, max_new_pages(alloc_len=width, depth=depth, page_size=page_size))
            assert ledger.kv_allocated_len[1:].tolist() == [allocated for _, allocated in state]
            assert ledger.num_free == free
            assert enough == reserved.granted[active].all() and (free == had - lacking or not enough)
            assert all_pages(ledger) == list(range(1, ledger.free_pages.size))


@pytest.mark.parametrize(("active", "short"), [([], 0), ([1], 2), ([2], 1), ([3], 0), ([1, 2], 3), ([1, 2, 3], 3)])
def test_pages_that_a_reserve_lacks(active, short):
    """p = 4, a reserve of 7: row 1 (8 tokens) lacks two pages, row 2 (5, of 8) one; row 3 has its own in place."""
    ledger = ledger_with([8, 5, 5], page_size=4, num_pages=40)
    ledger, _ = reserve(ledger, np.array([False, False, False, True]), alloc_len=7, depth=0)
    rows = np.isin(np.arange(4), active)
    before = freeze(ledger)
    got = pages_short(before, rows, reserve_len=7)
    assert got.dtype == I32 and got == short
    assert reserve(before, rows, alloc_len=7, depth=0)[0].num_free == before.num_free - short


def test_a_reserve_that_no_table_holds_lacks_nothing():
    """It is never granted, so no page would help."""
    ledger = ledger_with([8, 4], page_size=4, num_pages=40, pages_per_row=3)
    active = np.array([False, True, True])
    assert pages_short(ledger, active, reserve_len=8) == 2
    after, reserved = reserve(ledger, active, alloc_len=8, depth=0)
    assert reserved.granted.tolist() == [False, False, True] and after.num_free == ledger.num_free - 2
