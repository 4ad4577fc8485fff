"""One HTML page of a run, which needs no network: iterations on a time line, the clocks of each request, who holds the pages."""

import base64
import dataclasses
import hashlib
import importlib.resources
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jspec.trace.timeline import FIELDS, Gone, Timeline

TEMPLATE = "view.html"
KINDS = ("prompt", "chunk", "tail", "decode")
TIMES = ("begun", "planned", "dispatched", "waited", "ready", "settled", "published", "committed")
HOST_CLOCKS = ("output_len", "cache_protected_len", "kv_committed_len", "kv_allocated_len")
OUTCOMES = ("seq_lens", "accept_lens", "new_seq_lens", "visible")
"""Columns of a row of an iteration; the other `FIELDS` follow from these, the request and the tokens."""


class DeviceSpan(NamedTuple):
    """When the device worked for a launch, as far as the host saw it. Microseconds; None: not on record."""

    begun: int  # dispatched, and the launch before was done
    published: int | None
    committed: int | None  # None also where there is no second program


class Phase(NamedTuple):
    """What a request did for a while."""

    kind: str  # "waiting", "prefill", "decode", "retracted" (and waiting again)
    begin: int
    end: int


def write_page(timeline: Timeline, path: str | Path) -> None:
    """Writes the page of a run.

    Args:
        timeline: the run.
        path: is created, or written over.

    Raises:
        OSError: the file cannot be written.
    """
    page = importlib.resources.files(__package__).joinpath(TEMPLATE).read_text("utf-8")
    script = page.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = page.replace("SCRIPT-DIGEST", digest, 1).replace("PAGE-DATA", as_json(page_data(timeline)), 1)
    Path(path).write_text(page, "utf-8", newline="\n")


def as_json(data: Any) -> str:
    """Compact JSON in ASCII that an HTML page may hold: no text in it can end the element around it, or begin another."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page_data(timeline: Timeline) -> dict[str, Any]:
    """What the page draws: columns, not objects.

    A column of iterations holds, after its first number, the difference to the iteration before; one of lines, that to the line before of the same request.
    Such numbers are short. None is not on record.
    """
    iterations = timeline.iterations
    lines = [line for iteration in iterations for line in iteration.lines]
    lives = list(timeline.requests.values())
    index = {life.serial: i for i, life in enumerate(lives)}
    modes = list(dict.fromkeys(mode for iteration in iterations for mode in iteration.modes))
    reasons = list(dict.fromkeys(["", *(x.finish_reason for x in lines), *(x.finish_reason for x in lives)]))
    spans, phases = device_spans(timeline), request_phases(timeline)
    run, limits = facts(timeline)
    left = [
        *(iteration.left for iteration in iterations),
        timeline.left_last,
    ]  # the last ones at an iteration that never was
    of_request = [index[line.serial] for line in lines]

    def of_lines(name: str) -> list[int | None]:
        return _differences((getattr(line, name) for line in lines), of_request)

    def of_iterations(values: Iterable[int | None]) -> list[int | None]:
        return _differences(values, [0] * len(iterations))

    return {
        "header": dataclasses.asdict(timeline.header),
        "broken": timeline.broken,
        "num_pages": timeline.num_pages,
        "run": run,
        "limits": limits,
        "fields": [[name, *field] for name, field in FIELDS.items()],
        "kinds": KINDS,
        "modes": modes,
        "reasons": reasons,
        "end": run_end(timeline),
        "requests": {
            "rid": [life.rid for life in lives],
            "prompt": [life.prompt for life in lives],
            "finish_reason": [reasons.index(life.finish_reason) for life in lives],
            **{name: [getattr(life, name) for life in lives] for name in _LIFE},
            "phases": [[[kind, begin, end] for kind, begin, end in phases[life.serial]] for life in lives],
        },
        "iterations": {
            "forward_iter": of_iterations(it.forward_iter for it in iterations),
            "modes": [[modes.index(mode) for mode in it.modes] for it in iterations],
            "depth": of_iterations(it.depth for it in iterations),
            **{name: of_iterations(getattr(it, name) for it in iterations) for name in TIMES},
            "verify_begun": of_iterations(span.begun for span in spans),
            "verify_ended": of_iterations(span.published for span in spans),
            "commit_ended": of_iterations(span.committed for span in spans),
            "settled_in": of_iterations(it.settled_in for it in iterations),
            **{name: of_iterations(it.pages[i] for it in iterations) for i, name in enumerate(_PAGES)},
            "waiting": of_iterations(it.waiting for it in iterations),
            "rows": [len(it.lines) for it in iterations],
        },
        "left": [[i, gone.rank, index[gone.serial], gone.why] for i, some in enumerate(left) for gone in some],
        "lines": {
            "request": of_request,
            "row": of_lines("row"),
            "epoch": of_lines("epoch"),
            "kind": [KINDS.index(line.kind) for line in lines],
            **{name: of_lines(name) for name in (*HOST_CLOCKS, *OUTCOMES)},
        },
        "stale": [i for i, line in enumerate(lines) if not line.live],
        "finished": [[i, reasons.index(line.finish_reason)] for i, line in enumerate(lines) if line.finish_reason],
        "tokens": [token for line in lines for token in line.tokens],
    }


_LIFE = (
    "serial",
    "rank",
    "index",
    "prompt_len",
    "max_new_tokens",
    "priority",
    "submitted",
    "aborted",
    "ended",
    "retractions",
    "num_tokens",
)
_PAGES = ("free", "cached", "held")


def _differences(values: Iterable[int | None], keys: Sequence[int]) -> list[int | None]:
    """Of each number to the one before it with the same key."""
    found: list[int | None] = []
    last: dict[int, int] = {}
    for value, key in zip(values, keys, strict=True):
        found.append(None if value is None else value - last.get(key, 0))
        if value is not None:
            last[key] = value
    return found


def run_end(timeline: Timeline) -> int:
    """The last time on record, in microseconds."""
    times = [getattr(iteration, name) for iteration in timeline.iterations for name in TIMES]
    for life in timeline.requests.values():
        times += [life.submitted, life.aborted, life.ended]
    times += [gone.when for gone in timeline.left_last]
    return max((time for time in times if time is not None), default=0)


def device_spans(timeline: Timeline) -> list[DeviceSpan]:
    """Of each iteration. The device runs one program at a time, in the order of their dispatch.

    The thread that sees programs end may be late: a result that the host had read was there by then.
    """
    iterations, published = timeline.iterations, []
    for it in timeline.iterations:
        seen = [time for time in (it.published, it.ready) if time is not None]
        published.append(min(seen) if seen else None)
    spans: list[DeviceSpan] = []
    free_at = 0
    for i, it in enumerate(iterations):
        end = published[i]
        begun = max(it.dispatched, free_at)
        end = None if end is None else max(begun, end)
        committed = it.committed
        if committed is not None and end is not None:
            following = published[i + 1] if i + 1 < len(iterations) else None
            committed = max(end, committed if following is None else min(committed, following))
        spans.append(DeviceSpan(begun, end, committed))
        free_at = max(begun, end or 0, committed or 0)
    return spans


def request_phases(timeline: Timeline) -> dict[int, list[Phase]]:
    """By serial: what each request did from its submission to its end. A phase begins with the plan that begins it."""
    changes = {life.serial: [("waiting", life.submitted)] for life in timeline.requests.values()}

    def change(serial: int, kind: str, when: int) -> None:
        if changes[serial][-1][0] != kind:
            changes[serial].append((kind, when))

    def retract(left: list[Gone]) -> None:
        for gone in left:
            if gone.why == "retracted":
                change(gone.serial, "retracted", gone.when)

    for it in timeline.iterations:
        retract(it.left)
        for line in it.lines:
            change(line.serial, "prefill" if line.kind in ("prompt", "chunk") else "decode", it.planned)
    retract(timeline.left_last)
    last, found = run_end(timeline), {}
    for life in timeline.requests.values():
        end = last if life.ended is None else life.ended
        begins = [*changes[life.serial], ("", end)]
        pairs = itertools.pairwise(begins)
        phases = [Phase(kind, begin, min(until, end)) for (kind, begin), (_, until) in pairs]
        found[life.serial] = [phase for phase in phases if phase.begin < phase.end]
    return found


Fact = tuple[str, str, str]
"""A name, its value, and what it means."""


def facts(timeline: Timeline) -> tuple[list[Fact], list[Fact]]:
    """What came of the run, and what it was run with."""
    header, limits, lives = timeline.header, timeline.header.limits, timeline.requests.values()
    lines = [line for iteration in timeline.iterations for line in iteration.lines]
    verifies = [line.accept_lens for line in lines if line.kind == "decode" and line.live and line.accept_lens]
    tokens, retractions = sum(life.num_tokens for life in lives), sum(life.retractions for life in lives)
    ended = sum(life.ended is not None for life in lives)
    seconds = (run_end(timeline) - min((life.submitted for life in lives), default=0)) / 1e6
    run = [
        ("duration", _seconds(seconds), "from the first submission to the last thing on record"),
        ("iterations", f"{len(timeline.iterations):,}", "launches; each ran one batch on every rank"),
        ("requests", f"{len(lives):,}" + ("" if ended == len(lives) else f", {ended:,} ended"), "submitted"),
        ("tokens", f"{tokens:,}", "emitted and settled, that users saw"),
        ("tokens/s", f"{tokens / seconds:,.0f}" if seconds > 0 else "-", "tokens by duration"),
        (
            "accept length",
            f"{sum(verifies) / len(verifies):.2f}" if verifies else "-",
            f"tokens a verify, bonus included; at most {header.output_stride}",
        ),
        ("retractions", f"{retractions:,}", "times that a running request lost its row and waited again"),
        (
            "stale results",
            f"{sum(not line.live for line in lines):,}",
            "outcomes of rows whose request had ended or been retracted: they changed nothing",
        ),
    ]
    ranks = "" if header.num_ranks == 1 else " a rank"
    what = [
        ("ranks", str(header.num_ranks), "data-parallel schedulers, each with a KV pool"),
        ("max_running", f"{header.max_running}{ranks}", "rows"),
        (
            "KV pool",
            f"{header.num_pages:,} pages of {header.page_size}{ranks}",
            f"{header.num_pages * header.page_size:,} tokens{ranks}",
        ),
        ("context_len", f"{limits.context_len:,}", "tokens of prompt and output"),
        ("verify_width", str(header.verify_width), "tokens that a verify checks in a row"),
        ("output_stride", str(header.output_stride), "most tokens that a step emits in a row"),
        ("alloc_len", str(limits.alloc_len), "1 + the highest offset past the frontier that a step writes"),
        ("reserve", str(limits.reserve_len), "tokens allocated past what is committed: (depth + 1) * alloc_len"),
        (
            "depth",
            str(limits.depth),
            "launches that may be unsettled when the next is planned: 1 is overlap, 0 is none",
        ),
        ("max_prefill_tokens", f"{limits.max_prefill_tokens:,}", "prompt tokens of one launch"),
        ("mixed", "yes" if limits.mixed else "no", "running requests ride in launches that prefill"),
        ("policy", limits.policy, "who is admitted first"),
        ("carry", header.carry, "type of what a worker hands on to the next launch, on the device"),
    ]
    return run, what


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
