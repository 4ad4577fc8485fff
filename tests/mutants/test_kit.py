"""A mutant is what it says, wherever it says, as long as it says; and each is one that somebody had."""

import re

import pytest
from mutants.checks import CHECKS
from mutants.kit import Edit, applied, function_of, mutated_code
from mutants.mutants import MUTANTS

from jspec.scheduler import chunk_len
from jspec.state import Limits

CHUNK_LEN = "jspec.scheduler.admit:chunk_len"
SIZES = {"page_size": 4, "lookahead": 0}


def test_a_function_is_another_while_it_lasts():
    """Also for those that have imported it by name."""
    edit = Edit(CHUNK_LEN, "        return end - start", "        return 99")
    assert chunk_len(0, 3, 8, **SIZES) == 3
    with applied([edit]):
        assert chunk_len(0, 3, 8, **SIZES) == 99
    assert chunk_len(0, 3, 8, **SIZES) == 3


def test_it_is_itself_again_after_an_exception():
    edit = Edit(CHUNK_LEN, "        return end - start", "        raise KeyError(start)")
    with pytest.raises(KeyError), applied([edit]):
        chunk_len(0, 3, 8, **SIZES)
    assert chunk_len(0, 3, 8, **SIZES) == 3


def test_a_property_is_edited():
    limits = Limits(context_len=8, alloc_len=3, depth=1, max_prefill_tokens=8, max_prefill_rows=1)
    with applied([Edit("jspec.state.scheduler_state:Limits.reserve_len", "self.depth + 1", "self.depth + 2")]):
        assert limits.reserve_len == 9
    assert limits.reserve_len == 6


@pytest.mark.parametrize(("old", "count"), [("no such line", "0"), ("start", "[2-9]")])
def test_what_is_replaced_must_be_there_once(old, count):
    with pytest.raises(AssertionError, match=rf"chunk_len holds '{old}' {count} times"):
        mutated_code(Edit(CHUNK_LEN, old, "x"))


def test_an_edit_that_changes_nothing_is_none():
    with pytest.raises(AssertionError):
        mutated_code(Edit(CHUNK_LEN, "end - start <= budget", "end - start <= budget"))


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_every_mutant_is_another_code(mutant):
    """The replaced text is there once, and what comes out is not what was there."""
    assert re.fullmatch(r"[\w.-]+/[\w.-]+ (issue|pull request) \d+", mutant.report), mutant.report
    assert mutant.check in CHECKS and mutant.sees and mutant.fault
    for edit in mutant.edits:
        new, code = mutated_code(edit), function_of(edit.function).__code__
        assert (new.co_code, new.co_consts, new.co_names) != (code.co_code, code.co_consts, code.co_names)


def test_mutants_are_many_and_different():
    assert len(MUTANTS) >= 40
    assert len({mutant.name for mutant in MUTANTS}) == len({mutant.edits for mutant in MUTANTS}) == len(MUTANTS)
    assert {mutant.check.split(":")[0] for mutant in MUTANTS} == {"explore", "walk", "engine"}
