"""How many tokens a verify emits: drawn from a distribution, or taken from a run that was recorded."""

import dataclasses
from typing import Any, ClassVar, Protocol

import jax
import numpy as np

from jspec.config import MAX_VERIFY_WIDTH
from jspec.sim.checks import as_array, require
from jspec.state.dense import namespace


class Acceptance(Protocol):
    """What `simulate` needs: a pytree with this method, whose result depends on its arguments alone.

    So a request accepts the same whatever else runs, and configurations are compared on the same luck (common random numbers).
    """

    RANKS: ClassVar[dict[str, int]]
    """Axes of each field without the one of configurations."""

    def accept_lens(self, serial, index, width) -> Any:
        """Tokens that a verify emits, bonus included.

        Args:
            serial: i32[R], request of each row, from 1; 0 for rows without one, whose result is not looked at.
            index: i32[R], verifies of that request before this one.
            width: i32[], `W`.

        Returns:
            i32[R] in [1, W].
        """
        ...


def uniform(seed, serial, index):
    """`f32[R]` in [0, 1): a number of its own for every verify of every request.

    A hash rather than a key that is split: it costs a few multiplications and can be asked for in any order. Its 24 bits are enough for acceptance.

    Args:
        seed: u32[].
        serial: i32[R].
        index: i32[R].

    Source: pcg3d of Jarzynski and Olano, "Hash Functions for GPU Rendering", JCGT 9(3), 2020.
    """
    xp = namespace(index)
    word = xp.uint32
    words = [xp.astype(v, word) for v in (serial, index, xp.asarray(seed) + xp.zeros_like(index))]
    x, y, z = (v * word(1664525) + word(1013904223) for v in words)
    for mixed in (False, True):
        x = x + y * z
        y = y + z * x
        z = z + x * y
        if not mixed:
            x, y, z = (v ^ (v >> word(16)) for v in (x, y, z))
    return xp.astype(x >> word(8), xp.float32) * xp.float32(2.0**-24)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """Accept lengths drawn afresh for every verify. Made by `geometric`, `by_position` and `histogram`."""

    survival: Any  # f32[D]  probability that a verify emits more than 1, 2, ..., D tokens, if it is wide enough
    seed: Any  # u32[]
    RANKS: ClassVar[dict[str, int]] = {"survival": 1, "seed": 0}

    def accept_lens(self, serial, index, width):
        """See `Acceptance`. A verify that is too narrow for what was drawn accepts all it holds: right for chains, whose accepted part is a prefix."""
        xp = namespace(index)
        more = self.survival[:, None] > uniform(self.seed, serial, index)
        return xp.minimum(1 + xp.sum(more, axis=0, dtype=xp.int32), width)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Replayed:
    """Accept lengths of a recorded run. Made by `recorded`."""

    lens: Any  # i32[Q, T]  of each request's verifies, in order
    counts: Any  # i32[Q]   how many of them there are; behind the last one it starts anew
    RANKS: ClassVar[dict[str, int]] = {"lens": 2, "counts": 1}

    def accept_lens(self, serial, index, width):
        """See `Acceptance`."""
        xp = namespace(index)
        request = xp.maximum(serial - 1, 0)
        return xp.clip(self.lens[request, index % self.counts[request]], 1, width)


def _drawn(survival, seed) -> Drawn:
    seed = as_array("seed", seed, np.uint32, low=0)
    return Drawn(survival=np.asarray(survival, np.float32), seed=seed)


def geometric(rate, *, max_width: int = MAX_VERIFY_WIDTH, seed=0) -> Drawn:
    """Each draft is accepted with probability `rate`, if all before it were: P(more than k tokens) = rate ** k, cut at the verify's width.

    Args:
        rate: in [0, 1], or an array with one for each configuration.
        max_width: widest verify it will be asked about; `simulate` cuts it down to what is needed.
        seed: of the draws; an integer at least 0, or one for each configuration.

    Raises:
        ValueError: field, value and rule.

    Source: Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192: the mean of a verify of
        `k` drafts is `(1 - rate ** (k + 1)) / (1 - rate)`.
    """
    rate = as_array("rate", rate, np.float32, low=0, high=1)
    require(max_width >= 1, f"max_width={max_width} must be at least 1: a verify holds its pending token")
    return _drawn(rate[..., None] ** np.arange(1, max_width), seed)


def by_position(probs, *, seed=0) -> Drawn:
    """Each draft is accepted with the probability of its place, if all before it were.

    Args:
        probs: f32[D] or f32[C, D], in [0, 1]: of the first draft, the second, ...
        seed: see `geometric`.

    Raises:
        ValueError: field, value and rule.
    """
    probs = as_array("probs", probs, np.float32, low=0, high=1)
    require(probs.ndim >= 1, f"probs={probs} must be a sequence: one probability a draft")
    return _drawn(np.cumprod(probs, axis=-1), seed)


def histogram(counts, *, seed=0) -> Drawn:
    """Accept lengths as often as they were counted.

    Args:
        counts: [L] or [C, L], at least 0 and not all 0: verifies that emitted 1, 2, ..., L tokens.
        seed: see `geometric`.

    Raises:
        ValueError: field, value and rule.
    """
    counts = as_array("counts", counts, np.float64, low=0)
    require(
        counts.ndim >= 1 and counts.shape[-1] > 0, f"counts={counts} must be a sequence: one count an accept length"
    )
    total = counts.sum(axis=-1, keepdims=True)
    require((total > 0).all(), f"counts={counts.tolist()} hold no verify: count at least one")
    return _drawn((1 - np.cumsum(counts, axis=-1) / total)[..., :-1], seed)


def recorded(accept_lens) -> Replayed:
    """The accept lengths of a run, request by request: `[output.accept_lens for output in outputs]` of `Engine.generate`.

    Args:
        accept_lens: a sequence for each request, in the order of `Requests`. A request without a verify (it ended with its prefill) counts as one that
            accepts nothing. Behind its last one a request starts anew, which matters only where a simulation gives it more verifies than the run did.

    Raises:
        ValueError: field, value and rule.
    """
    each = [as_array(f"accept_lens[{i}]", list(lens), np.int32, low=1) for i, lens in enumerate(accept_lens)]
    require(bool(each), "accept_lens is empty: record at least one request")
    require(all(lens.ndim == 1 for lens in each), "accept_lens must hold a flat sequence of integers for each request")
    longest = max(max(len(lens) for lens in each), 1)
    table = np.ones((len(each), longest), np.int32)
    for row, lens in zip(table, each, strict=True):
        row[: len(lens)] = lens
    return Replayed(lens=table, counts=np.array([max(len(lens), 1) for lens in each], np.int32))
