"""Results and aborts at the level of the whole state."""

import pytest
from oracles import Run

from jspec.scheduler import Aborted, abort
from jspec.state import FinishReason


def test_who_ended_is_released_at_once():
    """A row that ended is free, and its pages are, in the settle that finds it out."""
    run = Run(max_running=2, page_size=4, num_pages=20, depth=0)
    run.submit(1, 5, 2)
    run.submit(2, 5, 9)
    run.step([[0], [0]])
    _, (launched, settled) = run.step([[1, 1], [1]])
    assert launched.forward_iter == 2 and settled.finish_reason.tolist() == [FinishReason.LENGTH, FinishReason.NONE]
    assert run.state.requests.serial.tolist() == [0, 0, 2] and run.state.requests.epoch.tolist() == [0, 1, 0]
    assert run.state.ledger.num_free == 20 - 3 and run.state.launched == ()


def test_launches_are_settled_oldest_first():
    run = Run(depth=2)
    run.submit(1, 5)
    for _ in range(2):
        run.launch(run.plan(), [[0]])
    assert [int(launched.forward_iter) for launched in run.state.launched] == [1, 2]
    launched, _ = run.settle()
    assert launched.forward_iter == 1 and [int(item.forward_iter) for item in run.state.launched] == [2]


def test_abort_of_a_running_request_waits_for_its_tokens():
    run = Run(max_running=2, depth=1)
    run.submit(1, 5)
    run.submit(2, 5)
    run.step([[0], [0]])
    run.step([[0] * 2, [0] * 2])
    assert run.abort(1) == run.abort(1) == "running"
    assert run.state.requests.serial.tolist() == [0, 1, 2]
    batch, (_, settled) = run.step([[0] * 3, [0] * 3])  # launched with the row all the same
    assert batch.rows.tolist() == [1, 2]
    assert settled.finish_reason.tolist() == [FinishReason.ABORT, FinishReason.NONE]
    assert settled.num_visible.tolist() == [2, 2]
    assert run.abort(1) == "unknown"
    _, (_, late) = run.step([[0]])
    assert late.live.tolist() == [False, True] and late.num_visible.tolist() == [0, 3]
    assert run.state.requests.output_len.tolist() == [0, 0, 6]


@pytest.mark.parametrize("depth", [0, 1])
def test_abort_before_the_prefill_is_settled(depth):
    run = Run(depth=depth)
    run.submit(1, 5)
    run.launch(run.plan(), [[3]])
    run.abort(1)
    _, settled = run.settle()
    assert settled.finish_reason.tolist() == [FinishReason.ABORT] and settled.num_visible.tolist() == [1]
    assert run.state.ledger.num_free == 400


def test_abort_of_a_row_with_nothing_under_way_is_taken_at_its_next_settle():
    run = Run(depth=0)
    run.submit(1, 5)
    run.step([[0]])
    assert run.state.launched == () and run.abort(1) == "running"
    _, (_, settled) = run.step([[0] * 4])
    assert settled.finish_reason.tolist() == [FinishReason.ABORT] and settled.num_visible.tolist() == [4]


def test_the_next_owner_of_a_row_inherits_no_abort():
    run = Run(depth=0)
    run.submit(1, 5)
    run.submit(2, 5)
    run.step([[0]])
    run.abort(1)
    run.step([[0]])
    run.step([[0]])
    assert run.state.requests.serial.tolist() == [0, 2] and not run.state.requests.to_finish.any()


@pytest.mark.parametrize("serial", [-1, 0, 2, 99])
def test_abort_of_nobody(serial):
    run = Run(max_running=3)
    run.submit(1, 5)
    state, found = abort(run.state, serial)
    assert found is Aborted.UNKNOWN and state is run.state


def test_abort_of_a_waiting_request_keeps_the_order_of_the_others():
    run = Run(max_running=1)
    for serial in range(1, 6):
        run.submit(serial, 5)
    run.step([[0]])
    assert run.abort(3) == "waiting"
    assert [request.serial for request in run.state.waiting] == [2, 4, 5]
    assert run.abort(3) == "unknown"
