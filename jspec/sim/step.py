"""One iteration of the engine's loop on arrays: plan, launch, settle the launch before (the same one, without overlap), free what ended."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.scheduler import Reserved, release, reserve, settle
from jspec.sim.acceptance import Acceptance
from jspec.sim.inputs import Policy, Requests
from jspec.sim.latency import LatencyModel, Work
from jspec.sim.plan import Plan, choose, planned, put_back, retract_one, start_some
from jspec.sim.state import Clock, Flight, RowFacts, SimState, Sizes, Step, no_flight
from jspec.state import ForwardMode, GenerationBatchResult, KVLedger, Launched
from jspec.state.dense import replace, set_at
from jspec.state.requests import is_filling
from jspec.state.results import NEVER


class World(NamedTuple):
    """What does not change while a simulation runs."""

    policy: Policy
    requests: Requests
    acceptance: Acceptance
    latency: LatencyModel


def reserve_for(sizes: Sizes, policy: Policy, ledger: KVLedger, active) -> tuple[KVLedger, Reserved]:
    """`reserve` with a reserve of its own for each configuration, where it takes one for all.

    It looks at the committed length only to see how far the reserve has to reach. So a length that is lower by what this configuration reserves less
    than the largest one does the same; the ledger that comes back has the true one.
    """
    less = sizes.reserve_len - policy.reserve_len
    view = replace(ledger, kv_committed_len=ledger.kv_committed_len - less)
    view, reserved = reserve(view, active, alloc_len=sizes.reserve_len, depth=0)
    return replace(view, kv_committed_len=ledger.kv_committed_len), reserved


def _add(total, lost, term):
    """Kahan's summation: the sum, and what rounding lost."""
    term = term - lost
    new = total + term
    return new, (new - total) - term


def _tick(policy: Policy, clock: Clock, host_s, device_s, *, launches, settles, next_arrival_s) -> Clock:
    """Time at the end of an iteration. Relative to its start: the host plans, dispatches, and waits for the outcome that it settles.

    Args:
        launches, settles: bool[], what the iteration does; with neither, the clock jumps to the next arrival.
    """
    lead = clock.lead_s - host_s
    done = jnp.maximum(lead, 0) + device_s  # of the new launch, which starts when the device has finished the last
    own = launches & ~policy.overlap
    wait = jnp.where(settles, jnp.maximum(jnp.where(own, done, lead), 0), 0)
    works = launches | settles
    now, lost = _add(clock.now_s, clock.lost, (host_s + wait) * works)
    jumps = ~works & (next_arrival_s > now)
    busy, busy_lost = _add(clock.busy_s, clock.busy_lost, device_s * launches)
    return Clock(
        now_s=jnp.where(jumps, next_arrival_s, now),
        lost=jnp.where(jumps, 0, lost),
        lead_s=jnp.where(works, jnp.where(launches, done, lead) - wait, -jnp.inf),
        busy_s=busy,
        busy_lost=busy_lost,
    )


def _either(condition, if_true, if_false):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), if_true, if_false)


def launch_and_settle(sizes: Sizes, world: World, state: SimState, plan: Plan) -> tuple[SimState, Any]:
    """Launches what is planned and settles what is due.

    Returns:
        The state, in which requests that ended still hold their rows; and these rows, bool[R].

    Source: `Engine.step`; `jspec.scheduler.plan_decode` and the tails of `plan_prefill`.
    """
    policy, _, acceptance, latency = world
    table, flight, facts = state.requests, state.flight, state.facts
    index = jnp.arange(sizes.rows + 1, dtype=jnp.int32)
    mixed = policy.mixed & (policy.max_running > 1)
    ledger, reserved = reserve_for(sizes, policy, state.ledger, plan.active & (mixed | ~plan.is_prefill))
    decodes = reserved.granted
    num_decodes = jnp.sum(decodes, dtype=jnp.int32)
    is_decode = (num_decodes > 0) & ~plan.is_prefill
    exists = is_decode | plan.is_prefill

    # The device: what is under way has advanced the frontier, and used a draw, although the host does not know yet.
    flying = (flight.launched.rows > 0) & (flight.launched.epochs == table.epoch)
    frontier = ledger.kv_committed_len + flight.accept_lens * (flying & flight.launched.commits)
    goes_on = is_filling(table, ledger.kv_committed_len)
    verifies = decodes & is_decode
    drawn = acceptance.accept_lens(table.serial, facts.verifies + (flying & flight.verifies), policy.verify_width)
    accept_lens = jnp.where(verifies, drawn, jnp.astype(~goes_on, jnp.int32))
    new = Flight(
        launched=Launched(
            forward_iter=flight.launched.forward_iter + exists,
            rows=index * (decodes | plan.in_prefill),
            epochs=table.epoch,
            emits=~goes_on,
            commits=decodes,
            end_lens=jnp.zeros_like(index),
            forward_mode=ForwardMode.DECODE,
        ),
        accept_lens=accept_lens,
        verifies=verifies,
        exists=exists,
        is_decode=is_decode,
    )
    num_rows = num_decodes + jnp.sum(plan.in_prefill, dtype=jnp.int32)
    work = Work(
        rows=num_decodes,
        width=jnp.where(is_decode, policy.verify_width, 1),
        kv_tokens=jnp.sum(frontier * decodes, dtype=jnp.float32),
        draft_steps=policy.draft_steps * is_decode,
        prefill_rows=num_rows - num_decodes,
        prefill_tokens=plan.prefill_tokens,
        prefill_pairs=plan.prefill_pairs,
    )

    # The host.
    own = exists & ~policy.overlap
    due = _either(own, new, flight)
    keeps = exists & policy.overlap
    clock = _tick(
        policy,
        state.clock,
        latency.host_s,
        latency.device_s(work),
        launches=exists,
        settles=due.exists,
        next_arrival_s=_next_arrival(world.requests, state),
    )
    result = GenerationBatchResult(
        next_token_ids=jnp.zeros((sizes.rows + 1, 1), jnp.int32),
        accept_lens=due.accept_lens,
        new_seq_lens=jnp.zeros_like(index),
        status=jnp.zeros_like(index),
        stop_at=jnp.where(due.launched.rows > 0, facts.stop_len - table.output_len, NEVER),
    )
    requests, ledger, settled = settle(table, ledger, due.launched, result)
    verified = settled.live & due.verifies
    first = (settled.start == 0) & (settled.num_visible > 0)
    counts, visible = state.counts, settled.num_visible
    launched_rows = due.launched.rows > 0
    ratio = jnp.maximum(
        policy.min_new_token_ratio,
        state.new_token_ratio - (policy.new_token_ratio - policy.min_new_token_ratio) / policy.ratio_steps,
    )
    state = replace(
        state,
        requests=requests,
        ledger=ledger,
        facts=RowFacts(
            stop_len=facts.stop_len,
            verifies=facts.verifies + verified,
            first_token_s=jnp.where(first, clock.now_s, facts.first_token_s),
        ),
        flight=_either(keeps, new, no_flight(sizes.rows + 1)),
        clock=clock,
        counts=replace(
            counts,
            steps=counts.steps + (exists | due.exists),
            iterations=counts.iterations + (due.exists & due.is_decode),
            prefills=counts.prefills + plan.is_prefill,
            row_rounds=counts.row_rounds + num_rows,
            verifies=counts.verifies + jnp.sum(verified, dtype=jnp.int32),
            wasted=counts.wasted + jnp.sum(launched_rows & ~settled.live, dtype=jnp.int32),
            tokens=counts.tokens + jnp.sum(visible, dtype=jnp.int32),
            verified_tokens=counts.verified_tokens + jnp.sum(visible * verified, dtype=jnp.int32),
        ),
        new_token_ratio=jnp.where(is_decode & ~plan.left, ratio, state.new_token_ratio),
    )
    return state, settled.finish_reason > 0


def _next_arrival(requests: Requests, state: SimState):
    """f32[] when the next request arrives that was never started; -inf if there is none."""
    fresh = state.queue.fresh
    there = fresh < requests.count
    return jnp.where(there, requests.arrival_s[jnp.where(there, fresh, 0)], -jnp.inf)


def release_some(sizes: Sizes, state: SimState, finished) -> tuple[SimState, Any]:
    """Frees the first few of the rows `bool[R]` that ended; returns which are left."""
    rank = jnp.cumulative_sum(finished, dtype=jnp.int32) * finished
    k = jnp.arange(1, sizes.at_once + 1, dtype=jnp.int32)
    index = jnp.arange(sizes.rows + 1, dtype=jnp.int32)
    rows = jnp.sum(index * (rank == k[:, None]), axis=1, dtype=jnp.int32)
    serial = state.requests.serial[rows]
    state = put_back(state, rows)
    finish_s = set_at(state.per_request.finish_s, serial, state.clock.now_s)
    requests, ledger = release(state.requests, state.ledger, rows)
    state = replace(state, requests=requests, ledger=ledger, per_request=replace(state.per_request, finish_s=finish_s))
    return state, finished & (rank > k.shape[0])


def has_work(requests: Requests, state: SimState):
    """bool[]: somebody waits, runs or will arrive, or a launch is under way."""
    waits = (state.queue.stacked > 0) | (state.queue.fresh < requests.count)
    return waits | jnp.any(state.requests.serial > 0) | state.flight.exists


def step(sizes: Sizes, world: World, axes: World, states: SimState) -> tuple[SimState, Step]:
    """One iteration of several configurations at once. One that has no work left does not change.

    The loops over rows that leave or end are written over all configurations, not inside `vmap`, where each turn would copy every array.

    Args:
        sizes: shapes; static.
        world: policies, requests, acceptance, latency.
        axes: of the same structure: 0 where a leaf has an axis of configurations, else None.
        states: leaves with a leading axis of configurations.

    Returns:
        The states, and what the iteration did.
    """

    world = jax.tree.map(jnp.asarray, world)

    def each(function, *parts):
        """Of every configuration, on its parts of the world and of the others."""
        return jax.vmap(function, in_axes=(axes, *(0 for _ in parts)))(world, *parts)

    retracted = states.counts.retractions
    states, active, starting = each(lambda w, state: choose(sizes, w.policy, w.requests, state), states)
    undecided = states
    states, _ = jax.lax.while_loop(
        lambda carry: jnp.any(carry[1].remain),
        lambda carry: each(lambda w, state, starting: start_some(sizes, w.requests, state, starting), *carry),
        (states, starting),
    )
    plans = each(lambda w, *parts: planned(w.policy, *parts), undecided, states, active)
    states, plans = jax.lax.while_loop(
        lambda carry: jnp.any(carry[1].lacking),
        lambda carry: each(lambda w, state, plan: retract_one(sizes, w.policy, state, plan), *carry),
        (states, plans),
    )
    before, tokens = states.counts.row_rounds, states.counts.tokens
    states, finished = each(functools.partial(launch_and_settle, sizes), states, plans)
    ended = jnp.sum(finished, axis=1, dtype=jnp.int32)
    states, _ = jax.lax.while_loop(
        lambda carry: jnp.any(carry[1]),
        lambda carry: jax.vmap(functools.partial(release_some, sizes))(*carry),
        (states, finished),
    )
    counts = states.counts
    return states, Step(
        now_s=states.clock.now_s,
        is_prefill=plans.is_prefill,
        rows=counts.row_rounds - before,
        settled_tokens=counts.tokens - tokens,
        finished=ended,
        retracted=counts.retractions - retracted,
        free_pages=states.ledger.num_free,
        running=jnp.sum(states.requests.serial > 0, axis=1, dtype=jnp.int32),
    )
