"""A request whose time runs out ends with the tokens it has, waiting or running; nothing else changes, and nothing stays held."""

import pytest
from engine.kit import assert_idle, build, greedy, markov, markov_continuation, oracle_worker

from jspec import SamplingParams


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only when it is told to."""
    now = [100.0]
    monkeypatch.setattr("jspec.engine.engine.time.monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("overlap", [True, False])
def test_a_running_request_and_a_waiting_one(clock, overlap):
    engine = build(markov(), worker=oracle_worker(), max_running=2, overlap=overlap)
    late = engine.submit([2], SamplingParams(max_new_tokens=60, timeout_s=5))
    beside = engine.submit([25], greedy(40))
    waiting = engine.submit([45], SamplingParams(max_new_tokens=9, timeout_s=4))
    in_time = engine.submit([46], SamplingParams(max_new_tokens=9, timeout_s=1000))
    outputs, steps = {}, 0
    while engine.has_work:
        steps += 1
        clock[0] += 1.5
        for emission in engine.step():
            if emission.output is not None:
                outputs[emission.rid] = (steps, emission.output)
    step, output = outputs[waiting]
    assert step == 3 and output.finish_reason == "timeout" and output.token_ids == []
    step, output = outputs[late]
    assert step in (4, 5) and output.finish_reason == "timeout" and 0 < len(output.token_ids) < 60
    assert output.token_ids == markov_continuation(2, len(output.token_ids))
    assert len(output.token_ids) == 1 + sum(output.accept_lens)
    for rid, start, count in ((beside, 25, 40), (in_time, 46, 9)):
        assert outputs[rid][1].token_ids == markov_continuation(start, count)
        assert outputs[rid][1].finish_reason == "length"
    assert_idle(engine)


def test_one_that_ended_in_time_and_one_aborted_are_not_late(clock):
    engine = build(markov(), worker=oracle_worker(), max_running=2)
    params = SamplingParams(max_new_tokens=3, timeout_s=1)
    (output,) = engine.generate([[2]], params)
    assert output.finish_reason == "length"
    clock[0] += 10
    rid = engine.submit([2], SamplingParams(max_new_tokens=50, timeout_s=1))
    engine.step()
    engine.abort(rid)
    clock[0] += 10
    outputs = [e.output for _ in range(4) for e in engine.step() if e.output]
    assert [o.finish_reason for o in outputs] == ["abort"]
    assert_idle(engine)
