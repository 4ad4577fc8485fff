"""Write the KV of packed tokens into the pool, in plain jax.numpy."""

import jax
import jax.numpy as jnp


def paged_kv_write_reference(
    pages: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array, *, layer: int
) -> jax.Array:
    """See `paged_kv_write`."""
    num_pages, page_size = pages.shape[1], pages.shape[3]
    page = jnp.where(slots >= page_size, slots // page_size, num_pages)  # out of bounds, so dropped
    kv = jnp.concatenate([k, v], axis=-1).astype(pages.dtype)
    return pages.at[layer, page, :, slots % page_size].set(kv, mode="drop")
