"""What a pool must be for every kernel that will work on it."""

from typing import Any

from .attention_rules import validate_attention_pool
from .paged_kv_write import validate_pool as validate_pool_for_write


def validate_pool(*, page_size: int, head_dim: int, dtype: Any, backend: str) -> None:
    """Raises ValueError for a pool that some kernel of the backend cannot take. For a model to ask before it makes one."""
    validate_pool_for_write(page_size=page_size, head_dim=head_dim, dtype=dtype, backend=backend)
    validate_attention_pool(page_size=page_size, head_dim=head_dim, dtype=dtype, backend=backend)
