"""Who may start, in which order, a chunk at a time, with how many pages promised."""

import chex
import jax
import numpy as np
import pytest
from oracles import Run, ceil_to, next_allocated

from jspec.scheduler import admit, chunk_len, launchable, pages_to_finish
from jspec.scheduler.admit import MOST_COMPARED, MOST_NEW_TOKENS, WORTH_WAITING_FOR
from jspec.state import ForwardMode, Limits, Waiting

I32 = np.int32


def most_pages(prompt_len, max_new_tokens, *, depth, width, page_size):
    """Pages a request can hold at most, by trying every order of launch, settle and retraction with every accept length."""
    # outputs, C, A, accepts under way (0 is the prefill)
    start = (0, prompt_len, prompt_len, (0,))
    seen, todo, most = {start}, [start], 0
    while todo:
        outputs, committed, allocated, under_way = todo.pop()
        most = max(most, ceil_to(allocated, page_size) // page_size)
        # Retracted, it comes back with a prefill of all it has.
        reached = [(outputs, prompt_len + outputs, prompt_len + outputs, (0,))]
        if under_way:
            first, rest = under_way[0], under_way[1:]
            if outputs + max(first, 1) < max_new_tokens:  # else it ends here
                reached.append((outputs + max(first, 1), committed + first, allocated, rest))
        if len(under_way) <= depth and outputs + len(under_way) < max_new_tokens:
            after = next_allocated(allocated, committed, (depth + 1) * width, page_size)
            reached += [(outputs, committed, after, (*under_way, accept)) for accept in range(1, width + 1)]
        for state in reached:
            if state not in seen:
                seen.add(state)
                todo.append(state)
    return most


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("depth", "width"), [(0, 1), (0, 3), (1, 1), (1, 3), (2, 2)])
def test_pages_to_finish_is_exact(depth, width, page_size):
    limits = Limits(context_len=99, alloc_len=width, depth=depth, max_prefill_tokens=9, max_prefill_rows=9)
    for prompt_len in (1, 3, 4, 15, 16, 17):
        for max_new_tokens in (1, 2, 3, 6):
            need = pages_to_finish(I32(prompt_len), I32(max_new_tokens), limits=limits, page_size=page_size)
            assert need == most_pages(prompt_len, max_new_tokens, depth=depth, width=width, page_size=page_size)


def test_pages_to_finish_takes_columns():
    limits = Limits(context_len=99, alloc_len=4, depth=1, max_prefill_tokens=9, max_prefill_rows=9)
    need = pages_to_finish(np.array([20, 20, 1], I32), np.array([1, 6, 2], I32), limits=limits, page_size=16)
    assert need.dtype == I32 and need.tolist() == [2, 2, 1]  # 20; 20 + 4 + 8 = 32; 1 + 0 + 8


def test_first_come_first_served():
    run = Run(max_running=3, page_size=4, max_prefill_rows=8)
    for serial, prompt_len in enumerate((5, 9, 2, 7), 1):
        run.submit(serial, prompt_len, max_new_tokens=10, stops=(7,) * (serial - 1))
    batch = run.plan()
    assert batch.forward_mode is ForwardMode.EXTEND and batch.forward_iter == run.state.forward_iter == 1
    assert batch.serials.tolist() == [1, 2, 3] and batch.rows.tolist() == [1, 2, 3]
    assert batch.extend_lens.tolist() == [5, 9, 2] and batch.prefix_lens.tolist() == [0, 0, 0]
    assert batch.goes_on.tolist() == [False] * 3 and batch.tails is None and run.left == ()
    assert batch.expected_iter.tolist() == batch.epochs.tolist() == batch.first_page.tolist() == [0, 0, 0]
    assert batch.kv_bound == 9 and (batch.new_pages >= 0).sum(axis=1).tolist() == [2, 3, 1]
    assert [request.serial for request in run.state.waiting] == [4]
    requests = run.state.requests
    assert requests.serial.tolist() == [0, 1, 2, 3] and requests.prompt_len.tolist() == [0, 5, 9, 2]
    assert requests.fill_len.tolist() == [0, 5, 9, 2] and not requests.output_len.any()
    assert list(run.state.admitted) == [1, 2, 3] and run.state.admitted[2] == Waiting(2, 9, 10, (7,))
    assert requests.max_new_tokens.tolist() == [0, 10, 10, 10] and requests.last_launch.tolist() == [0, 1, 1, 1]
    assert (requests.stop_token_ids == 7).sum(axis=1).tolist() == [0, 0, 1, 2]
    run.launch(batch, [[0]] * 3)


def test_rows_are_reused_lowest_first_with_their_epoch():
    run = Run(max_running=3)
    for serial, max_new_tokens in enumerate((1, 9, 1), 1):
        run.submit(serial, 5, max_new_tokens)
    run.step([[0]] * 3)
    run.settle()
    for serial in (4, 5):
        run.submit(serial, 5)
    batch = run.plan()
    assert (batch.rows.tolist(), batch.epochs.tolist(), batch.serials.tolist()) == ([1, 3], [1, 1], [4, 5])
    run.launch(batch, [[0], [0]])


def admitted(run):
    batch = run.plan()
    if batch is None or batch.forward_mode is not ForwardMode.EXTEND:
        return []
    run.launch(batch, [[0]] * len(batch.rows))
    return batch.serials.tolist()


def test_one_batch_keeps_to_its_tokens_and_rows():
    run = Run(max_running=8, max_prefill_tokens=10, max_prefill_rows=3)
    for serial, prompt_len in enumerate((6, 4, 1, 2, 2, 2, 2, 3), 1):
        run.submit(serial, prompt_len, max_new_tokens=9)
    assert admitted(run) == [1, 2]  # 6 + 4
    assert admitted(run) == [3, 4, 5]  # three rows
    run.settle()
    assert admitted(run) == [6, 7, 8]


def batches(run, count):
    """The next EXTEND batches, each `(serials, prefix_lens, extend_lens, goes_on)`, with whatever is settled on the way."""
    found = []
    while len(found) < count:
        batch = run.plan()
        assert batch.forward_mode is ForwardMode.EXTEND
        columns = (batch.serials, batch.prefix_lens, batch.extend_lens, batch.goes_on)
        found.append(tuple(column.tolist() for column in columns))
        run.launch(batch, [[] if goes_on else [0] for goes_on in batch.goes_on.tolist()])
        if len(run.results) > run.limits.depth:
            run.settle()
    return found


def test_a_long_prompt_goes_in_chunks():
    """One batch holds 10 tokens. A chunk ends at a page's end, one prompt at a time goes on, and what it leaves of a batch is for those behind it."""
    run = Run(max_running=4, page_size=4, max_prefill_tokens=10)
    for serial, prompt_len in enumerate((3, 40, 3, 4), 1):
        run.submit(serial, prompt_len, max_new_tokens=9)
    assert batches(run, 7) == [
        ([1, 2], [0, 0], [3, 4], [False, True]),  # 7 tokens are left for request 2: one page
        ([2], [4], [8], [True]),
        ([2], [12], [8], [True]),
        ([2], [20], [8], [True]),
        ([2], [28], [8], [True]),
        ([2, 3], [36, 0], [4, 3], [False, False]),  # 3 tokens are left, no page of request 4
        ([4], [0], [4], [False]),
    ]
    assert run.step([[0]] * 4)[0].forward_mode is ForwardMode.DECODE


def test_a_chunk_fills_the_batch():
    """With pages of one token a prompt may be cut anywhere: every batch is full."""
    run = Run(max_running=4, max_prefill_tokens=10)
    for serial, prompt_len in enumerate((6, 9, 25, 1), 1):
        run.submit(serial, prompt_len, max_new_tokens=9)
    assert batches(run, 5) == [
        ([1, 2], [0, 0], [6, 4], [False, True]),
        ([2, 3], [4, 0], [5, 5], [False, True]),
        ([3], [5], [10], [True]),
        ([3], [15], [10], [False]),
        ([4], [0], [1], [False]),
    ]


def test_what_a_chunk_holds():
    """The row's lengths grow by chunks, its pages are shipped whole each time, and it is not launched for decode before the last one."""
    run = Run(max_running=2, page_size=4, max_prefill_tokens=8)
    run.submit(1, 18, max_new_tokens=9)
    for end, pages, goes_on in ((8, [1, 2], True), (16, [1, 2, 3, 4], True), (18, [1, 2, 3, 4, 5], False)):
        batch = run.plan()
        assert batch.rows.tolist() == batch.serials.tolist() == [1] and batch.kv_bound == end
        assert batch.expected_iter.tolist() == batch.first_page.tolist() == [0]
        assert batch.new_pages[0][: len(pages)].tolist() == pages and (batch.new_pages[0][len(pages) :] == -1).all()
        assert batch.goes_on.tolist() == [goes_on] and run.lens() == (end, end, 18)
        assert launchable(run.state.requests, run.state.ledger, run.state.launched).tolist() == [
            False,
            not goes_on,
            False,
        ]
        run.launch(batch, [[] if goes_on else [0]])
        if len(run.results) > 1:
            run.settle()
    assert run.state.requests.last_launch.tolist() == [0, 3, 0] and run.state.requests.output_len[1] == 0
    assert run.step([[0]])[0].expected_iter.tolist() == [3]  # its decode follows the last chunk


def slow_chunk_len(start, end, budget, *, page_size, lookahead):
    """The most tokens that may be prefilled from `start` on, by trying every number of them."""
    fine = [0]
    for length in range(1, min(budget, end - start) + 1):
        stop = start + length
        if stop == end or (stop % page_size == 0 and end - stop >= lookahead):
            fine.append(length)
    return fine[-1]


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_where_a_prompt_is_cut(lookahead, page_size):
    sizes = dict(page_size=page_size, lookahead=lookahead)
    for start in range(0, 3 * page_size, page_size):
        for end in range(start + 1, start + 2 * page_size + lookahead + 3):
            for budget in range(end - start + 3):
                case = (start, end, budget)
                assert chunk_len(*case, **sizes) == slow_chunk_len(*case, **sizes), case


def test_a_chunk_leaves_what_its_draft_looks_ahead_to():
    """11 tokens, of which 10 fit: two pages would leave three, one less than the draft needs, so one page is taken."""
    run = Run(page_size=4, max_prefill_tokens=10, lookahead=4)
    run.submit(1, 11, max_new_tokens=9)
    assert batches(run, 2) == [([1], [0], [4], [True]), ([1], [4], [7], [False])]


# --- expected to fit ---------------------------------------------------------------------------------------------------


def test_nobody_overtakes_a_request_that_waits_for_pages():
    """p = 4, a reserve of 8, ratio 1. Request 1 holds 2 pages and will take 2 more: of 11 pages, 7 are left, 28 tokens. Of these it may still want 9,
    request 2 would want 8 + 4 + 9 = 21, too many, and request 3 1 + 4 + 8 = 13, which would fit."""
    run = Run(max_running=4, page_size=4, num_pages=11, new_token_ratio=1.0)
    run.submit(1, 8, 9)
    assert admitted(run) == [1]
    for serial, sizes in enumerate(((8, 9), (1, 2)), 2):
        run.submit(serial, *sizes)
    while run.state.requests.serial[1]:
        batch = run.plan()
        assert batch is None or batch.forward_mode is ForwardMode.DECODE
        assert [request.serial for request in run.state.waiting] == [2, 3]
        if batch is not None:
            run.launch(batch, [[0]])
        if len(run.results) > (1 if batch is not None else 0):
            run.settle()
    assert admitted(run) == [2, 3]
    alone = Run(max_running=4, page_size=4, num_pages=11, new_token_ratio=1.0)
    alone.submit(1, 8, 9)
    assert admitted(alone) == [1]
    alone.submit(3, 1, 2)
    assert admitted(alone) == [3]


def joins(num_pages, running, new, **settings):
    """Which of the `new` requests, each `(prompt_len, max_new_tokens)`, may start beside the one that runs."""
    run = Run(max_running=9, page_size=4, num_pages=num_pages, **settings)
    run.submit(1, *running)
    assert admitted(run) == [1]
    for serial, sizes in enumerate(new, 2):
        run.submit(serial, *sizes)
    return admitted(run)


@pytest.mark.parametrize(
    ("ratio", "fewest"),
    # 2 pages held, 2 set aside; the rest must hold 33 tokens by the ratio and 8 + 4 + 9: 54, 37.5, 24.3 tokens
    [(1.0, 2 + 2 + 14), (0.5, 2 + 2 + 10), (0.1, 2 + 2 + 7)],
)
def test_a_running_request_counts_with_a_share_of_what_it_may_still_emit(ratio, fewest):
    assert joins(fewest, (8, 33), [(8, 9)], new_token_ratio=ratio) == [2]
    assert joins(fewest - 1, (8, 33), [(8, 9)], new_token_ratio=ratio) == []


def test_pages_are_promised_to_the_last_one():
    """New requests count with all they may emit, one after another: 9 of request 1, 13 beyond its prompt of request 2, 21 of request 3 are 43 tokens, in
    what 6 pages that are held, set aside or taken by request 2 leave."""
    assert joins(6 + 11, (8, 9), [(8, 9), (8, 9)], new_token_ratio=1.0) == [2, 3]
    assert joins(6 + 10, (8, 9), [(8, 9), (8, 9)], new_token_ratio=1.0) == [2]


def test_a_request_counts_with_its_reserve_at_least():
    """One of two tokens reserves 8 all the same, one of a single token never does: 9 + 1 + 4 + 8 = 22, and 9 + 1 + 4 + 1 = 15 tokens."""
    assert joins(4 + 6, (8, 9), [(1, 2)], new_token_ratio=1.0) == [2]
    assert joins(4 + 5, (8, 9), [(1, 2)], new_token_ratio=1.0) == []
    assert joins(4 + 4, (8, 9), [(1, 1)], new_token_ratio=1.0) == [2]
    assert joins(4 + 3, (8, 9), [(1, 1)], new_token_ratio=1.0) == []


def test_no_more_than_so_many_tokens_are_counted():
    """Of 9,000 tokens that a request may emit 4,096 count: 1 + 4 + 4096 + 2 = 4103 tokens, in what one page leaves of the pool."""
    sizes = dict(running=(1, 2), new=[(1, 9000)], new_token_ratio=1.0, context_len=9999, alloc_len=1)
    assert MOST_NEW_TOKENS == 4096
    assert joins(1 + 1026, **sizes) == [2]
    assert joins(1 + 1025, **sizes) == []


def test_alone_a_request_starts_whatever_it_may_want():
    """9 pages of 4 hold its 8 + 25 tokens and the reserve of 1, as the shell has checked, but not 8 + 4 + 26, which it would count with beside others."""
    run = Run(max_running=2, page_size=4, num_pages=9, depth=0, alloc_len=1)
    run.submit(1, 8, 26)
    assert pages_to_finish(I32(8), I32(26), limits=run.limits, page_size=4) == 9
    for _ in range(26):
        run.step([[0]])
    assert not run.state.requests.serial.any() and run.state.ledger.num_free == 9


def test_what_running_rows_need_next_is_set_aside():
    """Beside a row of 2 pages, 4 are left. A prompt of 4 that wants 4 + 4 + 1 tokens needs 3 of them, and a little for the row."""
    run = Run(max_running=2, page_size=4, num_pages=6, depth=0, alloc_len=1, new_token_ratio=0.01)
    run.submit(1, 8, 9)
    run.step([[0]])
    run.submit(2, 4, 1)
    state, batch = admit(run.state, limits=run.limits, set_aside=2)
    assert batch is None and state is run.state
    assert admit(run.state, limits=run.limits, set_aside=1)[1].serials.tolist() == [2]


# --- order -------------------------------------------------------------------------------------------------------------


def test_a_higher_priority_goes_first():
    """Among equals the first that came goes first."""
    run = Run(max_running=8)
    for serial, priority in enumerate((0, 1, 0, 2, 1, -3), 1):
        run.submit(serial, 5, 9, priority=priority)
    assert [request.serial for request in run.state.waiting] == [4, 2, 5, 1, 3, 6]
    batch = run.plan()
    assert batch.serials.tolist() == [4, 2, 5, 1, 3, 6]
    assert run.state.requests.priority.tolist() == [0, 2, 1, 1, 0, 0, -3, 0, 0]


def cached(run, tokens):
    """Leaves the pages of a prompt to the prefix cache."""
    run.submit(90, tokens, 1)
    run.launch(run.plan(), [[0]])
    run.settle()
    assert not run.state.requests.serial.any() and run.state.prefix_cache.pages


@pytest.mark.parametrize(("length", "start"), [(5, 4), (7, 4), (8, 4), (9, 8), (11, 8), (12, 8), (13, 12), (20, 12)])
def test_a_request_begins_with_what_is_cached(length, start):
    """Three pages of 4 are cached, and the last token of a prompt is computed whatever there is."""
    run = Run(page_size=4, num_pages=20)
    cached(run, range(12))
    run.submit(1, [*range(12), *range(50, 60)][:length])
    pages = [run.state.prefix_cache.pages[key] for key in run.keys(range(12))]
    batch = run.plan()
    assert (batch.prefix_lens.tolist(), batch.extend_lens.tolist()) == ([start], [length - start])
    assert batch.new_pages[0, : start // 4].tolist() == pages[: start // 4]
    assert (batch.new_pages[0] >= 0).sum() == ceil_to(length, 4) // 4
    assert run.lens() == (length, length, length) and run.state.ledger.cache_protected_len[1] == start
    assert run.state.ledger.num_free == 20 - 3 - (ceil_to(length, 4) - start) // 4
    assert np.nonzero(run.state.ledger.page_locks)[0].tolist() == sorted(pages[: start // 4])


def test_nothing_is_shared_without_names():
    run = Run(page_size=4, num_pages=20)
    cached(run, range(12))
    run.submit(1, 12)
    assert run.plan().prefix_lens.tolist() == [0]


def test_cached_pages_make_room_for_prompts():
    """All pages are cached or free: those that nobody reads are given up, the last of a prefix first."""
    run = Run(page_size=4, num_pages=8)
    cached(run, range(20))
    assert run.state.ledger.num_free == 3
    run.submit(1, 16, 9)
    keys = run.keys(range(20))
    run.launch(run.plan(), [[0]])
    assert run.state.ledger.num_free == 0 and set(run.state.prefix_cache.pages) == set(keys[:4])


def prompt(shared, serial, own=9):
    """A prompt whose first tokens others have too."""
    return [*range(shared), *[100 + serial] * own]


def test_who_could_share_a_prefill_under_way_waits_for_it():
    """Requests 1 and 2 have 32 tokens in common. Nobody overtakes request 2, and when the pages are there it computes what is its own."""
    assert WORTH_WAITING_FOR == 32
    run = Run(max_running=3, page_size=4)
    run.submit(1, prompt(32, 1))
    run.submit(2, prompt(32, 2))
    run.submit(3, 2)
    assert admitted(run) == [1]
    batch = run.plan()
    assert batch.forward_mode is ForwardMode.DECODE and batch.serials.tolist() == [1]
    run.launch(batch, [[0]])
    run.settle()  # of the prefill
    assert batches(run, 1) == [([2, 3], [32, 0], [9, 2], [False, False])]


def test_a_short_prefix_is_not_waited_for():
    """28 tokens in common, or 32 of which the last page is not a page of both before the last token: they are computed twice."""
    for shared, own in ((28, 9), (32, 0)):
        run = Run(max_running=3, page_size=4)
        run.submit(1, prompt(32, 1))
        run.submit(2, prompt(shared, 2, own))
        assert admitted(run) == [1, 2]


def test_what_is_cached_already_is_no_reason_to_wait():
    """Of 60 tokens in common 40 are in the cache: 20 are not worth a wait, and those of another prompt none at all."""
    for in_cache, together in ((40, True), (20, False)):
        run = Run(max_running=3, page_size=4)
        cached(run, range(in_cache))
        run.submit(1, prompt(60, 1))
        run.submit(2, prompt(60, 2))
        run.submit(3, 50)
        assert admitted(run) == ([1, 2, 3] if together else [1])
        assert run.state.ledger.cache_protected_len[1 : 3 if together else 2].tolist() == [in_cache] * (1 + together)


def test_the_longest_prefix_goes_first_where_the_policy_says_so():
    """But not before a higher priority."""
    for policy, order in (("fcfs", [4, 1, 2, 3]), ("longest-prefix", [4, 3, 2, 1])):
        run = Run(max_running=4, page_size=4, policy=policy)
        cached(run, range(12))
        run.submit(1, [7] * 9)
        run.submit(2, [*range(4), *[8] * 9])
        run.submit(3, [*range(8), *[9] * 9])
        run.submit(4, [6] * 9, priority=1)
        assert admitted(run) == order, policy
        assert not run.state.waiting


def test_a_long_queue_is_served_first_come_first_served():
    for count, first in ((MOST_COMPARED, 90 + MOST_COMPARED), (MOST_COMPARED + 1, 91)):
        run = Run(max_running=1, page_size=4, policy="longest-prefix", num_pages=50)
        cached(run, range(12))
        for serial in range(91, 90 + count):
            run.submit(serial, 5)
        run.submit(90 + count, range(12))
        assert admitted(run) == [first]
        assert len(run.state.waiting) == count - 1


def test_nothing_waits_nothing_changes():
    """But the share of their tokens that requests are expected to want is what it is at first."""
    run = Run()
    before = run.state
    assert run.plan() is None and run.left == ()
    chex.assert_trees_all_equal(run.state, before)
    assert jax.tree.structure(run.state) == jax.tree.structure(before)
