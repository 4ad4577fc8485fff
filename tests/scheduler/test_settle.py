"""One launch lands: tokens, commits, stops, lengths, aborts, dead rows."""

import dataclasses
import itertools

import chex
import jax
import numpy as np
import pytest
from oracles import NOT_FINITE, Run, SlowRequest, freeze, make_result

from jspec.scheduler import release, settle
from jspec.state import FinishReason, ForwardMode, Launched, RowStatus, seqlen
from jspec.state.results import NEVER

E, B0 = 9, 1
"""A stop token, and the token of the prefill."""


def one_verify(run_tokens, *, max_new_tokens=100, stops=(E,), abort=False):
    """A request with `[B0]` settled and C = 20, and the launch that brings `run_tokens`."""
    run = Run(depth=0)
    run.submit(1, 20, max_new_tokens, stops)
    run.step([[B0]])
    run.launch(run.plan(), [run_tokens])
    if abort:
        run.abort(1)
    return run


@pytest.mark.parametrize(
    ("case", "finished_len", "reason"),
    [
        (dict(), 3, FinishReason.STOP),
        (dict(max_new_tokens=2), 2, FinishReason.LENGTH),
        (dict(max_new_tokens=3), 3, FinishReason.STOP),  # the stop token is the last one allowed
        (dict(abort=True), 5, FinishReason.ABORT),  # an abort hides nothing
        (dict(abort=True, max_new_tokens=2), 5, FinishReason.ABORT),
        (dict(stops=()), 5, FinishReason.NONE),  # ends are ignored
        (dict(stops=(), max_new_tokens=5), 5, FinishReason.LENGTH),
        (dict(stops=(), max_new_tokens=4), 4, FinishReason.LENGTH),
    ],
)
def test_ends_inside_a_run(case, finished_len, reason):
    """out = [B0], run = [x, E, y, z]: the run is appended whole, whatever of it is hidden."""
    run = one_verify([2, E, 3, 4], **case)
    requests, ledger, settled = settle(run.state.requests, run.state.ledger, run.state.launched[0], run.results[0])
    assert ledger.kv_committed_len[1] == 24 and seqlen(requests)[1] == 25 and requests.output_len[1] == 5
    assert settled.live.tolist() == [True] and settled.start.tolist() == [1] and settled.num_new.tolist() == [4]
    assert settled.start[0] + settled.num_visible[0] == finished_len
    assert settled.finish_reason.tolist() == [reason]


def test_every_place_of_stops_length_and_abort():
    """3,840 rows in one settle, each against its request taken token by token; half of them with a stop string somewhere."""
    cases = list(
        itertools.product(range(16), range(1, 5), range(2, 7), [False, True], [(E,), (8, E), (), (E,), (), ()])
    )
    stop_at = [NEVER if i % 6 < 3 else 1 + i // 6 % 5 for i in range(len(cases))]
    many = len(cases)
    run = Run(
        depth=0, max_running=many, num_pages=13 * many, context_len=20, max_prefill_rows=many, max_prefill_tokens=many
    )
    run.checked = False  # once, when all is in place
    for serial, (_, _, max_new_tokens, _, stops) in enumerate(cases, 1):
        run.submit(serial, 1, max_new_tokens, stops)
    run.step([[B0]] * len(cases))
    runs = [[E if places >> j & 1 else 2 for j in range(count)] for places, count, *_ in cases]
    run.launch(run.plan(), runs)
    run.results[-1] = dataclasses.replace(run.results[-1], stop_at=np.array(stop_at, np.int32))
    for serial, case in enumerate(cases, 1):
        if case[3]:
            run.abort(serial)
    run.checked = True
    before = run.check()
    launched, settled = run.settle()
    for i, (_, _, max_new_tokens, abort, stops) in enumerate(cases):
        slow = SlowRequest(i + 1, 1, max_new_tokens, stops, output=[B0], aborted=abort)
        shown = slow.take(runs[i], stop_at[i])
        assert settled.num_visible[i] == len(shown), (cases[i], stop_at[i], shown)
        assert settled.finish_reason[i] == slow.reason, cases[i]
        assert settled.num_new[i] == len(runs[i]) and settled.start[i] == 1
        row = launched.rows[i]
        alive = slow.reason is FinishReason.NONE
        assert run.state.ledger.kv_committed_len[row] == (1 + len(runs[i]) if alive else 0)
        assert run.state.requests.epoch[row] == before.requests.epoch[row] + (not alive)


def test_tokens_behind_the_run_are_not_read():
    """A stop id in the padding of the outcome, behind `accept_lens`, stops nobody."""
    run = one_verify([2, 3])
    result = run.results[0]
    tokens = result.next_token_ids.copy()
    tokens[:, 2:] = E
    result = dataclasses.replace(result, next_token_ids=tokens)
    _, _, settled = settle(run.state.requests, run.state.ledger, run.state.launched[0], freeze(result))
    assert settled.finish_reason.tolist() == [FinishReason.NONE] and settled.num_visible.tolist() == [2]


def test_without_stop_ids_nothing_stops():
    run = one_verify([0, 0], stops=())
    _, _, settled = settle(run.state.requests, run.state.ledger, run.state.launched[0], run.results[0])
    assert settled.finish_reason.tolist() == [FinishReason.NONE]


def test_a_prefill_commits_nothing():
    run = Run(depth=1)
    run.submit(1, 20)
    run.step([[B0]])
    before = run.state.ledger
    requests, ledger, settled = settle(run.state.requests, before, run.state.launched[0], run.results[0])
    chex.assert_trees_all_equal(ledger, before)
    assert requests.output_len.tolist() == [0, 1] and settled.num_visible.tolist() == [1]


def test_a_chunk_brings_nothing():
    """In the middle of a prompt a launch emits no token and commits none: its length was committed when planned."""
    run = Run(depth=0, page_size=4, max_prefill_tokens=8)
    run.submit(1, 20, 1, stops=(0,))  # 0 is what the padding of an outcome holds
    run.launch(run.plan(), [[]])
    before = run.state
    requests, ledger, settled = settle(before.requests, before.ledger, before.launched[0], run.results[0])
    chex.assert_trees_all_equal((requests, ledger), (before.requests, before.ledger))
    assert settled.live.tolist() == [True] and settled.start.tolist() == settled.num_new.tolist() == [0]
    assert settled.num_visible.tolist() == settled.finish_reason.tolist() == [0]


@pytest.mark.parametrize(("abort", "reason"), [(False, "ERROR"), (True, "ABORT")])
def test_a_chunk_can_end_a_request(abort, reason):
    """Where its logits are not finite, or an abort was asked for."""
    run = Run(depth=0, page_size=4, max_prefill_tokens=8)
    run.submit(1, 20, 9)
    run.launch(run.plan(), [[] if abort else NOT_FINITE])
    if abort:
        run.abort(1)
    _, settled = run.settle()
    assert settled.finish_reason.tolist() == [FinishReason[reason]] and settled.num_visible.tolist() == [0]
    assert not run.state.requests.serial.any() and run.state.ledger.num_free == 400


def test_a_tail_commits_its_token_and_a_prompt_none():
    """One MIXED launch: row 2 in the middle of its prompt, row 1 with its pending token; then the end of the prompt, and a tail that stops."""
    run = Run(depth=0, max_running=2, page_size=4, max_prefill_tokens=8, mixed=True)
    run.submit(1, 6, stops=(E,))
    run.step([[B0]])
    run.submit(2, 12)
    for runs, reasons in (([[], [2]], ["NONE", "NONE"]), ([[3], [E]], ["NONE", "STOP"])):
        run.launch(run.plan(), runs)
        before = run.state
        launched, result = before.launched[0], run.results[0]
        assert launched.forward_mode is ForwardMode.MIXED and launched.rows.tolist() == [2, 1]
        requests, ledger, settled = settle(before.requests, before.ledger, launched, result)
        assert (ledger.kv_committed_len - before.ledger.kv_committed_len).tolist() == [0, 1, 0]
        assert (requests.output_len - before.requests.output_len).tolist() == [0, 1, len(runs[0])]
        assert settled.num_new.tolist() == settled.num_visible.tolist() == [len(runs[0]), 1]
        assert settled.finish_reason.tolist() == [FinishReason[reason] for reason in reasons]
        run.settle()
    assert run.state.requests.serial.tolist() == [0, 0, 2] and run.lens(2) == (12, 12, 13)


@pytest.mark.parametrize(
    ("token", "max_new_tokens", "reason"), [(E, 9, "STOP"), (2, 1, "LENGTH"), (E, 1, "STOP"), (2, 9, "NONE")]
)
def test_a_prefill_can_end_a_request(token, max_new_tokens, reason):
    run = Run(depth=1)
    run.submit(1, 20, max_new_tokens, (E,))
    run.step([[token]])
    _, settled = run.settle()
    assert settled.finish_reason.tolist() == [FinishReason[reason]] and settled.num_visible.tolist() == [1]
    assert (run.state.requests.serial[1] == 0) == (reason != "NONE")


def two_rows():
    run = Run(depth=0, max_running=2)
    run.submit(1, 20)
    run.submit(2, 11)
    run.step([[B0], [B0]])
    return run


def test_a_row_that_is_not_finite_fails_alone():
    run = two_rows()
    run.step([NOT_FINITE, [2, 3]])
    assert run.state.requests.serial.tolist() == [0, 0, 2]
    assert run.state.requests.output_len.tolist() == [0, 0, 3]
    assert run.state.ledger.kv_committed_len.tolist() == [0, 0, 13]


def test_a_failed_row_emits_nothing():
    run = one_verify(NOT_FINITE)
    requests, ledger, settled = settle(run.state.requests, run.state.ledger, run.state.launched[0], run.results[0])
    assert settled.finish_reason.tolist() == [FinishReason.ERROR] and settled.live.tolist() == [True]
    assert settled.num_new.tolist() == settled.num_visible.tolist() == [0]
    assert requests.output_len[1] == 1 and ledger.kv_committed_len[1] == 20


def test_an_abort_comes_before_a_failure():
    """SGLang's order: a finish that was asked for is taken first, a token that is no number comes second."""
    run = one_verify(NOT_FINITE, abort=True)
    _, _, settled = settle(run.state.requests, run.state.ledger, run.state.launched[0], run.results[0])
    assert settled.finish_reason.tolist() == [FinishReason.ABORT]
    assert settled.num_new.tolist() == settled.num_visible.tolist() == [0]


def test_a_dead_row_changes_nothing():
    """Under overlap the result of a released row, or of a row that has a new owner, is skipped: whatever it says."""
    run = two_rows()
    run.launch(run.plan(), [[2], [2]])
    launched = run.state.launched[0]
    requests, ledger = release(run.state.requests, run.state.ledger, np.array([1], np.int32))
    result = make_result([[E] * 4, [2] * 3])
    after, ledger_after, settled = settle(freeze(requests), freeze(ledger), launched, result)
    assert settled.live.tolist() == [False, True]
    assert settled.num_new.tolist() == settled.num_visible.tolist() == [0, 3]
    assert settled.finish_reason.tolist() == [FinishReason.NONE, FinishReason.NONE]
    assert after.output_len.tolist() == [0, 0, 4] and ledger_after.kv_committed_len.tolist() == [0, 0, 14]


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED])
def test_the_result_of_a_former_owner_is_skipped(mode):
    run = Run(depth=1, max_running=1)
    run.submit(1, 20, max_new_tokens=1)
    run.submit(2, 20)
    run.step([[B0]])
    old = run.state.launched[0]
    run.settle()  # request 1 ends; its row goes to request 2
    run.step([[B0]])
    assert run.state.requests.serial.tolist() == [0, 2] and run.state.requests.epoch.tolist() == [0, 1]
    commits = np.array([mode is not ForwardMode.EXTEND])  # of the MIXED batch it was a tail
    stale = dataclasses.replace(old, commits=commits, forward_mode=mode)
    requests, ledger, settled = settle(run.state.requests, run.state.ledger, stale, make_result([[E] * 4]))
    chex.assert_trees_all_equal((requests, ledger), (run.state.requests, run.state.ledger))
    assert not settled.live.any() and not settled.finish_reason.any() and not settled.num_new.any()


def test_padding_changes_nothing():
    run = two_rows()
    zeros, ones = np.zeros(3, np.int32), np.ones(3, bool)
    launched = Launched(
        forward_iter=np.int32(9), rows=zeros, epochs=zeros, emits=ones, commits=ones, end_lens=zeros,
        forward_mode=ForwardMode.DECODE,
    )  # fmt: skip
    result = make_result([[E] * 4] * 3)
    result = freeze(dataclasses.replace(result, status=np.full(3, RowStatus.NOT_FINITE, np.int32)))
    requests, ledger, settled = settle(run.state.requests, run.state.ledger, launched, result)
    chex.assert_trees_all_equal((requests, ledger), (run.state.requests, run.state.ledger))
    for part in settled:
        assert not part.any()


def test_rows_do_not_depend_on_their_place():
    """Permuting the rows of a launch permutes what is said of them, and changes nothing else."""
    run = Run(depth=0, max_running=4, page_size=4)
    for serial in range(1, 5):
        run.submit(serial, 3 * serial, max_new_tokens=4, stops=(E,))
    run.step([[B0]] * 4)
    runs = [[2, E, 3], [2] * 4, NOT_FINITE, [2]]
    run.launch(run.plan(), runs)
    launched, result = run.state.launched[0], run.results[0]
    requests, ledger, settled = settle(run.state.requests, run.state.ledger, launched, result)
    order = np.array([2, 0, 3, 1])

    def permuted(tree):
        return freeze(jax.tree.map(lambda x: x[order] if np.ndim(x) else x, tree))

    again = settle(run.state.requests, run.state.ledger, permuted(launched), permuted(result))
    chex.assert_trees_all_equal(again, (requests, ledger, permuted(settled)))


def test_settled_has_the_types_it_says():
    run = one_verify([2, 3])
    _, _, settled = settle(run.state.requests, run.state.ledger, run.state.launched[0], run.results[0])
    assert settled.live.dtype == bool
    assert {name: getattr(settled, name).dtype.name for name in settled._fields[1:]} == dict.fromkeys(
        settled._fields[1:], "int32"
    )
