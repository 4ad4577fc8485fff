"""Every state of small configurations: nothing is found, and they meet what they are meant to."""

import dataclasses
from collections import Counter

import pytest
from explore.kit import SMALL, config
from oracles import Run

from jspec.explore import explore


@pytest.fixture(scope="module")
def results():
    return {name: explore(small) for name, small in SMALL.items()}


@pytest.mark.parametrize("name", SMALL)
def test_nothing_is_found(results, name):
    result = results[name]
    assert result.found is None, result.found
    assert result.complete and result.ends > 0
    assert result.scheduler_states <= result.states <= result.transitions + 1


def test_the_searches_meet_what_they_are_meant_to(results):
    met = Counter()
    for result in results.values():
        met.update(result.met)
    wanted = {
        "retracted",
        "preempted",
        "evicted",
        "mixed",
        "in chunks",
        "began with cached pages",
        "late results",
        "reused in the same plan",
    }
    wanted |= {f"ended by {reason}" for reason in ("LENGTH", "STOP", "ABORT", "ERROR")}
    assert {name for name, count in met.items() if count} == wanted
    for name in ("mixed", "in chunks", "began with cached pages", "late results", "evicted"):
        assert met[name] > 5, met


def test_outcomes_and_frontiers_multiply_the_states_of_the_scheduler(results):
    """Without overlap nothing is unsettled between two iterations: a state is one of the scheduler. With it each outcome counts."""
    assert results["without overlap"].states == results["without overlap"].scheduler_states
    assert results["three launches ahead"].states > 5 * results["three launches ahead"].scheduler_states


def test_a_state_less_is_a_search_cut_short():
    small = SMALL["chunks"]
    whole = explore(small)
    cut = explore(small, max_states=whole.states // 2)
    assert not cut.complete and cut.found is None and whole.states // 2 <= cut.states < whole.states
    again = explore(small, max_states=whole.states + 1)
    assert again.complete and again.states == whole.states


def test_requests_that_are_alike_are_one():
    """Three that cannot be told apart lead to fewer states than three of which one emits a token less."""
    alike = explore(config("2+2", "2+2", "2+2", rows=1, pages=4, prefix_cache=False, stops="none", aborts=False))
    different = explore(config("2+2", "2+2", "2+1", rows=1, pages=4, prefix_cache=False, stops="none", aborts=False))
    assert alike.states < different.states / 2


def test_progress_is_told():
    seen = []
    result = explore(SMALL["one request"], progress=lambda *counts: seen.append(counts))
    assert seen[-1] == (result.states, result.scheduler_states) and seen == sorted(seen)


@pytest.mark.parametrize("field", ["max_states", "jobs"])
def test_nothing_to_do_is_refused(field):
    with pytest.raises(ValueError, match=f"{field}=0 must be at least 1"):
        explore(SMALL["one request"], **{field: 0})


# --- how far a reserve must reach ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_a_window_for_each_launch_suffices_and_one_less_does_not(depth):
    """TensorRT-LLM pull request 16280 reserved one window where a second launch was under way: at the third accept in a row it walked off its last block."""
    enough = config("1+12", rows=1, page_size=1, pages=30, depth=depth, verify_width=2, stops="none", aborts=False)
    result = explore(enough)
    assert result.complete and result.found is None
    less = explore(dataclasses.replace(enough, reserve_windows=depth))
    assert less.found is not None and less.found.violation.name == "a launch writes inside its allocation"
    more = explore(dataclasses.replace(enough, reserve_windows=depth + 2))
    assert more.complete and more.found is None


def test_whole_pages_may_hide_a_window_that_is_missing():
    """A reserve is rounded up to a page: nobody notices until an output comes to a page's end."""
    hidden, seen = (
        explore(config(request, rows=1, page_size=8, pages=9, reserve_windows=1, stops="none", aborts=False))
        for request in ("1+3", "1+9")
    )
    assert hidden.complete and hidden.found is None
    assert seen.found is not None


# --- more than a moment ----------------------------------------------------------------------------------------------------


def test_several_processes_find_the_same():
    small = SMALL["apart"]
    one, two = explore(small), explore(small, jobs=2)
    assert one._replace(seconds=0.0) == two._replace(seconds=0.0)


LARGE = {
    "two rows, two launches ahead": config("2+5", "3+5,shared=2", pages=14, verify_width=3, depth=2),
    "three rows": config("2+3", "2+3", "3+2", rows=3, pages=14, prefix_cache=False),
    "pages run short": config("2+6", "2+4", "1+3", rows=3, pages=8, aborts=False),
    "everything at once": config(
        "5+3,shared=4", "4+3,shared=4", "2+2,priority=1", pages=9, max_prefill_tokens=3, lookahead=1, failures=True
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_nothing_is_found_in_more(name):
    result = explore(LARGE[name])
    assert result.complete and result.found is None, result.found


def test_a_state_is_what_the_oracles_run_reaches():
    """The walk of `oracles.Run` over the same requests passes through states of the same lengths."""
    run = Run(page_size=2, num_pages=8, max_running=1, context_len=6, alloc_len=3, depth=1, mixed=True)
    run.submit(1, 2, 4)
    run.step([[0]])
    run.step([[0, 0, 0]])
    from jspec.explore.moves import Moves

    moves = Moves(config("2+4", rows=1, pages=8, verify_width=3, prefix_cache=False))
    node = moves.submit(moves.root(), 0)
    node, _ = moves.plan(node)
    node, _ = moves.plan(node)
    ((code, _),) = [
        item
        for item in moves.outcomes.combinations(node.launches[0])
        if not moves.outcomes[moves.outcomes.digit(item[0], 1)].token_stop
    ]
    node = moves.settle(node, code)
    ledger, requests = node.state.ledger, node.state.requests
    got = (ledger.kv_committed_len[1], ledger.kv_allocated_len[1], requests.prompt_len[1] + requests.output_len[1])
    assert got == run.lens()
