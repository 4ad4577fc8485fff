"""A path that was found is a recording: `jspec trace` opens it, and the transitions answer as they did."""

from explore.kit import config
from explore.test_cli_explore import run
from typer.testing import CliRunner

from jspec.cli import app
from jspec.explore.moves import Moves
from jspec.explore.path import Abort, Iteration, Path, Replay
from jspec.explore.recording import record_path
from jspec.trace.format import read_trace
from jspec.trace.replay import replay, replay_until
from jspec.trace.timeline import timeline


def a_walk(sizes, *, abort_at: int) -> Path:
    """All requests come, one is aborted, and the device always brings the most it can, until all have ended."""
    moves = Moves(sizes)
    walk = Replay(moves)
    for index in range(len(sizes.requests)):
        walk.submit(index)
    for step in range(100):
        if step == abort_at:
            walk.abort(walk.node.live[-1][0])
        if not walk.node.live and not walk.node.launches:
            break
        walk.iterate(lambda launch: [moves.outcomes.longest(kind) for _, kind in launch.rows])
    assert all(frame.violation is None for frame in walk.frames) and not walk.node.live
    return Path(sizes, tuple(frame.input for frame in walk.frames))


def test_a_path_is_a_sound_recording(tmp_path):
    sizes = config("5+3,shared=4", "4+4,shared=4", "2+5", pages=9, max_prefill_tokens=4, verify_width=3)
    path = a_walk(sizes, abort_at=4)
    assert any(isinstance(given, Abort) for given in path.inputs)
    record_path(path, tmp_path / "path.jspec")
    recording = read_trace(tmp_path / "path.jspec")
    assert recording.broken is None
    found = replay_until(recording)  # compares every plan and settle, and checks every invariant
    assert not found.states[0].requests.serial.any()
    launches = sum(isinstance(given, Iteration) and given.result is not None for given in path.inputs)
    assert found.num_iterations == launches > 5
    shown = timeline(recording)
    assert {life.finish_reason for life in shown.requests.values()} == {"LENGTH", "ABORT"}
    assert any(line.kind == "chunk" for iteration in shown.iterations for line in iteration.lines)


def test_a_violation_is_recorded_up_to_its_launch(tmp_path):
    """One window less than `depth + 1`: the launch that would write past its allocation is the recording's last."""
    file = tmp_path / "short.jspec"
    args = ["--request", "1+12", "--rows", 1, "--pages", 30, "--page-size", 1, "--stops", "none", "--no-aborts"]
    result = run(*args, "--reserve-windows", 1, "--out", file)
    assert result.exit_code == 1 and f"recorded: jspec trace show {file}" in result.stdout
    *_, moment = replay(read_trace(file), checked=False)
    assert moment.frame[0] == "plan" and len(moment.after[0].launched) == 2
    shown = CliRunner().invoke(app, ["trace", "show", str(file)])
    assert shown.exit_code == 0 and "decode" in shown.stdout


def test_nothing_is_recorded_where_nothing_is_found(tmp_path):
    file = tmp_path / "none.jspec"
    assert run("--request", "2+2", "--rows", 1, "--out", file).exit_code == 0 and not file.exists()
