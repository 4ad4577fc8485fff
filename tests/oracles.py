"""Slow re-derivations that the tests compare the package with: plain Python, one request at a time, no arrays.

`Run` is the other half: it drives the real transitions, on frozen arrays, and checks every invariant after each.
"""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np

from jspec.scheduler import abort, launchable, plan, settle_oldest, submit
from jspec.state import (
    FinishReason,
    ForwardMode,
    GenerationBatchResult,
    Limits,
    RowStatus,
    Waiting,
    init_state,
    num_pages_held,
)
from jspec.state.invariants import check
from jspec.state.results import NEVER

NOT_FINITE = "not finite"
"""In place of a run of tokens: the row's logits were not finite."""


def ceil_to(length, multiple):
    """Smallest multiple that is not below `length`."""
    return (length + multiple - 1) // multiple * multiple


# --- the clocks of one request, after SGLang's Spec V2 ---------------------------------------------------------------


class Step(NamedTuple):
    """One iteration of one request."""

    plan_committed: int  # C when the launch is planned
    plan_allocated: int  # A after the reserve
    frontier: int  # F, where the launch starts
    published: int  # S, where it ends
    committed: int  # C at the end of the iteration
    seqlen: int  # N at the end of the iteration
    need: int  # tokens that the reserve added
    new_pages: int
    slack: int  # A less the end of the write window; negative would be a write past the allocation


def next_allocated(allocated, committed, reserve, page_size):
    """`A` after a reserve: whole pages, never shrinking."""
    return max(allocated, ceil_to(committed + reserve, page_size))


def clock_table(*, prompt_len, page_size, accepts, depth, width=4, windows=None):
    """The iterations of a request that never ends: its prefill, then one verify for each of `accepts`."""
    reserve = (depth + 1 if windows is None else windows) * width
    committed = allocated = frontier = prompt_len
    outputs, unsettled, table = 0, [], []
    for iteration, accepted in enumerate([None, *accepts]):
        planned, before, start = committed, allocated, frontier
        if accepted is None:
            unsettled.append((1, 0))
        else:
            allocated = next_allocated(allocated, committed, reserve, page_size)
            frontier += accepted
            unsettled.append((accepted, accepted))
        if len(unsettled) > depth:
            new_outputs, new_committed = unsettled.pop(0)
            outputs, committed = outputs + new_outputs, committed + new_committed
        pages = [ceil_to(n, page_size) // page_size for n in (before, allocated)]
        table.append(
            Step(
                plan_committed=planned,
                plan_allocated=allocated,
                frontier=start,
                published=frontier,
                committed=committed,
                seqlen=prompt_len + outputs,
                need=allocated - before,
                new_pages=pages[1] - pages[0],
                slack=allocated - (start + (width if iteration else 0)),
            )
        )
    return table


def released_columns(committed, allocated, page_size, protected=0):
    """Page-table columns that a release frees, piece by piece: the committed pages, the tail's page, the over-allocation."""
    key = committed // page_size * page_size
    pieces = [(protected, key), (key, committed), (ceil_to(committed, page_size), allocated)]
    return [page for low, high in pieces if low < high for page in range(low // page_size, (high - 1) // page_size + 1)]


# --- one device, row by row -------------------------------------------------------------------------------------------


class SlowDevice:
    """What each launch reads and writes. It checks that a row finds its own KV, and that no write leaves its pages."""

    def __init__(self, num_rows, page_size, alloc_len):
        self.page_size, self.alloc_len = page_size, alloc_len
        self.pages = [[] for _ in range(num_rows)]
        self.frontier = np.zeros(num_rows, np.int32)
        self.generation = [0] * num_rows
        self.kv = {}  # (page, offset) -> (serial, position), or None where a rejected draft wrote

    def _slot(self, row, position):
        return self.pages[row][position // self.page_size], position % self.page_size

    def launch(self, batch, runs):
        """Runs `batch`, in which row `i` emits `runs[i]`; returns the result."""
        decode = batch.forward_mode is ForwardMode.DECODE
        stride = self.alloc_len
        tokens = np.zeros((len(runs), stride), np.int32)
        accept_lens, status = np.ones(len(runs), np.int32), np.zeros(len(runs), np.int32)
        for i, (row, serial) in enumerate(zip(batch.rows.tolist(), batch.serials.tolist(), strict=True)):
            new_pages = [page for page in batch.new_pages[i].tolist() if page >= 0]
            if decode:
                assert self.generation[row] == batch.expected_iter[i], "the row holds somebody else's past"
                assert len(self.pages[row]) == batch.first_page[i]
                self.pages[row] = self.pages[row] + new_pages
                start = int(self.frontier[row])
                for position in range(start):
                    assert self.kv[self._slot(row, position)] == (serial, position), (row, position)
            else:
                self.pages[row], start = new_pages, 0
            run = [0] if runs[i] == NOT_FINITE else runs[i]
            status[i] = RowStatus.NOT_FINITE if runs[i] == NOT_FINITE else RowStatus.OK
            right = len(run) if decode else int(batch.extend_lens[i])
            written = self.alloc_len if decode else right
            assert start + written <= len(self.pages[row]) * self.page_size, "a write past the allocation"
            for offset in range(written):
                self.kv[self._slot(row, start + offset)] = (serial, start + offset) if offset < right else None
            self.frontier[row] = start + right
            self.generation[row] = int(batch.forward_iter)
            accept_lens[i] = len(run)
            tokens[i, : len(run)] = run
        return GenerationBatchResult(
            next_token_ids=tokens,
            accept_lens=accept_lens,
            new_seq_lens=self.frontier[batch.rows],
            status=status,
            stop_at=np.full(len(accept_lens), NEVER, np.int32),
        )


# --- the scheduler, one request at a time -----------------------------------------------------------------------------


@dataclasses.dataclass
class SlowRequest:
    serial: int
    prompt_len: int
    max_new_tokens: int
    stops: tuple
    output: list = dataclasses.field(default_factory=list)  # every token settled
    visible: list = dataclasses.field(default_factory=list)  # those the user sees
    committed: int = 0
    allocated: int = 0
    aborted: bool = False
    reason: FinishReason = FinishReason.NONE

    def take(self, run, stop_at=NEVER):
        """One token after another, as plain decoding would; the text stops at token `stop_at`. Returns the tokens that the user sees."""
        shown = []
        if run == NOT_FINITE:
            self.reason = FinishReason.ABORT if self.aborted else FinishReason.ERROR
            return shown
        for place, token in enumerate(run, 1):
            self.output.append(token)
            if self.reason is not FinishReason.NONE:
                continue
            shown.append(token)
            if self.aborted:
                continue
            if token in self.stops or place == stop_at:
                self.reason = FinishReason.STOP
            elif len(self.output) == self.max_new_tokens:
                self.reason = FinishReason.LENGTH
        if self.aborted:
            self.reason = FinishReason.ABORT
        self.visible += shown
        return shown


class SlowScheduler:
    """Lists and dictionaries. A flight holds requests, not rows and epochs: a request that ended is simply skipped."""

    def __init__(self, limits, *, max_running, num_pages, page_size):
        self.limits, self.max_running, self.num_pages, self.page_size = limits, max_running, num_pages, page_size
        self.waiting, self.running, self.flights, self.ended = [], {}, [], {}

    def pages(self, request):
        return ceil_to(request.allocated, self.page_size) // self.page_size

    def worst(self, request):
        """Pages at the last plan that can launch the request: all but one token settled, the reserve on top."""
        if request.max_new_tokens == 1:
            return ceil_to(request.prompt_len, self.page_size) // self.page_size
        committed = request.prompt_len + request.max_new_tokens - 2
        return ceil_to(committed + (self.limits.depth + 1) * self.limits.alloc_len, self.page_size) // self.page_size

    def wants_launch(self, request):
        in_flight = sum(request in flight for _, flight in self.flights)
        return len(request.output) + in_flight < request.max_new_tokens

    def plan(self):
        """`(mode, rows, new pages of each)`, or None."""
        rows, tokens = [], 0
        promised = sum(self.worst(request) for request in self.running.values())
        while self.waiting and len(rows) < self.limits.max_prefill_rows and len(self.running) < self.max_running:
            head = self.waiting[0]
            too_long = rows and tokens + head.prompt_len > self.limits.max_prefill_tokens
            if too_long or promised + self.worst(head) > self.num_pages:
                break
            row = min(set(range(1, self.max_running + 1)) - set(self.running))
            self.running[row] = self.waiting.pop(0)
            promised, tokens = promised + self.worst(head), tokens + head.prompt_len
            head.committed = head.allocated = head.prompt_len
            rows.append(row)
        if rows:
            self.flights.append(("extend", [self.running[row] for row in rows]))
            return "extend", rows, [self.pages(self.running[row]) for row in rows]
        rows = [row for row in sorted(self.running) if self.wants_launch(self.running[row])]
        if not rows:
            return None
        new_pages = []
        for row in rows:
            request, before = self.running[row], self.pages(self.running[row])
            reserve = (self.limits.depth + 1) * self.limits.alloc_len
            request.allocated = next_allocated(request.allocated, request.committed, reserve, self.page_size)
            new_pages.append(self.pages(request) - before)
        assert sum(self.pages(request) for request in self.running.values()) <= self.num_pages
        self.flights.append(("decode", [self.running[row] for row in rows]))
        return "decode", rows, new_pages

    def settle(self, runs):
        """The oldest flight lands. Returns `(serial, tokens shown, reason)` of each request that still lives."""
        mode, flight = self.flights.pop(0)
        emitted = []
        for request, run in zip(flight, runs, strict=True):
            if request.reason is not FinishReason.NONE:
                continue
            shown = request.take(run)
            if mode == "decode" and run != NOT_FINITE:
                request.committed += len(run)
            emitted.append((request.serial, shown, request.reason))
            if request.reason is not FinishReason.NONE:
                self.ended[request.serial] = request
                self.running = {row: other for row, other in self.running.items() if other is not request}
        return emitted

    def abort(self, serial):
        for request in self.running.values():
            if request.serial == serial:
                request.aborted = True
                return "running"
        for request in self.waiting:
            if request.serial == serial:
                self.waiting.remove(request)
                request.reason = FinishReason.ABORT
                self.ended[serial] = request
                return "waiting"
        return "unknown"


# --- the real thing, driven -------------------------------------------------------------------------------------------


def freeze(tree):
    """The same tree; its NumPy arrays can no longer be written."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, np.ndarray):
            leaf.setflags(write=False)
    return tree


def make_result(runs, *, stride=4, new_seq_lens=None, stop_at=None):
    """A result in which batch row `i` emitted `runs[i]`; `stop_at`: where its text holds a stop string."""
    tokens = np.zeros((len(runs), stride), np.int32)
    for i, run in enumerate(runs):
        tokens[i, : len(run)] = run
    lens = np.array([len(run) for run in runs], np.int32)
    zeros = np.zeros(len(runs), np.int32)
    return freeze(
        GenerationBatchResult(
            next_token_ids=tokens,
            accept_lens=lens,
            new_seq_lens=zeros if new_seq_lens is None else new_seq_lens,
            status=zeros,
            stop_at=np.full(len(runs), NEVER, np.int32) if stop_at is None else np.array(stop_at, np.int32),
        )
    )


class Run:
    """A scheduler state and a device, advanced by the real transitions only. Rows are counted from 1."""

    def __init__(
        self, *, page_size=1, num_pages=400, max_running=1, context_len=256, alloc_len=4, depth=1, max_accept=None,
        max_prefill_tokens=256, max_prefill_rows=8,
    ):  # fmt: skip
        self.limits = Limits(
            context_len=context_len,
            alloc_len=alloc_len,
            depth=depth,
            max_prefill_tokens=max_prefill_tokens,
            max_prefill_rows=max_prefill_rows,
        )
        self.max_accept = max_accept or alloc_len
        self.state = freeze(
            init_state(limits=self.limits, max_running=max_running, num_pages=num_pages, page_size=page_size)
        )
        self.device = SlowDevice(max_running + 1, page_size, alloc_len)
        self.results = []
        self.checked = True

    def check(self):
        if self.checked:
            check(self.state, limits=self.limits, frontier=self.device.frontier, max_accept=self.max_accept)
        return freeze(self.state)

    def submit(self, serial, prompt_len, max_new_tokens=100, stops=()):
        self.state = submit(self.state, Waiting(serial, prompt_len, max_new_tokens, stops))
        self.check()

    def abort(self, serial):
        self.state, found = abort(self.state, serial)
        self.check()
        return found.value

    def plan(self):
        """Plans; the caller must `launch` the batch before anything else."""
        before = launchable(self.state.requests, self.state.launched)
        self.state, batch = plan(self.state, limits=self.limits)
        if batch is not None and batch.forward_mode is ForwardMode.DECODE:
            assert batch.rows.tolist() == np.nonzero(before)[0].tolist(), "a running row lacked a page"
        return batch

    def launch(self, batch, runs):
        self.results.append(freeze(self.device.launch(batch, runs)))
        for row in batch.rows.tolist():
            held = num_pages_held(self.state.ledger)[row]
            assert self.state.ledger.page_table[row, :held].tolist() == self.device.pages[row]
        self.check()

    def settle(self):
        self.state, launched, settled = settle_oldest(self.state, self.results.pop(0))
        self.check()
        return launched, settled

    def step(self, runs):
        """One iteration: plan, launch, then settle what the depth says."""
        batch = self.plan()
        self.launch(batch, runs)
        settled = self.settle() if len(self.results) > self.limits.depth else None
        return batch, settled

    def lens(self, row=1):
        """`(kv_committed_len, kv_allocated_len, seqlen)` of a row."""
        ledger, requests = self.state.ledger, self.state.requests
        return (
            int(ledger.kv_committed_len[row]),
            int(ledger.kv_allocated_len[row]),
            int(requests.prompt_len[row] + requests.output_len[row]),
        )
