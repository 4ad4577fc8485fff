"""What the loop measures of itself: host time, exposed host time, run-ahead, compilations."""

import time
from collections import deque

import jax
import numpy as np

from jspec.engine.outputs import Summary

_compiles = 0
_KEPT = 1 << 16  # iterations that the medians look back on


def _count_compile(event: str, duration: float, **_) -> None:
    global _compiles
    del duration
    if event == "/jax/core/compile/backend_compile_duration":
        _compiles += 1


jax.monitoring.register_event_duration_secs_listener(_count_compile)


def compiles() -> int:
    """Programs that this process compiled, or took from the compilation cache, so far."""
    return _compiles


class Meters:
    """Clocks and counters of one engine. Times are kept for decode launches; everything else of the loop is outside the step's cost."""

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        """Starts all counts anew."""
        self.requests = self.tokens = self.prefill_tokens = self.verifies = self.retractions = 0
        self.iterations = self.launches = self.ahead = self.compiles = 0
        self._host_s: deque[float] = deque(maxlen=_KEPT)
        self._step_s: deque[float] = deque(maxlen=_KEPT)
        self._exposed_s = 0.0
        self._first: float | None = None
        self._last: float | None = None
        self._last_decode: float | None = None
        self._iteration_start = 0.0
        self._idle_since: float | None = None
        self._waited_s = 0.0

    def iteration_starts(self) -> None:
        """At the top of an iteration."""
        self._iteration_start, self._waited_s, self._compiles_before = time.perf_counter(), 0.0, compiles()
        self._first = self._first or self._iteration_start

    def launched(self, *, decode: bool, previous_running: bool, chained: bool) -> None:
        """After a dispatch.

        Args:
            decode: a DECODE launch; only these are counted.
            previous_running: the launch before had not finished at this moment.
            chained: there was a launch before whose work this one follows; without one there is nothing to run ahead of.
        """
        if not decode or not chained:
            return
        self.launches += 1
        self.ahead += previous_running
        if not previous_running and self._idle_since is not None:
            self._exposed_s += time.perf_counter() - self._idle_since

    def waited(self, start: float) -> None:
        """After a wait for the device that began at `start`."""
        self._idle_since = time.perf_counter()
        self._waited_s += self._idle_since - start

    def settled(self, *, decode: bool, num_rows: int, num_tokens: int) -> None:
        """After a settle."""
        self._last = now = time.perf_counter()
        self.tokens += num_tokens
        if decode:
            self.verifies += num_rows
            self.iterations += 1
            if self._last_decode is not None:
                self._step_s.append(now - self._last_decode)
        else:
            self.prefill_tokens += num_tokens
        self._last_decode = now if decode else None

    def iteration_ends(self, *, decode: bool) -> None:
        """At the end of an iteration."""
        self.compiles += compiles() - self._compiles_before
        if decode:
            self._host_s.append(time.perf_counter() - self._iteration_start - self._waited_s)

    def summary(self) -> Summary:
        """The counters as a value."""
        seconds = self._last - self._first if self._last and self._first else 0.0
        return Summary(
            requests=self.requests,
            tokens=self.tokens,
            retractions=self.retractions,
            verifies=self.verifies,
            accept_length=(self.tokens - self.prefill_tokens) / self.verifies if self.verifies else 0.0,
            tokens_per_s=self.tokens / seconds if seconds else 0.0,
            iterations=self.iterations,
            step_ms=1e3 * float(np.median(list(self._step_s))) if self._step_s else 0.0,
            host_ms_per_iteration=1e3 * float(np.median(list(self._host_s))) if self._host_s else 0.0,
            exposed_host_ms_per_iteration=1e3 * self._exposed_s / self.launches if self.launches else 0.0,
            run_ahead=self.ahead / self.launches if self.launches else 0.0,
            compiles_after_warmup=self.compiles,
        )
