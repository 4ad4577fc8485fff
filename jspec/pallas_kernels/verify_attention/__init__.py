"""Attention of a few query tokens a row over pages."""

import jax

from .reference import verify_attention_reference

__all__ = ["verify_attention"]


def verify_attention(
    q: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    prefix_lens: jax.Array,
    query_lens: jax.Array,
    *,
    layer: int,
    scale: float,
    ancestors: jax.Array | None = None,
    backend: str = "xla",
) -> jax.Array:
    if backend != "xla":
        raise ValueError(f"{backend=} does not exist for verify_attention: choose one of ('xla',)")
    return verify_attention_reference(
        q, pages, page_table, prefix_lens, query_lens, layer=layer, scale=scale, ancestors=ancestors
    )
