"""A replay is in the states that the engine had; where a transition or the record differs, the first place is named."""

import functools
import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from jspec import SamplingParams
from jspec.cli import app
from jspec.state.dense import replace
from jspec.state.invariants import InvariantError
from jspec.state.requests import FinishReason
from jspec.trace.format import Recording, read_trace
from jspec.trace.replay import Divergence, replay, replay_until
from jspec.trace.timeline import timeline

from .kit import (
    MIXED,
    RIGHT,
    WORKERS,
    WRONG,
    Recorded,
    Watched,
    assert_replays,
    assert_same,
    everything_of,
    prompt_of,
    record,
    two_requests,
    with_frames,
)


@pytest.mark.parametrize("worker", WORKERS)
def test_a_replay_is_in_every_state_the_engine_was_in(worker):
    found = everything_of(worker)
    assert_replays(found.watched, found.recording)


@pytest.mark.parametrize("worker", WORKERS)
def test_everything_happened(worker):
    """Else the test above shows little."""
    watched, _, recording = everything_of(worker)
    run = timeline(recording)
    lines = [line for iteration in run.iterations for line in iteration.lines]
    assert {line.kind for line in lines} == {"prompt", "chunk", "tail", "decode"}
    assert {mode for iteration in run.iterations for mode in iteration.modes} == {"extend", "mixed", "decode"}
    assert any(line.kind == "prompt" and line.cache_protected_len > 0 for line in lines), "no prefix was shared"
    assert not all(line.live for line in lines), "no outcome came late"
    left = [gone for moment in replay(recording) for plan in moment.planned for gone in plan.left]
    assert {gone.for_priority for gone in left if gone.reason is FinishReason.NONE} == {True, False}
    assert FinishReason.ABORT in {gone.reason for gone in left}, "nobody was aborted in the middle of a prompt"
    assert any(
        len(moment.before[0].prefix_cache.pages) > len(moment.after[0].prefix_cache.pages)
        for moment in replay(recording)
    )
    outputs = {rid: output for (rid, index), output in watched.outputs.items() if index == 0}
    reasons = {rid: output.finish_reason for rid, output in outputs.items()}
    assert reasons["ends inside a run"] == reasons["stops at a string"] == "stop"
    for rid in ("ends inside a run", "stops at a string"):
        (last,) = [line for line in lines if line.rid == rid and line.finish_reason]
        assert last.finish_reason == "STOP" and 0 < last.visible < last.accept_lens, rid
    assert reasons["aborted"] == "abort" and outputs["aborted"].token_ids
    assert reasons["late"] == "timeout" and outputs["late"].token_ids
    assert reasons["aborted at once"] == "abort" and reasons["late before it began"] == "timeout"
    assert not outputs["aborted at once"].token_ids and not outputs["late before it began"].token_ids
    assert ("twice", 1) in watched.outputs
    assert any(frame[0] == "plan" and not frame[3][0][0] for frame in recording.frames), "no plan came to nothing"


def test_a_replay_can_stop_before_any_plan():
    """`until` k: everything that happened before the plan that follows iteration k."""
    found = everything_of("oracle")
    seen = found.watched.seen
    plans = [i for i, (kind, states) in enumerate(seen) if kind == "plan"]
    launched = [i for i in plans if seen[i][1][0].forward_iter > (seen[i - 1][1] or seen[i - 2][1])[0].forward_iter]
    assert replay_until(found.recording, 0).num_iterations == 0
    for k in (1, 2, 17, len(launched) - 1):
        result = replay_until(found.recording, k)
        assert result.num_iterations == k and result.num_states == launched[k]
        assert_same(result.states, seen[launched[k] - 1][1])
    whole = replay_until(found.recording)
    assert whole.num_iterations == len(launched) and whole.num_states == len(seen)
    assert whole.run_seconds > 0 and whole.seconds > 0 and whole.speed == whole.run_seconds / whole.seconds


@pytest.mark.slow
def test_no_overlap_replays_too():
    def run(watched: Watched) -> None:
        for token in (RIGHT, MIXED, WRONG):
            watched.submit([token], SamplingParams(max_new_tokens=9))
            watched.step(2)
        watched.drain()

    found = record("oracle, no overlap", run)
    assert_replays(found.watched, found.recording)
    assert all(iteration.settled_in == iteration.forward_iter for iteration in timeline(found.recording).iterations)


_TWO_RANKS = """
import sys, tempfile
from pathlib import Path
import kit
import engine.kit
from jspec import SamplingParams
from jspec.models.parallel import data_mesh
from jspec.models.tiny import random_target
from jspec.models.tiny_draft import random_draft
from jspec.spec_workers import EagleSizes, eagle, plain
from jspec.trace.format import read_trace
from jspec.trace.timeline import timeline

target = random_target(0, mesh=data_mesh(2), vocab_size=64, context_len=64, num_layers=1)
worker = plain(target)
if sys.argv[1] == "eagle":
    worker = eagle(target, random_draft(target, 1), sizes=EagleSizes(num_steps=2))
path = Path(tempfile.mkdtemp(), "ranks.jspec")
sizes = {**kit.PRESSED, "max_running": 2, "kv_tokens": 96}
run = kit.Watched(engine.kit.build(target, worker=worker, trace=str(path), **sizes))
shared = kit.prompt_of(40, last=5)
for i, prompt in enumerate([shared, [1, 2], [3] * 30, shared, [4], [5] * 9, [6, 7]]):
    run.submit(prompt, SamplingParams(max_new_tokens=20 - i, n=1 + (i == 4)), rid=f"r{i}")
    run.step(3)
    if i == 5:
        assert run.engine.abort("r5")
run.drain()
run.submit([1], SamplingParams(max_new_tokens=9), rid="alone")
run.drain()
run.engine.close()
assert run.engine.summary().compiles_after_warmup == 0
recording = read_trace(path)
kit.assert_replays(run, recording)
found = timeline(recording)
modes = {mode for iteration in found.iterations for mode in iteration.modes}
assert modes == {"extend", "mixed", "decode", "idle"}, modes
assert {line.rank for iteration in found.iterations for line in iteration.lines} == {0, 1}
assert all(len(iteration.modes) == 2 for iteration in found.iterations)
assert all(sum(iteration.pages) == found.num_pages == 2 * 24 for iteration in found.iterations)
for iteration in found.iterations:
    assert (iteration.committed is None) == (sys.argv[1] == "plain")
    assert iteration.committed is None or iteration.published <= iteration.committed
for life in found.requests.values():
    output = run.outputs[life.rid, life.index]
    tokens = [token for iteration in found.iterations for line in iteration.lines
              if line.serial == life.serial and line.live for token in line.tokens[: line.visible]]
    assert tokens == output.token_ids and life.num_tokens == len(tokens), life.rid
print("as recorded")
"""


@pytest.mark.parametrize("worker", ["plain", pytest.param("eagle", marks=pytest.mark.slow)])
def test_two_ranks(worker):
    """Each rank has a state of its own; the receipt of a second program is of both."""
    here = Path(__file__).parent
    flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    environment = os.environ | {
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parent), *sys.path]),
    }
    command = [sys.executable, "-c", _TWO_RANKS, worker]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=450)
    assert done.returncode == 0, done.stderr[-8000:]
    assert done.stdout == "as recorded\n"


# --- the first difference ---------------------------------------------------------------------------------------------------


def changed(found: Recorded, tmp_path: Path, change) -> Path:
    """The file with other frames."""
    path = tmp_path / "changed.jspec"
    path.write_bytes(with_frames(found.data, change))
    return path


def first(frames, kind: str, number: int = 0):
    """The frame of that kind with that number."""
    return [frame for frame in frames if frame[0] == kind][number]


def _plan(part: int, *, at: tuple[int, ...], value, number: int = 2):
    """Puts `value` into a "plan" frame, at a place in one of the parts of the first rank."""

    def change(frames) -> None:
        place = first(frames, "plan", number)[3][0]
        for step in (part, *at[:-1]):
            place = place[step]
        place[at[-1]] = value

    return change


def _set(kind: str, number: int, part: int, value):
    def change(frames) -> None:
        first(frames, kind, number)[3 if kind == "plan" else 2][0][part] = value

    return change


# Of `two_requests`: iteration 3 launches "right" on row 1, decoding, with "wrong" on row 2 still waiting; see test_timeline.
RECORD_CHANGES = {
    "an allocated length": (_plan(3, at=(0, 2), value=99, number=1), (2, "kv_allocated_len", 99, 16, 1)),
    "an output length": (_plan(3, at=(0, 0), value=2, number=1), (2, "output_len", 2, 0, 1)),
    "an epoch": (_plan(3, at=(0, 4), value=1, number=1), (2, "epoch", 1, 0, 1)),
    "a page": (_plan(4, at=(0,), value=[7, 8], number=1), (2, "pages granted", [7, 8], [2, 3, 4], 1)),
    "rows": (_set("plan", 1, 2, [2]), (2, "running rows", [2], [1], None)),
    "a mode": (_set("plan", 0, 0, "decode"), (1, "forward_mode", "decode", "extend", None)),
    "who left": (_set("plan", 1, 5, [[1, 1, 0, 4]]), (2, "requests that left", [[1, 1, 0, 4]], [], None)),
    "a frontier": (_set("settle", 1, 1, [9]), (2, "kv_committed_len", 9, 8, 1)),
    "a digest": (_set("settle", 0, 6, 5), (1, "the digest of rows and clocks after its settle", 5, None, None)),
    "an end": (_set("settle", 1, 5, [[1, 1, 0, []]]), (2, "rows that ended", [[1, "LENGTH"]], [], None)),
}
"""What is written into the record instead, and the iteration, field, value on record, value found, and row that are named."""


@pytest.mark.parametrize("name", RECORD_CHANGES)
def test_a_number_of_the_record_that_is_not_what_the_transitions_answer(name, tmp_path):
    change, (iteration, field, expected, got, row) = RECORD_CHANGES[name]
    path = changed(two_requests(), tmp_path, change)
    with pytest.raises(Divergence) as found:
        list(replay(read_trace(path)))
    error = found.value
    assert (error.iteration, error.rank, error.field, error.expected, error.row) == (iteration, 0, field, expected, row)
    assert error.got == got if got is not None else error.got != expected
    result = CliRunner().invoke(app, ["trace", "replay", str(path)])
    where = f"iteration {iteration}, rank 0" + (f", row {row}" if row is not None else "")
    assert result.exit_code == 1
    assert result.stdout == f"diverged: {where}: {field} is {error.got}, the record says {expected}\n"


def test_a_run_that_differs_is_shown_as_far_as_it_does_not(tmp_path):
    """Such as one that another version of the transitions recorded."""
    change, _ = RECORD_CHANGES["an allocated length"]
    path = changed(two_requests(), tmp_path, change)
    found = timeline(read_trace(path))
    assert [it.forward_iter for it in found.iterations] == [1]
    why = "the transitions answer other than they did when it was recorded (iteration 2, rank 0, row 1: kv_allocated_len is 16, the record says 99)"
    assert found.broken == why
    for command in (["show"], ["explain", "--rid", "right", "--iter", "1", "--field", "seqlen"], ["view"]):
        result = CliRunner().invoke(app, ["trace", command[0], str(path), *command[1:]])
        assert result.exit_code == 0 and result.stderr == f"{path}: {why}; what is before it is read\n"


def test_a_token_on_record_that_would_have_ended_the_request(tmp_path):
    def run(watched: Watched) -> None:
        watched.submit([WRONG], SamplingParams(max_new_tokens=9, stop_token_ids=(63,)), rid="r")
        watched.drain()

    found = record("oracle", run)
    path = changed(found, tmp_path, lambda frames: first(frames, "settle", 2)[2][0][4].__setitem__(0, 63))
    with pytest.raises(
        Divergence, match=r"iteration 3, rank 0: rows that ended is \[\[1, 'STOP'\]\], the record says \[\]"
    ):
        list(replay(read_trace(path)))


def diverges(recording: Recording) -> Divergence:
    with pytest.raises(Divergence) as found:
        list(replay(recording))
    return found.value


def test_a_reserve_of_one_window_less(monkeypatch):
    plan = importlib.import_module("jspec.scheduler.plan")
    real = plan.reserve

    def one_less(ledger, active, *, alloc_len, depth):
        return real(ledger, active, alloc_len=alloc_len, depth=depth - 1)

    monkeypatch.setattr(plan, "reserve", one_less)
    error = diverges(two_requests().recording)
    # 3 tokens and two windows of 5: 13, so pages of 4 to 16; one window: 8.
    assert (error.iteration, error.row, error.field, error.expected, error.got) == (2, 1, "kv_allocated_len", 16, 8)


def test_a_settle_of_one_token_too_few(monkeypatch):
    from jspec.trace.replay import settle_oldest

    def one_less(state, result):
        return settle_oldest(state, replace(result, accept_lens=np.maximum(result.accept_lens - 1, 1)))

    monkeypatch.setattr("jspec.trace.replay.settle_oldest", one_less)
    error = diverges(two_requests().recording)
    assert (error.iteration, error.row, error.field, error.expected, error.got) == (2, 1, "kv_committed_len", 8, 7)


def test_a_settle_that_counts_what_no_frontier_tells(monkeypatch):
    """A prompt's first token is not in its frontier: the digest shows that it is missing."""
    from jspec.trace.replay import settle_oldest

    def none_of_prompts(state, result):
        accept_lens = result.accept_lens * state.launched[0].commits
        return settle_oldest(state, replace(result, accept_lens=accept_lens))

    monkeypatch.setattr("jspec.trace.replay.settle_oldest", none_of_prompts)
    error = diverges(two_requests().recording)
    assert error.iteration == 1 and "digest" in error.field


@pytest.mark.parametrize("worker", WORKERS)
def test_an_admission_in_another_order(worker, monkeypatch):
    admit = importlib.import_module("jspec.scheduler.admit")
    monkeypatch.setattr(admit, "_in_order", lambda state, limits: list(state.waiting)[::-1])
    error = diverges(everything_of(worker).recording)
    assert error.iteration > 5
    assert "rows" in error.field or "clocks" in error.field or error.row is not None


def test_an_unsound_state_is_told_with_its_place(monkeypatch, tmp_path):
    """Transitions that answer as recorded may still break an invariant that was not on record."""
    real = replay_until.__globals__["settle_oldest"]

    def leaky(state, result):
        state, launched, settled = real(state, result)
        locks = state.ledger.page_locks + (np.arange(len(state.ledger.page_locks)) == 5)
        return replace(state, ledger=replace(state.ledger, page_locks=locks.astype(np.int32))), launched, settled

    monkeypatch.setattr("jspec.trace.replay.settle_oldest", leaky)
    recording = two_requests().recording
    with pytest.raises(
        InvariantError, match=r"^iteration 2, rank 0, after a 'settle': a page is locked once .* fails at index \[5\]"
    ):
        list(replay(recording))
    list(replay(recording, checked=False))
    path = tmp_path / "run.jspec"
    path.write_bytes(two_requests().data)
    result = CliRunner().invoke(app, ["trace", "replay", str(path)])
    assert result.exit_code == 1
    assert result.stdout.startswith("diverged: iteration 2, rank 0, after a 'settle': a page is locked once")


def test_the_first_difference_is_told_not_a_later_one(tmp_path):
    def change(frames) -> None:
        first(frames, "plan", 3)[3][0][3][0][2] = 77
        first(frames, "plan", 1)[3][0][3][0][2] = 88

    path = changed(two_requests(), tmp_path, change)
    assert diverges(read_trace(path)).expected == 88


# --- random walks ---------------------------------------------------------------------------------------------------------


def walk(seed: int, steps: int, watched: Watched) -> None:
    """Random requests, aborts and steps, with a pool that does not suffice and prompts that begin alike."""
    rng = np.random.default_rng(seed)
    heads = [prompt_of(40, last=RIGHT, seed=seed + i) for i in range(3)]
    rids = []
    for _ in range(steps):
        action = rng.random()
        if action < 0.25:
            head = heads[rng.integers(3)][: int(rng.integers(0, 41))]
            prompt = [*head, *rng.integers(0, 64, rng.integers(1, 30)).tolist()]
            params = SamplingParams(
                max_new_tokens=int(rng.integers(1, 50)),
                ignore_eos=bool(rng.random() < 0.5),
                priority=int(rng.integers(0, 3)),
                n=int(rng.choice([1, 1, 1, 2])),
                temperature=float(rng.choice([0.0, 5.0])),
                seed=int(rng.integers(100)),
                stop_token_ids=tuple(rng.integers(0, 64, rng.integers(0, 3)).tolist()),
                timeout_s=1e-9 if rng.random() < 0.05 else None,
            )
            rids.append(watched.submit(prompt, params))
        elif action < 0.32 and rids:
            watched.engine.abort(rids[rng.integers(len(rids))])
        else:
            watched.step(int(rng.integers(1, 4)))
    if rng.random() < 0.8:  # else it is closed with launches under way
        watched.drain()


SLOW_SEEDS = [pytest.param(seed, 400, marks=pytest.mark.slow) for seed in range(100, 140)]


@pytest.mark.parametrize(("seed", "steps"), [*((seed, 60) for seed in range(3)), *SLOW_SEEDS])
@pytest.mark.parametrize("worker", WORKERS)
def test_random_walks(worker, seed, steps):
    settings = {"policy": "longest-prefix"} if seed % 2 else {}
    settings |= {"prefix_cache": False} if seed % 5 == 4 else {}
    found = record(worker, functools.partial(walk, seed, steps), **settings)
    assert_replays(found.watched, found.recording)
    run = timeline(found.recording)
    for life in run.requests.values():
        output = found.watched.outputs.get((life.rid, life.index))
        lines = [line for it in run.iterations for line in it.lines if line.serial == life.serial and line.live]
        tokens = [token for line in lines for token in line.tokens[: line.visible]]
        if output is not None:
            assert tokens == output.token_ids and life.num_tokens == len(tokens)
            assert life.retractions == output.retractions and life.ended is not None
            assert {"timeout": "ABORT"}.get(output.finish_reason, output.finish_reason.upper()) == life.finish_reason
        else:
            assert life.ended is None or life.aborted == life.ended, "told by a step that never came"
