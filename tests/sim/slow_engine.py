"""The engine's loop again, in plain Python on objects and page counts: slow, and written from the planner's rules without a look at the arrays."""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass
class Job:
    """A request."""

    serial: int
    prompt: int
    most: int  # tokens it may emit
    stop: int  # tokens after which it stops by itself
    arrival: float
    accepts: list[int]  # of its verifies, repeated
    settled: int = 0  # tokens, those behind a stop included
    verifies: int = 0
    first: float | None = None
    finish: float | None = None

    @property
    def length(self) -> int:
        return min(self.most, self.stop)


class Run:
    """A request that holds a row. A new one is made each time it gets one, so that results of an earlier one find nobody."""

    def __init__(self, job: Job):
        self.job, self.fill = job, job.prompt + job.settled
        self.committed = self.pages = 0

    @property
    def filling(self) -> bool:
        return self.committed < self.fill


@dataclasses.dataclass
class Part:
    """A row of a launch."""

    run: Run
    accept: int  # tokens it will bring
    verifies: bool
    commits: bool


@dataclasses.dataclass
class Launch:
    parts: list[Part]
    decode: bool
    done: float  # when the device has it


@dataclasses.dataclass(kw_only=True)
class SlowEngine:
    """One configuration, run by `run`."""

    jobs: list[Job]
    max_running: int
    width: int
    alloc_len: int
    overlap: bool
    mixed: bool
    pages: int
    page_size: int
    max_prefill_tokens: int
    ratios: tuple[float, float, float]
    device_s: object  # (rows, width, kv_tokens, drafts, prefill_tokens, prefill_pairs) -> seconds
    host_s: float

    def __post_init__(self):
        self.running: list[Run] = []
        self.again: list[Job] = []  # retracted, the next one first
        self.fresh = list(self.jobs)
        self.pending: Launch | None = None
        self.free, self.ratio = self.pages, np.float32(self.ratios[0])
        self.now = self.device_free = self.busy = 0.0
        self.steps = self.iterations = self.prefills = self.rounds = self.verifies = 0
        self.wasted = self.tokens = self.verified_tokens = self.retractions = 0

    # --- small facts ---------------------------------------------------------------------------------------------------

    def pages_of(self, tokens: int) -> int:
        return math.ceil(tokens / self.page_size)

    @property
    def reserve(self) -> int:
        return self.alloc_len * (2 if self.overlap else 1)

    def flying(self, run: Run) -> Part | None:
        """Its part of the launch under way."""
        return next((p for p in self.pending.parts if p.run is run), None) if self.pending else None

    def active(self) -> list[Run]:
        """Who would emit something in a step."""
        found = []
        for run in self.running:
            part = self.flying(run)
            sure = run.job.settled + (1 if part is not None and part.accept else 0)
            if not run.filling and sure < run.job.most:
                found.append(run)
        return found

    def lacks(self, run: Run) -> int:
        return max(self.pages_of(run.committed + self.reserve) - run.pages, 0)

    # --- the plan ------------------------------------------------------------------------------------------------------

    def plan_prefill(self) -> list[tuple[Run, int]]:
        """Rows whose prompt goes on, and where to."""
        if not self.running:
            self.ratio = np.float32(self.ratios[0])
        needed = sum(self.lacks(run) for run in self.active())
        if needed > self.free:
            return []
        budget, pages = self.max_prefill_tokens, self.free - needed
        to_go = sum(min(run.job.most - run.job.settled, 4096) for run in self.running)
        expected = np.float32(to_go) * self.ratio
        promised = sum(run.fill - run.committed for run in self.running if run.filling)
        chosen: list[tuple[Run, int]] = []
        for run in [run for run in self.running if run.filling]:
            end = run.fill
            if end - run.committed > budget:
                end = (run.committed + budget) // self.page_size * self.page_size
            new = self.pages_of(end) - self.pages_of(run.committed)
            if new > pages:
                return []
            budget, pages, promised = budget - (end - run.committed), pages - new, promised - (end - run.committed)
            chosen.append((run, end))
            if end < run.fill:
                return chosen
        while len(chosen) < min(self.max_running, 8) and self._rows_left(chosen):
            job = self.again[0] if self.again else None
            if job is None and self.fresh and self.fresh[0].arrival <= self.now:
                job = self.fresh[0]
            if job is None:
                break
            run = Run(job)
            end = run.fill if run.fill <= budget else min(budget, run.fill) // self.page_size * self.page_size
            to_emit = job.most - job.settled
            wants = run.fill + self.page_size + max(min(to_emit, 4096), self.reserve if to_emit > 1 else 0)
            anybody = bool(self.running or chosen)
            if end <= 0 or self.pages_of(end) > pages:
                break
            if anybody and expected > pages * self.page_size - wants - promised:
                break
            (self.again if self.again else self.fresh).pop(0)
            chosen.append((run, end))
            budget, pages, promised = budget - end, pages - self.pages_of(end), promised + wants - end
            if end < run.fill:
                break
        return chosen

    def _rows_left(self, chosen) -> bool:
        new = [run for run, _ in chosen if run not in self.running]
        return len(self.running) + len(new) < self.max_running

    def make_room(self) -> tuple[list[Run], bool]:
        """Who can be launched, after as many as necessary had to leave."""
        active, left = self.active(), False
        while sum(self.lacks(run) for run in active) > self.free:
            rows = active + [run for run in self.running if run.filling]
            gone = min(rows, key=lambda run: (run.job.settled, -run.job.prompt, -run.job.serial))
            active = [run for run in active if run is not gone]
            if len(rows) > 1:
                self.running.remove(gone)
                self.free += gone.pages
                self.again.insert(0, gone.job)
                self.retractions += 1
                left = True
        if left:
            wanted = sum(run.job.settled + 20 for run in active)
            most = sum(run.job.most for run in active) + 1
            self.ratio = max(np.float32(self.ratios[1]), min(np.float32(1), np.float32(wanted) / np.float32(most)))
        return active, left

    # --- an iteration --------------------------------------------------------------------------------------------------

    def step(self) -> None:
        before = self.active()
        chosen = self.plan_prefill()
        left = False
        if chosen:
            stepping = before if self.mixed and self.max_running > 1 else []
        else:
            stepping, left = self.make_room()
        tokens = pairs = 0
        parts = []
        for run, end in chosen:
            if run not in self.running:
                self.running.append(run)
            tokens += end - run.committed
            pairs += sum(range(run.committed + 1, end + 1))
            self.free -= self.pages_of(end) - run.pages
            run.pages, run.committed = self.pages_of(end), end
            parts.append(Part(run, 0 if run.filling else 1, False, False))
        positions = 0
        for run in stepping:
            flying = self.flying(run)
            positions += run.committed + (flying.accept if flying and flying.commits else 0)
            need = self.lacks(run)
            self.free -= need
            run.pages += need
            index = run.job.verifies + (1 if flying and flying.verifies else 0)
            accept = 1 if chosen else min(run.job.accepts[index % len(run.job.accepts)], self.width)
            parts.append(Part(run, accept, not chosen, True))
        assert self.free >= 0
        if stepping and not chosen and not left:
            lower = self.ratio - (np.float32(self.ratios[0]) - np.float32(self.ratios[1])) / np.float32(self.ratios[2])
            self.ratio = max(np.float32(self.ratios[1]), lower)

        previous = self.pending
        if not parts and previous is None:
            if self.fresh:
                self.now = max(self.now, self.fresh[0].arrival)
            return
        self.steps += 1
        self.now += self.host_s
        launch = None
        if parts:
            width = 1 if chosen else self.width
            seconds = self.device_s(len(stepping), width, positions, not chosen, tokens, pairs)
            self.device_free = max(self.now, self.device_free) + seconds
            self.busy += seconds
            launch = Launch(parts, not chosen, self.device_free)
            self.prefills += bool(chosen)
            self.rounds += len(parts)
        if launch is not None and not self.overlap:
            self.settle(launch)
        else:
            self.pending = launch
            if previous is not None:
                self.settle(previous)

    def settle(self, launch: Launch) -> None:
        self.now = max(self.now, launch.done)
        self.iterations += launch.decode
        for part in launch.parts:
            run, job = part.run, part.run.job
            if run not in self.running:
                self.wasted += 1
                continue
            visible = min(part.accept, job.length - job.settled)
            self.tokens += visible
            self.verifies += part.verifies
            self.verified_tokens += visible * part.verifies
            if job.settled == 0 and visible:
                job.first = self.now
            job.settled += part.accept
            job.verifies += part.verifies
            run.committed += part.accept * part.commits
            if job.settled >= job.length:
                job.finish = self.now
                self.running.remove(run)
                self.free += run.pages

    def run(self) -> "SlowEngine":
        while self.fresh or self.again or self.running or self.pending:
            self.step()
            assert self.free + sum(run.pages for run in self.running) == self.pages
        return self
