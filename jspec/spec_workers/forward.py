"""Device views for the target's forwards."""

import jax.numpy as jnp

from jspec.spec_workers.upload import ExtendInputs
from jspec.state.batches import ForwardBatch, ForwardMode


def _slots(page_table, batch_index, positions, page_size):
    return page_table[batch_index, positions // page_size] * page_size + positions % page_size


def verify_batch(rows, seq_lens, tokens, page_table, *, page_size: int) -> ForwardBatch:
    """`W` consecutive tokens a row, from the frontier on.

    Args:
        rows: i32[B], 0 is padding.
        seq_lens: i32[B], frontier; the first token of a row sits there.
        tokens: i32[B, W].
        page_table: i32[B, P], wide enough for `seq_lens + W`; zero for padding rows.
        page_size: tokens a page holds.
    """
    b, width = tokens.shape
    positions = (seq_lens[:, None] + jnp.arange(width, dtype=jnp.int32)).reshape(-1)
    index = jnp.repeat(jnp.arange(b, dtype=jnp.int32), width, total_repeat_length=b * width)
    real = rows > 0
    return ForwardBatch(
        input_ids=tokens.reshape(-1),
        positions=positions,
        slots=jnp.where(real[index], _slots(page_table, index, positions, page_size), 0),
        rows=rows,
        prefix_lens=seq_lens,
        extend_lens=jnp.where(real, width, 0).astype(jnp.int32),
        page_table=page_table,
        forward_mode=ForwardMode.TARGET_VERIFY if width > 1 else ForwardMode.DECODE,
        query_len=width,
    )


def extend_batch(inputs: ExtendInputs, *, page_size: int) -> tuple[ForwardBatch, jnp.ndarray]:
    """The packed tokens of an EXTEND batch, and `i32[B]` the index of each row's last token (0 for padding)."""
    ends = jnp.cumsum(inputs.extend_lens)
    t = jnp.arange(inputs.input_ids.shape[0], dtype=jnp.int32)
    index = jnp.searchsorted(ends, t, side="right").astype(jnp.int32)
    real = index < inputs.rows.shape[0]
    index = jnp.minimum(index, inputs.rows.shape[0] - 1)
    positions = jnp.where(real, inputs.prefix_lens[index] + t - (ends - inputs.extend_lens)[index], 0)
    batch = ForwardBatch(
        input_ids=inputs.input_ids,
        positions=positions,
        slots=jnp.where(real, _slots(inputs.page_table, index, positions, page_size), 0),
        rows=inputs.rows,
        prefix_lens=inputs.prefix_lens,
        extend_lens=inputs.extend_lens,
        page_table=inputs.page_table,
        forward_mode=ForwardMode.EXTEND,
        query_len=None,
    )
    return batch, jnp.maximum(ends - 1, 0).astype(jnp.int32)


def token_rows(batch: ForwardBatch) -> jnp.ndarray:
    """`i32[T]` pool row of each packed token of a ragged batch; 0 for padding tokens."""
    ends = jnp.cumsum(batch.extend_lens)
    index = jnp.searchsorted(ends, jnp.arange(batch.positions.shape[0], dtype=jnp.int32), side="right")
    return jnp.where(batch.slots > 0, batch.rows[jnp.minimum(index, batch.rows.shape[0] - 1)], 0)
