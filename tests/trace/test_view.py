"""The page of a run: it holds the run, whole and as text, needs nothing else, and shows what it is asked for."""

import base64
import dataclasses
import hashlib
import importlib.resources
import itertools
import json
import re
import time
from html.parser import HTMLParser
from urllib.parse import quote

import numpy as np
import pytest
from typer.testing import CliRunner

from jspec.cli import app
from jspec.trace.timeline import FIELDS, Gone, Timeline
from jspec.trace.view import KINDS, TIMES, device_spans, page_data, request_phases, run_end, write_page

from .view_browser import NASTY, cut_run, document_of, picture_of, recording, repeated, run, two_ranks

TEMPLATE = importlib.resources.files("jspec.trace").joinpath("view.html").read_text("utf-8")


class Page(HTMLParser):
    """Tags, the text of each element that has an id, and the rows of each table."""

    VOID = ("meta", "input", "br", "wbr", "link", "img")

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.text: dict[str, str] = {}
        self.attributes: dict[str, dict] = {}
        self.rows: list[list[str]] = []
        self._open: list[str | None] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in self.VOID:
            name = dict(attrs).get("id")
            self._open.append(name)
            if name:
                self.text[name], self.attributes[name] = "", dict(attrs)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            self._open.pop()

    def handle_data(self, data):
        for name in filter(None, self._open):
            self.text[name] += data
        if self.rows and "rows" in self._open:
            self.rows[-1][-1] += data


def page_of(found: Timeline, folder) -> tuple:
    path = folder / "run.html"
    write_page(found, path)
    return path, path.read_text("utf-8")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The page of the run: its path, its text."""
    return page_of(run(), tmp_path_factory.mktemp("page"))


# --- the data ---------------------------------------------------------------------------------------------------------------


def sums(column, keys):
    last, found = {}, []
    for value, key in zip(column, keys, strict=True):
        found.append(None if value is None else last.get(key, 0) + value)
        if value is not None:
            last[key] = found[-1]
    return found


def assert_holds(data: dict, found: Timeline) -> None:
    """Every column, read back, is that of the run."""
    requests, iterations, lines = data["requests"], data["iterations"], data["lines"]
    lives = list(found.requests.values())
    for name in set(requests) - {"finish_reason", "phases"}:
        assert requests[name] == [getattr(life, name) for life in lives], name
    assert [data["reasons"][code] for code in requests["finish_reason"]] == [life.finish_reason for life in lives]
    once = [0] * len(found.iterations)
    for name in ("forward_iter", "depth", "settled_in", "waiting", *TIMES):
        assert sums(iterations[name], once) == [getattr(it, name) for it in found.iterations], name
    for i, name in enumerate(("free", "cached", "held")):
        assert sums(iterations[name], once) == [it.pages[i] for it in found.iterations], name
    modes = [tuple(data["modes"][mode] for mode in of_ranks) for of_ranks in iterations["modes"]]
    assert modes == [it.modes for it in found.iterations]
    left = [[it, rank, lives[r].serial, why] for it, rank, r, why in data["left"]]
    assert left == [[i, *gone[1:]] for i, it in enumerate(found.iterations) for gone in it.left] != []
    assert iterations["rows"] == [len(it.lines) for it in found.iterations]
    flat = [line for it in found.iterations for line in it.lines]
    assert [lives[r].serial for r in lines["request"]] == [line.serial for line in flat]
    assert [KINDS[code] for code in lines["kind"]] == [line.kind for line in flat]
    columns = {
        name: sums(column, lines["request"]) for name, column in lines.items() if name not in ("request", "kind")
    }
    for name, column in columns.items():
        assert column == [getattr(line, name) for line in flat], name
    stale, finished = set(data["stale"]), dict(data["finished"])
    assert [i not in stale for i in range(len(flat))] == [line.live for line in flat]
    assert [data["reasons"][finished.get(i, 0)] for i in range(len(flat))] == [line.finish_reason for line in flat]
    assert data["tokens"] == [token for line in flat for token in line.tokens]
    # What is not in it follows: the length of a run of tokens, its last one, the sum of two lengths.
    assert all(len(line.tokens) == (line.accept_lens or 0) for line in flat)
    assert {"prompt_len", "seqlen", "bonus"} == set(FIELDS) - set(lines)
    assert all(line.prompt_len == found.requests[line.serial].prompt_len for line in flat)


@pytest.mark.parametrize("found", [run, two_ranks, lambda: cut_run(len(recording()) // 2)], ids=["run", "ranks", "cut"])
def test_the_page_holds_the_run(found, tmp_path):
    _, text = page_of(found(), tmp_path)
    data = json.loads(Page(text).text["data"])
    assert data == json.loads(json.dumps(page_data(found())))
    assert_holds(data, found())


def test_everything_is_in_the_run():
    """Else the test above shows little."""
    lines = [line for it in run().iterations for line in it.lines]
    assert {line.kind for line in lines} == set(KINDS)
    assert not all(line.live for line in lines) and any(it.committed is not None for it in run().iterations)
    assert any(life.retractions for life in run().requests.values())
    assert {"LENGTH", "ABORT"} <= {life.finish_reason for life in run().requests.values()}
    assert cut_run(len(recording()) // 2).iterations[-1].settled is None


def test_text_stays_text(written):
    """A name and a prompt that look like HTML add no tag, and are read back letter by letter."""
    _, text = written
    assert Page(text).tags == Page(TEMPLATE).tags
    assert NASTY in json.loads(Page(text).text["data"])["requests"]["rid"]
    assert "alert(1)</" not in text and text.isascii() == TEMPLATE.isascii()


def test_any_string_is_a_name(tmp_path):
    """Halves of surrogate pairs, line separators, nothing at all."""
    found = repeated(1)
    names = ["\ud83d", "\u2028\u2029", "", "<!--", "]]>", "\x00\x1f"]
    for life, name in zip(found.requests.values(), names, strict=False):
        life.rid = life.prompt = name
    data = json.loads(Page(page_of(found, tmp_path)[1]).text["data"])
    assert data["requests"]["rid"][: len(names)] == data["requests"]["prompt"][: len(names)] == names


def test_the_page_needs_no_network(written):
    """Nothing is fetched, and a policy forbids it; the policy lets the page's own script run, and no other."""
    assert not re.search(r"https?:|//\w|src=|href=|@import|url\(|fetch\(|XMLHttp|import\(|eval|innerHTML", TEMPLATE)
    (policy,) = re.findall(r'content="(default-src [^"]+)"', written[1])
    script = re.search(r"<script>(.*?)</script>", written[1], re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_the_commands_write_beside_the_record(tmp_path):
    file = tmp_path / "run.jspec"
    file.write_bytes(recording())
    for command, name in ((["view"], "run.jspec.html"), (["export", "--perfetto"], "run.jspec.perfetto.json")):
        result = CliRunner().invoke(app, ["trace", *command, str(file)])
        assert result.exit_code == 0 and result.output == f"{tmp_path / name}\n"
        assert (tmp_path / name).stat().st_size > 10_000
        refused = CliRunner().invoke(app, ["trace", *command, str(file), "--out", str(tmp_path / "none" / name)])
        assert refused.exit_code == 2 and "No such file or directory" in refused.stderr


def test_what_ran_is_said():
    run_facts = {name: value for name, value, _ in page_data(run())["run"]}
    lives = run().requests.values()
    assert run_facts["iterations"] == str(len(run().iterations)) and run_facts["requests"] == str(len(lives))
    assert run_facts["tokens"] == f"{sum(life.num_tokens for life in lives):,}"
    assert run_facts["accept length"] == "3.00"  # the stub's
    assert {name: value for name, value, _ in page_data(run())["limits"]}["carry"] == run().header.carry
    assert run_facts["retractions"] == str(sum(life.retractions for life in lives)) != "0"
    assert json.loads(json.dumps(page_data(run())))["broken"] is None


def test_a_cut_run_says_so(tmp_path):
    cut = cut_run(len(recording()) // 2)
    assert "cut at byte" in page_data(cut)["broken"]
    assert "ended" in {name: value for name, value, _ in page_data(cut)["run"]}["requests"]
    header = cut_run(8 + 8 + int.from_bytes(recording()[8:12], "little"))
    assert not header.iterations and not header.requests
    assert page_data(header)["lines"]["request"] == [] and page_of(header, tmp_path)


def test_many_requests_make_a_small_page(tmp_path):
    """500 requests, several thousand iterations."""
    found = repeated(45)
    num_lines = sum(len(it.lines) for it in found.iterations)
    assert len(found.requests) >= 500 and len(found.iterations) >= 4000
    start = time.perf_counter()
    path, text = page_of(found, tmp_path)
    assert time.perf_counter() - start < 10
    tokens = sum(len(line.tokens) for it in found.iterations for line in it.lines)
    most = 500 * len(found.requests) + 120 * len(found.iterations) + 40 * num_lines + 8 * tokens
    assert path.stat().st_size == len(text.encode()) < len(TEMPLATE) + most


# --- spans and phases -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("found", [run, lambda: cut_run(len(recording()) // 2)], ids=["run", "cut"])
def test_the_device_does_one_thing_at_a_time(found):
    last = 0
    for it, span in zip(found().iterations, device_spans(found()), strict=True):
        assert span.begun >= max(it.dispatched, last)
        last = span.begun
        for end in (span.published, span.committed):
            assert end is None or end >= last
            last = end or last
        assert (span.published is None) == (it.published is None and it.ready is None)
        assert it.ready is None or span.published <= it.ready, "the host had read it"
        assert (span.committed is None) == (it.committed is None)


def test_phases_follow_each_other():
    for serial, phases in request_phases(run()).items():
        life = run().requests[serial]
        assert phases[0].begin == life.submitted and phases[-1].end == life.ended
        assert all(one.end == other.begin for one, other in itertools.pairwise(phases))
        assert all(one.kind != other.kind for one, other in itertools.pairwise(phases))
        assert sum(phase.kind == "retracted" for phase in phases) == life.retractions
    cut = cut_run(len(recording()) // 2)
    ends = [phases[-1].end for serial, phases in request_phases(cut).items() if cut.requests[serial].ended is None]
    assert ends and set(ends) == {run_end(cut)}


# --- in a browser -----------------------------------------------------------------------------------------------------------


def shown_as(value) -> str:
    return "·" if value is None else f"{value:,}"


def test_a_browser_shows_the_iteration_and_the_request_of_the_address(written):
    found = run()
    it = next(it for it in found.iterations if any(line.kind == "tail" and line.rid == NASTY for line in it.lines))
    page = Page(document_of(written[0], f"#iteration={it.forward_iter}&request={quote(NASTY, safe='')}"))
    assert page.text["iteration-name"] == f"Iteration {it.forward_iter} · MIXED"
    assert page.text["request-name"] == f"Request {NASTY}"
    assert page.text["title"] == f"{found.header.model} · stub" and "to its end" in page.text["when"]
    names, *rows = page.rows[1:]
    fields = list(FIELDS)
    assert [name.startswith(field) for name, field in zip(names[4:], fields, strict=False)] == [True] * len(fields)
    assert names[4:-2] == [field + about.owner for field, about in FIELDS.items()]
    assert [row[: 4 + len(fields)] for row in rows] == [
        [line.rid, line.kind, str(line.row), str(line.epoch), *map(shown_as, line.clocks().values())]
        for line in it.lines
    ]
    assert [row[-2] for row in rows] == [" ".join(map(str, line.tokens)) for line in it.lines]
    assert "alert" not in page.tags and page.tags.count("script") == 2
    assert f"of {len(found.iterations)}" in page.attributes["lanes"]["aria-label"]
    ran = [other.forward_iter for other in found.iterations if any(line.rid == NASTY for line in other.lines)]
    assert page.attributes["clocks"]["aria-label"].endswith(f"iterations {ran[0]} to {ran[-1]}")


def test_a_browser_shows_stale_results_and_ranks(tmp_path):
    found = two_ranks()
    it = next(it for it in found.iterations if any(not line.live for line in it.lines))
    page = Page(document_of(page_of(found, tmp_path)[0], f"#iteration={it.forward_iter}"))
    assert page.text["iteration-name"].endswith(f"rank 0 {it.modes[0].upper()}, rank 1 IDLE")
    assert [row[-1].startswith("stale") for row in page.rows[2:]] == [not line.live for line in it.lines]


def left_at_last() -> Timeline:
    """The run as if two more requests had lost their rows in plans behind its last iteration."""
    found = run()
    first, other, *_ = found.requests
    end = run_end(found)
    left = [Gone(end + 5, 0, first, "retracted"), Gone(end + 9, 0, other, "ABORT")]
    requests = {**found.requests, first: dataclasses.replace(found.requests[first], ended=None, retractions=1)}
    return dataclasses.replace(found, requests=requests, left_last=left)


def test_who_left_behind_the_last_iteration_is_on_the_page():
    found = left_at_last()
    number, left = len(found.iterations), page_data(found)["left"]
    assert left == [*page_data(run())["left"], [number, 0, 0, "retracted"], [number, 0, 1, "ABORT"]]
    assert request_phases(found)[1][-1] == ("retracted", run_end(run()) + 5, run_end(run()) + 9)


def test_a_browser_names_who_left(tmp_path):
    found, path = left_at_last(), page_of(left_at_last(), tmp_path)[0]
    names = {serial: life.rid for serial, life in found.requests.items()}

    def said(forward_iter: int) -> str:
        return Page(document_of(path, f"#iteration={forward_iter}")).text["iteration-left"]

    it = next(it for it in found.iterations[:-1] if it.left)
    of_it = ", ".join(f"{names[gone.serial]} ({gone.why})" for gone in it.left)
    assert said(it.forward_iter) == f"left in its plan, or since the iteration before: {of_it}"
    last = found.iterations[-1]
    assert not last.left and said(last.forward_iter) == f"left after it: {names[1]} (retracted), {names[2]} (ABORT)"


@pytest.mark.parametrize("size", [0, 1, 2, 3])
def test_a_browser_shows_a_run_that_was_cut(size, tmp_path):
    """Before its first plan, and behind it; asked for what is not there."""
    header = 8 + 8 + int.from_bytes(recording()[8:12], "little")
    cut = cut_run(header + size * (len(recording()) - header) // 4)
    page = Page(document_of(page_of(cut, tmp_path)[0], "#iteration=99999&request=nobody"))
    assert page.text["broken"].startswith("This record is not whole: the file ")
    if not cut.iterations:
        assert page.text["iteration-name"] == "No iteration is on record"


def test_a_browser_is_quick_with_many_requests(tmp_path):
    """Of 500 requests it lists those that fit."""
    found = repeated(45)
    path, _ = page_of(found, tmp_path)
    start = time.perf_counter()
    document = document_of(path, f"#iteration=3000&request={quote('30/r7', safe='')}")
    assert time.perf_counter() - start < 30
    page = Page(document)
    assert page.text["iteration-name"].startswith("Iteration 3000 · ") and page.text["request-name"] == "Request 30/r7"
    listed = re.findall(r'id="req-(\d+)" aria-selected="(\w+)"', document)
    assert 10 <= len(listed) < 40
    assert [list(found.requests.values())[int(at)].rid for at, chosen in listed if chosen == "true"] == ["30/r7"]


@pytest.mark.parametrize(("scheme", "width"), [(1, 1280), (0, 1280), (1, 390)], ids=["light", "dark", "phone"])
def test_a_browser_draws_in_the_colours_of_the_theme(scheme, width, written):
    """Bars of decodes and prefills, pages held and cached, clocks."""
    picture = picture_of(
        written[0], "", f"--blink-settings=preferredColorScheme={scheme}", f"--window-size={width},3600"
    )
    colours, counts = np.unique(picture.astype(np.int32) @ [1 << 16, 1 << 8, 1], return_counts=True)
    points = dict(zip(colours.tolist(), counts.tolist(), strict=True))
    found = dict(re.findall(r"--([\w-]+): light-dark\((#\w+, #\w+)\)", TEMPLATE))
    for name in ("bg", "panel", "extend", "decode", "held", "cached", "host", "future"):
        colour = found[name].split(", ")[1 - scheme]
        assert points.get(int(colour[1:], 16), 0) > 100, f"{name} {colour} is nowhere"
