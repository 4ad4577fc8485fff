"""A run in the Trace Event Format (JSON), which https://ui.perfetto.dev opens: host and device side by side, requests, pages.

Source: the format's description, and what Perfetto's trace processor makes of it: a flow binds to the slice that was begun last on its thread; async slices
of one category and id lie in each other; slices of a thread do not overlap.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jspec.trace.timeline import Iteration, Timeline
from jspec.trace.view import device_spans, request_phases, run_end

HOST, DEVICE, REQUESTS = 1, 2, 3
"""Processes, in the order in which they are shown."""

TRACKS = {
    "plan": (HOST, 11),
    "launch": (HOST, 12),
    "wait": (HOST, 13),
    "settle": (HOST, 14),
    "verify": (DEVICE, 15),
    "commit": (DEVICE, 16),
    "requests": (REQUESTS, 17),
}
"""Threads, which share one space of ids."""

Event = dict[str, Any]


def write_perfetto(timeline: Timeline, path: str | Path) -> None:
    """Writes a run for Perfetto.

    Args:
        timeline: the run.
        path: is created, or written over.

    Raises:
        OSError: the file cannot be written.
    """
    header = timeline.header
    about = {
        "model": _plain(header.model),
        "algorithm": _plain(header.algorithm),
        "ranks": header.num_ranks,
        "started_at": header.started_at,
        "whole": timeline.broken is None,
    }
    parts = ",\n".join(map(_json, trace_events(timeline)))
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.write(f'{{"displayTimeUnit":"ms","otherData":{_json(about)},"traceEvents":[\n{parts}\n]}}\n')


def _json(value: Any) -> str:
    """Without escapes: Perfetto refuses a whole file for one of a surrogate pair, and shows others as they are written."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _plain(text: str) -> str:
    """A name that needs no escape but that of a quote. Perfetto takes a backslash before the closing quote for one that escapes it."""
    shown = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return f"{shown} " if shown.endswith("\\") else shown


def trace_events(timeline: Timeline) -> list[Event]:
    """All events: first those that name the tracks, then the others in the order of their times."""
    timed = [*_slices(timeline), *_requests(timeline), *_counters(timeline)]
    timed.sort(key=lambda item: (item[1]["ts"], item[0]))
    return [*_names(), *(event for _, event in timed)]


END, END_OUTER, BEGIN_OUTER, BEGIN, OTHER = range(5)
"""The order of what happens at the same time: a slice ends before the next begins, and lies within the one around it."""

Ordered = tuple[int, Event]


def _names() -> Iterator[Event]:
    for pid, name in ((HOST, "host"), (DEVICE, "device"), (REQUESTS, "requests and pages")):
        yield _meta("process_name", pid, pid, name=name)
        yield _meta("process_sort_index", pid, pid, sort_index=pid)
    for name, (pid, tid) in TRACKS.items():
        yield _meta("thread_name", pid, tid, name=name)
        yield _meta("thread_sort_index", pid, tid, sort_index=tid)


def _meta(name: str, pid: int, tid: int, /, **args: Any) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _event(phase: str, name: str, track: str, when: int, **fields: Any) -> Event:
    pid, tid = TRACKS[track]
    return {"ph": phase, "name": name, "pid": pid, "tid": tid, "ts": when, **fields}


def _slices(timeline: Timeline) -> Iterator[Ordered]:
    """What host and device did for each iteration; arrows lead from its launch over the device to its settle."""
    for it, span in zip(timeline.iterations, device_spans(timeline), strict=True):
        yield _slice(it, "plan", it.begun, it.planned, rows=len(it.lines), waiting=it.waiting)
        yield _slice(it, "launch", it.planned, it.dispatched)
        yield _arrow(it, "s", "launch", it.planned)
        if span.published is not None:
            queued = span.begun - it.dispatched
            yield _slice(it, "verify", span.begun, span.published, queued_us=queued, clocks=_clocks(it))
            yield _arrow(it, "t", "verify", span.begun)
            if span.committed is not None:
                yield _slice(it, "commit", span.published, span.committed)
        if it.waited is not None and it.ready is not None and it.settled is not None:
            yield _slice(it, "wait", it.waited, it.ready)
            yield _slice(it, "settle", it.ready, it.settled, settled_in=it.settled_in)
            yield _arrow(it, "f", "settle", it.ready, bp="e")


def _slice(it: Iteration, track: str, begin: int, end: int, **args: Any) -> Ordered:
    name = f"{it.forward_iter} {'+'.join(dict.fromkeys(it.modes)).upper()}"
    args = {"forward_iter": it.forward_iter, **args}
    return OTHER, _event("X", name, track, begin, dur=end - begin, cat=track, args=args)


def _arrow(it: Iteration, phase: str, track: str, when: int, **fields: Any) -> Ordered:
    return OTHER, _event(phase, "iteration", track, when, cat="iteration", id=it.forward_iter, **fields)


def _clocks(it: Iteration) -> dict[str, str]:
    """By request: where the launch found it, and where it left it."""
    return {
        f"{_plain(line.rid)} ({line.serial})": f"{line.kind}: seq_lens {line.seq_lens}, accept_lens {line.accept_lens}, new_seq_lens {line.new_seq_lens}"
        for line in it.lines
    }


def _requests(timeline: Timeline) -> Iterator[Ordered]:
    """Of each request a slice from its submission to its end, and in it what it did."""
    last, phases = run_end(timeline), request_phases(timeline)
    for life in timeline.requests.values():
        end = max(last if life.ended is None else life.ended, life.submitted + 1)
        name = _plain(life.rid)
        args = {
            "rid": name,
            "rank": life.rank,
            "prompt_len": life.prompt_len,
            "max_new_tokens": life.max_new_tokens,
            "num_tokens": life.num_tokens,
            "retractions": life.retractions,
            "finish_reason": life.finish_reason or "not on record",
        }
        # Of this process alone, and nested where category and id are the same.
        of_request: dict[str, Any] = {"cat": "request", "id2": {"local": hex(life.serial)}}
        yield BEGIN_OUTER, _event("b", name, "requests", life.submitted, **of_request, args=args)
        for phase in phases[life.serial]:
            yield BEGIN, _event("b", phase.kind, "requests", phase.begin, **of_request)
            yield END, _event("e", phase.kind, "requests", phase.end, **of_request)
        yield END_OUTER, _event("e", name, "requests", end, **of_request)


def _counters(timeline: Timeline) -> Iterator[Ordered]:
    for it in timeline.iterations:
        free, cached, held = it.pages
        yield OTHER, _event("C", "pages", "requests", it.planned, args={"held": held, "cached": cached, "free": free})
        yield OTHER, _event("C", "queue", "requests", it.planned, args={"waiting": it.waiting})
        if it.settled is not None:
            accepted = sum(line.accept_lens or 0 for line in it.lines if line.live)
            yield OTHER, _event("C", "accepted", "requests", it.settled, args={"tokens": accepted})
