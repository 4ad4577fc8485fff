"""What runs next, and which rows have all they need under way."""

import itertools

import numpy as np
import pytest
from oracles import Run

from jspec.scheduler import launchable, plan_decode
from jspec.state import ForwardMode


def test_prefill_goes_before_decode():
    run = Run(max_running=2)
    run.submit(1, 5)
    run.step([[0]])
    run.submit(2, 5)
    assert run.step([[0]])[0].forward_mode is ForwardMode.EXTEND
    assert run.step([[0], [0]])[0].forward_mode is ForwardMode.DECODE


def test_a_decode_batch():
    run = Run(max_running=3, page_size=4)
    for serial, prompt_len in enumerate((5, 9, 2), 1):
        run.submit(serial, prompt_len)
    run.step([[0]] * 3)
    before = run.state
    batch = run.plan()
    assert batch.forward_mode is ForwardMode.DECODE and batch.forward_iter == 2
    assert batch.rows.tolist() == batch.serials.tolist() == [1, 2, 3] and batch.epochs.tolist() == [0, 0, 0]
    assert batch.expected_iter.tolist() == [1, 1, 1]  # they follow their prefill, which is not settled
    assert batch.prefix_lens.tolist() == batch.extend_lens.tolist() == [0, 0, 0]
    assert batch.first_page.tolist() == [2, 3, 1]
    assert (batch.new_pages >= 0).sum(axis=1).tolist() == [2, 2, 2]  # to 16, 20 and 12
    assert batch.kv_bound == 20
    assert run.state.requests.last_launch.tolist() == [0, 2, 2, 2]
    assert run.state.ledger.kv_committed_len.tolist() == before.ledger.kv_committed_len.tolist() == [0, 5, 9, 2]
    assert [launched.forward_iter for launched in run.state.launched] == [1, 2]
    run.launch(batch, [[0]] * 3)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_last_token_is_not_launched_twice(depth):
    """Each launch under way brings at least one token: max_new launches, the prefill among them, are the most a request ever needs."""
    for max_new_tokens in range(1, 6):
        run = Run(depth=depth)
        run.submit(1, 5, max_new_tokens)
        launches = 0
        while run.state.waiting or run.state.requests.serial[1] or run.results:
            batch = run.plan()
            if batch is not None:
                run.launch(batch, [[0]])
                launches += 1
            if len(run.results) > (depth if batch is not None else 0):
                run.settle()
        assert launches == max_new_tokens


def test_launchable_counts_what_is_under_way():
    run = Run(max_running=4, depth=2)
    for serial, max_new_tokens in enumerate((1, 2, 3, 9), 1):
        run.submit(serial, 5, max_new_tokens)
    rows = []
    for _ in range(3):
        batch = run.plan()
        run.launch(batch, [[0]] * len(batch.rows))
        rows.append(batch.rows.tolist())
    assert rows == [[1, 2, 3, 4], [2, 3, 4], [3, 4]]
    assert launchable(run.state.requests, run.state.launched).tolist() == [False, False, False, False, True]
    assert launchable(run.state.requests, ()).tolist() == [False, True, True, True, True]


def test_a_late_result_of_the_row_counts_for_nobody():
    """Request 1 ends with its prefill while a launch of the row is under way; the row's next owner owes that launch nothing."""
    run = Run(max_running=1)
    run.submit(1, 5, 9, stops=(7,))
    run.submit(2, 5, 2)
    run.step([[7]])
    run.step([[0]])  # launched before the stop was seen
    assert run.state.requests.serial[1] == 0 and len(run.state.launched) == 1
    run.launch(run.plan(), [[0]])  # prefill of request 2; the late verify is still unsettled
    assert len(run.state.launched) == 2
    assert launchable(run.state.requests, run.state.launched).tolist() == [False, True]
    run.settle()
    run.step([[0]])
    assert launchable(run.state.requests, run.state.launched).tolist() == [False, False]


def test_nothing_to_decode_changes_nothing():
    run = Run()
    run.submit(1, 5, 1)
    run.step([[0]])
    before = run.state
    state, batch = plan_decode(before, limits=run.limits)
    assert state is before and batch is None


@pytest.mark.parametrize("order", list(itertools.permutations(range(3)))[1:])
def test_rows_do_not_affect_each_other(order):
    """Three requests, submitted in another order: each sees the same lengths at the same iteration."""
    sizes = [(5, 4, [4, 1]), (16, 9, [2, 2]), (30, 9, [1, 4])]

    def lens(order):
        run = Run(max_running=3, page_size=4)
        for serial in order:
            run.submit(serial + 1, *sizes[serial][:2])
        run.step([[0]] * 3)
        history = []
        for i in range(2):
            run.step([[0] * sizes[serial][2][i] for serial in order])
            rows = {int(serial): row for row, serial in enumerate(run.state.requests.serial) if serial}
            history.append([run.lens(rows[serial]) for serial in sorted(rows)])
        return history

    assert lens(order) == lens(range(3))


def test_the_batch_holds_no_array_of_the_state():
    """A batch outlives the state it was planned from: nothing in it may be a view of something that could be written later."""
    run = Run(max_running=2)
    for serial in (1, 2):
        run.submit(serial, 5)
    for _ in range(2):
        batch = run.plan()
        state = run.state
        for array in (batch.rows, batch.epochs, batch.serials, batch.expected_iter, batch.new_pages, batch.first_page):
            for table in (
                state.requests.epoch,
                state.requests.serial,
                state.requests.last_launch,
                state.ledger.page_table,
            ):
                assert not np.shares_memory(array, table)
        run.launch(batch, [[0]] * 2)
