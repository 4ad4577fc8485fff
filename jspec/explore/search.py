"""Breadth-first search over every state that a configuration can reach.

A state is a node (the scheduler's state, canonical) with the outcomes of its unsettled launches and the device's frontiers. What follows depends on the node
and on the outcomes of the launch that is settled, and on nothing else: so the real transitions run once for each such pair, and the states that have it in
common take what came out. Both graphs grow level by level, a node being reached as soon as a state that holds it.
"""

import contextlib
import gc
import itertools
import time
from array import array
from collections.abc import Callable
from typing import NamedTuple

from jspec.explore.config import ExploreConfig
from jspec.explore.expansion import ACTION_BITS, STEP_ACTION, Expander, Step, shape_of
from jspec.explore.graph import Nodes, after_step
from jspec.explore.liveness import find_livelock
from jspec.explore.moves import Moves
from jspec.explore.outcomes import DIGIT_BITS, LENGTH_BITS, unpack_lengths
from jspec.explore.path import Path, path_of_states, path_of_transitions
from jspec.explore.pool import ExpandingPool
from jspec.explore.violation import Violation


class Found(NamedTuple):
    """A violation, and the shortest way to it."""

    violation: Violation
    path: Path


class Exploration(NamedTuple):
    """What a search came to."""

    config: ExploreConfig
    states: int  # distinct
    scheduler_states: int  # of these, distinct as far as the scheduler goes
    transitions: int  # between states
    scheduler_transitions: int  # real ones that ran
    levels: int  # actions from the beginning to the last state
    ends: int  # states in which all requests have ended
    seconds: float
    complete: bool  # all states were visited, and liveness was checked
    found: Found | None
    met: dict[str, int]  # real transitions in which something was met that not every search meets


class Search:
    """One search; see `explore`."""

    def __init__(self, config: ExploreConfig, *, max_states: int | None, pool: ExpandingPool | None, progress=None):
        self.config, self.max_states, self.progress = config, max_states, progress
        self.moves = Moves(config)
        self.nodes = Nodes(Expander(self.moves), pool)
        self.launch_bits = DIGIT_BITS * (config.rows + 1)
        self.launch_mask = (1 << self.launch_bits) - 1
        self.length_bits = LENGTH_BITS * (config.rows + 1)
        self.node_at = self.length_bits + self.launch_bits * (config.depth + 1)
        """Of a state's number: frontiers lowest, then outcomes, oldest launch lowest, then the node."""
        self.seen: set[int] = set()
        self.parents, self.actions = array("q"), array("Q")
        self.num_transitions = self.num_ends = 0
        self._kept: dict[tuple[tuple[tuple[int, int], ...], int], list[tuple[int, int]]] = {}

    # --- the states ----------------------------------------------------------------------------------------------------

    def run(self) -> tuple[int, bool, Found | None]:
        """Levels, whether all was visited, and what was found."""
        nodes = self.nodes
        root = self.moves.root()
        nodes.add(
            self.moves.key(root),
            shape_of(self.moves, root),
            root if nodes.pool is None else nodes.pool.pack(root),
            -1,
            (0, None),
        )
        self.seen.add(0)
        self.parents.append(-1)
        self.actions.append(0)
        level, first, levels = [0], 0, 0
        while level:
            nodes.expand_all()
            following: list[int] = []
            failed = self._follow(level, first, following)
            if failed is not None:
                index, action, violation = failed
                return levels, False, Found(violation, path_of_states(self.moves, self._actions_to(index, action)))
            if nodes.failure is not None:
                number, failure = nodes.failure
                return (
                    levels,
                    False,
                    Found(failure.violation, self._path_to_node(number, failure.action, failure.settled)),
                )
            if self.max_states is not None and len(self.seen) >= self.max_states and following:
                return levels + 1, False, None
            if self.progress is not None:
                self.progress(len(self.seen), len(nodes.shapes))
            first += len(level)
            levels += bool(following)
            level = following
        livelock = find_livelock(
            [[to for _, to in inputs] for inputs in nodes.inputs],
            [after_step(step) for step in nodes.steps],
            [shape.ended for shape in nodes.shapes],
        )
        if livelock is not None:
            way, name = livelock
            round_trip = len(way) - 1
            where = f"the last {round_trip} of these steps may go on for ever" if round_trip else "from here none does"
            return levels, True, Found(Violation(name, where), self._path_along(way))
        return levels, True, None

    def _follow(self, level: list[int], first: int, following: list[int]) -> tuple[int, int, Violation] | None:
        """Visits what follows each state of a level. Returns where a launch would write past its allocation: state, action, what."""
        seen, nodes, node_at, length_bits = self.seen, self.nodes, self.node_at, self.length_bits
        below, lengths_mask = (1 << node_at) - 1, (1 << length_bits) - 1
        parents, actions, shapes = self.parents, self.actions, nodes.shapes
        launch_bits, launch_mask, combinations = self.launch_bits, self.launch_mask, self.moves.outcomes.combinations
        for index, state in enumerate(level, first):
            number, rest = state >> node_at, state & below
            self.num_ends += nodes.shapes[number].ended
            for action, follows in nodes.inputs[number]:
                self.num_transitions += 1
                new = follows << node_at | rest & self._mask(follows)
                if new not in seen:
                    seen.add(new)
                    parents.append(index)
                    actions.append(action)
                    following.append(new)
            step = nodes.steps[number]
            if step is None:
                continue
            lengths = rest & lengths_mask & step.lengths_mask | step.prompts
            if step.room - (lengths & step.room_mask) & step.guards != step.guards:
                return index, STEP_ACTION, self._past_allocation(step, lengths)
            if step.failed:
                continue
            outcomes = rest >> length_bits & step.outcomes_mask
            # Node, outcomes and frontiers of what follows, but for what the launch adds to them.
            settled, place, later = step.settled, launch_bits * step.num_old, combinations(step.rows)
            if settled is None:
                assert step.follows is not None
                base = step.follows << node_at | outcomes << length_bits | lengths
            elif step.num_old:
                follows = settled[outcomes & launch_mask]
                shape = shapes[follows]
                place -= launch_bits
                older = outcomes >> launch_bits & shape.outcomes_mask
                base = follows << node_at | older << length_bits | lengths & shape.lengths_mask
                # Outcomes of rows that have just ended do not count: of those that differ by nothing else, one is as good as all.
                later = self._that_count(step.rows, shape.outcomes_mask >> place & launch_mask)
            self.num_transitions += len(later)
            place += length_bits
            for code, moved in later:
                if settled is None or step.num_old:
                    new = base + moved | code << place
                else:
                    follows = settled[code]
                    new = follows << node_at | lengths + moved & shapes[follows].lengths_mask
                if new not in seen:
                    if (violation := self._wrong_frontier(new)) is not None:
                        return index, code << ACTION_BITS | STEP_ACTION, violation
                    seen.add(new)
                    parents.append(index)
                    actions.append(code << ACTION_BITS | STEP_ACTION)
                    following.append(new)
        return None

    def _that_count(self, rows: tuple[tuple[int, int], ...], mask: int) -> list[tuple[int, int]]:
        """Outcomes of a launch, less what a mask takes from them, and how far they move the frontiers."""
        key = rows, mask
        if key not in self._kept:
            outcomes = self.moves.outcomes
            codes = dict.fromkeys(code & mask for code, _ in outcomes.combinations(rows))
            self._kept[key] = [(code, outcomes.advances(code)) for code in codes]
        return self._kept[key]

    def _mask(self, number: int) -> int:
        shape = self.nodes.shapes[number]
        return shape.outcomes_mask << self.length_bits | shape.lengths_mask

    def _past_allocation(self, step: Step, lengths: int) -> Violation:
        rows = range(self.config.rows + 1)
        moving = [row for row in rows if step.guards >> LENGTH_BITS * (row + 1) - 1 & 1]
        room, frontiers = unpack_lengths(step.room, len(rows)), unpack_lengths(lengths, len(rows))
        past = [
            f"row {row} would write from {frontiers[row]}, and has room from {room[row] - 256} at most"
            for row in moving
            if frontiers[row] > room[row] - 256
        ]
        return Violation("a launch writes inside its allocation", "; ".join(past))

    def _wrong_frontier(self, state: int) -> Violation | None:
        """I4 of SGLang's scheduler, exactly: the device leads what is committed by what unsettled launches have accepted."""
        shape = self.nodes.shapes[state >> self.node_at]
        frontiers = state & (1 << self.length_bits) - 1
        outcomes = (state & (1 << self.node_at) - 1) >> self.length_bits
        expected, advances = shape.committed, self.moves.outcomes.advances
        while outcomes:
            expected += advances(outcomes & self.launch_mask)
            outcomes >>= self.launch_bits
        if frontiers == expected:
            return None
        rows = self.config.rows + 1
        return Violation(
            "the frontier leads what is committed by what is accepted and unsettled",
            f"frontiers={unpack_lengths(frontiers, rows)}, expected={unpack_lengths(expected, rows)}",
        )

    # --- the way back --------------------------------------------------------------------------------------------------

    def _actions_to(self, index: int, last: int | None) -> list[int]:
        found = [] if last is None else [last]
        while index > 0:
            found.append(self.actions[index])
            index = self.parents[index]
        return found[::-1]

    def _path_to_node(self, number: int, action: int | None, settled: int | None) -> Path:
        found = self._transitions_to(number) + ([] if action is None else [(action, settled)])
        return path_of_transitions(self.moves, found)

    def _path_along(self, way: list[int]) -> Path:
        """To the first of these nodes, and from each to the next by an iteration."""
        found = self._transitions_to(way[0])
        for number, following in itertools.pairwise(way):
            settled = getattr(self.nodes.steps[number], "settled", None) or {}
            found.append((STEP_ACTION, next((code for code, to in settled.items() if to == following), None)))
        return path_of_transitions(self.moves, found)

    def _transitions_to(self, number: int) -> list[tuple[int, int | None]]:
        found: list[tuple[int, int | None]] = []
        while number > 0:
            found.append(self.nodes.actions[number])
            number = self.nodes.parents[number]
        return found[::-1]


def explore(
    config: ExploreConfig,
    *,
    max_states: int | None = None,
    jobs: int = 1,
    progress: Callable[[int, int], object] | None = None,
) -> Exploration:
    """Visits every state that the configuration can reach, and checks each.

    Args:
        config: what is explored.
        max_states: stop after the level in which so many were seen; None: when there are no more.
        jobs: processes that run the transitions; with more than one, this one distributes them.
        progress: called with the states and the scheduler states seen so far, after each level.

    Returns:
        An `Exploration`; its `found` is None if every invariant holds in every state, every launch writes where it may, every result is taken as plain
        decoding would, and, if the search was complete, every request ends from everywhere.

    Raises:
        ValueError: `max_states` or `jobs` is below 1, or the configuration has too many outcomes a row.
    """
    for name, value in (("max_states", max_states), ("jobs", jobs)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        if gc.isenabled():  # states by the million, and no cycles: collecting would take longer than the search
            gc.disable()
            stack.callback(gc.enable)
        pool = stack.enter_context(ExpandingPool(config, jobs)) if jobs > 1 else None
        search = Search(config, max_states=max_states, pool=pool, progress=progress)
        levels, complete, found = search.run()
    return Exploration(
        config=config,
        states=len(search.seen),
        scheduler_states=len(search.nodes.shapes),
        transitions=search.num_transitions,
        scheduler_transitions=search.nodes.num_transitions,
        levels=levels,
        ends=search.num_ends,
        seconds=time.perf_counter() - start,
        complete=complete,
        found=found,
        met=dict(sorted(search.nodes.met.items())),
    )
