"""What a launch may bring a row: every outcome of every kind of row, numbered, and a launch's outcomes as one number."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from jspec.explore.config import ExploreConfig
from jspec.state import FinishReason

LOST, CHUNK, PROMPT, TAIL, STEP = range(5)
"""What a row of a launch is: one whose request has left the row since, a part of a prompt, the end of one, a tail, a decode row."""

KINDS = ("lost", "chunk", "prompt", "tail", "decode")

DIGIT_BITS = 6
"""Of an outcome's number: a launch's outcomes are one number, `digit << DIGIT_BITS * row` summed over its rows. Digit 0: the row is not in it, or lost."""

LENGTH_BITS = 9
"""Of a length, in a number that holds one of each row: a byte, and a bit that shows when it falls below zero."""


class Outcome(NamedTuple):
    """What one launch brings one row. Places count from 1; 0 is nowhere."""

    accept: int  # tokens emitted, bonus included; 0 in the middle of a prompt
    commits: bool  # they move the frontier: not those of a prompt
    token_stop: int = 0  # place in the run of an end-of-sequence token
    string_stop: int = 0  # place of the token that completes a stop string
    failed: bool = False  # the logits were not finite

    @property
    def advance(self) -> int:
        """Tokens that the device's frontier moves by."""
        return self.accept * self.commits

    def __str__(self) -> str:
        if self.failed:
            return "not finite"
        text = f"{self.accept} token{'s' * (self.accept != 1)}"
        text += f", EOS at {self.token_stop}" * bool(self.token_stop)
        return text + f", stop string at {self.string_stop}" * bool(self.string_stop)


class Taken(NamedTuple):
    """What the host should make of an outcome."""

    num_new: int
    num_visible: int
    reason: FinishReason


def plain_rule(outcome: Outcome, output_len: int, max_new_tokens: int, aborted: bool) -> Taken:
    """A run taken one token after another, as plain decoding would: the first stop ends it, at the cap the length does, and an abort hides nothing."""
    if outcome.failed:
        return Taken(0, 0, FinishReason.ABORT if aborted else FinishReason.ERROR)
    if aborted:
        return Taken(outcome.accept, outcome.accept, FinishReason.ABORT)
    for place in range(1, outcome.accept + 1):
        if place in (outcome.token_stop, outcome.string_stop):
            return Taken(outcome.accept, place, FinishReason.STOP)
        if output_len + place == max_new_tokens:
            return Taken(outcome.accept, place, FinishReason.LENGTH)
    return Taken(outcome.accept, outcome.accept, FinishReason.NONE)


class Outcomes:
    """All outcomes under a configuration.

    Raises:
        ValueError: there are more than can be numbered.
    """

    def __init__(self, config: ExploreConfig):
        tokens, strings = config.stops in ("token", "both"), config.stops in ("string", "both")

        def runs(accept: int, *, commits: bool) -> list[Outcome]:
            """Runs of so many tokens, with every place of a stop."""
            places = range(accept + 1)
            found = [
                Outcome(accept, commits, token, string)
                for token, string in itertools.product(places if tokens else (0,), places if strings else (0,))
            ]
            return [*found, Outcome(accept, commits, failed=True)] if config.failures and accept == 1 else found

        chunk = [Outcome(0, False)] + [Outcome(0, False, failed=True)] * config.failures
        prompt, tail = runs(1, commits=False), runs(1, commits=True)
        longer = [run for accept in range(2, config.verify_width + 1) for run in runs(accept, commits=True)]
        self.all: list[Outcome | None] = [None, *chunk, *prompt, *tail, *longer]
        if len(self.all) > 1 << DIGIT_BITS:
            raise ValueError(
                f"verify_width={config.verify_width} with stops={config.stops!r} has {len(self.all)} outcomes a row, "
                f"at most {1 << DIGIT_BITS} can be explored: lower it, or take fewer kinds of stops"
            )
        ends = list(itertools.accumulate(map(len, (chunk, prompt, tail, longer)), initial=1))
        self.digits: dict[int, tuple[int, ...]] = {
            LOST: (0,),
            CHUNK: tuple(range(ends[0], ends[1])),
            PROMPT: tuple(range(ends[1], ends[2])),
            TAIL: tuple(range(ends[2], ends[3])),
            STEP: tuple(range(ends[2], ends[4])),
        }
        """By kind of row, the numbers of its outcomes, the longest run without a stop among the last."""
        self._advance = [0 if outcome is None else outcome.advance for outcome in self.all]
        self._combinations: dict[tuple, list[tuple[int, int]]] = {}
        self._advances: dict[int, int] = {}

    def __getitem__(self, digit: int) -> Outcome:
        outcome = self.all[digit]
        assert outcome is not None
        return outcome

    def longest(self, kind: int) -> int:
        """The outcome that leads furthest, without an end."""
        return max(self.digits[kind], key=lambda digit: (self[digit].accept, not any(self[digit][2:])))

    def worst(self, kind: int) -> int:
        """The longest run that ends its request at its first token, or as near to that as there is."""
        return max(
            self.digits[kind], key=lambda digit: (self[digit].accept, any(self[digit][2:]), -sum(self[digit][2:4]))
        )

    def digit(self, code: int, row: int) -> int:
        """The number of a row's outcome in that of a launch."""
        return code >> DIGIT_BITS * row & (1 << DIGIT_BITS) - 1

    def combinations(self, launch: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
        """Every outcome of a launch of these `(row, kind)`: its number, and how far each row's frontier moves, packed with LENGTH_BITS a row."""
        found = self._combinations.get(launch)
        if found is None:
            codes = [
                sum(digit << DIGIT_BITS * row for (row, _), digit in zip(launch, digits, strict=True))
                for digits in itertools.product(*(self.digits[kind] for _, kind in launch))
            ]
            found = self._combinations[launch] = [(code, self.advances(code)) for code in codes]
        return found

    def advances(self, code: int) -> int:
        """How far each row's frontier moves, packed with LENGTH_BITS a row."""
        found = self._advances.get(code)
        if found is None:
            found, row, rest = 0, 0, code
            while rest:
                found |= self._advance[rest & (1 << DIGIT_BITS) - 1] << LENGTH_BITS * row
                row, rest = row + 1, rest >> DIGIT_BITS
            self._advances[code] = found
        return found


def pack_lengths(lengths: Sequence[int]) -> int:
    """One number of a length of each row."""
    return sum(length << LENGTH_BITS * row for row, length in enumerate(lengths))


def unpack_lengths(packed: int, num_rows: int) -> list[int]:
    """The inverse of `pack_lengths`."""
    return [packed >> LENGTH_BITS * row & (1 << LENGTH_BITS) - 1 for row in range(num_rows)]


def rows_mask(rows: Sequence[int], bits: int) -> int:
    """All bits of these rows' places, `bits` each."""
    return sum(((1 << bits) - 1) << bits * row for row in rows)
