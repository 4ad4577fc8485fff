"""One simulation, several ways: alone and with others, compiled and not, in `lax.scan` and step by step. And the state is sound all along."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from pyrsistent import pdeque, pmap
from sim.kit import PAGE_SIZE, parts_of, random_cases

from jspec import sim
from jspec.state import Limits, SchedulerState, Waiting
from jspec.state.dense import replace
from jspec.state.invariants import check
from jspec.state.prefix_cache import init_prefix_cache

STEPS, EAGER_STEPS = 60, 4
QUICK = {"xla_backend_optimization_level": 0}
"""Compiled in a hurry: the programs of these tests run a few milliseconds."""


@functools.cache
def simulation(count=24, seed=3):
    return sim.prepare(*parts_of(random_cases(count, seed)), page_size=PAGE_SIZE)


@functools.cache
def history():
    """States of all configurations, from before the first iteration on, and what each iteration did: one `lax.scan`."""
    run = simulation()

    def advance(states, _):
        after, said = run.step(states)
        return after, (after, said)

    scan = jax.jit(
        lambda first: jax.lax.scan(advance, first, length=STEPS)[1],
        compiler_options=QUICK,
    )
    first = run.init()
    states, said = jax.tree.map(np.asarray, scan(first))
    return jax.tree.map(lambda x, xs: np.concatenate([x[None], xs]), jax.tree.map(np.asarray, first), states), said


def of(tree, i):
    return jax.tree.map(lambda x: x[i], tree)


def scheduler_state(case, num_pages, state):
    """What the engine would hold at this point, with the requests it knows by name."""
    waiting = {
        serial: Waiting(serial, case.prompts[serial - 1], case.most[serial - 1], ())
        for serial in range(1, case.count + 1)
    }
    queue = [int(s) for s in state.queue.stack[: int(state.queue.stacked)][::-1]]
    queue += range(int(state.queue.fresh) + 1, case.count + 1)
    running = [int(s) for s in state.requests.serial if s > 0]
    ledger = state.ledger  # its arrays are as large as the largest pool: what this one lacks is cut off
    ledger = replace(
        ledger,
        free_pages=np.append(ledger.free_pages[:num_pages], np.int32(0)),
        page_locks=ledger.page_locks[: num_pages + 1],
    )
    return SchedulerState(
        requests=state.requests,
        ledger=ledger,
        prefix_cache=init_prefix_cache(num_pages),
        launched=(state.flight.launched,) if state.flight.exists else (),
        forward_iter=np.int32(state.flight.launched.forward_iter),
        new_token_ratio=state.new_token_ratio,
        waiting=pdeque([waiting[s] for s in queue]),
        admitted=pmap({s: waiting[s] for s in running}),
    )


def limits_of(case):
    return Limits(
        context_len=10_000,
        alloc_len=case.alloc_len,
        depth=int(case.overlap),
        max_prefill_tokens=case.max_prefill_tokens,
        max_prefill_rows=8,
    )


def test_the_engines_invariants_hold_after_every_iteration():
    """All of them: clocks, pages, rows, launches, and that the frontier on the device stays in what is reserved."""
    cases = random_cases(24, 3)
    states, _ = history()
    checked = 0
    for i, case in enumerate(cases):
        for turn in range(STEPS + 1):
            state = of(states, (turn, i))
            flight = state.flight
            flying = (flight.launched.rows > 0) & (flight.launched.epochs == state.requests.epoch)
            frontier = state.ledger.kv_committed_len + flight.accept_lens * (flying & flight.launched.commits)
            num_pages = int(simulation().world.policy.kv_pages[i])
            check(
                scheduler_state(case, num_pages, state),
                limits=limits_of(case),
                frontier=frontier,
                max_accept=case.alloc_len,
            )
            checked += 1
    assert checked == 24 * (STEPS + 1)
    assert states.counts.retractions[-1].sum() > 0 and (states.requests.epoch[-1, :, 1:] > 0).any()


def assert_same(a, b):
    """Integers to the last bit; times as far as the compiler may round them otherwise."""

    def same(x, y):
        exact = np.asarray(x).dtype.kind in "bi"
        (
            np.testing.assert_array_equal
            if exact
            else functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-4)
        )(x, y)

    jax.tree.map(same, a, b)


@pytest.mark.slow
def test_scan_is_a_loop_of_steps():
    run, (states, said) = simulation(), history()
    step, state = jax.jit(run.step), run.init()
    for turn in range(STEPS):
        state, info = step(state)
        assert_same((state, info), (of(states, turn + 1), of(said, turn)))


@pytest.mark.parametrize("jit", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_alone_and_without_jit_it_is_the_same(jit):
    """Step by step, one configuration alone, compiled or an operation at a time: neither its company nor the compiler changes what it does."""
    cases = random_cases(24, 3)
    i = max(range(24), key=lambda i: (cases[i].max_running, cases[i].reserve_len))
    assert cases[i].max_running == simulation().sizes.rows
    run, (states, said) = sim.prepare(*parts_of(cases[i : i + 1]), page_size=PAGE_SIZE), history()
    step = jax.jit(run.step, compiler_options=QUICK) if jit else run.step
    state, turns = run.init(), STEPS if jit else EAGER_STEPS
    with jax.disable_jit(not jit):
        for turn in range(turns):
            state, info = step(state)
            now = of(states, (turn + 1, i))
            assert_same(of(info, 0), of(said, (turn, i)))
            assert_same(of((state.requests, state.facts, state.queue, state.counts, state.clock), 0),
                        (now.requests, now.facts, now.queue, now.counts, now.clock))  # fmt: skip
            assert_same(of(state.ledger, 0).kv_allocated_len, now.ledger.kv_allocated_len)
    assert said.settled_tokens[:turns, i].any()


@pytest.mark.slow
def test_one_by_one_is_all_together():
    """Each alone, without an axis of configurations, against all in one call."""
    cases = random_cases(160)
    together = sim.simulate(*parts_of(cases), page_size=PAGE_SIZE)
    for i in range(0, 160, 40):
        alone = sim.simulate(*(of(part, 0) for part in parts_of([cases[i]])), page_size=PAGE_SIZE)
        for field in dataclasses.fields(alone):
            mine, ours = getattr(alone, field.name), getattr(together, field.name)[i]
            assert np.shape(mine) == np.shape(ours)
            assert_same(mine, ours)


def test_what_is_done_does_not_change():
    states, said = history()
    done = ~np.asarray(simulation().has_work(of(states, -2)))
    assert done.any() and not done.all()
    assert_same(of(of(states, -2), done), of(of(states, -1), done))
    assert not said.rows[-1][done].any() and said.rows[-1].any()


def test_a_run_that_is_cut_short_says_so():
    cases = random_cases(160)
    report = sim.simulate(*parts_of(cases), page_size=PAGE_SIZE, max_steps=20)
    full = sim.simulate(*parts_of(cases), page_size=PAGE_SIZE)
    assert report.complete.any() and not report.complete.all() and (report.steps <= 20).all()
    np.testing.assert_array_equal(report.tokens, report.output_lens.sum(axis=1))
    assert (report.tokens <= full.tokens).all()


@pytest.mark.parametrize("scale", [1, 7])
def test_the_order_of_configurations_does_not_matter(scale):
    cases = random_cases(160)
    order = (np.arange(160) * scale + 3) % 160
    a = sim.simulate(*parts_of(cases), page_size=PAGE_SIZE)
    b = sim.simulate(*parts_of([cases[i] for i in order]), page_size=PAGE_SIZE)
    np.testing.assert_array_equal(a.iterations[order], b.iterations)
    np.testing.assert_array_equal(a.finish_at_s[order], b.finish_at_s)
