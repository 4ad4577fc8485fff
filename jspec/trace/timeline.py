"""A recording as what people look at: per iteration the three clocks of every row that ran, and when what happened."""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from jspec.state.ledger import total_pages
from jspec.state.requests import FinishReason
from jspec.state.scheduler_state import SchedulerState
from jspec.trace.format import Header, Recording
from jspec.trace.replay import Divergence, Moment, replay


class Field(NamedTuple):
    """What one column is about: the answers to "which clock, which owner, which boundary"."""

    time: str  # "host-settled", "launched", "future"
    owner: str
    boundary: str
    text: str


FIELDS = {
    "prompt_len": Field("host-settled", "admit", "-", "tokens of the prompt"),
    "output_len": Field("host-settled", "settle", "-", "tokens emitted and settled"),
    "seqlen": Field(
        "host-settled",
        "settle",
        "committed + pending",
        "prompt + output: the last of them is pending, its KV is not written",
    ),
    "cache_protected_len": Field(
        "host-settled", "share_prefix, cache_prefix", "committed", "KV that the prefix cache owns, page aligned"
    ),
    "kv_committed_len": Field(
        "host-settled", "settle; prepare_extend for prompt tokens", "committed", "KV the host knows to be right"
    ),
    "kv_allocated_len": Field(
        "host-settled",
        "reserve, prepare_extend, share_prefix, release",
        "allocated",
        "how far speculative writes may go",
    ),
    "seq_lens": Field(
        "launched",
        "read from the FutureMap inside the launch",
        "committed",
        "KV-ready prefix that this launch started from",
    ),
    "accept_lens": Field("future", "the device: accept", "-", "tokens this launch emitted, bonus included"),
    "new_seq_lens": Field(
        "future", "publish", "committed", "frontier after this launch, known to the device before the host"
    ),
    "bonus": Field("future", "stash", "pending", "token emitted last, whose KV the next launch writes"),
}
"""Every column of a row of an iteration, in the order in which they are shown."""


@dataclasses.dataclass
class Line:
    """One row in one iteration. Host clocks are as the launch found them, the plan's own reserve included; what the device decided was settled later."""

    rid: str
    serial: int
    rank: int
    row: int
    epoch: int
    kind: str  # "prompt", "chunk" (of a prompt that goes on), "tail", "decode"
    prompt_len: int
    output_len: int
    cache_protected_len: int
    kv_committed_len: int
    kv_allocated_len: int
    seq_lens: int | None = None  # None while the outcome is not on record
    accept_lens: int | None = None
    new_seq_lens: int | None = None
    bonus: int | None = None
    tokens: tuple[int, ...] = ()
    visible: int = 0  # of the tokens, those the user sees
    live: bool = True  # False: the row was another's, or nobody's, when the outcome was settled
    finish_reason: str = ""

    @property
    def seqlen(self) -> int:
        return self.prompt_len + self.output_len

    def clocks(self) -> dict[str, int | None]:
        """By name, in the order of `FIELDS`."""
        return {name: getattr(self, name) for name in FIELDS}


class Gone(NamedTuple):
    """A request that lost its row in a plan."""

    when: int  # it was planned
    rank: int
    serial: int
    why: str  # a reason to end, or "retracted": it waits again


@dataclasses.dataclass
class Iteration:
    """One launch of all ranks. Times are microseconds since the recording began."""

    forward_iter: int
    modes: tuple[str, ...]  # of each rank
    depth: int
    begun: int  # plan
    planned: int
    dispatched: int
    lines: list[Line]
    left: list[Gone]  # in its plan, or in one since the iteration before that launched nothing
    pages: tuple[int, int, int]  # free, cached, held by running requests alone, after its plan
    waiting: int  # requests that hold no row
    waited: int | None = None  # the host began to wait for the outcome
    ready: int | None = None
    settled: int | None = None
    settled_in: int | None = None  # forward_iter of the newest launch when it was settled
    published: int | None = None  # its first program was seen to have ended
    committed: int | None = None  # its second; None where there is none


@dataclasses.dataclass
class RequestLife:
    """One request, from its submission to its end."""

    rid: str
    serial: int
    rank: int
    index: int
    prompt: str  # its beginning
    prompt_len: int
    max_new_tokens: int
    priority: int
    submitted: int
    aborted: int | None = None
    ended: int | None = None
    finish_reason: str = ""
    retractions: int = 0
    num_tokens: int = 0  # that its user saw


@dataclasses.dataclass
class Timeline:
    """A whole run."""

    header: Header
    requests: dict[int, RequestLife]  # by serial
    iterations: list[Iteration]
    left_last: list[Gone]  # in plans after the last iteration, none of which launched anything
    num_pages: int
    broken: str | None  # why it is not whole

    def of_rid(self, rid: str) -> list[RequestLife]:
        """Requests of that name: several where `n` answers were asked for."""
        return [life for life in self.requests.values() if life.rid == rid]


def timeline(recording: Recording, *, checked: bool = False) -> Timeline:
    """Replays a recording, and lists what each iteration did: up to where the replay differs from the record, if it does.

    Raises: as `replay`, but for `Divergence`.
    """
    num_pages = recording.header.num_pages * recording.header.num_ranks
    line = Timeline(recording.header, {}, [], [], num_pages, recording.broken)
    try:
        _tell(line, replay(recording, checked=checked))
    except Divergence as error:
        line.broken = f"the transitions answer other than they did when it was recorded ({error})"
    return line


def _tell(line: Timeline, moments: Iterable[Moment]) -> None:
    by_iter: dict[int, Iteration] = {}
    unsettled: list[Iteration] = []
    for moment in moments:
        kind, *fields = moment.frame
        if kind == "submit":
            t, rank, serial, rid, index, prompt, prompt_len, max_new_tokens, priority, *_ = fields
            line.requests[serial] = RequestLife(
                rid, serial, rank, index, prompt, prompt_len, max_new_tokens, priority, submitted=t
            )
        elif kind == "abort":
            t, rank, serial = fields
            life = line.requests[serial]
            life.aborted = t
            if any(request.serial == serial for request in moment.before[rank].waiting):
                life.ended, life.finish_reason = t, FinishReason.ABORT.name
        elif kind == "plan":
            line.left_last += _left(line, moment)
            iteration = _planned(line, moment, line.left_last)
            if iteration is not None:
                line.left_last = []
                line.iterations.append(iteration)
                by_iter[iteration.forward_iter] = iteration
                unsettled.append(iteration)
        elif kind == "settle":
            _settled(line, unsettled.pop(0), moment)
        elif kind == "device":
            forward_iter, published, committed = fields
            iteration = by_iter[forward_iter]
            # Whoever looked first: the watching thread may wake up after the host has its outcome.
            iteration.published = published if iteration.ready is None else min(published, iteration.ready)
            iteration.committed = None if committed < 0 else committed


def pages_of(states: tuple[SchedulerState, ...]) -> tuple[int, int, int]:
    """Free pages, pages of the prefix cache, and pages that running requests hold alone; over all ranks."""
    free = sum(int(state.ledger.num_free) for state in states)
    cached = sum(len(state.prefix_cache.pages) for state in states)
    return free, cached, sum(total_pages(state.ledger) for state in states) - free - cached


def _left(line: Timeline, moment: Moment) -> list[Gone]:
    """Who lost a row in a plan, and why; their lives are told."""
    _, (_, planned, _), *_ = moment.frame
    left = []
    for rank, item in enumerate(moment.planned):
        for gone in item.left:
            life = line.requests[gone.serial]
            if gone.reason is FinishReason.NONE:
                life.retractions += 1
                left.append(Gone(planned, rank, gone.serial, "retracted"))
            else:
                life.ended, life.finish_reason, life.num_tokens = planned, gone.reason.name, gone.output_len
                left.append(Gone(planned, rank, gone.serial, gone.reason.name))
    return left


def _planned(line: Timeline, moment: Moment, left: list[Gone]) -> Iteration | None:
    """The iteration that a plan launches, if it does."""
    _, (begun, planned, dispatched), depth, _ = moment.frame
    if all(item.batch is None for item in moment.planned):
        return None
    lines = []
    for rank, (state, batch, _) in enumerate(moment.planned):
        assert batch is not None
        parts = [(batch, "decode")] if not batch.forward_mode.is_prefill else [(batch, "prompt"), (batch.tails, "tail")]
        for part, kind in parts:
            if part is None:
                continue
            for i, row in enumerate(part.rows.tolist()):
                found = _line(line, state, rank, row, "chunk" if part.goes_on[i] else kind)
                if kind == "prompt":  # known when planned; of the others only the device knows
                    found.seq_lens = int(part.prefix_lens[i])
                lines.append(found)
    return Iteration(
        forward_iter=int(moment.planned[0].state.forward_iter),
        modes=tuple(item.batch.forward_mode.value for item in moment.planned if item.batch is not None),
        depth=depth,
        begun=begun,
        planned=planned,
        dispatched=dispatched,
        lines=lines,
        left=left,
        pages=pages_of(moment.after),
        waiting=sum(len(state.waiting) for state in moment.after),
    )


def _line(line: Timeline, state: SchedulerState, rank: int, row: int, kind: str) -> Line:
    requests, ledger = state.requests, state.ledger
    serial = int(requests.serial[row])
    return Line(
        rid=line.requests[serial].rid,
        serial=serial,
        rank=rank,
        row=row,
        epoch=int(requests.epoch[row]),
        kind=kind,
        prompt_len=int(requests.prompt_len[row]),
        output_len=int(requests.output_len[row]),
        cache_protected_len=int(ledger.cache_protected_len[row]),
        kv_committed_len=int(ledger.kv_committed_len[row]),
        kv_allocated_len=int(ledger.kv_allocated_len[row]),
    )


def _settled(line: Timeline, iteration: Iteration, moment: Moment) -> None:
    _, (waited, ready, settled_at), _ = moment.frame
    iteration.waited, iteration.ready, iteration.settled = waited, ready, settled_at
    iteration.settled_in = int(moment.after[0].forward_iter)
    for rank, (_, result, settled) in enumerate(moment.settles):
        lines = [found for found in iteration.lines if found.rank == rank]
        for i, found in enumerate(lines):
            accepted = int(result.accept_lens[i])
            found.accept_lens, found.new_seq_lens = accepted, int(result.new_seq_lens[i])
            if found.kind == "decode":
                found.seq_lens = found.new_seq_lens - accepted
            elif found.kind == "tail":
                found.seq_lens = found.new_seq_lens - 1
            found.tokens = tuple(result.next_token_ids[i, :accepted].tolist())
            found.bonus = found.tokens[-1] if found.tokens else None
            found.live, found.visible = bool(settled.live[i]), int(settled.num_visible[i])
            reason = FinishReason(int(settled.finish_reason[i]))
            if found.live:
                life = line.requests[found.serial]
                life.num_tokens = int(settled.start[i]) + found.visible
                if reason is not FinishReason.NONE:
                    found.finish_reason = reason.name
                    life.ended, life.finish_reason = settled_at, reason.name
