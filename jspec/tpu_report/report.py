"""What was found, as a table, as JSON and as a Markdown page with a roofline plot."""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from jspec.tpu_report.chips import CHIPS
from jspec.tpu_report.jobs import PEER, SHAPES, VERIFY
from jspec.tpu_report.run import KernelResult, StepResult
from jspec.tpu_report.step_time import StepTime, ratio

HEADINGS = (
    "chip", "kernel", "heads", "case", "compiles", "temp bytes", "alias bytes", "block", "bundles", "per 512 tokens", "memory cycles", "share of HBM", "spills",
)  # fmt: skip

STEP_HEADINGS = (
    "chip", "devices", "model", "worker", "program", "compiles", "KV pool", "aliased", "temp bytes", "temp / pool", "host transfers", "f64", "compile s",
)  # fmt: skip

TIME_HEADINGS = ("chip", "devices", "model", "W", "XLA us", "attention us", "sum us", "against W = 1")

EXPLAINED = (
    "Modelled: compiled ahead of time, nothing here ran on a TPU. A bundle is one cycle where nothing stalls; memory cycles are those in which the "
    "bytes of one block of keys arrive at the peak bandwidth; the share is memory cycles / bundles, at most 1. The model sees no latency of copies, "
    "no bank conflict and no contention. Temp bytes of a call include what XLA does before and after the kernel."
)


TIMES_EXPLAINED = (
    "XLA's operations by XLA's own cost model, which is pessimistic where memory is the bound; attention from its schedule. The KV write, the host and "
    "what devices wait for each other are left out."
)


def versions() -> dict[str, str]:
    """Of what compiled."""
    found = {}
    for name in ("jspec", "jax", "libtpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def row(result: KernelResult) -> tuple[str, ...]:
    """One line of the table, in the order of `HEADINGS`."""
    job, shape = result.job, SHAPES[result.job.shape]
    heads = f"{shape.num_kv_heads} x {shape.head_dim}, group {shape.group}"
    start = (result.chip, job.kernel, heads, job.label)
    if result.error:
        return (*start, result.error, *("-" for _ in HEADINGS[5:]))
    loop = ("-",) * 6
    if result.block_tokens:
        loop = (
            str(result.block_tokens),
            str(result.bundles),
            f"{result.bundles_per_512:.0f}",
            f"{result.memory_cycles:.0f}",
            f"{result.hbm_share:.2f}",
            str(result.spills),
        )
    return (*start, "yes", f"{result.temp_bytes:,}", f"{result.alias_bytes:,}", *loop)


def step_row(result: StepResult) -> tuple[str, ...]:
    """One line of the table of steps, in the order of `STEP_HEADINGS`."""
    start = (result.chip, str(result.devices), result.model, result.worker, result.program)
    if result.error:
        return (*start, result.error, *("-" for _ in STEP_HEADINGS[6:]))
    return (
        *start,
        "yes",
        f"{result.pool_bytes:,}",
        f"{result.alias_bytes:,}",
        f"{result.temp_bytes:,}",
        f"{100 * result.temp_bytes / max(result.pool_bytes, 1):.1f} %",
        str(result.host_transfers),
        "yes" if result.f64 else "no",
        f"{result.compile_s:.0f}",
    )


def time_row(times: Sequence[StepTime], time: StepTime) -> tuple[str, ...]:
    """One line of the table of modelled times, in the order of `TIME_HEADINGS`."""
    against = ratio(times, time)
    return (
        time.chip,
        str(time.devices),
        time.model,
        str(time.width),
        f"{time.xla_us:,.0f}",
        f"{time.attention_us:,.0f}",
        f"{time.total_us:,.0f}",
        "-" if against is None else f"{against:.2f}",
    )


def write_json(
    path: pathlib.Path,
    results: Sequence[KernelResult],
    steps: Sequence[StepResult] = (),
    times: Sequence[StepTime] = (),
) -> None:
    """All figures, with what they rest on."""
    found = []
    for result in results:
        names = ("bundles_per_512", "memory_cycles", "hbm_share") if result.block_tokens else ()
        derived = {name: round(getattr(result, name), 3) for name in names}
        found.append(dataclasses.asdict(result) | derived)
    chips = {name: dataclasses.asdict(CHIPS[name]) for name in dict.fromkeys(r.chip for r in results)}
    body: dict[str, Any] = {
        "modelled": True,
        "date": today(),
        "versions": versions(),
        "chips": chips,
        "kernels": found,
        "steps": [dataclasses.asdict(step) for step in steps],
        "times": [dataclasses.asdict(time) | {"against_width_1": ratio(times, time)} for time in times],
    }
    path.write_text(json.dumps(body, indent=1) + "\n")


def _markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in rows]


def write_markdown(
    path: pathlib.Path,
    results: Sequence[KernelResult],
    plot: pathlib.Path,
    steps: Sequence[StepResult] = (),
    times: Sequence[StepTime] = (),
) -> None:
    """A page for people."""
    lines = ["# Kernels of jspec on TPUs, modelled", "", EXPLAINED, ""]
    lines += [", ".join(f"{name} {version}" for name, version in versions().items()) + f"; {today()}.", ""]
    lines += [f"![Roofline]({plot.name})", "", *_markdown_table(HEADINGS, map(row, results)), ""]
    if steps:
        lines += ["## Programs of an engine's steps", "", *_markdown_table(STEP_HEADINGS, map(step_row, steps)), ""]
    if times:
        rows = (time_row(times, time) for time in times)
        lines += [
            "## A verify, 16 rows of 4096 positions",
            "",
            TIMES_EXPLAINED,
            "",
            *_markdown_table(TIME_HEADINGS, rows),
            "",
        ]
    chips = [CHIPS[name] for name in dict.fromkeys(result.chip for result in results)]
    assumed = [
        (chip.name, f"{chip.clock_ghz} GHz", chip.clock_source, f"{chip.hbm_gb_per_s:,}", str(chip.cores))
        for chip in chips
    ]
    lines += ["## What is assumed of a chip", ""]
    lines += _markdown_table(("chip", "clock", "from", "HBM GB/s", "cores a device"), assumed)
    path.write_text("\n".join(lines) + "\n")


def draw_roofline(path: pathlib.Path, results: Sequence[KernelResult]) -> None:
    """Cycles of arithmetic against cycles of memory, for 512 tokens of the first shape: below the line a kernel is bound by memory."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shape = next(iter(SHAPES))
    figure, axes = plt.subplots(figsize=(7.5, 5.5), layout="constrained")
    plain = [
        r for r in results
        if r.job.shape == shape and r.block_tokens and r.job.kernel in (VERIFY, PEER) and r.job.page_size == 128
        and not (r.job.tree or r.job.window or r.job.soft_cap)
    ]  # fmt: skip
    for kernel, marker in ((VERIFY, "o"), (PEER, "x")):
        for i, chip in enumerate(CHIPS):
            points = [r for r in plain if r.job.kernel == kernel and r.chip == chip]
            if points:
                scale = [512 / r.block_tokens for r in points]
                xs = [r.memory_cycles * s for r, s in zip(points, scale, strict=True)]
                ys = [r.bundles * s for r, s in zip(points, scale, strict=True)]
                axes.plot(xs, ys, marker, color=f"C{i}", label=f"{chip}, {kernel}", fillstyle="none")
                for x, y, r in zip(xs, ys, points, strict=True):
                    axes.annotate(f"W={r.job.width}", (x, y), textcoords="offset points", xytext=(6, -3), fontsize=7)
    if plain:
        top = max(max(r.memory_cycles, r.bundles) * 512 / r.block_tokens for r in plain) * 1.15
        axes.plot([0, top], [0, top], color="0.6", linewidth=1)
        axes.fill_between([0, top], [0, top], color="0.93", zorder=0)
        right = max(r.memory_cycles * 512 / r.block_tokens for r in plain) * 1.15
        axes.set(xlim=(0, right), ylim=(0, top))
        axes.text(right * 0.97, top * 0.05, "bound by memory", ha="right", color="0.4")
        figure.legend(fontsize=7, loc="outside lower center", ncols=2)
    axes.set(xlabel="cycles in which 512 tokens arrive", ylabel="bundles for 512 tokens", title=f"{shape}: modelled")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def today() -> str:
    return datetime.date.today().isoformat()
