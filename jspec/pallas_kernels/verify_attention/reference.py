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
) -> jax.Array:
    """See `verify_attention`. One block of queries a row."""
    batch, width = q.shape[:2]
    rows = jnp.arange(batch, dtype=jnp.int32)
    blocks = QueryBlocks(
        row=rows,
        first=rows * width,
        position=prefix_lens,
        count=query_lens,
        keys=query_lens + query_start,
        ancestors=ancestors,
    )
    packed = q.reshape(batch * width, *q.shape[2:])
    out = blocked_attention(packed, pages, page_table, blocks, block_len=width, layer=layer, scale=scale)
    return out.reshape(q.shape)
