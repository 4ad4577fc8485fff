"""The sizes programs are compiled for. What selects one is known to the host before the step: counts and upper bounds, never a device value."""

import dataclasses

from jspec.config import EngineConfig
from jspec.scheduler import max_new_pages
from jspec.spec_workers.upload import ExtendSizes
from jspec.state.scheduler_state import Limits

SMALLEST_TABLE_TOKENS = 256
SMALLEST_PREFILL_TOKENS = 64


def _rising(first: int, last: int, *, factor: int = 2) -> tuple[int, ...]:
    """`first`, `factor * first`, ... and `last`, ascending."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return (*sizes, last)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buckets:
    """Ascending sizes; a batch runs in the smallest that holds it."""

    batch: tuple[int, ...]  # rows of a DECODE batch
    table_width: tuple[int, ...]  # pages a row of a DECODE batch may touch
    prefill: tuple[
        ExtendSizes, ...
    ]  # EXTEND programs by packed tokens; then, where batches are mixed, the same with tails

    def extend(self, num_tokens: int, *, tails: bool) -> ExtendSizes:
        """The smallest program that prefills so many tokens, and takes tails along."""
        return next(s for s in self.prefill if s.num_tokens >= num_tokens and bool(s.num_tails) == tails)


def make_buckets(config: EngineConfig, limits: Limits, *, pages_per_row: int) -> Buckets:
    """The sizes the configuration asks for, or doubling ones up to what the limits allow.

    A prefill program has one number of rows and one width of the page table, since what no prompt fills costs nothing there.

    Raises:
        ValueError: `prefill_buckets` does not end with the most tokens that one batch may prefill.
    """
    most = limits.max_prefill_tokens
    if config.prefill_buckets is not None and config.prefill_buckets[-1] != most:
        raise ValueError(
            f"prefill_buckets={config.prefill_buckets} must end with max_prefill_tokens={most}: one batch may prefill that many"
        )
    tokens = config.prefill_buckets or _rising(min(SMALLEST_PREFILL_TOKENS, most), most)
    new_pages = max_new_pages(alloc_len=limits.alloc_len, depth=limits.depth, page_size=config.page_size)
    prefill = [
        ExtendSizes(
            num_tokens=size,
            num_rows=limits.max_prefill_rows,
            num_tails=num_tails,
            lookahead=max(limits.lookahead, 1),
            table_width=pages_per_row,
            max_new_pages=new_pages,
        )
        for num_tails in ((0, config.max_running) if limits.mixed else (0,))
        for size in tokens
    ]
    return Buckets(
        batch=config.batch_buckets or _rising(1, config.max_running),
        # Attention costs what the lengths say, not the width: what a narrower table saves is small, so there are few widths.
        table_width=_rising(min(-(-SMALLEST_TABLE_TOKENS // config.page_size), pages_per_row), pages_per_row, factor=4),
        prefill=tuple(prefill),
    )


def fit(sizes: tuple[int, ...], need: int) -> int:
    """The smallest of `sizes` that is at least `need`."""
    for size in sizes:
        if size >= need:
            return size
    raise ValueError(f"{need=} exceeds the largest bucket of {sizes}")
