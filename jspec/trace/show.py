"""The clocks side by side, one line a request and iteration, as a table for a terminal."""

from rich import box
from rich.table import Table
from rich.text import Text

from jspec.trace.timeline import FIELDS, Iteration, Timeline

_SHORT = {
    "host-settled": "host",
    "launched": "launch",
    "future": "future",
}


def printable(text: str) -> str:
    """With escapes for what a terminal would act upon, line ends included."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def clock_table(timeline: Timeline, iterations: list[Iteration], serials: set[int] | None = None) -> Table:
    """One line an iteration and row.

    Args:
        timeline: the run.
        iterations: of it, those to show.
        serials: of the requests to show; None: all.
    """
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("iter", "mode", "rid", "row", "epoch"):
        table.add_column(f"{name}\n\nplan", justify="right" if name in ("iter", "row", "epoch") else "left")
    for name, field in FIELDS.items():
        owner = field.owner.split(";")[0].split(",")[0].removeprefix("read from the ").split(" inside")[0]
        table.add_column(f"{name}\n{_SHORT[field.time]}\n{owner}", justify="right")
    table.add_column("settled in\nhost\nsettle", justify="right")
    table.add_column("end\nhost\nsettle")
    for iteration in iterations:
        for line in iteration.lines:
            if serials is not None and line.serial not in serials:
                continue
            clocks = ["·" if value is None else str(value) for value in line.clocks().values()]
            settled = "-" if iteration.settled_in is None else str(iteration.settled_in)
            end = line.finish_reason if line.live else "stale"
            cells = [
                str(iteration.forward_iter),
                line.kind,
                printable(line.rid),
                str(line.row),
                str(line.epoch),
                *clocks,
            ]
            table.add_row(*map(Text, [*cells, settled, end]))
    return table
