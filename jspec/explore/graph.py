"""The graph of nodes: what follows each of them, by number."""

from array import array
from collections import Counter
from collections.abc import Iterator
from typing import Any

from jspec.explore.expansion import STEP_ACTION, Expander, Expansion, Failure, Shape, Step, shape_of
from jspec.explore.pool import ExpandingPool

Children = dict[bytes, tuple[Shape, Any]]
"""Nodes that may be new, by key; pickled where several processes expand them."""


class Nodes:
    """Nodes, numbered as they are found, and what follows them. Each is expanded once, and then forgotten."""

    def __init__(self, expander: Expander, pool: ExpandingPool | None = None):
        self.expander, self.pool = expander, pool
        self.numbers: dict[bytes, int] = {}
        self.shapes: list[Shape] = []
        self.inputs: list[list[tuple[int, int]]] = []
        self.steps: list[Step[int] | None] = []
        self.parents = array("q")
        self.actions: list[tuple[int, int | None]] = []  # (action, outcomes settled) that led here first
        self.num_transitions = 0
        self.met: Counter[str] = Counter()
        self.failure: tuple[int, Failure] | None = None  # of the first level that has one, the first
        self._waiting: list[tuple[int, Any]] = []  # (number, node, or node pickled) of those not expanded

    def add(self, key: bytes, shape: Shape, node: Any, parent: int, action: tuple[int, int | None]) -> int:
        """Numbers a new node."""
        number = self.numbers[key] = len(self.numbers)
        self.shapes.append(shape)
        self.parents.append(parent)
        self.actions.append(action)
        self._waiting.append((number, node))
        return number

    def expand_all(self) -> None:
        """Expands every node that was not, and adds what follows."""
        waiting, self._waiting = self._waiting, []
        for number, (expansion, children) in zip((n for n, _ in waiting), self._expansions(waiting), strict=True):
            if expansion.failure is not None and self.failure is None:
                self.failure = number, expansion.failure
            self.met.update(expansion.met)
            self._connect(number, expansion, children)

    def _expansions(self, waiting: list[tuple[int, Any]]) -> Iterator[tuple[Expansion, Children]]:
        """Of each node what follows, and of each key that may be new the node."""
        if self.pool is not None:
            yield from self.pool.expand([node for _, node in waiting])
            return
        for _, node in waiting:
            expansion, children = self.expander.expand(node)
            new = (item for item in children.items() if item[0] not in self.numbers)
            yield expansion, {key: (shape_of(self.expander.moves, child), child) for key, child in new}

    def _connect(self, number: int, expansion: Expansion, children: Children) -> None:
        numbers = self.numbers

        def number_of(key: bytes, action: int, settled: int | None) -> int:
            found = numbers.get(key)
            return self.add(key, *children[key], number, (action, settled)) if found is None else found

        self.inputs.append([(action, number_of(key, action, None)) for action, key in expansion.inputs])
        step = expansion.step
        self.num_transitions += len(expansion.inputs) + (step is not None)
        if step is None:
            self.steps.append(None)
            return
        settled, follows = None, None
        if not step.failed and step.settled is not None:
            self.num_transitions += len(step.settled)
            settled = {code: number_of(key, STEP_ACTION, code) for code, key in step.settled.items()}
        elif step.follows is not None:
            follows = number_of(step.follows, STEP_ACTION, None)
        self.steps.append(Step(**{**step._asdict(), "settled": settled, "follows": follows}))


def after_step(step: Step[int] | None) -> list[int]:
    """Nodes that an iteration leads to."""
    if step is None:
        return []
    if step.settled is not None:
        return list(dict.fromkeys(step.settled.values()))
    return [] if step.follows is None else [step.follows]
