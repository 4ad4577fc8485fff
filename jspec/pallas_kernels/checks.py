"""Checks that the kernels share: each raises at trace time, names the argument, its value and the rule, and says the way out."""

from typing import Any

import numpy as np


def check_backend(backend: str, exists: tuple[str, ...], kernel: str) -> None:
    """Only a backend that exists for the kernel; none is replaced by another."""
    if backend not in exists:
        raise ValueError(f"{backend=} does not exist for {kernel}: choose one of {', '.join(exists)}")


def check_array(name: str, array: Any, shape: tuple[int, ...], dtype: Any, meaning: str) -> None:
    """Shape and dtype of one argument."""
    if tuple(array.shape) != shape:
        raise ValueError(f"{name}.shape={tuple(array.shape)} must be {shape}: {meaning}")
    if array.dtype != np.dtype(dtype):
        raise ValueError(f"{name}.dtype={array.dtype} must be {np.dtype(dtype)}: {meaning}")


def check_pages(pages: Any, layer: int) -> None:
    """A pool, and a layer of it."""
    if pages.ndim != 5 or pages.shape[4] % 2:
        raise ValueError(f"{pages.shape=} is no pool: make it with init_kv_pages")
    if not isinstance(layer, int):
        raise TypeError(f"{layer=} must be an int: it is static")
    if not 0 <= layer < pages.shape[0]:
        raise ValueError(f"{layer=} must lie in [0, {pages.shape[0]}), the layers of the pool")


def check_heads(q: Any, pages: Any) -> None:
    """Query heads in groups of equal size over the pool's KV heads, of the same head size."""
    num_q_heads, head_dim = q.shape[-2:]
    num_kv_heads, pool_head_dim = pages.shape[2], pages.shape[4] // 2
    if num_q_heads % num_kv_heads:
        raise ValueError(f"{q.shape=} must have a multiple of {num_kv_heads} heads, the KV heads of the pool")
    if head_dim != pool_head_dim:
        raise ValueError(f"{q.shape=} must end in {pool_head_dim}, the head size of the pool")
    if not np.issubdtype(q.dtype, np.floating) and q.dtype.name != "bfloat16":
        raise ValueError(f"{q.dtype=} must be a floating type")


def check_rows(page_table: Any, prefix_lens: Any, query_lens: Any, batch: int | None = None) -> None:
    """Page table and lengths of the same rows."""
    if page_table.ndim != 2 or page_table.shape[1] == 0:
        raise ValueError(f"{page_table.shape=} must be (B, P) with P > 0: the pages of each row in position order")
    batch = page_table.shape[0] if batch is None else batch
    check_array(
        "page_table", page_table, (batch, page_table.shape[1]), np.int32, "the pages of each row in position order"
    )
    check_array("prefix_lens", prefix_lens, (batch,), np.int32, "KV-ready positions of each row")
    check_array("query_lens", query_lens, (batch,), np.int32, "query tokens of each row, 0 for a padding row")


def check_reads(pages: Any, page_table: Any, prefix_lens: Any, query_lens: Any) -> None:
    """Concrete values: each row that has queries has the pages it reads, inside the pool and not the sink."""
    page_table, prefix_lens, query_lens = (np.asarray(x) for x in (page_table, prefix_lens, query_lens))
    num_pages, page_size = pages.shape[1], pages.shape[3]
    if (prefix_lens < 0).any():
        raise ValueError(f"prefix_lens holds {prefix_lens.min()}: a length is not negative")
    if (query_lens < 0).any():
        raise ValueError(f"query_lens holds {query_lens.min()}: a length is not negative")
    lengths = np.where(query_lens > 0, prefix_lens + query_lens, 0)
    if lengths.size and lengths.max() > (room := page_table.shape[1] * page_size):
        raise ValueError(
            f"prefix_lens + query_lens holds {lengths.max()}, more than the {room} positions of {page_table.shape=}"
        )
    read = page_table[np.arange(page_table.shape[1]) < -(-lengths // page_size)[:, None]]
    if (bad := read[(read < 1) | (read >= num_pages)]).size:
        raise ValueError(f"page_table holds {bad[0]} for a page that is read: it must lie in [1, {num_pages})")
