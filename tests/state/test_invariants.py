"""Every invariant is caught when it does not hold. The broken states are made here and only here, by editing fields of a sound one."""

import ast
import dataclasses
import inspect
import re

import jax
import numpy as np
import pytest
from oracles import Run

from jspec.state import Limits, Waiting, invariants
from jspec.state.invariants import InvariantError, check, unsettled_launches


def sound():
    """Row 1 of four decodes, row 2 has its prefill under way, row 3 is free, one request waits; two launches are unsettled."""
    run = Run(max_running=3, page_size=4, num_pages=30, context_len=64, max_prefill_rows=1)
    run.submit(1, 6, 9)
    run.step([[0]])
    run.step([[0] * 3])
    run.settle()
    run.launch(run.plan(), [[0]])
    run.submit(2, 5, 9)
    run.launch(run.plan(), [[0]])
    run.submit(3, 40, 20)
    assert len(run.state.launched) == 2 and run.state.forward_iter == 4
    return run


def edit(state, part, **changes):
    """Writes `changes[field] = {index: value}` into a copy of `state.requests` or `state.ledger`."""
    table = getattr(state, part)
    arrays = {}
    for name, entries in changes.items():
        array = np.array(getattr(table, name))
        for index, value in entries.items():
            array[index] = value
        arrays[name] = array
    return dataclasses.replace(state, **{part: dataclasses.replace(table, **arrays)})


def ledger(**changes):
    return lambda state: edit(state, "ledger", **changes)


def requests(**changes):
    return lambda state: edit(state, "requests", **changes)


def launched(change):
    return lambda state: dataclasses.replace(state, launched=change(state.launched))


def lose_a_page(state):
    return dataclasses.replace(state, ledger=dataclasses.replace(state.ledger, num_free=state.ledger.num_free - 1))


def give_a_page_twice(state):
    return edit(state, "ledger", page_table={(2, 0): state.ledger.page_table[1, 0]})


def a_row_twice_in_a_launch(launches):
    """Of four results for row 1, three are one too many at depth 1."""
    first, last = launches
    twice = dataclasses.replace(last, rows=np.array([1, 1, 1], np.int32), epochs=np.zeros(3, np.int32))
    return (first, twice)


# Row 1: prompt 6, C = 9, N = 10, A = 20, 5 pages. Row 2: prompt 5, C = A = 5, its prefill under way. Row 3 is free.
BROKEN = {
    "protected <= committed <= allocated": [
        ledger(kv_committed_len={1: 21}),
        ledger(cache_protected_len={1: 12}),
        ledger(cache_protected_len={1: -4}),
    ],
    "cache_protected_len is page aligned": [ledger(cache_protected_len={1: 3})],
    "allocation fits the row's page table": [ledger(kv_allocated_len={1: 19 * 4})],
    "a running request has KV": [ledger(kv_committed_len={2: 0})],
    "a free row holds no KV": [ledger(kv_allocated_len={3: 4})],
    "seqlen == kv_committed_len + 1 (the pending bonus token)": [
        ledger(kv_committed_len={1: 8}),
        ledger(kv_committed_len={1: 10}),
        requests(output_len={1: 3}),
    ],
    "before its first token a request has its prompt committed": [ledger(kv_committed_len={2: 4})],
    "a reserved length is page aligned": [ledger(kv_allocated_len={1: 15})],
    "a running request has tokens to go": [requests(max_new_tokens={1: 4})],
    "a request fits the context": [requests(max_new_tokens={1: 59})],
    "the page table ends where the allocation ends": [
        ledger(page_table={(1, 3): 0}),
        ledger(page_table={(1, 5): 9}),
        ledger(kv_allocated_len={1: 24}),
    ],
    "free + held == total": [lose_a_page],
    "every page is in one place": [
        give_a_page_twice,
        ledger(free_pages={0: 0}),
        ledger(free_pages={0: 29}),
        ledger(page_table={(1, 0): 31}),
    ],
    "row 0 is nobody's": [requests(epoch={0: 1}), requests(serial={0: -1})],
    "a request holds one row": [requests(serial={2: 1})],
    "a request waits or runs, not both": [
        lambda state: dataclasses.replace(state, waiting=state.waiting.append(Waiting(1, 6, 9, ())))
    ],
    "at most depth + 1 launches are unsettled": [launched(lambda items: (*items, items[-1], items[-1]))],
    "no launch of the future": [requests(last_launch={1: 5})],
    "at most depth + 1 launches of a row are unsettled": [launched(a_row_twice_in_a_launch)],
    "a request without output has its prefill under way": [launched(lambda items: items[:1])],
}
"""By the name of an invariant: edits that break it."""

CASES = [(name, i) for name, edits in BROKEN.items() for i in range(len(edits))]
FRONTIER = {
    "the frontier leads by what is unsettled": [{1: 8}, {1: 14}, {2: 4}],
    "the frontier stays in the allocation": [{2: 6}],
}
"""By the name of an invariant: frontiers that break it."""


@pytest.mark.parametrize(("name", "index"), CASES)
def test_a_broken_state_is_caught(name, index):
    run = sound()
    state = BROKEN[name][index](run.state)
    with pytest.raises(InvariantError, match=f"^{re.escape(name)} fails at index"):
        check(state, limits=run.limits)


@pytest.mark.parametrize("name", FRONTIER)
def test_a_frontier_that_ran_away_is_caught(name):
    run = sound()
    for entries in FRONTIER[name]:
        frontier = run.device.frontier.copy()
        for row, value in entries.items():
            frontier[row] = value
        with pytest.raises(InvariantError, match=f"^{re.escape(name)} fails at index"):
            check(run.state, limits=run.limits, frontier=frontier, max_accept=4)


def test_every_invariant_has_a_case():
    """The names in the source are the names tried here: a new `_require` needs a state that breaks it."""
    calls = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(invariants)))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "_require"
    ]
    names = [call.args[1].value for call in calls]
    assert len(names) == len(set(names)) == 22
    assert set(names) == {*BROKEN, *FRONTIER}


def test_a_sound_state_passes():
    run = sound()
    check(run.state, limits=run.limits, frontier=run.device.frontier, max_accept=4)
    check(run.state, limits=run.limits)
    assert run.lens(1) == (9, 20, 10) and run.lens(2) == (5, 5, 5)


def test_the_message_names_rows_and_values():
    run = sound()
    state = BROKEN["a reserved length is page aligned"][0](run.state)
    with pytest.raises(InvariantError, match=re.escape("fails at index [1]: allocated=[15]")):
        check(state, limits=run.limits)


def test_a_width_bounds_the_lead():
    """Without `max_accept` a launch may lead by all that it may write."""
    run = sound()
    frontier = run.device.frontier.copy()
    frontier[1] = 13
    check(run.state, limits=run.limits, frontier=frontier)
    with pytest.raises(InvariantError, match="the frontier leads"):
        check(run.state, limits=run.limits, frontier=frontier, max_accept=3)


def test_unsettled_launches_of_former_owners_do_not_count():
    run = Run(max_running=1, depth=1)
    run.submit(1, 5, 9, stops=(7,))
    run.submit(2, 5, 9)
    run.step([[7]])
    run.step([[0]])
    assert len(run.state.launched) == 1 and unsettled_launches(run.state).tolist() == [0, 0]
    run.launch(run.plan(), [[0]])
    assert len(run.state.launched) == 2 and unsettled_launches(run.state).tolist() == [0, 1]


def test_check_changes_nothing():
    run = sound()
    before = jax.tree.map(np.array, run.state)
    check(run.state, limits=run.limits, frontier=run.device.frontier)
    jax.tree.map(np.testing.assert_array_equal, before, run.state)


def test_limits():
    limits = Limits(context_len=64, alloc_len=4, depth=2, max_prefill_tokens=1, max_prefill_rows=1)
    assert limits.reserve_len == 12
