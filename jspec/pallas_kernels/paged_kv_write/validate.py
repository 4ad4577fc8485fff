"""What `paged_kv_write` refuses, and why."""

import numpy as np

BACKENDS = ("xla", "pallas", "pallas_interpret")


def sublane_tile(dtype) -> int:
    """Rows of a page that lie in one TPU tile: 8 of 4 bytes, 16 of 2, 32 of 1. The smallest piece of a page that one copy can move."""
    return 32 // np.dtype(dtype).itemsize


def validate_static(pages, k, v, slots, *, layer: int, backend: str) -> None:
    """Raises ValueError for shapes, dtypes and sizes that the kernel cannot take."""
    if backend not in BACKENDS:
        raise ValueError(f"{backend=} does not exist for paged_kv_write: choose one of {BACKENDS}")
    if pages.ndim != 5:
        raise ValueError(f"{pages.shape=} must have 5 dimensions: make it with init_kv_pages")
    num_layers, _, num_kv_heads, page_size, width = pages.shape
    expected = (slots.shape[0] if slots.ndim else 0, num_kv_heads, width // 2)
    if slots.ndim != 1:
        raise ValueError(f"{slots.shape=} must be (T,), one slot a token")
    if k.shape != expected:
        raise ValueError(f"{k.shape=} must be (T, num_kv_heads, head_dim)={expected}")
    if v.shape != k.shape:
        raise ValueError(f"{v.shape=} must equal {k.shape=}")
    if k.dtype != pages.dtype or v.dtype != pages.dtype:
        raise ValueError(f"{k.dtype=} and {v.dtype=} must be {pages.dtype=}: cast before writing")
    if slots.dtype != np.int32:
        raise ValueError(f"{slots.dtype=} must be int32")
    if not 0 <= layer < num_layers:
        raise ValueError(f"{layer=} must lie in [0, {num_layers})")
    if backend != "xla":
        tile = sublane_tile(pages.dtype)
        if page_size % tile:
            raise ValueError(
                f"page_size={page_size} must be a multiple of {tile} for the Pallas kernel: a copy cannot split a TPU tile of "
                f"{tile} rows of {pages.dtype}; choose such a page size, or kernels='xla'"
            )
        if width % 128:
            raise ValueError(
                f"head_dim={width // 2} must be a multiple of 64 for the Pallas kernel: keys and values of a head fill TPU tiles of 128 lanes"
            )


def validate_dynamic(pages, slots) -> None:
    """Raises ValueError for concrete slots outside the pool, or two tokens in one slot. For tests: it reads the values."""
    slots = np.asarray(slots)
    page_size = pages.shape[3]
    size = pages.shape[1] * page_size
    if (bad := slots[(slots < 0) | (slots >= size)]).size:
        raise ValueError(f"slots holds {bad[0]}, outside the pool of {size} slots")
    real = slots[slots >= page_size]
    if np.unique(real).size != real.size:
        raise ValueError("slots holds a slot twice: the page cannot keep both tokens")
