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
            "--steps", help="Also the programs of every worker's step, for SmolLM2 and 8B models: minutes a program."
        ),
    ] = False,
) -> None:
    """Compile every kernel for TPUs, with no TPU, and read from its schedule whether it keeps up with memory.

    Needs the `tpu` extra. All figures are modelled. Exit code 1 where a kernel of jspec does not compile.
    """
    from jspec.tpu_report.chips import chips_named
    from jspec.tpu_report.jobs import PEER, kernel_jobs, step_jobs
    from jspec.tpu_report.run import check_libtpu, compile_jobs, compile_steps

    with usage_errors():
        wanted = chips_named(chips)
        check_libtpu()
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)

    from rich import box
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from jspec.tpu_report import report

    errors = Console(stderr=True)

    def progress(work, *, total):
        return track(work, "Compiling", total=total, console=errors, transient=True, disable=not errors.is_terminal)

    results = compile_jobs(wanted, kernel_jobs(quick=quick), progress=progress)
    tables = [Table(*report.HEADINGS, box=box.SIMPLE_HEAD)]
    for result in results:
        tables[0].add_row(*report.row(result))
    found = compile_steps(wanted, step_jobs(quick=quick), progress=progress) if steps else []
    if steps:
        tables.append(Table(*report.STEP_HEADINGS, box=box.SIMPLE_HEAD))
        for step in found:
            tables[1].add_row(*report.step_row(step))
    screen = Console(highlight=False)
    screen.width = max(screen.width, 190)  # a line of a terminal may wrap, but no cell is cut
    screen.print(*tables)
    screen.print(report.EXPLAINED, style="dim")
    if out is not None:
        report.write_json(out / "report.json", results, found)
        report.draw_roofline(out / "roofline.png", results)
        report.write_markdown(out / "report.md", results, out / "roofline.png", found)
        screen.print(f"Written to {out}: report.json, report.md, roofline.png")
    if any(result.error and result.job.kernel != PEER for result in results):
        raise typer.Exit(1)
