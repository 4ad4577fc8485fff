"""Why a number is what it is: the four questions one asks of a length that is "off by one", answered for one field of one request in one iteration."""

from collections.abc import Sequence

from jspec.trace.format import TraceError
from jspec.trace.timeline import FIELDS, Iteration, Line, RequestLife, Timeline

_MODES = {
    "prompt": "EXTEND: the rest of its prompt is prefilled, and the first token sampled",
    "chunk": "EXTEND: a chunk of its prompt is prefilled; more is to come, so nothing is emitted",
    "tail": "MIXED: it rides in a prefill by its one pending token, from a frontier that is read inside the launch",
    "decode": "DECODE: a verify of the pending token and the drafts behind it",
}


def explain(timeline: Timeline, line: Line, iteration: Iteration, field: str) -> list[str]:
    """The answers, a sentence or two each.

    Args:
        timeline: the run.
        line: the request's line of the iteration.
        iteration: it.
        field: one of `FIELDS`.

    Raises:
        TraceError: there is no such field.
    """
    if field not in FIELDS:
        raise TraceError(f"field={field!r} is unknown: choose one of {', '.join(FIELDS)}")
    about, value = FIELDS[field], getattr(line, field)
    said = "not on record: the trace ends before its outcome was settled" if value is None else str(value)
    answers = [
        f"{field} = {said}: {about.text}.",
        f"Which clock: {about.time}" + _CLOCKS[about.time],
        f"Which owner: {about.owner}; nothing else writes it.",
        f"Which boundary: {about.boundary}.",
        f"Which mode: {_MODES[line.kind]}.",
    ]
    if value is not None:
        answers += [f"Why {reason}" for reason in _REASONS.get(field, _nothing)(timeline, line, iteration)]
    return answers


_CLOCKS = {
    "host-settled": ": what the host knew when it planned this launch; it lags behind the device by the launches that were not settled yet.",
    "launched": ": a fact of this launch alone, read on the device when it began.",
    "future": ": decided on the device by this launch; the next launch reads it there, the host only when it settles this one.",
}


def line_of(timeline: Timeline, rid: str, forward_iter: int, *, index: int | None = None) -> tuple[Iteration, Line]:
    """The line of a request in an iteration.

    Raises:
        TraceError: the request, or the iteration, is not on record, or the request did not run in it.
    """
    serials = {life.serial for life in lives_of(timeline, rid) if index is None or life.index == index}
    found = [it for it in timeline.iterations if it.forward_iter == forward_iter]
    if not found:
        last = timeline.iterations[-1].forward_iter if timeline.iterations else 0
        raise TraceError(f"iteration {forward_iter} is not in this trace: it holds 1 to {last}")
    for line in found[0].lines:
        if line.serial in serials:
            return found[0], line
    ran = [it.forward_iter for it in timeline.iterations if any(line.serial in serials for line in it.lines)]
    where = f"it ran in {ran[0]} to {ran[-1]}" if ran else "it never ran"
    raise TraceError(f"rid={rid!r} did not run in iteration {forward_iter}: {where}")


def lives_of(timeline: Timeline, rid: str) -> list[RequestLife]:
    """The requests of that name.

    Raises:
        TraceError: there is none.
    """
    lives = timeline.of_rid(rid)
    if not lives:
        some = ", ".join(dict.fromkeys(life.rid for life in timeline.requests.values()))
        raise TraceError(f"rid={rid!r} is not in this trace: it holds {_some(some) or 'no request'}")
    return lives


def _some(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:197]}..."


def _unsettled(timeline: Timeline, line: Line, iteration: Iteration) -> list[tuple[Iteration, Line]]:
    """Launches of this row's request before this one whose outcome the host did not know when it planned this one."""
    found = []
    for other in timeline.iterations:
        if other.forward_iter >= iteration.forward_iter:
            break
        if other.settled_in is not None and other.settled_in < iteration.forward_iter:
            continue
        found += [(other, its) for its in other.lines if its.serial == line.serial and its.epoch == line.epoch]
    return found


def _before(timeline: Timeline, line: Line, iteration: Iteration) -> tuple[Iteration, Line] | None:
    """The request's line in the iteration before that it ran in, on the same row."""
    earlier = [it for it in timeline.iterations if it.forward_iter < iteration.forward_iter]
    for other in reversed(earlier):
        for its in other.lines:
            if its.serial == line.serial:
                return (other, its) if its.epoch == line.epoch and its.row == line.row else None
    return None


def _settled_since(timeline: Timeline, line: Line, iteration: Iteration) -> list[tuple[Iteration, Line]]:
    """Launches of the request that were settled between its line before and this one."""
    before = _before(timeline, line, iteration)
    if before is None:
        return []
    return [
        (other, its)
        for other in timeline.iterations
        if other.settled_in is not None and before[0].forward_iter <= other.settled_in < iteration.forward_iter
        for its in other.lines
        if its.serial == line.serial and its.epoch == line.epoch
    ]


def _nothing(timeline, line, iteration) -> Sequence[str]:
    return ()


def _seqlen(timeline: Timeline, line: Line, iteration: Iteration) -> Sequence[str]:
    if line.kind in ("prompt", "chunk"):
        return [
            f"equal to what is to be prefilled: no token has been settled since; kv_committed_len is {line.kv_committed_len}."
        ]
    gap = line.seqlen - line.kv_committed_len
    if gap == 1:
        return [
            "one more than kv_committed_len: the last token is pending, its KV is written by the next step that is settled."
        ]
    return [
        f"{gap} from kv_committed_len: its prefill is not settled yet, so the host knows of no token, while the prompt counts as committed since its plan."
    ]


def _committed(timeline: Timeline, line: Line, iteration: Iteration) -> Sequence[str]:
    reasons = []
    if line.kind in ("prompt", "chunk"):
        start = line.seq_lens or 0
        reasons.append(
            f"{line.kv_committed_len}: of prompt tokens the number is known when they are planned, {line.kv_committed_len - start} in this launch, so it counts at once."
        )
        return reasons
    before = _before(timeline, line, iteration)
    since = _settled_since(timeline, line, iteration)
    if before is not None:
        grew = line.kv_committed_len - before[1].kv_committed_len
        parts = [
            f"iteration {other.forward_iter} ({its.kind}, accept_lens {its.accept_lens})"
            for other, its in since
            if its.kind in ("decode", "tail")
        ]
        by = f"settled since: {' and '.join(parts)}" if parts else "nothing of it was settled since"
        reasons.append(f"{grew} more than in iteration {before[0].forward_iter}: {by}.")
    reasons += _ahead(timeline, line, iteration)
    return reasons


def _ahead(timeline: Timeline, line: Line, iteration: Iteration) -> list[str]:
    """Between what is committed and where the launch starts."""
    if line.seq_lens is None or line.kind in ("prompt", "chunk"):
        return []
    lag = line.seq_lens - line.kv_committed_len
    flying = [(other, its) for other, its in _unsettled(timeline, line, iteration) if its.kind in ("decode", "tail")]
    if not flying:
        return [f"{'equal to' if lag == 0 else f'{lag} less than'} seq_lens: nothing of the request was unsettled."]
    parts = " and ".join(f"iteration {other.forward_iter} accepted {its.accept_lens}" for other, its in flying)
    return [f"{lag} less than seq_lens: not settled when this was planned: {parts}; one launch may bring many tokens."]


def _allocated(timeline: Timeline, line: Line, iteration: Iteration) -> Sequence[str]:
    limits, page = timeline.header.limits, timeline.header.page_size
    ahead = line.kv_allocated_len - line.kv_committed_len
    if line.kind in ("prompt", "chunk"):
        return [f"{ahead} more than kv_committed_len: a prefill allocates what it writes, and no reserve."]
    return [
        f"{ahead} more than kv_committed_len: the reserve is {limits.reserve_len} = ({limits.depth} unsettled + 1) windows of {limits.alloc_len}, "
        f"rounded up to pages of {page}, and it never shrinks.",
    ]


def _protected(timeline: Timeline, line: Line, iteration: Iteration) -> Sequence[str]:
    page = timeline.header.page_size
    return [
        f"{line.kv_committed_len - line.cache_protected_len} less than kv_committed_len: only whole pages of {page} are shared, and only once their launch is settled."
    ]


def _seq_lens(timeline: Timeline, line: Line, iteration: Iteration) -> Sequence[str]:
    if line.kind in ("prompt", "chunk"):
        return ["known to the host: a prefill starts where the cached prefix, or the chunk before, ends."]
    before = _before(timeline, line, iteration)
    came = (
        f"what iteration {before[0].forward_iter} published (new_seq_lens {before[1].new_seq_lens})"
        if before is not None
        else "what its prefill published"
    )
    return [f"{line.seq_lens}: {came}; the host did not know it when it planned.", *_ahead(timeline, line, iteration)]


def _new_seq_lens(timeline: Timeline, line: Line, iteration: Iteration) -> Sequence[str]:
    if line.kind in ("prompt", "chunk"):
        return ["the end of what was prefilled, with no +1: the sampled token is pending, its KV is not there."]
    if line.kind == "tail":
        return [
            f"seq_lens {line.seq_lens} + 1: a tail writes the KV of its one pending token. This is the only +1 there is."
        ]
    return [
        f"seq_lens {line.seq_lens} + accept_lens {line.accept_lens}: the pending token and the drafts accepted; the new bonus token is pending."
    ]


def _accept(timeline: Timeline, line: Line, iteration: Iteration) -> Sequence[str]:
    reasons = []
    if line.kind == "decode" and line.accept_lens is not None:
        width = timeline.header.verify_width
        reasons.append(
            f"{line.accept_lens} of at most {timeline.header.output_stride}: {line.accept_lens - 1} drafts were right, and one token is the target's own; the verify checks {width}."
        )
    if line.kind == "chunk":
        reasons.append("0: in the middle of a prompt nothing is sampled.")
    if not line.live:
        reasons.append(
            "it changed nothing: when it was settled the row's epoch had moved on, the request had ended or been retracted."
        )
    elif line.accept_lens is not None and line.visible < line.accept_lens:
        reasons.append(
            f"{line.accept_lens - line.visible} more than the user sees: the request ended inside the run ({line.finish_reason})."
        )
    return reasons


def _bonus(timeline: Timeline, line: Line, iteration: Iteration) -> Sequence[str]:
    return ["the last of its run: emitted, and the first token that the next launch writes and verifies."]


_REASONS = {
    "seqlen": _seqlen,
    "output_len": _seqlen,
    "kv_committed_len": _committed,
    "kv_allocated_len": _allocated,
    "cache_protected_len": _protected,
    "seq_lens": _seq_lens,
    "new_seq_lens": _new_seq_lens,
    "accept_lens": _accept,
    "bonus": _bonus,
}
