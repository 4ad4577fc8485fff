"""What a search came to, for people: figures, and the way to a violation, step by step."""

import dataclasses

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from jspec.explore.config import ExploreConfig
from jspec.explore.node import Node
from jspec.explore.outcomes import KINDS, LOST
from jspec.explore.path import Frame, Path, replay
from jspec.explore.search import Exploration

NOT_TOLD = {
    "serial",
    "epoch",
    "last_launch",
    "stop_token_ids",
    "page_table",
    "free_pages",
    "num_free",
    "page_locks",
    "page_size",
}
"""Fields of the tables that are told otherwise, or say nothing to a person."""


def facts(node: Node, frontiers: tuple[int, ...]) -> dict[str, str]:
    """A state as a person reads it: what, and its value. Rows that nobody has are left out."""
    state, found = node.state, dict[str, str]()
    requests, ledger = state.requests, state.ledger
    for row, serial in enumerate(requests.serial.tolist()):
        if not serial:
            continue
        found[f"row {row}"] = f"request {serial}"
        found[f"row {row} frontier"] = str(frontiers[row])
        for field in (*dataclasses.fields(requests), *dataclasses.fields(ledger)):
            if field.name not in NOT_TOLD:
                table = requests if hasattr(requests, field.name) else ledger
                found[f"row {row} {field.name}"] = str(getattr(table, field.name)[row])
        pages = [page for page in ledger.page_table[row].tolist() if page]
        found[f"row {row} pages"] = " ".join(map(str, pages))
    found["waiting"] = ", ".join(f"request {r.serial} with {r.output_len} tokens" for r in state.waiting) or "nobody"
    found["unsettled"] = "; ".join(
        ", ".join(f"row {row} ({KINDS[kind]})" for row, kind in launch if kind != LOST) or "rows that ended"
        for launch in node.launches
    )
    found["unsettled"] = found["unsettled"] or "nothing"
    found["free pages"] = str(int(ledger.num_free))
    found["cached pages"] = " ".join(map(str, sorted(state.prefix_cache.keys))) or "none"
    found["new_token_ratio"] = f"{float(state.new_token_ratio):.3f}"
    return found


def changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """What differs between two states, a line each."""
    lines = []
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        row = " ".join(name.split(" ")[:2]) if name.startswith("row ") else name
        if name == row and old is None:
            known = [f"{key[len(row) + 1 :]} {value}" for key, value in after.items() if key.startswith(f"{row} ")]
            lines.append(f"{row}: free → {new}, " + ", ".join(known))
        elif name == row and new is None:
            lines.append(f"{row}: {old} → free")
        elif (row in before and row in after) or name == row:
            lines.append(f"{name}: {old or 'none'} → {new or 'none'}")
    return lines


def frame_lines(path: Path) -> list[tuple[Frame, list[str]]]:
    """Each step of a path, run again, with what it changed."""
    from jspec.explore.moves import Moves

    root = Moves(path.config).root()
    before = facts(root, (0,) * (path.config.rows + 1))
    found = []
    for frame in replay(path):
        after = facts(frame.node, frame.frontiers)
        found.append((frame, changes(before, after)))
        before = after
    return found


def path_table(path: Path) -> Table:
    """A path, readable."""
    table = Table(
        "", "Input", "What changed", box=box.SIMPLE_HEAD, title="The shortest way there", title_justify="left"
    )
    for number, (frame, lines) in enumerate(frame_lines(path), 1):
        text = Text("\n".join(lines))
        if frame.violation is not None:
            text.append(("\n" if lines else "") + f"VIOLATION: {frame.violation}", style="bold red")
        table.add_row(str(number), str(frame.input), text)
    return table


def figures(result: Exploration) -> list[tuple[str, str]]:
    """Names and values."""
    return [
        ("states", f"{result.states:,}"),
        ("of the scheduler", f"{result.scheduler_states:,}"),
        ("transitions", f"{result.transitions:,}"),
        ("real ones run", f"{result.scheduler_transitions:,}"),
        ("depth", f"{result.levels:,}"),
        ("ends", f"{result.ends:,}"),
        ("time", f"{result.seconds:.1f} s"),
        ("states/s", f"{result.states / max(result.seconds, 1e-9):,.0f}"),
        (
            "met",
            ", ".join(f"{name} {count:,}" for name, count in result.met.items() if count)
            or "nothing out of the ordinary",
        ),
        ("complete", "yes" if result.complete else "no"),
    ]


EXPLAINED = (
    "A state is the scheduler's state, the outcomes of unsettled launches, and the device's frontiers; states that differ by names of pages or absolute "
    "counters only are one. Each distinct scheduler state was checked by every invariant, each real transition against plain decoding, each launch in "
    "each state against its allocation."
)


def configuration(config: ExploreConfig) -> str:
    """What was explored, in the words of the command."""
    different = [
        f"{field.name}={value}"
        for field in dataclasses.fields(config)
        if field.name != "requests" and (value := getattr(config, field.name)) is not None
    ]
    return f"requests {' and '.join(map(str, config.requests))}: " + ", ".join(different)


def verdict(result: Exploration) -> str:
    """One line."""
    if result.found is not None:
        return f"violation: {result.found.violation}"
    if result.complete:
        return "no violation: all states visited, and every request ends from each of them"
    return "no violation so far: the search was cut short, and liveness not checked"


def report(result: Exploration) -> RenderableType:
    """Figures, and the way to a violation, if there is one."""
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    table.add_column("")
    table.add_column("")
    for name, value in figures(result):
        table.add_row(name, value)
    parts: list[RenderableType] = [Text(configuration(result.config)), table]
    if result.found is not None:
        parts.append(path_table(result.found.path))
    style = "bold red" if result.found is not None else "bold green" if result.complete else "bold"
    return Group(*parts, Text(verdict(result), style=style), Text(EXPLAINED, style="dim"))
