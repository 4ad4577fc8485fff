"""Causal attention of ragged packed prompts over pages, in plain jax.numpy."""

import jax
import jax.numpy as jnp

from ..blocked_attention import QueryBlocks, blocked_attention

QUERY_BLOCK = 64
"""Query tokens that attend together: bounds the scores held at a time to `Hq * QUERY_BLOCK` times one block of keys."""


def prefill_attention_reference(
    q: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    prefix_lens: jax.Array,
    query_lens: jax.Array,
    *,
    layer: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """See `prefill_attention`."""
    block_len = min(QUERY_BLOCK, q.shape[0])
    blocks = token_blocks(prefix_lens, query_lens, q.shape[0], block_len)
    return blocked_attention(
        q,
        pages,
        page_table,
        blocks,
        block_len=block_len,
        layer=layer,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
    )


def token_blocks(prefix_lens: jax.Array, query_lens: jax.Array, num_tokens: int, block_len: int) -> QueryBlocks:
    """Each row is cut into blocks; `T / block_len + B` of them are enough however long the rows are."""
    batch = prefix_lens.shape[0]
    row_blocks = -(-query_lens // block_len)
    block_ends = jnp.cumsum(row_blocks)
    block = jnp.arange(num_tokens // block_len + batch, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(block_ends, block, side="right", method="compare_all"), batch - 1).astype(
        jnp.int32
    )
    offset = (block - (block_ends - row_blocks)[row]) * block_len  # of the block's first query in its row
    count = jnp.clip(query_lens[row] - offset, 0, block_len)
    return QueryBlocks(
        row=row,
        first=(jnp.cumsum(query_lens) - query_lens)[row] + offset,
        position=prefix_lens[row] + offset,
        count=count,
        keys=count,
    )
