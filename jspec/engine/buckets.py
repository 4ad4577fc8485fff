"""The sizes programs are compiled for. What selects one is known to the host before the step: counts and upper bounds, never a device value."""

import dataclasses

from jspec.state.scheduler_state import Limits

SMALLEST_TABLE_TOKENS = 256
SMALLEST_PREFILL_TOKENS = 64


def _doubling(first: int, last: int) -> tuple[int, ...]:
    """`first`, `2 first`, ... and `last`, ascending."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return (*sizes, last)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buckets:
    """Ascending sizes; a batch runs in the smallest that holds it."""

    batch: tuple[int, ...]  # rows of a DECODE batch
    table_width: tuple[int, ...]  # pages a row of a DECODE batch may touch
    prefill_tokens: tuple[int, ...]  # packed tokens of an EXTEND batch
    prefill_rows: int  # rows of an EXTEND batch: one size, since padding rows cost nothing there


def make_buckets(limits: Limits, *, max_running: int, pages_per_row: int, page_size: int) -> Buckets:
    """Doubling sizes up to what the limits allow."""
    return Buckets(
        batch=_doubling(1, max_running),
        table_width=_doubling(min(-(-SMALLEST_TABLE_TOKENS // page_size), pages_per_row), pages_per_row),
        prefill_tokens=_doubling(min(SMALLEST_PREFILL_TOKENS, limits.context_len), limits.context_len),
        prefill_rows=limits.max_prefill_rows,
    )


def fit(sizes: tuple[int, ...], need: int) -> int:
    """The smallest of `sizes` that is at least `need`."""
    for size in sizes:
        if size >= need:
            return size
    raise ValueError(f"{need=} exceeds the largest bucket of {sizes}")
