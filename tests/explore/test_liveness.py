"""Graphs in which something can go on for ever."""

import itertools

import pytest

from jspec.explore.liveness import NO_END, NO_PROGRESS, find_livelock

NOTHING = [[], [], [], []]


def test_a_chain_ends():
    assert find_livelock(NOTHING, [[1], [2], [3], []], [False, False, False, True]) is None


def test_an_end_that_only_an_arrival_reaches_is_an_end():
    assert find_livelock([[1], [], [], []], [[], [2], [3], []], [False, False, False, True]) is None


def test_a_node_that_cannot_end_is_found():
    """From 2 there is no way out."""
    assert find_livelock(NOTHING, [[1, 2], [3], [2], []], [False, False, False, True]) == ([2], NO_END)


def test_a_node_where_nothing_happens_is_found():
    assert find_livelock(NOTHING, [[1, 2], [3], [], []], [False, False, False, True]) == ([2], NO_END)


@pytest.mark.parametrize("back", [0, 1])
def test_a_cycle_with_a_way_out_is_found(back):
    """An end can be reached from everywhere, but a device may go round for ever."""
    way, name = find_livelock(NOTHING, [[1], [2], [back, 3], []], [False, False, False, True])
    assert name == NO_PROGRESS and way[0] == way[-1] and sorted(way[1:]) == list(range(back, 3))
    assert all(to == (back if node == 2 else node + 1) for node, to in itertools.pairwise(way))


def test_a_way_that_only_leads_to_a_cycle_is_not_on_it():
    way, _ = find_livelock(NOTHING, [[1], [2], [2], []], [False, False, True, True])
    assert way == [2, 2]


def test_users_may_go_round():
    """A cycle that needs an arrival is theirs."""
    assert find_livelock([[], [0], [], []], [[1], [3], [3], []], [False, False, False, True]) is None
