"""Faults put into the code: the source of a function with one piece of it replaced, in place of the function, wherever it is called from."""

import __future__

import contextlib
import importlib
import inspect
import textwrap
from typing import NamedTuple


class Edit(NamedTuple):
    """One function, and what is replaced in its source."""

    function: str  # "jspec.scheduler.reserve:reserve"; of a property, "module:Class.name"
    old: str  # occurs once
    new: str


class Mutant(NamedTuple):
    """A fault that somebody had."""

    name: str
    report: str  # where they told of it: repository, and number of the issue or pull request
    fault: str  # what goes wrong
    edits: tuple[Edit, ...]
    check: str  # the one that sees it, see `checks.CHECKS`
    sees: str  # what the check says, or the beginning of it


def function_of(path):
    """The function that a path names."""
    module, _, name = path.partition(":")
    found = importlib.import_module(module)
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
    found = getattr(found, "fget", None) or getattr(found, "__func__", found)
    return inspect.unwrap(found)


def mutated_code(edit):
    """The code of the function after the edit.

    Raises:
        AssertionError: the source does not hold what is replaced, or holds it twice: then the code has changed, and the mutant must follow.
    """
    function = function_of(edit.function)
    source = textwrap.dedent(inspect.getsource(function))
    count = source.count(edit.old)
    assert count == 1, f"{edit.function} holds {edit.old!r} {count} times"
    assert edit.old != edit.new
    # Of decorated functions the code inside is what counts.
    lines = source.replace(edit.old, edit.new).splitlines()
    while not lines[0].startswith("def "):
        lines.pop(0)
    namespace = {}
    flags = function.__code__.co_flags & __future__.annotations.compiler_flag
    exec(
        compile("\n".join(lines), f"<mutant of {edit.function}>", "exec", flags), dict(function.__globals__), namespace
    )
    (made,) = namespace.values()
    assert made.__code__.co_freevars == function.__code__.co_freevars == ()
    return made.__code__


@contextlib.contextmanager
def applied(edits):
    """The faults are there as long as this lasts. Whoever holds the functions, by whatever name, calls the new code."""
    functions = [function_of(edit.function) for edit in edits]
    assert len(set(functions)) == len(functions), "one edit a function"
    before = [function.__code__ for function in functions]
    after = [mutated_code(edit) for edit in edits]
    try:
        for function, code in zip(functions, after, strict=True):
            function.__code__ = code
        yield
    finally:
        for function, code in zip(functions, before, strict=True):
            function.__code__ = code
