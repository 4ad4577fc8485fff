"""FROZEN_KV_MTP: an assistant that has no KV, and asks the target's."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.future_map import stash
from jspec.models.frozen_kv_draft import FrozenKVDraft
from jspec.models.parallel import num_devices
from jspec.models.target import TargetModel
from jspec.spec_workers.base import (
    DeviceSizes,
    DeviceState,
    PhaseOutput,
    SpecWorker,
    VerifyKind,
    init_device,
    target_state,
)
from jspec.spec_workers.draft_sampling import best_tokens
from jspec.spec_workers.eagle_sizes import EagleSizes
from jspec.spec_workers.featured import Start, check_pair, prefill, start, verify_chain, verify_tree
from jspec.spec_workers.tree import first_level, next_level, prune
from jspec.spec_workers.upload import DecodeInputs, ExtendInputs
from jspec.state.batches import ForwardBatch, ForwardMode


class Carry(NamedTuple):
    """What crosses an iteration."""

    bonus: Any  # i32[B]  the pending token: emitted, its KV not written
    hidden: Any  # [B, H]  the target's hidden state at the last token that has KV, after its final norm


def frozen_kv_mtp(
    target: TargetModel,
    draft: FrozenKVDraft,
    *,
    name: str = "frozen-kv-mtp",
    sizes: EagleSizes | None = None,
    lossy_threshold: float = 1.0,
) -> SpecWorker:
    """A worker whose draft runs `num_steps` times before each verify, over the pending token and then over its own hidden states.

        resolve -> draft -> verify -> accept -> (tree) move KV -> PUBLISH -> select, stash

    Every step asks its questions from one and the same place, the last token that has KV: it reads the target's KV up to there, and nothing that is tentative.
    What is left to do after publish is to pick the hidden state of the last accepted token, which the same program does.

    Near the end of the draft's context a row drafts nothing and decodes on.

    Args:
        target: the model; not shared by several devices.
        draft: its assistant.
        name: how it is listed.
        sizes: `num_steps`, `topk` and `num_draft_tokens`, as of `eagle`.
        lossy_threshold: as of `eagle`.

    Raises:
        ValueError: sizes or a draft that do not fit.

    Source: the assistant of Gemma 4 and SGLang's FROZEN_KV_MTP worker of Spec V2.
    """
    shape = sizes or EagleSizes()
    _check(target, draft, shape)
    topk, num_steps = shape.topk, shape.num_steps
    output_stride = min(num_steps, shape.verify_width - 1) + 1
    pool_layers = tuple(target.facts.kv_layers.index(layer) for layer in draft.config.kv_layers)

    def init(sizes: DeviceSizes) -> DeviceState:
        embedding = target.embedding(target.params)
        return init_device(
            sizes,
            **target_state(target, sizes),
            carry=Carry(
                bonus=jax.ShapeDtypeStruct((), jnp.int32),
                hidden=jax.ShapeDtypeStruct((target.facts.hidden_size,), embedding.dtype),
            ),
        )

    def seed(out: PhaseOutput, rows, bonus, hidden, forward_iter) -> PhaseOutput:
        """Stashes what the next step starts from."""
        future = stash(out.device.future, rows, Carry(bonus, hidden), forward_iter=forward_iter)
        return out._replace(device=dataclasses.replace(out.device, future=future), handoff=())

    def extend_phase(params, device: DeviceState, inputs: ExtendInputs, *, table_width: int) -> PhaseOutput:
        del table_width  # the upload brings the pages this program reads
        out = prefill(target, params["target"], device, inputs, ())
        prompts, tokens, _, hidden = out.handoff
        return seed(out, prompts.batch.rows, tokens, hidden[prompts.last], prompts.forward_iter)

    def ask(params, begun: Start, rows, tokens, hidden):
        """One step of the draft, `N` nodes a row: `tokens: i32[B, N]`, `hidden: [B, N, H]`. Returns probabilities and draft ids `[B, N, K]`, and hidden states."""
        batch = frozen_batch(rows, begun.seq_lens, begun.page_table, width=tokens.shape[1])
        flat = (tokens.reshape(-1), hidden.reshape(tokens.size, -1))
        x, after = draft.forward(params["draft"], *flat, batch, begun.device.kv_pages, pool_layers=pool_layers)
        logits = draft.logits(params["draft"], x).reshape(*tokens.shape, -1)
        return (*best_tokens(logits, topk, scored=topk > 1), after.reshape(hidden.shape))

    def verify_phase(params, device: DeviceState, inputs: DecodeInputs, *, table_width: int, depth: int) -> PhaseOutput:
        begun, rows = (
            start(device, inputs, table_width=table_width, depth=depth, context_len=draft.facts.context_len),
            inputs.rows,
        )
        tokens, hidden = begun.carry.bonus[:, None], begun.carry.hidden[:, None]
        given: dict[str, Any] = {"layers": (), "output_stride": output_stride, "lossy_threshold": lossy_threshold}
        if topk == 1:
            chain = [tokens]
            for _ in range(num_steps):
                _, ids, hidden = ask(params, begun, rows, chain[-1], hidden)
                chain.append(draft.token_ids(params["draft"], ids[..., 0]))
            candidates = jnp.concatenate(chain, axis=1)
            out = verify_chain(target, params["target"], begun, inputs, candidates, None, **given)
        else:
            probs, ids, hidden = ask(params, begun, rows, tokens, hidden)
            beam, candidates = first_level(probs[:, 0], ids[:, 0])
            hidden = jnp.repeat(hidden, topk, axis=1)
            for _ in range(num_steps - 1):
                above = jnp.take_along_axis(hidden, beam.parents[..., None], axis=1)
                probs, ids, hidden = ask(params, begun, rows, draft.token_ids(params["draft"], beam.tokens), above)
                beam, candidates = next_level(beam, candidates, probs, ids)
            candidates = candidates._replace(tokens=draft.token_ids(params["draft"], candidates.tokens))
            tree = prune(candidates, begun.carry.bonus, shape.verify_width)
            out = verify_tree(target, params["target"], begun, inputs, tree, **given)
        last = out.handoff.accept_lens[:, None] - 1
        bonus = jnp.take_along_axis(out.handoff.tokens, last, axis=1)[:, 0]
        hidden = jnp.take_along_axis(out.handoff.hidden, last[..., None], axis=1)[:, 0]
        return seed(out, rows, bonus, hidden, inputs.forward_iter)

    return SpecWorker(
        name=name,
        verify_width=shape.verify_width,
        output_stride=output_stride,
        alloc_len=shape.verify_width,
        num_non_draft_tokens=1,
        fixed_accept=None,
        verify_kind=VerifyKind.CHAIN if topk == 1 else VerifyKind.TREE,
        capture_layers=(),
        params={"target": target.params, "draft": draft.params},
        init=init,
        extend_phase=extend_phase,
        extend_commit=None,
        verify_phase=verify_phase,
        commit_phase=None,
        depths=(num_steps,),
        lossy=lossy_threshold < 1,
    )


def frozen_batch(rows, seq_lens, page_table, *, width: int) -> ForwardBatch:
    """`width` queries a row, all at the last position that has KV: each sees all that is committed, and no slot behind it is read.

    The row's last `width` tokens take the place of a verify's nodes, and every query sees them all. A row of fewer tokens has so many queries; what is
    proposed by the others sees nothing.
    """
    b = rows.shape[0]
    nodes = jnp.where(rows > 0, jnp.minimum(seq_lens, width), 0).astype(jnp.int32)
    nobody = jnp.zeros(b * width, jnp.int32)
    everything = jnp.uint32(0xFFFFFFFF) >> (32 - jnp.maximum(nodes, 1)).astype(jnp.uint32)
    return ForwardBatch(
        input_ids=nobody,
        positions=jnp.repeat(jnp.maximum(seq_lens - 1, 0), width, total_repeat_length=b * width),
        slots=nobody,  # nothing is written
        rows=rows,
        prefix_lens=seq_lens - nodes,
        extend_lens=nodes,
        page_table=page_table,
        ancestors=jnp.broadcast_to(everything[:, None], (b, width)) if width > 1 else None,
        forward_mode=ForwardMode.TARGET_VERIFY if width > 1 else ForwardMode.DECODE,
        query_len=width,
    )


def _check(target: TargetModel, draft: FrozenKVDraft, shape: EagleSizes) -> None:
    check_pair(target, draft)
    if num_devices(target.mesh) > 1:
        raise ValueError("frozen-kv-mtp reads the target's KV whole: build the target without tensor_parallel")
    for field in ("num_kv_heads", "head_dim"):
        ours, theirs = getattr(draft.config, field), getattr(target.facts, field)
        if ours != theirs:
            raise ValueError(
                f"the draft's {field}={ours}, the target's KV has {theirs}: choose a draft made for this target"
            )
    if not set(draft.config.kv_layers) <= set(target.facts.kv_layers):
        raise ValueError(
            f"kv_layers={draft.config.kv_layers} must be among {target.facts.kv_layers}, the target's layers that have KV: choose a draft made for it"
        )
    if len(shape.depths) > 1:
        raise ValueError(f"depths={shape.depths} must be left out: the draft has one depth")
    if shape.min_draft_prob:
        raise ValueError(f"min_draft_prob={shape.min_draft_prob} must be 0: a chain always has its full depth")
    if shape.topk > draft.facts.draft_vocab_size:
        raise ValueError(
            f"topk={shape.topk} exceeds the {draft.facts.draft_vocab_size} tokens that the draft can propose"
        )
