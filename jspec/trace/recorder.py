"""Writes a trace while an engine runs: one frame for each thing that reaches the pure core, and one for each plan."""

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jspec.scheduler import Planned, Settled
from jspec.state.batches import ForwardMode, ScheduleBatch
from jspec.state.requests import FinishReason, Waiting
from jspec.state.results import NEVER, GenerationBatchResult, Launched, RowStatus
from jspec.state.scheduler_state import SchedulerState
from jspec.trace.format import Header, TraceWriter, digest

MOST_PROMPT_CHARS = 200
"""Of a prompt, as many are kept to know it by."""


class RankSettled(NamedTuple):
    """What the settle of a launch did on one rank."""

    state: SchedulerState  # requests that ended still hold their rows
    launched: Launched
    settled: Settled
    result: GenerationBatchResult  # with where texts stopped
    keys: Mapping[int, tuple[bytes, ...]]  # by row, what requests that ended leave to the prefix cache


class Recorder:
    """The recording side of an engine. Nothing here is read back by the engine.

    Args:
        path: of the file.
        header: what runs.
        stashed_iter: of the engine's FutureMap: whose type a receipt is compiled for.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | Path, header: Header, stashed_iter: jax.Array):
        # Of a second program nothing is left that is not donated to the next launch, but what this makes of it.
        self._receipt = jax.jit(lambda stashed_iter: stashed_iter.ravel()[0]).lower(stashed_iter).compile()
        self._start = time.perf_counter()
        self._writer = TraceWriter(path, header)
        self._seen: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._watched: queue.SimpleQueue[tuple[int, Any, Any] | None] = queue.SimpleQueue()
        self._watcher = threading.Thread(target=self._watch, name="jspec trace", daemon=True)
        self._watcher.start()
        self._prompt_keys: dict[int, tuple[bytes, ...]] = {}  # by serial: what `submit` has written of them
        self._times: list[int] = []
        self._closed = False

    def now(self) -> int:
        """Microseconds since the file was opened."""
        return int((time.perf_counter() - self._start) * 1e6)

    def submitted(self, rank: int, waiting: Waiting, *, rid: str, index: int, prompt: str) -> None:
        """A request was queued. `prompt`: its text, or its ids as text."""
        w = waiting
        self._prompt_keys[w.serial] = w.page_keys
        lens = (w.prompt_len, w.max_new_tokens, w.priority)
        head = prompt[:MOST_PROMPT_CHARS]
        stops, keys = list(w.stop_token_ids), list(w.page_keys)
        self._writer.write(["submit", self.now(), rank, w.serial, rid, index, head, *map(int, lens), stops, keys])

    def aborted(self, rank: int, serial: int) -> None:
        """An abort reached the state of its rank."""
        self._prompt_keys.pop(serial, None)  # what it leaves to the cache, if it does, is told in full
        self._writer.write(["abort", self.now(), rank, serial])

    def iteration_starts(self) -> None:
        """Before a plan."""
        self._times = [self.now()]

    def has_planned(self) -> None:
        """After it, before the dispatch."""
        self._times.append(self.now())

    def planned(
        self, planned: Sequence[Planned], *, depth: int = 0, outcome: Any = None, stashed_iter: jax.Array | None = None
    ) -> None:
        """After the dispatch, or where there was none.

        Args:
            planned: of each rank.
            depth: that the launch drafts to.
            outcome: device array that the first program makes; None where nothing was launched.
            stashed_iter: of the FutureMap that the second program makes; None where there is none.
        """
        batches = [batch for _, batch, _ in planned if batch is not None]
        self._times.append(self.now())
        self._writer.write(["plan", self._times, depth, [planned_frame(*item) for item in planned]])
        for _, _, left in planned:
            for gone in left:
                if gone.reason is not FinishReason.NONE:
                    self._prompt_keys.pop(gone.serial, None)
        if outcome is not None:
            done = None if stashed_iter is None else self._receipt(stashed_iter)
            self._watched.put((int(batches[0].forward_iter), outcome, done))

    def waits(self) -> None:
        """Before the wait for an outcome."""
        self._times = [self.now()]

    def is_ready(self) -> None:
        """After it."""
        self._times.append(self.now())

    def settled(self, ranks: Sequence[RankSettled], states: Sequence[SchedulerState]) -> None:
        """A launch was settled on every rank. `states`: what it came to, requests that ended retired."""
        self._times.append(self.now())
        frames = [
            settled_frame(*rank, self._prompt_keys, digest(state)) for rank, state in zip(ranks, states, strict=True)
        ]
        self._writer.write(["settle", self._times, frames])
        for rank in ranks:
            for row in rank.keys:
                self._prompt_keys.pop(int(rank.state.requests.serial[row]), None)
        self._write_seen()

    def _write_seen(self) -> None:
        while not self._seen.empty():
            self._writer.write(self._seen.get())

    def _watch(self) -> None:
        """In a thread of its own: when programs end. It holds an array each until then, and keeps nobody waiting."""
        while (item := self._watched.get()) is not None:
            forward_iter, outcome, done = item
            try:
                outcome.block_until_ready()
                published, committed = self.now(), -1
                if done is not None:
                    done.block_until_ready()
                    committed = self.now()
            except Exception:  # a program that failed: the engine hears of it where it reads the outcome
                continue
            self._seen.put(["device", forward_iter, published, committed])

    def close(self) -> None:
        """Writes what is left and the last frame; harmless to ask twice."""
        if not self._closed:
            self._closed = True
            self._watched.put(None)
            self._watcher.join()
            self._write_seen()
            self._writer.write(["end", self.now()])
            self._writer.close()


def planned_frame(state: SchedulerState, batch: ScheduleBatch | None, left) -> list[Any]:
    """What a "plan" frame holds of one rank."""
    gone = [[item.serial, item.row, item.output_len, int(item.reason)] for item in left]
    if batch is None:
        return ["", [], [], [], [], gone]
    mode = batch.forward_mode
    prompts, running = (None, batch) if mode is ForwardMode.DECODE else (batch, batch.tails)
    parts = [part for part in (prompts, running) if part is not None]
    index = parts[0].rows if len(parts) == 1 else np.concatenate([part.rows for part in parts])
    requests, ledger = state.requests, state.ledger
    columns = (
        requests.output_len,
        ledger.kv_committed_len,
        ledger.kv_allocated_len,
        ledger.cache_protected_len,
        requests.epoch,
    )
    clocks = [list(row) for row in zip(*[column[index].tolist() for column in columns], strict=True)]
    pages = [[page for page in row if page > 0] for part in parts for row in part.new_pages.tolist()]
    of_prompts = [] if prompts is None else prompts.rows.tolist()
    of_running = [] if running is None else running.rows.tolist()
    return [mode.value, of_prompts, of_running, clocks, pages, gone]


def settled_frame(
    state: SchedulerState,
    launched: Launched,
    settled: Settled,
    result: GenerationBatchResult,
    keys: Mapping[int, tuple[bytes, ...]],
    prompt_keys: Mapping[int, tuple[bytes, ...]],
    checksum: int,
) -> list[Any]:
    """What a "settle" frame holds of one rank; `state`: between `settle_oldest` and `retire`, `checksum`: of the state after both."""
    accept_lens = result.accept_lens.tolist()
    status = [] if (result.status == RowStatus.OK).all() else result.status.tolist()
    stop_at = [] if (result.stop_at == NEVER).all() else result.stop_at.tolist()
    runs = zip(result.next_token_ids.tolist(), accept_lens, strict=True)
    tokens = [token for run, length in runs for token in run[:length]]
    ended = []
    for i in settled.finish_reason.nonzero()[0].tolist():
        row = int(launched.rows[i])
        left, known = keys[row], prompt_keys.get(int(state.requests.serial[row]), ())
        count = len(left) if left == known[: len(left)] else len(known) if left[: len(known)] == known else 0
        ended.append([row, int(settled.finish_reason[i]), count, list(left[count:])])
    return [accept_lens, result.new_seq_lens.tolist(), status, stop_at, tokens, ended, checksum]
