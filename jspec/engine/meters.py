"""What the loop measures of itself and of its requests: counts, host time, exposed host time, run-ahead, compilations, latencies."""

import threading
import time
from collections import Counter, deque
from collections.abc import Sequence

import jax
import numpy as np

from jspec.engine.histogram import Histogram
from jspec.engine.logs import Request
from jspec.engine.outputs import FINISH_NAMES, RequestOutput, Summary
from jspec.scheduler import Settled
from jspec.state.batches import ForwardMode
from jspec.state.results import Launched

FINISH_REASONS = tuple(dict.fromkeys((*FINISH_NAMES.values(), "timeout", "refused")))
"""All that `RequestOutput.finish_reason` can say."""

FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
OUTPUT_TOKEN_S = (
    0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 8,
)  # fmt: skip
END_TO_END_S = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400, 600, 1200, 1800, 3600)
"""Bounds of the latency histograms, in seconds: after vLLM's and SGLang's."""

_SUMMED = (
    "requests", "tokens", "prefill_tokens", "verifies", "retractions",
    "iterations", "launches", "ahead", "compiles", "exposed_s",
)  # fmt: skip
"""Counts that a summary is made of."""

_compiles = 0
_KEPT = 1 << 16  # iterations that the medians look back on
_UNCOUNTED = 256  # verifies whose tokens are counted together, at most


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
    """Clocks and counters of one engine. Times of the loop are kept for decode launches; everything else of it is outside the step's cost.

    Counts run from the engine's start, and only grow; a summary tells what they grew by since the last `reset`.

    Args:
        stride: `O`, most tokens that a verify emits.

    Attributes:
        requests: submitted, those refused not counted; `n` for a prompt that wants `n` answers.
        finished: requests that ended, by finish reason; those refused are here.
        prompt_tokens: of requests that started, each counted once.
        cached_tokens: of these, tokens whose KV came from the prefix cache.
        prefill_tokens: tokens emitted by a prefill or in a MIXED batch.
        verifies: decode steps, counted a request at a time.
        retractions: times a request had to wait again.
        iterations: decode launches settled.
        launches: decode launches made after another launch.
        ahead: of these, launches made while the one before still ran.
        compiles: programs compiled inside an iteration.
        host_s: host seconds of iterations that launched a decode step, without waiting for the device.
        exposed_s: of these, seconds in which the device had nothing to do.
        time_to_first_token: seconds from the submission on, of requests that got a token.
        time_per_output_token: seconds a token from the first to the end, of requests that got two or more: a request's mean inter-token latency.
        end_to_end: seconds from the submission to the end, of requests that were not refused.
    """

    def __init__(self, stride: int = 1):
        self.requests = self.prefill_tokens = self.verifies = self.retractions = 0
        self.prompt_tokens = self.cached_tokens = 0
        self.iterations = self.launches = self.ahead = self.compiles = 0
        self.host_s = self.exposed_s = 0.0
        self.finished = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self.time_to_first_token = Histogram(FIRST_TOKEN_S)
        self.time_per_output_token = Histogram(OUTPUT_TOKEN_S)
        self.end_to_end = Histogram(END_TO_END_S)
        self._by_length = np.zeros(stride + 1, np.int64)
        self._uncounted: deque[np.ndarray] = deque()  # tokens of the verifies that `_by_length` lacks
        self._counting = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Starts the summary anew."""
        self._before = self._counts()
        self._host_s: deque[float] = deque(maxlen=_KEPT)
        self._step_s: deque[float] = deque(maxlen=_KEPT)
        self._first: float | None = None
        self._last: float | None = None
        self._last_decode: float | None = None
        self._iteration_start = 0.0
        self._idle_since: float | None = None
        self._waited_s = 0.0

    # --- a request's life --------------------------------------------------------------------------------------------

    def submitted(self, request: Request) -> None:
        """A request was queued."""
        self.requests += 1
        request.submitted_at = time.perf_counter()

    def refused(self) -> None:
        """A request could not be queued."""
        self.finished["refused"] += 1

    def started(self, request: Request) -> None:
        """A request got a row, for the first time or after a retraction."""
        if not request.retractions:
            self.prompt_tokens += len(request.prompt)
            self.cached_tokens += request.cached_tokens

    def retracted(self) -> None:
        """A request lost its row and waits again."""
        self.retractions += 1

    def ended(self, request: Request, output: RequestOutput) -> None:
        """A request that had been queued is over."""
        now, after_first = time.perf_counter(), len(output.token_ids) - 1
        self.finished[output.finish_reason] += 1
        self.end_to_end.observe(now - request.submitted_at)
        if request.first_token_at is not None and after_first > 0:
            self.time_per_output_token.observe((now - request.first_token_at) / after_first)

    # --- an iteration ------------------------------------------------------------------------------------------------

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
            self.exposed_s += time.perf_counter() - self._idle_since

    def waited(self, start: float) -> None:
        """After a wait for the device that began at `start`."""
        self._idle_since = time.perf_counter()
        self._waited_s += self._idle_since - start

    def settled(self, launched: Launched, settled: Settled, requests: Sequence[Request]) -> None:
        """After the settle of a rank. `requests`: of its rows, where they are live."""
        if launched.forward_mode is ForwardMode.DECODE:
            self.verifies += int(np.count_nonzero(settled.live))
            self._uncounted.append(settled.num_visible)
            if len(self._uncounted) >= _UNCOUNTED:
                self._count()
        else:
            now = time.perf_counter()
            self.prefill_tokens += int(settled.num_visible.sum())
            for i in np.nonzero((settled.start == 0) & (settled.num_visible > 0))[0].tolist():
                requests[i].first_token_at = now
                self.time_to_first_token.observe(now - requests[i].submitted_at)

    def step_settled(self, *, decode: bool) -> None:
        """After a launch was settled on every rank."""
        self._last = now = time.perf_counter()
        if decode:
            self.iterations += 1
            if self._last_decode is not None:
                self._step_s.append(now - self._last_decode)
        self._last_decode = now if decode else None

    def iteration_ends(self, *, decode: bool) -> None:
        """At the end of an iteration."""
        self.compiles += compiles() - self._compiles_before
        if decode:
            host_s = time.perf_counter() - self._iteration_start - self._waited_s
            self.host_s += host_s
            self._host_s.append(host_s)

    # --- what they say -----------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """Tokens emitted."""
        return self.prefill_tokens + self._verified_tokens()

    @property
    def accept_length(self) -> float:
        """Tokens per verify, bonus included, from the engine's start; 0 before the first verify."""
        return self._verified_tokens() / self.verifies if self.verifies else 0.0

    def accepted_by_position(self) -> list[int]:
        """Verifies that accepted the first draft, the second, ...: those whose user sees two tokens or more, three or more, ..."""
        return np.cumsum(self._count()[:1:-1])[::-1].tolist()

    def summary(self) -> Summary:
        """What was counted since the last `reset`, as a value."""
        seconds = self._last - self._first if self._last and self._first else 0.0
        counts = {name: count - self._before[name] for name, count in self._counts().items()}
        tokens, verifies, launches = counts["tokens"], counts["verifies"], counts["launches"]
        return Summary(
            requests=counts["requests"],
            tokens=tokens,
            retractions=counts["retractions"],
            verifies=verifies,
            accept_length=(tokens - counts["prefill_tokens"]) / verifies if verifies else 0.0,
            tokens_per_s=tokens / seconds if seconds else 0.0,
            iterations=counts["iterations"],
            step_ms=1e3 * float(np.median(list(self._step_s))) if self._step_s else 0.0,
            host_ms_per_iteration=1e3 * float(np.median(list(self._host_s))) if self._host_s else 0.0,
            exposed_host_ms_per_iteration=1e3 * counts["exposed_s"] / launches if launches else 0.0,
            run_ahead=counts["ahead"] / launches if launches else 0.0,
            compiles_after_warmup=counts["compiles"],
        )

    def _verified_tokens(self) -> int:
        by_length = self._count()
        return int(by_length @ np.arange(len(by_length)))

    def _count(self) -> np.ndarray:
        """i64[O + 1]: verifies by the tokens that the user sees of them; entry 0 means nothing. Counted when somebody asks, to spare the loop."""
        with self._counting:
            if new := [self._uncounted.popleft() for _ in range(len(self._uncounted))]:
                self._by_length = self._by_length + np.bincount(np.concatenate(new), minlength=len(self._by_length))
            return self._by_length

    def _counts(self) -> dict:
        return {name: getattr(self, name) for name in _SUMMED}
