"""EAGLE: a small draft model that reads the target's features, and drafts a chain or a tree."""

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
from jspec.spec_workers.eagle_sizes import EagleSizes
from jspec.spec_workers.featured import (
    ExtendHandoff,
    Handoff,
    Start,
    check_acceptance,
    check_pair,
    prefill,
    start,
    verify_chain,
    verify_tree,
    widen,
)
from jspec.spec_workers.forward import next_tokens, verify_batch
from jspec.spec_workers.run_if import run_if
from jspec.spec_workers.tree import Tree, first_level, next_level, prune
from jspec.spec_workers.upload import DecodeInputs, ExtendInputs


class Carry(NamedTuple):
    """What crosses an iteration, left by the draft extend."""

    bonus: Any  # i32[B]  the pending token: emitted, its KV not written
    topk_probs: Any  # f32[B, K]  the draft's probabilities of the token after it, descending; 1 in a chain
    topk_ids: Any  # i32[B, K]  draft ids
    hidden: Any  # [B, H]  the draft's hidden state at its last row
    draft_probs: Any  # f32[B, Vd]  what `topk_ids[:, 0]` was drawn from; () unless drafts are drawn


def eagle(
    target: TargetModel,
    draft: DraftModel,
    *,
    name: str = "eagle3",
    sizes: EagleSizes | None = None,
    rejection_sampling: bool = False,
    lossy_threshold: float = 1.0,
) -> SpecWorker:
    """A worker whose draft runs `num_steps - 1` times before each verify, and once after it, over the accepted tokens.

        resolve -> draft -> verify -> accept -> (tree) move KV -> PUBLISH -> draft extend, stash

    Step 0 of the draft happened in the draft extend of the iteration before. The draft's KV lies in a pool of its own, at the target's page ids. A tree is
    written to consecutive slots past the frontier whatever the page size, so no prefix page is duplicated.

    Near the end of the draft's context a row drafts nothing and decodes on.

    Args:
        target: the model.
        draft: its draft, of kind "eagle3" or "eagle".
        name: how it is listed.
        sizes: `num_steps`, `topk`, `num_draft_tokens`, and the depths a chain may run at.
        rejection_sampling: rows that sample draw their drafts from the draft's own distribution and accept them by `accept_rejection`, which accepts
            more often than the default where target and draft are both uncertain; the output is then another draw than plain decoding's with the same
            seed. Chains only.
        lossy_threshold: below 1, drafts that the target finds this likely are accepted unseen where a row samples: see `prefer_drafts`.

    Raises:
        ValueError: sizes or a draft that do not fit.

    Source: EAGLE (arXiv 2401.15077), EAGLE-2 (2406.16858), EAGLE-3 (2503.01840); SGLang's EAGLE worker of Spec V2.
    """
    shape = sizes or EagleSizes()
    _check(target, draft, shape, rejection_sampling)
    check_acceptance(rejection_sampling=rejection_sampling, lossy_threshold=lossy_threshold)
    topk, num_steps, layers = shape.topk, shape.num_steps, draft.facts.capture_layers
    min_prob = shape.min_draft_prob
    output_stride = min(num_steps, shape.verify_width - 1) + 1

    def init(sizes: DeviceSizes) -> DeviceState:
        embedding = target.embedding(target.params)
        drawn_from = jax.ShapeDtypeStruct((draft.facts.draft_vocab_size,), jnp.float32)
        return init_device(
            sizes,
            **target_state(target, sizes),
            draft_kv_pages=draft.init_kv(sizes.num_pages, sizes.page_size),
            carry=Carry(
                bonus=jax.ShapeDtypeStruct((), jnp.int32),
                topk_probs=jax.ShapeDtypeStruct((topk,), jnp.float32),
                topk_ids=jax.ShapeDtypeStruct((topk,), jnp.int32),
                hidden=jax.ShapeDtypeStruct((target.facts.hidden_size,), embedding.dtype),
                draft_probs=drawn_from if rejection_sampling else (),
            ),
        )

    def propose(params, device: DeviceState, rows, hidden, positions):
        """(probabilities, draft ids, distribution) of the tokens that will sit at `positions: i32[B]`, after `hidden: [B, H]`."""
        logits = draft.logits(params["draft"], hidden)
        if not rejection_sampling:
            return (*best_tokens(logits, topk, scored=topk > 1 or min_prob > 0), ())
        ids, probs = draw_tokens(device.sampling, rows, logits, positions)
        return jnp.ones((*ids.shape, 1), jnp.float32), ids[:, None], probs

    def stash_drafts(params, device: DeviceState, rows, forward_iter, bonus, hidden, new_seq_lens) -> DeviceState:
        probs, ids, drawn_from = propose(params, device, rows, hidden, new_seq_lens + 1)
        carry = Carry(bonus, probs, ids, hidden, drawn_from)
        return dataclasses.replace(device, future=stash(device.future, rows, carry, forward_iter=forward_iter))

    def extend_phase(params, device: DeviceState, inputs: ExtendInputs, *, table_width: int) -> PhaseOutput:
        del table_width  # the upload brings the pages this program reads
        return prefill(target, params["target"], device, inputs, layers)

    def extend_commit(params, device: DeviceState, inputs: ExtendInputs, handoff: ExtendHandoff, *, table_width: int):
        del table_width, inputs  # the handoff has what was made of them
        prompts, tokens, *features = handoff
        batch, last = prompts.batch, prompts.last
        feature = draft.feature(params["draft"], *features)
        ids = next_tokens(batch.input_ids, batch, last, tokens)
        hidden, draft_kv_pages = draft.forward(params["draft"], ids, feature, batch, device.draft_kv_pages)
        device = dataclasses.replace(device, draft_kv_pages=draft_kv_pages)
        return stash_drafts(
            params, device, batch.rows, prompts.forward_iter, tokens, hidden[last], prompts.new_seq_lens
        )

    def draft_chain(params, begun: Start, rows, depth: int):
        """`candidates: i32[B, depth + 1]`, the distributions that drafts were drawn from, the draft's pool."""
        device, page_table, seq_lens, carry, *_ = begun
        ids, hidden, drawn_from, kv_pages = carry.topk_ids, carry.hidden, carry.draft_probs, device.draft_kv_pages
        tokens, distributions = [carry.bonus], []
        for i in range(depth):
            tokens.append(draft.token_ids(params["draft"], ids[:, 0]))
            distributions.append(drawn_from)
            if i < depth - 1:
                batch = verify_batch(rows, seq_lens + i, tokens[-1][:, None], page_table, page_size=device.page_size)
                hidden, kv_pages = draft.forward(params["draft"], tokens[-1], hidden, batch, kv_pages)
                _, ids, drawn_from = propose(params, device, rows, hidden, seq_lens + i + 2)
        return jnp.stack(tokens, axis=1), distributions, kv_pages

    def draft_while_sure(params, begun: Start, rows, depth: int):
        """`candidates: i32[B, depth + 1]`, how many drafts of each row count, and the draft's pool. A round that no row needs is not run."""
        device, page_table, seq_lens, carry, _, num_drafts = begun
        sure = (num_drafts > 0) & (carry.topk_probs[:, 0] >= min_prob)
        carried = (carry.topk_ids, carry.topk_probs, carry.hidden, device.draft_kv_pages)
        tokens, counts = [carry.bonus], jnp.zeros_like(num_drafts)
        for i in range(depth):
            tokens.append(draft.token_ids(params["draft"], carried[0][:, 0]))
            counts += sure
            if i == depth - 1:
                break

            def one_deeper(carried, i=i, tokens=tokens[-1]):
                _, _, hidden, kv_pages = carried
                batch = verify_batch(rows, seq_lens + i, tokens[:, None], page_table, page_size=device.page_size)
                hidden, kv_pages = draft.forward(params["draft"], tokens, hidden, batch, kv_pages)
                probs, ids, _ = propose(params, device, rows, hidden, seq_lens + i + 2)
                return ids, probs, hidden, kv_pages

            carried = run_if(jnp.any(sure), one_deeper, carried)
            sure &= carried[1][:, 0] >= min_prob
        return jnp.stack(tokens, axis=1), counts, carried[3]

    def verify_as_chain(params, device: DeviceState, inputs: DecodeInputs, *, table_width: int, depth: int):
        begun = start(device, inputs, table_width=table_width, depth=depth, context_len=draft.facts.context_len)
        probs = None
        if min_prob and depth:
            candidates, num_drafts, draft_kv_pages = draft_while_sure(params, begun, inputs.rows, depth)
            begun = begun._replace(num_drafts=num_drafts)
        else:
            candidates, distributions, draft_kv_pages = draft_chain(params, begun, inputs.rows, depth)
            if rejection_sampling and depth:
                probs = functools.partial(widen, draft, params["draft"], jnp.stack(distributions, axis=1))
        begun = begun._replace(device=dataclasses.replace(begun.device, draft_kv_pages=draft_kv_pages))
        return verify_chain(
            target,
            params["target"],
            begun,
            inputs,
            candidates,
            probs,
            layers=layers,
            output_stride=output_stride,
            lossy_threshold=lossy_threshold,
            widths=(1, depth + 1) if min_prob and depth else (depth + 1,),
        )

    def draft_tree(params, begun: Start, rows) -> tuple[Tree, Any]:
        """The tree to verify, and the draft's pool. A level's nodes are written behind those of the levels before."""
        device, page_table, seq_lens, carry, *_ = begun
        beam, candidates = first_level(carry.topk_probs, carry.topk_ids)
        kv_pages, level_shape = device.draft_kv_pages, (rows.shape[0], topk)
        hidden = jnp.repeat(carry.hidden[:, None], topk, axis=1)
        seen = jnp.zeros(level_shape, jnp.uint32)
        for i in range(num_steps - 1):
            own = jnp.uint32(1) << (i * topk + jnp.arange(topk, dtype=jnp.uint32))
            seen = jnp.take_along_axis(seen, beam.parents, axis=1) | own
            above = jnp.take_along_axis(hidden, beam.parents[..., None], axis=1)
            tokens = draft.token_ids(params["draft"], beam.tokens)
            level = {"depths": jnp.full(level_shape, i, jnp.int32), "ancestors": seen, "start": i * topk}
            batch = verify_batch(rows, seq_lens, tokens, page_table, page_size=device.page_size, **level)
            flat = (tokens.reshape(-1), above.reshape(tokens.size, -1))
            hidden, kv_pages = draft.forward(params["draft"], *flat, batch, kv_pages)
            hidden = hidden.reshape(*level_shape, -1)
            beam, candidates = next_level(beam, candidates, *best_tokens(draft.logits(params["draft"], hidden), topk))
        candidates = candidates._replace(tokens=draft.token_ids(params["draft"], candidates.tokens))
        return prune(candidates, carry.bonus, shape.verify_width), kv_pages

    def verify_as_tree(params, device: DeviceState, inputs: DecodeInputs, *, table_width: int, depth: int):
        begun = start(device, inputs, table_width=table_width, depth=depth, context_len=draft.facts.context_len)
        tree, draft_kv_pages = draft_tree(params, begun, inputs.rows)
        begun = begun._replace(device=dataclasses.replace(begun.device, draft_kv_pages=draft_kv_pages))
        given: dict[str, Any] = {"layers": layers, "output_stride": output_stride, "lossy_threshold": lossy_threshold}
        return verify_tree(target, params["target"], begun, inputs, tree, **given)

    def commit_phase(params, device: DeviceState, inputs: DecodeInputs, handoff: Handoff, *, table_width: int):
        rows, tokens = inputs.rows, handoff.tokens
        page_table = device.page_table[rows, :table_width]
        batch = verify_batch(rows, handoff.seq_lens, tokens, page_table, page_size=device.page_size)
        features = (x.reshape(tokens.size, *x.shape[2:]) for x in (handoff.captured, handoff.hidden))
        feature = draft.feature(params["draft"], *features)
        hidden, kv_pages = draft.forward(params["draft"], tokens.reshape(-1), feature, batch, device.draft_kv_pages)
        device = dataclasses.replace(device, draft_kv_pages=kv_pages)
        last = handoff.accept_lens[:, None] - 1
        bonus = jnp.take_along_axis(tokens, last, axis=1)[:, 0]
        hidden = jnp.take_along_axis(hidden.reshape(*tokens.shape, -1), last[..., None], axis=1)[:, 0]
        return stash_drafts(
            params, device, rows, inputs.forward_iter, bonus, hidden, handoff.seq_lens + handoff.accept_lens
        )

    return SpecWorker(
        name=name,
        verify_width=shape.verify_width,
        output_stride=output_stride,
        alloc_len=shape.alloc_len,
        num_non_draft_tokens=1,
        fixed_accept=None,
        verify_kind=VerifyKind.CHAIN if topk == 1 else VerifyKind.TREE,
        capture_layers=layers,
        params={"target": target.params, "draft": draft.params},
        init=init,
        extend_phase=extend_phase,
        extend_commit=extend_commit,
        verify_phase=verify_as_chain if topk == 1 else verify_as_tree,
        commit_phase=commit_phase,
        depths=shape.depths,
        draft_kv_bytes_per_token=draft.facts.kv_bytes_per_token,
        lookahead=1,
        lossy=lossy_threshold < 1,
    )


def _check(target: TargetModel, draft: DraftModel, sizes: EagleSizes, rejection_sampling: bool) -> None:
    facts = draft.facts
    check_pair(target, draft)
    if facts.num_modules != 1:
        raise ValueError(f"the draft has num_modules={facts.num_modules}: use algorithm 'multi-layer-eagle'")
    if sizes.topk > facts.draft_vocab_size:
        raise ValueError(
            f"topk={sizes.topk} exceeds the draft's vocabulary of {facts.draft_vocab_size} tokens: lower it"
        )
    if rejection_sampling and sizes.min_draft_prob:
        raise ValueError(
            f"rejection_sampling=True needs min_draft_prob=0, got {sizes.min_draft_prob}: drafts that are drawn are not judged by their likelihood"
        )
    if rejection_sampling and sizes.topk > 1:
        raise ValueError(f"rejection_sampling=True needs topk=1, got topk={sizes.topk}: a tree's drafts are not drawn")
