"""How long a launch takes, against numbers worked out by hand; and how the clock adds launches up."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import sim
from jspec.sim import Work
from jspec.sim.state import Clock
from jspec.sim.step import _tick

CHIP = SimpleNamespace(hbm_gb_per_s=1000.0, bf16_tflops=100.0)
MODEL = dict(params=1e9, num_layers=10, num_heads=16, num_kv_heads=4, head_dim=100)
"""Weights: 2 GB, 2 ms. A token: 2 GFLOP, 20 us. KV of a position: 10 x 2 x 4 x 100 x 2 = 16 kB, 16 ns. A pair: 64 kFLOP, 0.64 ns."""


def work(**changes):
    none = dict(rows=0, width=1, kv_tokens=0.0, draft_steps=0, prefill_rows=0, prefill_tokens=0, prefill_pairs=0.0)
    fields = {**none, **changes}
    floats = ("kv_tokens", "prefill_pairs")
    return Work(**{name: (np.float32 if name in floats else np.int32)(value) for name, value in fields.items()})


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (work(rows=1, kv_tokens=1000), 2e-3 + 1001 * 16e-9),  # waits for weights and KV
        (work(rows=8, width=8, kv_tokens=8000), 2e-3 + 8064 * 16e-9),  # 64 tokens are still free
        (work(rows=100, width=2, kv_tokens=0), 200 * 20e-6 + 200 * 16e-9),  # 200 are not
        (work(rows=1, width=32, kv_tokens=10_000), 2e-3 + 320_000 * 0.64e-9),  # pairs outweigh bytes at this width
        (work(prefill_rows=1, prefill_tokens=1000, prefill_pairs=500_500), 20e-3 + 500_500 * 0.64e-9),
    ],
)
def test_roofline_by_hand(given, seconds):
    model = sim.roofline(CHIP, **MODEL)
    assert float(model.device_s(given)) == pytest.approx(seconds, rel=1e-5)
    slower = sim.roofline(CHIP, **MODEL, bandwidth_share=0.5, compute_share=0.5, launch_s=1e-3)
    assert float(slower.device_s(given)) == pytest.approx(2 * seconds + 1e-3, rel=1e-5)


def test_a_draft_step_is_a_small_roofline():
    model = sim.roofline(CHIP, **MODEL, draft_params=1e8, draft_layers=1, draft_step_s=5e-6)
    plain = float(model.device_s(work(rows=4, kv_tokens=1000)))
    drafted = float(model.device_s(work(rows=4, kv_tokens=1000, draft_steps=3)))
    assert drafted - plain == pytest.approx(3 * (0.2e-3 + 1000 * 1.6e-9 + 5e-6), rel=1e-3)


def test_measured_times_are_met_and_joined():
    table = sim.measured([1, 4, 8], [1, 4], [[1, 2], [3, 6], [5, 10]], prefill_token_s=0.1, draft_step_s=0.25)

    def seconds(**changes):
        return float(table.device_s(work(**changes)))

    assert [seconds(rows=r, width=w) for r in (1, 4, 8) for w in (1, 4)] == [1, 2, 3, 6, 5, 10]
    assert seconds(rows=6, width=1) == 4
    assert seconds(rows=4, width=2) == pytest.approx(4)
    assert seconds(rows=2, width=4) == pytest.approx(2 + 4 / 3)
    assert seconds(rows=4, width=4, draft_steps=3) == 6.75
    assert seconds(prefill_rows=1, prefill_tokens=10) == pytest.approx(2)  # on top of the smallest step
    assert seconds(rows=99, width=9) == 10
    assert float(sim.measured([2], [3], [[7]]).device_s(work(rows=5))) == 7


def ticks(overlap, device_s, host_s, count):
    """Time after each of `count` launches in a row."""
    zero = np.float32(0)
    clock = Clock(now_s=zero, lost=zero, lead_s=zero, busy_s=zero, busy_lost=zero)
    policy = sim.policy(overlap=overlap)
    times = []
    for k in range(count):
        clock = _tick(policy, clock, np.float32(host_s), np.float32(device_s), launches=np.True_,
                      settles=np.bool_(k > 0 or not overlap), next_arrival_s=-np.inf)  # fmt: skip
        times.append(float(clock.now_s))
    return np.array(times), clock


@pytest.mark.parametrize(
    ("overlap", "device_s", "host_s", "step_s"),
    [(True, 1.0, 0.25, 1.0), (False, 1.0, 0.25, 1.25), (True, 0.25, 1.0, 1.0), (False, 0.25, 1.0, 1.25)],
)
def test_overlap_hides_the_shorter_of_host_and_device(overlap, device_s, host_s, step_s):
    times, _ = ticks(overlap, device_s, host_s, 20)
    np.testing.assert_allclose(np.diff(times)[2:], step_s, rtol=1e-5)


def test_short_steps_are_not_lost_in_a_long_run():
    """Three seconds in steps of 10 us: a plain sum in single precision is off by more than a step in a thousand."""
    zero, policy, count = jnp.float32(0), sim.policy(overlap=False), 300_000

    @jax.jit
    def run(clock):
        def tick(clock, _):
            said = dict(launches=True, settles=True, next_arrival_s=-jnp.inf)
            return _tick(policy, clock, jnp.float32(0), jnp.float32(1e-5), **said), None

        return jax.lax.scan(tick, clock, length=count)[0]

    clock = run(Clock(now_s=zero, lost=zero, lead_s=zero, busy_s=zero, busy_lost=zero))
    assert float(clock.now_s) == pytest.approx(3.0, rel=1e-6)
    assert float(clock.busy_s) == pytest.approx(3.0, rel=1e-6)
    assert np.cumsum(np.full(count, 1e-5, np.float32))[-1] != pytest.approx(3.0, rel=1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sim.roofline(CHIP, **{**MODEL, "params": 0}), "params=0 must be above 0"),
        (lambda: sim.roofline(CHIP, **MODEL, bandwidth_share=1.2), r"bandwidth_share=1.2 must lie in \(0, 1\]"),
        (lambda: sim.roofline(CHIP, **MODEL, compute_share=0), "compute_share=0 must lie"),
        (lambda: sim.roofline(CHIP, **MODEL, draft_params=-1), "draft_params=-1 must be at least 0"),
        (lambda: sim.roofline(CHIP, **MODEL, launch_s=-1), "launch_s=-1 must be at least 0"),
        (lambda: sim.measured([4, 1], [1], [[1], [2]]), r"rows=\[4, 1\] must ascend"),
        (lambda: sim.measured([1, 4], [1], [[1]]), r"step_s has shape \(1, 1\), but 2 rows and 1 widths"),
        (lambda: sim.measured([], [1], [[1]]), r"rows=\[\] must be a sequence, not empty"),
        (lambda: sim.measured([1], [1], [[-1]]), "step_s=.* must be at least 0"),
        (lambda: sim.every_step(-1), "seconds=-1 must be at least 0"),
    ],
)
def test_what_is_no_latency_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_every_field_says_how_many_axes_it_has():
    """Else `simulate` would not know which axis is that of configurations."""
    for part in (sim.Roofline, sim.Measured, sim.EveryStep, sim.Policy, sim.Requests, sim.Drawn, sim.Replayed):
        assert set(part.RANKS) == {field.name for field in dataclasses.fields(part)}
