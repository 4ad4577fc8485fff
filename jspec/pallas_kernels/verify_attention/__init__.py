"""Attention of a few query tokens a row over pages: decode (`W` = 1), chain verify and tree verify."""

import functools

import jax

from ..interpret import INTERPRET
from .kernel import verify_attention_kernel
from .reference import verify_attention_reference
from .validate import BACKENDS, validate_dynamic, validate_static

__all__ = ["BACKENDS", "validate_dynamic", "verify_attention"]

# The layer is an argument of the traced function, so that a model of many layers traces it once.
_STATIC = ("scale", "query_start", "window", "soft_cap")
_reference = jax.jit(verify_attention_reference, static_argnames=_STATIC)
_kernel = jax.jit(verify_attention_kernel, static_argnames=_STATIC)
_interpreted = jax.jit(functools.partial(verify_attention_kernel, interpret=INTERPRET), static_argnames=_STATIC)


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
    query_start: int = 0,
    window: int | None = None,
    soft_cap: float | None = None,
    backend: str = "xla",
) -> jax.Array:
    """Attends the `W` query tokens of each row to its pages. Query `w` of row `b` is at position `prefix_lens[b] + w`, its own KV already written.

    Args:
      q: [B, W, Hq, D].
      pages: the pool, from `init_kv_pages`.
      page_table: i32[B, P], pages of each row in position order; entries behind its last position are not read.
      prefix_lens: i32[B], KV-ready positions before the query tokens.
      query_lens: i32[B], query tokens of each row, at most `W`; 0 for a padding row.
      layer: layer of the pool, static.
      scale: factor on the scores, static.
      ancestors: u32[B, W] or None. None: a chain, query `w` sees positions `[0, prefix_lens[b] + w]`. Otherwise a tree: it sees the whole
        prefix, and position `prefix_lens[b] + j` where bit `j` is set; a node is its own ancestor.
      query_start: static; nodes of the tree that earlier calls have written. Query `w` is node `query_start + w`, and its KV lies at position
        `prefix_lens[b] + query_start + w`: a tree can be grown level by level.
      window: positions that a query sees, its own among them, static; blocks of keys before it are not read. None: all. For a tree no
        less than its nodes.
      soft_cap: scores become `soft_cap * tanh(score / soft_cap)`, static (Gemma 2, arXiv:2408.00118). None: they stay.
      backend: "xla", "pallas" (a TPU), or "pallas_interpret" (the same kernel in the TPU interpreter, on any machine, with its races reported).

    Returns: [B, W, Hq, D] in q's dtype; scores, softmax and sums are in f32, the kernel's queries and weights in the pool's dtype. Zeros for
    queries `w >= query_lens[b]`, and for a node that sees nothing.

    Raises:
      ValueError: while tracing, for shapes, dtypes or sizes that the backend cannot take.
    """
    validate_static(
        q,
        pages,
        page_table,
        prefix_lens,
        query_lens,
        ancestors,
        layer=layer,
        query_start=query_start,
        window=window,
        soft_cap=soft_cap,
        backend=backend,
    )
    attend = {"xla": _reference, "pallas": _kernel, "pallas_interpret": _interpreted}[backend]
    return attend(
        q,
        pages,
        page_table,
        prefix_lens,
        query_lens,
        layer=layer,
        scale=float(scale),
        ancestors=ancestors,
        query_start=query_start,
        window=window,
        soft_cap=soft_cap,
    )
