"""What the workers with a block draft share: the block's forward, and the injection of the target's hidden states into the draft's KV."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.future_map import stash
from jspec.models.block_draft import BlockDraftModel
from jspec.models.target import TargetModel
from jspec.spec_workers.base import (
    DeviceSizes,
    DeviceState,
    PhaseOutput,
    SpecWorker,
    VerifyFn,
    VerifyKind,
    init_device,
    target_state,
)
from jspec.spec_workers.draft_cache import DraftCache
from jspec.spec_workers.featured import ExtendHandoff, Handoff, Start, check_pair, commit_recurrent, prefill
from jspec.spec_workers.forward import row_slots, verify_batch
from jspec.spec_workers.upload import DecodeInputs, ExtendInputs


class Carry(NamedTuple):
    """What crosses an iteration: nothing of the draft, which starts anew from the context."""

    bonus: Any  # i32[B]  the pending token: emitted, its KV not written


def block_worker(
    target: TargetModel, draft: BlockDraftModel, cache: DraftCache, verify_phase: VerifyFn, *, kind: str, **facts: Any
) -> SpecWorker:
    """A worker of a block draft, whose `verify_phase` ends with a `Handoff`; what is left to do after publish is the same for all.

    Args:
        cache: where the draft's KV lies.
        kind: of the draft that it runs.
        facts: the name, and what else differs of a `SpecWorker`.

    Raises:
        ValueError: the draft is of another kind, or of another target.
    """
    if draft.config.kind != kind:
        raise ValueError(f"the draft is of kind {draft.config.kind!r}, but this worker runs {kind!r}")
    check_pair(target, draft)
    layers, width = draft.facts.capture_layers, draft.config.num_drafts + 1

    def init(sizes: DeviceSizes) -> DeviceState:
        return init_device(
            sizes,
            **target_state(target, sizes),
            draft_kv_pages=draft.init_kv(cache.num_pages(sizes), sizes.page_size),
            carry=Carry(bonus=jax.ShapeDtypeStruct((), jnp.int32)),
        )

    def extend_phase(params, device: DeviceState, inputs: ExtendInputs, *, table_width: int) -> PhaseOutput:
        del table_width  # the upload brings the pages this program reads
        return prefill(target, params["target"], device, inputs, layers)

    def extend_commit(params, device: DeviceState, inputs: ExtendInputs, handoff: ExtendHandoff, *, table_width: int):
        del table_width, inputs  # the handoff has what was made of them
        batch = handoff.prompts.batch
        slots = cache.prefill_slots(handoff.prompts, device.page_size)
        written = (batch.rows, handoff.captured, batch.positions, slots, handoff.tokens)
        return _inject(draft, params["draft"], device, *written, handoff.prompts.forward_iter)

    def commit_phase(params, device: DeviceState, inputs: DecodeInputs, handoff: Handoff, *, table_width: int):
        device = commit_recurrent(target, device, handoff)
        rows, place = inputs.rows, jnp.arange(width, dtype=jnp.int32)
        positions = handoff.seq_lens[:, None] + place
        table = cache.table(rows, device.page_table[rows, :table_width], device.page_size)
        slots = row_slots(rows, positions, table, page_size=device.page_size)
        slots = jnp.where(place < handoff.accept_lens[:, None], slots, 0)  # of the accepted tokens, and of no others
        captured = handoff.captured.reshape(-1, *handoff.captured.shape[2:])
        bonus = jnp.take_along_axis(handoff.tokens, handoff.accept_lens[:, None] - 1, axis=1)[:, 0]
        written = (rows, captured, positions.reshape(-1), slots.reshape(-1), bonus)
        return _inject(draft, params["draft"], device, *written, inputs.forward_iter)

    return SpecWorker(
        **{
            "verify_width": width,
            "output_stride": width,
            "alloc_len": width,
            "num_non_draft_tokens": 1,
            "fixed_accept": None,
            "verify_kind": VerifyKind.CHAIN,
            "capture_layers": layers,
            "params": {"target": target.params, "draft": draft.params},
            "init": init,
            "extend_phase": extend_phase,
            "extend_commit": extend_commit,
            "verify_phase": verify_phase,
            "commit_phase": commit_phase,
            "depths": (draft.config.num_drafts,),
            "draft_kv_bytes_per_token": cache.bytes_per_token,
            "draft_kv_bytes_per_row": cache.bytes_per_row,
            **facts,
        }
    )


def _inject(
    draft: BlockDraftModel, params, device: DeviceState, rows, captured, positions, slots, bonus, forward_iter
) -> DeviceState:
    """Keys and values of the context, made of `captured: [T, M, H]`, to `slots: i32[T]`; stashes the carry of `rows: i32[B]`."""
    kv_pages = draft.inject(params, draft.context(params, captured), positions, slots, device.draft_kv_pages)
    future = stash(device.future, rows, Carry(bonus), forward_iter=forward_iter)
    return dataclasses.replace(device, draft_kv_pages=kv_pages, future=future)


def block_rows(draft: BlockDraftModel, cache: DraftCache, params, begun: Start, rows) -> tuple[Any, Start]:
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
        cache.table(rows, begun.page_table, device.page_size),
        page_size=device.page_size,
        depths=jnp.broadcast_to(jnp.arange(num_rows, dtype=jnp.int32), shape),
        ancestors=everyone,
    )
    hidden, kv_pages = draft.forward(params, batch.input_ids, batch, device.draft_kv_pages)
    begun = begun._replace(device=dataclasses.replace(device, draft_kv_pages=kv_pages))
    return hidden.reshape(*shape, -1), begun
