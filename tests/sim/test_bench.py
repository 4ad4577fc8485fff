"""`jspec bench sim`, and the example."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jspec.bench import sim as bench
from jspec.bench.sim import SimSpeed, measure_sim, measure_transitions, sim_json, sim_tables
from jspec.bench.tables import console
from jspec.cli import app

EXAMPLE = Path(__file__).parents[2] / "examples" / "speedup_against_batch.py"
SPEED = SimSpeed(name="reserve + settle", rows=4, configurations=8, request_rounds=6_000_000, seconds=2.0, cpu_seconds=0.5)  # fmt: skip


def shown(speeds):
    out = console()
    with out.capture() as captured:
        out.print(sim_tables(speeds))
    return captured.get()


def test_a_rate_is_rounds_over_seconds():
    assert (SPEED.per_s, SPEED.per_core_s) == (3e6, 12e6)
    text = shown([SPEED])
    for cell in ("reserve + settle", "6,000,000", "12.0 M/s", "3.0 M/s", ">= 10 M/s"):
        assert cell in text
    (loop,) = json.loads(json.dumps(sim_json([SPEED])))["loops"]
    assert loop["per_core_s"] == 12e6 and loop["configurations"] == 8


def test_transitions_alone_count_every_row():
    speed = measure_transitions(3, configurations=2, page_size=4, iterations=10)
    assert speed.request_rounds == 3 * 2 * 10 and speed.seconds > 0 and speed.cpu_seconds > 0


def test_one_core_is_given_back():
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("this system does not say where a process runs")
    before = os.sched_getaffinity(0)
    with bench._one_core():
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("option", ["--total-rows", "--page-size", "--requests-per-row", "--rows"])
def test_the_command_says_what_is_wrong(option):
    result = CliRunner().invoke(app, ["bench", "sim", option, "0"])
    assert result.exit_code == 2 and f"{option[2:].replace('-', '_')}=0 must be at least 1" in result.output


@pytest.mark.slow
def test_the_command_measures():
    options = ["--rows", "2", "--total-rows", "4", "--page-size", "32", "--requests-per-row", "2", "--json"]
    result = CliRunner().invoke(app, ["bench", "sim", *options])
    assert result.exit_code == 0, result.output
    alone, full = json.loads(result.output)["loops"]
    assert (alone["name"], full["name"]) == ("reserve + settle", "full simulation")
    assert full["configurations"] == 2 and full["request_rounds"] > 2 * 2 * 2 * 20


@pytest.mark.slow
def test_a_core_reaches_the_goal():
    assert all(speed.per_core_s >= bench.GOAL for speed in measure_sim((64, 256)))


@pytest.mark.slow
def test_the_example_draws_its_figure(tmp_path):
    run = subprocess.run(
        [sys.executable, EXAMPLE, tmp_path / "figure.png"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"
    simulated, formula = zip(*(
        (float(line.split()[3][:-1]), float(line.split()[5][:-1])) for line in run.stdout.splitlines() if " k = " in line
    ), strict=True)  # fmt: skip
    assert len(simulated) == 5 and simulated == pytest.approx(formula, rel=0.05)
