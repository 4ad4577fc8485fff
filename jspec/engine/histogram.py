"""A histogram as Prometheus has it: how many observations were no larger than each bound, and their sum."""

import bisect
import itertools
from collections.abc import Sequence


class Histogram:
    """Observations by size.

    Args:
        bounds: upper bounds of the buckets, ascending. One more bucket holds whatever is larger.
    """

    def __init__(self, bounds: Sequence[float]):
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Adds an observation."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """(bound, observations no larger), "+Inf" last: with all of them."""
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        return list(zip(bounds, map(float, itertools.accumulate(self._counts)), strict=True))
