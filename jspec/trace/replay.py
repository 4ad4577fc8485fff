"""A run again, from its inputs alone: the transitions of production on NumPy arrays, without a model."""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jspec.scheduler import Planned, Settled, abort, plan_ranks, retire, settle_oldest, submit
from jspec.state.invariants import InvariantError, check
from jspec.state.requests import FinishReason, Waiting
from jspec.state.results import NEVER, GenerationBatchResult, Launched, RowStatus
from jspec.state.scheduler_state import SchedulerState
from jspec.trace.format import Header, Recording, TraceError, digest
from jspec.trace.recorder import planned_frame


class RankSettle(NamedTuple):
    """What a settle did on one rank."""

    launched: Launched
    result: GenerationBatchResult
    settled: Settled


class Moment(NamedTuple):
    """The states around one frame."""

    frame: list[Any]
    before: tuple[SchedulerState, ...]  # of each rank
    after: tuple[SchedulerState, ...]
    planned: tuple[Planned, ...] = ()  # of a "plan" frame
    settles: tuple[RankSettle, ...] = ()  # of a "settle" frame


@dataclasses.dataclass
class Divergence(Exception):
    """Where the replay first differs from the record."""

    iteration: int  # forward_iter of the newest launch
    rank: int
    field: str
    expected: Any  # by the record
    got: Any
    row: int | None = None

    def __str__(self) -> str:
        where = f"iteration {self.iteration}, rank {self.rank}" + (f", row {self.row}" if self.row is not None else "")
        return f"{where}: {self.field} is {self.got}, the record says {self.expected}"


def replay(recording: Recording, *, checked: bool = True) -> Iterator[Moment]:
    """Every state of a run.

    Args:
        recording: the trace.
        checked: whether every invariant is checked in every state.

    Raises:
        Divergence: the transitions answered other than they did then.
        InvariantError: a state is not sound.
        TraceError: a frame makes no sense where it stands.
    """
    header = recording.header
    states = (header.first_state(),) * header.num_ranks
    prompt_keys: dict[int, tuple[bytes, ...]] = {}
    for number, frame in enumerate(recording.frames):
        try:
            moment = _apply(header, states, frame, prompt_keys)
        except (Divergence, InvariantError, TraceError):
            raise
        except Exception as error:
            raise TraceError(
                f"frame {number} ({frame[0]!r}) cannot be applied: {type(error).__name__}: {error}; it is not of this run, or damaged"
            ) from error
        if checked and frame[0] != "device":
            _check(header, moment)
        states = moment.after
        yield moment


class Replayed(NamedTuple):
    """A replay that agreed with its record."""

    states: tuple[SchedulerState, ...]  # of each rank, at its end
    num_iterations: int
    num_states: int
    seconds: float
    run_seconds: float  # that the run took, up to there

    @property
    def speed(self) -> float:
        """How much faster than the run."""
        return self.run_seconds / max(self.seconds, 1e-9)


def replay_until(recording: Recording, until: int | None = None, *, checked: bool = True) -> Replayed:
    """Replays a run to its end, or up to the plan that follows iteration `until`.

    Raises: as `replay`, and
        TraceError: there is no such iteration.
    """
    header = recording.header
    if until is not None and until < 0:
        raise TraceError(f"until={until} must be at least 0: the state before anything ran")
    states, iterations, count, last_us = (header.first_state(),) * header.num_ranks, 0, 0, 0
    started = time.perf_counter()
    for moment in replay(recording, checked=checked):
        kind, when, *_ = moment.frame
        newest = max(int(state.forward_iter) for state in moment.after)
        if until is not None and newest > until:
            break
        states, iterations = moment.after, newest
        if kind != "device":
            count += 1
            last_us = max(last_us, when[-1] if isinstance(when, list) else when)
    if until is not None and until > iterations:
        raise TraceError(f"until={until} is no iteration of this trace: it has 1 to {iterations}")
    return Replayed(states, iterations, count, time.perf_counter() - started, last_us / 1e6)


def _apply(header: Header, states, frame: list[Any], prompt_keys: dict[int, tuple[bytes, ...]]) -> Moment:
    kind, *fields = frame
    if kind == "submit":
        _, rank, serial, _, _, _, prompt_len, max_new_tokens, priority, stops, keys = fields
        prompt_keys[serial] = tuple(keys)
        waiting = Waiting(
            serial, prompt_len, max_new_tokens, tuple(stops), priority=priority, page_keys=prompt_keys[serial]
        )
        return Moment(frame, states, _with(states, rank, submit(states[rank], waiting)))
    if kind == "abort":
        _, rank, serial = fields
        if serial not in prompt_keys:
            raise ValueError(f"request {serial} was not submitted")
        state, _ = abort(states[rank], serial)
        return Moment(frame, states, _with(states, rank, state))
    if kind == "plan":
        (_, _, _), _, ranks = fields
        planned = plan_ranks(states, limits=header.limits)
        after = tuple(state for state, _, _ in planned)
        for rank, (item, recorded) in enumerate(zip(planned, ranks, strict=True)):
            _compare_plan(int(item.state.forward_iter), rank, planned_frame(*item), recorded)
        return Moment(frame, states, after, planned=planned)
    if kind == "settle":
        (_, _, _), ranks = fields
        settles, after_settle = [], []
        for rank, (state, recorded) in enumerate(zip(states, ranks, strict=True)):
            result = _result(header, recorded)
            state, launched, settled = settle_oldest(state, result)
            keys = {
                row: (*prompt_keys.get(int(state.requests.serial[row]), ())[:count], *beyond)
                for row, _, count, beyond in recorded[5]
            }
            _compare_committed(rank, state, launched, settled, result)
            _compare_ends(int(launched.forward_iter), rank, launched, settled, recorded[5])
            if keys:
                state = retire(state, keys)
            if (found := digest(state)) != recorded[6]:
                raise Divergence(
                    int(launched.forward_iter),
                    rank,
                    "the digest of rows and clocks after its settle",
                    recorded[6],
                    found,
                )
            settles.append(RankSettle(launched, result, settled))
            after_settle.append(state)
        return Moment(frame, states, tuple(after_settle), settles=tuple(settles))
    if kind == "device":
        forward_iter, _, _ = fields
        if not 1 <= forward_iter <= int(states[0].forward_iter):
            raise ValueError(f"there was no launch {forward_iter}")
        return Moment(frame, states, states)
    raise ValueError("its kind is unknown")


def _with(states, rank: int, state: SchedulerState) -> tuple[SchedulerState, ...]:
    return (*states[:rank], state, *states[rank + 1 :])


def _result(header: Header, recorded: list[Any]) -> GenerationBatchResult:
    accept_lens, new_seq_lens, status, stop_at, tokens, *_ = recorded
    rows = len(accept_lens)
    if len(tokens) != sum(accept_lens) or max(accept_lens, default=0) > header.output_stride:
        raise ValueError(f"{len(tokens)} tokens do not fit accept_lens {accept_lens}")
    lens = np.array(accept_lens, np.int32)
    columns = np.arange(header.output_stride)
    next_token_ids = np.zeros((rows, header.output_stride), np.int32)
    next_token_ids[columns < lens[:, None]] = tokens
    return GenerationBatchResult(
        next_token_ids=next_token_ids,
        accept_lens=lens,
        new_seq_lens=np.array(new_seq_lens, np.int32),
        status=np.array(status, np.int32) if status else np.zeros(rows, np.int32),
        stop_at=np.array(stop_at, np.int32) if stop_at else np.full(rows, NEVER, np.int32),
    )


_PLAN_FIELDS = ("forward_mode", "rows of prompts", "running rows", "clocks", "pages granted", "requests that left")
_CLOCKS = ("output_len", "kv_committed_len", "kv_allocated_len", "cache_protected_len", "epoch")


def _compare_plan(iteration: int, rank: int, got: list[Any], recorded: list[Any]) -> None:
    for field, ours, theirs in zip(_PLAN_FIELDS, got, recorded, strict=True):
        if ours == theirs:
            continue
        if field == "clocks":
            rows = [*got[1], *got[2]]
            for row, of_row, of_record in zip(rows, ours, theirs, strict=False):
                for name, a, b in zip(_CLOCKS, of_row, of_record, strict=True):
                    if a != b:
                        raise Divergence(iteration, rank, name, b, a, row)
        if field == "pages granted":
            for row, of_row, of_record in zip([*got[1], *got[2]], ours, theirs, strict=True):
                if of_row != of_record:
                    raise Divergence(iteration, rank, field, of_record, of_row, row)
        raise Divergence(iteration, rank, field, theirs, ours)


def _compare_committed(
    rank: int, state: SchedulerState, launched: Launched, settled: Settled, result: GenerationBatchResult
) -> None:
    """Of a row whose launch commits when it settles, the committed length is then the frontier which that launch published."""
    commits = settled.live & launched.commits & (result.status == RowStatus.OK)
    differs = commits & (state.ledger.kv_committed_len[launched.rows] != result.new_seq_lens)
    for i in differs.nonzero()[0].tolist():
        row, published = int(launched.rows[i]), int(result.new_seq_lens[i])
        found = int(state.ledger.kv_committed_len[row])
        raise Divergence(int(launched.forward_iter), rank, "kv_committed_len", published, found, row)


def _compare_ends(iteration: int, rank: int, launched: Launched, settled: Settled, recorded) -> None:
    index = settled.finish_reason.nonzero()[0].tolist()
    got = [[int(launched.rows[i]), FinishReason(int(settled.finish_reason[i])).name] for i in index]
    expected = [[row, FinishReason(reason).name] for row, reason, *_ in recorded]
    if got != expected:
        raise Divergence(iteration, rank, "rows that ended", expected, got)


def _check(header: Header, moment: Moment) -> None:
    for rank, state in enumerate(moment.after):
        try:
            check(state, limits=header.limits, max_accept=header.output_stride)
        except InvariantError as error:
            where = f"iteration {int(state.forward_iter)}, rank {rank}, after a {moment.frame[0]!r}"
            raise InvariantError(f"{where}: {error}") from None
