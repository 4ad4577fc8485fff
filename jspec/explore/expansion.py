"""Everything that can follow a node, by the real transitions: what the search needs to know of it, in numbers."""

from collections import Counter
from typing import Generic, NamedTuple, TypeVar

from jspec.explore.moves import Launch, Moves
from jspec.explore.node import Node
from jspec.explore.outcomes import DIGIT_BITS, LENGTH_BITS, LOST, pack_lengths, rows_mask
from jspec.explore.violation import Violation

SUBMIT, ABORT, STEP_ACTION = 0, 8, 31
"""An action is a number: SUBMIT + which of the kinds of requests (from 1), ABORT + the place among those that wait or run (from 1), or a step:
`code << ACTION_BITS | STEP_ACTION`, with the outcomes of what it launches."""

ACTION_BITS = 5

Name = TypeVar("Name", bytes, int)
"""Of a node: the key of its canonical form, or the number that the search gives to that."""


class Shape(NamedTuple):
    """What the search must know of a node to hold outcomes and frontiers beside it."""

    outcomes_mask: int  # over the outcomes of unsettled launches, oldest lowest: those that count
    lengths_mask: int  # over packed lengths: rows that are held
    committed: int  # packed lengths
    ended: bool  # nobody is left or still to come, and nothing is under way


class Step(NamedTuple, Generic[Name]):
    """One iteration of the engine: plan, launch, settle. The search adds the outcomes, and moves the frontiers."""

    num_old: int  # unsettled launches before this one
    outcomes_mask: int  # of their outcomes, those that count after the plan
    lengths_mask: int  # rows that keep their frontier
    prompts: int  # packed frontiers of rows that prefill
    room: int  # of rows that move on, packed: where their frontiers may be at most, and a guard bit each
    room_mask: int  # these rows' frontiers
    guards: int  # their guard bits
    rows: tuple[tuple[int, int], ...]  # (row, kind) of the launch; () if there is none
    settled: dict[int, Name] | None  # by outcomes of the launch that is settled, what follows
    follows: Name | None  # where nothing is settled
    failed: bool = False  # what follows is not known


class Failure(NamedTuple):
    """A violation, and where: in the node itself (no action), in what a user did, or in a step, in its plan or its settle."""

    violation: Violation
    action: int | None = None
    settled: int | None = None  # outcomes of the launch that was being settled


class Expansion(NamedTuple):
    """What follows a node, by key."""

    inputs: list[tuple[int, bytes]]  # (action, what follows)
    step: Step[bytes] | None  # None: nothing runs until somebody comes
    failure: Failure | None
    met: Counter[str]  # see `Moves.met`


def shape_of(moves: Moves, node: Node) -> Shape:
    """The shape of a node."""
    held = [row for row, serial in enumerate(node.state.requests.serial.tolist()) if serial]
    return Shape(
        outcomes_mask=_outcomes_mask(moves, node.launches),
        lengths_mask=rows_mask(held, LENGTH_BITS),
        committed=pack_lengths(node.state.ledger.kv_committed_len.tolist()),
        ended=not (node.live or node.arrivals or node.launches),
    )


def _outcomes_mask(moves: Moves, launches: tuple[tuple[tuple[int, int], ...], ...]) -> int:
    """Over the outcomes of launches, oldest lowest: those of rows that are not lost."""
    mask, bits = 0, DIGIT_BITS * (moves.config.rows + 1)
    for place, launch in enumerate(launches):
        mask |= rows_mask([row for row, kind in launch if kind != LOST], DIGIT_BITS) << bits * place
    return mask


class Expander:
    """Expands nodes, and names those that follow.

    Args:
        moves: the transitions.
    """

    def __init__(self, moves: Moves):
        self.moves = moves

    def expand(self, node: Node) -> tuple[Expansion, dict[bytes, Node]]:
        """What follows a node, by key, and the nodes of these keys."""
        children: dict[bytes, Node] = {}
        self.moves.met.clear()
        inputs, step, failure = self._expand(node, children)
        return Expansion(inputs, step, failure, self.moves.met.copy()), children

    def _expand(
        self, node: Node, children: dict[bytes, Node]
    ) -> tuple[list[tuple[int, bytes]], Step[bytes] | None, Failure | None]:
        moves = self.moves
        inputs: list[tuple[int, bytes]] = []

        def name(child: Node) -> bytes:
            key = moves.key(child)
            children.setdefault(key, child)
            return key

        action: int | None = None
        try:
            moves.check(node)
            for index in moves.arrivals(node):
                action = SUBMIT + moves.alike(index)
                inputs.append((action, name(moves.submit(node, index))))
            if moves.config.aborts:
                doomed = node.state.requests.serial[node.state.requests.to_finish].tolist()
                for place, (serial, _) in enumerate(node.live, 1):
                    if serial not in doomed:
                        action = ABORT + place
                        inputs.append((action, name(moves.abort(node, serial))))
            action = STEP_ACTION
            after, launch = moves.plan(node)
        except Exception as error:
            return inputs, None, Failure(_violation(error), action)
        num_old = len(after.launches) - (launch is not None)
        if launch is None and not num_old and moves.key(after) == moves.key(node):
            return inputs, None, None
        step, code = self._step(after, launch, num_old), None
        try:
            if after.state is not node.state:
                moves.check(after)
            if len(after.launches) > (moves.config.depth if launch is not None else 0):
                settled: dict[int, bytes] = {}
                for code, _ in moves.outcomes.combinations(after.launches[0]):
                    settled[code] = name(moves.settle(after, code))
                step = step._replace(settled=settled)
            else:
                step = step._replace(follows=name(after))
        except Exception as error:
            return inputs, step._replace(failed=True), Failure(_violation(error), action, code)
        return inputs, step, None

    def _step(self, after: Node, launch: Launch | None, num_old: int) -> Step[bytes]:
        """What the launch does to outcomes and frontiers; what follows is added later."""
        prompts = launch.prompts if launch is not None else ()
        moving = launch.moving if launch is not None else ()
        fresh = {row for row, _ in prompts}
        kept = [row for row, pages in enumerate(after.tables) if pages and row not in fresh]
        guards = sum(1 << LENGTH_BITS * (row + 1) - 1 for row, _, _ in moving)
        return Step(
            num_old=num_old,
            outcomes_mask=_outcomes_mask(self.moves, after.launches[:num_old]),
            lengths_mask=rows_mask(kept, LENGTH_BITS),
            prompts=sum(end << LENGTH_BITS * row for row, end in prompts),
            room=guards + sum((allocated - written) << LENGTH_BITS * row for row, allocated, written in moving),
            room_mask=rows_mask([row for row, _, _ in moving], LENGTH_BITS),
            guards=guards,
            rows=launch.rows if launch is not None else (),
            settled=None,
            follows=None,
        )


def _violation(error: Exception) -> Violation:
    """A transition that raises is at fault, too."""
    if isinstance(error, Violation):
        return error
    return Violation("a transition raised", repr(error))
