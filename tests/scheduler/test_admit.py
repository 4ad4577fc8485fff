"""Who may start, in which order, with how many pages promised."""

import numpy as np
import pytest
from oracles import Run, ceil_to, next_allocated

from jspec.scheduler import pages_to_finish
from jspec.state import ForwardMode, Limits

I32 = np.int32


def most_pages(prompt_len, max_new_tokens, *, depth, width, page_size):
    """Pages a request can hold at most, by trying every order of launch and settle with every accept length."""
    start = (
        False,
        0,
        prompt_len,
        prompt_len,
        (0,),
    )  # prefill settled?, outputs, C, A, accepts under way (0 is the prefill)
    seen, todo, most = {start}, [start], 0
    while todo:
        started, outputs, committed, allocated, under_way = todo.pop()
        most = max(most, ceil_to(allocated, page_size) // page_size)
        reached = []
        if under_way:
            first, rest = under_way[0], under_way[1:]
            if outputs + max(first, 1) < max_new_tokens:  # else it ends here
                reached.append((True, outputs + max(first, 1), committed + first, allocated, rest))
        if len(under_way) <= depth and outputs + len(under_way) < max_new_tokens:
            after = next_allocated(allocated, committed, (depth + 1) * width, page_size)
            reached += [(started, outputs, committed, after, (*under_way, accept)) for accept in range(1, width + 1)]
        for state in reached:
            if state not in seen:
                seen.add(state)
                todo.append(state)
    return most


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("depth", "width"), [(0, 1), (0, 3), (1, 1), (1, 3), (2, 2)])
def test_pages_to_finish_is_exact(depth, width, page_size):
    limits = Limits(context_len=99, alloc_len=width, depth=depth, max_prefill_tokens=9, max_prefill_rows=9)
    for prompt_len in (1, 3, 4, 15, 16, 17):
        for max_new_tokens in (1, 2, 3, 6):
            need = pages_to_finish(I32(prompt_len), I32(max_new_tokens), limits=limits, page_size=page_size)
            assert need == most_pages(prompt_len, max_new_tokens, depth=depth, width=width, page_size=page_size)


def test_pages_to_finish_takes_columns():
    limits = Limits(context_len=99, alloc_len=4, depth=1, max_prefill_tokens=9, max_prefill_rows=9)
    need = pages_to_finish(np.array([20, 20, 1], I32), np.array([1, 6, 2], I32), limits=limits, page_size=16)
    assert need.dtype == I32 and need.tolist() == [2, 2, 1]  # 20; 20 + 4 + 8 = 32; 1 + 0 + 8


def test_first_come_first_served():
    run = Run(max_running=3, page_size=4, max_prefill_rows=8)
    for serial, prompt_len in enumerate((5, 9, 2, 7), 1):
        run.submit(serial, prompt_len, max_new_tokens=10, stops=(7,) * (serial - 1))
    batch = run.plan()
    assert batch.forward_mode is ForwardMode.EXTEND and batch.forward_iter == run.state.forward_iter == 1
    assert batch.serials.tolist() == [1, 2, 3] and batch.rows.tolist() == [1, 2, 3]
    assert batch.extend_lens.tolist() == [5, 9, 2] and batch.prefix_lens.tolist() == [0, 0, 0]
    assert batch.expected_iter.tolist() == batch.epochs.tolist() == batch.first_page.tolist() == [0, 0, 0]
    assert batch.kv_bound == 9 and (batch.new_pages >= 0).sum(axis=1).tolist() == [2, 3, 1]
    assert [request.serial for request in run.state.waiting] == [4]
    requests = run.state.requests
    assert requests.serial.tolist() == [0, 1, 2, 3] and requests.prompt_len.tolist() == [0, 5, 9, 2]
    assert requests.max_new_tokens.tolist() == [0, 10, 10, 10] and requests.last_launch.tolist() == [0, 1, 1, 1]
    assert (requests.stop_token_ids == 7).sum(axis=1).tolist() == [0, 0, 1, 2]
    run.launch(batch, [[0]] * 3)


def test_rows_are_reused_lowest_first_with_their_epoch():
    run = Run(max_running=3)
    for serial, max_new_tokens in enumerate((1, 9, 1), 1):
        run.submit(serial, 5, max_new_tokens)
    run.step([[0]] * 3)
    run.settle()
    for serial in (4, 5):
        run.submit(serial, 5)
    batch = run.plan()
    assert (batch.rows.tolist(), batch.epochs.tolist(), batch.serials.tolist()) == ([1, 3], [1, 1], [4, 5])
    run.launch(batch, [[0], [0]])


def admitted(run):
    batch = run.plan()
    if batch is None or batch.forward_mode is not ForwardMode.EXTEND:
        return []
    run.launch(batch, [[0]] * len(batch.rows))
    return batch.serials.tolist()


def test_one_batch_keeps_to_its_tokens_and_rows():
    run = Run(max_running=8, max_prefill_tokens=10, max_prefill_rows=3)
    for serial, prompt_len in enumerate((6, 4, 1, 2, 2, 2, 2, 3), 1):
        run.submit(serial, prompt_len, max_new_tokens=9)
    assert admitted(run) == [1, 2]  # 6 + 4
    assert admitted(run) == [3, 4, 5]  # three rows
    run.settle()
    assert admitted(run) == [6, 7, 8]


def test_a_prompt_longer_than_the_budget_runs_alone():
    run = Run(max_running=4, max_prefill_tokens=10)
    for serial, prompt_len in enumerate((3, 40, 3, 4), 1):
        run.submit(serial, prompt_len, max_new_tokens=9)
    assert admitted(run) == [1]
    assert admitted(run) == [2]
    run.settle()
    assert admitted(run) == [3, 4]


def test_nobody_overtakes_a_request_that_waits_for_pages():
    # p = 4, a reserve of 8: (8, 9) needs ceil(8 + 7 + 8) = 24 tokens, 6 pages; (1, 2) needs 3
    run = Run(max_running=4, page_size=4, num_pages=11)
    for serial, sizes in enumerate(((8, 9), (8, 9), (1, 2)), 1):
        run.submit(serial, *sizes)
    assert admitted(run) == [1]  # 5 pages are promised to nobody, 9 are free; request 3 would fit
    assert [request.serial for request in run.state.waiting] == [2, 3]
    while run.state.requests.serial[1]:
        batch = run.plan()
        assert batch is None or batch.forward_mode is ForwardMode.DECODE
        if batch is not None:
            run.launch(batch, [[0]])
        if len(run.results) > (1 if batch is not None else 0):
            run.settle()
    assert admitted(run) == [2, 3]


def test_pages_are_promised_to_the_last_one():
    exact = Run(max_running=2, page_size=4, num_pages=12)
    short = Run(max_running=2, page_size=4, num_pages=11)
    for run in (exact, short):
        run.submit(1, 8, 9)
        run.submit(2, 8, 9)
    assert admitted(exact) == [1, 2] and admitted(short) == [1]


def test_nothing_waits_nothing_changes():
    run = Run()
    before = run.state
    assert run.plan() is None and run.state is before
