"""Causal attention of ragged packed prompts over pages."""

import functools
from typing import Any

import jax

from ..interpret import INTERPRET
from .kernel import prefill_attention_kernel
from .reference import prefill_attention_reference
from .validate import BACKENDS, validate_dynamic, validate_static

__all__ = ["BACKENDS", "prefill_attention", "validate_dynamic"]

# The layer is an argument of the traced function, so that a model of many layers traces it once.
_STATIC = ("scale", "window", "soft_cap")
_reference = jax.jit(prefill_attention_reference, static_argnames=_STATIC)
_kernel = jax.jit(prefill_attention_kernel, static_argnames=_STATIC)
_interpreted = jax.jit(functools.partial(prefill_attention_kernel, interpret=INTERPRET), static_argnames=_STATIC)


def prefill_attention(
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
    backend: str = "xla",
) -> jax.Array:
    """Attends `T` packed tokens to the pages of their rows, causally. The KV of all of them is already written.

    Args:
      q: [T, Hq, D], the tokens of row 0, then those of row 1 and so on; padding behind the last row.
      pages: the pool, from `init_kv_pages`.
      page_table: i32[B, P], pages of each row in position order; entries behind its last position are not read.
      prefix_lens: i32[B], KV-ready positions before the row's tokens: token `i` of row `b` sees positions `[0, prefix_lens[b] + i]`.
      query_lens: i32[B], tokens of each row, together at most `T`; 0 for a padding row.
      layer: layer of the pool, static.
      scale: factor on the scores, static.
      window, soft_cap: as in `verify_attention`, static.
      backend: "xla", "pallas" (a TPU), or "pallas_interpret" (the same kernel in the TPU interpreter, on any machine, with its races reported).

    Returns: [T, Hq, D] in q's dtype; scores, softmax and sums are in f32, the kernel's queries and weights in the pool's dtype. Zeros for padding.

    Raises:
      ValueError: while tracing, for shapes, dtypes or sizes that the backend cannot take.
    """
    options: dict[str, Any] = {"layer": layer, "window": window, "soft_cap": soft_cap}
    validate_static(q, pages, page_table, prefix_lens, query_lens, backend=backend, **options)
    attend = {"xla": _reference, "pallas": _kernel, "pallas_interpret": _interpreted}[backend]
    return attend(q, pages, page_table, prefix_lens, query_lens, scale=float(scale), **options)
