"""What the attention kernels cannot take, and why: the same rules for verify and prefill."""

from typing import Any

import jax.numpy as jnp

from .checks import check_backend

BACKENDS = ("xla", "pallas", "pallas_interpret")

MAX_NODES = 32
"""Bits in one word of ancestors."""

MAX_SCALARS = 200_000
"""Page table entries and lengths of one Pallas call: they lie in scalar memory, 1 MiB on every chip, which the compiler needs too."""


def validate_attention_pool(*, page_size: int, head_dim: int, dtype: Any, backend: str) -> None:
    """Raises ValueError for a pool that the backend cannot attend to. For an engine to ask before it makes one."""
    check_backend(backend, BACKENDS, "attention")
    if backend == "xla":
        return
    dtype = jnp.dtype(dtype)
    if dtype not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        raise ValueError(f"{dtype=} must be float32 or bfloat16 for {backend=}; choose backend='xla'")
    tile = 32 // dtype.itemsize
    if page_size % tile:
        raise ValueError(
            f"{page_size=} must be a multiple of {tile} for {backend=} and {dtype.name}: a page is whole tiles of {tile} tokens; "
            "choose such a page size, or backend='xla'"
        )
    if head_dim != 64 and head_dim % 128:
        raise ValueError(
            f"{head_dim=} must be 64 or a multiple of 128 for {backend=}: keys and values of a head lie side by side in rows of "
            "128 lanes; choose backend='xla'"
        )


def check_attention(
    pages: Any, page_table: Any, num_blocks: int, num_nodes: int, window: Any, soft_cap: Any, backend: str
) -> None:
    """The options of attention, and what the backend cannot take. `num_nodes`: nodes of the tree, 0 for a chain."""
    if window is not None and not (isinstance(window, int) and window >= 1):
        raise ValueError(f"{window=} must be at least 1, the query's own position; None sees all")
    if window is not None and window < num_nodes:
        raise ValueError(
            f"{window=} must be at least {num_nodes}, the nodes of the tree: a window that ends inside a tree is not implemented"
        )
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"{soft_cap=} must be positive; None leaves scores as they are")
    page_size, head_dim = pages.shape[3], pages.shape[4] // 2
    validate_attention_pool(page_size=page_size, head_dim=head_dim, dtype=pages.dtype, backend=backend)
    scalars = page_table.size + num_blocks * 4
    if backend != "xla" and scalars > MAX_SCALARS:
        raise ValueError(
            f"{page_table.shape=} with {num_blocks} blocks of queries takes {scalars} words of scalar memory, at most {MAX_SCALARS} for "
            f"{backend=}: choose larger pages or fewer rows"
        )
