"""Causal attention of ragged packed prompts over pages, as a Pallas TPU kernel."""

import jax
import jax.numpy as jnp

from ..blocked_attention_kernel import blocked_attention_kernel
from .reference import token_blocks

QUERY_BLOCK = 64
"""Query tokens that attend together. With a group of 4 they are 256 lines, enough to keep the matrix unit busy while a page is in place."""


def prefill_attention_kernel(
    q: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    prefix_lens: jax.Array,
    query_lens: jax.Array,
    **options,
) -> jax.Array:
    """See `prefill_attention`; `options` go to `blocked_attention_kernel`. The queries of each block are gathered, and its results put back."""
    num_tokens = q.shape[0]
    block_len = min(QUERY_BLOCK, num_tokens)
    blocks = token_blocks(prefix_lens, query_lens, num_tokens, block_len)
    query = jnp.arange(block_len)
    token = jnp.where(query < blocks.count[:, None], blocks.first[:, None] + query, num_tokens)  # [N, Q]
    queries = q.at[token].get(mode="fill", fill_value=0)
    out = blocked_attention_kernel(queries, pages, page_table, blocks, name="prefill_attention", **options)
    return jnp.zeros_like(q).at[token].set(out, mode="drop")
