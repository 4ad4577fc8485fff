"""The search against one that shares nothing: each state runs the real transitions itself, for every outcome."""

import itertools

import pytest
from explore.kit import SMALL, config

from jspec.explore import explore
from jspec.explore.moves import Moves
from jspec.explore.outcomes import LOST
from jspec.explore.path import Replay, rows_that_count


def identity(run):
    """Outcomes of rows that have lost their request do not count."""
    codes = [code & rows_that_count(launch) for code, launch in zip(run.codes, run.node.launches, strict=True)]
    return run.moves.key(run.node), tuple(codes), tuple(run.frontiers)


def copy_of(run):
    new = Replay(run.moves)
    new.node, new.frontiers, new.codes = run.node, list(run.frontiers), list(run.codes)
    return new


def following(run):
    """Everything that one action leads to."""
    moves = run.moves
    for index in moves.arrivals(run.node):
        new = copy_of(run)
        new.submit(index)
        yield new
    if moves.config.aborts:
        for serial, _ in run.node.live:
            new = copy_of(run)
            new.abort(serial)
            yield new
    _, launch = moves.plan(run.node)
    rows = () if launch is None else launch.rows
    if not rows and not run.node.launches:
        new = copy_of(run)
        new.iterate(None)
        yield new
        return
    for digits in itertools.product(*(moves.outcomes.digits[kind] for _, kind in rows)):
        new = copy_of(run)
        new.iterate(lambda launch, digits=digits: digits)
        yield new


def naive(small):
    """Every state, by its identity."""
    root = Replay(Moves(small))
    seen = {identity(root)}
    todo = [root]
    while todo:
        for new in following(todo.pop()):
            assert new.frames[-1].violation is None
            if (name := identity(new)) not in seen:
                seen.add(name)
                todo.append(new)
    return seen


CONFIGS = {
    **{name: SMALL[name] for name in ("one request", "without overlap", "priorities")},
    "two launches ahead": config("1+3", rows=1, page_size=1, pages=10, depth=2),
    "a mixed batch": config("2+2", "1+3", pages=8, stops="none", aborts=False),
    "a shared prefix, in chunks": config("3+2,shared=3", "3+1,shared=3", max_prefill_tokens=2, pages=6, rows=1),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_search_sees_what_a_naive_one_sees(name):
    result = explore(CONFIGS[name])
    assert result.complete and result.found is None
    assert result.states == len(naive(CONFIGS[name]))


def test_frontiers_are_those_of_a_device_that_counts():
    """Where a row is lost while launches are under way with it, nothing of them is left."""
    lost = 0
    run = Replay(Moves(CONFIGS["two launches ahead"]))
    run.submit(0)
    for _ in range(6):
        run.iterate(lambda launch: [run.moves.outcomes.longest(kind) for _, kind in launch.rows])
        lost += any(kind == LOST for launch in run.node.launches for _, kind in launch)
        assert run.frontiers[1] == 0 or run.node.state.requests.serial[1] == 1
    assert lost and not run.node.live and run.frontiers == [0, 0]
