"""Moving KV between slots, in plain jax.numpy."""

import jax
import jax.numpy as jnp


def kv_move_reference(pages: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """See `kv_move`."""
    num_pages, page_size = pages.shape[1], pages.shape[3]
    moved = pages.at[:, source // page_size, :, source % page_size].get(mode="clip")  # [T, L, Hkv, 2D]
    stays = (target < page_size) | (target == source)
    page = jnp.where(stays, num_pages, target // page_size)  # out of range: dropped
    return pages.at[:, page, :, target % page_size].set(moved, mode="drop")
