"""What each iteration did, against numbers worked out by hand; what must hold between the numbers of any run; and the table of them."""

import re

import pytest
from engine.kit import build, greedy, markov, markov_continuation
from typer.testing import CliRunner

from jspec import SamplingParams
from jspec.cli import app
from jspec.trace.format import read_trace
from jspec.trace.timeline import FIELDS, timeline

from .kit import EOS, RIGHT, WORKERS, WRONG, Watched, encoded, everything_of, frames_of, record, two_requests

BY_HAND = [
    # Pages of 4, windows of 5, one launch ahead: a reserve of 10 past what is committed, rounded up to a page.
    # iter, mode, (free, cached, held) pages, settled in, and of each row:
    #   rid, kind, output_len, committed, allocated, seq_lens, accepted, new_seq_lens, visible, end
    (1, "extend", (39, 0, 1), 2, [("right", "prompt", 0, 3, 3, 0, 1, 3, 1, "")]),
    (2, "decode", (36, 0, 4), 3, [("right", "decode", 0, 3, 16, 3, 5, 8, 5, "")]),
    (3, "extend", (35, 0, 5), 4, [("wrong", "prompt", 0, 1, 1, 0, 1, 1, 1, "")]),
    (
        4,
        "decode",
        (32, 0, 8),
        5,
        [
            # Iterations 1 and 2 are settled: 1 + 5 tokens, of which 5 have KV.
            ("right", "decode", 6, 8, 20, 8, 5, 13, 5, ""),
            # Iteration 3 is not: the host knows of no token, the launch starts behind the prompt.
            ("wrong", "decode", 0, 1, 12, 1, 1, 2, 1, ""),
        ],
    ),
    (
        5,
        "decode",
        (32, 0, 8),
        6,
        [
            # Iteration 4 is not settled: the host is 5 behind. 11 tokens are out by then, so that one of five is the twelfth.
            ("right", "decode", 6, 8, 20, 13, 5, 18, 1, "LENGTH"),
            ("wrong", "decode", 1, 1, 12, 2, 1, 3, 1, ""),
        ],
    ),
    # "right" has its twelfth token under way, so it is left out; in the end nothing is launched, and 6 is settled in itself.
    (6, "decode", (32, 0, 8), 6, [("wrong", "decode", 2, 2, 12, 3, 1, 4, 1, "LENGTH")]),
]


def test_a_run_worked_out_by_hand():
    found = timeline(two_requests().recording)
    for iteration, (forward_iter, mode, pages, settled_in, rows) in zip(found.iterations, BY_HAND, strict=True):
        assert (iteration.forward_iter, iteration.modes, iteration.depth) == (forward_iter, (mode,), 0)
        assert (iteration.pages, iteration.waiting, iteration.settled_in) == (pages, 0, settled_in), forward_iter
        assert iteration.left == []
        for line, (rid, kind, output_len, committed, allocated, seq_lens, accepted, new, visible, end) in zip(
            iteration.lines, rows, strict=True
        ):
            prompt_len, start = {"right": (3, RIGHT), "wrong": (1, WRONG)}[rid]
            assert (line.rid, line.kind, line.rank, line.epoch, line.live) == (rid, kind, 0, 0, True)
            assert line.row == line.serial == {"right": 1, "wrong": 2}[rid]
            assert line.clocks() == {
                "prompt_len": prompt_len,
                "output_len": output_len,
                "seqlen": prompt_len + output_len,
                "cache_protected_len": 0,
                "kv_committed_len": committed,
                "kv_allocated_len": allocated,
                "seq_lens": seq_lens,
                "accept_lens": accepted,
                "new_seq_lens": new,
                "bonus": markov_continuation(start, new - prompt_len + 1)[-1],
            }, (forward_iter, rid)
            assert line.tokens == tuple(
                markov_continuation(start, 20)[new - prompt_len + 1 - accepted : new - prompt_len + 1]
            )
            assert (line.visible, line.finish_reason) == (visible, end)
    right, wrong = found.requests.values()
    assert (right.rid, right.serial, right.rank, right.index, right.prompt) == ("right", 1, 0, 0, "aHbBaA")
    assert (right.prompt_len, right.max_new_tokens, right.priority, right.num_tokens) == (3, 12, 0, 12)
    assert (wrong.num_tokens, wrong.finish_reason, wrong.retractions, wrong.aborted) == (4, "LENGTH", 0, None)
    assert (found.num_pages, found.broken) == (40, None)
    assert right.ended == found.iterations[4].settled and wrong.ended == found.iterations[5].settled


def test_a_prompt_in_chunks_with_a_tail_beside_it():
    """Chunks of 24 of a prompt of 60; the request that decodes moves on by its pending token alone."""

    def run(watched: Watched) -> None:
        watched.submit([WRONG], SamplingParams(max_new_tokens=9, ignore_eos=True), rid="decodes")
        watched.step(3)
        watched.submit([*range(3, 62), RIGHT], SamplingParams(max_new_tokens=3, ignore_eos=True), rid="long")
        watched.drain()

    iterations = timeline(record("oracle", run).recording).iterations
    lines = {it.forward_iter: {line.rid: line for line in it.lines} for it in iterations}
    chunks = [
        (it.forward_iter, lines[it.forward_iter]["long"]) for it in iterations if "long" in lines[it.forward_iter]
    ]
    found = [
        (i, line.kind, line.seq_lens, line.kv_committed_len, line.new_seq_lens, line.accept_lens) for i, line in chunks
    ]
    assert found[:3] == [(4, "chunk", 0, 24, 24, 0), (5, "chunk", 24, 48, 48, 0), (6, "prompt", 48, 60, 60, 1)]
    assert [line.bonus for _, line in chunks[:2]] == [None, None]
    # What a chunk computed is the cache's once it is settled: after the plan of the chunk that follows.
    assert [line.cache_protected_len for _, line in chunks[:5]] == [0, 0, 24, 48, 60]
    tails = [lines[i]["decodes"] for i in (4, 5, 6)]
    assert [(line.kind, line.seq_lens, line.accept_lens, line.new_seq_lens) for line in tails] == [
        ("tail", 3, 1, 4),
        ("tail", 4, 1, 5),
        ("tail", 5, 1, 6),
    ]
    assert [iterations[i - 1].modes for i in (3, 4, 5, 6, 7)] == [("decode",), *[("mixed",)] * 3, ("decode",)]


def test_who_left_and_who_waits():
    found = timeline(everything_of("eagle").recording)
    name = {serial: life.rid for serial, life in found.requests.items()}
    left = [(name[serial], why) for iteration in found.iterations for _, _, serial, why in iteration.left]
    assert ("aborted in its prompt", "ABORT") in left
    retracted = [rid for rid, why in left if why == "retracted"]
    assert any(rid.startswith("low") for rid in retracted) and any(rid.startswith("pressing") for rid in retracted)
    for life in found.requests.values():
        assert life.retractions == retracted.count(life.rid)
    waits = {iteration.waiting for iteration in found.iterations}
    assert 0 in waits and max(waits) >= 1
    assert [life.index for life in found.of_rid("twice")] == [0, 1] and found.of_rid("nobody") == []
    for life in found.requests.values():
        assert (life.aborted is not None) == ("aborted" in life.rid or "late" in life.rid)
    (urgent,) = found.of_rid("urgent")
    assert urgent.priority == 5


@pytest.mark.parametrize("worker", WORKERS)
def test_what_must_hold_between_the_numbers_of_a_line(worker):
    watched, _, recording = everything_of(worker)
    found = timeline(recording, checked=True)
    stride = recording.header.output_stride
    frontier = {}
    for iteration in found.iterations:
        assert sum(iteration.pages) == found.num_pages == 40
        assert min(iteration.pages) >= 0
        assert len({line.row for line in iteration.lines}) == len(iteration.lines)
        for line in iteration.lines:
            assert line.kv_committed_len % 4 == 0 or line.kind != "chunk"
            assert 0 <= line.cache_protected_len <= line.kv_committed_len <= line.kv_allocated_len
            assert line.new_seq_lens <= line.kv_allocated_len
            assert line.seqlen == line.prompt_len + line.output_len
            moved = {"decode": line.accept_lens, "tail": 1}
            if line.kind in moved:
                assert line.seq_lens + moved[line.kind] == line.new_seq_lens
                assert line.seqlen - line.kv_committed_len in (0, 1)
                assert line.kv_committed_len <= line.seq_lens == frontier[line.serial, line.row, line.epoch]
                assert 1 <= line.accept_lens <= (stride if line.kind == "decode" else 1)
            else:
                assert line.new_seq_lens == line.kv_committed_len == line.kv_allocated_len > line.seq_lens
                assert line.accept_lens == (line.kind == "prompt")
                assert (line.new_seq_lens < line.seqlen) == (line.kind == "chunk")
            frontier[line.serial, line.row, line.epoch] = line.new_seq_lens
            assert len(line.tokens) == line.accept_lens
            assert line.bonus == (line.tokens[-1] if line.tokens else None)
            assert 0 <= line.visible <= line.accept_lens and (line.live or line.visible == 0)
            assert line.live or not line.finish_reason
            if line.visible < line.accept_lens and line.live:
                assert line.finish_reason in ("STOP", "LENGTH")
    for life in found.requests.values():
        lines = [line for iteration in found.iterations for line in iteration.lines if line.serial == life.serial]
        tokens = [token for line in lines if line.live for token in line.tokens[: line.visible]]
        output = watched.outputs[life.rid, life.index]
        assert tokens == output.token_ids and len(tokens) == life.num_tokens
        # Once a request has a row, the launches that were settled by then are what its output is made of.
        ends = [line.finish_reason for line in lines if line.finish_reason]
        assert ends in ([], [life.finish_reason])
        assert life.finish_reason == {"timeout": "ABORT"}.get(output.finish_reason, output.finish_reason.upper())
    (ended,) = [
        line for it in found.iterations for line in it.lines if line.rid == "ends inside a run" and line.finish_reason
    ]
    assert EOS in ended.tokens and ended.tokens[ended.visible - 1] == EOS


@pytest.mark.parametrize("worker", ["oracle", "eagle", "two requests"])
def test_times_go_forward(worker):
    recording = two_requests().recording if worker == "two requests" else everything_of(worker).recording
    found = timeline(recording)
    last_settled = last_published = last_committed = last_planned = 0
    for number, iteration in enumerate(found.iterations, 1):
        assert iteration.forward_iter == number
        assert last_planned <= iteration.begun <= iteration.planned <= iteration.dispatched
        assert iteration.dispatched <= iteration.waited <= iteration.ready <= iteration.settled
        assert iteration.begun <= iteration.published <= iteration.ready
        assert last_settled <= iteration.waited and last_published <= iteration.published
        assert (iteration.committed is None) == (worker != "eagle")
        if iteration.committed is not None:
            assert max(last_committed, iteration.published) <= iteration.committed
            last_committed = iteration.committed
        last_settled, last_published, last_planned = iteration.settled, iteration.published, iteration.dispatched
        # With one launch ahead: settled once the next one is launched, or when there is none.
        assert iteration.settled_in in (number, number + 1)
        following = found.iterations[number : iteration.settled_in]
        assert all(other.dispatched <= iteration.waited for other in following)
        after = found.iterations[iteration.settled_in : iteration.settled_in + 1]
        assert all(iteration.settled <= other.begun for other in after)
    for life in found.requests.values():
        assert life.submitted <= (life.aborted or life.ended) <= life.ended


def test_an_outcome_that_was_not_settled_is_not_on_record(tmp_path):
    def run(watched: Watched) -> None:
        watched.submit([RIGHT], SamplingParams(max_new_tokens=30), rid="r")
        watched.step(3)

    found = timeline(record("oracle", run).recording)
    assert [iteration.settled_in for iteration in found.iterations] == [2, 3, None]
    last = found.iterations[-1]
    assert (last.waited, last.ready, last.settled) == (None, None, None) and last.published is not None
    (line,) = last.lines
    assert (line.seq_lens, line.accept_lens, line.new_seq_lens, line.bonus, line.tokens) == (None, None, None, None, ())
    assert found.requests[1].ended is None and found.requests[1].finish_reason == ""
    assert found.requests[1].num_tokens == 6


def test_a_program_seen_to_end_after_the_host_had_its_outcome(tmp_path):
    """The watching thread may wake up late; then the host was the first to know."""
    from jspec.trace.format import read_trace

    data = two_requests().data
    frames = [frame for _, frame in frames_of(data)]
    for frame in frames:
        if frame[0] == "device":
            frame[2] = 1 << 40
    # Written after the settle that they belong to.
    late = sorted(frames, key=lambda frame: frame[0] == "device")
    path = tmp_path / "late.jspec"
    path.write_bytes(data[:8] + b"".join(map(encoded, late)))
    for iteration in timeline(read_trace(path)).iterations:
        assert iteration.published == iteration.ready


# --- the table --------------------------------------------------------------------------------------------------------------


def show(data: bytes, tmp_path, *options: str) -> str:
    path = tmp_path / "run.jspec"
    path.write_bytes(data)
    result = CliRunner().invoke(app, ["trace", "show", str(path), *options])
    assert result.exit_code == 0, result.output
    return result.stdout


def rows_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if re.match(r" +\d+ ", line)]


def test_the_table_holds_every_line(tmp_path):
    text = show(two_requests().data, tmp_path)
    found = timeline(two_requests().recording)
    expected = []
    for iteration in found.iterations:
        for line in iteration.lines:
            clocks = ["·" if value is None else str(value) for value in line.clocks().values()]
            cells = [iteration.forward_iter, line.kind, line.rid, line.row, line.epoch, *clocks, iteration.settled_in]
            expected.append([*map(str, cells), *([line.finish_reason] if line.finish_reason else [])])
    assert rows_of(text) == expected
    header = text.split()
    assert all(name in header for name in FIELDS)
    for clock, owner in (("host", "reserve"), ("launch", "FutureMap"), ("future", "publish")):
        assert clock in header and owner in header


def test_a_part_of_the_table(tmp_path):
    data = two_requests().data
    assert [row[0] for row in rows_of(show(data, tmp_path, "--iter", "2:4"))] == ["2", "3", "4", "4"]
    assert [row[0] for row in rows_of(show(data, tmp_path, "--iter", "5"))] == ["5", "5"]
    assert [row[0] for row in rows_of(show(data, tmp_path, "--iter", "5:"))] == ["5", "5", "6"]
    assert [row[0] for row in rows_of(show(data, tmp_path, "--iter", ":2"))] == ["1", "2"]
    assert {row[2] for row in rows_of(show(data, tmp_path, "--rid", "wrong"))} == {"wrong"}
    assert len(rows_of(show(data, tmp_path, "--iter", ":"))) == 8
    assert rows_of(show(data, tmp_path, "--rid", "wrong", "--iter", "1")) == []


def test_stale_rows_and_what_is_not_known(tmp_path):
    data = everything_of("eagle").data
    late = [
        it.forward_iter
        for it in timeline(everything_of("eagle").recording).iterations
        if not all(line.live for line in it.lines)
    ]
    for number in late[:2]:
        assert any(row[-1] == "stale" for row in rows_of(show(data, tmp_path, "--iter", str(number))))
    cut = [offset for offset, frame in frames_of(data) if frame[0] == "settle"][20]
    assert rows_of(show(data[:cut], tmp_path))[-1][-4:] == ["·", "·", "·", "-"]


def test_names_that_a_terminal_would_act_upon(tmp_path):
    names = ["[bold red]x[/]", "a\x1b[2Jb", "two\nlines", "tab\there", "\x07\x08\r\x0b", "back\u202eward", "\ud800", ""]

    def run(watched: Watched) -> None:
        for name in names:
            watched.submit([WRONG], SamplingParams(max_new_tokens=2), rid=name)
        watched.drain()

    found = record("oracle", run)
    text = show(found.data, tmp_path)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e]", text)
    for shown in (
        "[bold red]x[/]",
        r"a\x1b[2Jb",
        r"two\nlines",
        r"tab\there",
        r"\x07\x08\r\x0b",
        r"back\u202eward",
        r"\ud800",
    ):
        assert f" {shown} " in text
    assert len(rows_of(text)) == sum(len(iteration.lines) for iteration in timeline(found.recording).iterations)
    result = CliRunner().invoke(app, ["trace", "show", str(tmp_path / "run.jspec"), "--rid", "no\x1b[2Jbody"])
    assert (
        result.exit_code == 2
        and "\x1b" not in result.stderr
        and r"'no\x1b[2Jbody' is not in this trace" in result.stderr
    )


def test_a_prompt_is_kept_to_know_it_by_and_no_longer():
    def run(watched: Watched) -> None:
        watched.engine.tokenizer = None
        watched.submit([*range(50), WRONG], SamplingParams(max_new_tokens=2), rid="ids")

    (life,) = timeline(record("oracle", run).recording).requests.values()
    assert life.prompt == " ".join(map(str, [*range(50), WRONG]))[:200]
    (life, *_) = timeline(everything_of("oracle").recording).requests.values()
    assert len(life.prompt) == 120 and life.prompt.isalpha(), "two letters a token"


def test_who_left_in_a_plan_that_launched_nothing(tmp_path):
    """Twice the only request ends in the middle of its prompt, so its plan launches nothing: after the first another comes, after the second nobody."""
    path = tmp_path / "run.jspec"
    engine = build(markov(), page_size=4, max_prefill_tokens=8, prefill_buckets=(8,), overlap=False, trace=str(path))

    def gone(rid: str) -> None:
        engine.submit([1] * 30, greedy(4), rid=rid)
        engine.step()
        engine.abort(rid)
        while engine.has_work:
            list(engine.step())

    gone("first")
    engine.generate([[2, 3]], greedy(3))
    gone("last")
    engine.close()
    found = timeline(read_trace(path))
    first, last = found.requests[1], found.requests[3]
    assert found.iterations[1].left == [(first.ended, 0, 1, "ABORT")] and found.iterations[1].lines[0].serial == 2
    assert [it.forward_iter for it in found.iterations if it.left] == [2]
    assert found.left_last == [(last.ended, 0, 3, "ABORT")] and found.iterations[-1].lines[0].serial == 3
