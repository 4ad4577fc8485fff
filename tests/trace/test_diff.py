"""What differs between two states: all of it, where it is, in the same words each time."""

import dataclasses

import jax
import numpy as np
import pytest
from pyrsistent import PDeque, PMap, pdeque, pmap

from jspec.state.requests import Waiting
from jspec.trace.diff import MOST_ENTRIES, state_diff
from jspec.trace.replay import replay

from .kit import everything_of, two_requests


def states():
    """Of a run, each with what it holds: rows, launches, a queue, a cache."""
    return [moment.after[0] for moment in replay(everything_of("eagle").recording, checked=False)]


def busiest():
    return max(
        states(), key=lambda state: (len(state.waiting) > 0, len(state.prefix_cache.pages) > 0, len(state.launched))
    )


def test_a_state_does_not_differ_from_itself_or_its_copy():
    for state in states()[::20]:
        copy = jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, state)
        assert state_diff(state, state) == [] and state_diff(state, copy) == []


def test_what_a_decode_changes_in_full():
    """Iteration 5 of a run worked out by hand in test_timeline, and the settle that follows it."""
    moments = list(replay(two_requests().recording))
    plan = [moment for moment in moments if moment.planned][4]
    settle = [moment for moment in moments if moment.settles][3]
    found = state_diff(plan.before[0], plan.after[0], name="s")
    assert found[:2] == ["s.requests.last_launch[1]: 4 -> 5", "s.requests.last_launch[2]: 4 -> 5"]
    assert found[2].startswith("s.launched[1:]: () -> (Launched(forward_iter=np.int32(5), rows=array([1, 2]")
    assert found[3] == "s.forward_iter: 4 -> 5"
    assert len(found) == 5 and found[4].startswith("s.new_token_ratio: 0.00697") and " -> 0.00696" in found[4]
    assert state_diff(settle.before[0], settle.after[0], name="s")[:4] == [
        "s.requests.output_len[1]: 6 -> 11",
        "s.requests.output_len[2]: 1 -> 2",
        "s.ledger.kv_committed_len[1]: 8 -> 13",
        "s.ledger.kv_committed_len[2]: 1 -> 2",
    ]


def leaves_of(value, path: str = "state"):
    """Path and value of every part that may differ by itself."""
    if dataclasses.is_dataclass(value) and not isinstance(value, Waiting):
        for field in dataclasses.fields(value):
            yield from leaves_of(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, tuple) and not isinstance(value, (PMap, PDeque)):
        for i, item in enumerate(value):
            yield from leaves_of(item, f"{path}[{i}]")
    else:
        yield path, value


def put(value, path: list[str], new):
    """The value with another part, at a path like `["ledger", "num_free"]` or `["launched", "[0]", "rows"]`."""
    if not path:
        return new
    step, *rest = path
    if step.startswith("["):
        i = int(step[1:-1])
        return (*value[:i], put(value[i], rest, new), *value[i + 1 :])
    return dataclasses.replace(value, **{step: put(getattr(value, step), rest, new)})


def steps(path: str) -> list[str]:
    return path.removeprefix("state").replace("[", ".[").strip(".").split(".")


def test_random_edits_are_all_listed():
    """Some entries of some leaves of a state: a line for each, with the value before and after; nothing else."""
    rng = np.random.default_rng(0)
    state = busiest()
    leaves = list(leaves_of(state))
    arrays = [(path, leaf) for path, leaf in leaves if isinstance(leaf, np.ndarray) and leaf.size]
    assert len(arrays) > 20 and any("launched[0]" in path for path, _ in arrays)
    for _ in range(50):
        edited, expected = state, []
        for which in sorted(rng.choice(len(arrays), 4, replace=False)):
            path, leaf = arrays[which]
            new = leaf.copy()
            count = int(rng.integers(1, min(leaf.size, MOST_ENTRIES) + 1))
            for flat in sorted(rng.choice(leaf.size, count, replace=False)):
                at = np.unravel_index(flat, leaf.shape)
                new[at] = not leaf[at] if leaf.dtype == bool else leaf[at] + 1 + rng.integers(5)
                expected.append(f"{path}[{', '.join(map(str, at))}]: {leaf[at]} -> {new[at]}")
            edited = put(edited, steps(path), new)
        assert state_diff(state, edited) == expected
        assert state_diff(edited, state) == [f"{p}: {b} -> {a}" for p, a, b in map(halves, expected)]


def halves(line: str) -> tuple[str, str, str]:
    path, _, change = line.partition(": ")
    before, _, after = change.partition(" -> ")
    return path, before, after


def test_scalars_queues_maps_and_launches():
    state = busiest()
    assert state.waiting and state.launched and state.prefix_cache.pages
    changes = {
        "forward_iter": np.int32(int(state.forward_iter) + 1),
        "new_token_ratio": np.float32(0.5),
        "waiting": pdeque([*state.waiting, Waiting(99, 3, 4, ())]),
        "admitted": state.admitted.set(77, Waiting(77, 1, 2, (3,))),
        "launched": state.launched[:-1],
    }
    for field, new in changes.items():
        found = state_diff(state, dataclasses.replace(state, **{field: new}))
        assert len(found) == 1 and found[0].startswith(f"state.{field}"), found
        assert all(len(line) < 300 for line in found)
    key, page = next(iter(state.prefix_cache.pages.items()))
    cache = dataclasses.replace(state.prefix_cache, pages=state.prefix_cache.pages.remove(key))
    assert state_diff(state, dataclasses.replace(state, prefix_cache=cache)) == [
        f"state.prefix_cache.pages[{key.hex()}]: {page} -> nothing"
    ]
    assert state_diff(dataclasses.replace(state, prefix_cache=cache), state) == [
        f"state.prefix_cache.pages[{key.hex()}]: nothing -> {page}"
    ]


def test_every_leaf_counts():
    """A change to any one leaf of a state is seen."""
    state = busiest()
    for path, leaf in leaves_of(state):
        if isinstance(leaf, np.ndarray):
            new = (
                np.ones_like(leaf)
                if leaf.dtype == bool and not leaf.all()
                else ~leaf
                if leaf.dtype == bool
                else leaf + 1
            )
        elif isinstance(leaf, PMap):
            new = leaf.set("x", 1)
        elif isinstance(leaf, PDeque):
            new = leaf.append(1)
        else:
            new = None
        found = state_diff(state, put(state, steps(path), new))
        assert bool(found) == (not isinstance(leaf, np.ndarray) or leaf.size > 0), path
        assert all(line.startswith(path) for line in found)


def test_long_arrays_are_cut_and_the_rest_counted():
    one, other = np.zeros(30, np.int32), np.arange(30, dtype=np.int32)
    found = state_diff(one, other, name="a")
    assert found == [
        *(f"a[{i}]: 0 -> {i}" for i in range(1, MOST_ENTRIES + 1)),
        f"a: and {29 - MOST_ENTRIES} more entries",
    ]
    assert state_diff(one, np.zeros(31, np.int32), name="a")[0].startswith("a: array([0, 0")
    assert len(state_diff(one, np.zeros(31, np.int32), name="a")[0]) < 250


@pytest.mark.parametrize(
    ("one", "other", "lines"),
    [
        (3, 3, []),
        (3, 4, ["v: 3 -> 4"]),
        (None, np.zeros(2), ["v: None -> array([0., 0.])"]),
        (np.float32("nan"), np.float32("nan"), ["v: nan -> nan"]),
        ((1, 2), (1, 2, 3), ["v[2:]: () -> (3,)"]),
        ((1, 2, 3), (1,), ["v[1:]: (2, 3) -> ()"]),
        (pmap({"b": 1, "a": 2}), pmap({"a": 3}), ["v['a']: 2 -> 3", "v['b']: 1 -> nothing"]),
        (np.int32(1), np.int32(2), ["v: 1 -> 2"]),
        (True, False, ["v: True -> False"]),
        (np.zeros(2, np.int32), np.zeros(2), ["v.dtype: int32 -> float64"]),
    ],
)
def test_values_of_any_kind(one, other, lines):
    assert state_diff(one, other, name="v") == lines


def test_the_same_words_each_time():
    one, other = states()[10], states()[60]
    found = state_diff(one, other)
    assert len(found) > 10 and all(state_diff(one, other) == found for _ in range(3))
    assert len({line.partition(": ")[0] for line in found}) == len(found)
