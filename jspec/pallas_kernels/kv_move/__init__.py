"""Move the KV of an accepted tree path into place."""

import functools

import jax

from ..interpret import INTERPRET
from .kernel import kv_move_kernel
from .reference import kv_move_reference
from .validate import BACKENDS, validate_dynamic, validate_static

__all__ = ["BACKENDS", "kv_move", "validate_dynamic"]

_BACKENDS = {
    "xla": jax.jit(kv_move_reference),
    "pallas": jax.jit(kv_move_kernel),
    "pallas_interpret": jax.jit(functools.partial(kv_move_kernel, interpret=INTERPRET)),
}


def kv_move(pages: jax.Array, source: jax.Array, target: jax.Array, *, backend: str = "xla") -> jax.Array:
    """Copies the KV of tokens from slot to slot, in all layers; every other slot keeps its bits. In place where `pages` is donated.

    All sources are read before any target is written, so the two may overlap.

    Args:
      pages: the pool, from `init_kv_pages`.
      source: i32[T], `page * page_size + offset`.
      target: i32[T], likewise, distinct; a slot in page 0 (the sink), or one equal to its source, is not written.
      backend: "xla", "pallas" (a TPU), or "pallas_interpret" (the same kernel in the TPU interpreter, on any machine, with its races reported).

    Returns: the pool.

    Raises:
      ValueError: while tracing, for shapes, dtypes or an unknown backend.
    """
    validate_static(pages, source, target, backend=backend)
    return _BACKENDS[backend](pages, source, target)
