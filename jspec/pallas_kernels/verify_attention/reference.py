"""Attention of a few query tokens a row over pages, in plain jax.numpy."""

import jax
import jax.numpy as jnp

from ..blocked_attention import QueryBlocks, blocked_attention


def verify_attention_reference(
    q: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    prefix_lens: jax.Array,
    query_lens: jax.Array,
    *,
    layer: int,
    scale: float,
    ancestors: jax.Array | None = None,
    query_start: int = 0,
    window: int | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """See `verify_attention`. One block of queries a row."""
    batch, width = q.shape[:2]
    blocks = row_blocks(prefix_lens, query_lens, width, ancestors, query_start)
    out = blocked_attention(
        q.reshape(batch * width, *q.shape[2:]),
        pages,
        page_table,
        blocks,
        block_len=width,
        layer=layer,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
    )
    return out.reshape(q.shape)


def row_blocks(
    prefix_lens: jax.Array, query_lens: jax.Array, width: int, ancestors: jax.Array | None, query_start: int
) -> QueryBlocks:
    """One block a row."""
    rows = jnp.arange(prefix_lens.shape[0], dtype=jnp.int32)
    return QueryBlocks(
        row=rows,
        first=rows * width,
        position=prefix_lens,
        count=query_lens,
        keys=query_lens + query_start,
        ancestors=ancestors,
    )
