"""Requests beside a stream."""

import pytest
from engine.kit import assert_idle, build, greedy, markov, markov_continuation, oracle_worker

from jspec.engine.programs import Program


@pytest.mark.parametrize("read", [1, 3])
@pytest.mark.parametrize("ends", ["closed", "failing"])
def test_b72_a_stream_that_ends_early_keeps_the_emissions_of_others(monkeypatch, ends, read):
    """B72: a request submitted by hand beside a stream that its reader closes, or whose launch fails: no token of it is lost, nor its end."""
    engine, call = build(markov(), worker=oracle_worker()), Program.__call__
    other = engine.submit([3], greedy(9))
    stream = engine.generate([[9]], greedy(100), stream=True)
    for _ in range(read):
        next(stream)
    if ends == "closed":
        stream.close()
    else:
        monkeypatch.setattr(Program, "__call__", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(stream)
        monkeypatch.setattr(Program, "__call__", call)
    tokens, outputs = [], []
    while engine.has_work:
        for emission in engine.step():
            if emission.rid == other:
                tokens += emission.token_ids
                outputs += [emission.output] if emission.output is not None else []
    assert tokens == markov_continuation(3, 9)
    assert [output.token_ids for output in outputs] == [tokens]
    assert_idle(engine)
