"""How the KV pool is laid out: one stacked array `pages[L, N + 1, Hkv, page_size, 2 * D]`, the keys of a token in the first `D` lanes and its values in the last.

Head-major, so that the keys of one head form a matrix without any shuffling; one page of one layer is contiguous, so that it is one copy;
keys and values side by side, so that a head of size 64 fills the 128 lanes of a TPU tile instead of half of them.
Page 0 is the sink for padding: nothing that is read depends on it. Only the kernels of this package know this layout.
"""

import jax
import jax.numpy as jnp


def init_kv_pages(
    num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype, *, where=None
) -> jax.Array:
    """An empty pool of `num_pages` usable pages (ids 1 to `num_pages`) plus the sink, page 0; `where`: a device or a sharding, None: the default."""
    return jnp.zeros((num_layers, num_pages + 1, num_kv_heads, page_size, 2 * head_dim), dtype, device=where)
