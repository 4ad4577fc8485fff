"""Probes for an engine: when an iteration reached which part, and what really crossed to the device and back."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np

from jspec.engine import Engine
from jspec.engine.meters import Meters
from jspec.engine.programs import DecodeKey, Program


class Iteration(NamedTuple):
    """Host seconds of one decode iteration, by part. Time spent waiting for the device is in none of them."""

    plan: float  # plan and choice of program
    dispatch: float  # pack the upload, call the programs, start the copy of the outcome
    settle: float  # read the outcome, advance the state, log the tokens
    cpu: float  # of the thread, over all parts: what is left of a wall time when other processes take the core


class PartMeters(Meters):
    """`Meters` that keep every decode iteration that launched one step and settled another."""

    def __init__(self, engine: Engine):
        super().__init__(engine.worker.output_stride)
        self.kept: list[Iteration] = []
        self._chosen: float | None = None
        self._dispatched: float | None = None

    def iteration_starts(self) -> None:
        super().iteration_starts()
        self._start, self._start_cpu = time.perf_counter(), time.thread_time()
        self._chosen = self._dispatched = None
        self._has_waited, self._wait_s = False, 0.0

    def program_chosen(self) -> None:
        """After plan, before pack."""
        self._chosen = time.perf_counter()

    def launched(self, **facts) -> None:
        super().launched(**facts)
        self._dispatched = time.perf_counter()

    def waited(self, start: float) -> None:
        super().waited(start)
        self._has_waited, self._wait_s = True, time.perf_counter() - start

    def iteration_ends(self, *, decode: bool) -> None:
        super().iteration_ends(decode=decode)
        if decode and self._has_waited and self._chosen is not None and self._dispatched is not None:
            settle = time.perf_counter() - self._dispatched - self._wait_s
            cpu = time.thread_time() - self._start_cpu
            self.kept.append(Iteration(self._chosen - self._start, self._dispatched - self._chosen, settle, cpu))


class _Watched:
    """Programs by bucket that tell when one is looked up, and may replace it."""

    def __init__(self, programs, found: Callable[[Any, Program], Program]):
        self._programs, self._found = programs, found

    def __getitem__(self, key) -> Program:
        return self._found(key, self._programs[key])


@contextlib.contextmanager
def timed_parts(engine: Engine) -> Iterator[PartMeters]:
    """Times the engine's iterations by part, while in the context."""
    meters = PartMeters(engine)

    def found(key, program: Program) -> Program:
        meters.program_chosen()
        return program

    with mock.patch.multiple(engine, _meters=meters, _programs=_Watched(engine._programs, found)):
        yield meters


@dataclasses.dataclass
class Traffic:
    """What crossed, in decode launches."""

    launches: int = 0
    dispatches: int = 0  # calls of compiled programs
    uploads: int = 0  # host arrays handed to a program or to `jax.device_put`, each time one is
    upload_bytes: int = 0
    downloads: int = 0  # outcomes copied to the host
    download_bytes: int = 0

    def count_uploads(self, tree: Any) -> None:
        """Counts the leaves that live on the host."""
        for leaf in jax.tree.leaves(tree):
            if not isinstance(leaf, jax.Array):
                self.uploads += 1
                self.upload_bytes += np.asarray(leaf).nbytes

    def per_launch(self) -> dict[str, float]:
        """Means over the launches."""
        counts = dataclasses.asdict(self)
        launches = counts.pop("launches")
        return {name: count / launches if launches else 0.0 for name, count in counts.items()}


class _CountedOutcome:
    """A device array that counts its copy to the host: once, whoever asks first."""

    def __init__(self, array: Any, traffic: Traffic):
        self._array, self._traffic, self._counted = array, traffic, False

    def _count(self) -> None:
        if not self._counted:
            self._counted = True
            self._traffic.downloads += 1
            self._traffic.download_bytes += self._array.nbytes

    def copy_to_host_async(self) -> None:
        self._count()
        self._array.copy_to_host_async()

    def is_ready(self) -> bool:
        return self._array.is_ready()

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        self._count()
        return np.asarray(self._array, dtype=dtype)


@contextlib.contextmanager
def counted_traffic(engine: Engine) -> Iterator[Traffic]:
    """Counts what decode launches of the engine hand over, while in the context. Slows them down: not for timing."""
    traffic, device_put = Traffic(), jax.device_put

    def counted_put(tree, *args, **kwargs):
        traffic.count_uploads(tree)
        return device_put(tree, *args, **kwargs)

    def counted(function: Callable) -> Callable:
        def call(*args):
            traffic.dispatches += 1
            traffic.count_uploads(args)
            return function(*args)

        return call

    def found(key, program: Program) -> Program:
        if not isinstance(key, DecodeKey):
            return program
        traffic.launches += 1

        def phase(*args):
            output = counted(program.phase)(*args)
            return output._replace(outcome=_CountedOutcome(output.outcome, traffic))

        return program._replace(phase=phase, commit=counted(program.commit) if program.commit is not None else None)

    watched = _Watched(engine._programs, found)
    with mock.patch.object(engine, "_programs", watched), mock.patch.object(jax, "device_put", counted_put):
        yield traffic
