"""The file of a trace: what it holds, how it is written, how it is read back.

A file is the 8 bytes of `MAGIC`, then frames until it ends. A frame is 4 bytes of length and 4 of CRC-32, both little-endian, and that many bytes of
MessagePack (https://msgpack.org): a list, whose first element is the kind. The first frame is the header. Numbers are plain integers, so a value of a small
model takes a byte; times are microseconds since the file was opened.

    ["header", {...}]                          `VERSION`, and what the state began as; see `Header`
    ["submit", t, rank, serial, rid, index, prompt, prompt_len, max_new_tokens, priority, [stop ids], [page keys]]
    ["abort", t, rank, serial]
    ["plan", [t begun, t planned, t dispatched], depth, [rank, ...]]
        rank: [mode, [prompt rows], [tail rows], [frontier clocks], [pages granted], [left]]; mode "" where nothing was launched
            frontier clocks: [output_len, kv_committed_len, kv_allocated_len, cache_protected_len, epoch] of each row, the plan included
            pages granted: of each row, the page-table delta (of a prompt all its pages)
            left: [serial, row, output_len, reason] of those who lost their rows in this plan
    ["settle", [t waited, t ready, t settled], [rank, ...]]
        rank: [accept_lens, new_seq_lens, [status], [stop_at], [tokens, row after row], [ended], digest]
            status, stop_at: [] where they are OK and NEVER for every row
            ended: [row, reason, prompt keys it leaves to the prefix cache, [keys of pages beyond]]
            digest: of the clocks after it, see `digest`
    ["device", forward_iter, t published, t committed]    of a launch, when its programs were seen to end; t committed is -1 where there is no second program
    ["end", t]                                 the engine was closed; a file without it was cut short

`prompt` is the beginning of its text, or of its ids. What is written is what happened outside the pure core, and enough of what the core answered to tell
where a replay first differs.
"""

import dataclasses
import logging
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import numpy as np

from jspec.state.scheduler_state import Limits, SchedulerState, init_state

MAGIC = b"jspec\x00tr"
VERSION = 1

_logger = logging.getLogger("jspec.trace")

_FRAME = struct.Struct("<II")
MOST_FRAME_BYTES = 1 << 28
"""A longer frame is damage."""


class TraceError(ValueError):
    """A trace that cannot be read, or does not hold what was asked for: says where, and what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
    """What a trace begins with: enough to make the first state, and to say what ran."""

    limits: Limits
    max_running: int
    num_pages: int
    page_size: int
    num_ranks: int
    verify_width: int
    output_stride: int  # most tokens that a step emits
    algorithm: str
    model: str
    carry: str  # type of what crosses an iteration on the device
    started_at: float  # seconds since the epoch

    def first_state(self) -> SchedulerState:
        """The state of each rank before anything happened."""
        sizes = {"max_running": self.max_running, "num_pages": self.num_pages, "page_size": self.page_size}
        return init_state(limits=self.limits, **sizes)


class TraceWriter:
    """Appends frames to a file; each is handed to the operating system at once, so that a killed process loses at most the last.

    Where the file takes no more, as on a full disk, the trace ends with a warning of the logger `jspec.trace`; who is recorded goes on.

    Args:
        path: is created, or written over.
        header: the first frame.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | Path, header: Header):
        self._path = path
        self._file: BinaryIO = open(path, "wb", buffering=0)  # noqa: SIM115  kept open
        self._pack = msgpack.Packer(unicode_errors="surrogatepass").pack  # a rid is any string
        try:
            self._append(MAGIC)
            self._append(self._encoded(["header", {"version": VERSION, **dataclasses.asdict(header)}]))
        except OSError as error:
            self._file.close()
            raise OSError(error.errno, error.strerror, str(path)) from None

    def write(self, frame: list[Any]) -> None:
        """One frame."""
        if self._file.closed:
            return
        try:
            self._append(self._encoded(frame))
        except OSError as error:
            _logger.warning("the trace %s ends here: %s", self._path, error)
            self._file.close()

    def _encoded(self, frame: list[Any]) -> bytes:
        body = self._pack(frame)
        return _FRAME.pack(len(body), zlib.crc32(body)) + body

    def _append(self, data: bytes) -> None:
        while data:  # a full disk may take a part
            data = data[self._file.write(data) :]

    def close(self) -> None:
        """Harmless to ask twice."""
        self._file.close()


@dataclasses.dataclass(frozen=True)
class Recording:
    """A trace that was read."""

    header: Header
    frames: list[list[Any]]
    """Without the header, in the order in which they were written."""
    broken: str | None
    """Why the file ends before its last frame; None where it was closed."""


def read_trace(path: str | Path) -> Recording:
    """Reads a trace; one that was cut short is read up to the break.

    Raises:
        TraceError: there is no trace, it is of a newer version, or damaged before its end.
        OSError: the file cannot be read.
    """
    data = Path(path).read_bytes()
    if not data:
        raise TraceError(f"{path} is empty: nothing was recorded, or the engine could not be built")
    if not data.startswith(MAGIC[: len(data)]):
        raise TraceError(f"{path} is no trace of jspec: it begins with {data[:8]!r}; record one with --trace")
    found = list(_frames(path, data))
    if not found or isinstance(found[0], str):
        raise TraceError(f"{path} ends at byte {len(data)}, before its header is whole: record it again")
    broken: str | None = "the file has no last frame: the process that recorded it was killed, or still runs"
    frames: list[list[Any]] = []
    for frame in found[1:]:
        if isinstance(frame, str):
            broken = frame
        elif frame[0] == "end":
            broken = None
        else:
            frames.append(frame)
    return Recording(_header(path, found[0]), frames, broken)


def _frames(path: str | Path, data: bytes) -> Iterator[list[Any] | str]:
    """Frames; a string in place of one that the file does not hold whole."""
    offset = len(MAGIC)
    while offset < len(data):
        begin = offset + _FRAME.size
        length, checksum = _FRAME.unpack_from(data, offset) if begin <= len(data) else (0, 0)
        if begin > len(data) or (begin + length > len(data) and length <= MOST_FRAME_BYTES):
            yield f"the file was cut at byte {len(data)}, inside the frame that begins at byte {offset}"
            return
        body = data[begin : begin + length]
        if length > MOST_FRAME_BYTES or zlib.crc32(body) != checksum:
            raise TraceError(f"{path} is damaged at byte {offset}: a frame's checksum is wrong; record it again")
        try:
            frame = msgpack.unpackb(body, unicode_errors="surrogatepass")
        except ValueError as error:
            raise TraceError(f"{path} is damaged at byte {offset}: {error}; record it again") from None
        if not (isinstance(frame, list) and frame and isinstance(frame[0], str)):
            raise TraceError(f"{path} is damaged at byte {offset}: a frame is no list with a kind; record it again")
        yield frame
        offset = begin + length


def _header(path: str | Path, frame: list[Any]) -> Header:
    if frame[0] != "header" or len(frame) != 2 or not isinstance(frame[1], dict):
        raise TraceError(f"{path} does not begin with a header but with {frame[0]!r}: record it again")
    fields = dict(frame[1])
    version = fields.pop("version", None)
    if version != VERSION:
        raise TraceError(
            f"{path} has version {version} of the format, this jspec reads version {VERSION}: read it with the jspec that recorded it, or record it again"
        )
    try:
        return Header(limits=Limits(**fields.pop("limits")), **fields)
    except (TypeError, KeyError) as error:
        raise TraceError(f"{path} has a header that does not fit its version: {error}; record it again") from None


def digest(state: SchedulerState) -> int:
    """CRC-32 of who holds which row and how far every clock is: two states that differ in these almost never have the same."""
    requests, ledger = state.requests, state.ledger
    columns = (
        requests.serial,
        requests.epoch,
        requests.output_len,
        ledger.kv_committed_len,
        ledger.kv_allocated_len,
        ledger.cache_protected_len,
    )
    return zlib.crc32(np.concatenate([*columns, [ledger.num_free]], dtype=np.int32, casting="unsafe").tobytes())
