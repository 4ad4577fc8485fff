"""The sizes programs are compiled for. What selects one is known to the host before the step: counts and upper bounds, never a device value."""

import dataclasses

from jspec.config import EngineConfig
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


def make_buckets(config: EngineConfig, limits: Limits, *, pages_per_row: int) -> Buckets:
    """The sizes the configuration asks for, or doubling ones up to what the limits allow.

    Raises:
        ValueError: `prefill_buckets` does not end with the context length.
    """
    if config.prefill_buckets is not None and config.prefill_buckets[-1] != limits.context_len:
        raise ValueError(
            f"prefill_buckets={config.prefill_buckets} must end with context_len={limits.context_len}: a prompt may be that long"
        )
    return Buckets(
        batch=config.batch_buckets or _doubling(1, config.max_running),
        table_width=_doubling(min(-(-SMALLEST_TABLE_TOKENS // config.page_size), pages_per_row), pages_per_row),
        prefill_tokens=config.prefill_buckets
        or _doubling(min(SMALLEST_PREFILL_TOKENS, limits.context_len), limits.context_len),
        prefill_rows=limits.max_prefill_rows,
    )


def fit(sizes: tuple[int, ...], need: int) -> int:
    """The smallest of `sizes` that is at least `need`."""
    for size in sizes:
        if size >= need:
            return size
    raise ValueError(f"{need=} exceeds the largest bucket of {sizes}")
