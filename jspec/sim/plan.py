"""Who starts, and who has to leave: the engine's planner on one configuration's arrays, without a prefix cache and without priorities."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from jspec.scheduler import launchable, pages_short, prepare_extend, release
from jspec.scheduler.admit import MOST_NEW_TOKENS
from jspec.scheduler.retract import RETRACT_DECODE_STEPS
from jspec.sim.inputs import Policy, Requests
from jspec.sim.state import RowFacts, SimState, Sizes
from jspec.state.dense import add_at, ceil_div, replace, set_at
from jspec.state.requests import is_filling

MOST_PREFILL_ROWS = 8
"""Prompts of one launch, at most: as in the engine."""


class Plan(NamedTuple):
    """What the launch will be."""

    active: Any  # bool[R]  running rows that a step could advance
    in_prefill: Any  # bool[R]  rows whose prompt is in the launch
    is_prefill: Any  # bool[]
    prefill_tokens: Any  # i32[]
    prefill_pairs: Any  # f32[]
    lacking: Any  # bool[]  the pages do not suffice for the active rows: somebody has to leave
    left: Any  # bool[]  somebody had to


class Starting(NamedTuple):
    """Prompts of a launch that do not have their pages yet: the one that goes on, then the first of the queue."""

    rows: Any  # i32[A + 1]  their rows; 0: nobody
    serial: Any  # i32[A + 1]  of those that are new; 0 for the one that goes on
    end: Any  # i32[A + 1]  tokens that are ready after the launch
    next: Any  # i32[]  the first entry that is still to be done
    count: Any  # i32[]  entries

    @property
    def remain(self):
        """bool[]"""
        return self.next < self.count


def _before(values):
    """Sum of the entries before each."""
    return jnp.cumulative_sum(values, dtype=jnp.int32) - values


def _queue(sizes: Sizes, requests: Requests, state: SimState):
    """`i32[A]` the first who wait, and whether each is there: retracted ones first, then those that have arrived."""
    j = jnp.arange(sizes.prefill_rows, dtype=jnp.int32)
    queue = state.queue
    again = j < queue.stacked
    place = queue.fresh + (j - queue.stacked)
    fresh = ~again & (place < requests.count)
    arrived = fresh & (requests.arrival_s[jnp.where(fresh, place, 0)] <= state.clock.now_s)
    stacked = queue.stack[jnp.where(again, queue.stacked - 1 - j, sizes.rows + 1)]
    return jnp.where(again, stacked, (place + 1) * arrived), again | arrived


def _cut(end, budget, page: int):
    """`chunk_len` from position 0 without lookahead, on arrays: where a prefill of `end` tokens has to stop."""
    return jnp.where(end <= budget, end, jnp.maximum(jnp.minimum(budget, end) // page * page, 0))


def _choose(sizes: Sizes, policy: Policy, requests: Requests, state: SimState, active) -> Starting:
    """`_select` of the planner: in order, as budgets allow. Everybody before a prompt of the batch is whole, so what is left for it is a running sum."""
    table, ledger, page = state.requests, state.ledger, sizes.page_size
    filling = is_filling(table, ledger.kv_committed_len)
    alive = table.serial > 0
    needed = pages_short(ledger, active, reserve_len=policy.reserve_len)
    tokens, pages = policy.max_prefill_tokens, ledger.num_free - needed
    to_go = jnp.sum(jnp.minimum(table.max_new_tokens - table.output_len, MOST_NEW_TOKENS) * alive)
    to_fill = jnp.sum((table.fill_len - ledger.kv_committed_len) * filling)
    expected = jnp.astype(to_go, jnp.float32) * state.new_token_ratio

    # The prompt under way.
    under_way = jnp.any(filling)
    start = jnp.sum(ledger.kv_committed_len * filling)
    whole = jnp.sum(table.fill_len * filling)
    end = start + jnp.where(whole - start <= tokens, whole - start, (start + tokens) // page * page - start)
    new = ceil_div(end, page) - ceil_div(start, page)
    may_start = needed <= ledger.num_free
    goes_on = under_way & may_start & (new <= pages)
    tokens, pages, to_fill = tokens - (end - start), pages - new, to_fill - (end - start)
    may_start &= ~under_way | (goes_on & (end == whole))

    # Those who wait.
    serial, there = _queue(sizes, requests, state)
    prompt = requests.prompt_len[jnp.maximum(serial - 1, 0)]
    has = state.per_request.settled_len[serial]
    to_emit = requests.max_new_tokens[jnp.maximum(serial - 1, 0)] - has
    fill = prompt + has
    ends = _cut(fill, tokens - _before(fill), page)
    most_rows = jnp.minimum(policy.max_running, MOST_PREFILL_ROWS) - under_way
    most_rows = jnp.minimum(most_rows, policy.max_running - jnp.sum(alive))
    j = jnp.arange(sizes.prefill_rows, dtype=jnp.int32)
    free = pages - _before(ceil_div(fill, page))
    wants = fill + page
    wants += jnp.maximum(jnp.minimum(to_emit, MOST_NEW_TOKENS), policy.reserve_len * (to_emit > 1))
    promised = to_fill + _before(wants - fill)
    anybody = jnp.any(alive) | (j > 0)
    too_many = anybody & (expected > jnp.astype(free * page - wants - promised, jnp.float32))
    fits = there & (j < most_rows) & (ends > 0) & (ceil_div(ends, page) <= free) & ~too_many
    whole_before = (j == 0) | (jnp.roll(ends, 1) == jnp.roll(fill, 1))
    taken = may_start & (jnp.cumulative_sum(fits & whole_before, dtype=jnp.int32) == j + 1)
    serial *= taken

    # The k-th free row is that of the k-th prompt.
    index = jnp.arange(sizes.rows + 1, dtype=jnp.int32)
    empty = (table.serial == 0) & (index > 0)
    rank = jnp.cumulative_sum(empty, dtype=jnp.int32) * empty
    rows = jnp.sum(index * (rank == j[:, None] + 1), axis=1, dtype=jnp.int32)
    return Starting(
        rows=jnp.concatenate([jnp.sum(index * filling * goes_on, dtype=jnp.int32)[None], rows * taken]),
        serial=jnp.concatenate([jnp.zeros(1, jnp.int32), serial]),
        end=jnp.concatenate([(end * goes_on)[None], ends * taken]),
        next=jnp.astype(~goes_on, jnp.int32),
        count=1 + jnp.sum(taken, dtype=jnp.int32),
    )


def choose(sizes: Sizes, policy: Policy, requests: Requests, state: SimState) -> tuple[SimState, Any, Starting]:
    """Who could run, and whose prompt goes first.

    Args:
        sizes: shapes.
        policy, requests: of one configuration.
        state: of the same.

    Returns:
        The state; bool[R] running rows that a step could advance; the prompts of the launch.

    Source: `jspec.scheduler.plan_prefill`, `admit`.
    """
    alive = jnp.any(state.requests.serial > 0)
    state = replace(state, new_token_ratio=jnp.where(alive, state.new_token_ratio, policy.new_token_ratio))
    active = launchable(state.requests, state.ledger, (state.flight.launched,))
    return state, active, _choose(sizes, policy, requests, state, active)


def start_some(sizes: Sizes, requests: Requests, state: SimState, starting: Starting) -> tuple[SimState, Starting]:
    """Pages for the first few of the prompts, and a row for those that are new, with what they had if they were retracted."""
    entries = starting.next + jnp.arange(sizes.at_once, dtype=jnp.int32)
    there = entries < starting.count
    entries *= there
    rows, serial, end = (values[entries] * there for values in starting[:3])
    ledger, _ = prepare_extend(state.ledger, rows, end)
    new = serial > 0
    new_rows, entry = rows * new, jnp.maximum(serial - 1, 0)
    old, facts, kept = state.requests, state.facts, state.per_request
    has = kept.settled_len[serial] * new
    prompt, most = requests.prompt_len[entry] * new, requests.max_new_tokens[entry] * new
    count = jnp.sum(new, dtype=jnp.int32)
    again = jnp.minimum(count, state.queue.stacked)
    state = replace(
        state,
        ledger=ledger,
        requests=replace(
            old,
            serial=set_at(old.serial, new_rows, serial),
            prompt_len=set_at(old.prompt_len, new_rows, prompt),
            output_len=set_at(old.output_len, new_rows, has),
            fill_len=set_at(old.fill_len, new_rows, prompt + has),
            max_new_tokens=set_at(old.max_new_tokens, new_rows, most),
        ),
        facts=RowFacts(
            stop_len=set_at(facts.stop_len, new_rows, jnp.minimum(requests.stop_len[entry], most)),
            verifies=set_at(facts.verifies, new_rows, kept.verifies[serial] * new),
            first_token_s=set_at(facts.first_token_s, new_rows, kept.first_token_s[serial]),
        ),
        queue=replace(state.queue, stacked=state.queue.stacked - again, fresh=state.queue.fresh + (count - again)),
    )
    return state, starting._replace(next=jnp.where(starting.remain, starting.next + entries.shape[0], starting.next))


def planned(policy: Policy, before: SimState, state: SimState, active) -> Plan:
    """The launch: the prompts that were started, if any; else a step of the running rows, if their pages suffice.

    Args:
        policy: of one configuration.
        before: its state before `start_some`; `state`: after it.
        active: bool[R], see `choose`.
    """
    was, now = before.ledger.kv_committed_len, state.ledger.kv_committed_len
    in_prefill = now != was
    is_prefill = jnp.any(in_prefill)
    first, last = jnp.astype(was, jnp.float32), jnp.astype(now, jnp.float32)
    short = pages_short(state.ledger, active, reserve_len=policy.reserve_len) > state.ledger.num_free
    return Plan(
        active=active,
        in_prefill=in_prefill,
        is_prefill=is_prefill,
        prefill_tokens=jnp.sum(now - was, dtype=jnp.int32),
        prefill_pairs=jnp.sum((last - first) * (last + first + 1)) / 2,
        lacking=short & ~is_prefill,
        left=jnp.zeros((), bool),
    )


def _last_to_keep(state: SimState, rows):
    """`last_to_keep` on a mask: fewest outputs, longest prompt, newest. 0 where nobody is."""
    table = state.requests
    for key in (-table.output_len, table.prompt_len, table.serial):
        rows &= key == jnp.max(jnp.where(rows, key, -(1 << 30)))
    return jnp.sum(jnp.arange(rows.shape[0], dtype=jnp.int32) * rows, dtype=jnp.int32)


def put_back(state: SimState, rows) -> SimState:
    """What is kept of the requests in these rows, `i32[F]`; 0 is padding."""
    serial = state.requests.serial[rows]
    kept, facts = state.per_request, state.facts
    kept = replace(
        kept,
        settled_len=set_at(kept.settled_len, serial, state.requests.output_len[rows]),
        verifies=set_at(kept.verifies, serial, facts.verifies[rows]),
        first_token_s=set_at(kept.first_token_s, serial, facts.first_token_s[rows]),
    )
    return replace(state, per_request=kept)


def retract_one(sizes: Sizes, policy: Policy, state: SimState, plan: Plan) -> tuple[SimState, Plan]:
    """One turn of `make_room`, where the plan lacks pages; elsewhere it changes nothing."""
    table = state.requests
    rows = plan.active | is_filling(table, state.ledger.kv_committed_len)
    row = _last_to_keep(state, rows)
    # The last one waits for those that are about to end. That it could be alone and lack pages is refused beforehand.
    gone = row * (plan.lacking & (jnp.sum(rows) > 1))
    serial = table.serial[gone]
    state = put_back(state, gone[None])
    queue, kept, counts = state.queue, state.per_request, state.counts
    place = jnp.where(gone > 0, queue.stacked, sizes.rows + 1)
    one = jnp.astype(gone > 0, jnp.int32)
    requests, ledger = release(table, state.ledger, gone[None])
    active = plan.active & ~(plan.lacking & (jnp.arange(sizes.rows + 1) == row))
    lacking = plan.lacking & (pages_short(ledger, active, reserve_len=policy.reserve_len) > ledger.num_free)
    left = plan.left | (gone > 0)
    state = replace(
        state,
        requests=requests,
        ledger=ledger,
        queue=replace(queue, stack=set_at(queue.stack, place, serial), stacked=queue.stacked + one),
        per_request=replace(kept, retractions=add_at(kept.retractions, serial, one)),
        counts=replace(counts, retractions=counts.retractions + one),
        new_token_ratio=jnp.where(
            left & ~lacking & plan.lacking, _ratio_after(policy, requests, active), state.new_token_ratio
        ),
    )
    return state, plan._replace(active=active, lacking=lacking, left=left)


def _ratio_after(policy: Policy, table, active):
    """`ratio_after_retraction`: as far as the survivors are, and a little more."""
    wanted = jnp.sum((table.output_len + RETRACT_DECODE_STEPS) * active)
    most = jnp.sum(table.max_new_tokens * active) + 1
    return jnp.maximum(policy.min_new_token_ratio, jnp.minimum(1.0, jnp.float32(wanted) / jnp.float32(most)))
