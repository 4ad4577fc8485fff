"""What several ranks run next: one kind of launch for all, an IDLE batch for whoever has nothing to run; and which rank a request goes to."""

import collections
import dataclasses
from unittest import mock

import jax
import numpy as np
import pytest
from oracles import Run, SlowScheduler, make_result
from scheduler.test_walk import Walk

from jspec.engine.extend_upload import extend_upload
from jspec.scheduler import Left, outstanding_tokens, plan, plan_ranks, route, settle_oldest, submit
from jspec.spec_workers.sampling import SAMPLING_COLUMNS
from jspec.spec_workers.upload import ExtendSizes, pack_decode, pack_extend, unpack_decode, unpack_extend
from jspec.state import FinishReason, ForwardMode, Waiting, init_state, record

IDLE, EXTEND, MIXED, DECODE = ForwardMode.IDLE, ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DECODE


def assert_same(one, other):
    """Two states, batches or plans hold the same values."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.array_equal(a, b)


class Ranks:
    """A scheduler state and a device for each rank, driven by joint plans."""

    def __init__(self, count, **sizes):
        self.runs = [Run(**{"max_running": 2, "page_size": 4, **sizes}) for _ in range(count)]
        self.limits = self.runs[0].limits

    def plan(self):
        """The batches, None where nothing is launched; the caller must `launch` them before anything else."""
        planned = plan_ranks([run.state for run in self.runs], limits=self.limits)
        for run, (state, _, left) in zip(self.runs, planned, strict=True):
            run.state, run.left = state, left
        batches = [batch for _, batch, _ in planned]
        if batches[0] is None:
            for run in self.runs:
                run.check()
        return batches

    def launch(self, batches, tokens=None):
        """`tokens`: of each rank, what its rows emit; None: every row that emits says 0."""
        for rank, (run, batch) in enumerate(zip(self.runs, batches, strict=True)):
            given = [[0] if emits else [] for emits in record(batch).emits] if tokens is None else tokens[rank]
            run.launch(batch, given)

    def settle(self):
        return [run.settle() for run in self.runs]

    def step(self, tokens=None):
        """One iteration; returns the modes, None without a launch."""
        batches = self.plan()
        if batches[0] is None:
            if self.runs[0].results:
                self.settle()
            return None
        self.launch(batches, tokens)
        if len(self.runs[0].results) > self.limits.depth:
            self.settle()
        return [batch.forward_mode for batch in batches]


def assert_idle_batch(batch, *, forward_iter):
    assert batch.forward_mode is IDLE and batch.forward_iter == forward_iter and batch.tails is None
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, np.ndarray) and value.ndim:
            assert value.shape[0] == 0, field.name
    assert batch.kv_bound == 0


def idle_batch():
    """The IDLE batch of a rank that was never asked anything, beside a prompt, as launch 1."""
    ranks = Ranks(2)
    ranks.runs[0].submit(1, 5)
    return ranks, ranks.plan()[1]


# --- joint plans ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_one_request_and_the_other_ranks_idle(count, depth, mixed):
    """B61: whoever has nothing to run runs an empty batch of the same number, and has it on record."""
    ranks = Ranks(count, depth=depth, mixed=mixed)
    ranks.runs[-1].submit(1, 9, 6)
    untouched, seen = ranks.runs[0].state, []
    while (modes := ranks.step()) is not None or ranks.runs[0].results:
        states = [run.state for run in ranks.runs]
        assert len({len(state.launched) for state in states}) == len({int(state.forward_iter) for state in states}) == 1
        for state in states[:-1]:
            assert all(item.forward_mode is IDLE for item in state.launched)
            assert_same(state_but_for_launches(state), state_but_for_launches(untouched))
        if modes is not None:
            assert set(modes[:-1]) == {IDLE}
            seen.append(modes[-1])
    assert seen == [EXTEND] + [DECODE] * 5
    assert not ranks.runs[-1].state.requests.serial.any() and ranks.runs[-1].state.ledger.num_free == 400


def state_but_for_launches(state):
    return dataclasses.replace(state, launched=(), forward_iter=np.int32(0))


def test_an_idle_batch():
    ranks, batch = idle_batch()
    assert_idle_batch(batch, forward_iter=1)
    launched = record(batch)
    assert launched.forward_mode is IDLE and launched.forward_iter == 1
    assert all(len(getattr(launched, name)) == 0 for name in ("rows", "epochs", "emits", "commits", "end_lens"))
    for own, item in zip(jax.tree.leaves(ranks.runs[1].state.launched), jax.tree.leaves((launched,)), strict=True):
        assert np.array_equal(own, item)


def test_an_idle_launch_settles_to_nothing():
    ranks, _ = idle_batch()
    state = ranks.runs[1].state
    after, launched, settled = settle_oldest(state, make_result([]))
    assert launched is state.launched[0] and after.launched == ()
    assert_same(dataclasses.replace(after, launched=state.launched), state)
    assert all(len(column) == 0 for column in settled)


def test_nothing_to_run_anywhere_is_no_launch():
    """Whether nobody asked anything, or all that is asked for is under way."""
    ranks = Ranks(3)
    before = [run.state for run in ranks.runs]
    assert ranks.plan() == [None] * 3
    for run, state in zip(ranks.runs, before, strict=True):
        assert_same(run.state, state)
    ranks.runs[1].submit(1, 5, 1)
    ranks.step()
    before = [run.state for run in ranks.runs]
    assert ranks.plan() == [None] * 3
    for run, state in zip(ranks.runs, before, strict=True):
        assert_same(run.state, state)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_apart_from_prompts_the_running_rows_of_other_ranks_wait(depth):
    """Without `mixed` a rank idles beside the chunks of another, for as long as they go on, and loses nothing, even when all of its own is settled."""
    ranks = Ranks(3, depth=depth, mixed=False, max_prefill_tokens=8)
    waits = ranks.runs[1]
    for serial in (1, 2):
        waits.submit(serial, 5 + serial, 20)
    for _ in range(depth + 2):
        ranks.step()
    before = waits.state
    emitted = before.requests.output_len + sum(len(item.rows) > 0 for item in before.launched) * (
        before.requests.serial > 0
    )
    ranks.runs[0].submit(1, 40, 3)
    for chunk in range(5):
        state = waits.state
        batches = ranks.plan()
        assert [batch.forward_mode for batch in batches] == [EXTEND, IDLE, IDLE] and waits.left == ()
        assert_idle_batch(batches[1], forward_iter=state.forward_iter + 1)
        assert_same(state_but_for_launches(waits.state), state_but_for_launches(state))
        assert len(waits.state.launched) == len(state.launched) + 1 and waits.state.launched[-1].forward_mode is IDLE
        ranks.launch(batches)
        if len(waits.results) > depth:
            ranks.settle()
        if chunk >= depth:
            assert all(item.forward_mode is IDLE for item in waits.state.launched)
    assert waits.state.requests.output_len.tolist() == emitted.tolist()
    assert ranks.step() == [DECODE, DECODE, IDLE]
    while ranks.step() is not None or waits.results:
        pass
    assert not waits.state.requests.serial.any() and waits.state.ledger.num_free == 400


def test_running_rows_ride_beside_the_prompts_of_another_rank():
    """With `mixed` they are the tails of a batch without prompts: as in the DECODE batch they would have run, their reserves in place."""
    ranks, apart = (Ranks(3, mixed=True, max_prefill_tokens=8) for _ in range(2))
    for one in (ranks, apart):
        for serial in (1, 2):
            one.runs[1].submit(serial, 5 + serial, 20)
        one.step()
        one.step()
        assert one.step() == [IDLE, DECODE, IDLE]
    expected = apart.plan()[1]
    ranks.runs[0].submit(1, 14, 3)
    before = ranks.runs[1].state
    batches = ranks.plan()
    assert [batch.forward_mode for batch in batches] == [EXTEND, MIXED, IDLE]
    batch, state = batches[1], ranks.runs[1].state
    assert_same(batch.tails, expected)
    assert batch.tails.serials.tolist() == [1, 2]
    no_prompts = dataclasses.replace(batch, tails=None, kv_bound=np.int32(0), forward_mode=IDLE)
    assert_idle_batch(no_prompts, forward_iter=4)
    assert batch.kv_bound == expected.kv_bound > 0
    assert_same(state.ledger, apart.runs[1].state.ledger)
    assert_same(state.requests, apart.runs[1].state.requests)
    assert state.new_token_ratio == apart.runs[1].state.new_token_ratio < before.new_token_ratio
    reserved = state.ledger.kv_committed_len + ranks.limits.reserve_len
    assert (state.ledger.kv_allocated_len >= reserved)[[1, 2]].all()
    launched = state.launched[-1]
    assert launched.rows.tolist() == [1, 2] and launched.forward_mode is MIXED
    assert launched.emits.all() and launched.commits.all() and not launched.end_lens.any()
    # The second chunk goes with the next launch; each settle moves a tail on by its one token.
    ranks.launch(batches, [[[]], [[7], [8]], []])
    ranks.settle()
    assert ranks.step([[[0]], [[0], [0]], []]) == [EXTEND, MIXED, IDLE]  # settles the first of the two
    for rows in (state, ranks.runs[1].state):
        assert rows.requests.serial.tolist() == [0, 1, 2]
    old, new = before.ledger.kv_committed_len, ranks.runs[1].state.ledger.kv_committed_len
    assert (new - old).tolist() == [0, 2, 2]  # that of the decode before, and one
    assert ranks.runs[1].content[1][-1] == 7 and ranks.runs[1].content[2][-1] == 8
    assert ranks.step() == [DECODE, DECODE, IDLE]


def test_a_rank_with_prompts_takes_its_own_rows_along():
    ranks = Ranks(2, mixed=True)
    for run in ranks.runs:
        run.submit(1, 5, 20)
    assert ranks.step() == [EXTEND, EXTEND]
    ranks.runs[0].submit(2, 6, 20)
    batches = ranks.plan()
    assert [batch.forward_mode for batch in batches] == [MIXED, MIXED]
    assert [batch.serials.tolist() for batch in batches] == [[2], []]
    assert [batch.tails.serials.tolist() for batch in batches] == [[1], [1]]
    ranks.launch(batches)


def test_a_rank_whose_rows_have_all_under_way_idles_beside_a_prompt():
    """Its last token is in flight: it is no tail, and it must not be ended for want of something to do."""
    ranks = Ranks(2, mixed=True, depth=1)
    ranks.runs[1].submit(1, 5, 2)
    ranks.step()
    ranks.step()
    assert [len(item.rows) for item in ranks.runs[1].state.launched] == [1]
    ranks.runs[0].submit(1, 9, 5)
    assert ranks.step() == [EXTEND, IDLE]
    assert ranks.runs[1].left == () and not ranks.runs[1].state.requests.serial.any()  # it ended by its length
    assert ranks.runs[1].state.requests.epoch.tolist()[1] == 1


@pytest.mark.parametrize(
    ("mixed", "beside", "mode"),
    [(False, False, DECODE), (True, False, DECODE), (True, True, MIXED), (False, True, IDLE)],
)
def test_whoever_leaves_before_the_launch_is_chosen_is_told(mixed, beside, mode):
    """A prompt that is aborted between two of its chunks: it ends in the plan, whatever its rank runs then."""
    ranks = Ranks(2, mixed=mixed, max_prefill_tokens=8)
    run = ranks.runs[1]
    run.submit(1, 5, 20)
    ranks.step()
    run.submit(2, 20, 5)
    ranks.step()
    assert run.abort(2) == "running"
    if beside:
        ranks.runs[0].submit(1, 5, 5)
    assert ranks.step()[1] is mode
    assert run.left == (Left(2, 2, 0, FinishReason.ABORT),) and ranks.runs[0].left == ()
    assert run.state.requests.serial.tolist() == [0, 1, 0]


def test_a_result_that_nobody_waits_for_changes_nothing():
    """The row's request ended by a stop token while its next step was under way; that step settles between IDLE launches."""
    ranks = Ranks(2, depth=2)
    ranks.runs[0].submit(1, 5, 30)
    ranks.runs[1].submit(1, 5, 30, stops=(7,))
    ranks.step([[[0]], [[7]]])
    ranks.step()
    ranks.step()  # settles the prefill, and with it the request
    run = ranks.runs[1]
    assert not run.state.requests.serial.any()
    assert [item.forward_mode for item in run.state.launched] == [DECODE, DECODE]
    for _ in range(2):
        batches = ranks.plan()
        assert [batch.forward_mode for batch in batches] == [DECODE, IDLE]
        ranks.launch(batches)
        before = run.state
        _, (launched, settled) = ranks.settle()
        assert launched.forward_mode is DECODE and not settled.live.any()
        assert not settled.num_new.any() and not settled.finish_reason.any()
        assert_same(state_but_for_launches(run.state), state_but_for_launches(before))
    assert [item.forward_mode for item in run.state.launched] == [IDLE, IDLE]


STUCK = {"num_pages": 6, "max_prefill_tokens": 8, "alloc_len": 2}
"""A prompt of 30 tokens gets three chunks of two pages, and no fourth."""


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_prompt_that_no_page_is_left_for_ends_while_others_run(depth, mixed):
    """IDLE launches on record are nothing to wait for."""
    ranks = Ranks(2, depth=depth, mixed=mixed, **STUCK)
    ranks.runs[0].submit(1, 3, 20)
    ranks.step()
    ranks.runs[1].submit(1, 30, 5)
    for _ in range(3):
        assert ranks.step()[1] is EXTEND
    waited = 0
    while not ranks.runs[1].left:
        assert ranks.step()[1] is IDLE
        waited += 1
        assert waited <= depth + 1, "it holds its pages while others run"
    assert ranks.runs[1].left == (Left(1, 1, 0, FinishReason.OUT_OF_PAGES),)
    assert ranks.runs[1].state.ledger.num_free + len(ranks.runs[1].state.prefix_cache.pages) == 6
    assert ranks.step()[0] is DECODE and ranks.runs[0].left == ()


def test_every_launch_is_on_record_on_every_rank():
    """Requests of one token each, on one rank after the other: however short, every rank has every launch on record."""
    ranks = Ranks(3, depth=1)
    for serial in range(1, 7):
        ranks.runs[serial % 3].submit(serial, serial, 1 + serial % 2)
        ranks.step()
        assert len({len(run.state.launched) for run in ranks.runs}) == 1
        assert {int(run.state.forward_iter) for run in ranks.runs} == {int(ranks.runs[0].state.forward_iter)}
    while ranks.step() is not None or ranks.runs[0].results:
        pass
    assert all(not run.state.requests.serial.any() for run in ranks.runs)


# --- random walks --------------------------------------------------------------------------------------------------------


def test_a_rank_alone_plans_as_ever():
    """Over some walks: the same state, batch and departures as of `plan`, and never an IDLE batch."""
    launches = 0
    for seed in range(8):
        walk = Walk(np.random.default_rng([seed, 61]), depth=seed % 3, page_size=4)

        def plan_both(run=walk.run):
            nonlocal launches
            alone = plan(run.state, limits=run.limits)
            (joint,) = plan_ranks((run.state,), limits=run.limits)
            assert_same((joint.state, joint.batch), (alone.state, alone.batch))
            assert joint.left == alone.left
            run.state, batch, run.left = joint
            assert batch is None or batch.forward_mode is not IDLE
            launches += batch is not None
            if batch is None:
                run.check()
            return batch

        walk.run.plan = plan_both
        walk.go(60)
    assert launches > 100


class _HeldBack(Exception):
    pass


class SlowRank(SlowScheduler):
    """The slow scheduler, one of several: it may be told to go no further than its prompts. Its flights are those with somebody on board."""

    def __init__(self, *args, **sizes):
        super().__init__(*args, **sizes)
        self.held_back, self.on_board = False, []

    def make_room(self, rows):
        if self.held_back:
            raise _HeldBack
        return super().make_room(rows)

    def prompts(self):
        """The plan if it has prompts, else None, and nothing of a step is done yet."""
        self.held_back = True
        try:
            return super().plan()
        except _HeldBack:
            return None
        finally:
            self.held_back = False

    def settle(self, runs):
        return super().settle(runs) if self.on_board.pop(0) else []


def slow_plan(ranks):
    """The joint plan of slow ranks: `(mode, prompts, moves)` of each, None of all if there is nothing to launch."""
    found = [rank.prompts() for rank in ranks]
    prefills = any(found)
    for i, rank in enumerate(ranks):
        if found[i] is None and not (prefills and not rank.limits.mixed):
            before = rank.left  # of the part that it does again
            found[i] = rank.plan()
            rank.left = before + rank.left
            if found[i] is not None and prefills:
                found[i] = ("mixed", *found[i][1:])
    if not any(found):
        return [None] * len(ranks)
    for rank, planned in zip(ranks, found, strict=True):
        rank.on_board.append(planned is not None)
    return [("idle", [], []) if planned is None else planned for planned in found]


class RankWalk(Walk):
    """One rank, and its oracle."""

    def __init__(self, *args, **sizes):
        super().__init__(*args, **sizes)
        slow = self.slow
        self.slow = SlowRank(
            self.run.limits, max_running=slow.max_running, num_pages=slow.num_pages, page_size=slow.page_size
        )

    def take(self, planned, expected):
        """Its part of a joint plan, compared, and launched."""
        self.run.state, batch, self.run.left = planned
        if expected is not None and expected[0] == "idle":
            assert [(gone.serial, gone.reason) for gone in self.run.left] == self.slow.left
            assert_idle_batch(batch, forward_iter=planned.state.forward_iter)
            self.run.launch(batch, [])
            self.runs.append([])
            self.serials.append([])
            return
        with mock.patch.object(self.run, "plan", lambda: batch), mock.patch.object(self.slow, "plan", lambda: expected):
            self.plan()
        self.run.check()

    def compare(self):
        super().compare()
        waiting = [r.prompt_len + len(r.output) + r.max_new_tokens - len(r.output) for r in self.slow.waiting]
        running = [
            max(r.fill_len - r.committed, 0) + r.max_new_tokens - len(r.output) for r in self.slow.running.values()
        ]
        assert outstanding_tokens(self.run.state) == sum(waiting) + sum(running)


class RanksWalk:
    """Ranks of one engine: the same sizes, requests of their own, joint plans."""

    def __init__(self, seed, *, count, depth, page_size, mixed=None):
        self.ranks = [RankWalk(np.random.default_rng(seed), depth=depth, page_size=page_size) for _ in range(count)]
        self.rng = np.random.default_rng([*seed, 1])
        self.limits = self.ranks[0].run.limits
        if mixed is not None:
            self.limits = dataclasses.replace(self.limits, mixed=mixed)
        for rank in self.ranks:
            rank.rng = self.rng
            rank.run.limits = rank.slow.limits = self.limits
        self.counts = collections.Counter()

    def compare(self):
        for rank in self.ranks:
            rank.compare()
        states = [rank.run.state for rank in self.ranks]
        assert len({len(state.launched) for state in states}) == 1
        assert len({int(state.forward_iter) for state in states}) == 1

    def plan(self):
        """False if nothing can be launched."""
        planned = plan_ranks([rank.run.state for rank in self.ranks], limits=self.limits)
        expected = slow_plan([rank.slow for rank in self.ranks])
        for rank, ours, theirs in zip(self.ranks, planned, expected, strict=True):
            rank.take(ours, theirs)
        if planned[0].batch is None:
            return False
        modes = {batch.forward_mode for _, batch, _ in planned}
        assert modes <= {DECODE, IDLE} or modes <= {EXTEND, MIXED, IDLE}
        assert modes != {IDLE}
        self.counts[tuple(sorted(mode.value for mode in modes))] += 1
        for rank, (state, batch, _) in zip(self.ranks, planned, strict=True):
            held = (rank.run.state.requests.serial > 0).any()
            self.counts["waits"] += bool(held) and batch.forward_mode is IDLE
            self.counts["only tails"] += batch.forward_mode is MIXED and not len(batch.rows)
            assert state.launched[-1].forward_iter == batch.forward_iter
        return True

    @property
    def unsettled(self):
        return len(self.ranks[0].run.results)

    def settle(self):
        for rank in self.ranks:
            rank.settle()

    def go(self, num_actions):
        weights = self.rng.dirichlet([3, 4, 4, 0.4])
        busy = self.rng.dirichlet([0.7] * len(self.ranks))  # some ranks are asked for more than others
        for action in self.rng.choice(4, num_actions, p=weights):
            rank = self.ranks[self.rng.choice(len(self.ranks), p=busy)]
            if action == 0 and len(rank.slow.waiting) < 6:
                rank.submit()
            elif action == 1 and self.unsettled <= self.limits.depth:
                self.plan()
            elif action == 2 and self.unsettled:
                self.settle()
            elif action == 3:
                rank.abort()
            self.compare()
        self.drain()

    def drain(self):
        """Nothing more is asked: every rank comes to its end, and every page of it comes back."""
        for _ in range(4000):
            if self.unsettled <= self.limits.depth and self.plan():
                self.compare()
                continue
            if not self.unsettled:
                break
            self.settle()
            self.compare()
        for rank in self.ranks:
            rank.drain()
            assert outstanding_tokens(rank.run.state) == 0


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_any_schedule_of_three_ranks(depth, mixed):
    """B61: requests come to any rank at any time; each rank does what a slow scheduler of its own says, and no launch holds two kinds of work."""
    for seed in range(3):
        RanksWalk([seed, depth, 62], count=3, depth=depth, page_size=(1, 4, 16)[seed % 3], mixed=mixed).go(70)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_any_schedule_of_ranks_for_long(count, depth, page_size):
    for seed in range(100, 108):
        RanksWalk([seed, depth, page_size], count=count, depth=depth, page_size=page_size).go(300)


def test_the_walks_of_ranks_meet_what_they_are_meant_to():
    counts, reasons = collections.Counter(), set()
    for seed in range(10):
        walk = RanksWalk([seed, 63], count=3, depth=1, page_size=4, mixed=seed % 2 == 0)
        walk.go(90)
        counts += walk.counts
        for rank in walk.ranks:
            counts += rank.slow.counts
            reasons |= {request.reason for request in rank.slow.ended.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR}
    for modes in (
        ("decode",), ("decode", "idle"), ("extend", "idle"), ("extend", "mixed"), ("extend", "idle", "mixed"), ("idle", "mixed"),
    ):  # fmt: skip
        assert counts[modes] > 2, (modes, counts)
    for event in ("waits", "only tails", "late", "retracted", "preempted", "hits", "chunks"):
        assert counts[event] > 2, (event, counts)


# --- where a request goes ----------------------------------------------------------------------------------------------


def states_of(*loads):
    """A state a load: requests of `(prompt_len, max_new_tokens)` that wait."""
    states = []
    for load in loads:
        run = Run(max_running=2, page_size=4)
        for serial, (prompt_len, max_new_tokens) in enumerate(load, 1):
            run.submit(serial, prompt_len, max_new_tokens)
        states.append(run.state)
    return states


@pytest.mark.parametrize(
    ("loads", "rank"),
    [
        (([],), 0),
        (([(9, 9)],), 0),
        (([], []), 0),
        (([], [], []), 0),
        (([(1, 1)], []), 1),
        (([(1, 1)], [], []), 1),
        (([(5, 5)], [(5, 6)]), 0),
        (([(5, 6)], [(6, 5)]), 0),  # prompt and output count alike
        (([(5, 6)], [(5, 5)], [(2, 8)]), 1),
        (([(20, 1)], [(2, 3), (2, 3), (2, 3)]), 1),  # tokens count, requests do not
        (([(40, 5)], [(40, 4)], [(1, 1), (1, 40)]), 2),
    ],
)
def test_a_request_goes_where_the_least_is_to_do(loads, rank):
    assert route(states_of(*loads), ()) == rank


def test_what_is_outstanding():
    """A running request's prompt is done when it is launched, its tokens when they are settled; one that waits again counts the tokens it has, too."""
    run = Run(max_running=2, page_size=4, max_prefill_tokens=8, depth=0)
    assert outstanding_tokens(run.state) == 0
    run.submit(1, 12, 9)
    assert outstanding_tokens(run.state) == 21
    run.step([[]])
    assert outstanding_tokens(run.state) == 4 + 9
    run.step([[0]])
    assert outstanding_tokens(run.state) == 8
    run.step([[0, 0, 0]])
    assert outstanding_tokens(run.state) == 5
    run.submit(2, 3, 4)
    assert outstanding_tokens(run.state) == 12
    run.abort(2)
    assert outstanding_tokens(run.state) == 5
    state = submit(run.state, Waiting(3, 10, 8, (), output_len=5))
    assert outstanding_tokens(state) == 5 + (10 + 5) + (8 - 5)
    while run.state.requests.serial.any():
        run.step([[0]])
    assert outstanding_tokens(run.state) == 0


def with_cached(tokens, load=()):
    """A state whose prefix cache holds the pages of `tokens`."""
    run = Run(max_running=2, page_size=4, depth=0)
    run.submit(1, tokens, 1)
    run.step([[0]])
    for serial, (prompt_len, max_new_tokens) in enumerate(load, 2):
        run.submit(serial, prompt_len, max_new_tokens)
    return run


def test_a_request_goes_where_its_prefix_is():
    """Cached tokens count against outstanding ones: a long prefix is worth a longer queue, as far as it is longer."""
    prompt = list(range(50, 70))
    empty, half, whole = with_cached([1] * 20), with_cached(prompt[:10]), with_cached(prompt)
    keys = whole.keys(prompt)
    assert len(keys) == 5
    assert route([empty.state, half.state, whole.state], keys) == 2
    assert route([empty.state, half.state], keys) == 1
    assert route([empty.state, half.state, whole.state], keys[:2]) == 1  # 8 tokens in both: the first
    assert route([empty.state, half.state, whole.state], ()) == 0
    assert route([empty.state, half.state, whole.state], with_cached([2] * 20).keys([2] * 20)) == 0
    for load, rank in (((10, 9), 2), ((10, 10), 0), ((10, 11), 0)):
        assert route([empty.state, with_cached(prompt, [load]).state], keys) == min(rank, 1)
    assert route([whole.state], keys) == 0


def test_route_changes_nothing():
    """It looks: pages are not used by it."""
    run = with_cached(list(range(20)))
    before = jax.tree.map(np.copy, (run.state.ledger, run.state.prefix_cache))
    route([run.state, run.state], run.keys(list(range(20))))
    assert_same((run.state.ledger, run.state.prefix_cache), before)


# --- what crosses to the device ------------------------------------------------------------------------------------------


def sizes_of(*, num_tails):
    return ExtendSizes(num_tokens=8, num_rows=3, num_tails=num_tails, lookahead=2, table_width=16, max_new_pages=2)


def test_an_idle_batch_beside_decodes_is_all_padding():
    _, batch = idle_batch()
    upload = pack_decode(batch, bucket=4)
    assert upload.dtype == np.int32
    inputs = unpack_decode(upload)
    assert inputs.forward_iter == 1
    assert not inputs.rows.any() and not inputs.expected_iter.any() and not inputs.first_page.any()
    assert inputs.new_pages.shape == (4, 2) and (inputs.new_pages == -1).all()
    assert np.array_equal(pack_decode(dataclasses.replace(batch, forward_iter=np.int32(9)), bucket=4)[:, 2], [9] * 4)


@pytest.mark.parametrize("num_tails", [0, 3])
def test_an_idle_batch_beside_prompts_is_all_padding(num_tails):
    _, batch = idle_batch()
    sizes = sizes_of(num_tails=num_tails)
    none = np.zeros(0, np.int32)
    upload = pack_extend(batch, none, np.zeros((0, 2), np.int32), np.zeros((0, SAMPLING_COLUMNS), np.int32), sizes)
    assert upload.shape == (sizes.upload_len,)
    assert np.array_equal(upload, extend_upload(batch, [], sizes, seed_of=lambda request: 1 / 0))
    inputs = unpack_extend(upload, sizes=sizes)
    assert inputs.forward_iter == 1 and inputs.tails.forward_iter == 1
    for name in ("input_ids", "rows", "prefix_lens", "extend_lens", "page_table"):
        assert not getattr(inputs, name).any(), name
    assert inputs.tails.rows.tolist() == [0] * num_tails and (inputs.tails.new_pages == -1).all()


def test_a_batch_of_tails_alone_has_no_prompt_on_the_device():
    ranks = Ranks(2, mixed=True)
    ranks.runs[1].submit(1, 5, 9)
    ranks.step()
    ranks.runs[0].submit(1, 5, 9)
    _, batch = batches = ranks.plan()
    sizes = sizes_of(num_tails=3)
    inputs = unpack_extend(extend_upload(batch, [], sizes, seed_of=lambda request: 1 / 0), sizes=sizes)
    for name in ("input_ids", "rows", "prefix_lens", "extend_lens", "page_table"):
        assert not getattr(inputs, name).any(), name
    alone = unpack_decode(pack_decode(batch.tails, bucket=3))
    assert_same(tuple(inputs.tails), tuple(alone))
    assert inputs.tails.rows.tolist() == [1, 0, 0] and inputs.tails.expected_iter.tolist() == [1, 0, 0]
    assert inputs.forward_iter == inputs.tails.forward_iter == 2
    ranks.launch(batches)


def test_states_of_ranks_may_begin_as_one():
    """Values: what one rank plans does not show in another that began as the same object."""
    limits = Run(page_size=4).limits
    state = init_state(limits=limits, max_running=2, num_pages=20, page_size=4)
    one = submit(state, Waiting(1, 5, 3, ()))
    first, second = plan_ranks((one, state), limits=limits)
    assert (first.batch.forward_mode, second.batch.forward_mode) == (EXTEND, IDLE)
    assert second.state.ledger is state.ledger and state.launched == () and len(second.state.launched) == 1
    assert first.state.ledger.num_free == 18 and second.state.ledger.num_free == 20
