"""What crosses to the device and back in a decode iteration, counted on the real engine."""

import numpy as np
import pytest

from jspec.bench.host import measure_host
from jspec.bench.host_probe import counted_traffic, timed_parts
from jspec.bench.stub import VOCAB_SIZE, stub_target, stub_worker
from jspec.bench.tables import console, host_tables
from jspec.config import EngineConfig, SamplingParams
from jspec.engine import Engine

ROWS = 4


@pytest.fixture(scope="module")
def cost():
    return measure_host(ROWS, context_len=1024, page_size=16, iterations=12)


def test_an_iteration_is_two_programs_and_one_download(cost):
    assert cost.traffic["dispatches"] == 2
    assert cost.traffic["downloads"] == 1
    assert cost.traffic["download_bytes"] == ROWS * (3 + 4) * 4  # accept length, frontier, status, a run of 4


def test_an_iteration_uploads_once(cost):
    assert cost.traffic["uploads"] == 1
    assert cost.traffic["upload_bytes"] == ROWS * (4 + 1) * 4  # row, two generations, first page, one new page


def test_traffic_does_not_depend_on_context_length(cost):
    assert cost.short_context_len < cost.context_len
    assert cost.traffic == cost.traffic_short_context


def test_a_prompt_longer_than_one_batch_is_no_part_of_it():
    """Prompts of 2,242 tokens go in chunks, with the rows that decode along: what is counted are decode launches alone, as with a short prompt."""
    cost = measure_host(2, context_len=3072, page_size=16, iterations=4)
    assert cost.prompt_tokens > 2048 > cost.short_context_len and cost.iterations == 4
    assert cost.traffic == cost.traffic_short_context
    assert (cost.traffic["dispatches"], cost.traffic["uploads"], cost.traffic["upload_bytes"]) == (
        2,
        1,
        2 * (4 + 1) * 4,
    )


def test_parts_add_up(cost):
    assert cost.iterations == 12
    assert 0 < cost.host_ms.p10 <= cost.host_ms.median <= cost.host_ms.p90
    assert min(cost.plan_ms, cost.dispatch_ms, cost.settle_ms) > 0
    assert cost.goal_ms is None  # no goal for 4 rows


def test_table_names_every_figure(cost):
    out = console()
    with out.capture() as captured:
        out.print(host_tables([cost]))
    text = captured.get()
    for label in ("host ms", "p10", "p90", "goal", "plan", "pack + dispatch", "settle", "dispatches", "bytes up"):
        assert label in text
    assert "does not depend on context length" in text


def test_a_request_that_rides_along_moves_on_by_a_token():
    """In a MIXED launch the stub's rows emit one token, the first of their run; the probes count decode launches only."""
    config = EngineConfig(max_running=2, context_len=64, page_size=8, overlap=False, checked=True)
    engine = Engine(config, target=stub_target(64), worker=stub_worker())
    engine.submit(np.arange(5), SamplingParams(max_new_tokens=20), rid="a")
    emitted = [[e.token_ids for e in engine.step()] for _ in range(2)]
    engine.submit(np.arange(9), SamplingParams(max_new_tokens=20), rid="b")
    with counted_traffic(engine) as traffic:
        mixed = [(e.rid, e.token_ids) for e in engine.step()]
        assert traffic.launches == traffic.dispatches == traffic.uploads == traffic.downloads == 0
        decode = [(e.rid, e.token_ids) for e in engine.step()]
        assert (traffic.launches, traffic.dispatches) == (1, 2)
    assert emitted == [[[0]], [[0, 1, 2]]]
    assert sorted(mixed) == [("a", [0]), ("b", [0])]
    assert sorted(decode) == [("a", [0, 1, 2]), ("b", [0, 1, 2])]


def test_probes_change_no_token():
    def tokens(probe):
        config = EngineConfig(max_running=2, context_len=64, page_size=8)
        engine = Engine(config, target=stub_target(64), worker=stub_worker())
        engine.submit(np.arange(5) % VOCAB_SIZE, SamplingParams(max_new_tokens=20), rid="a")
        with probe(engine):
            outputs = [e.output for _ in range(20) for e in engine.step() if e.output is not None]
        return outputs[0].token_ids

    assert tokens(timed_parts) == tokens(counted_traffic) == [0] + [0, 1, 2] * 6 + [0]
