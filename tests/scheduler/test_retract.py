"""When pages run short: who leaves, what it keeps, and how it comes back."""

import dataclasses
import itertools

import numpy as np
import pytest
from oracles import Run, freeze
from pyrsistent import pdeque

from jspec.scheduler import (
    Left,
    enqueue,
    evictable,
    leave,
    make_room,
    match_prefix,
    pages_short,
    plan,
    preempt,
    retract,
)
from jspec.scheduler.retract import decayed_ratio, last_to_keep, ratio_after_retraction
from jspec.state import FinishReason, ForwardMode, Waiting
from jspec.state.invariants import check

ALONE = {"depth": 0, "alloc_len": 8, "new_token_ratio": 0.01}
"""Each step is settled at once, and may emit up to 8 tokens; nobody is expected to want many more."""


def waiting(run):
    return [request.serial for request in run.state.waiting]


def put(run, state):
    """The run goes on from `state`."""
    check(state, limits=run.limits)
    run.state = freeze(state)


# --- who ------------------------------------------------------------------------------------------------------------------------


def four(prompts=(100, 30, 10, 50), *, before=(), priorities=(0, 0, 0, 0), **settings):
    """Requests 1 to 4 on their rows, in that order: (output, prompt) = (5, 100), (5, 30), (9, 10), (1, 50). Pages of one token; they hold 214 of them:
    (C, A) = (104, 108), (34, 38), (18, 18), (50, 50). `before`: tokens that are cached already."""
    run = Run(**{"max_running": 4, "num_pages": 400, "context_len": 800, **ALONE, **settings})
    if before:
        run.submit(90, before, 1)
        run.step([[0]])
    for serial in (1, 2, 3, 4):
        if serial == 4:
            run.step([[0] * 4, [0] * 4, [0] * 8])
        run.submit(serial, prompts[serial - 1], 64, priority=priorities[serial - 1])
        run.step([[0]])
    assert run.state.requests.serial.tolist() == [0, 1, 2, 3, 4]
    assert run.state.requests.output_len.tolist() == [0, 5, 5, 9, 1]
    return run


def order_of(run):
    """Serials in the order in which they would leave, the last one never."""
    state, order = run.state, []
    while rows := np.nonzero(state.requests.serial)[0].tolist():
        row = last_to_keep(state, np.array(rows))
        order.append(int(state.requests.serial[row]))
        state, _ = leave(state, row, FinishReason.NONE)
        check(state, limits=run.limits)
    return order


def test_the_fewest_outputs_go_first_then_the_longest_prompt():
    """(output, prompt) of SGLang's example: (1, 50), then (5, 100), then (5, 30); (9, 10) is left."""
    assert order_of(four()) == [4, 1, 2, 3]


def test_among_equals_the_newest_goes_first():
    assert order_of(four((30, 30, 30, 30))) == [4, 2, 1, 3]


def with_rows(run, **columns):
    """The run's requests with other columns; no transition makes such a state, `last_to_keep` looks at nothing else."""
    changed = {name: np.array([0, *values]) for name, values in columns.items()}
    return dataclasses.replace(run.state, requests=dataclasses.replace(run.state.requests, **changed))


def test_the_order_is_that_of_a_sort():
    """Aborted ones, then the lower priority, the fewer outputs, the longer prompt, the later serial; among any rows of them, wherever they lie."""
    rng = np.random.default_rng(0)
    run = four()
    for _ in range(300):
        columns = {
            "to_finish": rng.random(4) < 0.2,
            "priority": rng.integers(-1, 2, 4).astype(np.int32),
            "output_len": rng.integers(0, 3, 4).astype(np.int32),
            "prompt_len": rng.integers(5, 8, 4).astype(np.int32),
            "serial": rng.permutation(4).astype(np.int32) + 1,
        }
        state = with_rows(run, **columns)
        rows = rng.permutation(4)[: rng.integers(1, 5)] + 1

        def rank(row, columns=columns):
            i = row - 1
            aborted, priority, outputs, prompt, serial = (columns[name][i] for name in columns)
            return not aborted, priority, outputs, -prompt, -serial

        assert last_to_keep(state, rows) == min(rows.tolist(), key=rank)


# --- what leaving means -------------------------------------------------------------------------------------------------------------


def test_a_retracted_request_waits_with_what_it_has():
    """Its row is free, all its pages are, its epoch moved on, and it is at the head of the queue with its five tokens, to be prefilled with the prompt."""
    run = four()
    run.submit(5, 7, 9)
    before = run.state
    state, gone = retract(before, 1)
    put(run, state)
    assert gone == Left(row=1, serial=1, output_len=5, reason=FinishReason.NONE)
    assert waiting(run) == [1, 5]
    request = run.state.waiting[0]
    assert request == dataclasses.replace(before.admitted[1], output_len=5) and request.fill_len == 105
    assert (request.prompt_len, request.max_new_tokens) == (100, 64)
    requests, ledger = run.state.requests, run.state.ledger
    assert requests.serial.tolist() == [0, 0, 2, 3, 4] and requests.epoch.tolist() == [0, 1, 0, 0, 0]
    assert set(run.state.admitted) == {2, 3, 4}
    assert ledger.num_free == before.ledger.num_free + 108 == before.ledger.num_free + before.ledger.kv_allocated_len[1]
    assert not ledger.page_table[1].any() and ledger.kv_committed_len[1] == ledger.kv_allocated_len[1] == 0
    others = [2, 3, 4]
    for ours, theirs in ((requests, before.requests), (ledger, before.ledger)):
        for field in dataclasses.fields(ours):
            column = getattr(ours, field.name)
            if np.ndim(column) and len(column) == 5:
                assert np.array_equal(column[others], getattr(theirs, field.name)[others]), field.name


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.OUT_OF_PAGES])
def test_who_leaves_for_good_does_not_wait(reason):
    run = four()
    state, gone = leave(run.state, 2, reason)
    put(run, state)
    assert gone == Left(row=2, serial=2, output_len=5, reason=reason)
    assert waiting(run) == [] and run.state.requests.serial.tolist() == [0, 1, 0, 3, 4]


def test_who_is_to_be_aborted_ends_at_once():
    """It goes before all, whatever it has, and does not come back."""
    run = four()
    run.abort(3)
    assert order_of(run) == [3, 4, 1, 2]
    state, gone = retract(run.state, 3)
    put(run, state)
    assert gone == Left(row=3, serial=3, output_len=9, reason=FinishReason.ABORT) and waiting(run) == []


@pytest.mark.parametrize("others", [0, 1])
def test_what_the_cache_holds_of_it_stays(others):
    """Its first pages are unlocked, once, and can be given up if nobody else begins with them; the rest is free."""
    run = Run(page_size=4, num_pages=60, max_running=3, **ALONE)
    run.submit(1, [*range(8), 1, 1], 64)
    run.step([[0]])
    if others:
        run.submit(2, [*range(8), 2, 2], 64)
        run.step([[0]])
    cache, free = run.state.prefix_cache, run.state.ledger.num_free
    pages = match_prefix(cache, run.keys(range(8)), most=9)
    assert run.state.ledger.page_locks[pages].tolist() == [1 + others] * 2
    state, _ = retract(run.state, 1)
    put(run, state)
    assert run.state.prefix_cache is cache and run.state.ledger.page_locks[pages].tolist() == [others] * 2
    assert (
        run.state.ledger.num_free == free + 1 and evictable(run.state.ledger, cache)[pages].tolist() == [not others] * 2
    )


def test_late_results_change_nothing():
    """Two launches of a request are under way when it is retracted: they are settled, for nobody, before and after it has a row again."""
    run = Run(max_running=2, depth=2)
    for serial in (1, 2):
        run.submit(serial, 5)
    for _ in range(3):
        run.launch(run.plan(), [[0], [0]])
    run.settle()
    assert [item.rows.tolist() for item in run.state.launched] == [[1, 2], [1, 2]]
    state, _ = retract(run.state, 1)
    put(run, state)
    before = run.state
    _, settled = run.settle()
    assert settled.live.tolist() == [False, True] and settled.num_new.tolist() == [0, 1]
    after = run.state
    for name in ("output_len", "serial", "epoch"):
        assert getattr(after.requests, name)[1] == getattr(before.requests, name)[1], name
    assert after.ledger.num_free == before.ledger.num_free and not after.ledger.kv_committed_len[1]
    assert after.waiting == before.waiting and run.content[1] == [*range(1000, 1005), 0]
    batch = run.plan()
    assert batch.serials.tolist() == [1] and (batch.rows.tolist(), batch.epochs.tolist()) == ([1], [1])
    run.launch(batch, [[7]])
    _, settled = run.settle()  # the last late one, while the new prefill is under way
    assert settled.live.tolist() == [False, True] and run.state.requests.output_len.tolist() == [0, 1, 3]
    _, settled = run.settle()
    assert settled.live.tolist() == [True] and run.content[1] == [*range(1000, 1005), 0, 7]


# --- how it comes back --------------------------------------------------------------------------------------------------------------


def vector(depth):
    """SGLang's retract vector: pages of 16, a prompt of 20 of which the first page is cached, C = 24, N = 25, A = 32."""
    run = Run(page_size=16, num_pages=10, depth=depth)
    run.submit(1, range(20), 64)
    run.step([[50]])
    if depth:
        run.settle()
    run.step([[51, 52, 53, 54]])
    if depth:
        run.settle()
    assert run.lens() == (24, 32, 25) and run.state.ledger.cache_protected_len[1] == 16
    return run


@pytest.mark.parametrize("depth", [0, 1])
def test_a_retracted_request_begins_with_its_cached_pages(depth):
    """The other page is free at once; the prefill then matches 16 tokens and extends [16, 25), the pending token included: C = A = 25."""
    run = vector(depth)
    cached, other = run.state.ledger.page_table[1, :2].tolist()
    assert run.state.ledger.num_free == 8
    state, gone = retract(run.state, 1)
    put(run, state)
    assert gone.output_len == 5 and run.state.ledger.num_free == 9
    assert run.state.ledger.free_pages[8] == other and dict(run.state.prefix_cache.keys) == {
        cached: run.keys(range(16))[0]
    }
    batch = run.plan()
    assert (batch.prefix_lens.tolist(), batch.extend_lens.tolist()) == ([16], [9]) and batch.goes_on.tolist() == [False]
    assert run.lens() == (25, 25, 25) and run.state.ledger.cache_protected_len[1] == 16
    assert batch.new_pages[0, :2].tolist() == [cached, other] and run.state.requests.fill_len[1] == 25
    run.launch(batch, [[55]])
    run.settle()
    assert run.lens() == (25, 25, 26) and run.content[1] == [*range(20), *range(50, 56)]
    run.step([[56]])  # the device finds the KV of all 25 tokens
    if depth:
        run.settle()
    assert run.lens()[0] == 26


def test_a_tail_end_of_the_prompt_is_computed_again():
    """Without names nothing is cached: prompt and output are prefilled whole, with the pending token, and in chunks if they are long."""
    run = Run(page_size=4, num_pages=30, max_prefill_tokens=8, **ALONE)
    run.submit(1, 10, 64)
    run.step([[]])
    run.step([[0]])
    run.step([[1, 2, 3, 4]])
    put(run, retract(run.state, 1)[0])
    found = []
    for runs in ([[]], [[5]]):
        batch, _ = run.step(runs)
        found.append((batch.prefix_lens.tolist(), batch.extend_lens.tolist(), batch.goes_on.tolist()))
    assert found == [([0], [8], [True]), ([8], [7], [False])]
    assert run.state.requests.output_len[1] == 6 and run.content[1][10:] == [0, 1, 2, 3, 4, 5]


def test_it_ends_where_it_would_have_ended():
    """Retracted again and again, at every place: the same number of tokens, and no launch more than one a retraction."""
    for places in itertools.chain.from_iterable(itertools.combinations(range(8), n) for n in range(4)):
        run = Run(page_size=4, num_pages=30, **ALONE)
        run.submit(1, range(6), 8)
        launches = 0
        while run.state.requests.serial[1] or run.state.waiting:
            run.step([[launches]])
            if launches in places and run.state.requests.serial[1]:
                put(run, retract(run.state, 1)[0])
            launches += 1
        assert launches == 8 and run.content[1][6:] == list(range(8))
        assert run.state.ledger.num_free + len(run.state.prefix_cache.pages) == 30


# --- the queue ----------------------------------------------------------------------------------------------------------------------


def slow_enqueue(queue, request, first):
    """One place after another, until the order holds."""
    for place in range(len(queue) + 1):
        before, behind = queue[:place], queue[place:]
        if all(other.priority >= request.priority for other in before) and all(
            other.priority <= request.priority - (not first) for other in behind
        ):
            if first and before and before[-1].priority == request.priority:
                continue
            return [*before, request, *behind]
    raise AssertionError(queue)


def test_a_place_in_the_queue():
    """Behind those of its priority, or before them; those of a higher one are ahead, and nobody else is moved."""
    rng = np.random.default_rng(1)
    queue, slow = pdeque(), []
    for serial in range(1, 400):
        request = Waiting(serial, 5, 9, (), priority=int(rng.integers(-1, 3)))
        first = bool(rng.random() < 0.5)
        queue, slow = enqueue(queue, request, first=first), slow_enqueue(slow, request, first)
        assert list(queue) == slow
        if len(slow) > 12:
            queue, slow = queue.popleft(), slow[1:]


def test_who_leaves_later_comes_back_first():
    """Of several that leave in one plan the one that had most goes to the head; those that waited before stay behind, those of a higher priority ahead."""
    run = four()
    run.submit(5, 9, 9)
    run.submit(6, 9, 9, priority=1)
    for row in (4, 1, 2):
        put(run, retract(run.state, row)[0])
    assert waiting(run) == [6, 2, 1, 4, 5]


def test_a_retracted_request_keeps_its_priority():
    run = Run(max_running=3, **ALONE)
    for serial, priority in enumerate((2, 0, 1), 1):
        run.submit(serial, 5, priority=priority)
    run.step([[0]] * 3)
    run.submit(4, 5, priority=1)
    for row in (1, 2, 3):
        put(run, retract(run.state, row)[0])
    assert [(request.serial, request.priority) for request in run.state.waiting] == [(1, 2), (3, 1), (4, 1), (2, 0)]


# --- making room ----------------------------------------------------------------------------------------------------------------------

ALL = np.array([False, True, True, True, True])


def room_for(run, reserve, active=ALL):
    """`make_room` for a step that writes `reserve` tokens past what each of the `active` rows has committed. Returns the run, rows and who left, in order."""
    limits = dataclasses.replace(run.limits, alloc_len=reserve)
    state, rows, left = make_room(run.state, active, limits=limits)
    assert pages_short(state.ledger, rows, reserve_len=reserve) <= state.ledger.num_free  # they fit
    assert (rows <= active).all()
    put(run, state)
    return rows, left


@pytest.mark.parametrize(
    ("reserve", "gone"),
    [
        (32, []),  # the four lack 4 * 32 - 8 = 120 pages, 121 are free
        (33, [4]),
        (59, [4]),  # the three lack 3 * 59 - 8 = 169, and 121 + 50 are free
        (60, [4, 1]),
        (141, [4, 1]),  # the two lack 2 * 141 - 4 = 278, and 171 + 108 are free
        (142, [4, 1, 2]),
        (317, [4, 1, 2]),  # the last one lacks 317, and 279 + 38 are free
    ],
)
def test_as_many_leave_as_must(reserve, gone):
    """SGLang's order; who left is in front of the queue, who left last first; those that stay are to be launched, and the very last page is given."""
    run = four(num_pages=335)
    run.submit(5, 9, 9)
    before = run.state
    assert before.ledger.num_free == 121
    rows, left = room_for(run, reserve)
    outputs = {1: 5, 2: 5, 3: 9, 4: 1}
    assert left == tuple(Left(serial, serial, outputs[serial], FinishReason.NONE) for serial in gone)
    assert np.nonzero(rows)[0].tolist() == [serial for serial in (1, 2, 3, 4) if serial not in gone]
    assert waiting(run) == [*gone[::-1], 5]
    assert run.state.ledger.num_free == 121 + sum(int(before.ledger.kv_allocated_len[serial]) for serial in gone)
    if not gone:
        assert run.state is before and rows is ALL


def test_the_last_one_alone_ends():
    """Nobody is left who could make room: it does not wait for what never comes."""
    run = four(num_pages=335)
    rows, left = room_for(run, 318)
    assert [(gone.serial, gone.reason) for gone in left] == [
        (4, FinishReason.NONE),
        (1, FinishReason.NONE),
        (2, FinishReason.NONE),
        (3, FinishReason.OUT_OF_PAGES),
    ]
    assert not rows.any() and waiting(run) == [2, 1, 4] and run.state.ledger.num_free == 335


def test_the_last_one_alone_ends_in_a_plan():
    """12 pages of one token, a reserve of 4: three committed, then seven, then eleven, for which the reserve is not there."""
    run = Run(num_pages=12, depth=0, alloc_len=4)
    run.submit(1, 3, 50)
    run.step([[0]])
    run.step([[0] * 4])
    run.step([[0] * 4])
    assert run.lens() == (11, 11, 12)
    assert run.plan() is None
    assert run.left == (Left(1, 1, 9, FinishReason.OUT_OF_PAGES),)
    assert run.state.ledger.num_free == 12 and waiting(run) == [] and not run.state.admitted


def test_a_lower_priority_goes_first():
    """Whatever it has, and however many of a higher one have less."""
    run = four(num_pages=335, priorities=(0, 1, -1, 2))
    assert order_of(run) == [3, 1, 2, 4]
    _, left = room_for(run, 60)  # 172 are lacking when request 3 is gone: 121 + 18 are free
    assert [gone.serial for gone in left] == [3, 1] and waiting(run) == [1, 3]


def test_one_that_is_to_be_aborted_makes_room_first():
    """It ends, the others stay, and no ratio is raised: nobody was promised too much."""
    run = four(num_pages=335)
    run.abort(3)
    ratio = run.state.new_token_ratio
    rows, left = room_for(run, 33)
    assert left == (Left(3, 3, 9, FinishReason.ABORT),) and waiting(run) == []
    assert np.nonzero(rows)[0].tolist() == [1, 2, 4] and run.state.new_token_ratio == ratio


def test_only_rows_of_the_step_leave():
    """Of rows 2 and 3, which are to be launched, one leaves, although row 4 has less to lose. The last one is not retracted while others hold pages: it
    waits for them."""
    run = four(num_pages=335)
    some = np.array([False, False, True, True, False])
    before = run.state
    rows, left = room_for(run, 63, some)  # they lack 59 + 63 = 122 pages
    assert [gone.serial for gone in left] == [2] and np.nonzero(rows)[0].tolist() == [3]
    assert run.state.new_token_ratio == np.float32((9 + 20) / (64 + 1))  # of those that are launched
    run.state = before
    rows, left = room_for(run, 160, some)  # one alone lacks 160, and 121 + 38 are free
    assert (
        [gone.serial for gone in left] == [2] and not rows.any() and some.tolist() == [False, False, True, True, False]
    )
    assert run.state.requests.serial.tolist() == [0, 1, 0, 3, 4] and waiting(run) == [2]


def test_the_last_one_waits_for_who_is_about_to_end():
    """Request 2's only token is under way, so it needs nothing more; request 1 lacks a page, and gets it when request 2 has ended."""
    run = Run(num_pages=11 + 20 + 3, max_running=2, depth=1, alloc_len=4, new_token_ratio=0.01)
    run.submit(1, 3, 50)
    run.step([[0]])
    run.step([[0] * 4])
    run.submit(2, 20, 1)
    batch, _ = run.step([[0]])
    assert batch.serials.tolist() == [2] and run.lens() == (7, 11, 8) and run.state.ledger.num_free == 3
    assert run.plan() is None and run.left == () and run.state.requests.serial.tolist() == [0, 1, 2]
    run.settle()
    batch = run.plan()
    assert batch.serials.tolist() == [1] and run.lens() == (7, 15, 8) and run.left == ()
    run.launch(batch, [[0]])


def test_a_prompt_under_way_can_leave():
    """Of a request that decodes and one in the middle of its prompt, which has no output yet, the latter goes: its chunks are computed again."""
    run = Run(page_size=4, num_pages=30, max_running=2, max_prefill_tokens=8, **ALONE)
    run.submit(1, 8, 50)
    run.step([[0]])
    run.submit(2, 60, 1)
    run.step([[]])
    assert run.state.ledger.kv_committed_len.tolist() == [0, 8, 8] and run.state.ledger.num_free == 26
    rows, left = room_for(run, 108, np.array([False, True, False]))  # row 1 lacks 27 pages
    assert left == (Left(2, 2, 0, FinishReason.NONE),) and np.nonzero(rows)[0].tolist() == [1]
    batch = run.plan()
    assert (batch.serials.tolist(), batch.prefix_lens.tolist()) == ([2], [0])
    run.launch(batch, [[]])


# --- the cache gives way first ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reserve", "gone", "evicted"),
    [
        (41, [], 0),  # 4 * 41 - 8 = 156 pages, which are free
        (42, [], 4),
        (48, [], 28),
        (49, [4], 0),  # 188, two more than all that is free or cached: request 4 leaves, and then the cache need not
    ],
)
def test_the_cache_gives_way_before_any_request(reserve, gone, evicted):
    """As many of its pages as are lacking, from the end of the prefix, and none that are not; no ratio is raised where nobody was retracted."""
    cached = [*range(500, 530)]
    run = four(before=cached)
    assert run.state.ledger.num_free == 156 and len(run.state.prefix_cache.pages) == 30
    ratio, keys = run.state.new_token_ratio, run.keys(cached)
    _, left = room_for(run, reserve)
    assert [item.serial for item in left] == gone
    assert set(run.state.prefix_cache.pages) == set(keys[: 30 - evicted])
    assert run.state.ledger.num_free == 156 + evicted + 50 * len(gone)
    assert (run.state.new_token_ratio == ratio) == (not gone)


def test_a_retracted_requests_prefix_gives_way_for_the_others():
    """Request 1's prompt is cached, and locked until it leaves. Rows 2 and 3 then lack 196 pages: 179 are free, 17 of the prefix go; with the rest it begins
    when it comes back."""
    prompt = [*range(600, 700)]
    run = four((prompt, 30, 10, 50), num_pages=335)
    assert run.state.ledger.cache_protected_len[1] == 100 and run.state.ledger.num_free == 121
    _, left = room_for(run, 100)
    assert [gone.serial for gone in left] == [4, 1] and run.state.ledger.num_free == 196
    assert set(run.state.prefix_cache.pages) == set(run.keys(prompt)[:83])


def test_what_running_requests_read_does_not_give_way():
    """A locked prefix is no room: request 4 leaves although 100 pages are cached."""
    run = four(([*range(600, 700)], 30, 10, 50), num_pages=335)
    _, left = room_for(run, 33)
    assert [gone.serial for gone in left] == [4] and len(run.state.prefix_cache.pages) == 100


# --- the ratio ------------------------------------------------------------------------------------------------------------------------------


def test_the_ratio_after_a_retraction():
    """SGLang's example: survivors with 5 and 7 outputs of 64 each: (12 + 40) / 129."""
    run = Run(max_running=3, num_pages=400, **ALONE)
    for serial in (1, 2, 3):
        run.submit(serial, 5, 64)
    run.step([[0]] * 3)
    run.step([[0] * 4, [0] * 6, [0]])
    assert run.state.requests.output_len.tolist() == [0, 5, 7, 2]
    survivors = np.array([False, True, True, False])
    ratio = ratio_after_retraction(run.state, survivors)
    assert ratio == np.float32(52 / 129) and ratio == pytest.approx(0.4031, abs=5e-5) and ratio.dtype == np.float32
    rows, left = room_for(run, 185, np.array([False, True, True, True]))
    assert [gone.serial for gone in left] == [3] and rows.tolist() == survivors.tolist()
    assert run.state.new_token_ratio == ratio


def test_the_ratio_is_a_share():
    """It is never more than all: a survivor of 9 outputs and at most 10 is expected to want them."""
    run = Run(max_running=2, num_pages=400, **ALONE)
    run.submit(1, 5, 10)
    run.step([[0]])
    run.step([[0] * 8])
    assert ratio_after_retraction(run.state, np.array([False, True, False])) == 1.0


def test_the_ratio_falls_while_nobody_is_retracted():
    """From 0.7 to 0.098 in 600 decode plans, and no further; a prefill leaves it as it is, and a pool without requests begins anew."""
    run = Run(num_pages=400, depth=0, ratio_steps=5, new_token_ratio=0.7)
    run.submit(1, 5, 9)
    run.step([[0]])
    assert run.state.new_token_ratio == np.float32(0.7)
    found = []
    for _ in range(7):
        run.step([[0]])
        found.append(float(run.state.new_token_ratio))
    assert found == pytest.approx([0.7 - 0.602 * min(i, 5) / 5 for i in range(1, 8)], abs=1e-6)
    run.step([[0]])
    assert not run.state.requests.serial.any()
    run.submit(2, 5, 9)
    run.step([[0]])
    assert run.state.new_token_ratio == np.float32(0.7)
    ratio = np.float32(0.7)
    for _ in range(600):
        ratio = decayed_ratio(ratio, dataclasses.replace(run.limits, ratio_steps=600))
    assert ratio == pytest.approx(0.098, abs=1e-4) and ratio.dtype == np.float32


# --- in a plan --------------------------------------------------------------------------------------------------------------------------------

PROMPTS, ACCEPTS = (3, 1, 2, 3, 1, 2), (8, 8, 6, 8, 6, 8)


def six(spare):
    """Six requests, pages of one token. They hold 12 + 6 * 8 pages and lack as many as their last step brought them, 44; `spare` are free."""
    run = Run(max_running=6, num_pages=60 + spare, **ALONE)
    for serial, prompt_len in enumerate(PROMPTS, 1):
        run.submit(serial, prompt_len, 10)
        run.step([[serial]])
    run.step([[10 * serial + i for i in range(count)] for serial, count in enumerate(ACCEPTS, 1)])
    assert run.state.ledger.num_free == spare and not run.state.waiting
    return run


@pytest.mark.parametrize(
    ("spare", "gone"),
    # Each frees its prompt and 8: then 38 pages and 10 + spare, then 32 and 19 + spare, then 24 and 30 + spare.
    [(44, []), (43, [3]), (28, [3]), (27, [3, 5]), (13, [3, 5]), (12, [3, 5, 4]), (5, [3, 5, 4])],
)
def test_a_plan_retracts_until_the_others_can_step(spare, gone):
    """Those of 7 outputs first, the longer prompt of them before the other; then, of equal prompts, the newer. The others are launched, the ratio is what
    they make it, and it does not fall in the same plan. Afterwards everybody gets to its end."""
    run = six(spare)
    before = run.state.new_token_ratio
    batch = run.plan()
    stay = [serial for serial in range(1, 7) if serial not in gone]
    assert [item.serial for item in run.left] == gone and waiting(run) == gone[::-1]
    assert [item.output_len for item in run.left] == [1 + ACCEPTS[serial - 1] for serial in gone]
    assert batch.forward_mode is ForwardMode.DECODE and batch.serials.tolist() == stay
    outputs = sum(1 + ACCEPTS[serial - 1] for serial in stay)
    expected = (
        min(1.0, (outputs + 20 * len(stay)) / (10 * len(stay) + 1)) if gone else decayed_ratio(before, run.limits)
    )
    assert run.state.new_token_ratio == np.float32(expected)
    run.launch(batch, [[0]] * len(stay))
    run.settle()
    while run.state.waiting or run.state.requests.serial.any():
        batch = run.plan()
        run.launch(batch, [[0]] * (len(batch.rows) + (0 if batch.tails is None else len(batch.tails.rows))))
        run.settle()
    for serial, (prompt_len, count) in enumerate(zip(PROMPTS, ACCEPTS, strict=True), 1):
        known = [serial, *(10 * serial + i for i in range(count))]
        assert run.content[serial][prompt_len : prompt_len + len(known)] == known
        assert len(run.content[serial]) == prompt_len + 10
    assert run.state.ledger.num_free == 60 + spare


def test_planning_writes_to_nothing_it_was_given():
    """All arrays are frozen; and the state that was planned from is what it was."""
    run = six(5)
    before, columns = run.state, run.state.requests.output_len.copy()
    for _ in range(2):
        state, _, left = plan(before, limits=run.limits)
        assert [gone.serial for gone in left] == [3, 5, 4] and state is not before
    assert before.requests.output_len.tolist() == columns.tolist() and not before.waiting
    assert before.requests.serial.tolist() == [0, 1, 2, 3, 4, 5, 6]


# --- for a request of higher priority -----------------------------------------------------------------------------------------------------------


def three(*, max_running=3, num_pages=400, priorities=(0, 1, 0), **settings):
    """Requests 1 to 3 of 10 tokens and one output, pages of one token."""
    run = Run(max_running=max_running, num_pages=num_pages, context_len=800, **ALONE, **settings)
    for serial in (2, 3, 1):
        run.submit(serial, 10, 64, priority=priorities[serial - 1])
    run.step([[0]] * 3)
    return run


def rows_of(run):
    return {int(serial): row for row, serial in enumerate(run.state.requests.serial) if serial}


def preempted(run, set_aside=0):
    state, left = preempt(run.state, limits=run.limits, set_aside=lambda state: set_aside)
    before = run.state
    put(run, state)
    assert left or state is before
    return [gone.serial for gone in left]


def test_a_higher_priority_takes_a_row():
    """The one of the lowest priority leaves, of two the newer, as equal as they are; those as high as the new one, and higher, stay."""
    for priority, gone in ((0, []), (1, [3]), (2, [3]), (-1, [])):
        run = three()
        run.submit(4, 5, 9, priority=priority)
        assert preempted(run) == gone
        assert waiting(run) == [4, *gone]
        assert set(rows_of(run)) == {1, 2, 3} - set(gone)


def test_where_a_row_is_free_nobody_leaves():
    run = three(max_running=4)
    run.submit(4, 5, 9, priority=5)
    assert preempted(run) == []


@pytest.mark.parametrize(
    ("prompt_len", "aside", "gone"),
    # It wants 51 beside its prompt, and each of the others 0.63. 370 pages are free, then 380, then 390; the first one of a pool wants what it computes.
    [
        (317, 0, []), (318, 0, [3]), (327, 0, [3]), (328, 0, [3, 1]), (338, 0, [3, 1]), (339, 0, [3, 1, 2]), (400, 0, [3, 1, 2]),
        (307, 10, []), (308, 10, [3]), (67, 250, []), (68, 250, [3]), (88, 250, [3, 1]), (89, 250, [3, 1, 2]),
    ],
)  # fmt: skip
def test_a_higher_priority_takes_pages(prompt_len, aside, gone):
    """One leaves after another, until the new one's prompt, what it may emit, and what is set aside fit."""
    run = three(max_running=4)
    run.submit(4, prompt_len, 50, priority=5)
    assert preempted(run, aside) == gone


def test_nobody_leaves_for_one_that_cannot_start_anyway():
    """Not if all of a lower priority would not do, and not while the chunks of another prompt come first; and one that is aborted is left to end."""
    run = three()
    run.submit(4, 395, 50, priority=1)
    assert preempted(run) == [] and set(rows_of(run)) == {1, 2, 3}
    run = three(priorities=(0, 0, 0))
    for serial in (1, 2, 3):
        run.abort(serial)
    run.submit(4, 5, 9, priority=1)
    assert preempted(run) == []
    for length, gone in (
        (100, []),
        (40, [3]),
    ):  # after a chunk of 30 there is another one, or a last one that leaves room in its batch
        run = three(max_running=4, max_prefill_tokens=30)
        run.submit(4, length, 50, priority=1)
        run.step([[]])
        run.submit(5, 5, 9, priority=1)
        assert preempted(run) == gone


def test_who_was_preempted_comes_back():
    """Through plans: it waits behind the other, and goes on with all it had."""
    run = Run(max_running=1, num_pages=60, **ALONE)
    run.submit(1, 6, 9)
    run.step([[0]])
    run.step([[1, 2]])
    run.submit(2, 4, 2, priority=1)
    batch, _ = run.step([[7]])
    assert batch.serials.tolist() == [2] and [(gone.serial, gone.output_len) for gone in run.left] == [(1, 3)]
    assert waiting(run) == [1]
    run.step([[8]])
    batch, _ = run.step([[3]])
    assert batch.serials.tolist() == [1] and batch.extend_lens.tolist() == [9] and run.left == ()
    assert run.content == {1: [*range(1000, 1006), 0, 1, 2, 3], 2: [*range(2000, 2004), 7, 8]}
