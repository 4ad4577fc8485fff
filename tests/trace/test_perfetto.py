"""A run in the Trace Event Format: each event has the fields of its phase, slices of a track follow each other, begins and ends match."""

import dataclasses
import json
import re
from collections import defaultdict

import pytest

from jspec.trace.perfetto import trace_events, write_perfetto

from .view_browser import NASTY, cut_run, recording, run, two_ranks

RUNS = [run, two_ranks, lambda: cut_run(len(recording()) // 2)]
FIELDS = {
    "M": {"args"},
    "X": {"dur", "cat", "args"},
    "s": {"cat", "id"},
    "t": {"cat", "id"},
    "f": {"cat", "id", "bp"},
    "b": {"cat", "id2"},
    "e": {"cat", "id2"},
    "C": {"args"},
}
"""By phase, what an event must have besides `ph`, `name`, `pid`, `tid` and `ts`."""


@pytest.fixture(params=RUNS, ids=["run", "ranks", "cut"])
def found(request):
    return request.param()


def test_the_file_is_json(found, tmp_path):
    path = tmp_path / "run.json"
    write_perfetto(found, path)
    data = json.loads(path.read_text("utf-8"))
    assert data["traceEvents"] == json.loads(json.dumps(trace_events(found)))
    assert data["displayTimeUnit"] == "ms" and data["otherData"]["whole"] is (found.broken is None)


def test_each_event_has_the_fields_of_its_phase(found):
    for event in trace_events(found):
        optional = {"args"} if event["ph"] == "b" else set()
        got = set(event) - {"ph", "name", "pid", "tid", "ts"}
        assert FIELDS[event["ph"]] <= got <= FIELDS[event["ph"]] | optional, event
        assert all(isinstance(event[name], int) for name in ("pid", "tid", "ts")) and isinstance(event["name"], str)
        assert event["ts"] >= 0 and event.get("dur", 0) >= 0
        if event["ph"] == "C":
            assert event["args"] and all(isinstance(value, int) for value in event["args"].values())


def test_times_never_fall_and_tracks_have_names(found):
    events = trace_events(found)
    times = [event["ts"] for event in events]
    assert times == sorted(times)
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len({tid for _, tid in named}) == len(named), "threads share one space of ids"
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] != "M"} <= set(named)
    assert {e["pid"] for e in events if e["name"] == "process_name"} == {pid for pid, _ in named}
    assert set(named.values()) == {"plan", "launch", "wait", "settle", "verify", "commit", "requests"}


@pytest.mark.parametrize(
    ("rid", "shown"),
    [
        ("ü 😀 &amp;", "ü 😀 &amp;"),
        (NASTY, NASTY),
        ("\ud83d alone", "\ufffd alone"),
        ("two\nlines\x00", "two\ufffdlines\ufffd"),
        ("ends with \\", "ends with \\ "),
        ('a "quote"', 'a "quote"'),
        ("", ""),
    ],
)
def test_no_name_needs_an_escape_that_perfetto_does_not_know(rid, shown, tmp_path):
    """Its reader of JSON knows no surrogate pairs, looks for escapes only where there are escaped quotes, and ends a string at a quote without a backslash
    before it. It refuses the whole file."""
    found = run()
    lives = {serial: dataclasses.replace(life, rid=rid) for serial, life in found.requests.items()}
    iterations = [
        dataclasses.replace(it, lines=[dataclasses.replace(line, rid=rid) for line in it.lines])
        for it in found.iterations
    ]
    path = tmp_path / "run.json"
    write_perfetto(dataclasses.replace(found, requests=lives, iterations=iterations), path)
    text = path.read_text("utf-8")
    assert text.startswith('{"displayTimeUnit":"ms"'), "by its first two characters the format is known"
    assert set(re.findall(r"\\(.)", text)) <= {'"'} | ({"\\"} if "\\" in rid else set())
    assert '\\\\"' not in text
    outer = [event for event in json.loads(text)["traceEvents"] if event["ph"] == "b" and "args" in event]
    assert {event["name"] for event in outer} == {event["args"]["rid"] for event in outer} == {shown}


def test_an_arrow_binds_to_the_slice_of_its_iteration(found):
    """Perfetto binds it to the slice that was begun last on its track, at the time of the arrow or before."""
    newest, bound = {}, 0
    for event in trace_events(found):
        track = event["pid"], event["tid"]
        if event["ph"] == "X":
            newest[track] = event
        elif event["ph"] in "stf":
            slice_ = newest[track]
            assert (slice_["args"]["forward_iter"], slice_["ts"]) == (event["id"], event["ts"])
            assert slice_["cat"] == {"s": "launch", "t": "verify", "f": "settle"}[event["ph"]]
            bound += 1
    assert bound > 2 * len(found.iterations)


def test_slices_of_a_track_do_not_overlap(found):
    """Perfetto shows no others."""
    ends: dict = defaultdict(int)
    for event in trace_events(found):
        if event["ph"] == "X":
            track = event["pid"], event["tid"]
            assert event["ts"] >= ends[track], event
            ends[track] = event["ts"] + event["dur"]


def test_each_iteration_has_its_slices_and_arrows(found):
    slices, arrows = defaultdict(set), defaultdict(str)
    for event in trace_events(found):
        if event["ph"] == "X":
            slices[event["args"]["forward_iter"]].add(event["cat"])
        if event["ph"] in "stf":
            arrows[event["id"]] += event["ph"]
    for it in found.iterations:
        wanted = {"plan", "launch"} | ({"wait", "settle"} if it.settled is not None else set())
        wanted |= {"verify"} if it.published is not None or it.ready is not None else set()
        wanted |= {"commit"} if it.committed is not None else set()
        assert slices[it.forward_iter] == wanted
        assert arrows[it.forward_iter] == "s" + ("t" if "verify" in wanted else "") + (
            "f" if "settle" in wanted else ""
        )


def test_begins_and_ends_match(found):
    """Of each request one slice around the others, closed in the reverse order."""
    stacks, names = defaultdict(list), defaultdict(list)
    for event in trace_events(found):
        if event["ph"] in "be":
            key = event["cat"], event["id2"]["local"]
            if event["ph"] == "b":
                names[key].append((len(stacks[key]), event["name"]))
                stacks[key].append(event)
            else:
                begun = stacks[key].pop()
                assert begun["name"] == event["name"] and begun["ts"] < event["ts"]
    assert not any(stacks.values()) and len(names) == len(found.requests)
    for (_, serial), of_request in names.items():
        life = found.requests[int(serial, 16)]
        assert of_request[0] == (0, life.rid) and all(depth == 1 for depth, _ in of_request[1:])
        assert {name for _, name in of_request[1:]} <= {"waiting", "prefill", "decode", "retracted"}
    assert any(of_request[0][1] == NASTY for of_request in names.values())


def test_counters_are_those_of_the_run(found):
    counters = defaultdict(list)
    for event in trace_events(found):
        if event["ph"] == "C":
            counters[event["name"]].append(event["args"])
    free, cached, held = zip(*(it.pages for it in found.iterations), strict=True)
    assert [tuple(args[k] for args in counters["pages"]) for k in ("free", "cached", "held")] == [free, cached, held]
    assert [args["waiting"] for args in counters["queue"]] == [it.waiting for it in found.iterations]
    accepted = sum(line.accept_lens or 0 for it in found.iterations for line in it.lines if line.live)
    assert sum(args["tokens"] for args in counters["accepted"]) == accepted > 0
