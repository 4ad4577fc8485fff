"""Files that are cut, damaged, of another program or of another version: what is whole is read, what is not is told with its place, in one line."""

import logging
import re
import struct
import zlib

import msgpack
import pytest
from typer.testing import CliRunner

from jspec import SamplingParams
from jspec.cli import app
from jspec.trace.format import MAGIC, TraceError, read_trace
from jspec.trace.replay import replay, replay_until
from jspec.trace.timeline import timeline

from .kit import MAGIC_LEN, RIGHT, Watched, encoded, everything_of, frames_of, record, twin, two_requests, with_frames


@pytest.fixture
def written(tmp_path):
    """A function that writes a file and returns its path."""

    def write(data: bytes) -> str:
        path = tmp_path / "run.jspec"
        path.write_bytes(data)
        return str(path)

    return write


def run(*args):
    return CliRunner().invoke(app, ["trace", *map(str, args)])


COMMANDS = (["show"], ["replay"], ["explain", "--rid", "right", "--iter", "2", "--field", "seq_lens"])


def assert_refused(path: str, *pieces: str, commands=COMMANDS) -> None:
    """Exit code 2 and one line, whoever reads it."""
    for command, *options in commands:
        result = run(command, path, *options)
        assert result.exit_code == 2 and result.stdout == "", result.output
        (line,) = result.stderr.splitlines()
        assert line.startswith("error: ")
        for piece in pieces:
            assert piece in line, line


# --- not a trace ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "pieces"),
    [
        (b"", ["is empty: nothing was recorded"]),
        (b"PK\x03\x04 and so on, and more", ["is no trace of jspec", "b'PK\\x03\\x04 and'", "--trace"]),
        (b"jspec\x00ts" + bytes(40), ["is no trace of jspec"]),
    ],
)
def test_what_is_no_trace(written, data, pieces):
    path = written(data)
    with pytest.raises(TraceError, match=re.escape(pieces[0])):
        read_trace(path)
    assert_refused(path, path, *pieces)


def test_no_file_and_a_folder(tmp_path):
    assert_refused(str(tmp_path / "none"), "none: No such file or directory")
    assert_refused(str(tmp_path), "Is a directory")


def test_a_file_that_ends_before_its_header_does(written):
    data = two_requests().data
    end = frames_of(data)[1][0]
    for length in range(1, end):
        with pytest.raises(TraceError, match=f"ends at byte {length}, before its header is whole: record it again"):
            read_trace(written(data[:length]))
    assert_refused(written(data[: end - 1]), f"ends at byte {end - 1}")
    empty = read_trace(written(data[:end]))
    assert empty.frames == [] and "was killed, or still runs" in empty.broken
    assert run("replay", written(data[:end])).stdout.startswith("0 iterations, 0 states")


@pytest.mark.parametrize("version", [0, 2, 10, None, "1"])
def test_another_version(written, version):
    def change(frames) -> None:
        frames[0][1] |= {"version": version, "what it will hold": 3}

    path = written(with_frames(two_requests().data, change))
    assert_refused(
        path, f"has version {version} of the format, this jspec reads version 1", "read it with the jspec that"
    )


@pytest.mark.parametrize(
    ("change", "piece"),
    [
        (lambda frames: frames[0][1].pop("page_size"), "page_size"),
        (lambda frames: frames[0][1].pop("limits"), "limits"),
        (lambda frames: frames[0][1].update(color=3), "color"),
        (lambda frames: frames[0][1]["limits"].update(width=3), "width"),
        (lambda frames: frames[0].__setitem__(0, "submit"), "does not begin with a header but with 'submit'"),
        (lambda frames: frames[0].append(1), "does not begin with a header"),
        (lambda frames: frames.pop(0), "does not begin with a header but with 'submit'"),
    ],
)
def test_a_header_that_is_none(written, change, piece):
    assert_refused(written(with_frames(two_requests().data, change)), piece, "record it again")


# --- cut ----------------------------------------------------------------------------------------------------------------------


def test_cut_at_every_byte_of_the_last_frames(written):
    """What is before the break is read, and the break is told."""
    data = two_requests().data
    frames = frames_of(data)
    starts = [offset for offset, _ in frames]
    for length in range(starts[-3], len(data)):
        found = read_trace(written(data[:length]))
        whole = sum(end <= length for end in [*starts[1:], len(data)]) - 1
        assert found.frames == [frame for _, frame in frames[1 : whole + 1]]
        if length in starts:
            assert found.broken == "the file has no last frame: the process that recorded it was killed, or still runs"
        else:
            begin = max(start for start in starts if start <= length)
            assert found.broken == f"the file was cut at byte {length}, inside the frame that begins at byte {begin}"
        assert replay_until(found).num_iterations > 0
        timeline(found)
    assert read_trace(written(data)).broken is None


def test_commands_read_up_to_the_break_and_say_so(written):
    data = two_requests().data
    start = [offset for offset, frame in frames_of(data) if frame[0] == "settle"][4]
    path = written(data[: start + 20])
    for command in (
        ["show", path],
        ["replay", path],
        ["explain", path, *["--rid", "right", "--iter", "4", "--field", "seq_lens"]],
    ):
        result = run(*command)
        assert result.exit_code == 0, result.output
        (line,) = result.stderr.splitlines()
        assert (
            line
            == f"{path}: the file was cut at byte {start + 20}, inside the frame that begins at byte {start}; what is before it is read"
        )
    assert run("replay", path).stdout.startswith("6 iterations")
    assert run("replay", written(data)).stderr == ""


@pytest.mark.slow
def test_cut_anywhere_in_a_long_run(written):
    """Up to the break the timeline is that of the whole run."""
    data = everything_of("eagle").data
    whole = timeline(read_trace(written(data)))
    for length in range(len(data) // 8, len(data), len(data) // 8):
        found = timeline(read_trace(written(data[:length])))
        assert found.broken is not None
        for mine, theirs in zip(found.iterations, whole.iterations, strict=False):
            if mine.settled is not None:
                assert mine.lines == theirs.lines
            else:
                assert [line.clocks()["kv_allocated_len"] for line in mine.lines] == [
                    line.clocks()["kv_allocated_len"] for line in theirs.lines
                ]
                assert all(line.accept_lens is None and line.bonus is None for line in mine.lines)


# --- damaged --------------------------------------------------------------------------------------------------------------------


def test_one_byte_that_flipped_anywhere(written):
    """The frame's first byte is named. A longer length cannot be told from a file that was cut there: it is told as such."""
    data = two_requests().data
    starts = [offset for offset, _ in frames_of(data)]
    for place in range(MAGIC_LEN, len(data), 7):
        begin = max(start for start in starts if start <= place)
        path = written(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])
        try:
            broken = read_trace(path).broken
        except TraceError as error:
            cut = f"ends at byte {len(data)}, before its header" in str(error)
            assert cut or f"is damaged at byte {begin}: a frame's checksum is wrong; record it again" in str(error)
            assert not cut or begin == MAGIC_LEN
        else:
            assert (
                place - begin < 4
                and broken == f"the file was cut at byte {len(data)}, inside the frame that begins at byte {begin}"
            )
    path = written(data[: starts[4] + 12] + bytes([data[starts[4] + 12] ^ 1]) + data[starts[4] + 13 :])
    assert_refused(path, f"{path} is damaged at byte {starts[4]}: a frame's checksum is wrong")


def test_a_length_that_no_frame_has(written):
    data = two_requests().data
    start = frames_of(data)[3][0]
    path = written(data[:start] + struct.pack("<I", (1 << 28) + 1) + data[start + 4 :])
    assert_refused(path, f"damaged at byte {start}")


@pytest.mark.parametrize("frame", [{"a": 1}, [], [3, 4], 7, None, ["plan", {1: 2}]])
def test_a_frame_that_is_none_of_ours(written, frame):
    data = two_requests().data
    path = written(data + encoded(frame))
    assert_refused(path, f"is damaged at byte {len(data)}: ", "record it again")


def test_bytes_that_are_no_msgpack(written):
    data, body = two_requests().data, b"\xc1\xc1"
    path = written(data + struct.pack("<II", len(body), zlib.crc32(body)) + body)
    assert_refused(path, f"is damaged at byte {len(data)}")


# --- frames that cannot be -------------------------------------------------------------------------------------------------


def _insert(number: int, frame):
    return lambda frames: frames.insert(number + 1, frame)


def _edit(kind: str, edit):
    return lambda frames: edit(next(frame for frame in frames if frame[0] == kind))


IMPOSSIBLE = {
    "an unknown kind": (_insert(3, ["retire", 5]), "frame 3 ('retire') cannot be applied", "its kind is unknown"),
    "a settle of nothing": (
        _insert(0, ["settle", [1, 2, 3], [[[1], [1], [], [], [5], [], 0]]]),
        "frame 0 ('settle')",
        "",
    ),
    "an abort of nobody": (_insert(2, ["abort", 4, 0, 77]), "frame 2 ('abort')", "request 77 was not submitted"),
    "an abort on no rank": (_insert(2, ["abort", 4, 3, 1]), "frame 2 ('abort')", "IndexError"),
    "a launch that never was": (_insert(2, ["device", 9, 1, 2]), "frame 2 ('device')", "there was no launch 9"),
    "a plan too short": (_edit("plan", lambda frame: frame.pop()), "('plan') cannot be applied", ""),
    "a plan without times": (_edit("plan", lambda frame: frame.__setitem__(1, 5)), "('plan') cannot be applied", ""),
    "a settle without times": (
        _edit("settle", lambda frame: frame.__setitem__(1, [5])),
        "('settle') cannot be applied",
        "",
    ),
    "a device frame too short": (_edit("device", lambda frame: frame.pop()), "('device') cannot be applied", ""),
    "a submission too short": (_edit("submit", lambda frame: frame.pop()), "('submit') cannot be applied", ""),
    "a rank too many": (_edit("plan", lambda frame: frame[3].append(frame[3][0])), "('plan') cannot be applied", ""),
    "tokens too few": (_edit("settle", lambda frame: frame[2][0][4].pop()), "('settle') cannot be applied", ""),
    "more tokens than a step has": (
        _edit("settle", lambda frame: frame[2][0].__setitem__(0, [9])),
        "('settle') cannot be",
        "",
    ),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_frame_that_cannot_be_applied(written, name):
    change, *pieces = IMPOSSIBLE[name]
    path = written(with_frames(two_requests().data, change))
    with pytest.raises(TraceError, match=re.escape(pieces[0])):
        list(replay(read_trace(path)))
    assert_refused(path, *pieces, "it is not of this run, or damaged")


# --- what is asked for and is not there --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "pieces"),
    [
        ("show --rid nobody", ["rid='nobody' is not in this trace: it holds 'right', 'wrong'"]),
        ("show --iter 900", ["iter='900' holds no iteration of this trace: it has 1 to 6"]),
        ("show --iter 5:2", ["iter='5:2' holds no iteration"]),
        ("show --iter 0", ["iter='0' holds no iteration"]),
        ("show --iter 2-3", ["iter='2-3' must be \"A:B\", both included, or one number"]),
        ("show --iter 1:2:3", ["iter='1:2:3' must be"]),
        ("show --iter x:", ["iter='x:' must be"]),
        ("show --iter=", ["iter='' must be"]),
        ("explain --rid nobody --iter 2 --field seqlen", ["rid='nobody' is not in this trace"]),
        ("explain --rid right --iter 99 --field seqlen", ["iteration 99 is not in this trace: it holds 1 to 6"]),
        ("explain --rid right --iter 0 --field seqlen", ["iteration 0 is not in this trace"]),
        ("explain --rid right --iter 6 --field seqlen", ["rid='right' did not run in iteration 6: it ran in 1 to 5"]),
        (
            "explain --rid right --iter 2 --index 1 --field seqlen",
            ["rid='right' did not run in iteration 2", "never ran"],
        ),
        (
            "explain --rid right --iter 2 --field kv_len",
            ["field='kv_len' is unknown: choose one of prompt_len, output_len,"],
        ),
        ("replay --until 7", ["until=7 is no iteration of this trace: it has 1 to 6"]),
        ("replay --until -1", ["until=-1 must be at least 0"]),
    ],
)
def test_what_is_not_there(written, command, pieces):
    command, *options = command.split()
    path = written(two_requests().data)
    assert_refused(path, *pieces, commands=[[command, *options]])


@pytest.mark.parametrize("command", ["explain --rid right --iter two --field seqlen", "replay --until soon"])
def test_a_number_that_is_none(written, command):
    command, *options = command.split()
    assert run(command, written(two_requests().data), *options).exit_code == 2


def test_a_trace_in_which_nothing_ran(written):
    found = record("oracle", lambda watched: None)
    path = written(found.data)
    assert run("show", path).exit_code == 0
    assert run("replay", path).stdout.startswith("0 iterations, 0 states, all as recorded")
    assert_refused(path, "it has 1 to 0", commands=[["show", "--iter", "1"]])
    assert_refused(path, "it holds no request", commands=[["show", "--rid", "r"]])


# --- what was written ---------------------------------------------------------------------------------------------------------


def test_the_file_is_what_its_description_says(tmp_path):
    """Magic, then length, CRC-32 and MessagePack of each frame; read here without jspec."""
    data = two_requests().data
    assert data[:MAGIC_LEN] == MAGIC == b"jspec\x00tr"
    frames = [frame for _, frame in frames_of(data)]
    kind, header = frames[0]
    assert kind == "header" and header["version"] == 1 and header["limits"]["alloc_len"] == 5
    assert (header["max_running"], header["page_size"], header["num_ranks"]) == (4, 4, 1)
    assert (header["verify_width"], header["output_stride"], header["algorithm"]) == (5, 5, "oracle")
    submit = next(frame for frame in frames if frame[0] == "submit")
    assert submit[2:] == [0, 1, "right", 0, "aHbBaA", 3, 12, 0, [], []]
    plan = next(frame for frame in frames if frame[0] == "plan")
    assert plan[3] == [["extend", [1], [], [[0, 3, 3, 0, 0]], [[1]], []]]
    assert frames[-1][0] == "end" and len(frames[-1]) == 2
    assert sum(frame[0] == "device" for frame in frames) == 6


def test_a_frame_is_on_disk_when_the_call_returns(tmp_path):
    """A killed process loses nothing that was done."""
    path = tmp_path / "run.jspec"
    with twin("oracle", trace=str(path)) as engine:
        engine.submit([RIGHT], SamplingParams(max_new_tokens=9))
        assert [frame[0] for frame in read_trace(path).frames] == ["submit"]
        engine.step()
        assert [frame[0] for frame in read_trace(path).frames] == ["submit", "plan"]
        engine.step()
        assert [frame[0] for frame in read_trace(path).frames][:4] == ["submit", "plan", "plan", "settle"]
        found = read_trace(path)
        assert found.broken is not None and replay_until(found).num_iterations == 2


def test_names_that_are_hard_to_write(written):
    """Any string may name a request: half a character pair, too."""
    names = ["\x00", "\ud800", "é" * 300, "", "[red]"]

    def go(watched: Watched) -> None:
        for name in names:
            watched.submit([RIGHT], SamplingParams(max_new_tokens=2), rid=name)
        watched.drain()

    found = record("oracle", go)
    assert [life.rid for life in timeline(found.recording).requests.values()] == names
    assert len(found.watched.outputs) == len(names)


def test_a_full_disk_ends_the_record_and_not_the_run(tmp_path, caplog):
    path = tmp_path / "run.jspec"
    engine = twin("oracle", trace=str(path))
    file = engine._recorder._writer._file

    class Full:
        """Takes a few bytes of a frame, and then no more."""

        closed, left = False, 300

        def write(self, data: bytes) -> int:
            if not self.left:
                raise OSError(28, "No space left on device")
            taken = file.write(data[: min(self.left, 100)])
            self.left -= taken
            return taken

        def close(self) -> None:
            self.closed = True
            file.close()

    engine._recorder._writer._file = Full()
    with caplog.at_level(logging.WARNING, logger="jspec.trace"):
        (output,) = engine.generate([[RIGHT]], SamplingParams(max_new_tokens=30, ignore_eos=True))
        engine.close()
    assert len(output.token_ids) == 30
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == f"the trace {path} ends here: [Errno 28] No space left on device"
    found = read_trace(path)
    assert "was cut at byte" in found.broken and replay_until(found).num_iterations >= 1


def test_numbers_are_small():
    """A plan and a settle take some forty bytes each, and a few more a row; what a request leaves to the prefix cache 16 a page."""
    frames = two_requests().recording.frames
    sizes = [len(msgpack.packb(frame)) for frame in frames if frame[0] != "settle" or not frame[2][0][5]]
    assert max(sizes) < 60 and len(frames) == 21
