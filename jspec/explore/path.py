"""A way from the beginning to some state, as inputs that can be replayed: who came, who was aborted, what each launch brought."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jspec.explore.config import ExploreConfig
from jspec.explore.expansion import ABORT, ACTION_BITS, STEP_ACTION, SUBMIT
from jspec.explore.moves import Launch, Moves
from jspec.explore.node import Node
from jspec.explore.outcomes import DIGIT_BITS, KINDS, LOST, PROMPT, rows_mask
from jspec.explore.violation import Violation, require
from jspec.state import GenerationBatchResult


class Submit(NamedTuple):
    """A request comes: `submit(state, Waiting(serial, len(prompt), ...))`."""

    request: int  # its place in `ExploreConfig.requests`, from 0
    serial: int  # from 1, in the order they come
    prompt: tuple[int, ...]  # token ids
    max_new_tokens: int
    priority: int
    stop_token_ids: tuple[int, ...]

    def __str__(self) -> str:
        return f"submit request {self.serial}: a prompt of {len(self.prompt)}, {self.max_new_tokens} to emit at most"


class Abort(NamedTuple):
    """A request is aborted: `abort(state, serial)`."""

    serial: int

    def __str__(self) -> str:
        return f"abort request {self.serial}"


class Iteration(NamedTuple):
    """One iteration of the engine: `plan`; if that gives a batch, its launch, which will bring `result`; then, if `settles`, `settle_oldest` with the result
    of the oldest unsettled launch, and `retire`."""

    rows: tuple[
        tuple[int, int], ...
    ]  # of the launch, tails last: (row, kind), see `outcomes.KINDS`; () if nothing was launched
    digits: tuple[int, ...]  # what each row gets, by its number in `Outcomes`
    result: GenerationBatchResult | None  # of the launch: arrays of as many rows; None if nothing was launched
    settles: bool  # the oldest unsettled launch is settled, which may be this one

    def __str__(self) -> str:
        if self.result is None:
            return "plan: nothing" + ", settle" * self.settles
        emitted = self.result.accept_lens.tolist()
        rows = ", ".join(f"row {row} ({KINDS[kind]}) {n}" for (row, kind), n in zip(self.rows, emitted, strict=True))
        return f"plan and launch, which emits: {rows}" + "; settle the oldest" * self.settles


Input = Submit | Abort | Iteration


class Path(NamedTuple):
    """Inputs from the beginning, in order. The last one leads to what was looked for; of one that raised, nothing after that is told."""

    config: ExploreConfig
    inputs: tuple[Input, ...]


class Frame(NamedTuple):
    """After an input."""

    input: Input
    node: Node  # where it raised, the last one that was reached
    frontiers: tuple[int, ...]  # i32[R]  of the device; 0 in rows that nobody has
    violation: Violation | None


Choose = Callable[[Launch], Sequence[int]]
"""The outcome of each row of a launch."""


class Replay:
    """The real transitions along a path, with a device that has made up its mind."""

    def __init__(self, moves: Moves):
        self.moves = moves
        self.node = moves.root()
        self.frontiers = [0] * (moves.config.rows + 1)
        self.starts = list(self.frontiers)  # where the newest launch started
        self.codes: list[int] = []  # outcomes of unsettled launches, oldest first
        self.frames: list[Frame] = []

    def submit(self, index: int) -> None:
        """A request comes."""
        request = self.moves.config.requests[index]
        step = Submit(
            index,
            self.node.num_submitted + 1,
            self.moves.contents.tokens(index, request.prompt_len),
            request.max_new_tokens,
            request.priority,
            self.moves.contents.stop_token_ids(),
        )
        self._advance(lambda: step, lambda: self.moves.submit(self.node, index))

    def abort(self, serial: int) -> None:
        """A request is aborted."""
        self._advance(lambda: Abort(serial), lambda: self.moves.abort(self.node, serial))

    def iterate(self, choose: Choose) -> None:
        """One iteration. `choose` says what its launch brings, if there is one."""
        made = Iteration((), (), None, False)

        def iteration() -> Node:
            nonlocal made
            moves = self.moves
            after, launch = moves.plan(self.node)
            settles = len(after.launches) > (moves.config.depth if launch is not None else 0)
            made = made._replace(settles=settles)
            self.node = after
            if launch is not None:
                made = self._launched(launch, choose(launch), settles)
                self._require_room(launch)
            moves.check(after)
            if not settles:
                return after
            kept = rows_that_count(after.launches[0])
            return moves.settle(after, self.codes.pop(0) & kept)

        self._advance(lambda: made, iteration)

    def _launched(self, launch: Launch, digits: Sequence[int], settles: bool) -> Iteration:
        """The device runs the launch: what it brings, and where it leaves the frontiers."""
        moves, index_of = self.moves, self.node.index_of
        for row, end in launch.prompts:
            self.frontiers[row] = end
        self.starts = list(self.frontiers)
        tokens = []
        for (row, kind), digit in zip(launch.rows, digits, strict=True):
            start = self.starts[row] + (kind != PROMPT)
            index = index_of[int(self.node.state.requests.serial[row])]
            tokens.append(list(moves.contents.tokens(index, start + moves.config.verify_width)[start:]))
            self.frontiers[row] += moves.outcomes[digit].advance
        self.codes.append(sum(digit << DIGIT_BITS * row for (row, _), digit in zip(launch.rows, digits, strict=True)))
        result = moves.results.of(list(digits), tokens, [self.frontiers[row] for row, _ in launch.rows])
        return Iteration(launch.rows, tuple(digits), result, settles)

    def _require_room(self, launch: Launch) -> None:
        for row, allocated, written in launch.moving:
            require(self.starts[row] + written <= allocated, "a launch writes inside its allocation",
                    row=row, frontier=self.starts[row], written=written, allocated=allocated)  # fmt: skip

    def _advance(self, made: Callable[[], Input], move: Callable[[], Node]) -> None:
        violation = None
        try:
            self.node = move()
            self.moves.check(self.node)
        except Violation as error:
            violation = error
        except Exception as error:
            violation = Violation("a transition raised", repr(error))
        held = self.node.state.requests.serial.tolist()
        self.frontiers = [frontier if serial else 0 for frontier, serial in zip(self.frontiers, held, strict=True)]
        self.frames.append(Frame(made(), self.node, tuple(self.frontiers), violation))


def rows_that_count(launch: Sequence[tuple[int, int]]) -> int:
    """A mask over the outcomes of a launch: those of rows that are not lost."""
    return rows_mask([row for row, kind in launch if kind != LOST], DIGIT_BITS)


def replay(path: Path) -> list[Frame]:
    """Runs the real transitions along a path. It ends with the first violation."""
    run = Replay(Moves(path.config))
    for given in path.inputs:
        if isinstance(given, Submit):
            run.submit(given.request)
        elif isinstance(given, Abort):
            run.abort(given.serial)
        else:
            digits = given.digits
            run.iterate(lambda launch, digits=digits: digits)  # type: ignore[misc]
        if run.frames[-1].violation is not None:
            break
    return run.frames


# --- how the search tells a path -----------------------------------------------------------------------------------------


def path_of_states(moves: Moves, actions: Sequence[int]) -> Path:
    """The path of these actions, each step of which says what it launches brings."""
    codes = iter([action >> ACTION_BITS for action in actions if action & STEP_ACTION == STEP_ACTION])
    return _path(moves, actions, lambda: next(codes), late=True)


def path_of_transitions(moves: Moves, actions: Sequence[tuple[int, int | None]]) -> Path:
    """The path of these actions, each step of which says what the launch had brought that it settles. Those that are not settled bring all they can."""
    settled = [code for _, code in actions if code is not None]
    codes = iter(settled)
    return _path(moves, [action for action, _ in actions], lambda: next(codes, None), late=False)


def _path(moves: Moves, actions: Sequence[int], next_code: Callable[[], int | None], *, late: bool) -> Path:
    """Replays the actions. An iteration that launches nothing has no outcomes; `late`: such ones have a code all the same."""
    run = Replay(moves)

    def choose(launch: Launch) -> list[int]:
        code = next_code() if not late else chosen
        digits = []
        for row, kind in launch.rows:
            digit = None if code is None else moves.outcomes.digit(code, row)
            if digit is None:
                digit = moves.outcomes.longest(kind)
            # A row that had lost its request when this was settled: what comes late is as bad as can be.
            digits.append(digit or moves.outcomes.worst(kind))
        return digits

    for action in actions:
        if action & STEP_ACTION == STEP_ACTION:
            chosen = next_code() if late else None
            run.iterate(choose)
        elif action > ABORT:
            run.abort(run.node.live[action - ABORT - 1][0])
        else:
            run.submit(next(index for index in moves.arrivals(run.node) if moves.alike(index) == action - SUBMIT))
        if run.frames[-1].violation is not None:
            break
    return Path(moves.config, tuple(frame.input for frame in run.frames))
