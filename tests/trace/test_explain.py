"""What is said of a number is true: every figure in every sentence, for every field, kind of row and iteration of runs in which everything happens."""

import dataclasses
import re

import pytest
from typer.testing import CliRunner

from jspec import SamplingParams
from jspec.cli import app
from jspec.trace.explain import explain, line_of
from jspec.trace.format import TraceError
from jspec.trace.timeline import FIELDS, Iteration, Line, Timeline, timeline

from .kit import MIXED, RIGHT, WRONG, Watched, everything_of, record, two_requests


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"-?\d+", text)]


def whys(answers: list[str]) -> list[str]:
    return [answer for answer in answers if answer.startswith("Why ")]


def same(one: Line, other: Line) -> bool:
    return (one.serial, one.row, one.epoch) == (other.serial, other.row, other.epoch)


class Facts:
    """What a reader would work out from the table, about one line of it."""

    def __init__(self, run: Timeline, iteration: Iteration, line: Line):
        self.line, self.iteration, self.run = line, iteration, run
        its = [(it, other) for it in run.iterations for other in it.lines if same(other, line)]
        before = [(it, other) for it, other in its if it.forward_iter < iteration.forward_iter]
        self.before = before[-1] if before else None
        steps = [(it, other) for it, other in before if other.kind in ("tail", "decode")]
        self.flying = [
            (it, other) for it, other in steps if it.settled_in is None or it.settled_in >= iteration.forward_iter
        ]
        self.since = [
            (it, other)
            for it, other in steps
            if (it, other) not in self.flying and it.settled_in >= self.before[0].forward_iter
        ]


def against(difference: int, other: str) -> str:
    if not difference:
        return f"equal to {other}"
    return f"{abs(difference)} {'more' if difference > 0 else 'less'} than {other}"


def check_seqlen(f: Facts, texts: list[str]) -> None:
    (text,) = texts
    assert text.startswith(f"Why {against(f.line.seqlen - f.line.kv_committed_len, 'kv_committed_len')}: ")
    assert ("pending" in text) == (f.line.seqlen == f.line.kv_committed_len + 1 and f.line.kind in ("tail", "decode"))
    if f.line.kind in ("prompt", "chunk"):
        assert numbers(text)[-2:] == [f.line.prompt_len + f.line.output_len, f.line.kv_committed_len]


def check_output_len(f: Facts, texts: list[str]) -> None:
    (text,) = texts
    assert text.startswith(f"Why {f.line.output_len}: ")
    retracted = f.line.output_len > 0 and f.line.seqlen != f.line.kv_committed_len + 1
    retracted |= f.line.output_len > 0 and f.line.kind in ("prompt", "chunk")
    assert ("lost its row" in text) == retracted
    assert numbers(text)[1:] == (
        [f.line.prompt_len]
        if retracted
        else [f.line.prompt_len, f.line.kv_committed_len, f.line.seqlen]
        if f.line.output_len
        else []
    )
    assert ("prefill is not settled" in text) == (
        f.line.kind in ("tail", "decode") and f.line.seqlen == f.line.kv_committed_len
    )


def check_committed(f: Facts, texts: list[str]) -> None:
    if f.line.kind in ("prompt", "chunk"):
        (text,) = texts
        assert numbers(text) == [f.line.kv_committed_len, f.line.kv_committed_len - f.line.seq_lens]
        return
    grown, lag = texts
    before, past = f.before
    grew = f.line.kv_committed_len - past.kv_committed_len
    assert grew == sum(other.accept_lens for _, other in f.since)
    told = [before.forward_iter, *(n for it, other in f.since for n in (it.forward_iter, other.accept_lens))]
    assert numbers(grown) == ([grew, *told] if grew else told)
    assert grown.startswith("Why as much as in iteration" if not grew else f"Why {grew} more than in iteration")
    assert all(f"({other.kind}, accept_lens" in grown for _, other in f.since)
    check_lag(f, lag, f.line.kv_committed_len - f.line.seq_lens, "seq_lens")


def check_lag(f: Facts, text: str, difference: int, other: str) -> None:
    """The host is behind by what was accepted in launches that it had not settled."""
    assert abs(difference) == sum(line.accept_lens for _, line in f.flying)
    assert text.startswith(f"Why {against(difference, other)}: ")
    told = [n for it, line in f.flying for n in (it.forward_iter, line.accept_lens)]
    assert numbers(text) == ([abs(difference), *told] if difference else [])
    assert ("the host knew the frontier" in text) == (not f.flying)


def check_allocated(f: Facts, texts: list[str]) -> None:
    (text,) = texts
    ahead, limits, page = f.line.kv_allocated_len - f.line.kv_committed_len, f.run.header.limits, f.run.header.page_size
    assert text.startswith(f"Why {against(ahead, 'kv_committed_len')}: ")
    if f.line.kind in ("prompt", "chunk"):
        assert ahead == 0 and "no reserve" in text
    else:
        reserve, depth, one, window, said_page = numbers(text)[-5:]
        assert (reserve, depth, window, said_page) == (limits.reserve_len, limits.depth, limits.alloc_len, page)
        assert reserve == (depth + one) * window and ahead >= reserve and f.line.kv_allocated_len % page == 0


def check_protected(f: Facts, texts: list[str]) -> None:
    (text,) = texts
    assert text.startswith(f"Why {against(f.line.cache_protected_len - f.line.kv_committed_len, 'kv_committed_len')}: ")
    assert numbers(text)[-1] == f.run.header.page_size


def check_seq_lens(f: Facts, texts: list[str]) -> None:
    assert texts[0].startswith(f"Why {f.line.seq_lens}: ")
    if f.line.kind in ("prompt", "chunk"):
        assert len(texts) == 1 and "known to the host" in texts[0]
        return
    before, past = f.before
    assert (
        numbers(texts[0]) == [f.line.seq_lens, before.forward_iter, past.new_seq_lens]
        and past.new_seq_lens == f.line.seq_lens
    )
    check_lag(f, texts[1], f.line.seq_lens - f.line.kv_committed_len, "kv_committed_len")


def check_new_seq_lens(f: Facts, texts: list[str]) -> None:
    (text,) = texts
    if f.line.kind in ("prompt", "chunk"):
        assert numbers(text)[0] == f.line.new_seq_lens
        assert ("no +1" in text) == (f.line.kind == "prompt") and ("nothing is sampled" in text) == (
            f.line.kind == "chunk"
        )
    else:
        one, other = numbers(text.partition(":")[0])
        assert one + other == f.line.new_seq_lens and one == f.line.seq_lens
        assert ("the only +1" in text) == (f.line.kind == "tail")


def check_accept_lens(f: Facts, texts: list[str]) -> None:
    assert texts[0].startswith(f"Why {f.line.accept_lens}")
    if f.line.kind == "decode":
        header = f.run.header
        assert numbers(texts[0]) == [
            f.line.accept_lens,
            header.output_stride,
            f.line.accept_lens - 1,
            header.verify_width,
        ]
        assert ("1 draft was right" in texts[0]) == (f.line.accept_lens == 2)
    hidden = f.line.accept_lens - f.line.visible if f.line.live else 0
    assert len(texts) == 1 + (hidden > 0)
    if hidden:
        assert numbers(texts[1]) == [hidden] and f"({f.line.finish_reason})" in texts[1]


def check_bonus(f: Facts, texts: list[str]) -> None:
    (text,) = texts
    assert numbers(text) == [f.line.tokens[-1]]
    assert ("The request ended" in text) == bool(f.line.finish_reason)
    assert ("the next launch writes" in text) == (f.line.live and not f.line.finish_reason)


CHECKS = {
    "prompt_len": lambda f, texts: texts == [] or pytest.fail(str(texts)),
    "output_len": check_output_len,
    "seqlen": check_seqlen,
    "cache_protected_len": check_protected,
    "kv_committed_len": check_committed,
    "kv_allocated_len": check_allocated,
    "seq_lens": check_seq_lens,
    "accept_lens": check_accept_lens,
    "new_seq_lens": check_new_seq_lens,
    "bonus": check_bonus,
}


def check_line(run: Timeline, iteration: Iteration, line: Line, field: str) -> None:
    answers, value, about = explain(run, line, iteration, field), line.clocks()[field], FIELDS[field]
    said = "none" if value is None else str(value)
    assert answers[0] == f"{field} = {said}: {about.text}."
    assert answers[1].startswith(f"Which clock: {about.time}: ")
    assert answers[2] == f"Which owner: {about.owner}; nothing else writes it."
    assert answers[3] == f"Which boundary: {about.boundary}."
    mode = {"chunk": ("EXTEND", "MIXED"), "prompt": ("EXTEND", "MIXED"), "tail": ("MIXED",), "decode": ("DECODE",)}
    (said_mode,) = re.findall("^Which mode: ([A-Z]+): ", answers[4])
    assert said_mode in mode[line.kind] and said_mode == iteration.modes[0].upper()
    rest = answers[5:]
    stale = [answer for answer in rest if answer.startswith("Stale: ")]
    assert bool(stale) == (not line.live and about.time == "future")
    assert all(answer.startswith(("Why ", "Stale: ")) and answer.endswith(".") for answer in rest)
    if value is None:
        assert field == "bonus" and line.kind == "chunk" and not whys(answers)
    else:
        CHECKS[field](Facts(run, iteration, line), whys(answers))
    for answer in answers:
        assert ": :" not in answer and "  " not in answer and ".." not in answer and "None" not in answer, answer


def runs():
    found = {worker: timeline(everything_of(worker).recording) for worker in ("oracle", "eagle")}
    return {**found, "two requests": timeline(two_requests().recording)}


@pytest.mark.parametrize("field", FIELDS)
def test_every_figure_is_right(field):
    kinds = set()
    for run in runs().values():
        for iteration in run.iterations:
            for line in iteration.lines:
                check_line(run, iteration, line, field)
                kinds.add((line.kind, line.live))
    assert kinds >= {(kind, True) for kind in ("prompt", "chunk", "tail", "decode")} | {("decode", False)}


def test_a_stay_on_another_row_of_the_same_epoch_is_another_stay():
    """Retracted with a launch under way, a request begins again on a row whose epoch happens to be the same: that launch is not its own any more."""

    def run(watched: Watched) -> None:
        for i in range(4):
            watched.submit([WRONG], SamplingParams(max_new_tokens=30 if i else 6, ignore_eos=True), rid=f"r{i}")
        watched.step(6)
        # Row 1 comes free while "r3" is retracted for the urgent one, which takes row 4 or row 1.
        watched.submit([MIXED], SamplingParams(max_new_tokens=3, ignore_eos=True, priority=1), rid="urgent")
        watched.drain()

    found = timeline(record("oracle", run).recording)
    # The same run with every epoch 0, as rows have them that nobody left before.
    for iteration in found.iterations:
        iteration.lines = [dataclasses.replace(line, epoch=0) for line in iteration.lines]
    rows = {}
    for iteration in found.iterations:
        for line in iteration.lines:
            rows.setdefault(line.serial, set()).add(line.row)
    assert any(len(several) > 1 for several in rows.values()), "nobody changed its row"
    for iteration in found.iterations:
        for line in iteration.lines:
            for field in ("kv_committed_len", "seq_lens"):
                check_line(found, iteration, line, field)


def test_the_answers_in_full():
    """As they are read: one field of each clock, of a row that runs a launch ahead of the host."""
    run = timeline(two_requests().recording)
    iteration, line = line_of(run, "right", 5)
    assert explain(run, line, iteration, "kv_committed_len") == [
        "kv_committed_len = 8: KV the host knows to be right.",
        "Which clock: host-settled: what the host knew when it planned this launch; it lags behind the device by the launches that were not settled yet.",
        "Which owner: settle; prepare_extend for prompt tokens; nothing else writes it.",
        "Which boundary: committed.",
        "Which mode: DECODE: a verify of the pending token and the drafts behind it.",
        "Why as much as in iteration 4: no step of it was settled since.",
        "Why 5 less than seq_lens: not settled when this was planned: iteration 4 accepted 5; one launch may bring many tokens.",
    ]
    assert explain(run, line, iteration, "seq_lens")[5:] == [
        "Why 13: what iteration 4 published (new_seq_lens 13).",
        "Why 5 more than kv_committed_len: not settled when this was planned: iteration 4 accepted 5; one launch may bring many tokens.",
    ]
    assert explain(run, line, iteration, "accept_lens")[5:] == [
        "Why 5 of at most 5: 4 drafts were right, and one token is the target's own; the verify is 5 tokens wide.",
        "Why 4 more than the user sees: the request ended inside the run (LENGTH).",
    ]
    assert explain(run, line, iteration, "output_len")[5:] == [
        "Why 6: every token of the launches that were settled, after a prompt of 3. The last one is pending: 8 tokens have KV, of 9."
    ]
    assert explain(run, line, iteration, "bonus")[5:] == [
        "Why 6: the last token of its run. The request ended (LENGTH), so nobody needs its KV."
    ]
    assert explain(run, line, iteration, "prompt_len")[5:] == []


def test_before_its_outcome_is_settled():
    def run(watched: Watched) -> None:
        watched.submit([RIGHT], SamplingParams(max_new_tokens=30), rid="r")
        watched.step(3)

    found = timeline(record("oracle", run).recording)
    iteration, line = line_of(found, "r", 3)
    for field in ("seq_lens", "accept_lens", "new_seq_lens", "bonus"):
        answers = explain(found, line, iteration, field)
        assert answers[0].startswith(f"{field} = not on record: the trace ends before its outcome was settled: ")
        assert len(answers) == 5
    assert explain(found, line, iteration, "kv_committed_len")[5:] == [
        "Why as much as in iteration 2: no step of it was settled since."
    ]


def test_the_line_of_a_request():
    run = timeline(everything_of("eagle").recording)
    (first, second) = run.of_rid("twice")
    for index, life in enumerate((first, second)):
        ran = [it for it in run.iterations if any(line.serial == life.serial for line in it.lines)]
        _, line = line_of(run, "twice", ran[0].forward_iter, index=index)
        assert line.serial == life.serial
    with pytest.raises(TraceError, match="rid='aborted at once' did not run in iteration 3: it never ran"):
        line_of(run, "aborted at once", 3)
    with pytest.raises(TraceError, match=r"rid='nobody' is not in this trace: it holds 'long', .*\.\.\.$"):
        line_of(run, "nobody", 3)


def test_the_command(tmp_path):
    path = tmp_path / "run.jspec"
    path.write_bytes(two_requests().data)
    run = timeline(two_requests().recording)
    iteration, line = line_of(run, "wrong", 4)
    for field in FIELDS:
        options = ["--rid", "wrong", "--iter", "4", "--field", field]
        result = CliRunner().invoke(app, ["trace", "explain", str(path), *options])
        assert result.exit_code == 0 and result.stdout.splitlines() == explain(run, line, iteration, field)
