"""What a run tells of itself: `metrics.jsonl`, and a picture of it."""

import json
import os
import pathlib
from typing import Any


class MetricsLog:
    """One JSON object a line: of training ("loss" ...) or of an evaluation ("held_out_..." ...), each with its "step"."""

    def __init__(self, file: pathlib.Path, *, next_step: int):
        """Lines of steps from `next_step` on are dropped: the run goes on from a checkpoint before them."""
        self.file = file
        kept = [record for record in read_metrics(file) if record["step"] < next_step] if file.exists() else []
        new = file.with_name(f".{file.name}.new")
        new.write_text("".join(json.dumps(record) + "\n" for record in kept), "utf-8")
        os.replace(new, file)

    def add(self, **record: Any) -> None:
        with self.file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(record) + "\n")


def read_metrics(file: pathlib.Path) -> list[dict[str, Any]]:
    """The records of a metrics file; a last line that a killed run left unfinished is not one."""
    *lines, _ = file.read_text("utf-8").split("\n")
    return [json.loads(line) for line in lines]


def plot_metrics(file: pathlib.Path, picture: pathlib.Path) -> None:
    """A PNG: loss of training, and accept length on held-out text, by step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = read_metrics(file)
    trained = [(r["step"], r["loss"]) for r in records if "loss" in r]
    held_out = [(r["step"], r["held_out_accept_len"]) for r in records if "held_out_accept_len" in r]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for axes, points, title in ((left, trained, "training loss"), (right, held_out, "held-out accept length")):
        axes.plot(*zip(*points, strict=True) if points else ((), ()), marker="" if axes is left else "o")
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=120)
