"""The clocks of one request, iteration by iteration: worked vectors of SGLang's Spec V2 scheduler, held against the transitions.

steps 3, top-k 1, 4 draft tokens: a window of 4, a reserve of 8 under overlap. The prompt has 20 tokens. `C` is `kv_committed_len`, `A`
`kv_allocated_len`, `F` the frontier a launch starts from, `S` the one it publishes, `N` prompt + output, slack `A - (F + 4)`.
"""

import numpy as np
import pytest
from oracles import Run, Step, ceil_to, clock_table, freeze, next_allocated

from jspec.scheduler import max_new_pages, plan, prepare_extend, reserve
from jspec.state import Limits, init_ledger
from jspec.state.invariants import InvariantError, check

ACCEPTS = [4, 1, 3, 2, 4]


def drive(*, prompt_len=20, page_size, accepts, depth, width=4):
    """The same table as `clock_table`, read off the real state."""
    run = Run(page_size=page_size, depth=depth, alloc_len=width, context_len=prompt_len + 300)
    run.submit(1, prompt_len, max_new_tokens=280)
    table, frontier, allocated = [], prompt_len, prompt_len
    for i, accepted in enumerate([1, *accepts]):
        before = frontier
        batch = run.plan()
        plan_committed, plan_allocated, _ = run.lens()
        run.launch(batch, [[0] * accepted])
        if len(run.results) > depth:
            run.settle()
        frontier = int(run.device.frontier[1])
        committed, _, seqlen = run.lens()
        table.append(
            Step(
                plan_committed=plan_committed,
                plan_allocated=plan_allocated,
                frontier=before,
                published=frontier,
                committed=committed,
                seqlen=seqlen,
                need=plan_allocated - allocated,
                new_pages=int((batch.new_pages >= 0).sum()) if i else 0,
                slack=plan_allocated - (before + (width if i else 0)),
            )
        )
        allocated = plan_allocated
    return table


# (C at plan, A at plan, F, S, C end, N end, slack) of iterations 1 to 5
PAGE_1 = {
    0: [
        (20, 28, 20, 24, 24, 25, 4),
        (24, 32, 24, 25, 25, 26, 4),
        (25, 33, 25, 28, 28, 29, 4),
        (28, 36, 28, 30, 30, 31, 4),
        (30, 38, 30, 34, 34, 35, 4),
    ],
    1: [
        (20, 28, 20, 24, 20, 21, 4),
        (20, 28, 24, 25, 24, 25, 0),
        (24, 32, 25, 28, 25, 26, 3),
        (25, 33, 28, 30, 28, 29, 1),
        (28, 36, 30, 34, 30, 31, 2),
    ],
}


def test_page_size_1_with_overlap():
    table = drive(page_size=1, accepts=ACCEPTS, depth=1)
    got = [(s.plan_committed, s.plan_allocated, s.frontier, s.published, s.committed, s.seqlen, s.slack) for s in table]
    assert got[0][:6] == (20, 20, 20, 20, 20, 20)
    assert got[1:] == PAGE_1[1]
    assert [s.published - s.committed for s in table] == [0, 4, 1, 3, 2, 4]


def two_windows_without_overlap(accepts, page_size):
    """SGLang reserves two windows without overlap as well; jspec reserves the one it needs. The committed side is the same."""
    return clock_table(prompt_len=20, page_size=page_size, accepts=accepts, depth=0, windows=2)


def test_page_size_1_without_overlap():
    table = drive(page_size=1, accepts=ACCEPTS, depth=0)
    assert (table[0].plan_committed, table[0].plan_allocated, table[0].published) == (20, 20, 20)
    assert (table[0].committed, table[0].seqlen) == (20, 21)
    for step, (c_plan, a_plan, frontier, published, c_end, n_end, slack) in zip(table[1:], PAGE_1[0], strict=True):
        assert (step.plan_committed, step.frontier, step.published) == (c_plan, frontier, published)
        assert (step.committed, step.seqlen) == (c_end, n_end)
        assert (step.plan_allocated, step.slack) == (a_plan - 4, slack - 4)  # one window instead of two
        assert step.published == step.committed
    reference = two_windows_without_overlap(ACCEPTS, 1)
    assert [(s.plan_committed, s.plan_allocated, s.frontier, s.published, s.committed, s.seqlen, s.slack)
            for s in reference[1:]] == PAGE_1[0]  # fmt: skip


# --- tightness -----------------------------------------------------------------------------------------------------------


def test_two_windows_are_just_enough_under_overlap():
    table = drive(page_size=1, accepts=[4, 4, 4, 4], depth=1)
    got = [(s.plan_committed, s.plan_allocated, s.frontier, s.slack) for s in table[2:]]
    assert got == [(20, 28, 24, 0), (24, 32, 28, 0), (28, 36, 32, 0)]


@pytest.mark.parametrize("page_size", [1, 4])
def test_one_window_less_writes_past_the_allocation(page_size):
    run = Run(page_size=page_size, depth=1)
    run.submit(1, 20)
    run.step([[0]])
    short = Limits(context_len=256, alloc_len=4, depth=0, max_prefill_tokens=256, max_prefill_rows=8)
    run.state, batch, _ = plan(run.state, limits=short)
    run.launch(batch, [[0] * 4])
    run.settle()  # of the prefill
    run.state, batch, _ = plan(run.state, limits=short)
    frontier, (_, allocated, _) = int(run.device.frontier[1]), run.lens()
    assert (frontier, frontier + 4, allocated) == (24, 28, 24)  # the window [24, 28) against A = 24
    with pytest.raises(AssertionError, match="a write past the allocation"):
        run.launch(batch, [[0] * 4])
    run.device.frontier = np.array(
        [0, 28], np.int32
    )  # had it been launched, the frontier would have left the row's pages
    with pytest.raises(InvariantError, match="the frontier stays in the allocation"):
        check(run.state, limits=run.limits, frontier=run.device.frontier)


@pytest.mark.parametrize("width", [1, 3, 8])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_full_accepts_use_the_whole_reserve_at_every_depth(depth, width):
    table = drive(page_size=1, accepts=[width] * 8, depth=depth, width=width)
    slack = [step.slack for step in table[1:]]
    assert min(slack) == 0 and slack[depth:] == [0] * (8 - depth)
    short = clock_table(prompt_len=20, page_size=1, accepts=[width] * 8, depth=depth, width=width, windows=depth)
    assert min(step.slack for step in short[1:]) == -width


# --- page size 16 ----------------------------------------------------------------------------------------------------------

# (C at plan, A at plan, need, new pages, F, S, C end, N end, slack)
PAGE_16 = [
    (20, 32, 12, 0, 20, 24, 20, 21, 8),
    (20, 32, 0, 0, 24, 25, 24, 25, 4),
    (24, 32, 0, 0, 25, 28, 25, 26, 3),
    (25, 48, 16, 1, 28, 30, 28, 29, 16),
    (28, 48, 0, 0, 30, 34, 30, 31, 14),
]
# without overlap: (C at plan, A at plan, need, new pages, slack), two windows reserved
PAGE_16_TWO_WINDOWS = [
    (20, 32, 12, 0, 8),
    (24, 32, 0, 0, 4),
    (25, 48, 16, 1, 19),
    (28, 48, 0, 0, 16),
    (30, 48, 0, 0, 14),
]
# the same with jspec's one window: ceil(25 + 4) and ceil(28 + 4) still end at 32
PAGE_16_ONE_WINDOW = [(20, 32, 12, 0, 8), (24, 32, 0, 0, 4), (25, 32, 0, 0, 3), (28, 32, 0, 0, 0), (30, 48, 16, 1, 14)]


def test_page_size_16_with_overlap():
    table = drive(page_size=16, accepts=ACCEPTS, depth=1)
    assert [(s.plan_committed, s.plan_allocated, s.need, s.new_pages, s.frontier, s.published, s.committed, s.seqlen, s.slack)
            for s in table[1:]] == PAGE_16  # fmt: skip


def test_page_size_16_without_overlap():
    def short(table):
        return [(s.plan_committed, s.plan_allocated, s.need, s.new_pages, s.slack) for s in table[1:]]

    assert short(two_windows_without_overlap(ACCEPTS, 16)) == PAGE_16_TWO_WINDOWS
    assert short(drive(page_size=16, accepts=ACCEPTS, depth=0)) == PAGE_16_ONE_WINDOW


def test_page_size_16_at_the_extremes():
    full = drive(page_size=16, accepts=[4, 4, 4, 4], depth=1)
    assert [(s.plan_committed, s.plan_allocated, s.frontier, s.slack) for s in full[3:]] == [
        (24, 32, 28, 0),
        (28, 48, 32, 12),
    ]
    least = drive(page_size=16, accepts=[1, 1, 1, 1, 1], depth=1)[1:]
    assert [s.plan_allocated for s in least] == [32] * 5
    assert [s.plan_committed for s in least] == [20, 20, 21, 22, 23]
    assert [s.frontier for s in least] == [20, 21, 22, 23, 24]
    assert [s.slack for s in least] == [8, 7, 6, 5, 4]


def test_slots_of_reserved_positions():
    run = Run(page_size=16, depth=1)
    run.submit(1, 20)
    batch, _ = run.step([[0]])
    q0, q1 = batch.new_pages[0][:2].tolist()
    assert batch.new_pages[0].tolist()[2:] == [-1] * (len(batch.new_pages[0]) - 2)

    def slots(low, high):
        table = run.state.ledger.page_table[1]
        return [int(table[position // 16]) * 16 + position % 16 for position in range(low, high)]

    batch, _ = run.step([[0] * 4])
    assert (batch.new_pages < 0).all() and batch.first_page.tolist() == [2]
    assert slots(20, 32) == list(range(q1 * 16 + 4, q1 * 16 + 16))  # the rest of the prompt's page, no new one
    for accepted in (1, 3):
        batch, _ = run.step([[0] * accepted])
        assert (batch.new_pages < 0).all()
    batch, _ = run.step([[0] * 2])
    page = batch.new_pages[0, 0]
    assert batch.first_page.tolist() == [2] and page not in (q0, q1)
    assert slots(32, 48) == list(range(page * 16, page * 16 + 16))


# --- sizes -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page_size", "reserve", "rows", "expected"),
    [
        (4, 4, [(8, 10)], [16]),
        (4, 4, [(4, 8)], [12]),
        (4, 4, [(32, 10)], [32]),
        (1, 3, [(7, 9)], [12]),
        (8, 17, [(8, 8)], [32]),
        (4, 4, [(0, 5), (8, 5), (20, 30)], [12, 12, 36]),
    ],
)
def test_sizing_formula(page_size, reserve, rows, expected):
    """(A, C) -> next A. Most of these start with A < C, which no transition makes: they test the oracle, and the next test reaches the rest."""
    got = [next_allocated(allocated, committed, reserve, page_size) for allocated, committed in rows]
    assert got == expected
    if len(rows) == 3:
        assert sum(got) - sum(allocated for allocated, _ in rows) == 32


@pytest.mark.parametrize(
    ("page_size", "prompt_len", "first", "then", "expected"),
    [
        (4, 10, 4, 4, 16),
        (4, 8, 4, 4, 12),
        (4, 10, 20, 4, 32),  # A = 32 from a wider reserve before: it does not shrink
        (1, 9, 3, 3, 12),
        (8, 8, 17, 17, 32),
        (4, 5, 3, 4, 12),  # A = 8 first
        (4, 5, 4, 4, 12),
        (4, 30, 4, 4, 36),
    ],
)
def test_sizing_through_reserve(page_size, prompt_len, first, then, expected):
    ledger = init_ledger(max_running=1, num_pages=64, pages_per_row=64, page_size=page_size)
    ledger, _ = prepare_extend(freeze(ledger), np.array([1], np.int32), np.array([prompt_len], np.int32))
    active = np.array([False, True])
    ledger, _ = reserve(freeze(ledger), active, alloc_len=first, depth=0)
    assert ledger.kv_allocated_len.tolist() == [0, ceil_to(prompt_len + first, page_size)]
    ledger, _ = reserve(freeze(ledger), active, alloc_len=then, depth=0)
    assert ledger.kv_allocated_len.tolist() == [0, expected]
    assert ledger.kv_committed_len.tolist() == [0, prompt_len]


def test_need_of_the_memory_check():
    """p = 16: (A, C) = (32, 25) needs a page, (32, 24) and (20, 20) need none."""
    run = Run(page_size=16, max_running=3, depth=1)
    for serial in (1, 2):
        run.submit(serial, 20)
    run.step([[0], [0]])
    run.step([[0] * 4, [0] * 4])
    run.step([[0], [0]])  # settles the runs of four
    assert run.lens(1)[:2] == run.lens(2)[:2] == (24, 32)
    run.submit(3, 20)
    run.step([[0]])  # a prefill goes first; settles the runs of one
    assert run.lens(1)[:2] == run.lens(2)[:2] == (25, 32)
    assert run.lens(3)[:2] == (20, 20)
    batch = run.plan()
    assert (batch.new_pages >= 0).sum(axis=1).tolist() == [1, 1, 0]
    assert [run.lens(row)[1] for row in (1, 2, 3)] == [48, 48, 32]


def test_no_need_at_the_end_of_the_page():
    run = Run(page_size=16, depth=1)
    run.submit(1, 20)
    for accepted in (1, 4, 1):
        run.step([[0] * accepted])
    assert run.lens()[:2] == (24, 32)
    batch = run.plan()
    assert (batch.new_pages < 0).all() and run.lens()[1] == 32


@pytest.mark.parametrize("page_size", [1, 4, 8, 16, 64])
@pytest.mark.parametrize(("alloc_len", "depth"), [(1, 0), (4, 0), (4, 1), (17, 0), (5, 2)])
def test_most_pages_of_one_reserve(alloc_len, depth, page_size):
    """`max_new_pages` against all committed lengths within a page: enough, and reached."""
    reserve = (depth + 1) * alloc_len
    need = [
        (next_allocated(ceil_to(c, page_size), c, reserve, page_size) - ceil_to(c, page_size)) // page_size
        for c in range(1, 2 * page_size + 1)
    ]
    assert max(need) == max_new_pages(alloc_len=alloc_len, depth=depth, page_size=page_size)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize(("width", "depth"), [(1, 0), (1, 1), (4, 1), (8, 2)])
def test_rows_have_room_for_the_reserve_at_the_context_limit(page_size, width, depth):
    context_len = 40
    for prompt_len in (2, 17, 39):
        run = Run(page_size=page_size, depth=depth, alloc_len=width, context_len=context_len, num_pages=100)
        run.submit(1, prompt_len, max_new_tokens=context_len - prompt_len)
        while run.state.waiting or (run.state.requests.serial > 0).any():
            batch = run.plan()
            if batch is not None:
                run.launch(batch, [[0]])  # one token a step: the longest committed length at the last plan
            if len(run.results) > (depth if batch is not None else 0):
                run.settle()
        assert run.state.ledger.num_free == 100


# --- any accepts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_any_accepts_follow_the_oracle(depth, page_size):
    rng = np.random.default_rng([depth, page_size])
    for _ in range(4):
        width = int(rng.integers(1, 9))
        accepts = rng.integers(1, width + 1, 10).tolist()
        case = dict(prompt_len=int(rng.integers(1, 70)), page_size=page_size, accepts=accepts, depth=depth, width=width)
        assert drive(**case) == clock_table(**case), case
