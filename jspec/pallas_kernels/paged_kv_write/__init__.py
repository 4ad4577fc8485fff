"""Write the KV of packed tokens into the pool, in place."""

import jax
from jax.experimental.pallas import tpu as pltpu

from ..pages import init_kv_pages
from .kernel import paged_kv_write_kernel
from .reference import paged_kv_write_reference
from .validate import validate_static

__all__ = ["init_kv_pages", "paged_kv_write"]


def paged_kv_write(
    pages: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array, *, layer: int, backend: str = "xla"
) -> jax.Array:
    """Writes keys and values of `T` tokens to their slots in one layer. In place where `pages` is donated.

    Args:
        pages: the pool, from `init_kv_pages`.
        k, v: [T, num_kv_heads, head_dim] in the pool's dtype.
        slots: i32[T], `page * page_size + offset`, distinct; slots in page 0 are padding and dropped.
        layer: layer of the pool, static.
        backend: "xla", "pallas" (TPU), or "pallas_interpret" (the same kernel in the TPU interpreter, on any machine, with its races checked).

    Returns: the pool.

    Raises:
        ValueError: at trace time, for shapes, dtypes or sizes the backend cannot take.
    """
    validate_static(pages, k, v, slots, layer=layer, backend=backend)
    if backend == "xla":
        return paged_kv_write_reference(pages, k, v, slots, layer=layer)
    interpret = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
    return paged_kv_write_kernel(
        pages, k, v, slots, layer=layer, interpret=interpret if backend == "pallas_interpret" else False
    )
