"""Results and aborts at the level of the whole state."""

import pytest
from oracles import Run, freeze

from jspec.scheduler import Aborted, abort, leave, retire, settle_oldest
from jspec.state import FinishReason


def test_who_ended_is_released_at_once():
    """A row that ended is free, and its pages are, in the iteration that finds it out."""
    run = Run(max_running=2, page_size=4, num_pages=20, depth=0)
    run.submit(1, 5, 2)
    run.submit(2, 5, 9)
    run.step([[0], [0]])
    _, (launched, settled) = run.step([[1, 1], [1]])
    assert launched.forward_iter == 2 and settled.finish_reason.tolist() == [FinishReason.LENGTH, FinishReason.NONE]
    assert run.state.requests.serial.tolist() == [0, 0, 2] and run.state.requests.epoch.tolist() == [0, 1, 0]
    assert run.state.ledger.num_free == 20 - 3 and run.state.launched == ()


def test_who_ended_keeps_its_row_until_it_retires():
    """In between the shell reads the row's tokens, and names the pages that it leaves behind."""
    run = Run(max_running=2, page_size=4, num_pages=20, depth=0)
    run.submit(1, 5, 1)
    run.submit(2, 5, 9)
    run.launch(run.plan(), [[0], [0]])
    before = run.state
    state, launched, settled = settle_oldest(before, run.results[0])
    assert launched is before.launched[0] and state.launched == ()
    assert settled.finish_reason.tolist() == [FinishReason.LENGTH, FinishReason.NONE]
    assert state.requests.serial.tolist() == [0, 1, 2] and state.admitted is before.admitted
    assert state.ledger.num_free == before.ledger.num_free == 16
    state = retire(freeze(state), {1: ()})
    assert state.requests.serial.tolist() == [0, 0, 2] and state.requests.epoch.tolist() == [0, 1, 0]
    assert state.ledger.num_free == 18 and list(state.admitted) == [2] and not state.prefix_cache.pages


@pytest.mark.parametrize("shared", [True, False])
def test_a_settled_prefill_leaves_its_whole_pages_to_the_cache(shared):
    """Chunk by chunk, each when its KV is there; a prompt whose pages have no names leaves none."""
    run = Run(page_size=4, num_pages=20, depth=0, max_prefill_tokens=8)
    run.submit(1, range(14) if shared else 14, 9)
    keys = run.keys(range(14))
    assert len(keys) == 3
    for runs, before, pages in (([[]], 0, 2), ([[0]], 2, 3), ([[0] * 4], 3, 3)):
        assert len(run.state.prefix_cache.pages) == before * shared
        run.step(runs)
        table = run.state.ledger.page_table[1]
        expected = {key: int(table[i]) for i, key in enumerate(keys[:pages])} if shared else {}
        assert dict(run.state.prefix_cache.pages) == expected
        assert run.state.ledger.cache_protected_len[1] == 4 * len(expected)


def test_a_prefill_that_ended_its_request_leaves_pages_only_as_it_retires():
    run = Run(page_size=4, num_pages=20, depth=0)
    run.submit(1, range(9), 1)
    run.launch(run.plan(), [[0]])
    state, _, settled = settle_oldest(run.state, run.results[0])
    assert settled.finish_reason.tolist() == [FinishReason.LENGTH] and not state.prefix_cache.pages
    table = state.ledger.page_table[1].copy()
    state = retire(freeze(state), {1: run.keys(range(9))})
    assert dict(state.prefix_cache.pages) == {key: int(table[i]) for i, key in enumerate(run.keys(range(9)))}
    assert state.ledger.num_free == 18 and not state.ledger.page_locks.any()


def test_a_late_prefill_leaves_nothing():
    """Its request lost the row before: the KV is somebody else's by now, or nobody's."""
    run = Run(page_size=4, num_pages=20, depth=1)
    run.submit(1, range(9), 9)
    run.launch(run.plan(), [[0]])
    state, _ = leave(run.state, 1, FinishReason.NONE)
    state, _, settled = settle_oldest(freeze(state), run.results[0])
    assert not settled.live.any() and not state.prefix_cache.pages and state.ledger.num_free == 20


def test_an_output_leaves_its_committed_pages():
    """A request retires with the names of all its tokens: only whole pages of committed KV are kept, the pending token is not among them."""
    for accepted, pages in ((2, 1), (3, 2), (4, 2)):
        run = Run(page_size=4, num_pages=20, depth=0, alloc_len=4)
        run.submit(1, range(5), 9, stops=(7,))
        run.step([[50]])
        run.step([[*range(51, 50 + accepted), 7]])  # 5 + accepted committed, one more known
        tokens = [*range(5), 50, *range(51, 50 + accepted)]
        assert len(tokens) == 5 + accepted and run.content[1] == [*tokens, 7]
        assert set(run.state.prefix_cache.pages) == set(run.keys(tokens)) and len(run.keys(tokens)) == pages
        assert run.state.ledger.num_free == 20 - pages


def test_no_more_is_kept_than_is_committed():
    """Names of pages that the row does not fill are ignored."""
    run = Run(page_size=4, num_pages=20, depth=0)
    run.submit(1, range(9), 1)
    run.launch(run.plan(), [[0]])
    state, _, _ = settle_oldest(run.state, run.results[0])
    state = retire(freeze(state), {1: run.keys(range(40))})
    assert set(state.prefix_cache.pages) == set(run.keys(range(9))) and state.ledger.num_free == 18


def test_two_that_end_at_once_with_one_prefix_leave_it_once():
    """The second one's pages are given up for the first one's."""
    run = Run(max_running=2, page_size=4, num_pages=20, depth=0)
    run.submit(1, range(9), 1)
    run.submit(2, range(13), 1)
    batch = run.plan()
    assert batch.serials.tolist() == [1, 2]
    run.launch(batch, [[0], [0]])
    run.settle()
    assert set(run.state.prefix_cache.pages) == set(run.keys(range(13)))
    assert run.state.ledger.num_free == 17 and not run.state.ledger.page_locks.any()


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


@pytest.mark.parametrize("under_way", [True, False])
def test_abort_in_the_middle_of_a_prompt_is_taken_at_the_next_plan(under_way):
    """There may be no launch of it to wait for; one that is under way finds no one."""
    run = Run(max_running=2, depth=1, page_size=4, max_prefill_tokens=8)
    run.submit(1, 20)
    run.submit(2, 5)
    run.launch(run.plan(), [[]])
    if not under_way:
        run.settle()
    assert run.abort(1) == run.abort(1) == "running"
    batch = run.plan()
    assert [(gone.row, gone.serial, gone.output_len, gone.reason) for gone in run.left] == [
        (1, 1, 0, FinishReason.ABORT)
    ]
    assert batch.serials.tolist() == [2] and batch.rows.tolist() == batch.epochs.tolist() == [1]
    run.launch(batch, [[0]])
    if under_way:
        _, late = run.settle()
        assert not late.live.any() and not late.finish_reason.any()
    _, settled = run.settle()
    assert settled.live.tolist() == [True] and run.state.requests.output_len.tolist() == [0, 1, 0]
    assert run.abort(1) == "unknown" and not run.state.waiting


def test_abort_between_two_chunks_is_taken_when_the_first_one_settles():
    run = Run(depth=1, page_size=4, max_prefill_tokens=8)
    run.submit(1, 12)
    run.step([[]])
    run.launch(run.plan(), [[3]])
    run.abort(1)
    assert run.settle()[1].finish_reason.tolist() == [FinishReason.ABORT]  # of the first chunk, which emits nothing
    assert run.plan() is None and run.left == ()
    _, late = run.settle()
    assert not late.live.any() and run.state.ledger.num_free == 400


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
