"""What runs next, and which rows have all they need under way."""

import itertools

import jax
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


def test_prefill_takes_the_running_rows_along():
    """With `mixed`, nobody waits for a prompt: not while it goes in chunks either."""
    run = Run(max_running=2, mixed=True, page_size=4, max_prefill_tokens=8)
    run.submit(1, 5)
    assert run.step([[0]])[0].forward_mode is ForwardMode.EXTEND  # nobody runs
    run.submit(2, 14)
    for runs, serials in (([[], [0]], [1]), ([[0], [0]], [1])):
        batch, _ = run.step(runs)
        assert batch.forward_mode is ForwardMode.MIXED
        assert (batch.serials.tolist(), batch.tails.serials.tolist()) == ([2], serials)
    assert run.step([[0], [0]])[0].forward_mode is ForwardMode.DECODE
    assert run.state.requests.output_len.tolist() == [0, 3, 1]


@pytest.mark.parametrize("mixed", [False, True])
def test_decode_goes_on_where_no_prompt_can_start(mixed):
    run = Run(max_running=1, mixed=mixed)
    run.submit(1, 5)
    run.step([[0]])
    run.submit(2, 5)
    batch, _ = run.step([[0]])
    assert batch.forward_mode is ForwardMode.DECODE and batch.tails is None and len(run.state.waiting) == 1


def test_a_mixed_batch():
    """Rows 1 to 3 run, a prompt takes row 4: the prompts as in an EXTEND batch, the others, in `tails`, as in a DECODE batch of the same launch."""
    run, apart = (Run(max_running=4, page_size=4, mixed=mixed) for mixed in (True, False))
    for one in (run, apart):
        for serial, prompt_len in enumerate((5, 9, 2), 1):
            one.submit(serial, prompt_len)
        one.step([[0]] * 3)
    expected = apart.plan()  # the decode that would come without the prompt
    run.submit(4, 7)
    before = run.state
    batch = run.plan()
    assert batch.forward_mode is ForwardMode.MIXED and batch.forward_iter == 2
    assert batch.rows.tolist() == batch.serials.tolist() == [4] and batch.epochs.tolist() == [0]
    assert (batch.prefix_lens.tolist(), batch.extend_lens.tolist()) == ([0], [7])
    assert batch.expected_iter.tolist() == batch.first_page.tolist() == [0] and batch.goes_on.tolist() == [False]
    assert (batch.new_pages >= 0).sum(axis=1).tolist() == [2]
    tails = batch.tails
    assert tails.forward_mode is ForwardMode.DECODE and tails.tails is None
    for name in (
        "forward_iter", "rows", "epochs", "serials", "prefix_lens", "extend_lens", "expected_iter", "first_page", "kv_bound",
        "goes_on",
    ):  # fmt: skip
        assert np.array_equal(getattr(tails, name), getattr(expected, name)), name
    assert ((tails.new_pages >= 0) == (expected.new_pages >= 0)).all()
    assert batch.kv_bound == tails.kv_bound == 20
    assert run.state.requests.last_launch.tolist() == [0, 2, 2, 2, 2] and run.state.forward_iter == 2
    assert run.state.ledger.kv_committed_len.tolist() == [*before.ledger.kv_committed_len[:4].tolist(), 7]
    assert run.state.ledger.kv_allocated_len.tolist() == [0, 16, 20, 12, 7]
    launched = run.state.launched[-1]
    assert [item.forward_iter for item in run.state.launched] == [1, 2]
    assert launched.forward_mode is ForwardMode.MIXED and launched.rows.tolist() == [4, 1, 2, 3]
    assert launched.emits.all() and launched.commits.tolist() == [False, True, True, True]
    assert launched.end_lens.tolist() == [7, 0, 0, 0]
    run.launch(batch, [[0]] * 4)
    apart.launch(expected, [[0]] * 3)


def test_a_tail_that_has_all_under_way_stays_behind():
    """A row whose last token is under way, or whose prompt goes on, is no tail."""
    run = Run(max_running=4, mixed=True, page_size=4, max_prefill_tokens=12, max_prefill_rows=2)
    run.submit(1, 5, 2)
    run.submit(2, 5, 9)
    run.step([[0], [0]])
    run.submit(3, 20, 9)
    assert run.step([[], [0], [0]])[0].tails.serials.tolist() == [1, 2]
    batch, _ = run.step([[0], [0]])
    assert (batch.serials.tolist(), batch.tails.serials.tolist()) == ([3], [2])


def test_without_a_row_that_moves_on_a_batch_is_not_mixed():
    run = Run(max_running=2, mixed=True)
    run.submit(1, 5, 1)
    run.step([[0]])
    run.submit(2, 5)
    batch = run.plan()
    assert batch.forward_mode is ForwardMode.EXTEND and batch.tails is None


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
    assert batch.kv_bound == 20 and batch.tails is None and batch.goes_on.tolist() == [False] * 3
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
    assert launchable(run.state.requests, run.state.ledger, run.state.launched).tolist() == [
        False,
        False,
        False,
        False,
        True,
    ]
    assert launchable(run.state.requests, run.state.ledger, ()).tolist() == [False, True, True, True, True]


def test_a_prompt_that_goes_on_is_not_launchable():
    """A chunk under way brings no token, so it does not count either."""
    run = Run(max_running=2, page_size=4, max_prefill_tokens=8, depth=2)
    run.submit(1, 20, max_new_tokens=2)
    for runs, expected in (([[]], False), ([[]], False), ([[0]], True)):
        run.launch(run.plan(), runs)
        assert launchable(run.state.requests, run.state.ledger, run.state.launched)[1] == expected
    assert [item.emits.tolist() for item in run.state.launched] == [[False], [False], [True]]
    run.settle()
    run.launch(run.plan(), [[0]])
    assert not launchable(run.state.requests, run.state.ledger, run.state.launched).any()


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
    assert launchable(run.state.requests, run.state.ledger, run.state.launched).tolist() == [False, True]
    run.settle()
    run.step([[0]])
    assert launchable(run.state.requests, run.state.ledger, run.state.launched).tolist() == [False, False]


def test_nothing_to_decode_changes_nothing():
    run = Run()
    run.submit(1, 5, 1)
    run.step([[0]])
    before = run.state
    planned = plan_decode(before, limits=run.limits)
    assert planned.state is before and planned.batch is None and planned.left == ()


def test_where_pages_are_few_nothing_to_decode_changes_nothing_either():
    run = Run(num_pages=8)
    run.submit(1, 5, 1)
    run.step([[0]])
    planned = plan_decode(run.state, limits=run.limits)
    assert planned.state is run.state and planned.batch is None and planned.left == ()


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
    run = Run(max_running=3, page_size=4, mixed=True, max_prefill_tokens=8)
    for serial in (1, 2):
        run.submit(serial, 4)
    modes = []
    for runs in ([[0], [0]], [[0], [0]], [[], [0], [0]], [[0], [0], [0]]):
        if len(modes) == 2:
            run.submit(3, 12)
        batch = run.plan()
        modes.append(batch.forward_mode)
        arrays = [leaf for leaf in jax.tree.leaves(batch) if isinstance(leaf, np.ndarray)]
        assert len(arrays) == (9 if batch.tails is None else 18)
        for array in arrays:
            for table in jax.tree.leaves((run.state.requests, run.state.ledger, run.state.prefix_cache)):
                assert not np.shares_memory(array, table)
        run.launch(batch, runs)
        if len(run.results) > 1:
            run.settle()
    assert modes == [ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED, ForwardMode.MIXED]
