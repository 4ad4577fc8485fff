"""`jspec explore`: what it prints, and with which exit code."""

import pytest
from typer.testing import CliRunner

from jspec.cli import app


def run(*args):
    return CliRunner().invoke(app, ["explore", *(str(arg) for arg in args)])


def test_a_sound_configuration():
    result = run("--request", "2+3", "--rows", 1, "--pages", 6, "--page-size", 2, "--verify-width", 3, "--depth", 1)
    assert result.exit_code == 0, result.output
    words = result.stdout.split()
    for name in ("states", "transitions", "depth", "time", "states/s"):
        assert name in words
    assert "no violation: all states visited, and every request ends from each of them" in result.stdout


def test_a_violation_has_a_path_and_exit_code_1():
    args = ["--request", "1+12", "--rows", 1, "--pages", 30, "--page-size", 1, "--stops", "none", "--no-aborts"]
    result = run(*args, "--reserve-windows", 1)
    assert result.exit_code == 1
    assert "violation: a launch writes inside its allocation: row 1 would write from 2" in result.stdout
    assert "submit request 1" in result.stdout and "VIOLATION" in result.stdout
    assert "row 1 kv_allocated_len: 1 → 3" in result.stdout


def test_a_search_that_is_cut_short_says_so():
    result = run("--max-states", 50)
    assert result.exit_code == 0
    assert "no violation so far: the search was cut short, and liveness not checked" in result.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--pages", 2], "error: pages=2 cannot hold request 2+4"),
        (["--rows", 0], "error: rows=0 must be a whole number from 1 to 8"),
        (["--request", "three"], "error: request='three' must read like"),
        (["--stops", "maybe"], "error: stops='maybe' must be one of token, string, both, none"),
        (["--verify-width", 8, "--stops", "both", "--pages", 99], "error: verify_width=8 with stops='both' has"),
        (["--max-states", 0], "error: max_states=0 must be at least 1"),
        (["--jobs", 0], "error: jobs=0 must be at least 1"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(args, message):
    result = run(*args)
    assert result.exit_code == 2 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith(message)


def test_an_unknown_option_is_refused():
    assert run("--colour", "red").exit_code == 2
