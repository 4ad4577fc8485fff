"""What differs between two values of the state, in words that fit a terminal."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

MOST_ENTRIES = 8
"""Of an array, as many differing entries are listed."""


def state_diff(before: Any, after: Any, *, name: str = "state") -> list[str]:
    """One line a difference, `path: before -> after`; of an array, its entries by index.

    Args:
        before, after: two values of one type: a `SchedulerState`, or any tree of dataclasses, arrays, tuples, mappings and plain values.
        name: what they are called.
    """
    return list(_differences(before, after, name))


def _differences(a: Any, b: Any, path: str) -> Iterator[str]:
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        for field in dataclasses.fields(a):
            yield from _differences(getattr(a, field.name), getattr(b, field.name), f"{path}.{field.name}")
    elif isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.shape == b.shape:
        yield from _entries(a, b, path)
    elif isinstance(a, tuple) and isinstance(b, tuple) and type(a) is type(b) and not hasattr(a, "_fields"):
        for i in range(max(len(a), len(b))):
            if i >= len(a) or i >= len(b):
                gone, come = (a[i:], ()) if i < len(a) else ((), b[i:])
                yield f"{path}[{i}:]: {_short(gone)} -> {_short(come)}"
                return
            yield from _differences(a[i], b[i], f"{path}[{i}]")
    elif hasattr(a, "keys") and hasattr(b, "keys"):
        for key in sorted({*a.keys(), *b.keys()}, key=repr):
            if key not in a or key not in b or a[key] is not b[key]:
                mine, theirs = a.get(key, _ABSENT), b.get(key, _ABSENT)
                if mine is _ABSENT or theirs is _ABSENT or mine != theirs:
                    yield f"{path}[{_short(key)}]: {_short(mine)} -> {_short(theirs)}"
    elif isinstance(a, np.ndarray) or isinstance(b, np.ndarray) or a != b:
        yield f"{path}: {_short(a)} -> {_short(b)}"


_ABSENT = type("Absent", (), {"__repr__": lambda self: "nothing"})()


def _entries(a: np.ndarray, b: np.ndarray, path: str) -> Iterator[str]:
    if a.dtype != b.dtype:
        yield f"{path}.dtype: {a.dtype} -> {b.dtype}"
    where = np.argwhere(a != b)
    for index in where[:MOST_ENTRIES].tolist():
        at = tuple(index)
        yield f"{path}[{', '.join(map(str, index))}]: {a[at]} -> {b[at]}" if index else f"{path}: {a[at]} -> {b[at]}"
    if len(where) > MOST_ENTRIES:
        yield f"{path}: and {len(where) - MOST_ENTRIES} more entries"


def _short(value: Any) -> str:
    text = value.hex() if isinstance(value, bytes) else repr(value.item() if isinstance(value, np.generic) else value)
    return text if len(text) <= 100 else f"{text[:97]}..."
