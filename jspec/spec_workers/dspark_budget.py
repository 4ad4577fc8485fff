"""How many draft tokens are worth verifying: throughput tables of the verify step, and the budget they give (host, NumPy).

SPS is short for steps per second.
"""

import dataclasses
import json
import os
import pathlib
from typing import Any

import numpy as np

from jspec.spec_workers.dspark_layout import LEAST_SURVIVAL

ALL = -1
"""A budget that verifies every draft."""


def _ascending(name: str, values: tuple[float, ...]) -> None:
    steps = np.diff(values)
    if not values or not np.isfinite(values).all() or (steps <= 0).any():
        raise ValueError(
            f"{name}={list(values)} must be finite numbers, at least one, each above the one before: sort the probes"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpsTable:
    """Steps a second of a verify over so many tokens. Between probes the probe below counts; a table of one probe says nothing, and everything is verified.

    Raises:
        ValueError: naming the field, its value and the rule.
    """

    sample_batch_tokens: tuple[float, ...]
    sample_steps_per_sec: tuple[float, ...]

    def __post_init__(self):
        _ascending("sample_batch_tokens", self.sample_batch_tokens)
        _same_length(self, "sample_steps_per_sec", "sample_batch_tokens")
        _positive(self, "sample_steps_per_sec")

    @property
    def is_informative(self) -> bool:
        return len(self.sample_batch_tokens) > 1

    def steps_per_sec(self, num_rows: int, num_tokens: np.ndarray) -> np.ndarray:
        """f64[n] at `num_tokens`, pending ones included; what is below the first probe goes at its pace."""
        place = np.searchsorted(self.sample_batch_tokens, num_tokens, side="right") - 1
        return np.asarray(self.sample_steps_per_sec)[np.maximum(place, 0)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdditiveSps:
    """Seconds of a step as a sum: a constant, a part that the rows cost and a part that the tokens cost, each a line through its probes, flat outside.

    Raises:
        ValueError: naming the field, its value and the rule.
    """

    bias_seconds: float
    bs_probes: tuple[float, ...]
    alpha_seconds: tuple[float, ...]
    m_probes: tuple[float, ...]
    theta_seconds: tuple[float, ...]

    def __post_init__(self):
        if not (np.isfinite(self.bias_seconds) and self.bias_seconds > 0):
            raise ValueError(f"bias_seconds={self.bias_seconds} must be positive: a step takes time whatever is in it")
        for probes, seconds in (("bs_probes", "alpha_seconds"), ("m_probes", "theta_seconds")):
            _ascending(probes, getattr(self, probes))
            _same_length(self, seconds, probes)
            if (np.asarray(getattr(self, seconds)) < 0).any():
                raise ValueError(f"{seconds}={list(getattr(self, seconds))} must not be negative: they are seconds")

    @property
    def is_informative(self) -> bool:
        return len(self.m_probes) > 1

    def steps_per_sec(self, num_rows: int, num_tokens: np.ndarray) -> np.ndarray:
        """f64[n] at `num_tokens`, pending ones included."""
        rows = np.interp(num_rows, self.bs_probes, self.alpha_seconds)
        return 1.0 / (self.bias_seconds + rows + np.interp(num_tokens, self.m_probes, self.theta_seconds))


Sps = SpsTable | AdditiveSps


def _same_length(table: Any, name: str, other: str) -> None:
    ours, theirs = getattr(table, name), getattr(table, other)
    if len(ours) != len(theirs):
        raise ValueError(f"{name} has {len(ours)} values, {other} has {len(theirs)}: one is needed for each")


def _positive(table: Any, name: str) -> None:
    values = np.asarray(getattr(table, name))
    if not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(f"{name}={list(getattr(table, name))} must be positive numbers")


def budget(chances: np.ndarray, sps: Sps) -> int:
    """Draft tokens to verify so that tokens emitted a second are most, or `ALL` where the table says nothing.

    Args:
        chances: f32[R, K], survival of the drafts of the running rows, of an *older* step: a budget made of the chances of the very drafts that it cuts
            would bias the output. Rows of which none are known have ones.
        sps: what a step costs.

    Source: DSpark (arXiv 2607.05147), its hardware-aware prefix scheduler. All sizes are tried, ties go to the smaller.
    """
    if not sps.is_informative:
        return ALL
    num_rows = chances.shape[0]
    likely = np.sort(chances[chances >= LEAST_SURVIVAL].astype(np.float64))[::-1]
    emitted = num_rows + np.concatenate([[0.0], np.cumsum(likely)])
    return int(np.argmax(emitted * sps.steps_per_sec(num_rows, num_rows + np.arange(len(emitted)))))


def load_sps(path: str | os.PathLike[str]) -> Sps:
    """The table in a JSON file, of either form: `{"sample_batch_tokens", "sample_steps_per_sec"}`, or the fields of `AdditiveSps`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds something else.
    """
    found = _read(path)
    kind = AdditiveSps if "bias_seconds" in found else SpsTable
    fields = [field.name for field in dataclasses.fields(kind)]
    for name in fields:
        if name not in found:
            raise ValueError(
                f"{path}: {name} is missing: a table holds {', '.join(fields)}; make one with `jspec profile sps`"
            )
    return _built(path, kind, {name: found[name] for name in fields})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sts:
    """Temperatures that calibrate a confidence head, one a place in the block (sequential temperature scaling).

    Raises:
        ValueError: naming the field, its value and the rule.
    """

    temperatures: tuple[float, ...]

    def __post_init__(self):
        if not self.temperatures:
            raise ValueError("temperatures=[] must hold one for each place of the block")
        _positive(self, "temperatures")


def load_sts(path: str | os.PathLike[str], *, num_drafts: int) -> Sts:
    """The temperatures in a JSON file, `{"temperatures": [...]}` and what is known of how they were fitted.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds something else, or temperatures of blocks of another length.
    """
    found = _read(path)
    if "temperatures" not in found:
        raise ValueError(f"{path}: temperatures is missing: make the file with `jspec calibrate sts`")
    sts = _built(path, Sts, {"temperatures": found["temperatures"]})
    if len(sts.temperatures) != num_drafts:
        raise ValueError(
            f"{path}: temperatures has {len(sts.temperatures)} values, but the draft proposes {num_drafts} tokens: one is needed for each; "
            "calibrate this draft with `jspec calibrate sts`"
        )
    return sts


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        found = json.loads(pathlib.Path(path).read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}): make it again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: holds a {type(found).__name__}, it must be an object")
    return found


def _built(path: str | os.PathLike[str], kind: Any, fields: dict[str, Any]) -> Any:
    def number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    for name, value in fields.items():
        if name == "bias_seconds":
            if not number(value):
                raise ValueError(f"{path}: {name}={value!r} must be a number")
        elif not isinstance(value, list) or not all(map(number, value)):
            raise ValueError(f"{path}: {name}={value!r} must be a list of numbers")
    try:
        return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
