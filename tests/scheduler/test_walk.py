"""Random schedules: any order of submit, plan, settle and abort, any device, against a scheduler of lists and dictionaries.

After every action the invariants hold (`Run` checks them), every page, length and flag is what the oracle says, and at the end nothing is left.
"""

import collections

import numpy as np
import pytest
from oracles import NOT_FINITE, Run, SlowRequest, SlowScheduler, ceil_to

from jspec.scheduler import launchable
from jspec.state import FinishReason, ForwardMode, Waiting, num_pages_held

CONTEXT = 48


class Walk:
    """The real scheduler and the slow one, side by side."""

    def __init__(self, rng, *, depth, page_size):
        self.rng, self.serial, self.runs, self.serials = rng, 0, [], []
        self.width = int(rng.integers(1, 6))
        alloc_len = self.width + int(rng.integers(0, 2))
        lookahead = int(rng.integers(0, 3))
        largest = ceil_to(CONTEXT + (depth + 1) * alloc_len, page_size) // page_size
        sizes = dict(
            max_running=int(rng.integers(1, 7)), num_pages=int(largest * rng.uniform(1, 2)), page_size=page_size
        )
        # Some chunks are as short as they may be; a ratio of next to nothing crowds the pool until requests are retracted.
        longest = page_size + lookahead + int(rng.integers(0, CONTEXT))
        self.run = Run(
            depth=depth,
            alloc_len=alloc_len,
            max_accept=self.width,
            context_len=CONTEXT,
            max_prefill_tokens=longest,
            max_prefill_rows=int(rng.integers(1, 4)),
            mixed=bool(rng.integers(2)),
            lookahead=lookahead,
            policy=str(rng.choice(["fcfs", "longest-prefix"])),
            new_token_ratio=float(rng.choice([0.01, 0.3, 1.0])),
            ratio_steps=int(rng.choice([5, 600])),
            **sizes,
        )
        self.slow = SlowScheduler(self.run.limits, **sizes)
        self.stems = [rng.integers(0, 50, CONTEXT).tolist() for _ in range(3)]  # what prompts begin with
        self.priorities = bool(rng.integers(2))
        self.vocabulary = int(
            rng.choice([1, 2, 6, 6])
        )  # where all outputs are alike, requests end with pages that others have, too
        self.longest_output = int(rng.choice([3, 14, 30, CONTEXT]))
        self.longest_prompt = (
            CONTEXT if self.longest_output < CONTEXT else 8
        )  # short prompts, long outputs: the pool is promised many times over

    def submit(self):
        self.serial += 1
        length = int(self.rng.choice([1, self.rng.integers(1, 8), self.rng.integers(1, self.longest_prompt)]))
        prompt = self.stems[self.rng.integers(3)][: int(self.rng.integers(0, length + 1))]
        prompt = prompt + self.rng.integers(100, 102, length - len(prompt)).tolist()
        max_new_tokens = int(self.rng.integers(1, min(CONTEXT - length, self.longest_output) + 1))
        stops = ((), (4,), (4, 5))[self.rng.integers(3)]
        priority = int(self.rng.integers(0, 3)) if self.priorities else 0
        self.run.submit(self.serial, prompt, max_new_tokens, stops, priority=priority)
        request = SlowRequest(self.serial, prompt, max_new_tokens, stops, priority=priority, shares=True)
        self.slow.waiting.insert(sum(other.priority >= priority for other in self.slow.waiting), request)

    def abort(self):
        serial = int(self.rng.integers(0, self.serial + 2))
        before = self.run.state
        found = self.run.abort(serial)
        assert found == self.slow.abort(serial)
        assert found != "unknown" or self.run.state is before

    def plan(self):
        """False if nothing can be launched."""
        batch, expected = self.run.plan(), self.slow.plan()
        assert [(gone.serial, gone.reason) for gone in self.run.left] == self.slow.left
        if batch is None or expected is None:
            assert batch is expected is None
            return False
        mode, prompts, moves = expected
        assert batch.forward_mode.value == mode
        decode = batch.forward_mode is ForwardMode.DECODE
        tails = batch if decode else batch.tails
        if not decode:
            got = (batch.rows.tolist(), batch.prefix_lens.tolist(), batch.extend_lens.tolist())
            assert list(zip(*got, strict=True)) == prompts
            assert batch.goes_on.tolist() == [self.slow.running[row].filling for row, *_ in prompts]
            held = [self.slow.pages(self.slow.running[row]) for row, *_ in prompts]
            assert (batch.new_pages > 0).sum(axis=1).tolist() == held
        if moves:
            new_pages = (tails.new_pages >= 0).sum(axis=1).tolist()
            assert list(zip(tails.rows.tolist(), new_pages, strict=True)) == moves
        else:
            assert tails is None
        rows = [row for row, *_ in prompts] + [row for row, _ in moves]
        serials = [self.slow.running[row].serial for row in rows]
        assert serials == [*(batch.serials.tolist()), *(tails.serials.tolist() if not decode and tails else [])]
        assert batch.kv_bound == max(self.slow.running[row].allocated for row in rows)
        runs = []
        for i in range(len(rows)):
            length = int(self.rng.choice([1, self.width, self.rng.integers(1, self.width + 1)])) if decode else 1
            runs.append(
                NOT_FINITE if self.rng.random() < 0.01 else self.rng.integers(0, self.vocabulary, length).tolist()
            )
            if i < len(prompts) and batch.goes_on[i] and runs[-1] != NOT_FINITE:
                runs[-1] = []
        self.run.launch(batch, runs)
        self.runs.append(runs)
        self.serials.append(serials)
        return True

    def settle(self):
        result = self.run.results[0]
        _, settled = self.run.settle()
        emitted = [
            (serial, result.next_token_ids[i, : settled.num_visible[i]].tolist(), int(settled.finish_reason[i]))
            for i, serial in enumerate(self.serials.pop(0))
            if settled.live[i]
        ]
        assert emitted == self.slow.settle(self.runs.pop(0))

    def compare(self):
        state = self.run.state
        requests, ledger = state.requests, state.ledger
        wants, held = launchable(requests, ledger, state.launched), num_pages_held(ledger)
        assert [(r.serial, r.output_len) for r in state.waiting] == [
            (r.serial, len(r.output)) for r in self.slow.waiting
        ]
        for row in range(1, requests.serial.size):
            slow = self.slow.running.get(row)
            got = [int(x[row]) for x in (requests.serial, requests.prompt_len, requests.output_len, requests.to_finish)]
            got += [int(x[row]) for x in (ledger.kv_committed_len, ledger.kv_allocated_len, held, wants)]
            got += [int(x[row]) for x in (requests.fill_len, requests.priority)]
            got += [int(ledger.cache_protected_len[row]) // ledger.page_size]
            if slow is None:
                assert not any(got), row
            else:
                assert got == [
                    slow.serial, slow.prompt_len, len(slow.output), slow.aborted,
                    slow.committed, slow.allocated, self.slow.pages(slow), self.slow.wants_launch(slow),
                    slow.fill_len, slow.priority, len(slow.locked),
                ]  # fmt: skip
        assert ledger.num_free == self.slow.num_free()
        assert {self.run.keys(name)[-1] for name in self.slow.cached} == set(state.prefix_cache.pages)
        assert state.new_token_ratio == self.slow.ratio

    def go(self, num_actions):
        weights = self.rng.dirichlet([2, 4, 4, 0.4])  # some walks crowd the queue, others run it dry
        for action in self.rng.choice(4, num_actions, p=weights):
            unsettled = len(self.run.results)
            if action == 0 and len(self.slow.waiting) < 6:
                self.submit()
            elif action == 1 and unsettled <= self.run.limits.depth:
                self.plan()
            elif action == 2 and unsettled:
                self.settle()
            elif action == 3:
                self.abort()
            self.compare()
        self.drain()

    def drain(self):
        """Nothing more is asked: everything ends, and everything comes back, or stays in the cache."""
        for _ in range(4000):
            if len(self.run.results) <= self.run.limits.depth and self.plan():
                self.compare()
                continue
            if not self.run.results:
                break
            self.settle()
            self.compare()
        assert not self.slow.waiting and not self.slow.running and not self.run.state.launched
        assert self.run.state.ledger.num_free + len(self.slow.cached) == self.slow.num_pages
        assert not self.run.state.ledger.page_locks.any() and not self.run.state.admitted
        assert not self.run.state.requests.serial.any() and not self.run.state.ledger.page_table.any()
        assert len(self.slow.ended) == self.serial
        for request in self.slow.ended.values():
            assert request.reason not in (FinishReason.NONE, FinishReason.OUT_OF_PAGES)
            if request.reason is FinishReason.LENGTH:
                assert len(request.visible) == request.max_new_tokens


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_any_schedule(depth, page_size):
    for seed in range(12):
        Walk(np.random.default_rng([seed, depth, page_size]), depth=depth, page_size=page_size).go(100)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_any_schedule_for_long(depth, page_size):
    for seed in range(100, 120):
        Walk(np.random.default_rng([seed, depth, page_size]), depth=depth, page_size=page_size).go(400)


def test_the_walks_meet_what_they_are_meant_to():
    """Of some walks: each kind of end, late results, an abort in each place, and everything that a plan can do."""
    reasons, counts, found = set(), collections.Counter(), set()
    for seed in range(60):
        walk = Walk(np.random.default_rng([seed, 9]), depth=1, page_size=4)
        abort = walk.slow.abort

        def count_abort(serial, abort=abort):
            found.add(answer := abort(serial))
            return answer

        walk.slow.abort = count_abort
        walk.go(100)
        counts += walk.slow.counts
        reasons |= {request.reason for request in walk.slow.ended.values()}
    counts["retracted for pages"] = counts["retracted"] - counts["preempted"]
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR}
    assert found == {"running", "waiting", "unknown"}
    for event in ("late", "retracted for pages", "preempted", "evicted", "hits", "doubles", "mixed", "chunks"):
        assert counts[event] > 3, (event, counts)


def test_the_oracle_can_disagree():
    """A scheduler that counts one token less than it should is found out."""
    walk = Walk(np.random.default_rng(3), depth=1, page_size=4)
    take = SlowRequest.take
    walk.slow.waiting.append(SlowRequest(1, [1] * 5, 9, ()))
    walk.run.submit(1, 5, 9)
    walk.serial = 1
    assert walk.plan()
    walk.slow.running[1].take = lambda run: take(walk.slow.running[1], run[:-1])
    with pytest.raises(AssertionError):
        walk.settle()


def test_a_request_that_is_aborted_while_it_waits_never_runs():
    run = Run(max_running=1)
    for serial in (1, 2, 3):
        run.submit(serial, 4)
    run.step([[0]])
    assert run.abort(2) == "waiting" and run.abort(2) == "unknown"
    assert list(run.state.waiting) == [Waiting(3, 4, 100, ())]
