"""What `paged_kv_write` refuses, and why."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from ..checks import check_array, check_backend, check_pages
from .kernel import BLOCK_ROWS

BACKENDS = ("xla", "pallas", "pallas_interpret")

MAX_TOKENS = 16_384
"""Tokens of one Pallas call: their slots lie in scalar memory, and a longer prefill is cut into chunks anyway."""


def validate_pool(*, page_size: int, head_dim: int, dtype: Any, backend: str) -> None:
    """Raises ValueError for a pool that the backend cannot write to. For an engine to ask before it makes one."""
    check_backend(backend, BACKENDS, "paged_kv_write")
    if backend == "xla":
        return
    if page_size % BLOCK_ROWS and page_size not in (1, 2, 4):
        raise ValueError(
            f"{page_size=} must be 1, 2, 4 or a multiple of {BLOCK_ROWS} for {backend=}: a copy on a TPU moves whole tiles of "
            f"{BLOCK_ROWS} tokens, and a tile must not reach over the end of a page; choose such a page size, or backend='xla'"
        )
    if head_dim % 64:
        raise ValueError(
            f"{head_dim=} must be a multiple of 64 for {backend=}: keys and values of a head lie side by side in rows of 128 lanes; "
            "choose backend='xla'"
        )
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        raise ValueError(f"dtype={jnp.dtype(dtype)} must be float32 or bfloat16 for {backend=}")


def validate_static(pages: Any, k: Any, v: Any, slots: Any, *, layer: int, backend: str) -> None:
    """Raises ValueError for shapes, dtypes and sizes that the backend cannot take."""
    check_pages(pages, layer)
    _, _, num_kv_heads, page_size, width = pages.shape
    validate_pool(page_size=page_size, head_dim=width // 2, dtype=pages.dtype, backend=backend)
    if slots.ndim != 1 or slots.shape[0] == 0:
        raise ValueError(f"{slots.shape=} must be (T,) with T > 0: one slot a token")
    (num_tokens,) = slots.shape
    check_array("slots", slots, (num_tokens,), np.int32, "one slot a token")
    for name, array in (("k", k), ("v", v)):
        check_array(
            name,
            array,
            (num_tokens, num_kv_heads, width // 2),
            pages.dtype,
            "(T, KV heads, head size), in the pool's dtype",
        )
    if backend != "xla" and num_tokens > MAX_TOKENS:
        raise ValueError(f"{slots.shape=} must be at most ({MAX_TOKENS},) for {backend=}: cut the prefill into chunks")


def validate_dynamic(pages: Any, slots: Any) -> None:
    """Raises ValueError for concrete slots outside the pool, or two tokens in one slot. For tests: it reads the values."""
    slots = np.asarray(slots)
    page_size = pages.shape[3]
    size = pages.shape[1] * page_size
    if (bad := slots[(slots < 0) | (slots >= size)]).size:
        raise ValueError(f"slots holds {bad[0]}, outside the pool of {size} slots")
    values, counts = np.unique(slots[slots >= page_size], return_counts=True)
    if (twice := values[counts > 1]).size:
        raise ValueError(f"slots holds {twice[0]} more than once: a slot keeps one token")
