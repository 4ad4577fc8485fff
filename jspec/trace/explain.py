"""Why a number is what it is: the four questions one asks of a length that is "off by one", answered for one field of one request in one iteration."""

from collections.abc import Sequence

from jspec.trace.format import TraceError
from jspec.trace.timeline import FIELDS, Iteration, Line, RequestLife, Timeline

_KINDS = {
    "prompt": "the rest of its prompt is prefilled, and the first token sampled",
    "chunk": "a chunk of its prompt is prefilled; more is to come, so nothing is emitted",
    "tail": "it rides in a prefill by its one pending token, from a frontier that is read inside the launch",
    "decode": "a verify of the pending token and the drafts behind it",
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
    said = str(value)
    if value is None:
        settled = iteration.settled is not None
        said = "none" if settled else "not on record: the trace ends before its outcome was settled"
    answers = [
        f"{field} = {said}: {about.text}.",
        f"Which clock: {about.time}" + _CLOCKS[about.time],
        f"Which owner: {about.owner}; nothing else writes it.",
        f"Which boundary: {about.boundary}.",
        f"Which mode: {iteration.modes[line.rank].upper()}: {_KINDS[line.kind]}.",
    ]
    if value is not None:
        answers += [f"Why {reason}" for reason in _REASONS.get(field, _nothing)(timeline, line, iteration)]
    if about.time == "future" and iteration.settled is not None and not line.live:
        answers.append(
            "Stale: it changed nothing. When it was settled the row's epoch had moved on: the request had ended, or been retracted."
        )
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
        some = ", ".join(dict.fromkeys(repr(life.rid) for life in timeline.requests.values()))
        raise TraceError(f"rid={rid!r} is not in this trace: it holds {_some(some) or 'no request'}")
    return lives


def _some(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:197]}..."


def _same(line: Line, other: Line) -> bool:
    """Whether two lines are of one stay of a request on a row."""
    return (line.rank, line.serial, line.row, line.epoch) == (other.rank, other.serial, other.row, other.epoch)


def _moves(line: Line) -> bool:
    """Whether the host learns only when it settles the launch how far the request moved on."""
    return line.kind in ("decode", "tail")


def _unsettled(timeline: Timeline, line: Line, iteration: Iteration) -> list[tuple[Iteration, Line]]:
    """Launches before this one whose tokens the host did not know when it planned this one."""
    found = []
    for other in timeline.iterations:
        if other.forward_iter >= iteration.forward_iter:
            break
        if other.settled_in is not None and other.settled_in < iteration.forward_iter:
            continue
        found += [(other, its) for its in other.lines if _same(its, line) and _moves(its)]
    return found


def _before(timeline: Timeline, line: Line, iteration: Iteration) -> tuple[Iteration, Line] | None:
    """The newest line before, of the same stay on the row."""
    earlier = [it for it in timeline.iterations if it.forward_iter < iteration.forward_iter]
    for other in reversed(earlier):
        for its in other.lines:
            if _same(its, line):
                return other, its
    return None


def _settled_since(timeline: Timeline, line: Line, iteration: Iteration, before: int) -> list[tuple[Iteration, Line]]:
    """Launches of the request that were settled after iteration `before` was planned, and before this one was."""
    return [
        (other, its)
        for other in timeline.iterations
        if other.settled_in is not None and before <= other.settled_in < iteration.forward_iter
        for its in other.lines
        if _same(its, line) and _moves(its)
    ]


def _nothing(timeline, line, iteration) -> Sequence[str]:
    return ()


def _against(difference: int, other: str) -> str:
    """ "3 more than seq_lens"."""
    if difference == 0:
        return f"equal to {other}"
    return f"{abs(difference)} {'more' if difference > 0 else 'less'} than {other}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _output_len(timeline: Timeline, line: Line, iteration: Iteration) -> Sequence[str]:
    has_news = line.seqlen == line.kv_committed_len + 1
    if has_news and _moves(line):
        return [
            f"{line.output_len}: every token of the launches that were settled, after a prompt of {line.prompt_len}. "
            f"The last one is pending: {line.kv_committed_len} tokens have KV, of {line.seqlen}."
        ]
    first = "its prefill is not settled yet" if _moves(line) else "its prefill begins or goes on here"
    if line.output_len:
        return [
            f"{line.output_len}: emitted before it lost its row; they are prefilled with its prompt of {line.prompt_len}, and {first}."
        ]
    return [f"0: {first}, so the host knows of no token."]


def _seqlen(timeline: Timeline, line: Line, iteration: Iteration) -> Sequence[str]:
    if not _moves(line):
        return [
            f"{_against(line.seqlen - line.kv_committed_len, 'kv_committed_len')}: a prefill covers prompt and output, {line.seqlen} tokens, "
            f"and {line.kv_committed_len} are written once this launch is done."
        ]
    difference = _against(line.seqlen - line.kv_committed_len, "kv_committed_len")
    if line.seqlen == line.kv_committed_len:
        return [
            f"{difference}: its prefill is not settled yet, so the host knows of no new token, while the prompt counts as committed since it was planned."
        ]
    return [f"{difference}: the last token is pending, its KV comes with the next launch that is settled."]


def _committed(timeline: Timeline, line: Line, iteration: Iteration) -> Sequence[str]:
    if not _moves(line):
        new = line.kv_committed_len - (line.seq_lens or 0)
        return [
            f"{line.kv_committed_len}: how many tokens a prefill writes is known when it is planned, {new} in this launch, so they count at once."
        ]
    reasons = []
    before = _before(timeline, line, iteration)
    if before is not None:
        since = _settled_since(timeline, line, iteration, before[0].forward_iter)
        parts = [f"iteration {other.forward_iter} ({its.kind}, accept_lens {its.accept_lens})" for other, its in since]
        by = f"settled since: {' and '.join(parts)}" if parts else "no step of it was settled since"
        grew = line.kv_committed_len - before[1].kv_committed_len
        than = f"in iteration {before[0].forward_iter}"
        reasons.append(f"{f'{grew} more than' if grew else 'as much as'} {than}: {by}.")
    if line.seq_lens is not None:
        lag = line.kv_committed_len - line.seq_lens
        reasons.append(f"{_against(lag, 'seq_lens')}: {_flying(timeline, line, iteration)}.")
    return reasons


def _flying(timeline: Timeline, line: Line, iteration: Iteration) -> str:
    """What lies between what is committed and where the launch starts."""
    flying = _unsettled(timeline, line, iteration)
    if not flying:
        return "no step of it was unsettled, so the host knew the frontier"
    parts = " and ".join(f"iteration {other.forward_iter} accepted {its.accept_lens}" for other, its in flying)
    return f"not settled when this was planned: {parts}; one launch may bring many tokens"


def _allocated(timeline: Timeline, line: Line, iteration: Iteration) -> Sequence[str]:
    limits, page = timeline.header.limits, timeline.header.page_size
    ahead = _against(line.kv_allocated_len - line.kv_committed_len, "kv_committed_len")
    if not _moves(line):
        return [f"{ahead}: a prefill allocates what it writes, and no reserve."]
    return [
        f"{ahead}: the reserve is {limits.reserve_len} = ({limits.depth} unsettled + 1) windows of {limits.alloc_len}, "
        f"rounded up to pages of {page}, and what is allocated never shrinks."
    ]


def _protected(timeline: Timeline, line: Line, iteration: Iteration) -> Sequence[str]:
    difference = _against(line.cache_protected_len - line.kv_committed_len, "kv_committed_len")
    return [
        f"{difference}: while a request runs, the cache owns only whole pages (of {timeline.header.page_size}) of its prompt: those found there, and those "
        "whose launch is settled."
    ]


def _seq_lens(timeline: Timeline, line: Line, iteration: Iteration) -> Sequence[str]:
    if not _moves(line):
        return [
            f"{line.seq_lens}: known to the host: a prefill starts where the cached prefix, or the chunk before, ends."
        ]
    before = _before(timeline, line, iteration)
    came = (
        f"what iteration {before[0].forward_iter} published (new_seq_lens {before[1].new_seq_lens})"
        if before is not None
        else "what its prefill published"
    )
    lead = (line.seq_lens or 0) - line.kv_committed_len
    return [
        f"{line.seq_lens}: {came}.",
        f"{_against(lead, 'kv_committed_len')}: {_flying(timeline, line, iteration)}.",
    ]


def _new_seq_lens(timeline: Timeline, line: Line, iteration: Iteration) -> Sequence[str]:
    if line.kind == "chunk":
        return [f"{line.new_seq_lens}: the end of the chunk; nothing is sampled, so nothing is pending."]
    if line.kind == "prompt":
        return [
            f"{line.new_seq_lens}: the end of what was prefilled, with no +1: the sampled token is pending, its KV is not there."
        ]
    if line.kind == "tail":
        return [
            f"seq_lens {line.seq_lens} + 1: a tail writes the KV of its one pending token. This is the only +1 there is."
        ]
    return [
        f"seq_lens {line.seq_lens} + accept_lens {line.accept_lens}: the pending token and the drafts accepted; the new bonus token is pending."
    ]


def _accept(timeline: Timeline, line: Line, iteration: Iteration) -> Sequence[str]:
    accepted = line.accept_lens or 0
    if line.kind == "decode" and accepted:
        were = "was" if accepted == 2 else "were"
        reasons = [
            f"{accepted} of at most {timeline.header.output_stride}: {_count(accepted - 1, 'draft')} {were} right, and one token is the target's own; "
            f"the verify is {_count(timeline.header.verify_width, 'token')} wide."
        ]
    elif accepted:
        reasons = [f"{accepted}: a {'tail drafts nothing' if line.kind == 'tail' else 'prefill samples one token'}."]
    else:
        reasons = [
            "0: in the middle of a prompt nothing is sampled." if line.kind == "chunk" else "0: the step failed."
        ]
    if line.live and line.visible < accepted:
        reasons.append(
            f"{accepted - line.visible} more than the user sees: the request ended inside the run ({line.finish_reason})."
        )
    return reasons


def _bonus(timeline: Timeline, line: Line, iteration: Iteration) -> Sequence[str]:
    if not line.live:
        return [f"{line.bonus}: the last token of its run."]
    if line.live and line.finish_reason:
        return [
            f"{line.bonus}: the last token of its run. The request ended ({line.finish_reason}), so nobody needs its KV."
        ]
    return [f"{line.bonus}: the last token of its run, and the first that the next launch writes and verifies."]


_REASONS = {
    "seqlen": _seqlen,
    "output_len": _output_len,
    "kv_committed_len": _committed,
    "kv_allocated_len": _allocated,
    "cache_protected_len": _protected,
    "seq_lens": _seq_lens,
    "new_seq_lens": _new_seq_lens,
    "accept_lens": _accept,
    "bonus": _bonus,
}
