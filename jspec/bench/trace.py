"""What it costs to record a run, and how much sooner than the run its replay is done."""

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from jspec.bench.decode import WARM_UP_TOKENS, DecodeJob, Prepared, contender_config, prepare
from jspec.bench.decode_run import Run, run_engine
from jspec.bench.serve_report import Spread, spread
from jspec.config import EngineConfig, SamplingParams
from jspec.engine import Engine
from jspec.trace.format import read_trace
from jspec.trace.recorder import Recorder
from jspec.trace.replay import replay_until

OVERHEAD_GOAL = 0.03
"""Of a decode step: most that a trace should add to it."""

REPLAY_GOAL = 100.0
"""Times sooner than the run that its replay should be done, every invariant checked."""

_CALLS = ("iteration_starts", "has_planned", "planned", "waits", "is_ready", "settled")
"""Of a recorder: what an engine asks of it in an iteration."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceCost:
    """One model and algorithm, with and without a trace in turn."""

    model: str
    algorithm: str
    batch: int
    max_new_tokens: int
    rounds: int
    steps: int  # decode steps of a round
    step_ms: Spread  # without a trace
    traced_step_ms: Spread
    ratio: Spread  # of the two, round by round
    recorder_us: float  # host time spent in the recorder, an iteration: free of what else slows a step down
    recorder_share: float  # of the median step without a trace
    iterations: int  # on record
    tokens: int
    file_bytes: int
    run_s: float  # that the engine took for what is on record, the other engine's turns left out
    read_ms: float  # of the file
    checked: Spread  # times sooner that a replay is done, every invariant checked in every state
    unchecked: Spread

    @property
    def bytes_per_iteration(self) -> float:
        """The header and the requests included."""
        return self.file_bytes / self.iterations

    @property
    def bytes_per_token(self) -> float:
        """The same."""
        return self.file_bytes / self.tokens


def trace_json(cost: TraceCost) -> dict[str, Any]:
    """The object that `jspec bench trace --json` prints."""
    goals = {"ratio": 1 + OVERHEAD_GOAL, "checked": REPLAY_GOAL}
    per = {"bytes_per_iteration": cost.bytes_per_iteration, "bytes_per_token": cost.bytes_per_token}
    return {**dataclasses.asdict(cost), **per, "goals": goals}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceJob:
    """What to measure.

    Raises:
        ValueError: naming the field, its value and the rule.
    """

    config: EngineConfig = dataclasses.field(default_factory=lambda: EngineConfig(max_running=1))
    """Of both engines, but for context length and trace. The first `max_running` of the bundled prompts run at once."""
    max_new_tokens: int = 128  # of each prompt; ends of sequence are ignored, so that every round takes as many steps
    rounds: int = 7

    def __post_init__(self):
        if self.rounds < 1:
            raise ValueError(f"rounds={self.rounds} must be at least 1")
        if self.max_new_tokens < 2:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 2: the first token takes no step")
        if self.config.trace is not None:
            raise ValueError(f"trace={self.config.trace!r} must be left out: the bench records into a file of its own")


class _Turns:
    """An engine that decodes the same prompts each time; how long it took in all."""

    def __init__(self, engine: Engine, prompts: list[list[int]]):
        self.engine, self.prompts, self.seconds, self.tokens = engine, prompts, 0.0, 0

    def take(self, max_new_tokens: int) -> Run:
        start = time.perf_counter()
        run = run_engine(self.engine, self.prompts, SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True))
        self.seconds += time.perf_counter() - start
        self.tokens += sum(map(len, run.token_ids))
        return run


@contextlib.contextmanager
def _timed(recorder: Recorder) -> Iterator[list[float]]:
    """Seconds of each call that the engine's loop makes, while in the context."""
    seconds: list[float] = []

    def timed(function: Callable) -> Callable:
        def call(*args, **kwargs):
            start = time.perf_counter()
            function(*args, **kwargs)
            seconds.append(time.perf_counter() - start)

        return call

    with contextlib.ExitStack() as patches:
        for name in _CALLS:
            patches.enter_context(mock.patch.object(recorder, name, timed(getattr(recorder, name))))
        yield seconds


def _step_ms(run: Run) -> float:
    return 1e3 * run.decode_s / run.steps


def measure_trace(job: TraceJob, *, progress: Callable[..., Iterable] | None = None) -> TraceCost:
    """Decodes with and without a trace, in rounds that take turns at going first; then replays what was recorded as many times.

    Args:
        job: what to measure.
        progress: as of `Engine`.

    Raises:
        OSError, ValueError: a model or an option that cannot be used.
    """
    algorithm = job.config.algorithm
    params = SamplingParams(max_new_tokens=job.max_new_tokens, ignore_eos=True)
    prepared = prepare(DecodeJob(config=job.config, params=params, algorithms=(algorithm,), bare=False, curve=False))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.jspec")
        with _engine(prepared, None, progress) as plain, _engine(prepared, path, progress) as traced:
            prompts = prepared.prompts[: prepared.config.max_running]
            both = _Turns(plain, prompts), _Turns(traced, prompts)
            for turns in both:
                turns.take(WARM_UP_TOKENS)
            runs: tuple[list[Run], list[Run]] = ([], [])
            for number in range(job.rounds):
                for which in (0, 1) if number % 2 == 0 else (1, 0):
                    runs[which].append(both[which].take(job.max_new_tokens))
            before = int(traced.states[0].forward_iter)
            assert traced._recorder is not None
            with _timed(traced._recorder) as seconds:
                both[1].take(job.max_new_tokens)
            recorder_s = sum(seconds) / (int(traced.states[0].forward_iter) - before)
            iterations = int(traced.states[0].forward_iter)
        start = time.perf_counter()
        recording = read_trace(path)
        read_s = time.perf_counter() - start
        replays = {
            checked: [both[1].seconds / replay_until(recording, checked=checked).seconds for _ in range(job.rounds)]
            for checked in (True, False)
        }
        file_bytes = path.stat().st_size
    step_ms, traced_step_ms = (list(map(_step_ms, each)) for each in runs)
    return TraceCost(
        model=prepared.loaded.name,
        algorithm=algorithm,
        batch=len(prompts),
        max_new_tokens=job.max_new_tokens,
        rounds=job.rounds,
        steps=runs[0][0].steps,
        step_ms=spread(step_ms),
        traced_step_ms=spread(traced_step_ms),
        ratio=spread([slow / fast for fast, slow in zip(step_ms, traced_step_ms, strict=True)]),
        recorder_us=1e6 * recorder_s,
        recorder_share=1e3 * recorder_s / spread(step_ms).median,
        iterations=iterations,
        tokens=both[1].tokens,
        file_bytes=file_bytes,
        run_s=both[1].seconds,
        read_ms=1e3 * read_s,
        checked=spread(replays[True]),
        unchecked=spread(replays[False]),
    )


def _engine(prepared: Prepared, trace: Path | None, progress) -> Engine:
    config = contender_config(prepared.config, prepared.job.algorithms[0])
    config = dataclasses.replace(config, trace=None if trace is None else str(trace))
    return Engine(config, target=prepared.loaded.target, tokenizer=prepared.loaded.tokenizer, progress=progress)


def _of_rounds(value: Spread, digits: int, unit: str = "") -> str:
    """The median, then the lowest and the highest."""
    low, median, high = (f"{v:.{digits}f}" for v in (value.low, value.median, value.high))
    return f"{median}{unit} ({low}-{high})"


def trace_tables(cost: TraceCost) -> RenderableType:
    """All that `jspec bench trace` prints."""
    title = (
        f"{cost.model}, {cost.algorithm}, greedy, batch {cost.batch}, {cost.max_new_tokens} tokens, {cost.steps} steps, "
        f"{cost.rounds} round(s)"
    )
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for name in ("", "found", "goal"):
        table.add_column(name, justify="right" if name else "left")
    share = f"< {100 * OVERHEAD_GOAL:g} %"
    table.add_row("ms a step without a trace", _of_rounds(cost.step_ms, 3), "")
    table.add_row("  with one", _of_rounds(cost.traced_step_ms, 3), "")
    table.add_row("  with over without", _of_rounds(cost.ratio, 3, "x"), f"< {1 + OVERHEAD_GOAL:g}x")
    table.add_row("microseconds in the recorder, an iteration", f"{cost.recorder_us:.0f}", "")
    table.add_row("  of a step", f"{100 * cost.recorder_share:.2f} %", share)
    table.add_row("bytes an iteration", f"{cost.bytes_per_iteration:.0f}", "")
    table.add_row("  a token", f"{cost.bytes_per_token:.0f}", "")
    table.add_row("replay, checked, over the run", _of_rounds(cost.checked, 0, "x"), f">= {REPLAY_GOAL:g}x")
    table.add_row("  unchecked", _of_rounds(cost.unchecked, 0, "x"), "")
    note = (
        f"Medians of the rounds (lowest-highest). On record: {cost.iterations} iterations and {cost.tokens} tokens in {cost.file_bytes} bytes, which the "
        f"engine ran for {cost.run_s:.1f} s; they are read in {cost.read_ms:.0f} ms before they are replayed."
    )
    return Group(table, Text(note, style="dim"))
