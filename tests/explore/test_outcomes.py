"""What a launch may bring, and what the host should make of it."""

import itertools

import pytest
from explore.kit import config
from oracles import NOT_FINITE, SlowRequest

from jspec.explore.outcomes import (
    CHUNK,
    LOST,
    PROMPT,
    STEP,
    TAIL,
    Outcome,
    Outcomes,
    pack_lengths,
    plain_rule,
    unpack_lengths,
)
from jspec.state.results import NEVER

EOS = 7


@pytest.mark.parametrize("aborted", [False, True])
def test_the_plain_rule_is_that_of_the_slow_request(aborted):
    outcomes = Outcomes(config("1+1", pages=40, verify_width=4, stops="both", failures=True))
    for outcome, limit in itertools.product(outcomes.all[1:], range(1, 7)):
        for before in range(limit):
            slow = SlowRequest(1, [0], limit, (EOS,), output=[0] * before, aborted=aborted)
            run = [EOS if place == outcome.token_stop else 0 for place in range(1, outcome.accept + 1)]
            shown = slow.take(NOT_FINITE if outcome.failed else run, outcome.string_stop or NEVER)
            taken = plain_rule(outcome, before, limit, aborted)
            assert (taken.num_new, taken.num_visible, taken.reason) == (
                len(slow.output) - before,
                len(shown),
                slow.reason,
            )


def test_every_outcome_has_a_number():
    outcomes = Outcomes(config("1+1", pages=40, verify_width=3))
    assert outcomes.digits[LOST] == (0,) and len(outcomes.digits[CHUNK]) == 1
    assert len(outcomes.digits[PROMPT]) == len(outcomes.digits[TAIL]) == 2
    assert len(outcomes.digits[STEP]) == (1 + 1) + (2 + 1) + (3 + 1)
    assert len({outcomes[digit] for kind in (CHUNK, PROMPT, STEP) for digit in outcomes.digits[kind]}) == 12
    assert outcomes[outcomes.longest(STEP)] == Outcome(3, True) and outcomes[outcomes.worst(STEP)] == Outcome(
        3, True, 1
    )
    assert outcomes[outcomes.longest(PROMPT)] == Outcome(1, False)


def test_outcomes_of_a_launch_are_one_number():
    outcomes = Outcomes(config("1+1", pages=40, verify_width=2, stops="none"))
    found = outcomes.combinations(((1, STEP), (3, PROMPT), (2, LOST)))
    assert len(found) == 2
    for code, moved in found:
        assert outcomes.digit(code, 2) == 0 and not outcomes[outcomes.digit(code, 3)].commits
        assert unpack_lengths(moved, 4) == [0, outcomes[outcomes.digit(code, 1)].accept, 0, 0]
    assert unpack_lengths(pack_lengths([0, 250, 3, 0]), 4) == [0, 250, 3, 0]


def test_too_many_outcomes_are_refused():
    with pytest.raises(ValueError, match=r"verify_width=8 with stops='both' has .* outcomes a row"):
        Outcomes(config("1+1", pages=100, verify_width=8, stops="both"))
