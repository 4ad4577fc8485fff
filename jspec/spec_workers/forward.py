"""Device views for the target's forwards."""

import jax.numpy as jnp

from jspec.spec_workers.upload import ExtendInputs
from jspec.state.batches import ForwardBatch, ForwardMode


def _slots(page_table, batch_index, positions, page_size):
    return page_table[batch_index, positions // page_size] * page_size + positions % page_size


def verify_batch(
    rows, seq_lens, tokens, page_table, *, page_size: int, depths=None, ancestors=None, start: int = 0
) -> ForwardBatch:
    """`W` tokens a row, from the frontier on: a chain, or a tree's nodes `start`, `start + 1`, ...

    Args:
        rows: i32[B], 0 is padding.
        seq_lens: i32[B], frontier; the first token of a chain, the root of a tree, sits there.
        tokens: i32[B, W].
        page_table: i32[B, P], wide enough for `seq_lens + start + W`; zero for padding rows.
        page_size: tokens a page holds.
        depths: i32[B, W] or None, position of a tree's nodes past the frontier. Their KV goes to consecutive slots all the same.
        ancestors: u32[B, W] or None, see `verify_attention`.
        start: static, nodes of the tree that are written already.
    """
    b, width = tokens.shape
    places = seq_lens[:, None] + start + jnp.arange(width, dtype=jnp.int32)
    index = jnp.repeat(jnp.arange(b, dtype=jnp.int32), width, total_repeat_length=b * width)
    real = rows > 0
    positions = places if depths is None else seq_lens[:, None] + depths
    return ForwardBatch(
        input_ids=tokens.reshape(-1),
        positions=positions.reshape(-1),
        slots=jnp.where(real[index], _slots(page_table, index, places.reshape(-1), page_size), 0),
        rows=rows,
        prefix_lens=seq_lens,
        extend_lens=jnp.where(real, width, 0).astype(jnp.int32),
        page_table=page_table,
        ancestors=ancestors,
        forward_mode=ForwardMode.TARGET_VERIFY if width > 1 else ForwardMode.DECODE,
        query_len=width,
        query_start=start,
    )


def row_slots(rows, positions, page_table, *, page_size: int):
    """`i32[B, W]` KV slots of `positions: i32[B, W]`; 0 (the sink) in padding rows."""
    b, width = positions.shape
    index = jnp.repeat(jnp.arange(b, dtype=jnp.int32), width, total_repeat_length=b * width)
    slots = _slots(page_table, index, positions.reshape(-1), page_size).reshape(b, width)
    return jnp.where((rows > 0)[:, None], slots, 0)


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


def next_tokens(input_ids, batch: ForwardBatch, last, tokens):
    """`i32[T]`: the successor of each packed token in its row; `tokens: i32[B]` follow the rows' last ones, at `last: i32[B]`."""
    last = jnp.where(batch.extend_lens > 0, last, input_ids.shape[0])  # of padding rows: dropped
    return jnp.roll(input_ids, -1).at[last].set(tokens, mode="drop")
