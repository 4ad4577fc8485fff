"""Engines on record: watched, so that a replay can be held against the states they really had; and a run in which everything happens."""

import dataclasses
import functools
import struct
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import msgpack
import numpy as np
import pytest
from engine.kit import ACCEPT, build, markov, markov_continuation, markov_table, oracle_worker, wrong_tokens
from engine.test_stop_strings import TEXTS, letters

from jspec import Engine, SamplingParams
from jspec.models.tiny_draft import markov_draft
from jspec.spec_workers import EagleSizes, eagle, ngram
from jspec.trace.format import Recording, read_trace
from jspec.trace.replay import replay

RIGHT, MIXED, WRONG = (cycle[0] for cycle in ACCEPT.values())
EOS = markov_continuation(RIGHT, 8)[-1]
"""Of the cycle whose drafts are right: it comes inside a run."""

PRESSED = {
    "page_size": 4,
    "max_running": 4,
    "max_prefill_tokens": 24,
    "mixed_batches": True,
    "kv_tokens": 160,
    "schedule_conservativeness": 0.01,
}
"""A pool that is promised many times over."""

WORKERS = ("oracle", "eagle", pytest.param("ngram", marks=pytest.mark.slow))
"""With one program a launch, with two, and one more that the fast suite leaves out: it takes as long to compile as it shows little that the first does not."""


@functools.cache
def programs_of(worker: str) -> Engine:
    """An engine that nobody runs: its programs are those of `twin`."""
    target = markov(eos_token_ids=(EOS,))
    name, *how = worker.split(", ")
    if name == "oracle":
        built = oracle_worker()
    elif name == "ngram":
        built = ngram(target, num_draft_tokens=5, min_ngram=1)
    else:
        draft = markov_draft(target, markov_table(), wrong_after=wrong_tokens())
        built = eagle(target, draft, sizes=EagleSizes(num_steps=2))
    return build(target, worker=built, tokenizer=letters(), overlap=how != ["no overlap"], **PRESSED)


def twin(worker: str, **settings: Any) -> Engine:
    """A new engine, with programs that were compiled before."""
    engine = programs_of(worker)
    config = dataclasses.replace(engine.config, **settings)
    with mock.patch("jspec.engine.engine.Programs", lambda *_, **__: engine._programs):
        return Engine(config, target=engine.target, worker=engine.worker, tokenizer=engine.tokenizer)


class Watched:
    """An engine, and the states of its ranks after each thing that its record should tell, in order.

    Of several answers to a prompt, only what the last one came to can be seen: None for the others.
    """

    def __init__(self, engine: Engine):
        self.engine, self.recorder, self.outputs = engine, engine._recorder, {}
        self.seen: list[tuple[str, tuple | None]] = []
        launch, settle, abort = engine._launch, engine._settle, engine._abort

        def launched(loop):
            loop, found = launch(loop)
            self.seen.append(("plan", loop.states))
            return loop, found

        def settled(loop):
            loop, emissions = settle(loop)
            self.seen.append(("settle", loop.states))
            return loop, emissions

        def aborted(rank, serial):
            abort(rank, serial)
            self.seen.append(("abort", engine.states))

        engine._launch, engine._settle, engine._abort = launched, settled, aborted

    def submit(self, prompt, params: SamplingParams, *, rid: str | None = None) -> str:
        rid = self.engine.submit(prompt, params, rid=rid)
        self.seen += [("submit", None)] * (params.n - 1) + [("submit", self.engine.states)]
        return rid

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for emission in self.engine.step():
                if emission.output is not None:
                    self.outputs[emission.rid, emission.index] = emission.output

    def drain(self) -> None:
        while self.engine.has_work:
            self.step()


def assert_same(got, wanted, path: str = "state") -> None:
    """Equal leaf by leaf: values, types, shapes."""
    assert type(got) is type(wanted), path
    if dataclasses.is_dataclass(wanted):
        for field in dataclasses.fields(wanted):
            assert_same(getattr(got, field.name), getattr(wanted, field.name), f"{path}.{field.name}")
    elif isinstance(wanted, np.ndarray):
        assert got.dtype == wanted.dtype and got.shape == wanted.shape and (got == wanted).all(), path
    elif isinstance(wanted, tuple):
        assert len(got) == len(wanted), path
        for i, (one, other) in enumerate(zip(got, wanted, strict=True)):
            assert_same(one, other, f"{path}[{i}]")
    elif isinstance(wanted, Mapping):
        assert dict(got) == dict(wanted), path
    else:
        assert got == wanted, f"{path}: {got!r} for {wanted!r}"


def assert_replays(watched: Watched, recording: Recording) -> None:
    """The record of a closed engine holds what was seen of it, frame by frame, and its replay is in the states that were seen."""
    assert recording.broken is None
    moments = [moment for moment in replay(recording) if moment.frame[0] != "device"]
    assert [moment.frame[0] for moment in moments] == [kind for kind, _ in watched.seen]
    for number, (moment, (_, states)) in enumerate(zip(moments, watched.seen, strict=True)):
        if states is not None:
            assert_same(moment.after, states, f"after {number}")


class Recorded(NamedTuple):
    """A run, and the file it left."""

    watched: Watched
    data: bytes
    recording: Recording


def record(worker: str, run, **settings: Any) -> Recorded:
    """Runs `run(watched)` on a new engine and closes it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.jspec")
        watched = Watched(twin(worker, trace=str(path), **settings))
        run(watched)
        watched.engine.close()
        return Recorded(watched, path.read_bytes(), read_trace(path))


@functools.cache
def everything_of(worker: str) -> Recorded:
    """`everything`, once a worker."""
    return record(worker, everything)


@functools.cache
def two_requests() -> Recorded:
    """A short run whose every accept length is known in advance: five a verify, then one and two."""

    def run(watched: Watched) -> None:
        watched.submit([7, 9, RIGHT], SamplingParams(max_new_tokens=12, ignore_eos=True), rid="right")
        watched.step(2)
        watched.submit([WRONG], SamplingParams(max_new_tokens=4), rid="wrong")
        watched.drain()

    return record("oracle", run, mixed_batches=False)


def prompt_of(length: int, *, last: int, seed: int = 0) -> list[int]:
    """Tokens of which only the last one matters to what follows."""
    return [*np.random.default_rng(seed).integers(0, 64, length - 1).tolist(), last]


def everything(run: Watched) -> None:
    """Chunks, tails, retractions for want of pages and for priority, shared prefixes, aborts and timeouts of requests that wait and that run, stop strings,
    several answers, ends inside a run. For an engine of PRESSED's sizes."""
    now = [0.0]
    long = prompt_of(60, last=RIGHT)
    # Each token was seen before with what follows it, so that looking it up drafts right.
    known = {token: [token, *markov_continuation(token, 21)] for token in (RIGHT, MIXED)}

    def params(count: int, **given: Any) -> SamplingParams:
        return SamplingParams(max_new_tokens=count, **{"ignore_eos": True, **given})

    with mock.patch("jspec.engine.engine.time.monotonic", lambda: now[0]):
        run.step()  # nothing to do
        run.submit(long, params(20), rid="long")
        run.step(5)
        run.submit(prompt_of(30, last=MIXED, seed=1), params(12), rid="chunked beside")
        run.submit(known[RIGHT], params(20, ignore_eos=False), rid="ends inside a run")
        run.step(3)
        text = "".join(TEXTS[token] for token in markov_continuation(MIXED, 7))
        run.submit(known[MIXED], params(24, stop=text[-3:-1]), rid="stops at a string")
        run.submit(long, params(6, n=2), rid="twice")
        run.submit([9, 9], params(6), rid="aborted at once")
        run.engine.abort("aborted at once")
        run.drain()
        run.submit([WRONG], params(20), rid="beside chunks")
        run.step(2)
        run.submit(prompt_of(70, last=WRONG, seed=2), params(30), rid="aborted in its prompt")
        run.step(2)
        run.engine.abort("aborted in its prompt")
        run.drain()
        run.submit([WRONG], params(40), rid="aborted")
        run.submit([MIXED], params(40, timeout_s=5.0), rid="late")
        run.submit([3], params(40), rid="beside")
        run.submit([4], params(40), rid="beside, too")
        run.submit([RIGHT], params(9, timeout_s=4.0), rid="late before it began")
        run.step(5)
        now[0] = 4.5
        run.step(2)
        run.engine.abort("aborted")
        now[0] = 5.5
        run.drain()
        for i in range(4):
            run.submit(prompt_of(5, last=WRONG, seed=3 + i), params(30), rid=f"low {i}")
        run.step(8)
        run.submit(prompt_of(9, last=MIXED, seed=9), params(8, priority=5), rid="urgent")
        run.drain()
        for i in range(5):
            run.submit(prompt_of(4 + i, last=WRONG, seed=20 + i), params(70), rid=f"pressing {i}")
        run.drain()
        run.submit(long, params(6), rid="long again")
        run.drain()
        run.step(2)


# --- files, byte by byte ----------------------------------------------------------------------------------------------------

MAGIC_LEN = 8


def frames_of(data: bytes) -> list[tuple[int, list]]:
    """Where each frame begins, and what it holds."""
    found, offset = [], MAGIC_LEN
    while offset < len(data):
        length, checksum = struct.unpack_from("<II", data, offset)
        body = data[offset + 8 : offset + 8 + length]
        assert len(body) == length and zlib.crc32(body) == checksum
        found.append((offset, msgpack.unpackb(body)))
        offset += 8 + length
    return found


def encoded(frame: list) -> bytes:
    """A frame with a right checksum."""
    body = msgpack.packb(frame)
    return struct.pack("<II", len(body), zlib.crc32(body)) + body


def with_frames(data: bytes, change) -> bytes:
    """The file with other frames: `change(frames)` edits the list of them in place, the header being the first."""
    frames = [frame for _, frame in frames_of(data)]
    change(frames)
    return data[:MAGIC_LEN] + b"".join(map(encoded, frames))
