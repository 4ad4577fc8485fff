"""What `kv_move` refuses, and why."""

from typing import Any

import numpy as np
from jax.experimental.pallas import tpu as pltpu

from ..checks import check_array, check_backend, check_pages
from ..paged_kv_write import validate_pool
from .kernel import vmem_bytes

BACKENDS = ("xla", "pallas", "pallas_interpret")

MAX_VMEM_BYTES = 48 << 20
"""In the interpreter; on a chip three quarters of its VMEM."""


def validate_static(pages: Any, source: Any, target: Any, *, backend: str) -> None:
    """Raises ValueError for shapes and dtypes that make no sense."""
    check_backend(backend, BACKENDS, "kv_move")
    check_pages(pages, 0)
    if source.ndim != 1:
        raise ValueError(f"{source.shape=} must be (T,): one slot a token")
    for name, slots in (("source", source), ("target", target)):
        check_array(name, slots, source.shape, np.int32, "one slot a token")
    _, _, _, page_size, width = pages.shape
    validate_pool(page_size=page_size, head_dim=width // 2, dtype=pages.dtype, backend=backend)
    if backend == "xla":
        return
    limit = MAX_VMEM_BYTES if backend == "pallas_interpret" else pltpu.get_tpu_info().vmem_capacity_bytes // 4 * 3
    if (needed := vmem_bytes(pages, source.shape[0])) > limit:
        raise ValueError(
            f"{source.shape=} takes {needed} bytes of VMEM, at most {limit} for {backend=}: move fewer tokens at a time"
        )


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
