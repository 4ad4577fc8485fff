"""Causal attention of ragged packed prompts over pages."""

import jax

from .reference import prefill_attention_reference

__all__ = ["prefill_attention"]


def prefill_attention(
    q: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    prefix_lens: jax.Array,
    query_lens: jax.Array,
    *,
    layer: int,
    scale: float,
    backend: str = "xla",
) -> jax.Array:
    if backend != "xla":
        raise ValueError(f"{backend=} does not exist for prefill_attention: choose one of ('xla',)")
    return prefill_attention_reference(q, pages, page_table, prefix_lens, query_lens, layer=layer, scale=scale)
