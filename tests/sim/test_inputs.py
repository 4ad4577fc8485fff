"""What cannot be simulated is refused before anything is compiled: field, value, rule."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from jspec import sim


def parts(**changes):
    given = {
        "policy": sim.policy(max_running=2, verify_width=4),
        "requests": sim.closed_batch(num_requests=3, prompt_len=5, max_new_tokens=6),
        "acceptance": sim.geometric(0.5),
        "latency": sim.every_step(),
        **changes,
    }
    return given


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sim.policy(max_running=0), "max_running=0 must be at least 1"),
        (lambda: sim.policy(verify_width=33), "verify_width=33 must be at most 32"),
        (lambda: sim.policy(verify_width=[2, 0]), r"verify_width=\[0\] must be at least 1"),
        (lambda: sim.policy(draft_steps=-1), "draft_steps=-1 must be at least 0"),
        (lambda: sim.policy(kv_pages=2**31), "kv_pages=2147483648 must be at most 2147483647"),
        (lambda: sim.policy(new_token_ratio=0.1, min_new_token_ratio=0.2), "min_new_token_ratio=0.2 exceeds"),
        (lambda: sim.closed_batch(num_requests=0, prompt_len=1, max_new_tokens=1), "num_requests=0 must be at least 1"),
        (lambda: sim.closed_batch(num_requests=2, prompt_len=0, max_new_tokens=1), "prompt_len=0 must be at least 1"),
        (lambda: sim.closed_batch(num_requests=2, prompt_len=[1, 2, 3], max_new_tokens=1), "prompt_len has 3 entries for 2"),
        (lambda: sim.closed_batch(num_requests=2, prompt_len=1, max_new_tokens=1, count=3), "count=3 must be at most 2"),
        (lambda: sim.open_trace(arrival_s=[0, 2, 1], prompt_len=1, max_new_tokens=1), "arrival_s falls at request 2"),
        (lambda: sim.open_trace(arrival_s=[], prompt_len=1, max_new_tokens=1), "must be a sequence, not empty"),
        (lambda: sim.open_trace(arrival_s=[np.inf], prompt_len=1, max_new_tokens=1), r"arrival_s=\[inf\] must be finite"),
        (lambda: sim.recorded_run([], max_new_tokens=1), "outputs is empty"),
        (lambda: sim.grid(width=[]), "width is empty"),
    ],
)  # fmt: skip
def test_values_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sim.policy(max_running=1.5), "max_running=1.5 must be an integer"),
        (lambda: sim.policy(overlap=1), "overlap=1 must be true or false"),
        (lambda: sim.policy(verify_width=True), "verify_width=True must be an integer"),
        (lambda: sim.closed_batch(num_requests=1, prompt_len="long", max_new_tokens=1), "prompt_len='long' must be"),
    ],
)
def test_types_are_refused(make, message):
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"policy": sim.policy(verify_width=4, kv_pages=2)}, {"page_size": 8},
         "kv_pages=2 cannot hold the longest request, which needs 3 pages of 8"),
        ({"policy": sim.policy(max_prefill_tokens=3)}, {"page_size": 8}, "max_prefill_tokens=3 must be at least page_size=8"),
        ({"policy": sim.policy(verify_width=[1, 2]), "acceptance": sim.geometric([0.1, 0.2, 0.3])}, {},
         "verify_width of Policy is given for 2 configurations, but survival of Drawn for 3"),
        ({"acceptance": sim.recorded([[1], [2]])}, {}, "2 requests were recorded, but 3 are simulated"),
        ({"latency": sim.measured([1], [1, 4], [[1, 2]])}, {}, "max_running=2 is beyond the measured 1"),
        ({"latency": sim.measured([8], [1, 2], [[1, 2]])}, {}, "verify_width=4 is beyond the measured 2"),
        ({"policy": sim.policy(verify_width=[[1, 2]])}, {}, "verify_width of Policy has 2 axes: it takes 0, or 1"),
        ({}, {"page_size": 0}, "page_size=0 must be at least 1"),
        ({}, {"max_steps": 0}, "max_steps=0 must be at least 1"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_together_are_refused(changes, settings, message):
    with pytest.raises(ValueError, match=message):
        sim.simulate(**parts(**changes), **settings)


def test_the_shapes_are_the_largest_that_anybody_needs():
    policy = sim.policy(max_running=[2, 7], verify_width=[4, 1], overlap=[True, False])
    run = sim.prepare(**parts(policy=policy), page_size=4)
    assert (run.count, run.scalar) == (2, False)
    assert (run.sizes.rows, run.sizes.reserve_len, run.sizes.num_requests) == (3, 8, 3)  # no more rows than requests
    assert run.sizes.pages_per_row == -(-(5 + 6 + 8) // 4)
    assert run.world.acceptance.survival.shape == (3,)  # what a verify of 4 can ask
    assert sim.prepare(**parts()).scalar


def test_a_smaller_pool_gives_out_the_pages_that_an_engine_would():
    run = sim.prepare(**parts(policy=sim.policy(max_running=2, verify_width=4, kv_pages=[10, 6])), page_size=4)
    ledger = run.init().ledger
    assert ledger.num_free.tolist() == [10, 6]
    assert ledger.free_pages.tolist() == [[10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0], [6, 5, 4, 3, 2, 1, 0, 0, 0, 0, 0]]


def test_a_recorded_run_is_read_off_its_outputs():
    outputs = [
        SimpleNamespace(rid="a", prompt_token_ids=[1, 2], token_ids=[3, 4, 5], accept_lens=[2], finish_reason="stop"),
        SimpleNamespace(rid="b", prompt_token_ids=[1], token_ids=[3], accept_lens=[], finish_reason="length"),
    ]
    requests, acceptance = sim.recorded_run(outputs, max_new_tokens=[9, 1], arrival_s=[0, 4])
    assert requests.prompt_len.tolist() == [2, 1] and requests.stop_len.tolist() == [3, 1]
    assert requests.max_new_tokens.tolist() == [9, 1] and requests.arrival_s.tolist() == [0, 4]
    assert acceptance.lens.tolist() == [[2], [1]] and acceptance.counts.tolist() == [1, 1]
    refused = SimpleNamespace(rid="c", prompt_token_ids=[], token_ids=[], accept_lens=[], finish_reason="refused")
    with pytest.raises(ValueError, match="output c has no tokens \\(finish reason 'refused'\\)"):
        sim.recorded_run([*outputs, refused], max_new_tokens=1)


def test_a_grid_is_every_combination():
    points = sim.grid(width=[1, 4], rate=[0.5, 0.9, 1.0])
    assert points["width"].tolist() == [1, 1, 1, 4, 4, 4]
    assert points["rate"].tolist() == [0.5, 0.9, 1.0] * 2


def test_parts_are_values():
    for part in (sim.policy(), sim.geometric(0.5), sim.every_step()):
        field = dataclasses.fields(part)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, field, 1)
