"""Slow re-derivations that the tests compare the package with: plain Python, one request at a time, no arrays.

`Run` is the other half: it drives the real transitions, on frozen arrays, and checks every invariant after each.
"""

import collections
import dataclasses
from typing import NamedTuple

import jax
import numpy as np

from jspec.scheduler import abort, plan, retire, settle_oldest, submit
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
from jspec.state.prefix_cache import page_keys
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


def kv_of(tokens):
    """What the KV of each position depends on: every token up to it."""
    seen, content = 0, []
    for token in tokens:
        seen = hash((seen, token))
        content.append(seen)
    return content


class SlowDevice:
    """What each launch reads and writes. It checks that a row finds its own KV, or one of equal content, and that no write leaves its pages."""

    def __init__(self, num_rows, page_size, alloc_len):
        self.page_size, self.alloc_len = page_size, alloc_len
        self.pages = [[] for _ in range(num_rows)]
        self.tokens = [[] for _ in range(num_rows)]  # of each row, the pending one included
        self.frontier = np.zeros(num_rows, np.int32)
        self.generation = [0] * num_rows
        self.kv = {}  # (page, offset) -> content, or None where a rejected draft wrote

    def _slot(self, row, position):
        return self.pages[row][position // self.page_size], position % self.page_size

    def _check(self, row, length):
        for position, content in enumerate(kv_of(self.tokens[row][:length])):
            assert self.kv[self._slot(row, position)] == content, (row, position)

    def _write(self, row, start, right, written):
        assert start + written <= len(self.pages[row]) * self.page_size, "a write past the allocation"
        content = kv_of(self.tokens[row][: start + right])
        for position in range(start, start + written):
            self.kv[self._slot(row, position)] = content[position] if position < start + right else None

    def launch(self, batch, runs, known):
        """Runs `batch`, in which row `i` emits `runs[i]`, tails last. `known(serial)`: prompt and output as the host has them. Returns the result."""
        tails = batch.tails if batch.forward_mode is ForwardMode.MIXED else None
        decode = batch.forward_mode is ForwardMode.DECODE
        parts = [(batch, i, decode) for i in range(len(batch.rows))]
        parts += [(tails, i, True) for i in range(len(tails.rows) if tails else 0)]
        tokens = np.zeros((len(runs), self.alloc_len), np.int32)
        accept_lens, status = np.ones(len(runs), np.int32), np.zeros(len(runs), np.int32)
        rows = []
        for k, ((part, i, moves_on), given) in enumerate(zip(parts, runs, strict=True)):
            row, serial = int(part.rows[i]), int(part.serials[i])
            rows.append(row)
            pages = [page for page in part.new_pages[i].tolist() if page > 0]
            failed = given == NOT_FINITE
            status[k] = RowStatus.NOT_FINITE if failed else RowStatus.OK
            run = [0] if failed else given
            if moves_on:
                assert self.generation[row] == part.expected_iter[i], "the row holds somebody else's past"
                assert len(self.pages[row]) == part.first_page[i]
                self.pages[row] = self.pages[row] + pages
                start = int(self.frontier[row])
                self._check(row, start)
                right, written = len(run), self.alloc_len if decode else 1
                assert decode or len(run) == 1, "a tail emits one token"
                self.tokens[row] = self.tokens[row] + run
            else:
                self.pages[row] = pages
                start, right = int(part.prefix_lens[i]), int(part.extend_lens[i])
                assert start % self.page_size == 0 and right > 0
                written = right
                self.tokens[row] = known(serial)[: start + right]
                self._check(row, start)
                run = [] if part.goes_on[i] else run
            self._write(row, start, right, written)
            if not moves_on:
                self.tokens[row] = self.tokens[row] + run
            self.frontier[row] = start + right
            self.generation[row] = int(batch.forward_iter)
            accept_lens[k] = len(run)
            tokens[k, : len(run)] = run
        return GenerationBatchResult(
            next_token_ids=tokens,
            accept_lens=accept_lens,
            new_seq_lens=self.frontier[rows],
            status=status,
            stop_at=np.full(len(accept_lens), NEVER, np.int32),
        )


# --- the scheduler, one request at a time -----------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class SlowRequest:
    serial: int
    prompt: list
    max_new_tokens: int
    stops: tuple
    priority: int = 0
    shares: bool = False  # its pages have names
    output: list = dataclasses.field(default_factory=list)  # every token settled
    visible: list = dataclasses.field(default_factory=list)  # those the user sees
    fill_len: int = 0
    committed: int = 0
    allocated: int = 0
    locked: list = dataclasses.field(default_factory=list)  # names of the cached pages it begins with
    life: int = 0  # +1 whenever it loses its row
    started: bool = False
    aborted: bool = False
    reason: FinishReason = FinishReason.NONE

    @property
    def prompt_len(self):
        return len(self.prompt)

    @property
    def filling(self):
        return self.committed < self.fill_len

    @property
    def to_go(self):
        return min(self.max_new_tokens - len(self.output), 4096)

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
    """Lists and dictionaries. A flight holds requests and the lives they had, not rows and epochs: one that lost its row is simply skipped.

    A cached page is known by all the tokens up to its end, and those its draft looks ahead to.
    """

    def __init__(self, limits, *, max_running, num_pages, page_size):
        self.limits, self.max_running, self.num_pages, self.page_size = limits, max_running, num_pages, page_size
        self.waiting, self.running, self.flights, self.ended = [], {}, [], {}
        self.cached, self.clock = {}, 0  # name -> last use
        self.ratio = np.float32(limits.new_token_ratio)
        self.left = []  # of the newest plan: (serial, reason)
        self.counts = collections.Counter()

    # pages

    def pages(self, request):
        return ceil_to(request.allocated, self.page_size) // self.page_size

    def names(self, tokens, length):
        p, ahead = self.page_size, self.limits.lookahead
        return [tuple(tokens[: (i + 1) * p + ahead]) for i in range((length - ahead) // p)]

    def num_free(self):
        return (
            self.num_pages
            - len(self.cached)
            - sum(self.pages(request) - len(request.locked) for request in self.running.values())
        )

    def unlocked(self):
        held = {name for request in self.running.values() for name in request.locked}
        return [name for name in self.cached if name not in held]

    def room(self):
        return self.num_free() + len(self.unlocked())

    def touch(self, names):
        self.clock += 1
        for name in names:
            self.cached[name] = self.clock

    def evict_for(self, pages):
        while pages > self.num_free():
            oldest = min(self.unlocked(), key=lambda name: (self.cached[name], -len(name)))
            del self.cached[oldest]
            self.counts["evicted"] += 1

    def cache(self, request, names, *, running):
        kept = len(request.locked)
        self.counts["doubles"] += sum(name in self.cached for name in names[kept:])
        if running:
            new = []
            for name in names[kept:]:
                if name in self.cached:
                    break
                new.append(name)
            names = names[:kept] + new
        if names:
            self.touch(names)
            if len(names) > kept:
                request.locked = names

    # rows

    def wants_launch(self, request):
        in_flight = sum(
            other is request and life == request.life and emits
            for _, flight in self.flights
            for other, life, emits in flight
        )
        return not request.filling and len(request.output) + in_flight < request.max_new_tokens

    def active(self):
        return [row for row in sorted(self.running) if self.wants_launch(self.running[row])]

    def short(self, rows):
        reserve = (self.limits.depth + 1) * self.limits.alloc_len
        return sum(
            next_allocated(request.allocated, request.committed, reserve, self.page_size) // self.page_size
            - self.pages(request)
            if ceil_to(request.committed + reserve, self.page_size) > request.allocated
            else 0
            for request in (self.running[row] for row in rows)
        )

    def leave(self, row, reason):
        request = self.running.pop(row)
        request.life += 1
        request.locked, request.committed, request.allocated, request.started = [], 0, 0, False
        self.left.append((request.serial, reason))
        if reason is FinishReason.NONE:
            self.counts["retracted"] += 1
            place = sum(other.priority > request.priority for other in self.waiting)
            self.waiting.insert(place, request)
        else:
            request.reason = reason
            self.ended[request.serial] = request

    def rank(self, row):
        r = self.running[row]
        return (not r.aborted, r.priority, len(r.output), -r.prompt_len, -r.serial)

    def retract_one(self, rows):
        """Takes the one that has least to lose."""
        row = min(rows, key=self.rank)
        self.leave(row, FinishReason.ABORT if self.running[row].aborted else FinishReason.NONE)
        return row

    # plan

    def budget_left(self, set_aside):
        promised = sum(request.to_go for request in self.running.values()) * float(self.ratio)
        promised += sum(request.fill_len - request.committed for request in self.running.values() if request.filling)
        return self.room() - set_aside, promised

    def begin(self, request):
        """The cached pages a waiting request would begin with."""
        names = self.names(request.prompt, request.prompt_len) if request.shares else []
        most = (request.prompt_len + len(request.output) - 1) // self.page_size
        names = names[:most]
        hit = next((i for i, name in enumerate(names) if name not in self.cached), len(names))
        return names[:hit], names[hit:]

    def gain(self, soon, following):
        """Tokens that others compute now and this one would."""
        count = 0
        while count < len(following) and following[count] in soon:
            count += 1
        return count * self.page_size

    def cut(self, start, end, budget):
        """One token more after another, as long as it may end there."""
        fine = [
            n
            for n in range(1, min(budget, end - start) + 1)
            if start + n == end or ((start + n) % self.page_size == 0 and end - start - n >= self.limits.lookahead)
        ]
        return max(fine, default=0)

    def fits(self, request, start, length, pages, promised, anybody):
        p, end = self.page_size, start + length
        new = ceil_to(end, p) // p - start // p
        if new > pages:
            return False
        reserve = (self.limits.depth + 1) * self.limits.alloc_len
        room_for = max(request.to_go, reserve if request.max_new_tokens - len(request.output) > 1 else 0)
        wants = request.prompt_len + len(request.output) - start + p + room_for
        return not anybody or wants + promised <= pages * p

    def preempt(self):
        """Whoever has less priority than the first in the queue leaves, one after another, until that one can start; nobody, if it cannot anyway."""
        if not self.waiting:
            return
        head = self.waiting[0]
        lower = [row for row, r in self.running.items() if not r.aborted and r.priority < head.priority]
        lower.sort(key=self.rank)
        for count in range(len(lower) + 1):
            if self.could_start(head, set(lower[:count])):
                for row in lower[:count]:
                    self.counts["preempted"] += 1
                    self.leave(row, FinishReason.NONE)
                return

    def could_start(self, head, gone):
        """Whether the head could start if these rows had left."""
        rest = SlowScheduler(
            self.limits, max_running=self.max_running, num_pages=self.num_pages, page_size=self.page_size
        )
        rest.running = {row: r for row, r in self.running.items() if row not in gone}
        rest.cached, rest.ratio, rest.flights = self.cached, self.ratio, self.flights
        chunks = any(
            r.filling and rest.cut(r.committed, r.fill_len, self.limits.max_prefill_tokens) < r.fill_len - r.committed
            for r in rest.running.values()
        )
        if chunks or len(rest.running) == self.max_running:
            return False
        hit, _ = rest.begin(head)
        pages, promised = rest.budget_left(rest.short(rest.active()))
        pages -= len([name for name in hit if name in rest.unlocked()])
        start = len(hit) * self.page_size
        length = self.cut(start, head.prompt_len + len(head.output), self.limits.max_prefill_tokens)
        return self.fits(head, start, length, pages, promised, bool(rest.running))

    def admit(self, set_aside):
        """`[(row, start, length)]` of the prompts that go into the next batch."""
        tokens, p, chosen = self.limits.max_prefill_tokens, self.page_size, []
        for row, request in list(self.running.items()):
            if request.filling:
                length = self.cut(request.committed, request.fill_len, tokens)
                new = ceil_to(request.committed + length, p) // p - request.committed // p
                if new > self.room() - set_aside:
                    return []
                chosen.append((row, request.committed, length))
                request.committed = request.allocated = request.committed + length
                tokens -= length
                if request.filling:
                    self.evict_for(0)
                    return chosen
        promised = self.budget_left(set_aside)[1]
        soon = [
            name
            for r in self.running.values()
            if not r.started and r.shares
            for name in self.names(r.prompt, r.prompt_len)
        ]
        order = list(self.waiting)
        if self.limits.policy == "longest-prefix":
            order.sort(key=lambda r: (-r.priority, -len(self.begin_all(r))))
        entered = []
        for request in order:
            if len(chosen) == self.limits.max_prefill_rows or len(self.running) == self.max_running:
                break
            hit, following = self.begin(request)
            start, end = len(hit) * p, request.prompt_len + len(request.output)
            length = self.cut(start, end, tokens)
            pages = self.room() - set_aside - len([name for name in hit if name in self.unlocked()])
            anybody = bool(self.running)
            if (
                not length
                or self.gain(soon, following) >= 32
                or not self.fits(request, start, length, pages, promised, anybody)
            ):
                break
            reserve = (self.limits.depth + 1) * self.limits.alloc_len
            wants = max(request.to_go, reserve if request.max_new_tokens - len(request.output) > 1 else 0)
            promised += end - start + p + wants - length
            row = min(set(range(1, self.max_running + 1)) - set(self.running))
            self.running[row] = request
            entered.append(request)
            request.locked, request.fill_len = hit, end
            if hit:
                self.touch(hit)
                self.counts["hits"] += 1
            request.committed = request.allocated = start + length
            soon += self.names(request.prompt, request.prompt_len) if request.shares else []
            chosen.append((row, start, length))
            tokens -= length
            if request.filling:
                break
        for request in entered:
            self.waiting.remove(request)
        self.evict_for(0)  # what was handed out beyond the free pages
        return chosen

    def begin_all(self, request):
        names = self.names(request.prompt, request.prompt_len) if request.shares else []
        return names[: next((i for i, name in enumerate(names) if name not in self.cached), len(names))]

    def make_room(self, rows):
        """The rows that can be launched, their reserves in place."""
        retracted = False
        while self.short(rows) > self.room():
            able = [row for row in self.running if row in rows or self.running[row].filling]
            if len(able) > 1:
                gone = self.retract_one(able)
                retracted |= self.left[-1][1] is FinishReason.NONE
                rows = [row for row in rows if row != gone]
            elif len(self.running) > 1:
                rows = []
            else:
                self.leave(able[0], FinishReason.OUT_OF_PAGES)
                rows = []
        self.evict_for(self.short(rows))
        if retracted:
            survivors = [self.running[row] for row in rows]
            wanted = sum(len(r.output) for r in survivors) + 20 * len(survivors)
            ratio = np.float32(min(1.0, wanted / (sum(r.max_new_tokens for r in survivors) + 1)))
            self.ratio = max(np.float32(self.limits.min_new_token_ratio), ratio)
        return rows

    def grow(self, rows):
        """Reserves; the new pages of each row."""
        reserve, new_pages = (self.limits.depth + 1) * self.limits.alloc_len, []
        for row in rows:
            request, before = self.running[row], self.pages(self.running[row])
            request.allocated = next_allocated(request.allocated, request.committed, reserve, self.page_size)
            new_pages.append(self.pages(request) - before)
        assert self.num_free() >= 0
        return new_pages

    def plan(self):
        """`(mode, [(row, start, length)], [(row, new pages)])` of prompts and of rows that move on, or None."""
        self.left = []
        if not self.running:
            self.ratio = np.float32(self.limits.new_token_ratio)
        for row, request in list(self.running.items()):
            if request.aborted and request.filling:
                self.leave(row, FinishReason.ABORT)
        if self.waiting or any(request.filling for request in self.running.values()):
            self.preempt()
            rows = self.active()
            short = self.short(rows)
            prompts = self.admit(short) if short <= self.room() else []
            if prompts:
                flight = [
                    (self.running[row], self.running[row].life, not self.running[row].filling) for row, *_ in prompts
                ]
                ends = [start + length for _, start, length in prompts]
                tails = []
                if self.limits.mixed and rows:
                    self.evict_for(short)
                    tails = list(zip(rows, self.grow(rows), strict=True))
                    flight += [(self.running[row], self.running[row].life, True) for row, _ in tails]
                    self.counts["mixed"] += 1
                self.counts["chunks"] += any(self.running[row].filling for row, *_ in prompts)
                self.flights.append((("mixed" if tails else "extend", ends), flight))
                return "mixed" if tails else "extend", prompts, tails
        before = len(self.left)
        rows = self.make_room(self.active())
        if not rows:
            if not self.flights:
                for row in list(self.running):
                    self.leave(row, FinishReason.OUT_OF_PAGES)
            return None
        if len(self.left) == before:
            step = (self.limits.new_token_ratio - self.limits.min_new_token_ratio) / self.limits.ratio_steps
            self.ratio = np.float32(max(self.limits.min_new_token_ratio, float(self.ratio) - step))
        moves = list(zip(rows, self.grow(rows), strict=True))
        self.flights.append((("decode", []), [(self.running[row], self.running[row].life, True) for row in rows]))
        return "decode", [], moves

    def settle(self, runs):
        """The oldest flight lands. Returns `(serial, tokens shown, reason)` of each request that still has its row."""
        (_, ends), flight = self.flights.pop(0)
        emitted, finished = [], []
        for i, ((request, life, emits), run) in enumerate(zip(flight, runs, strict=True)):
            if life != request.life or request.reason is not FinishReason.NONE:
                self.counts["late"] += 1
                continue
            shown = request.take(run if emits or run == NOT_FINITE else [])
            request.started |= emits
            if i >= len(ends) and run != NOT_FINITE:
                request.committed += len(run)
            emitted.append((request.serial, shown, request.reason))
            if request.reason is not FinishReason.NONE:
                finished.append(request)
            elif i < len(ends) and request.shares and ends[i] >= self.page_size:
                names = self.names(request.prompt, request.prompt_len)[: ends[i] // self.page_size]
                self.cache(request, names, running=True)
        for request in finished:
            names = []
            if request.shares and request.reason is not FinishReason.ERROR:
                names = self.names(request.prompt + request.output, request.committed)
            self.cache(request, names, running=False)
        for request in finished:
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
        max_prefill_tokens=256, max_prefill_rows=8, mixed=False, lookahead=0, policy="fcfs", new_token_ratio=0.7,
        ratio_steps=600,
    ):  # fmt: skip
        self.limits = Limits(
            context_len=context_len,
            alloc_len=alloc_len,
            depth=depth,
            max_prefill_tokens=max_prefill_tokens,
            max_prefill_rows=max_prefill_rows,
            lookahead=lookahead,
            mixed=mixed,
            policy=policy,
            new_token_ratio=new_token_ratio,
            min_new_token_ratio=0.14 * new_token_ratio,
            ratio_steps=ratio_steps,
        )
        self.max_accept = max_accept or alloc_len
        self.state = freeze(
            init_state(limits=self.limits, max_running=max_running, num_pages=num_pages, page_size=page_size)
        )
        self.device = SlowDevice(max_running + 1, page_size, alloc_len)
        self.results = []
        self.content = {}  # serial -> prompt and settled output
        self.shares = {}  # serial -> its pages have names
        self.left = ()  # of the newest plan
        self.checked = True

    def check(self):
        if self.checked:
            check(self.state, limits=self.limits, frontier=self.device.frontier, max_accept=self.max_accept)
        return freeze(self.state)

    def keys(self, tokens):
        return page_keys(
            np.array(tokens, np.int32), page_size=self.state.ledger.page_size, lookahead=self.limits.lookahead
        )

    def submit(self, serial, prompt, max_new_tokens=100, stops=(), *, priority=0):
        """`prompt`: tokens, whose pages may be shared, or a number of tokens that nobody else has."""
        self.shares[serial] = not isinstance(prompt, int)
        tokens = list(range(1000 * serial, 1000 * serial + prompt)) if isinstance(prompt, int) else list(prompt)
        self.content[serial] = tokens
        keys = self.keys(tokens) if self.shares[serial] else ()
        request = Waiting(serial, len(tokens), max_new_tokens, stops, priority=priority, page_keys=keys)
        self.state = submit(self.state, request)
        self.check()

    def abort(self, serial):
        self.state, found = abort(self.state, serial)
        self.check()
        return found.value

    def plan(self):
        """Plans; the caller must `launch` the batch before anything else."""
        self.state, batch, self.left = plan(self.state, limits=self.limits)
        if batch is None:
            self.check()
        return batch

    def launch(self, batch, runs):
        self.results.append(freeze(self.device.launch(batch, runs, self.content.__getitem__)))
        for row in self.state.launched[-1].rows.tolist():
            held = num_pages_held(self.state.ledger)[row]
            assert self.state.ledger.page_table[row, :held].tolist() == self.device.pages[row]
        self.check()

    def settle(self):
        result = self.results.pop(0)
        self.state, launched, settled = settle_oldest(self.state, result)
        for i in np.nonzero(settled.live)[0].tolist():
            serial = int(self.state.requests.serial[launched.rows[i]])
            self.content[serial] = self.content[serial] + result.next_token_ids[i, : settled.num_new[i]].tolist()
        ended = {}
        for i in np.nonzero(settled.finish_reason)[0].tolist():
            row = int(launched.rows[i])
            serial = int(self.state.requests.serial[row])
            failed = settled.finish_reason[i] == FinishReason.ERROR or not self.shares[serial]
            committed = int(self.state.ledger.kv_committed_len[row])
            ended[row] = () if failed else self.keys(self.content[serial][:committed])
        if ended:
            self.state = retire(self.state, ended)
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
