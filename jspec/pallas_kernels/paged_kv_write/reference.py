"""Write the KV of packed tokens into the pool, in plain jax.numpy."""

import jax
import jax.numpy as jnp


def paged_kv_write_reference(
    pages: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array, *, layer: int | jax.Array
) -> jax.Array:
    """See `paged_kv_write`. One scatter, which XLA does in place when the pool is donated; padding is sent out of bounds and dropped."""
    num_pages, page_size = pages.shape[1], pages.shape[3]
    page = jnp.where(slots >= page_size, slots // page_size, num_pages)
    kv = jnp.concatenate([k, v], axis=-1).astype(pages.dtype)
    return pages.at[layer, page, :, slots % page_size].set(kv, mode="drop")
