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
    """Row 1 of four decodes, behind a page that is cached; row 2 has its prefill under way, row 3 a part of it; row 4 is free, one request waits; two
    launches are unsettled. Cached beside: two pages that a request left behind."""
    run = Run(max_running=4, page_size=4, num_pages=30, context_len=64, max_prefill_tokens=13, max_prefill_rows=2)
    run.submit(7, range(50, 57), 3)
    run.step([[58]])
    run.step([[59, 60]])
    run.settle()
    run.submit(1, range(6), 9)
    run.step([[0]])
    run.step([[0] * 3])
    run.settle()
    run.launch(run.plan(), [[0]])
    run.submit(2, 5, 9)
    run.submit(3, 20, 2)
    run.launch(run.plan(), [[0], []])
    run.submit(4, 40, 20)
    assert len(run.state.launched) == 2 and run.state.forward_iter == 6
    return run


def edit(state, part, **changes):
    """Writes `changes[field] = {index: value}` into a copy of `state.requests`, `state.ledger` or `state.prefix_cache`."""
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


def cache(**changes):
    """Each `changes[field]`: its value, to the new one."""

    def broken(state):
        new = {name: change(getattr(state.prefix_cache, name)) for name, change in changes.items()}
        return dataclasses.replace(state, prefix_cache=dataclasses.replace(state.prefix_cache, **new))

    return broken


def lose_a_page(state):
    return dataclasses.replace(state, ledger=dataclasses.replace(state.ledger, num_free=state.ledger.num_free - 1))


def forget_a_cached_page(state):
    """It is nobody's, and not free."""
    return edit(state, "prefix_cache", depth={LEFT[1]: 0})


def give_a_page_twice(state):
    return edit(state, "ledger", page_table={(2, 0): state.ledger.page_table[1, 1]})


def give_a_cached_page(state):
    return edit(state, "ledger", page_table={(2, 0): state.ledger.page_table[1, 0]})


def a_row_twice_in_a_launch(launches):
    """Of four results for row 1, three are one too many at depth 1."""
    first, last = launches
    rows, epochs, emits = np.array([1, 1, 1], np.int32), np.ones(3, np.int32), np.ones(3, bool)
    return (first, dataclasses.replace(last, rows=rows, epochs=epochs, emits=emits))


def admitted(change):
    return lambda state: dataclasses.replace(state, admitted=change(state.admitted))


def waiting(request):
    return lambda state: dataclasses.replace(state, waiting=state.waiting.append(request))


SHARED, LEFT = 4, (1, 2)
"""The cached page that row 1 begins with; those that a request left, at depths 1 and 2."""

# Row 1: prompt 6, protected 4, C = 9, N = 10, A = 20, 5 pages. Row 2: prompt 5, C = A = 5, its prefill under way. Row 3: prompt 20, C = A = 8. Row 4 is free.
BROKEN = {
    "protected <= committed <= allocated": [
        ledger(kv_committed_len={1: 21}),
        ledger(cache_protected_len={1: 12}),
        ledger(cache_protected_len={1: -4}),
    ],
    "cache_protected_len is page aligned": [ledger(cache_protected_len={1: 3})],
    "allocation fits the row's page table": [ledger(kv_allocated_len={1: 19 * 4})],
    "a running request has KV": [ledger(kv_committed_len={2: 0})],
    "a free row holds no KV": [ledger(kv_allocated_len={4: 4})],
    "seqlen == kv_committed_len + 1 (the pending bonus token)": [
        ledger(kv_committed_len={1: 8}),
        ledger(kv_committed_len={1: 10}),
        ledger(kv_committed_len={1: 5}),  # less than its prompt
        requests(output_len={1: 3}),
        requests(output_len={3: 1}),  # a token in the middle of the prompt
    ],
    "a request without a new token has what its prefill covers": [
        requests(fill_len={2: 6}),
        requests(fill_len={3: 21}),
        requests(prompt_len={2: 4}),
    ],
    "one prompt at most goes in chunks": [ledger(kv_committed_len={2: 4})],
    "a chunk ends at a page's end": [
        ledger(kv_allocated_len={3: 12}),
        ledger(kv_committed_len={3: 4}),
        ledger(kv_committed_len={3: 7}, kv_allocated_len={3: 7}),
    ],
    "a reserved length is page aligned": [ledger(kv_allocated_len={1: 15})],
    "a running request has tokens to go": [requests(max_new_tokens={1: 4})],
    "a request fits the context": [requests(max_new_tokens={1: 59})],
    "the page table ends where the allocation ends": [
        ledger(page_table={(1, 3): 0}),
        ledger(page_table={(1, 5): 9}),
        ledger(kv_allocated_len={1: 24}),
    ],
    "free + cached + held == total": [lose_a_page, forget_a_cached_page, ledger(cache_protected_len={1: 8})],
    "every page is in one place": [
        give_a_page_twice,
        give_a_cached_page,
        ledger(free_pages={0: 0}),
        ledger(free_pages={0: 29}),
        ledger(free_pages={0: LEFT[1]}),
        ledger(page_table={(1, 1): 31}),
    ],
    "the protected part of a row is a cached prefix": [
        lambda state: edit(state, "prefix_cache", depth={SHARED: 2}),
        ledger(page_table={(1, 0): LEFT[1]}),
    ],
    "a page is locked once a row that reads it": [
        ledger(page_locks={SHARED: 0}),
        ledger(page_locks={SHARED: 2}),
        ledger(page_locks={LEFT[1]: 1}),
        ledger(page_locks={0: 1}),
        ledger(page_table={(1, 0): LEFT[0]}),
    ],
    "the cache's two indexes agree": [
        cache(pages=lambda pages: pages.remove(next(iter(pages)))),
        cache(keys=lambda keys: keys.remove(SHARED)),
        cache(keys=lambda keys: keys.set(9, b"free")),
    ],
    "a key names its page": [
        cache(pages=lambda pages: pages.update({key: SHARED for key in pages})),
        cache(keys=lambda keys: keys.set(SHARED, b"other")),
        cache(keys=lambda keys: keys.remove(SHARED).set(9, keys[SHARED])),
    ],
    "row 0 is nobody's": [requests(epoch={0: 1}), requests(serial={0: -1})],
    "a request holds one row": [requests(serial={2: 1})],
    "who holds a row is on record": [
        admitted(lambda admitted: admitted.remove(2)),
        admitted(lambda admitted: admitted.set(9, Waiting(9, 5, 9, ()))),
    ],
    "the queue goes by priority": [waiting(Waiting(9, 5, 9, (), priority=1))],
    "a request waits or runs, not both": [waiting(Waiting(1, 6, 9, ()))],
    "at most depth + 1 launches are unsettled": [launched(lambda items: (*items, items[-1], items[-1]))],
    "no launch of the future": [requests(last_launch={1: 7})],
    "at most depth + 1 launches of a row are unsettled": [launched(a_row_twice_in_a_launch)],
    "a request without output has its prefill under way": [
        launched(lambda items: items[:1]),
        launched(lambda items: (items[0], dataclasses.replace(items[1], emits=np.zeros(2, bool)))),
    ],
}
"""By the name of an invariant: edits that break it."""

CASES = [(name, i) for name, edits in BROKEN.items() for i in range(len(edits))]
FRONTIER = {
    "the frontier leads by what is unsettled": [{1: 8}, {1: 14}, {2: 4}, {3: 7}, {3: 12}],
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
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(invariants))) if isinstance(node, ast.Call)]
    of = {
        kind: [c.args for c in calls if getattr(c.func, "id", "") == kind] for kind in ("_require", "_require_of_rows")
    }
    facts = [*of["_require"], *(fact.elts for (table,) in of["_require_of_rows"] for fact in table.elts)]
    names = [name.value for _, name, *_ in facts if isinstance(name, ast.Constant)]
    assert len(names) == len(set(names)) == 30
    assert set(names) == {*BROKEN, *FRONTIER}


def test_a_sound_state_passes():
    run = sound()
    check(run.state, limits=run.limits, frontier=run.device.frontier, max_accept=4)
    check(run.state, limits=run.limits)
    assert run.lens(1) == (9, 20, 10) and run.lens(2) == (5, 5, 5) and run.lens(3) == (8, 8, 20)
    assert run.state.ledger.cache_protected_len.tolist() == [0, 4, 0, 0, 0] and not run.lens(4)[1]
    depths = {page: int(depth) for page, depth in enumerate(run.state.prefix_cache.depth) if depth}
    assert depths == {LEFT[0]: 1, LEFT[1]: 2, SHARED: 1} and run.state.ledger.page_table[1, 0] == SHARED
    assert [request.serial for request in run.state.waiting] == [4]


def test_the_message_names_rows_and_values():
    run = sound()
    state = BROKEN["a reserved length is page aligned"][0](run.state)
    with pytest.raises(
        InvariantError, match=re.escape("fails at index [1]: protected=[4], committed=[9], allocated=[15]")
    ):
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


def test_unsettled_launches_in_the_middle_of_a_prompt_do_not_count():
    """They bring no token."""
    run = sound()
    assert [item.rows.tolist() for item in run.state.launched] == [[1], [2, 3]]
    assert unsettled_launches(run.state).tolist() == [0, 1, 1, 0, 0]


def test_check_changes_nothing():
    run = sound()
    before = jax.tree.map(np.array, run.state)
    check(run.state, limits=run.limits, frontier=run.device.frontier)
    jax.tree.map(np.testing.assert_array_equal, before, run.state)


def test_limits():
    limits = Limits(context_len=64, alloc_len=4, depth=2, max_prefill_tokens=1, max_prefill_rows=1)
    assert limits.reserve_len == 12
