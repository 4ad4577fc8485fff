"""What `prefill_attention` refuses, and why."""

from typing import Any

import numpy as np

from ..checks import check_backend, check_heads, check_pages, check_reads, check_rows

BACKENDS = ("xla",)


def validate_static(
    q: Any, pages: Any, page_table: Any, prefix_lens: Any, query_lens: Any, *, layer: int, backend: str
) -> None:
    """Raises ValueError for shapes, dtypes and sizes that the backend cannot take."""
    check_backend(backend, BACKENDS, "prefill_attention")
    check_pages(pages, layer)
    if q.ndim != 3 or 0 in q.shape:
        raise ValueError(f"{q.shape=} must be (T, query heads, head size), none of them 0")
    check_heads(q, pages)
    check_rows(page_table, prefix_lens, query_lens)


def validate_dynamic(pages: Any, page_table: Any, prefix_lens: Any, query_lens: Any, *, num_tokens: int) -> None:
    """Raises ValueError for concrete values that break a rule. For tests: it reads the values."""
    check_reads(pages, page_table, prefix_lens, query_lens)
    if (total := int(np.sum(query_lens))) > num_tokens:
        raise ValueError(f"query_lens sums to {total}, more than the {num_tokens} packed tokens")
