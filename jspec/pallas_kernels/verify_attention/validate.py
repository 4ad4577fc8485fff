"""What `verify_attention` refuses, and why."""

from typing import Any

import numpy as np

from ..attention_rules import BACKENDS, MAX_NODES, check_attention
from ..checks import check_array, check_backend, check_heads, check_pages, check_reads, check_rows

__all__ = ["BACKENDS", "validate_dynamic", "validate_static"]


def validate_static(
    q: Any,
    pages: Any,
    page_table: Any,
    prefix_lens: Any,
    query_lens: Any,
    ancestors: Any,
    *,
    layer: int,
    backend: str,
    query_start: int = 0,
    window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    """Raises ValueError for shapes, dtypes and sizes that the backend cannot take."""
    check_backend(backend, BACKENDS, "verify_attention")
    check_pages(pages, layer)
    if q.ndim != 4 or 0 in q.shape:
        raise ValueError(f"{q.shape=} must be (B, W, query heads, head size), none of them 0")
    check_heads(q, pages)
    batch, width = q.shape[:2]
    check_rows(page_table, prefix_lens, query_lens, batch)
    num_nodes = 0 if ancestors is None else query_start + width
    check_attention(pages, page_table, batch, num_nodes, window, soft_cap, backend)
    if ancestors is None:
        if query_start:
            raise ValueError(f"{query_start=} needs ancestors: a chain starts later by a longer prefix_lens")
        return
    check_array("ancestors", ancestors, (batch, width), np.uint32, "one word of bits a node")
    if query_start < 0 or query_start + width > MAX_NODES:
        raise ValueError(
            f"{query_start=} and {ancestors.shape=} must name at most {MAX_NODES} nodes a row: a node's ancestors are the bits of one word"
        )


def validate_dynamic(
    pages: Any, page_table: Any, prefix_lens: Any, query_lens: Any, ancestors: Any = None, *, width: int
) -> None:
    """Raises ValueError for concrete values that break a rule. For tests: it reads the values."""
    query_lens = np.asarray(query_lens)
    if (query_lens > width).any():
        raise ValueError(f"query_lens holds {query_lens.max()}, more than the {width} queries of a row")
    check_reads(pages, page_table, prefix_lens, query_lens)
    if ancestors is not None:
        unwritten = np.asarray(ancestors).astype(np.uint64) >> query_lens[:, None].astype(np.uint64) != 0
        if (unwritten & (np.arange(width) < query_lens[:, None])).any():
            raise ValueError(
                "ancestors holds a node that sees one behind the row's last: it must be one of the row's nodes"
            )
