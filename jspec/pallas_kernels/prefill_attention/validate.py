"""What `prefill_attention` refuses, and why."""

from typing import Any

import numpy as np

from ..attention_rules import BACKENDS, check_attention
from ..checks import check_backend, check_heads, check_pages, check_reads, check_rows
from .kernel import QUERY_BLOCK

__all__ = ["BACKENDS", "validate_dynamic", "validate_static"]


def validate_static(
    q: Any,
    pages: Any,
    page_table: Any,
    prefix_lens: Any,
    query_lens: Any,
    *,
    layer: int,
    backend: str,
    window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    """Raises ValueError for shapes, dtypes and sizes that the backend cannot take."""
    check_backend(backend, BACKENDS, "prefill_attention")
    check_pages(pages, layer)
    if q.ndim != 3 or 0 in q.shape:
        raise ValueError(f"{q.shape=} must be (T, query heads, head size), none of them 0")
    check_heads(q, pages)
    check_rows(page_table, prefix_lens, query_lens)
    num_blocks = q.shape[0] // min(QUERY_BLOCK, q.shape[0]) + page_table.shape[0]
    check_attention(pages, page_table, num_blocks, 0, window, soft_cap, backend)


def validate_dynamic(pages: Any, page_table: Any, prefix_lens: Any, query_lens: Any, *, num_tokens: int) -> None:
    """Raises ValueError for concrete values that break a rule. For tests: it reads the values."""
    check_reads(pages, page_table, prefix_lens, query_lens)
    if (total := int(np.sum(query_lens))) > num_tokens:
        raise ValueError(f"query_lens sums to {total}, more than the {num_tokens} packed tokens")
