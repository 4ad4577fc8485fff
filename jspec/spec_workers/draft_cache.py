"""Where the KV of a block draft lies: at the target's pages, or in a ring of pages that each row has of its own, no longer than the draft looks back."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from jspec.config import DRAFT_CACHES
from jspec.models.block_draft import BlockDraftModel
from jspec.models.recurrence import row_of_token
from jspec.spec_workers.base import DeviceSizes
from jspec.spec_workers.forward import Prefill


class DraftCache(NamedTuple):
    """A layout. `table` and `prefill_slots` are traceable."""

    num_pages: Callable[[DeviceSizes], int]
    table: Callable[..., Any]
    """`table(rows: i32[B], page_table: i32[B, P], page_size) -> i32[B, P]`: the draft's page of each page of positions of each row; `page_table`: the
    target's."""
    prefill_slots: Callable[..., Any]
    """`prefill_slots(prompts: Prefill, page_size) -> i32[T]`: where the KV of the tokens of a prefill goes; 0, the sink, of those that are not kept."""
    bytes_per_token: int  # at pages that are the target's, too
    bytes_per_row: Callable[[int], int]  # of the page size


def draft_cache(kind: str, draft: BlockDraftModel) -> DraftCache:
    """The layout `kind`, one of `DRAFT_CACHES`, for `draft`.

    "paged": the draft's pool has the target's page ids, so a prefix that is found there is found here. "window": page `c` of a row's positions lies at page
    `c % K` of its ring. `K` pages hold what a block sees, its window and itself, wherever the frontier stands in a page; what a ring has lost is out of sight
    for good. After a rejection the frontier has not moved back: a block overwrites nothing that the next one sees. Nobody finds another row's ring, so there is
    no prefix cache beside it.

    Raises:
        ValueError: an unknown kind, or a ring for a draft that sees all of the context.

    Source: the compact draft cache of SGLang's DFLASH worker.
    """
    if kind not in DRAFT_CACHES:
        raise ValueError(f"draft_cache={kind!r} must be one of {', '.join(DRAFT_CACHES)}")
    per_token, window = draft.facts.kv_bytes_per_token, draft.config.window
    if kind == "paged":
        return DraftCache(
            num_pages=lambda sizes: sizes.num_pages,
            table=lambda rows, page_table, page_size: page_table,
            prefill_slots=lambda prompts, page_size: prompts.batch.slots,
            bytes_per_token=per_token,
            bytes_per_row=lambda page_size: 0,
        )
    if window is None:
        raise ValueError(
            "draft_cache='window' needs a draft that looks back no further than a window, this one sees all: use one with a sliding window, or 'paged'"
        )
    most = window + draft.config.num_rows - 1  # positions from the first that a block's first row sees to its last row

    def ring_len(page_size: int) -> int:
        return (most + page_size - 2) // page_size + 1

    def num_pages(sizes: DeviceSizes) -> int:
        if sizes.prefix_cache:
            raise ValueError(
                "draft_cache='window' needs prefix_cache=False: a prefix that another row computed is not in this row's ring; give --no-prefix-cache, or 'paged'"
            )
        return (sizes.num_rows - 1) * ring_len(sizes.page_size)

    def table(rows, page_table, page_size: int):
        column = jnp.arange(page_table.shape[1], dtype=jnp.int32) % ring_len(page_size)
        return jnp.where((rows > 0)[:, None], 1 + (rows - 1)[:, None] * ring_len(page_size) + column, 0)

    def prefill_slots(prompts: Prefill, page_size: int):
        batch, pages = prompts.batch, ring_len(page_size)
        rows, ends = (jnp.append(x, 0)[row_of_token(batch)] for x in (batch.rows, prompts.new_seq_lens))
        page, offset = batch.positions // page_size, batch.positions % page_size
        # Of a chunk that is longer than the ring, only its end: two tokens for one slot would be a race.
        kept = (rows > 0) & (batch.positions >= ends - pages * page_size)
        return jnp.where(kept, (1 + (rows - 1) * pages + page % pages) * page_size + offset, 0)

    return DraftCache(
        num_pages=num_pages,
        table=table,
        prefill_slots=prefill_slots,
        bytes_per_token=0,
        bytes_per_row=lambda page_size: ring_len(page_size) * page_size * per_token,
    )
