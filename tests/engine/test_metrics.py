"""Prometheus metrics: every number is one that can be counted from outside, on an engine whose accept lengths are known in advance."""

import itertools
import re
import threading
import urllib.error
import urllib.request
import weakref
from collections import Counter
from pathlib import Path

import pytest
from engine.kit import (
    assert_idle,
    build,
    greedy,
    markov,
    markov_continuation,
    oracle_accept_lens,
    oracle_worker,
    prompts_of,
    transformer,
)
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from jspec import SamplingParams
from jspec.engine.histogram import Histogram
from jspec.engine.meters import FINISH_REASONS
from jspec.spec_workers import ngram

PROMPTS = [([2], 23), ([5, 25], 16), ([7, 8, 46], 9), ([3], 1), ([1, 2], 12)]
"""Drafts that are accepted, sometimes accepted, refused; one token only; accepted."""


def scraped(text: str) -> dict:
    """`{"name" or "name:label": value}` of a page of metrics, `jspec_` left out."""
    return {
        ":".join((sample.name.removeprefix("jspec_"), *sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def metrics(engine) -> dict:
    return scraped(generate_latest(engine.metrics).decode())


def by_label(found: dict, metric: str) -> dict[str, float]:
    return {name.removeprefix(f"{metric}:"): value for name, value in found.items() if name.startswith(f"{metric}:")}


def finished(found: dict) -> dict[str, float]:
    """By reason, those that happened."""
    return {reason: count for reason, count in by_label(found, "requests_finished_total").items() if count}


POSITIONS = "spec_decode_num_accepted_tokens_per_pos_total"


def drain(engine) -> dict:
    outputs = {}
    while engine.has_work:
        outputs |= {e.rid: e.output for e in engine.step() if e.output is not None}
    return outputs


@pytest.mark.parametrize("settings", [{}, {"overlap": False}, {"mixed_batches": False}, {"max_running": 2}], ids=str)
def test_counts_are_those_of_the_outputs(settings):
    engine = build(markov(), worker=oracle_worker(), **settings)
    before = metrics(engine)
    assert not any(value for name, value in before.items() if re.search("_total|_count|_sum|_bucket", name))
    outputs = engine.generate([prompt for prompt, _ in PROMPTS], [greedy(length) for _, length in PROMPTS])
    if not settings.get("mixed_batches", True):  # no token comes but from the prefill and from verifies
        assert [o.accept_lens for o in outputs] == [oracle_accept_lens(prompt[-1], n) for prompt, n in PROMPTS]
    engine.reset_summary()
    found = metrics(engine)
    lens = [length for output in outputs for length in output.accept_lens]
    assert found["requests_submitted_total"] == 5
    assert finished(found) == {"length": 5}
    assert set(by_label(found, "requests_finished_total")) == set(FINISH_REASONS)
    assert found["generation_tokens_total"] == sum(length for _, length in PROMPTS)
    assert found["prompt_tokens_total"] == sum(len(prompt) for prompt, _ in PROMPTS)
    assert found["cached_tokens_total"] == found["retractions_total"] == found["compiles_after_warmup_total"] == 0
    assert found["verifies_total"] == len(lens)
    assert found["spec_accept_length"] == pytest.approx(sum(lens) / len(lens))
    assert found["spec_decode_num_accepted_tokens_total"] == sum(lens) - len(lens)
    at_least = {str(position): sum(length >= position + 2 for length in lens) for position in range(4)}
    assert by_label(found, POSITIONS) == at_least
    assert at_least["3"] > 0, "the test shows little"
    assert found["time_to_first_token_seconds_count"] == found["e2e_request_latency_seconds_count"] == 5
    assert found["request_time_per_output_token_seconds_count"] == 4  # one had a single token
    assert found["exposed_host_seconds_total"] >= 0 and found["host_seconds_total"] > 0
    assert engine.summary().tokens == engine.summary().verifies == engine.summary().requests == 0
    engine.generate([[9]], greedy(2))
    assert metrics(engine)["requests_submitted_total"] == 6 and engine.summary().requests == 1


def test_the_mean_of_known_accept_lengths():
    """Full runs of five: 1 + 4 * 5 tokens in four verifies, every position accepted each time."""
    engine = build(markov(), worker=oracle_worker())
    engine.generate([[2]], greedy(21))
    found = metrics(engine)
    assert (found["verifies_total"], found["spec_accept_length"]) == (4, 5)
    assert by_label(found, POSITIONS) == {"0": 4, "1": 4, "2": 4, "3": 4}


def test_a_scrape_from_another_thread_loses_nothing(monkeypatch):
    """Somebody looks again and again: each page is sound, none falls back, and the last one has every token, however often the loop counts itself."""
    monkeypatch.setattr("jspec.engine.meters._UNCOUNTED", 3)
    engine = build(markov(), worker=oracle_worker(), checked=False)
    pages, done = [], threading.Event()

    def look():
        while not done.wait(0.005):
            pages.append(metrics(engine))

    thread = threading.Thread(target=look)
    thread.start()
    outputs = engine.generate(prompts_of(16, seed=1), greedy(50))
    done.set()
    thread.join()
    pages.append(metrics(engine))
    lens = [length for output in outputs for length in output.accept_lens]
    assert len(pages) > 2
    for page in pages:
        assert page["kv_free_pages"] + page["kv_cached_pages"] + page["kv_held_pages"] == page["kv_pages"]
    for before, after in itertools.pairwise(pages):
        assert all(after[name] >= before[name] for name in before if name.endswith(("_total", "_count")))
    assert pages[-1]["generation_tokens_total"] == 16 * 50
    assert pages[-1]["verifies_total"] == len(lens)
    assert by_label(pages[-1], POSITIONS)["1"] == sum(length > 2 for length in lens)


def test_plain_decoding_drafts_nothing():
    engine = build(markov(), "plain")
    engine.generate([[2]], greedy(9))
    found = metrics(engine)
    assert (found["verifies_total"], found["decode_steps_total"], found["spec_accept_length"]) == (8, 8, 1)
    assert found["spec_decode_num_accepted_tokens_total"] == 0
    assert by_label(found, POSITIONS) == {}


def test_gauges_are_those_of_the_state_at_every_iteration():
    """Requests that arrive, wait, are retracted and share prefixes, in a small pool: free + cached + held == total whenever anybody looks."""
    worker = ngram(transformer(), num_draft_tokens=5, min_ngram=1)
    engine = build(transformer(), worker=worker, page_size=4, kv_tokens=160, schedule_conservativeness=0.01)
    total, prompts, outputs = engine.num_kv_tokens // 4, prompts_of(8, seed=3, shortest=6, longest=12), {}
    seen = {"kv_held_pages": set(), "kv_cached_pages": set(), "num_queue_reqs": set(), "unsettled_launches": set()}
    for step in itertools.count():
        if step % 3 == 0 and step < 48:
            engine.submit(prompts[step // 6], greedy(40), rid=f"r{step // 3}")
        outputs |= {e.rid: e.output for e in engine.step() if e.output is not None}
        found, state = metrics(engine), engine.state
        assert found["kv_pages"] == total
        assert found["kv_free_pages"] + found["kv_cached_pages"] + found["kv_held_pages"] == total
        assert found["kv_free_pages"] == state.ledger.num_free
        assert found["num_queue_reqs"] == len(state.waiting)
        assert found["num_running_reqs"] == len(state.admitted)
        assert found["new_token_ratio"] == pytest.approx(float(state.new_token_ratio))
        assert found["unsettled_launches"] == len(state.launched)
        assert found["generation_tokens_total"] >= sum(len(o.token_ids) for o in outputs.values())
        for name, values in seen.items():
            values.add(found[name])
        if step >= 48 and not engine.has_work:
            break
    assert all(len(values) > 1 for values in seen.values()), seen
    assert found["kv_held_pages"] == found["num_running_reqs"] == found["num_queue_reqs"] == 0
    assert found["retractions_total"] == sum(o.retractions for o in outputs.values()) > 0
    assert found["cached_tokens_total"] == sum(o.cached_tokens for o in outputs.values()) > 0
    assert found["prompt_tokens_total"] == sum(len(o.prompt_token_ids) for o in outputs.values())
    assert found["generation_tokens_total"] == sum(len(o.token_ids) for o in outputs.values())
    assert found["time_to_first_token_seconds_count"] == len(outputs) == 16  # once each, however often it was retracted
    assert found["request_time_per_output_token_seconds_count"] == found["e2e_request_latency_seconds_count"] == 16
    assert found["verifies_total"] == sum(len(o.accept_lens) for o in outputs.values())
    assert_idle(engine)


def test_requests_are_counted_by_how_they_ended():
    """Every kind that a healthy model has; whoever had no token has no time to the first one."""
    engine = build(markov(), worker=oracle_worker(), max_running=1)
    engine.submit([2], greedy(3))
    engine.submit([2], greedy(30, stop_token_ids=(markov_continuation(2, 9)[-1],)))
    engine.submit([2], greedy(100), rid="runs")
    engine.submit([2], greedy(5), rid="waits")
    engine.submit([2], SamplingParams(max_new_tokens=5, timeout_s=1e-9), rid="late")
    for bad in ([], [1] * 500, [99], "text"):
        with pytest.raises((TypeError, ValueError)):
            engine.submit(bad, greedy(3))
    with pytest.raises(ValueError, match="already names"):
        engine.submit([1], greedy(3), rid="runs")
    assert engine.abort("waits")
    outputs = {}
    while engine.has_work:
        for emission in engine.step():
            if emission.output is not None:
                outputs[emission.rid] = emission.output
            elif emission.rid == "runs":
                engine.abort("runs")
    refused, _ = engine.generate([[], [4]], greedy(2))
    assert refused.finish_reason == "refused"
    found = metrics(engine)
    assert finished(found) == {"length": 2, "stop": 1, "abort": 2, "timeout": 1, "refused": 6}
    assert Counter(o.finish_reason for o in outputs.values()) == {"length": 1, "stop": 1, "abort": 2, "timeout": 1}
    assert len(outputs["runs"].token_ids) > 1 and outputs["waits"].token_ids == outputs["late"].token_ids == []
    assert found["requests_submitted_total"] == 6
    assert found["e2e_request_latency_seconds_count"] == 6
    assert found["time_to_first_token_seconds_count"] == found["prompt_tokens_total"] == 4
    assert_idle(engine)


def test_latencies_of_a_clock_that_only_steps(monkeypatch):
    """Two seconds a step, nothing in between: the first token after one, the end after four more, ten tokens later."""
    now = [100.0]
    monkeypatch.setattr("jspec.engine.meters.time.perf_counter", lambda: now[0])
    engine = build(markov(), "plain", max_running=1, overlap=False)
    engine.submit([2], greedy(5))
    for _ in range(5):
        now[0] += 2
        list(engine.step())
    assert not engine.has_work
    found = metrics(engine)
    for name, seconds in (
        ("time_to_first_token", 2),
        ("request_time_per_output_token", 2),
        ("e2e_request_latency", 10),
    ):
        assert (found[f"{name}_seconds_sum"], found[f"{name}_seconds_count"]) == (seconds, 1)
    assert found["time_to_first_token_seconds_bucket:1.0"] == 0
    assert found["time_to_first_token_seconds_bucket:2.5"] == found["time_to_first_token_seconds_bucket:+Inf"] == 1
    assert found["e2e_request_latency_seconds_bucket:8.0"] == 0
    assert found["e2e_request_latency_seconds_bucket:10.0"] == 1  # a bound is part of its bucket


def test_a_histogram_is_cumulative():
    histogram = Histogram((1, 2, 5))
    for value in (0, 1, 1.5, 5, 6, 600):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2), ("2.0", 3), ("5.0", 4), ("+Inf", 6)]
    assert histogram.sum == 613.5


def get(port: int) -> str:
    with urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=30) as response:
        return response.read().decode()


def test_served_over_http_until_closed():
    """Two engines in one process, each at a port of its own with numbers of its own; a port that is taken is refused by name."""
    with build(markov(), "plain", metrics_port=0) as engine, build(markov(), "plain", metrics_port=0) as other:
        port = engine.metrics_port
        assert port not in (0, other.metrics_port)
        engine.generate([[2], [3]], greedy(4))
        other.generate([[2]], greedy(3))
        page = scraped(get(port))
        assert page == metrics(engine)
        assert page["generation_tokens_total"] == 8 and page["requests_finished_total:length"] == 2
        assert scraped(get(other.metrics_port))["generation_tokens_total"] == 3
        with pytest.raises(OSError, match=f"metrics_port={port}: "):
            build(markov(), "plain", metrics_port=port)
    assert engine.metrics_port is None
    engine.close()
    with pytest.raises(urllib.error.URLError):
        get(port)
    assert engine.generate([[2]], greedy(4))[0].finish_reason == "length"
    assert metrics(engine)["generation_tokens_total"] == 12


def test_nothing_is_served_unless_asked_for():
    engine = build(markov(), "plain")
    assert engine.metrics_port is None
    engine.close()


def test_a_registry_keeps_no_engine_alive():
    engine = build(markov(), "plain")
    registry, gone = engine.metrics, weakref.ref(engine)
    assert b"jspec_kv_pages" in generate_latest(registry)
    del engine
    assert gone() is None and generate_latest(registry) == b""


def test_the_page_is_what_the_readme_says():
    """Every metric is named there, and no other."""
    engine = build(markov(), worker=oracle_worker())
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert set(re.findall(r"\bjspec_[a-z0-9_]+", readme)) == {
        family.name + "_total" * (family.type == "counter") for family in engine.metrics.collect()
    }
