"""`jspec tpu-report`: kernels compiled for TPUs on a machine that has none."""

import pathlib
from typing import Annotated

import typer

from jspec.cli_errors import usage_errors


def tpu_report(
    chips: Annotated[str, typer.Option(help='Of "v4,v5e,v5p,v6e,v7x"; by default all.')] = "",
    out: Annotated[
        pathlib.Path | None, typer.Option(help="A directory for report.json, report.md and roofline.png.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Every kernel once.")] = False,
    steps: Annotated[
        bool,
        typer.Option(
            "--steps",
            help="Also the programs of every worker's step, for SmolLM2 and 8B models: seconds to a minute a program.",
        ),
    ] = False,
    models: Annotated[
        str, typer.Option(help='With --steps: of "SmolLM2-135M,Llama-3.1-8B,Qwen3-8B"; by default all.')
    ] = "",
    workers: Annotated[
        str, typer.Option(help='With --steps: such as "plain,verify of 8,eagle3 tree of 8"; by default all.')
    ] = "",
) -> None:
    """Compile every kernel for TPUs, with no TPU, and read from its schedule whether it keeps up with memory.

    Needs the `tpu` extra. All figures are modelled. Exit code 1 where a kernel of jspec does not compile.
    """
    from jspec.tpu_report.chips import chips_named
    from jspec.tpu_report.jobs import PEER, kernel_jobs, step_jobs
    from jspec.tpu_report.run import check_libtpu, compile_jobs, compile_steps

    with usage_errors():
        wanted, wanted_steps = chips_named(chips), step_jobs(models, workers) if steps else []
        if (models or workers) and not steps:
            raise ValueError(f"models={models!r} and workers={workers!r} are about steps: give --steps, too")
        check_libtpu()
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)

    from rich import box
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from jspec.tpu_report import report
    from jspec.tpu_report.step_time import StepTime, step_times
    from jspec.tpu_report.steps import MODELS

    errors = Console(stderr=True)

    def progress(work, *, total):
        return track(work, "Compiling", total=total, console=errors, transient=True, disable=not errors.is_terminal)

    results = compile_jobs(wanted, kernel_jobs(quick=quick), progress=progress)
    tables = [Table(*report.HEADINGS, box=box.SIMPLE_HEAD)]
    for result in results:
        tables[0].add_row(*report.row(result))
    found = compile_steps(wanted, wanted_steps, progress=progress)
    times: list[StepTime] = []
    if steps:
        tables += [Table(*headings, box=box.SIMPLE_HEAD) for headings in (report.STEP_HEADINGS, report.TIME_HEADINGS)]
        for step in found:
            tables[1].add_row(*report.step_row(step))
        times = step_times(found, lambda model: MODELS[model].num_layers)
        for time in times:
            tables[2].add_row(*report.time_row(times, time))
    screen = Console(highlight=False)
    screen.width = max(screen.width, 190)  # a line of a terminal may wrap, but no cell is cut
    screen.print(*tables)
    screen.print(report.EXPLAINED, style="dim")
    if out is not None:
        report.write_json(out / "report.json", results, found, times)
        report.draw_roofline(out / "roofline.png", results)
        report.write_markdown(out / "report.md", results, out / "roofline.png", found, times)
        screen.print(f"Written to {out}: report.json, report.md, roofline.png")
    if any(result.error and result.job.kernel != PEER for result in results):
        raise typer.Exit(1)
