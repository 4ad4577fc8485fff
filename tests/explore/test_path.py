"""The way to a violation: as short as can be, the same when it is replayed, readable."""

import dataclasses

import numpy as np
import pytest
from explore.kit import SMALL, config
from oracles import freeze

from jspec.explore import Abort, Iteration, Path, Submit, explore, replay
from jspec.explore.moves import Moves
from jspec.explore.path import Replay
from jspec.explore.report import frame_lines
from jspec.scheduler import plan, retire, settle_oldest, submit
from jspec.state import FinishReason, GenerationBatchResult, Waiting, init_state

SHORT = config("1+12", rows=1, page_size=1, pages=30, verify_width=2, stops="none", aborts=False, reserve_windows=1)


def test_the_path_leads_to_the_violation():
    found = explore(SHORT).found
    frames = replay(found.path)
    assert frames[0].input == found.path.inputs[0]
    assert frames[-1].violation.name == found.violation.name == "a launch writes inside its allocation"
    assert all(frame.violation is None for frame in frames[:-1]) and len(frames) == len(found.path.inputs)


def test_no_path_is_shorter():
    """A request, its prefill, and two verifies: a single token of the first leaves the second less than a window."""
    first, *iterations = explore(SHORT).found.path.inputs
    assert first == Submit(0, 1, first.prompt, 12, 0, ()) and len(first.prompt) == 1
    assert [step.rows[0] for step in iterations] == [(1, 2), (1, 4), (1, 4)]
    assert iterations[1].result.accept_lens.tolist() == [1]


def test_a_path_holds_what_each_launch_brought():
    """Results as the scheduler takes them: run through the transitions by hand, they lead to the state that the replay tells of."""
    small = config("3+5,shared=3", pages=9, aborts=False, max_prefill_tokens=2)
    moves = Moves(small)
    run = Replay(moves)
    run.submit(0)
    for _ in range(5):
        run.iterate(lambda launch: [moves.outcomes.longest(kind) for _, kind in launch.rows])
    path = Path(small, tuple(frame.input for frame in run.frames))
    limits, state, results = small.limits, None, []
    state = freeze(init_state(limits=limits, max_running=small.rows, num_pages=small.pages, page_size=small.page_size))
    tokens = []
    for given in path.inputs:
        if isinstance(given, Submit):
            keys = moves.contents.prompt_keys(given.request)
            waiting = Waiting(
                given.serial, len(given.prompt), given.max_new_tokens, given.stop_token_ids, page_keys=keys
            )
            state = submit(state, waiting)
            continue
        assert isinstance(given, Iteration)
        state, batch, _ = plan(state, limits=limits)
        assert (batch is None) == (given.result is None)
        if batch is not None:
            assert [row for row, _ in given.rows] == batch.rows.tolist()
            results.append(given.result)
        if given.settles:
            result = results.pop(0)
            state, launched, settled = settle_oldest(state, freeze(result))
            for i in np.nonzero(settled.live)[0].tolist():
                tokens += result.next_token_ids[i, : settled.num_visible[i]].tolist()
            ended = {int(launched.rows[i]): () for i in np.nonzero(settled.finish_reason)[0]}
            assert set(settled.finish_reason.tolist()) <= {FinishReason.NONE, FinishReason.LENGTH}
            if ended:
                state = retire(state, ended)
    last = run.frames[-1].node.state
    assert (state.requests.output_len == last.requests.output_len).all()
    assert (state.ledger.page_table == last.ledger.page_table).all() and len(results) == len(run.codes)
    assert tokens == list(moves.contents.tokens(0, 8)[3:])
    assert isinstance(given.result, GenerationBatchResult | None)


def test_new_seq_lens_are_the_frontiers():
    found = explore(SHORT).found
    frontiers = [frame.frontiers for frame in replay(found.path)]
    for given, lens in zip(found.path.inputs[1:], frontiers[1:], strict=True):
        assert given.result.new_seq_lens.tolist() == [lens[row] for row, _ in given.rows]


def test_an_abort_is_an_input():
    run = Replay(Moves(SMALL["priorities"]))
    run.submit(0)
    run.abort(1)
    path = Path(SMALL["priorities"], tuple(frame.input for frame in run.frames))
    assert path.inputs[1] == Abort(1) and str(path.inputs[1]) == "abort request 1"
    frames = replay(path)
    assert not frames[-1].node.live and not frames[-1].node.state.waiting


def test_what_changed_is_told():
    lines = [lines for _, lines in frame_lines(explore(SHORT).found.path)]
    assert lines[0] == ["waiting: nobody → request 1 with 0 tokens"]
    taken = next(line for line in lines[1] if line.startswith("row 1"))
    assert taken.startswith("row 1: free → request 1, frontier 1, prompt_len 1")
    assert "row 1 kv_allocated_len: 1 → 3" in lines[2]


def test_a_path_ends_with_its_first_violation():
    found = explore(SHORT).found
    longer = found.path._replace(inputs=(*found.path.inputs, found.path.inputs[-1]))
    assert len(replay(longer)) == len(found.path.inputs)


def test_a_sound_configuration_replays_without_violation():
    found = explore(SHORT).found
    sound = found.path._replace(config=dataclasses.replace(SHORT, reserve_windows=None))
    assert [frame.violation for frame in replay(sound)] == [None] * len(found.path.inputs)


@pytest.mark.parametrize("name", ["chunks", "priorities"])
def test_rows_and_kinds_are_those_of_the_batch(name):
    moves = Moves(SMALL[name])
    run = Replay(moves)
    for index in moves.arrivals(run.node):
        run.submit(index)
    while run.node.live or run.node.launches:
        run.iterate(lambda launch: [moves.outcomes.longest(kind) for _, kind in launch.rows])
        assert run.frames[-1].violation is None
        given = run.frames[-1].input
        assert (
            len(given.rows) == len(given.digits) == (0 if given.result is None else given.result.accept_lens.shape[0])
        )
    assert len(run.frames) < 30
