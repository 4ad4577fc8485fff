"""Many requests through one engine in one process, over a worker that computes nothing: what is lost, and what grows."""

import dataclasses
import gc
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from jspec.bench.serve_trace import LaunchCounter, Launches
from jspec.bench.stub import VOCAB_SIZE, stub_target, stub_worker
from jspec.config import EngineConfig, SamplingParams
from jspec.engine import Engine, RequestOutput
from jspec.state.invariants import InvariantError, check
from jspec.state.ledger import total_pages
from jspec.state.prefix_cache import PrefixCache
from jspec.state.scheduler_state import Limits, SchedulerState

CONFIG = EngineConfig(
    page_size=16,
    max_running=8,
    context_len=256,
    kv_tokens=384,
    max_prefill_tokens=64,
    schedule_conservativeness=0.05,
    batch_buckets=(8,),
    prefill_buckets=(64,),
)
"""Eight rows share 24 pages where one may want 16, and hardly any of what they may still emit is counted on: requests are retracted. Prompts of more than 64
tokens go in chunks."""

STEMS, STEM_TOKENS, LONGEST_ENDING, LONGEST_OUTPUT = 6, 96, 40, 100
"""A prompt is a part of one of six stems, of any length, and 1 to 40 tokens of its own; the stems fill more pages than there are."""

ABORT_SHARE, LATEST_ABORT = 0.03, 20
"""Of all requests, ended by the user within so many steps of their submission: waiting, in the middle of their prompt, or decoding."""

IN_FLIGHT = 2 * CONFIG.max_running
"""Requests that wait or run at any time; the next is submitted when one ends."""

GROWTH_SHARE, GROWTH_BYTES = 0.1, 50 * 2**20
"""Memory may grow by the larger of these after a tenth of the requests."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageAccount:
    """Where the pages of a state are."""

    total: int
    free: int
    cached: int
    locked: int  # cached pages that some row holds

    @property
    def lost(self) -> int:
        """Pages that are neither free nor cached. Of an idle engine: none."""
        return self.total - self.free - self.cached


def page_account(state: SchedulerState) -> PageAccount:
    """Counts the pages of a state."""
    return PageAccount(
        total=total_pages(state.ledger),
        free=int(state.ledger.num_free),
        cached=len(state.prefix_cache.pages),
        locked=int((state.ledger.page_locks > 0).sum()),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoakReport:
    """What a soak found."""

    requests: int
    ended: dict[str, int]  # by finish reason
    tokens: int
    seconds: float
    requests_per_s: float
    launches: Launches
    retractions: int
    evicted_pages: int
    cached_tokens: int  # prompt tokens that requests found in the prefix cache
    pages: PageAccount  # at the end
    memory_bytes_at_tenth: int  # resident, when a tenth of the requests had ended
    memory_bytes_at_end: int
    memory_growth_allowed_bytes: int
    faults: list[str]

    @property
    def ok(self) -> bool:
        """Whether nothing was lost and memory stayed."""
        return not self.faults


@dataclasses.dataclass(kw_only=True)
class _Tally:
    """What is counted while requests run."""

    ended: Counter = dataclasses.field(default_factory=Counter)
    tokens: int = 0
    cached_tokens: int = 0
    evicted_pages: int = 0
    faults: list[str] = dataclasses.field(default_factory=list)

    def count(self, output: RequestOutput, params: SamplingParams, emitted: int) -> None:
        """A request has ended, of which `emitted` tokens came."""
        self.ended[output.finish_reason] += 1
        self.tokens += len(output.token_ids)
        self.cached_tokens += output.cached_tokens
        expected = params.max_new_tokens if output.finish_reason == "length" else emitted
        if not emitted == len(output.token_ids) == expected:
            self.faults.append(
                f"{output.rid} ended by {output.finish_reason!r} with {len(output.token_ids)} tokens, {emitted} of them emitted, where {expected} were to come"
            )
        if output.finish_reason not in ("length", "abort"):
            self.faults.append(f"{output.rid} ended by {output.finish_reason!r}: {output.error}")

    def count_evictions(self, before: PrefixCache, after: PrefixCache) -> None:
        """Of one step. A page that is evicted is not cached again within it: whoever gets it must first be launched."""
        if after is not before:
            self.evicted_pages += int(((before.depth > 0) & (after.depth == 0)).sum())


def resident_bytes() -> int:
    """Memory of this process, garbage collected; where the system does not tell what is resident, the most that was."""
    gc.collect()
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def _drive(engine: Engine, requests: int, seed: int, tally: _Tally, counter: LaunchCounter) -> Iterator[str]:
    """Runs all requests; yields the name of each as it ends. The same seed gives the same run."""
    rng = np.random.default_rng(seed)
    stems = rng.integers(0, VOCAB_SIZE, (STEMS, STEM_TOKENS))
    open_: dict[str, SamplingParams] = {}
    emitted: Counter = Counter()
    aborts: dict[int, list[str]] = {}
    submitted = step = 0
    while submitted < requests or engine.has_work:
        while submitted < requests and len(open_) < IN_FLIGHT:
            stem = stems[rng.integers(STEMS), : rng.integers(STEM_TOKENS + 1)]
            prompt = np.concatenate([stem, rng.integers(0, VOCAB_SIZE, rng.integers(1, LONGEST_ENDING + 1))])
            params = SamplingParams(max_new_tokens=int(rng.integers(1, LONGEST_OUTPUT + 1)))
            open_[rid := engine.submit(prompt.tolist(), params)] = params
            submitted += 1
            if rng.random() < ABORT_SHARE:
                aborts.setdefault(step + int(rng.integers(LATEST_ABORT)), []).append(rid)
        for rid in aborts.pop(step, ()):
            engine.abort(rid)
        step += 1
        before = engine.state.prefix_cache
        emissions = engine.step()
        counter.see(engine.state)
        tally.count_evictions(before, engine.state.prefix_cache)
        for emission in emissions:
            emitted[emission.rid] += len(emission.token_ids)
            if emission.output is not None:
                tally.count(emission.output, open_.pop(emission.rid), emitted.pop(emission.rid))
                yield emission.rid


def growth_allowed(memory_bytes_at_tenth: int) -> int:
    """Bytes by which memory may grow after the first tenth."""
    return max(int(memory_bytes_at_tenth * GROWTH_SHARE), GROWTH_BYTES)


def find_faults(
    state: SchedulerState, limits: Limits, *, requests: int, ended: int, memory_at_tenth: int, memory_at_end: int
) -> list[str]:
    """What must not be when all requests have ended, a sentence each.

    Args:
        state: the last one.
        limits: numbers it was planned with.
        requests, ended: how many there were, and how many ends came.
        memory_at_tenth, memory_at_end: resident bytes.
    """
    faults, pages = [], page_account(state)
    if pages.lost:
        faults.append(
            f"{pages.lost} pages are lost: {pages.free} free and {pages.cached} cached are not the {pages.total} there are"
        )
    if pages.locked:
        faults.append(f"{pages.locked} pages are locked, though no request runs")
    if ended != requests:
        faults.append(f"{ended} of {requests} requests ended")
    if state.waiting or state.launched or state.requests.serial.any():
        faults.append("a request still waits or runs, or a launch is not settled")
    try:
        check(state, limits=limits)
    except InvariantError as error:
        faults.append(f"the last state is not sound: {error}")
    growth, allowed = memory_at_end - memory_at_tenth, growth_allowed(memory_at_tenth)
    if growth > allowed:
        faults.append(f"memory grew by {growth / 2**20:.0f} MiB after a tenth, more than {allowed / 2**20:.0f} MiB")
    return faults


def run_soak(
    requests: int,
    *,
    seed: int = 0,
    checked: bool = False,
    progress: Callable[..., Iterable] | None = None,
    soaking: Callable[..., Iterable] | None = None,
) -> SoakReport:
    """Runs `requests` requests through the real engine over the stub worker.

    Args:
        requests: how many, at least 1.
        seed: of prompts, lengths and aborts.
        checked: check every invariant after every transition: several times slower.
        progress: as of `Engine`.
        soaking: the same, of the requests that have ended.
    """
    config = dataclasses.replace(CONFIG, checked=checked)
    engine = Engine(config, target=stub_target(256), worker=stub_worker(), progress=progress)
    tally, counter = _Tally(), LaunchCounter(engine.state)
    start = time.perf_counter()
    ends: Iterable[str] = _drive(engine, requests, seed, tally, counter)
    tenth, at_tenth = max(requests // 10, 1), 0
    for ended, _ in enumerate(soaking(ends, total=requests) if soaking is not None else ends, 1):
        if ended == tenth:
            at_tenth = resident_bytes()
    seconds = time.perf_counter() - start
    at_end = resident_bytes()
    faults = find_faults(
        engine.state,
        engine.limits,
        requests=requests,
        ended=tally.ended.total(),
        memory_at_tenth=at_tenth,
        memory_at_end=at_end,
    )
    return SoakReport(
        requests=requests,
        ended=dict(sorted(tally.ended.items())),
        tokens=tally.tokens,
        seconds=seconds,
        requests_per_s=requests / seconds,
        launches=counter.launches,
        retractions=engine.summary().retractions,
        evicted_pages=tally.evicted_pages,
        cached_tokens=tally.cached_tokens,
        pages=page_account(engine.state),
        memory_bytes_at_tenth=at_tenth,
        memory_bytes_at_end=at_end,
        memory_growth_allowed_bytes=growth_allowed(at_tenth),
        faults=[*tally.faults[:10], *faults],
    )
