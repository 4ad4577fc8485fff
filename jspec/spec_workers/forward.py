"""Device views for the target's forwards."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from jspec.future_map import resolve
from jspec.models.recurrence import Accepted
from jspec.spec_workers.base import DeviceState
from jspec.spec_workers.upload import ExtendInputs, apply_extend
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


def packed_batch(rows, seq_lens, tokens, lens, page_table, *, page_size: int, num_tokens: int) -> ForwardBatch:
    """The first `lens` tokens of each row's chain of `W`, packed.

    Args:
        rows, seq_lens, tokens, page_table, page_size: as of `verify_batch`.
        lens: i32[B], 1 to `W`; 0 for padding rows.
        num_tokens: static, `T`, at least the sum of `lens`.
    """
    width = tokens.shape[1]
    ends = jnp.cumsum(lens)
    t = jnp.arange(num_tokens, dtype=jnp.int32)
    index = jnp.searchsorted(ends, t, side="right").astype(jnp.int32)
    packed = jnp.where(index < rows.shape[0], index * width + t - (ends - lens)[index], tokens.size)
    whole = verify_batch(rows, seq_lens, tokens, page_table, page_size=page_size)
    parts = (whole.input_ids, whole.positions, whole.slots)
    input_ids, positions, slots = (x.at[packed].get(mode="fill", fill_value=0) for x in parts)
    return dataclasses.replace(
        whole,
        input_ids=input_ids,
        positions=positions,
        slots=slots,
        extend_lens=lens,
        packed=packed,
        query_len=width,
        forward_mode=ForwardMode.TARGET_VERIFY,
    )


def chain_run(rows, seq_lens, accept_lens, page_table, *, width: int) -> Accepted:
    """What a verify of chains of `W` accepted, for `TargetModel.commit`: `accept_lens: i32[B]` tokens from the front of each."""
    path = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows.shape[0], width))
    return Accepted(rows, seq_lens, accept_lens, path, page_table)


def pad_axis(x, axis: int, size: int):
    """`x` with zeros behind, `size` long in this axis."""
    return jnp.pad(x, [(0, size - x.shape[axis] if i == axis else 0) for i in range(x.ndim)])


def row_slots(rows, positions, page_table, *, page_size: int):
    """`i32[B, W]` KV slots of `positions: i32[B, W]`; 0 (the sink) in padding rows."""
    b, width = positions.shape
    index = jnp.repeat(jnp.arange(b, dtype=jnp.int32), width, total_repeat_length=b * width)
    slots = _slots(page_table, index, positions.reshape(-1), page_size).reshape(b, width)
    return jnp.where((rows > 0)[:, None], slots, 0)


def prefill_batch(
    input_ids, rows, prefix_lens, extend_lens, page_table, *, page_size: int, num_tails: int = 0
) -> tuple[ForwardBatch, jnp.ndarray]:
    """A ragged batch, and `i32[B]` the index of each row's last token (some token or 0 for padding).

    Args:
        input_ids: i32[T], rows one after another, padding, and the token of each tail at the very end.
        rows: i32[B], 0 is padding; the last `num_tails` are tails.
        prefix_lens, extend_lens: i32[B], KV-ready positions and tokens of each row; 0 for padding.
        page_table: i32[B, P], wide enough for the rows' last positions.
        page_size: tokens a page holds.
        num_tails: static.
    """
    num_rows, num_packed = rows.shape[0] - num_tails, input_ids.shape[0] - num_tails
    ends = jnp.cumsum(extend_lens[:num_rows])
    t = jnp.arange(num_packed, dtype=jnp.int32)
    index = jnp.searchsorted(ends, t, side="right").astype(jnp.int32)
    real = index < num_rows
    index = jnp.minimum(index, num_rows - 1)
    offset = t - (ends - extend_lens[:num_rows])[index]
    tails = jnp.arange(num_tails, dtype=jnp.int32)
    index = jnp.concatenate([index, num_rows + tails])
    real = jnp.concatenate([real, extend_lens[num_rows:] > 0])
    positions = jnp.where(real, prefix_lens[index] + jnp.concatenate([offset, jnp.zeros_like(tails)]), 0)
    batch = ForwardBatch(
        input_ids=input_ids,
        positions=positions,
        slots=jnp.where(real, _slots(page_table, index, positions, page_size), 0),
        rows=rows,
        prefix_lens=prefix_lens,
        extend_lens=extend_lens,
        page_table=page_table,
        forward_mode=ForwardMode.MIXED if num_tails else ForwardMode.EXTEND,
        query_len=None,
        num_tails=num_tails,
    )
    last = jnp.concatenate([jnp.maximum(ends - 1, 0).astype(jnp.int32), num_packed + tails])
    return batch, last


class Prefill(NamedTuple):
    """An EXTEND or MIXED batch, its tails bound to where they start. `B` rows of prompts, then `C` of tails."""

    batch: ForwardBatch
    last: Any  # i32[B + C]  index of each row's last token
    new_seq_lens: Any  # i32[B + C]  frontier that is to be published
    next_ids: Any  # i32[B + C, L]  tokens of the prompt that follow; -1 where the next one is to be sampled
    fresh: Any  # bool[B + C]  a tail found what the launch before left; True elsewhere
    forward_iter: Any  # i32[]

    @property
    def goes_on(self):
        """`bool[B + C]` rows in the middle of their prompt: what is sampled for them means nothing."""
        return self.next_ids[:, 0] >= 0


def begin_extend(device: DeviceState, inputs: ExtendInputs) -> tuple[DeviceState, Prefill]:
    """Applies the upload, reads the relay for the tails, and writes the tokens to their pages.

    A tail's length is known only here: its last step may be unsettled, so the host would be wrong by what that accepts (SGLang rebinds its mixed tails at
    the entry of the forward for the same reason).
    """
    device, tails = apply_extend(device, inputs), inputs.tails
    seq_lens, carry, fresh = resolve(device.future, tails.rows, expected_iter=tails.expected_iter)
    real = tails.rows > 0
    rows = jnp.concatenate([inputs.rows, tails.rows])
    prefix_lens = jnp.concatenate([inputs.prefix_lens, jnp.where(real, seq_lens, 0)])
    extend_lens = jnp.concatenate([inputs.extend_lens, real.astype(jnp.int32)])
    batch, last = prefill_batch(
        jnp.concatenate([inputs.input_ids, jnp.where(real, carry.bonus, 0)]),
        rows,
        prefix_lens,
        extend_lens,
        device.page_table[rows],
        page_size=device.page_size,
        num_tails=tails.rows.shape[0],
    )
    ends = jnp.full((tails.rows.shape[0], inputs.next_ids.shape[1]), -1, jnp.int32)
    device = dataclasses.replace(device, token_pages=_put_tokens(device, batch.slots, batch.input_ids))
    return device, Prefill(
        batch=batch,
        last=last,
        new_seq_lens=prefix_lens + extend_lens,
        next_ids=jnp.concatenate([jnp.where((inputs.rows > 0)[:, None], inputs.next_ids, -1), ends]),
        fresh=jnp.concatenate([jnp.ones_like(inputs.rows, bool), fresh]),
        forward_iter=inputs.forward_iter,
    )


def _put_tokens(device: DeviceState, slots, tokens):
    """`token_pages` with `tokens: i32[T]` at `slots: i32[T]`; slot 0 is the sink, and stays 0."""
    page, offset = slots // device.page_size, slots % device.page_size
    return device.token_pages.at[page, offset].set(jnp.where(page > 0, tokens, 0))


def write_tokens(device: DeviceState, rows, positions, tokens, count) -> DeviceState:
    """Emitted tokens to the pages that hold their KV, or will.

    Args:
        rows: i32[B], 0 is padding.
        positions: i32[B], where the first one belongs.
        tokens: i32[B, O].
        count: i32[B], tokens that count; those that lie past the row's pages are left out: a pending token is written again by the step that follows it.
    """
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    places = positions[:, None] + place
    within = (place < count[:, None]) & (places < device.page_table.shape[1] * device.page_size)
    slots = row_slots(rows, jnp.where(within, places, 0), device.page_table[rows], page_size=device.page_size)
    slots = jnp.where(within, slots, 0)
    return dataclasses.replace(device, token_pages=_put_tokens(device, slots.reshape(-1), tokens.reshape(-1)))


def history(device: DeviceState, rows, *, table_width: int):
    """`i32[B, table_width * page_size]`: prompt and output of each row, as far as its pages go."""
    return device.token_pages[device.page_table[rows, :table_width]].reshape(rows.shape[0], -1)


def next_tokens(input_ids, batch: ForwardBatch, last, tokens):
    """`i32[T]`: the successor of each packed token in its row; `tokens: i32[B]` follow the rows' last ones, at `last: i32[B]`."""
    last = jnp.where(batch.extend_lens > 0, last, input_ids.shape[0])  # of padding rows: dropped
    return jnp.roll(input_ids, -1).at[last].set(tokens, mode="drop")
