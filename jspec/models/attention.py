"""Which attention kernel a batch needs."""

from typing import Any

import jax
import jax.numpy as jnp

from jspec.pallas_kernels.prefill_attention import prefill_attention
from jspec.pallas_kernels.verify_attention import verify_attention
from jspec.state.batches import ForwardBatch


def attend(
    q: jax.Array,
    kv_pages: jax.Array,
    batch: ForwardBatch,
    *,
    layer: int,
    scale: float,
    backend: str,
    window: int | None = None,
) -> jax.Array:
    """Attention of a batch's `T` packed tokens, `q: [T, Hq, D]`, to the pages of their rows, in which their own KV is written.

    Returns: [T, Hq, D], or [B, W, Hq, D] where every row owns `W` tokens.
    """
    rows = (batch.page_table, batch.prefix_lens, batch.extend_lens)
    options: dict[str, Any] = {"layer": layer, "scale": scale, "backend": backend, "window": window}
    if batch.packed is not None:
        # Projections and MLPs run over the packed tokens; attention takes a row's queries in one tile, full or not.
        places = jnp.zeros((batch.rows.shape[0] * batch.query_len, *q.shape[1:]), q.dtype)
        q_of_rows = places.at[batch.packed].set(q, mode="drop").reshape(-1, batch.query_len, *q.shape[1:])
        out = verify_attention(q_of_rows, kv_pages, *rows, **options).reshape(places.shape)
        return out.at[batch.packed].get(mode="fill", fill_value=0)
    if batch.query_len is not None:
        q = q.reshape(-1, batch.query_len, *q.shape[1:])
        options |= {"ancestors": batch.ancestors, "query_start": batch.query_start}
        return verify_attention(q, kv_pages, *rows, **options)
    if not batch.num_tails:
        return prefill_attention(q, kv_pages, *rows, **options)
    # A tail's one query in a block made for prompts would cost as much as a block full of them.
    of = batch.num_tails
    prompts = prefill_attention(q[:-of], kv_pages, *(x[:-of] for x in rows), **options)
    tails = verify_attention(q[-of:, None], kv_pages, *(x[-of:] for x in rows), **options)
    return jnp.concatenate([prompts, tails[:, 0]])
