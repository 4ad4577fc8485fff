"""One writer per clock, read off the source: every place that writes one is listed here, and a new one fails.

SGLang has the same test, for the same reason: a committed length with many writers, each nearly right, is where pages leak.
"""

import ast
import functools
import re
from collections import Counter
from pathlib import Path

import pytest

import jspec

ROOT = Path(jspec.__file__).parent

SITES = {
    "kv_committed_len": {
        ("state/ledger.py", "init_ledger"): 1,
        ("scheduler/extend.py", "share_prefix"): 1,  # prompt tokens that the prefix cache holds
        ("scheduler/extend.py", "prepare_extend"): 1,  # those computed, whose number is known when planned
        ("scheduler/settle.py", "settle"): 1,  # everything else
        ("sim/step.py", "reserve_for"): 2,  # a view for `reserve`, and the true length again
        ("scheduler/release.py", "release"): 1,  # to zero
    },
    "kv_allocated_len": {
        ("state/ledger.py", "init_ledger"): 1,
        ("scheduler/extend.py", "share_prefix"): 1,
        ("scheduler/extend.py", "prepare_extend"): 1,
        ("scheduler/reserve.py", "reserve"): 1,
        ("scheduler/release.py", "release"): 1,
    },
    "cache_protected_len": {
        ("state/ledger.py", "init_ledger"): 1,
        ("scheduler/extend.py", "share_prefix"): 1,  # pages that it takes from the cache
        ("scheduler/prefix_cache.py", "cache_prefix"): 1,  # pages that it hands to it
        ("scheduler/release.py", "release"): 1,
    },
    "output_len": {
        ("state/requests.py", "init_requests"): 1,
        ("scheduler/retract.py", "leave"): 1,  # of the `Waiting` that goes back to the queue, with what it had settled
        ("scheduler/admit.py", "_enter"): 1,  # the same number, when it gets a row again
        ("sim/plan.py", "start_some"): 1,  # what `_enter` does, on traced arrays
        ("scheduler/settle.py", "settle"): 1,
        ("scheduler/release.py", "release"): 1,
    },
    "new_seq_lens": {
        ("future_map/relay.py", "init_future_map"): 1,
        ("future_map/relay.py", "publish"): 1,
        ("trace/timeline.py", "_settled"): 1,  # of a line of a table
    },
}
"""By clock: the functions that may write it, and how often each does."""

NO_WRITES = {
    ("new_seq_lens", "GenerationBatchResult"),
    ("new_seq_lens", "Prefill"),  # what a prefill is about to publish
    ("output_len", "_require"),
    *((field, "Line") for field in SITES),  # a line of a table
}
"""Calls with a keyword of the same name that is another type's field, or a word of a message."""

NAME_COLUMNS = ("trace",)
"""Folders in which a clock's name in quotes heads a column."""

READERS_OF_NO_HOST_CLOCK = ("spec_workers", "models", "pallas_kernels")
HOST_NAMES = ("kv_committed_len", "kv_allocated_len", "cache_protected_len", "SchedulerState")


@functools.cache
def sources():
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(ROOT.rglob("*.py"))}


class Writes(ast.NodeVisitor):
    """Collects `(field, function)` of each write in a module.

    A write is a keyword of a call (`replace(ledger, kv_committed_len=...)`, a constructor), an assignment to an attribute or to its entries, or
    a field named by a string (`setattr`, `replace(ledger, **{"kv_committed_len": ...})`). A `replace` of names that cannot be read is one, too.
    """

    def __init__(self, fields, *, names_columns=False):
        self.fields, self.found, self.inside, self.names_columns = fields, [], ["<module>"], names_columns

    def visit_FunctionDef(self, node):
        self.inside.append(node.name)
        self.generic_visit(node)
        self.inside.pop()

    def visit_ClassDef(self, node):
        self.visit_FunctionDef(node)

    def note(self, field):
        self.found.append((field, self.inside[-1]))

    def visit_Call(self, node):
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        for keyword in node.keywords:
            if keyword.arg in self.fields and (keyword.arg, called) not in NO_WRITES:
                self.note(keyword.arg)
            if keyword.arg is None and called in ("replace", "_replace"):
                self.note("**")
        self.generic_visit(node)

    def visit_Attribute(self, node):
        if node.attr in self.fields and not isinstance(node.ctx, ast.Load):
            self.note(node.attr)
        self.generic_visit(node)

    def visit_Subscript(self, node):
        if not isinstance(node.ctx, ast.Load) and getattr(node.value, "attr", "") in self.fields:
            self.note(node.value.attr)
        self.generic_visit(node)

    def visit_Constant(self, node):
        if not self.names_columns and isinstance(node.value, str) and node.value in self.fields:
            self.note(node.value)


def writes(modules):
    """`{field: Counter of (file, function)}`, and `**` for a `replace` whose fields cannot be read."""
    found = {field: Counter() for field in (*SITES, "**")}
    for file, source in modules.items():
        for field, function in writes_of(source, file.split("/")[0] in NAME_COLUMNS):
            found[field][file, function] += 1
    return found


@functools.cache
def writes_of(source, names_columns=False):
    visitor = Writes(set(SITES), names_columns=names_columns)
    visitor.visit(ast.parse(source))
    return visitor.found


def names_of_the_host(modules):
    """`(file, name)` of each host clock that device code names, in code or in words."""
    return [
        (file, name)
        for file, source in modules.items()
        for name in HOST_NAMES
        if file.split("/")[0] in READERS_OF_NO_HOST_CLOCK and re.search(rf"\b{name}\b", source)
    ]


@pytest.mark.parametrize("field", SITES)
def test_a_clock_is_written_where_it_may_be_and_nowhere_else(field):
    assert dict(writes(sources())[field]) == SITES[field]


def test_no_replace_hides_the_names_of_its_fields():
    assert not writes(sources())["**"]


def test_device_code_names_no_host_clock():
    modules = sources()
    assert any(file.startswith("spec_workers/") for file in modules)
    assert names_of_the_host(modules) == []


@pytest.mark.parametrize(
    ("file", "line", "field"),
    [
        ("scheduler/plan.py", "def f(l): return replace(l, kv_committed_len=0)", "kv_committed_len"),
        ("scheduler/plan.py", "def f(l): return dataclasses.replace(l, kv_allocated_len=0)", "kv_allocated_len"),
        (
            "scheduler/reserve.py",
            "def f(l): return replace(l, kv_committed_len=l.kv_committed_len + 1)",
            "kv_committed_len",
        ),
        ("engine/engine.py", "def f(l): l.kv_committed_len = 0", "kv_committed_len"),
        ("engine/engine.py", "def f(l): l.kv_committed_len += 1", "kv_committed_len"),
        ("engine/engine.py", "def f(l): l.kv_allocated_len[3] = 1", "kv_allocated_len"),
        ("engine/engine.py", "def f(l): l.kv_allocated_len[3] -= 1", "kv_allocated_len"),
        ("engine/engine.py", "def f(l): object.__setattr__(l, 'kv_committed_len', 0)", "kv_committed_len"),
        ("engine/engine.py", "def f(l): return replace(l, **{'kv_committed_len': 0})", "kv_committed_len"),
        ("engine/engine.py", "def f(l, d): return replace(l, **d)", "**"),
        ("engine/engine.py", "LEDGER = KVLedger(kv_allocated_len=3)", "kv_allocated_len"),
        ("spec_workers/chain.py", "def f(m): return dataclasses.replace(m, new_seq_lens=1)", "new_seq_lens"),
        ("future_map/relay.py", "def stash(m): return dataclasses.replace(m, new_seq_lens=1)", "new_seq_lens"),
        ("scheduler/admit.py", "def f(r): return replace(r, output_len=0)", "output_len"),
        ("scheduler/retract.py", "def retract(r): return replace(r, output_len=0)", "output_len"),
        ("scheduler/retract.py", "def make_room(l): return replace(l, kv_allocated_len=0)", "kv_allocated_len"),
        ("scheduler/extend.py", "def share_prefix(l): return replace(l, kv_committed_len=0)", "kv_committed_len"),
        ("scheduler/prefix_cache.py", "def evict(l): return replace(l, cache_protected_len=0)", "cache_protected_len"),
        ("spec_workers/forward.py", "def f(p): return p._replace(new_seq_lens=0)", "new_seq_lens"),
        ("trace/replay.py", "def f(l): return replace(l, kv_committed_len=0)", "kv_committed_len"),
        ("trace/timeline.py", "def f(l): l.kv_committed_len += 1", "kv_committed_len"),
    ],
)
def test_a_new_writer_is_found(file, line, field):
    modules = sources()
    before, after = writes(modules), writes({**modules, file: f"{modules[file]}\n{line}\n"})
    assert after[field] != before[field]
    assert field == "**" or dict(after[field]) != SITES[field]


def test_a_second_write_in_an_allowed_place_is_found():
    modules = sources()
    twice = modules["scheduler/settle.py"].replace(
        "xp = namespace(requests.output_len)", "ledger.kv_committed_len[0] = 1"
    )
    assert twice != modules["scheduler/settle.py"]
    found = writes({**modules, "scheduler/settle.py": twice})["kv_committed_len"]
    assert found["scheduler/settle.py", "settle"] == 2


def test_reading_is_not_writing():
    line = "def f(l, r): return l.kv_committed_len + l.kv_allocated_len[r.output_len], GenerationBatchResult(new_seq_lens=1)"
    assert not any(writes({"engine/engine.py": line}).values())


@pytest.mark.parametrize("name", HOST_NAMES)
@pytest.mark.parametrize("file", ["spec_workers/chain.py", "models/target.py", "pallas_kernels/__init__.py"])
def test_device_code_that_names_a_host_clock_is_found(file, name):
    modules = sources()
    assert names_of_the_host({**modules, file: modules[file] + f"\nx = state.{name}\n"}) == [(file, name)]
