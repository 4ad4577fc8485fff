"""Reads the schedule that libtpu writes for a compiled kernel: the bundles that the chip would execute, one a cycle where nothing stalls."""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence

_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?:(?P<label>[A-Z]{2})\b)?\s*:\s*(?P<depth>>*)\s*\{(?P<text>.*)")


@dataclasses.dataclass(frozen=True)
class Loop:
    """One loop of a kernel; an inner loop's bundles count in the outer one too, once."""

    depth: int
    bundles: int
    copies: int
    """Copies started."""
    spills: int
    """Registers stored to or loaded from spill space."""
    has_inner: bool


def read_loops(lines: Iterable[str]) -> list[Loop]:
    """The loops of a `*final_bundles.txt`, in order. A loop runs from its body mark to the last bundle of its depth, delay slots included."""
    bundles: list[tuple[str | None, int, str]] = []
    for line in lines:
        if found := _BUNDLE.match(line):
            bundles.append((found["label"], len(found["depth"]), found["text"]))
    loops = []
    for start, (label, depth, _) in enumerate(bundles):
        if label != "LB":
            continue
        end = start + 1
        # A bundle of a delay slot is empty, and written without its depth.
        while end < len(bundles) and (bundles[end][1] >= depth or bundles[end][2].startswith("}")):
            end += 1
        body = [text for _, _, text in bundles[start:end]]
        loops.append(
            Loop(
                depth=depth,
                bundles=len(body),
                copies=sum("dma." in text and "dma.done" not in text for text in body),
                spills=sum(text.count("_spill]") for text in body),
                has_inner=any(label == "LB" and inner > depth for label, inner, _ in bundles[start + 1 : end]),
            )
        )
    return loops


def estimated_cycles(program: str) -> int:
    """Cycles that XLA's own cost model gives to a compiled program's operations: the body of a loop once, and of a choice the cheapest branch, which is that of
    a step whose requests are greedy and ask for nothing more. It knows nothing of Pallas kernels."""
    cycles: dict[str, int] = {}
    inner: dict[str, list[list[str]]] = {}  # by computation: what it runs, each a list to choose from
    entry = name = ""
    for line in program.splitlines():
        if found := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line):
            name = found[2]
            cycles[name], inner[name] = 0, []
            entry = name if found[1] else entry
        elif name:
            cycles[name] += sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', line)))
            inner[name] += [[part] for part in re.findall(r"(?:body|condition)=%?([\w.-]+)", line)]
            if branches := re.search(r"branch_computations=\{([^}]*)\}", line):
                inner[name].append(re.findall(r"[\w.-]+", branches[1]))
            elif branches := re.search(r"true_computation=%?([\w.-]+), false_computation=%?([\w.-]+)", line):
                inner[name].append(list(branches.groups()))

    def total(name: str) -> int:
        return cycles.get(name, 0) + sum(min(map(total, choice)) for choice in inner.get(name, []))

    return total(entry)


def run_loop(loops: Sequence[Loop], tokens: int) -> Loop | None:
    """One pass of the loop over runs of the KV write: the innermost that starts copies around a loop, that over the tokens of a run, so often."""
    for loop, inner in reversed(list(itertools.pairwise(loops))):
        if loop.copies and loop.has_inner:
            return dataclasses.replace(loop, bundles=loop.bundles + (tokens - 1) * inner.bundles)
    return None


def row_bundles(loops: Sequence[Loop]) -> int:
    """Bundles of the loop around that over blocks, each of its own loops once, without that one: what a row costs beside its whole blocks."""
    block = block_loop(loops)
    around = [loop for loop in loops if block and loop.has_inner and loop.depth < block.depth]
    outer = max(around, key=lambda loop: (loop.depth, loop.bundles), default=None)
    return outer.bundles - block.bundles if block and outer else 0


def block_loop(loops: Sequence[Loop]) -> Loop | None:
    """The loop over blocks of keys: the longest that starts copies and holds no other loop."""
    candidates = [loop for loop in loops if loop.copies and not loop.has_inner]
    return max(candidates, key=lambda loop: loop.bundles, default=None)
