"""A request leaves with everything it holds, and nothing else."""

import dataclasses

import numpy as np
import pytest
from oracles import Run, ceil_to, freeze, make_result, released_columns

from jspec.scheduler import release, reserve, settle, share_prefix
from jspec.state import num_pages_held
from jspec.state.requests import FinishReason


def holding(committed, allocated, page_size):
    """A run whose row 1 reached these lengths: a prefill of 20, verifies of at most 4, and the reserve of two windows."""
    run = Run(page_size=page_size, depth=1)
    run.submit(1, 20, priority=3)
    if (committed, allocated) == (20, 20):
        run.step([[0]])
        run.settle()
        return run
    left = committed - 20
    accepts = [1, *[4] * (left // 4), *([left % 4] if left % 4 else [])]
    for accepted in accepts:
        run.step([[0] * accepted])
    run.settle()
    batch = run.plan()  # the reserve from `committed`
    run.launch(batch, [[0]])
    return run


@pytest.mark.parametrize(
    ("committed", "allocated", "page_size"),
    [(27, 35, 1), (27, 48, 16), (32, 48, 16), (33, 48, 16), (20, 20, 16), (20, 20, 1), (24, 32, 4)],
)
def test_committed_part_tail_and_over_allocation_return(committed, allocated, page_size):
    run = holding(committed, allocated, page_size)
    assert run.lens()[:2] == (committed, allocated)
    ledger = run.state.ledger
    columns = released_columns(committed, allocated, page_size)
    assert columns == list(
        range(ceil_to(allocated, page_size) // page_size)
    )  # each once: the pieces never share a page
    own = ledger.page_table[1, columns].tolist()
    requests, after = release(run.state.requests, ledger, np.array([1], np.int32))
    assert after.num_free == ledger.num_free + len(columns) == after.free_pages.size - 1
    assert after.free_pages[ledger.num_free : after.num_free].tolist() == own
    assert after.free_pages[: ledger.num_free].tolist() == ledger.free_pages[: ledger.num_free].tolist()
    assert (after.kv_committed_len[1], after.kv_allocated_len[1], after.cache_protected_len[1]) == (0, 0, 0)
    assert not after.page_table.any() and not num_pages_held(after).any()
    assert requests.epoch.tolist() == [0, 1]
    idle = (requests.serial, requests.prompt_len, requests.output_len, requests.max_new_tokens, requests.last_launch)
    idle += (requests.fill_len, requests.priority)
    assert not np.concatenate(idle).any()
    assert (requests.stop_token_ids == -1).all() and not requests.to_finish.any()


# --- what the prefix cache holds -------------------------------------------------------------------------------------


def sharing():
    """Rows 1 to 3 begin with one prompt of three pages, of which each computes the last token at least; row 3 has a page less in common."""
    run = Run(page_size=4, max_running=3, num_pages=40, depth=1)
    prompts = ([*range(12), 1], [*range(12), 2, 2], [*range(8), 3, 3, 3, 3, 3])
    run.submit(1, prompts[0], 9)
    run.step([[0]])
    run.settle()  # of the prefill: its pages can be shared from now on
    for serial, prompt in enumerate(prompts[1:], 2):
        run.submit(serial, prompt, 9)
    run.step([[0], [0]])
    run.step([[0]] * 3)
    run.step([[0]] * 3)
    assert run.state.ledger.cache_protected_len.tolist() == [0, 12, 12, 12]
    return run


@pytest.mark.parametrize("rows", [[1], [2], [3], [1, 2], [3, 0, 1], [2, 3, 1]])
def test_cached_pages_stay_and_are_unlocked(rows):
    """What the cache holds of a row is not freed, whoever else reads it; the rest is, in one piece a row."""
    run = sharing()
    before = run.state
    shared = before.ledger.page_table[:, :3]
    assert (shared[1] == shared[2]).all() and (shared[1, :2] == shared[3, :2]).all() and shared[1, 2] != shared[3, 2]
    locks = np.bincount(shared[1:].reshape(-1), minlength=41)
    assert before.ledger.page_locks.tolist() == locks.tolist()
    _, ledger = release(before.requests, before.ledger, np.array(rows, np.int32))
    freed = []
    for row in rows:
        committed, allocated, _ = run.lens(row)
        columns = released_columns(committed, allocated, 4, protected=12)
        assert columns == list(range(3, ceil_to(allocated, 4) // 4))
        freed += before.ledger.page_table[row, columns].tolist() if row else []
        locks -= np.bincount(shared[row], minlength=41) * (row > 0)
    assert ledger.free_pages[before.ledger.num_free : ledger.num_free].tolist() == freed
    assert ledger.page_locks.tolist() == locks.tolist()
    assert not ledger.cache_protected_len[rows].any() and not ledger.page_table[rows].any()


def test_a_row_that_owns_nothing_returns_nothing():
    """All its pages are the cache's: as after a retirement that handed over the last one."""
    run = Run(page_size=4, num_pages=40, depth=0)
    run.submit(1, range(12), 1)
    run.launch(run.plan(), [[0]])
    run.settle()
    pages = np.zeros((1, run.state.ledger.page_table.shape[1]), np.int32)
    pages[0, :3] = [run.state.prefix_cache.pages[key] for key in run.keys(range(12))]
    ledger = share_prefix(run.state.ledger, np.array([1], np.int32), pages)
    requests, after = release(run.state.requests, freeze(ledger), np.array([1], np.int32))
    assert after.num_free == ledger.num_free == 37 and not after.page_locks.any() and not after.page_table.any()
    assert np.array_equal(after.free_pages, ledger.free_pages) and requests.epoch.tolist() == [0, 2]


# --- others ------------------------------------------------------------------------------------------------------------


def three_rows():
    run = Run(page_size=4, max_running=3, depth=1)
    for serial, prompt_len in enumerate((5, 12, 3), 1):
        run.submit(serial, prompt_len, stops=(7, 8), priority=-serial)
    run.step([[0], [0], [0]])
    run.step([[0] * 4, [0], [0] * 3])
    run.step([[0], [0], [0]])
    return run


@pytest.mark.parametrize("rows", [[1], [3], [1, 3], [3, 1], [2, 1, 3], [0, 2, 0], [0, 0]])
def test_others_keep_what_they_have(rows):
    run = three_rows()
    before = run.state
    requests, ledger = release(before.requests, before.ledger, np.array(rows, np.int32))
    leaving = {row for row in rows if row}
    for row in range(4):
        if row in leaving:
            assert requests.serial[row] == 0 and requests.epoch[row] == 1 and ledger.kv_allocated_len[row] == 0
            continue
        for name in (
            "serial", "epoch", "prompt_len", "output_len", "fill_len", "priority", "max_new_tokens", "last_launch",
            "stop_token_ids", "to_finish",
        ):  # fmt: skip
            assert np.array_equal(getattr(requests, name)[row], getattr(before.requests, name)[row]), (row, name)
        for name in ("kv_committed_len", "kv_allocated_len", "cache_protected_len", "page_table"):
            assert np.array_equal(getattr(ledger, name)[row], getattr(before.ledger, name)[row]), (row, name)
    held = num_pages_held(before.ledger)
    freed = [page for row in rows if row for page in before.ledger.page_table[row, : held[row]].tolist()]
    assert ledger.free_pages[before.ledger.num_free : ledger.num_free].tolist() == freed
    assert ledger.free_pages[-1] == 0


def test_a_free_row_has_nothing_to_return():
    run = three_rows()
    requests, ledger = release(run.state.requests, run.state.ledger, np.array([2], np.int32))
    again, after = release(freeze(requests), freeze(ledger), np.array([2], np.int32))
    assert after.num_free == ledger.num_free
    assert np.array_equal(after.free_pages, ledger.free_pages)
    assert again.epoch.tolist() == [0, 0, 2, 0]


@pytest.mark.parametrize("page_size", [16, 1])
def test_finish_by_length_with_a_late_result(page_size):
    """max_new 6, accepts 4, 3, 2 under overlap: the third verify is under way when the second one ends the request.

    `plan` would not launch it (the request's last token is guaranteed by then), so its row is reserved and launched by hand.
    """
    run = Run(page_size=page_size, depth=1)
    run.submit(1, 20, max_new_tokens=6)
    for accepted in (1, 4):
        run.step([[0] * accepted])
    second = run.plan()
    run.launch(second, [[0] * 3])
    run.settle()  # iteration 2 settles verify 4
    assert (run.lens()[0], run.lens()[2]) == (24, 25)
    assert run.plan() is None
    ledger, _ = reserve(run.state.ledger, np.array([False, True]), alloc_len=4, depth=1)
    assert ledger.kv_allocated_len[1] == 32

    third = dict(forward_iter=second.forward_iter + np.int32(1), expected_iter=second.forward_iter[None])
    new = ledger.page_table[1][run.state.ledger.page_table[1] != ledger.page_table[1]]
    first = num_pages_held(run.state.ledger)[[1]]
    run.device.launch(dataclasses.replace(second, **third, first_page=first, new_pages=new[None, :]), [[0, 0]], None)
    assert run.device.frontier[1] == 29  # the window [27, 31)
    launched = run.state.launched[0]
    requests, ledger, settled = settle(run.state.requests, freeze(ledger), launched, run.results[0])
    assert (requests.output_len[1], ledger.kv_committed_len[1]) == (8, 27)
    assert settled.start[0] + settled.num_visible[0] == 6  # finished_len
    assert settled.finish_reason.tolist() == [FinishReason.LENGTH]
    requests, ledger = release(freeze(requests), freeze(ledger), launched.rows)
    assert ledger.num_free == ledger.free_pages.size - 1

    after, ledger_after, nothing = settle(freeze(requests), freeze(ledger), launched, make_result([[0, 0]]))
    assert not nothing.live.any() and nothing.finish_reason.tolist() == [0]
    assert (nothing.num_new.tolist(), nothing.num_visible.tolist()) == ([0], [0])
    for name in ("serial", "output_len", "epoch"):
        assert np.array_equal(getattr(after, name), getattr(requests, name))
    assert np.array_equal(ledger_after.kv_committed_len, ledger.kv_committed_len)
