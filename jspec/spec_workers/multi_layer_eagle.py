"""Multi-layer EAGLE: one small module for each position ahead, all of which draft right after the verify."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.future_map import stash
from jspec.models.draft import DraftModel
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
from jspec.spec_workers.draft_sampling import best_tokens, draw_tokens
from jspec.spec_workers.featured import (
    ExtendHandoff,
    Handoff,
    check_acceptance,
    check_pair,
    prefill,
    start,
    verify_chain,
    widen,
)
from jspec.spec_workers.forward import next_tokens, verify_batch
from jspec.spec_workers.upload import DecodeInputs, ExtendInputs


class Carry(NamedTuple):
    """What crosses an iteration: the drafts themselves, no hidden state. `S` modules."""

    bonus: Any  # i32[B]  the pending token: emitted, its KV not written
    drafts: Any  # i32[B, S]  tokens after it, in the target's ids
    draft_probs: Any  # f32[B, S, Vd]  what each was drawn from; () unless drafts are drawn


def multi_layer_eagle(
    target: TargetModel,
    draft: DraftModel,
    *,
    name: str = "multi-layer-eagle",
    num_steps: int | None = None,
    rejection_sampling: bool = False,
    lossy_threshold: float = 1.0,
) -> SpecWorker:
    """A worker that has its drafts ready when an iteration begins.

        resolve -> verify -> accept -> PUBLISH -> draft extend of module 0, 1, ..., S - 1, stash

    Module `s` reads, beside the feature of token `j`, the embedding of token `j + 1 + s`, and predicts token `j + 2 + s`. At the end of the row these
    tokens are the drafts of the modules before it. Its KV of the last `s` rows has therefore seen drafts that may be refused later, and stays as it is:
    that can cost acceptance near the frontier, and nothing else (as in SGLang, without its boundary fix). For the same reason only prompts are left to the
    prefix cache: a page of emitted tokens would bring its next reader drafts that a prefill would not have seen.

    Args:
        target: the model.
        draft: its modules, of kind "multi-layer". A chained draft feeds each module the hidden state of the one before; otherwise all read the target's.
        name: how it is listed.
        num_steps: `S`, modules to use, from the front. None: all.
        rejection_sampling, lossy_threshold: as in `eagle`.

    Raises:
        ValueError: a draft that does not fit.

    Source: multi-token prediction (arXiv 2404.19737; DeepSeek-V3, arXiv 2412.19437), run as SGLang's multi-layer EAGLE worker does.
    """
    check_pair(target, draft)
    check_acceptance(rejection_sampling=rejection_sampling, lossy_threshold=lossy_threshold)
    steps = draft.facts.num_modules if num_steps is None else num_steps
    if not 1 <= steps <= draft.facts.num_modules:
        raise ValueError(
            f"num_steps={num_steps} must lie in [1, {draft.facts.num_modules}]: the draft has a module for each step"
        )

    def init(sizes: DeviceSizes) -> DeviceState:
        probs = jax.ShapeDtypeStruct((steps, draft.facts.draft_vocab_size), jnp.float32)
        return init_device(
            sizes,
            **target_state(target, sizes),
            draft_kv_pages=draft.init_kv(sizes.num_pages, sizes.page_size),
            carry=Carry(
                bonus=jax.ShapeDtypeStruct((), jnp.int32),
                drafts=jax.ShapeDtypeStruct((steps,), jnp.int32),
                draft_probs=probs if rejection_sampling else (),
            ),
        )

    def run_modules(
        params, device: DeviceState, batch, ids, feature, last, bonus, new_seq_lens, *, forward_iter, next_ids=None
    ) -> DeviceState:
        """Every module over the same rows, and the stash.

        Args:
            ids: i32[T], the token after each row's own.
            feature: [T, H], the target's.
            last: i32[B], index of each row's newest token.
            next_ids: i32[B, S] or None, tokens known to follow a row; -1 where they are not.
        """
        kv_pages, hidden, drafts, probs = device.draft_kv_pages, feature, [], []
        for module in range(steps):
            reads = hidden if draft.facts.chained else feature
            hidden, kv_pages = draft.forward(params["draft"], ids, reads, batch, kv_pages, module=module)
            logits = draft.logits(params["draft"], hidden[last], module=module)
            if rejection_sampling:
                chosen, drawn_from = draw_tokens(device.sampling, batch.rows, logits, new_seq_lens + 1 + module)
                probs.append(drawn_from)
            else:
                chosen = best_tokens(logits, 1, scored=False)[1][:, 0]
            drafts.append(draft.token_ids(params["draft"], chosen))
            following = drafts[-1]
            if next_ids is not None and module + 1 < steps:
                following = jnp.where(next_ids[:, module + 1] >= 0, next_ids[:, module + 1], following)
            ids = next_tokens(ids, batch, last, following)
        carry = Carry(bonus, jnp.stack(drafts, axis=1), jnp.stack(probs, axis=1) if probs else ())
        future = stash(device.future, batch.rows, carry, forward_iter=forward_iter)
        return dataclasses.replace(device, draft_kv_pages=kv_pages, future=future)

    def extend_phase(params, device: DeviceState, inputs: ExtendInputs, *, table_width: int) -> PhaseOutput:
        del table_width  # the upload brings the pages this program reads
        return prefill(target, params["target"], device, inputs, draft.facts.capture_layers)

    def extend_commit(params, device: DeviceState, inputs: ExtendInputs, handoff: ExtendHandoff, *, table_width: int):
        del table_width, inputs  # the handoff has what was made of them
        prompts, tokens, *features = handoff
        batch, last = prompts.batch, prompts.last
        feature = draft.feature(params["draft"], *features)
        ids = next_tokens(batch.input_ids, batch, last, tokens)
        known = {"forward_iter": prompts.forward_iter, "next_ids": prompts.next_ids}
        return run_modules(params, device, batch, ids, feature, last, tokens, prompts.new_seq_lens, **known)

    def verify_phase(params, device: DeviceState, inputs: DecodeInputs, *, table_width: int, depth: int) -> PhaseOutput:
        begun = start(device, inputs, table_width=table_width, depth=depth, context_len=draft.facts.context_len)
        candidates = jnp.concatenate([begun.carry.bonus[:, None], begun.carry.drafts], axis=1)
        probs = (
            functools.partial(widen, draft, params["draft"], begun.carry.draft_probs) if rejection_sampling else None
        )
        return verify_chain(
            target,
            params["target"],
            begun,
            inputs,
            candidates,
            probs,
            layers=draft.facts.capture_layers,
            output_stride=steps + 1,
            lossy_threshold=lossy_threshold,
        )

    def commit_phase(params, device: DeviceState, inputs: DecodeInputs, handoff: Handoff, *, table_width: int):
        rows, tokens, accept_lens = inputs.rows, handoff.tokens, handoff.accept_lens
        page_table = device.page_table[rows, :table_width]
        batch = verify_batch(rows, handoff.seq_lens, tokens, page_table, page_size=device.page_size)
        features = (x.reshape(tokens.size, *x.shape[2:]) for x in (handoff.captured, handoff.hidden))
        feature = draft.feature(params["draft"], *features)
        last = jnp.arange(rows.shape[0], dtype=jnp.int32) * tokens.shape[1] + accept_lens - 1
        ids, new_seq_lens = tokens.reshape(-1), handoff.seq_lens + accept_lens
        return run_modules(
            params, device, batch, ids, feature, last, ids[last], new_seq_lens, forward_iter=inputs.forward_iter
        )

    return SpecWorker(
        name=name,
        verify_width=steps + 1,
        output_stride=steps + 1,
        alloc_len=steps + 1,
        num_non_draft_tokens=1,
        fixed_accept=None,
        verify_kind=VerifyKind.CHAIN,
        capture_layers=draft.facts.capture_layers,
        params={"target": target.params, "draft": draft.params},
        init=init,
        extend_phase=extend_phase,
        extend_commit=extend_commit,
        verify_phase=verify_phase,
        commit_phase=commit_phase,
        depths=(steps,),
        draft_kv_bytes_per_token=draft.facts.kv_bytes_per_token,
        lookahead=steps,
        caches_output=False,
        lossy=lossy_threshold < 1,
    )
