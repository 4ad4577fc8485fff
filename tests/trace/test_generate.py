"""`jspec generate --trace` records a run of a model from files, which `jspec trace` then reads; and what `jspec bench trace` makes of one."""

import json
from pathlib import Path

import pytest
from tiny_checkpoint import write_checkpoint
from typer.testing import CliRunner

from jspec.bench.prompts import load_prompt_sets
from jspec.bench.serve_report import Spread
from jspec.bench.tables import console
from jspec.bench.trace import TraceCost, TraceJob, trace_tables
from jspec.cli import app
from jspec.config import EngineConfig
from jspec.trace.format import read_trace
from jspec.trace.timeline import timeline


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("model")))


def run(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args])


def generate(model, *args):
    # As the bench has them, which runs the longest of the bundled prompts: so its programs are compiled once.
    context_len = max(len(text.encode()) + 1 for text in load_prompt_sets(["bundled"])[0].texts) + 6
    sizes = ["--algorithm", "plain", "--max-new-tokens", 6, "--ignore-eos"]
    sizes += ["--context-len", context_len, "--max-running", 1]
    return run("generate", "--model", model, "--prompt", "abcabc", "--prompt", "[red]xyz", *sizes, "--json", *args)


def test_a_run_of_the_command_line(model, tmp_path):
    path = tmp_path / "a run.jspec"
    plainly, recorded = generate(model), generate(model, "--trace", path)
    assert recorded.exit_code == 0, recorded.output
    records = [json.loads(line) for line in recorded.stdout.splitlines()]
    assert records[:-1] == [json.loads(line) for line in plainly.stdout.splitlines()][:-1]
    assert records[-1]["summary"]["compiles_after_warmup"] == 0
    found = timeline(read_trace(path), checked=True)
    assert found.broken is None and found.header.algorithm == "plain" and found.header.model == Path(model).name
    lives = list(found.requests.values())
    assert [life.rid for life in lives] == ["r1", "r2"]
    assert [life.num_tokens for life in lives] == [6, 6] and {life.finish_reason for life in lives} == {"LENGTH"}
    assert lives[0].prompt.startswith("abcabc") and lives[1].prompt.startswith("[red]xyz")
    replayed = run("trace", "replay", path)
    assert replayed.exit_code == 0 and "all as recorded, every invariant holds" in replayed.stdout
    shown = run("trace", "show", path)
    assert shown.exit_code == 0 and " r1 " in shown.stdout
    explained = run("trace", "explain", path, "--rid", "r1", "--iter", 2, "--field", "seq_lens")
    assert explained.exit_code == 0 and explained.stdout.startswith("seq_lens = 7: ")


def test_a_file_that_cannot_be_written(model, tmp_path):
    result = generate(model, "--trace", tmp_path / "none" / "run.jspec")
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.splitlines()[-1] == f"error: {tmp_path / 'none' / 'run.jspec'}: No such file or directory"


# --- bench trace --------------------------------------------------------------------------------------------------------------


def bench(model, *args):
    return run("bench", "trace", "--model", model, "--algorithm", "plain", *args)


def test_what_the_bench_finds(model):
    result = bench(model, "--max-new-tokens", 6, "--rounds", 2, "--json")
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    found = json.loads(line)
    assert (found["algorithm"], found["batch"], found["rounds"], found["steps"]) == ("plain", 1, 2, 5)
    # A warm-up of 4 tokens, 2 rounds and one to time the recorder alone; each a prefill and a step a token that follows.
    assert found["tokens"] == found["iterations"] == 4 + 3 * 6
    assert found["bytes_per_token"] == found["bytes_per_iteration"] == found["file_bytes"] / 22 > 50
    assert found["goals"] == {"ratio": 1.03, "checked": 100.0}
    for name in ("step_ms", "traced_step_ms", "ratio", "checked", "unchecked"):
        assert 0 < found[name]["low"] <= found[name]["median"] <= found[name]["high"], name
    assert 0 < found["recorder_us"] / 1e3 < found["traced_step_ms"]["high"] * 6
    assert found["recorder_share"] == pytest.approx(found["recorder_us"] / 1e3 / found["step_ms"]["median"])
    assert found["run_s"] > 5 * found["step_ms"]["low"] / 1e3 and found["read_ms"] > 0


def test_the_table_of_the_bench():
    cost = TraceCost(
        model="m", algorithm="ngram", batch=2, max_new_tokens=9, rounds=3, steps=8,
        step_ms=Spread(median=20.0, low=19.0, high=22.5), traced_step_ms=Spread(median=20.5, low=19.5, high=22.0),
        ratio=Spread(median=1.0125, low=0.98, high=1.05), recorder_us=101.0, recorder_share=0.00505,
        iterations=100, tokens=250, file_bytes=20000, run_s=2.0, read_ms=1.5,
        checked=Spread(median=120.4, low=90.0, high=130.0), unchecked=Spread(median=300.0, low=300.0, high=301.0),
    )  # fmt: skip
    out = console()
    with out.capture() as capture:
        out.print(trace_tables(cost))
    text = " ".join(capture.get().split())
    for piece in (
        "m, ngram, greedy, batch 2, 9 tokens, 8 steps, 3 round(s)",
        "ms a step without a trace 20.000 (19.000-22.500)",
        "with over without 1.012x (0.980-1.050) < 1.03x",
        "microseconds in the recorder, an iteration 101 of a step 0.51 % < 3 %",
        "bytes an iteration 200 a token 80",
        "replay, checked, over the run 120x (90-130) >= 100x unchecked 300x (300-301)",
        "100 iterations and 250 tokens in 20000 bytes",
    ):
        assert piece in text, text


@pytest.mark.parametrize(
    ("options", "piece"),
    [
        (["--rounds", 0], "rounds=0 must be at least 1"),
        (["--max-new-tokens", 1], "max_new_tokens=1 must be at least 2"),
        (["--algorithm", "eagle9"], "algorithm"),
        (["--batch", 0], "max_running=0"),
        (["--model", "no/such/model"], "no/such/model"),
    ],
)
def test_what_the_bench_refuses(model, options, piece):
    result = bench(model, *options)
    assert result.exit_code == 2 and result.stdout == "" and piece in result.stderr


def test_the_bench_has_a_file_of_its_own():
    with pytest.raises(ValueError, match="trace='x' must be left out"):
        TraceJob(config=EngineConfig(trace="x"))
