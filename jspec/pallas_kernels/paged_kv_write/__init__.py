"""Write the KV of packed tokens into the pool, in place."""

import functools

import jax

from ..interpret import INTERPRET
from ..pages import init_kv_pages
from .kernel import paged_kv_write_kernel
from .reference import paged_kv_write_reference
from .validate import BACKENDS, validate_dynamic, validate_pool, validate_static

__all__ = ["BACKENDS", "init_kv_pages", "paged_kv_write", "validate_dynamic", "validate_pool"]

# The layer is an argument of the traced function, so that a model of many layers traces it once.
_reference = jax.jit(paged_kv_write_reference)
_kernel = jax.jit(paged_kv_write_kernel)
_interpreted = jax.jit(functools.partial(paged_kv_write_kernel, interpret=INTERPRET))


def paged_kv_write(
    pages: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array, *, layer: int, backend: str = "xla"
) -> jax.Array:
    """Writes keys and values of `T` tokens to their slots in one layer; every other slot keeps its bits. In place where `pages` is donated.

    Args:
      pages: the pool, from `init_kv_pages`.
      k: [T, Hkv, D], keys, in the pool's dtype.
      v: [T, Hkv, D], values, likewise.
      slots: i32[T], `page * page_size + offset`, distinct and in any order; slots in page 0 are padding, which is dropped.
      layer: layer of the pool, static.
      backend: "xla", "pallas" (a TPU), or "pallas_interpret" (the same kernel in the TPU interpreter, on any machine, with its races reported).

    Returns: the pool.

    Raises:
      ValueError: while tracing, for shapes, dtypes or sizes that the backend cannot take.
    """
    validate_static(pages, k, v, slots, layer=layer, backend=backend)
    if backend == "xla":
        return _reference(pages, k, v, slots, layer=layer)
    write = _kernel if backend == "pallas" else _interpreted
    return write(pages, k, v, slots, layer=layer)
