"""Random schedules: any order of submit, plan, settle and abort, any device, against a scheduler of lists and dictionaries.

After every action the invariants hold (`Run` checks them), every page, length and flag is what the oracle says, and at the end nothing is left.
"""

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
        largest = ceil_to(CONTEXT + (depth + 1) * alloc_len, page_size) // page_size
        sizes = dict(
            max_running=int(rng.integers(1, 6)), num_pages=int(largest * rng.uniform(1, 3)), page_size=page_size
        )
        self.run = Run(
            depth=depth,
            alloc_len=alloc_len,
            max_accept=self.width,
            context_len=CONTEXT,
            max_prefill_tokens=int(rng.integers(8, 64)),
            max_prefill_rows=int(rng.integers(1, 4)),
            **sizes,
        )
        self.slow = SlowScheduler(self.run.limits, **sizes)

    def submit(self):
        self.serial += 1
        prompt_len = int(self.rng.choice([1, self.rng.integers(1, 8), self.rng.integers(1, CONTEXT)]))
        max_new_tokens = int(self.rng.integers(1, min(CONTEXT - prompt_len, 14) + 1))
        stops = ((), (4,), (4, 5))[self.rng.integers(3)]
        self.run.submit(self.serial, prompt_len, max_new_tokens, stops)
        self.slow.waiting.append(SlowRequest(self.serial, prompt_len, max_new_tokens, stops))

    def abort(self):
        serial = int(self.rng.integers(0, self.serial + 2))
        before = self.run.state
        found = self.run.abort(serial)
        assert found == self.slow.abort(serial)
        assert found != "unknown" or self.run.state is before

    def plan(self):
        """False if nothing can be launched."""
        batch, expected = self.run.plan(), self.slow.plan()
        if batch is None or expected is None:
            assert batch is expected is None
            return False
        mode, rows, new_pages = expected
        decode = batch.forward_mode is ForwardMode.DECODE
        assert (decode, batch.rows.tolist()) == (mode == "decode", rows)
        assert (batch.new_pages >= 0).sum(axis=1).tolist() == new_pages
        assert batch.serials.tolist() == [self.slow.running[row].serial for row in rows]  # first come, first served
        assert batch.kv_bound == max(self.slow.running[row].allocated for row in rows)
        runs = []
        for _ in rows:
            length = int(self.rng.choice([1, self.width, self.rng.integers(1, self.width + 1)])) if decode else 1
            runs.append(NOT_FINITE if self.rng.random() < 0.01 else self.rng.integers(0, 6, length).tolist())
        self.run.launch(batch, runs)
        self.runs.append(runs)
        self.serials.append(batch.serials.tolist())
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
        requests, ledger = self.run.state.requests, self.run.state.ledger
        wants, held = launchable(requests, self.run.state.launched), num_pages_held(ledger)
        assert [r.serial for r in self.run.state.waiting] == [r.serial for r in self.slow.waiting]
        for row in range(1, requests.serial.size):
            slow = self.slow.running.get(row)
            got = [int(x[row]) for x in (requests.serial, requests.prompt_len, requests.output_len, requests.to_finish)]
            got += [int(x[row]) for x in (ledger.kv_committed_len, ledger.kv_allocated_len, held, wants)]
            if slow is None:
                assert not any(got), row
            else:
                assert got == [
                    slow.serial, slow.prompt_len, len(slow.output), slow.aborted,
                    slow.committed, slow.allocated, self.slow.pages(slow), self.slow.wants_launch(slow),
                ]  # fmt: skip
        used = sum(self.slow.pages(request) for request in self.slow.running.values())
        assert ledger.num_free == self.slow.num_pages - used

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
        """Nothing more is asked: everything ends, and everything comes back."""
        for _ in range(2000):
            if len(self.run.results) <= self.run.limits.depth and self.plan():
                self.compare()
                continue
            if not self.run.results:
                break
            self.settle()
            self.compare()
        assert not self.slow.waiting and not self.slow.running and not self.run.state.launched
        assert self.run.state.ledger.num_free == self.slow.num_pages
        assert not self.run.state.requests.serial.any() and not self.run.state.ledger.page_table.any()
        assert len(self.slow.ended) == self.serial
        for request in self.slow.ended.values():
            assert request.reason is not FinishReason.NONE
            if request.reason is FinishReason.LENGTH:
                assert len(request.visible) == request.max_new_tokens


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_any_schedule(depth, page_size):
    for seed in range(4):
        Walk(np.random.default_rng([seed, depth, page_size]), depth=depth, page_size=page_size).go(100)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_any_schedule_for_long(depth, page_size):
    for seed in range(100, 120):
        Walk(np.random.default_rng([seed, depth, page_size]), depth=depth, page_size=page_size).go(400)


def test_the_walks_meet_what_they_are_meant_to():
    """Of a few walks: each kind of end, a row with a late result, a queue that waits for pages, an abort in each place."""
    reasons, late, waits, found = set(), 0, 0, set()
    for seed in range(12):
        walk = Walk(np.random.default_rng([seed, 9]), depth=1, page_size=4)
        abort, settle = walk.slow.abort, walk.slow.settle

        def count_abort(serial, abort=abort):
            found.add(answer := abort(serial))
            return answer

        def count_late(runs, settle=settle, walk=walk):
            nonlocal late, waits
            late += sum(request.reason is not FinishReason.NONE for request in walk.slow.flights[0][1])
            waits += bool(walk.slow.waiting and len(walk.slow.running) < walk.slow.max_running)
            return settle(runs)

        walk.slow.abort, walk.slow.settle = count_abort, count_late
        walk.go(60)
        reasons |= {request.reason for request in walk.slow.ended.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR}
    assert late > 3 and waits > 3 and found == {"running", "waiting", "unknown"}


def test_the_oracle_can_disagree():
    """A scheduler that counts one token less than it should is found out."""
    walk = Walk(np.random.default_rng(3), depth=1, page_size=4)
    take = SlowRequest.take
    walk.slow.waiting.append(SlowRequest(1, 5, 9, ()))
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
