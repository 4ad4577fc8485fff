"""Reading schedules, what follows from them, and the pages made of it. Nothing is compiled here."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from typer.testing import CliRunner

from jspec.cli import app
from jspec.spec_workers.upload import DECODE_COLUMNS, EXTEND_COLUMNS
from jspec.tpu_report.chips import CHIPS, chips_named
from jspec.tpu_report.jobs import (
    MOVE,
    PEER,
    PREFILL,
    SHAPES,
    VERIFY,
    WRITE,
    KernelJob,
    StepJob,
    kernel_jobs,
    shape_of,
    step_jobs,
)
from jspec.tpu_report.report import (
    HEADINGS,
    STEP_HEADINGS,
    draw_roofline,
    row,
    step_row,
    time_row,
    write_json,
    write_markdown,
)
from jspec.tpu_report.run import KernelResult, StepResult
from jspec.tpu_report.schedule import Loop, block_loop, estimated_cycles, read_loops, row_bundles, run_loop
from jspec.tpu_report.step_time import StepTime, attention_cycles, ratio
from jspec.tpu_report.steps import MODELS, WORKERS, build, mesh_size, programs

# A kernel as libtpu prints it: an outer loop with a loop over blocks (copies, a delay slot, a spill) and one that only computes.
BUNDLES = """\
LB: loop body
= control target key end

     0   :  { %s1 = inlined_call_operand.hbm [shape: s32[4]] }
   0x1 LB: > { %s2 = sphi %s1 }
   0x2   : > { %v1 = vld [vmem:[#allocation2]] }
   0x3 LB: >> { %24 = dma.hbm_to_vmem [thread:$0]  %s3, 512 }
   0x4   : >> { %v2 = vmatmul.mubr.bf16.gmra.mrb[0].mxu0 %v1 ;;  %v3 = vld [vmem:[#allocation9_spill]] }
   0x5   : >> { %25 = dma.done.wait %s4, 512 }
   0x6   : >> { %26 = sbr.rel (%p1) target = $region3 }
   0x7   :  {} /* End region 3 */
   0x8   :  {}
   0x9 PF: > { %v4 = vadd.f32 %v1, %v2 }
   0xa LB: >> { %v5 = vadd.f32 %v1, %v2 }
   0xb   : >> { %v6 = vadd.f32 %v1, %v2 }
   0xc   : >> { %v7 = vadd.f32 %v1, %v2 }
   0xd   : > { %40 = sbr.rel (!%p2) target = $region1 }
   0xe   :  { %41 = vsyncpa [#allocation3], 1 }
"""

EIGHT, SMALL = (job.shape for job in (kernel_jobs(quick=True)[0], kernel_jobs(quick=True)[1]))


def test_loops_of_a_schedule():
    loops = read_loops(BUNDLES.splitlines())
    assert loops == [
        Loop(depth=1, bundles=13, copies=1, spills=1, has_inner=True),
        Loop(depth=2, bundles=6, copies=1, spills=1, has_inner=False),
        Loop(depth=2, bundles=3, copies=0, spills=0, has_inner=False),
    ]
    assert block_loop(loops) == loops[1]
    assert block_loop(loops[2:]) is None and read_loops([]) == []
    assert row_bundles(loops) == 13 - 6 and row_bundles(loops[1:]) == 0
    assert run_loop(loops, 8).bundles == 13 + 7 * 6 and run_loop(loops[1:], 8) is None


def test_cycles_of_xla_are_those_of_what_runs():
    """Operations inside a fusion are part of it; a loop's body counts once."""
    text = """\
%fused (p: f32[8]) -> f32[8] {
  %a = f32[8] add(%p, %p), backend_config={"estimated_cycles":"1000"}
}
%body (p: f32[8]) -> f32[8] {
  %b = f32[8] fusion(%p), kind=kLoop, calls=%fused, backend_config={"flags":[],"estimated_cycles":"20"}
}
%asked (p: f32[8]) -> f32[8] {
  %e = f32[8] while(%p), condition=%cond, body=%body, backend_config={"estimated_cycles":"500"}
}
%nothing (p: f32[8]) -> f32[8] {
  ROOT %g = f32[8] copy(%p), backend_config={"estimated_cycles":"4"}
}
ENTRY %main (p: f32[8]) -> f32[8] {
  %c = f32[8] while(%p), condition=%cond, body=%body
  %h = f32[8] conditional(%q, %c, %c), branch_computations={%nothing, %asked}
  %i = f32[8] conditional(%q, %h, %h), true_computation=%asked, false_computation=%nothing
  ROOT %d = f32[8] fusion(%i), calls=%fused, backend_config={"estimated_cycles":"3"}
}
"""
    assert estimated_cycles(text) == 20 + 4 + 4 + 3


def test_what_a_verify_costs_against_a_plain_step():
    steps = [
        StepResult("v5e", "Llama-3.1-8B", worker, "verify_phase", devices=2, xla_cycles=cycles)
        for worker, cycles in (("plain", 1500), ("verify of 8", 3000))
    ]
    times = [
        StepTime(s.chip, s.model, s.devices, w, s.xla_cycles / 1500, 1.0) for s, w in zip(steps, (1, 8), strict=True)
    ]
    assert [ratio(times, time) for time in times] == [1.0, 1.5] and ratio(times[1:], times[1]) is None
    assert time_row(times, times[1]) == ("v5e", "2", "Llama-3.1-8B", "8", "2", "1", "3", "1.50")
    # 64 rows of 4 blocks, each as slow as its bytes, and what a row costs beside.
    result = dataclasses.replace(found("v5e"), row_bundles=100)
    assert attention_cycles(result) == pytest.approx(64 * (4 * result.memory_cycles + 100))
    assert shape_of("Qwen3-8B", 2) in SHAPES and shape_of("SmolLM2-135M", 1) == SMALL


@pytest.mark.parametrize(("gib", "devices"), [(16, 2), (32, 1), (95, 1), (8, 4), (4, 8)])
def test_the_smallest_mesh(gib, devices):
    assert mesh_size(StepJob("Llama-3.1-8B", "plain"), gib << 30) == devices
    assert mesh_size(StepJob("SmolLM2-135M", "plain"), gib << 30) == 1


def found(chip="v7x", kernel=VERIFY, *, shape=EIGHT, width=8, tokens=1024, bundles=1500, **case):
    return KernelResult(
        chip, KernelJob(kernel, shape, width, **case), alias_bytes=7, block_tokens=tokens, bundles=bundles, spills=3
    )


def test_share_of_bandwidth():
    """1024 tokens of 8 heads x 2 x 128 in bf16 are 4 MiB: 1138 ns at 3685 GB/s, 2504 cycles of 2.2 GHz."""
    assert found().block_bytes == 4 << 20
    assert found().memory_cycles == pytest.approx((4 << 20) / 3685 * 2.2)
    assert found().hbm_share == 1.0 and found(bundles=5008).hbm_share == pytest.approx(0.5, abs=1e-3)
    assert found().bundles_per_512 == 750
    assert found(dtype="float32").block_bytes == 8 << 20
    assert found(shape=SMALL).block_bytes == 1024 * 3 * 2 * 64 * 2
    # Two cores of a v5p share the rows, and so the bandwidth; JAX's kernel runs on one.
    assert found("v5p").memory_cycles == 2 * found("v5p", PEER).memory_cycles


def test_names_of_chips():
    assert [chip.name for chip in chips_named("")] == ["v4", "v5e", "v5p", "v6e", "v7x"]
    assert [chip.name for chip in chips_named(" v7x, v5e")] == ["v7x", "v5e"]
    with pytest.raises(ValueError, match="chips='v8' is unknown: choose from v4, v5e"):
        chips_named("v5e,v8")


def test_clocks_follow_from_peak_rates():
    """Peak rate = clock x matrix units x rows x columns x 2, twice that where a unit takes two rows a cycle."""
    units = {"v4": 4 * 128**2, "v5e": 4 * 128**2, "v5p": 2 * 4 * 128**2, "v6e": 2 * 2 * 256**2, "v7x": 2 * 2 * 256**2}
    for name, chip in CHIPS.items():
        assert chip.clock_ghz * 2 * units[name] / 1e3 == pytest.approx(chip.bf16_tflops, rel=0.01), name


def test_every_kernel_is_compiled():
    for quick in (True, False):
        assert {job.kernel for job in kernel_jobs(quick=quick)} >= {VERIFY, PREFILL, WRITE, MOVE}
    widths = {job.width for job in kernel_jobs(quick=False) if job.kernel == VERIFY and job.shape == EIGHT}
    assert widths == {1, 4, 8, 16, 32}
    assert {job.model for job in step_jobs()} == set(MODELS) and {job.worker for job in step_jobs()} == set(WORKERS)
    assert [(job.model, job.worker) for job in step_jobs("Qwen3-8B", "plain, ngram")] == [
        ("Qwen3-8B", "plain"),
        ("Qwen3-8B", "ngram"),
    ]
    with pytest.raises(ValueError, match="workers='medusa' is unknown: choose from plain"):
        step_jobs(workers="medusa")


def test_programs_of_a_step():
    """A verify, a prefill, and a prefill with every row of the batch as a tail; of workers that differ in the verify alone only that."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("model",))

    def uploads(worker):
        job = StepJob("SmolLM2-135M", worker)
        return {name: arguments[2].shape for name, _, arguments in programs(job, build(job, mesh), mesh)}

    # 16 rows of 4096 positions in pages of 128; a reserve adds one page at most
    prompts = 1024 + 8 * (EXTEND_COLUMNS + 1 + 32)
    assert uploads("plain") == {
        "verify_phase": (16, DECODE_COLUMNS + 1),
        "prefill_phase": (prompts,),
        "mixed_phase": (prompts + 16 * (DECODE_COLUMNS + 1),),
    }
    assert list(uploads("ngram")) == ["verify_phase", "prefill_phase", "mixed_phase"]
    assert list(uploads("verify of 8")) == ["verify_phase"]


def test_pages(tmp_path):
    results = [
        found(width=width, chip=chip, kernel=kernel)
        for chip in ("v5e", "v7x")
        for kernel in (VERIFY, PEER)
        for width in (1, 8)
    ]
    results.append(KernelResult("v7x", KernelJob(PEER, SMALL, 8), error="ValueError: 6 heads | refused"))
    assert len(row(results[0])) == len(row(results[-1])) == len(HEADINGS)
    assert row(results[0])[4] == "yes" and "6 heads" in row(results[-1])[4]
    steps = [
        StepResult("v5e", "SmolLM2-135M", "plain", "verify_phase", pool_bytes=1000, temp_bytes=25, alias_bytes=1001),
        StepResult("v5e", "Qwen3-8B", "plain", "all", error="one device does not hold it"),
    ]
    assert len(step_row(steps[0])) == len(step_row(steps[1])) == len(STEP_HEADINGS) and step_row(steps[0])[9] == "2.5 %"
    write_json(tmp_path / "report.json", results, steps)
    said = json.loads((tmp_path / "report.json").read_text())
    assert said["modelled"] and set(said["chips"]) == {"v5e", "v7x"} and said["chips"]["v5e"]["clock_source"]
    assert said["kernels"][0]["hbm_share"] == 1.0 and "hbm_share" not in said["kernels"][-1]
    draw_roofline(tmp_path / "roofline.png", results)
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")
    write_markdown(tmp_path / "report.md", results, tmp_path / "roofline.png", steps)
    page = (tmp_path / "report.md").read_text()
    assert "one device does not hold it" in page and said["steps"][0]["pool_bytes"] == 1000
    assert page.count("\n| v5e |") == 7 and "6 heads \\| refused" in page and "1.5 GHz" in page


def test_what_the_command_refuses(monkeypatch):
    said = CliRunner().invoke(app, ["tpu-report", "--chips", "v9"])
    assert said.exit_code == 2 and "chips='v9' is unknown" in said.output
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = CliRunner().invoke(app, ["tpu-report"])
    assert said.exit_code == 2 and "libtpu, which is not installed" in said.output
