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
) -> None:
    """Compile every kernel for TPUs, with no TPU, and read from its schedule whether it keeps up with memory.

    Needs the `tpu` extra. All figures are modelled. Exit code 1 where a kernel of jspec does not compile.
    """
    from jspec.tpu_report.chips import chips_named
    from jspec.tpu_report.jobs import PEER, kernel_jobs
    from jspec.tpu_report.run import check_libtpu, compile_jobs

    with usage_errors():
        wanted = chips_named(chips)
        check_libtpu()
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)

    from rich import box
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from jspec.tpu_report.report import EXPLAINED, HEADINGS, draw_roofline, row, write_json, write_markdown

    errors = Console(stderr=True)

    def progress(work, *, total):
        return track(work, "Compiling", total=total, console=errors, transient=True, disable=not errors.is_terminal)

    results = compile_jobs(wanted, kernel_jobs(quick=quick), progress=progress)
    table = Table(*HEADINGS, box=box.SIMPLE_HEAD)
    for result in results:
        table.add_row(*row(result))
    screen = Console(highlight=False)
    screen.width = max(screen.width, 190)  # a line of a terminal may wrap, but no cell is cut
    screen.print(table)
    screen.print(EXPLAINED, style="dim")
    if out is not None:
        write_json(out / "report.json", results)
        draw_roofline(out / "roofline.png", results)
        write_markdown(out / "report.md", results, out / "roofline.png")
        screen.print(f"Written to {out}: report.json, report.md, roofline.png")
    if any(result.error and result.job.kernel != PEER for result in results):
        raise typer.Exit(1)
