"""What `kv_move` refuses, and why."""

from typing import Any

import numpy as np

from ..checks import check_array, check_backend, check_pages

BACKENDS = ("xla",)


def validate_static(pages: Any, source: Any, target: Any, *, backend: str) -> None:
    """Raises ValueError for shapes and dtypes that make no sense."""
    check_backend(backend, BACKENDS, "kv_move")
    check_pages(pages, 0)
    if source.ndim != 1:
        raise ValueError(f"{source.shape=} must be (T,): one slot a token")
    for name, slots in (("source", source), ("target", target)):
        check_array(name, slots, source.shape, np.int32, "one slot a token")


def validate_dynamic(pages: Any, source: Any, target: Any) -> None:
    """Raises ValueError for concrete values that break a rule. For tests: it reads the values."""
    page_size, num_slots = pages.shape[3], pages.shape[1] * pages.shape[3]
    source, target = np.asarray(source), np.asarray(target)
    for name, slots in (("source", source), ("target", target)):
        if ((slots < 0) | (slots >= num_slots)).any():
            raise ValueError(f"{name} holds a slot outside [0, {num_slots})")
    written = target[(target >= page_size) & (target != source)]
    if len(np.unique(written)) != len(written):
        raise ValueError("target holds a slot twice: the result would depend on the order")
