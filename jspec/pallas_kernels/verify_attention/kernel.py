"""Attention of a few query tokens a row over pages, as a Pallas TPU kernel."""

import jax

from ..blocked_attention_kernel import blocked_attention_kernel
from .reference import row_blocks


def verify_attention_kernel(
    q: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    prefix_lens: jax.Array,
    query_lens: jax.Array,
    *,
    ancestors: jax.Array | None = None,
    query_start: int = 0,
    **options,
) -> jax.Array:
    """See `verify_attention`; `options` go to `blocked_attention_kernel`. One block of queries a row."""
    blocks = row_blocks(prefix_lens, query_lens, q.shape[1], ancestors, query_start)
    return blocked_attention_kernel(
        q, pages, page_table, blocks, query_start=query_start, name="verify_attention", **options
    )
