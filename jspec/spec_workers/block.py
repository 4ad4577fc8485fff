"""What the workers with a block draft share: the block's forward, and the injection of the target's hidden states into the draft's KV."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jspec.future_map import stash
from jspec.models.block_draft import BlockDraftModel
from jspec.models.target import TargetModel
from jspec.spec_workers.base import DeviceSizes, DeviceState, init_device
from jspec.spec_workers.featured import ExtendHandoff, Handoff, Start
from jspec.spec_workers.forward import row_slots, verify_batch
from jspec.spec_workers.upload import DecodeInputs


def init_block(target: TargetModel, draft: BlockDraftModel, sizes: DeviceSizes, carry: Any) -> DeviceState:
    """An idle device with a pool of the draft's beside the target's."""
    return init_device(
        sizes,
        kv_pages=target.init_kv(sizes.num_pages, sizes.page_size),
        draft_kv_pages=draft.init_kv(sizes.num_pages, sizes.page_size),
        carry=carry,
    )


def block_rows(draft: BlockDraftModel, params, begun: Start, rows) -> tuple[Any, Start]:
    """Runs a block of the pending token and masks for every row of the batch.

    Returns: the block's hidden states `[B, N, H]`, and `begun` with the draft's pool that holds the block's own KV from the frontier on.
    """
    device, num_rows = begun.device, draft.config.num_rows
    shape = (rows.shape[0], num_rows)
    ids = jnp.full(shape, draft.config.mask_token_id, jnp.int32).at[:, 0].set(begun.carry.bonus)
    everyone = jnp.full(shape, (1 << num_rows) - 1, jnp.uint32)  # a row sees its whole block, those behind it too
    batch = verify_batch(
        rows,
        begun.seq_lens,
        ids,
        begun.page_table,
        page_size=device.page_size,
        depths=jnp.broadcast_to(jnp.arange(num_rows, dtype=jnp.int32), shape),
        ancestors=everyone,
    )
    hidden, kv_pages = draft.forward(params, batch.input_ids, batch, device.draft_kv_pages)
    begun = begun._replace(device=dataclasses.replace(device, draft_kv_pages=kv_pages))
    return hidden.reshape(*shape, -1), begun


def inject_prompts(
    draft: BlockDraftModel, params, device: DeviceState, handoff: ExtendHandoff, carry: Any
) -> DeviceState:
    """The context's keys and values of prompts, and of the pending token of tails; stashes `carry`."""
    batch = handoff.prompts.batch
    context = draft.context(params, handoff.captured)
    kv_pages = draft.inject(params, context, batch.positions, batch.slots, device.draft_kv_pages)
    future = stash(device.future, batch.rows, carry, forward_iter=handoff.prompts.forward_iter)
    return dataclasses.replace(device, draft_kv_pages=kv_pages, future=future)


def inject_run(
    draft: BlockDraftModel,
    params,
    device: DeviceState,
    inputs: DecodeInputs,
    handoff: Handoff,
    carry: Any,
    *,
    table_width: int,
) -> DeviceState:
    """The context's keys and values of the accepted tokens, `accept_lens` of each row, and of no others; stashes `carry`."""
    rows, width = inputs.rows, handoff.tokens.shape[1]
    place = jnp.arange(width, dtype=jnp.int32)
    positions = handoff.seq_lens[:, None] + place
    slots = row_slots(rows, positions, device.page_table[rows, :table_width], page_size=device.page_size)
    slots = jnp.where(place < handoff.accept_lens[:, None], slots, 0)
    context = draft.context(params, handoff.captured.reshape(-1, *handoff.captured.shape[2:]))
    kv_pages = draft.inject(params, context, positions.reshape(-1), slots.reshape(-1), device.draft_kv_pages)
    future = stash(device.future, rows, carry, forward_iter=inputs.forward_iter)
    return dataclasses.replace(device, draft_kv_pages=kv_pages, future=future)
