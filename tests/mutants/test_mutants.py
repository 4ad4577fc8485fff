"""Faults that other engines had, put into this one: each is seen, and the code as it is passes the check that sees it."""

import pytest
from mutants.checks import CHECKS
from mutants.kit import applied
from mutants.mutants import MUTANTS

NAMES = [mutant.name for mutant in MUTANTS]


@pytest.mark.parametrize("check", sorted({mutant.check for mutant in MUTANTS}))
def test_the_code_as_it_is_passes(check):
    assert CHECKS[check]() is None


@pytest.mark.parametrize("mutant", MUTANTS, ids=NAMES)
def test_a_mutant_is_killed(mutant, record_property):
    with applied(mutant.edits):
        seen = CHECKS[mutant.check]()
    assert seen is not None, f"{mutant.check} does not see that {mutant.fault} ({mutant.report})"
    assert seen.startswith(mutant.sees), seen
    record_property("killed by", f"{mutant.check}: {seen}")
    print(f"{mutant.name} | {mutant.report} | {mutant.check} | {seen}")
