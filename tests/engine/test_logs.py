"""Log records: what happens to a request, one record an event, with the numbers of its output; and the same as JSON lines."""

import datetime
import io
import itertools
import json
import logging

import pytest
from engine.kit import assert_idle, build, greedy, markov, oracle_worker, prompts_of, transformer

from jspec import SamplingParams
from jspec.engine import events
from jspec.engine.json_logs import JsonFormatter
from jspec.spec_workers import ngram

LOGGER = "jspec.engine"


@pytest.fixture
def lines():
    """Installs a handler that writes JSON, at INFO; returns a function that reads what it wrote since."""
    written, logger = io.StringIO(), logging.getLogger(LOGGER)
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonFormatter())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)

    def read() -> list[dict]:
        found = [json.loads(line) for line in written.getvalue().splitlines()]
        written.seek(0)
        written.truncate()
        return found

    yield read
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def facts(line: dict) -> dict:
    """What an event says, without what depends on the clock."""
    assert datetime.datetime.fromisoformat(line["time"]).utcoffset() == datetime.timedelta()
    assert line["level"] == "DEBUG" if line["event"] == "launched" else "INFO"
    return {name: value for name, value in line.items() if name not in ("time", "level", "seconds")}


def drain(engine) -> dict:
    outputs = {}
    while engine.has_work:
        outputs |= {e.rid: e.output for e in engine.step() if e.output is not None}
    return outputs


def test_the_life_of_a_request(lines):
    engine = build(markov(), worker=oracle_worker(), page_size=4)
    prompt = [*range(1, 11), 2]
    engine.submit(prompt, greedy(21, priority=3), rid="mine")
    (submitted,) = lines()
    expected = {"prompt_tokens": 11, "max_new_tokens": 21, "priority": 3}
    assert facts(submitted) == {"event": "submitted", "rid": "mine", **expected}
    (output,) = drain(engine).values()
    started, ended = lines()
    assert facts(started) == {"event": "started", "rid": "mine", "row": 1, "cached_tokens": 0}
    assert output.accept_lens == [5, 5, 5, 5]
    expected = {"finish_reason": "length", "tokens": 21, "accept_length": 5.0}
    assert facts(ended) == {"event": "finished", "rid": "mine", **expected}
    assert ended["seconds"] > 0
    again = engine.generate([[*prompt, 4]], greedy(1000))[0]
    submitted, started, ended = map(facts, lines())
    assert submitted["rid"] == started["rid"] == ended["rid"] == again.rid
    assert submitted["max_new_tokens"] == 128 - 12  # what the context holds
    assert started["cached_tokens"] == again.cached_tokens == 8
    assert ended["accept_length"] == pytest.approx(sum(again.accept_lens) / len(again.accept_lens))


def test_several_answers_to_a_prompt_are_told_apart(lines):
    engine = build(markov(), "plain", max_running=2)
    engine.submit([1], greedy(2, n=2), rid="both")
    drain(engine)
    found = [facts(line) for line in lines()]
    assert {line["rid"] for line in found} == {"both"}
    for index in (0, 1):
        own = [line["event"] for line in found if line["index"] == index]
        assert own == ["submitted", "started", "finished"]


def test_a_single_token_has_no_accept_length(lines):
    build(markov(), "plain").generate([[1]], greedy(1))
    assert facts(lines()[-1])["accept_length"] == 0


def test_refusals_say_why(lines):
    engine = build(markov(), "plain")
    refused, ran = engine.generate([[], [1]], greedy(2))
    found = lines()
    assert facts(found[0]) == {"event": "refused", "rid": refused.rid, "error": refused.error}
    assert [(line["event"], line["rid"]) for line in found[1:]] == [
        (event, ran.rid) for event in ("submitted", "started", "finished")
    ]
    for rid in ("mine", None):
        with pytest.raises(ValueError) as error:
            engine.submit([1, 99], greedy(2), rid=rid)
        assert [facts(line) for line in lines()] == [{"event": "refused", "rid": rid, "error": str(error.value)}]


def test_ends_that_are_no_ends_of_text(lines):
    """Aborted while it waits, while it runs, and out of time: each is told once, as finished."""
    engine = build(markov(), worker=oracle_worker(), max_running=1)
    engine.submit([2], greedy(100), rid="runs")
    engine.submit([2], greedy(5), rid="waits")
    engine.submit([2], SamplingParams(max_new_tokens=5, timeout_s=1e-9), rid="late")
    engine.abort("waits")
    outputs = {e.rid: e.output for _ in range(3) for e in engine.step() if e.output is not None}
    engine.abort("runs")
    outputs |= drain(engine)
    ended = [facts(line) for line in lines() if line["event"] == "finished"]
    assert [(e["rid"], e["finish_reason"]) for e in ended] == [
        ("waits", "abort"),
        ("late", "timeout"),
        ("runs", "abort"),
    ]
    for event in ended:
        assert event["tokens"] == len(outputs[event["rid"]].token_ids)
    assert ended[2]["tokens"] > 1


def test_a_retraction_for_want_of_pages(lines):
    worker = ngram(transformer(), num_draft_tokens=5, min_ngram=1)
    engine = build(transformer(), worker=worker, page_size=4, kv_tokens=160, schedule_conservativeness=0.01)
    outputs = engine.generate(prompts_of(8, seed=3, shortest=2, longest=12), greedy(50))
    found = lines()
    for output in outputs:
        own = [line for line in found if line["rid"] == output.rid]
        middle = ["retracted", "started"] * output.retractions
        assert [line["event"] for line in own] == ["submitted", "started", *middle, "finished"]
        assert own[1]["cached_tokens"] == output.cached_tokens
        told = [line["output_tokens"] for line in own if line["event"] == "retracted"]
        assert told == sorted(told) and all(count < 50 for count in told)
        for before, line in itertools.pairwise(own):
            if line["event"] == "retracted":
                assert (line["row"], line["why"]) == (before["row"], "kv_pages")
    assert any(output.retractions for output in outputs)
    assert_idle(engine)


def test_a_retraction_for_priority(lines):
    engine = build(transformer(), "plain", max_running=1)
    engine.submit([1, 2, 3], greedy(30), rid="low")
    for _ in range(4):
        list(engine.step())
    engine.submit([4, 5], greedy(3, priority=1), rid="high")
    outputs = drain(engine)
    found = [facts(line) for line in lines()]
    (gone,) = (line for line in found if line["event"] == "retracted")
    assert 0 < gone.pop("output_tokens") < 30
    assert gone == {"event": "retracted", "rid": "low", "row": 1, "why": "priority"}
    story = [(line["event"], line["rid"]) for line in found if line["event"] in ("started", "finished")]
    assert story == [
        ("started", "low"),
        ("started", "high"),
        ("finished", "high"),
        ("started", "low"),
        ("finished", "low"),
    ]
    assert [outputs[rid].retractions for rid in ("low", "high")] == [1, 0]


@pytest.mark.parametrize("mixed", [True, False])
def test_debug_tells_every_launch(lines, mixed):
    logging.getLogger(LOGGER).setLevel(logging.DEBUG)
    engine = build(markov(), worker=oracle_worker(), max_running=2, mixed_batches=mixed, prefix_cache=False)
    prompts = [[1, 2, 3], [25] * 7, [46] * 5]
    outputs = engine.generate(prompts, greedy(9))
    launches = [facts(line) for line in lines() if line["event"] == "launched"]
    assert [line["forward_iter"] for line in launches] == [*range(1, int(engine.state.forward_iter) + 1)]
    assert all(line["rid"] is None for line in launches)
    assert launches[0] == {
        "event": "launched",
        "rid": None,
        "forward_iter": 1,
        "mode": "extend",
        "rows": 2,
        "tokens": 10,
    }
    for line in launches[1:]:
        if line["mode"] == "decode":
            assert line["rows"] == line["tokens"] in (1, 2)
        else:
            riding = int(line["mode"] == "mixed")
            assert (line["rows"], line["tokens"]) == (1 + riding, 5 + riding)
    assert {line["mode"] for line in launches} == {"extend", "decode"} | ({"mixed"} if mixed else set())
    assert {o.finish_reason for o in outputs} == {"length"}


def test_what_nobody_reads_is_not_made(monkeypatch):
    def unexpected(*args, **kwargs):
        raise AssertionError("a record was made")

    monkeypatch.setattr(events, "_say", unexpected)
    assert not logging.getLogger(LOGGER).isEnabledFor(logging.INFO)
    engine = build(markov(), worker=oracle_worker(), max_running=1)
    engine.submit([2], greedy(9), rid="low")
    list(engine.step())
    engine.submit([3], greedy(9, priority=1))
    assert {o.finish_reason for o in drain(engine).values()} == {"length"}
    engine.generate([[]], greedy(1))


def test_a_plain_handler_gets_one_readable_line(caplog):
    with caplog.at_level(logging.INFO, logger=LOGGER):
        build(markov(), "plain").submit([1, 2], greedy(3), rid="a\nb")
    (record,) = caplog.records
    assert record.getMessage() == r"submitted rid='a\nb' prompt_tokens=2 max_new_tokens=3 priority=0"
    assert (record.name, record.event, record.rid, record.prompt_tokens) == (LOGGER, "submitted", "a\nb", 2)


def test_json_of_other_records():
    """A record that is no event keeps its message; an exception and values that JSON does not know become strings."""
    try:
        raise RuntimeError("broken\nin two lines")
    except RuntimeError:
        record = logging.getLogger("other").makeRecord(
            "other",
            logging.ERROR,
            __file__,
            1,
            "it %s",
            ("fell",),
            logging.sys.exc_info(),
            extra={"what": {1, 2}.__class__},
        )
    line = JsonFormatter().format(record)
    assert "\n" not in line
    found = json.loads(line)
    assert found["time"].endswith("+00:00")
    assert (found["level"], found["message"], found["what"]) == ("ERROR", "it fell", "<class 'set'>")
    assert found["exception"].endswith("RuntimeError: broken\nin two lines")
