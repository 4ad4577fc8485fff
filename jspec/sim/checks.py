"""Refusing what cannot be simulated: field, value, rule, way out."""

from typing import Any

import numpy as np


def require(holds: bool, message: str) -> None:
    """ValueError unless it holds."""
    if not holds:
        raise ValueError(message)


def _shown(given: np.ndarray, wrong: np.ndarray) -> str:
    """The value, or the first few that are wrong."""
    found = given[wrong]
    if given.ndim == 0:
        return str(found[0])
    return f"[{', '.join(map(str, found[:4]))}{', ...' if found.size > 4 else ''}]"


def as_array(field: str, value: Any, dtype: Any, *, low: float | None = None, high: float | None = None) -> np.ndarray:
    """A NumPy array of that type.

    Raises:
        TypeError: it holds something other than numbers, or fractions where integers are wanted.
        ValueError: not finite, or outside `[low, high]`.
    """
    dtype = np.dtype(dtype)
    try:
        given = np.asarray(value)
    except (TypeError, ValueError):
        raise TypeError(f"{field}={value!r} must be a number, or a regular array of them") from None
    wanted = "b" if dtype.kind == "b" else "iu" if dtype.kind in "iu" else "iuf"
    if given.size and given.dtype.kind not in wanted:
        kind = {"b": "true or false", "iu": "an integer", "iuf": "a number"}[wanted]
        raise TypeError(f"{field}={value!r} must be {kind}, or an array of them, got {given.dtype}")
    if given.dtype.kind == "f" and not np.isfinite(given).all():
        raise ValueError(f"{field}={_shown(given, ~np.isfinite(given))} must be finite")
    if dtype.kind in "iu" and high is None:  # what would not fit would wrap
        high = np.iinfo(dtype).max
    if low is not None and (given < low).any():
        raise ValueError(f"{field}={_shown(given, given < low)} must be at least {low}")
    if high is not None and (given > high).any():
        raise ValueError(f"{field}={_shown(given, given > high)} must be at most {high}")
    return given.astype(dtype)
