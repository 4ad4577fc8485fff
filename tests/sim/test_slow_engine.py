"""The simulation against a plain Python loop that was written without it: the same launches, tokens, retractions and times."""

import functools

import numpy as np
import pytest
from sim.kit import PAGE_SIZE, parts_of, random_cases

from jspec import sim

COUNTS = (
    "steps", "iterations", "prefills", "verifies", "wasted", "tokens", "verified_tokens", "retractions",
)  # fmt: skip


@functools.cache
def both(count=160, seed=0, **sizes):
    cases = random_cases(count, seed, **sizes)
    return cases, sim.simulate(*parts_of(cases), page_size=PAGE_SIZE), [case.slow_engine().run() for case in cases]


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_those_of_the_slow_engine(name):
    _, report, slow = both()
    np.testing.assert_array_equal(getattr(report, name), [getattr(engine, name) for engine in slow])


def test_rows_launched_are_those_of_the_slow_engine():
    _, report, slow = both()
    np.testing.assert_array_equal(report.row_rounds, [engine.rounds for engine in slow])


def test_every_request_ends_with_its_tokens():
    cases, report, _ = both()
    assert report.complete.all()
    for case, lens in zip(cases, report.output_lens.tolist(), strict=True):
        wanted = [min(m, s) for m, s in zip(case.most, case.stops, strict=True)][: case.count]
        assert lens == wanted + [0] * (len(lens) - case.count)
    np.testing.assert_array_equal(report.tokens, report.output_lens.sum(axis=1))


def test_times_are_those_of_the_slow_engine():
    _, report, slow = both()
    np.testing.assert_allclose(report.seconds, [engine.now for engine in slow], rtol=2e-5)
    np.testing.assert_allclose(report.busy_s, [engine.busy for engine in slow], rtol=2e-5)
    for engine, first, finish in zip(slow, report.first_at_s, report.finish_at_s, strict=True):
        count = len(engine.jobs)
        np.testing.assert_allclose(first[:count], [job.first for job in engine.jobs], rtol=2e-5)
        np.testing.assert_allclose(finish[:count], [job.finish for job in engine.jobs], rtol=2e-5)
        assert np.isnan(first[count:]).all() and np.isnan(finish[count:]).all()


def test_the_cases_have_something_of_everything():
    """Else the comparisons above would compare little."""
    cases, report, slow = both()
    assert (report.retractions > 0).sum() > 15 and report.retractions.max() > 2
    assert (report.wasted > 0).sum() > 30
    chunked = [c for c in cases if max(c.prompts) > c.max_prefill_tokens]
    assert len(chunked) > 50 and any(c.mixed and c.overlap for c in chunked)
    assert sum(report.verified_tokens < report.tokens - report.output_lens.astype(bool).sum(axis=1)) > 20  # tails
    assert sum(c.arrivals[-1] > 0 for c in cases) > 50 and sum(c.count < len(c.prompts) for c in cases) > 10
    assert len({engine.iterations for engine in slow}) > 30


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "seed", "sizes"),
    [*((2000, seed, {}) for seed in range(1, 6)), (60, 0, {"requests": 80, "most_rows": 60})],
)
def test_many_more(count, seed, sizes):
    _, report, slow = both(count, seed, **sizes)
    for name in COUNTS:
        np.testing.assert_array_equal(getattr(report, name), [getattr(engine, name) for engine in slow], err_msg=name)
