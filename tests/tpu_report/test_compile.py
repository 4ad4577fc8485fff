"""Every kernel compiles ahead of time for every TPU generation, with no TPU, and keeps up with memory in the compiler's own schedule."""

import importlib.util

import pytest

from jspec.tpu_report.chips import CHIPS
from jspec.tpu_report.jobs import MOVE, VERIFY, WRITE, KernelJob, kernel_jobs, step_jobs
from jspec.tpu_report.run import compile_jobs, compile_steps
from jspec.tpu_report.step_time import ratio, step_times
from jspec.tpu_report.steps import MODELS

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="compiling for TPU needs the `tpu` extra (libtpu)"
)


@needs_libtpu
@pytest.mark.parametrize("chip", CHIPS)
def test_every_kernel_compiles(chip):
    for result in compile_jobs([CHIPS[chip]], kernel_jobs(quick=True)):
        assert result.error is None, f"{result.job}: {result.error}"
        pool = 2 * 64 * 4096 * 8 * 2 * 128 * 2
        if result.job.kernel in (WRITE, MOVE):
            assert result.alias_bytes > pool and result.temp_bytes < pool / 100
        elif result.job.kernel == VERIFY and result.job.width == 8:
            assert result.hbm_share == 1.0 and result.temp_bytes < pool / 100
            assert result.bundles_per_512 < (900 if chip != "v4" else 1600)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_how_good(chip):
    """Modelled, 64 rows x 4096, 8 heads x 128, group 4, bf16: bundles a 512-token block, and what features and small pages add."""
    eight = kernel_jobs(quick=True)[0].shape
    cases = {
        "8": KernelJob(VERIFY, eight, 8),
        "8, tree": KernelJob(VERIFY, eight, 8, tree=True),
        "8, page 64": KernelJob(VERIFY, eight, 8, page_size=64),
        "16": KernelJob(VERIFY, eight, 16),
        "16, page 64": KernelJob(VERIFY, eight, 16, page_size=64),
        "32": KernelJob(VERIFY, eight, 32),
    }
    found = dict(zip(cases, compile_jobs([CHIPS[chip]], list(cases.values())), strict=True))
    bundles = {name: result.bundles_per_512 for name, result in found.items()}
    if chip != "v4":
        assert bundles["8"] <= 900 and bundles["16"] <= 1150
        assert all(found[name].hbm_share == 1.0 for name in ("8", "16"))
        assert found["32"].hbm_share >= 0.8
    assert bundles["8, page 64"] <= 1.15 * bundles["8"] and bundles["16, page 64"] <= 1.15 * bundles["16"]
    assert bundles["8, tree"] <= 1.05 * bundles["8"]
    assert found["8, tree"].temp_bytes <= found["8"].temp_bytes


@needs_libtpu
@pytest.mark.slow
def test_a_step_of_the_engine():
    """Pools in place, nothing for the host, no f64. The table of embeddings, which is narrow, stays as it lies: turning it over took 300,000 cycles."""
    steps = compile_steps([CHIPS["v6e"]], step_jobs("SmolLM2-135M", "plain"))
    assert [step.program for step in steps] == ["verify_phase", "prefill_phase", "mixed_phase"]
    verify, *_ = steps
    for step in steps:
        assert step.error is None and step.alias_bytes > step.pool_bytes
        assert step.host_transfers == 0 and not step.f64
    assert verify.temp_bytes < 0.02 * verify.pool_bytes and verify.xla_cycles < 1_900_000


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v6e", "v7x"])
def test_a_choice_of_widths_copies_no_pool(chip):
    """A loop of at most one round, which is in place on CPU, copied the pool on v7x."""
    verify, *_ = compile_steps([CHIPS[chip]], step_jobs("SmolLM2-135M", "ngram"))
    assert verify.program == "verify_phase"
    assert verify.error is None and verify.temp_bytes < 0.15 * verify.pool_bytes


@needs_libtpu
@pytest.mark.slow
def test_a_verify_over_two_devices_costs_little_more_than_a_plain_step():
    steps = compile_steps([CHIPS["v5e"]], step_jobs("Llama-3.1-8B", "plain,verify of 8"))
    plain, verify = (step for step in steps if step.program == "verify_phase")
    assert plain.error is None and verify.error is None and plain.devices == verify.devices == 2
    assert plain.temp_bytes < 0.01 * plain.pool_bytes and plain.alias_bytes > plain.pool_bytes
    times = step_times(steps, lambda model: MODELS[model].num_layers)
    assert [ratio(times, time) for time in times][1] <= 1.15
