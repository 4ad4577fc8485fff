"""UNO: one model that drafts for itself, its rows of noise going through an adapter."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.config import MAX_VERIFY_WIDTH
from jspec.future_map import stash
from jspec.models.lora import Lora
from jspec.models.target import TargetModel
from jspec.spec_workers.adjust import adjust_logits, chain_path
from jspec.spec_workers.base import DeviceState, PhaseOutput, SpecWorker, VerifyKind
from jspec.spec_workers.chain import Carry, chain
from jspec.spec_workers.draft_sampling import best_tokens, draw_tokens
from jspec.spec_workers.featured import Handoff, Run, Start, commit_run, publish_run, start, walk_chain, walk_tree
from jspec.spec_workers.forward import chain_run, verify_batch
from jspec.spec_workers.sampling import DRAFT_TOKEN, position_key, sample
from jspec.spec_workers.tree import marginal_tree
from jspec.spec_workers.upload import DecodeInputs, ExtendInputs


class Drafted(NamedTuple):
    """What a draft pass leaves. `F` rows of each row of the batch."""

    root: Any  # i32[B, 1]  the target's token after the pending one
    finite: Any  # bool[B, 1]  of the logits that it was chosen by
    hidden: Any  # [B, 1, H]  and what these were made of
    logits: Any  # f32[B, F - 1, V]  of the adapted rows, for the places after the root's


def uno(
    target: TargetModel,
    lora: Lora,
    *,
    name: str = "uno",
    block_size: int | None = None,
    topk: int = 1,
    num_draft_tokens: int | None = None,
    rejection_sampling: bool = False,
) -> SpecWorker:
    """A worker whose draft is the target itself, run once over the pending token and noise, and once more to verify.

        resolve -> draft pass -> verify pass -> accept -> (tree) move KV -> PUBLISH, stash

    The pending token goes through the target's own weights, so what follows it in the draft pass is the target's token, the *clean root*: emitted whatever
    comes of the rest. Rows of noise go through the adapter, and propose tokens for the places after it: one each, or a tree of their best. The verify pass
    then runs over the clean root and the proposals with the target's weights, and writes their KV over that of the noise. Nothing is left to do after publish,
    so a step is one program; it emits two tokens at least, and costs two forwards.

    Near the end of the target's context a row drafts nothing and decodes on.

    Args:
        target: the model, on one device.
        lora: the adapter, from `load_lora`.
        name: how it is listed.
        block_size: `F`, rows of the draft pass. None: what the adapter was trained with.
        topk: `K`, tokens that each row of noise proposes; 1 drafts a chain. The rows do not know each other's tokens, so a tree is made of them as
            `marginal_tree` says.
        num_draft_tokens: `Q`, nodes of the tree, the clean root included. None: all of it, at most 8, and no fewer than `F`.
        rejection_sampling: rows that sample draw their proposals from the adapted distributions, by the request's own temperature and filters, and accept
            them by `accept_rejection`: the output is then another draw than plain decoding's with the same seed, with the same law. Chains only.

    Raises:
        ValueError: sizes or a target that do not fit.

    Source: "Unlocking Lossless Speedups in LLMs via Discrete Diffusion" (arXiv 2609.04010); SGLang's UNO worker.
    """
    width = lora.config.block_size if block_size is None else block_size
    nodes = _num_nodes(width, topk, num_draft_tokens)
    if rejection_sampling and topk > 1:
        raise ValueError(f"rejection_sampling=True needs topk=1, got topk={topk}: a tree's drafts are not drawn")
    if topk > target.facts.vocab_size:
        raise ValueError(f"topk={topk} exceeds the {target.facts.vocab_size} tokens of the vocabulary: lower it")
    if target.forward_adapted is None or target.mesh is not None:
        raise ValueError(
            "uno needs a target that takes an adapter, on one device: one without tensor_parallel or data_parallel"
        )
    forward_adapted, plain = target.forward_adapted, chain(name, target)

    def extend_phase(params, device: DeviceState, inputs: ExtendInputs, *, table_width: int) -> PhaseOutput:
        return plain.extend_phase(params["target"], device, inputs, table_width=table_width)

    def noise(device: DeviceState, rows, seq_lens):
        """i32[B, F - 1]: ids drawn uniformly, by seed and position, so that neither place nor overlap changes what is proposed."""
        seeds = device.sampling.seed[rows]

        def one(seed, position):
            return jax.random.randint(position_key(seed, position, DRAFT_TOKEN), (), 0, target.facts.vocab_size)

        positions = seq_lens[:, None] + 1 + jnp.arange(width - 1, dtype=jnp.int32)
        return jax.vmap(jax.vmap(one, in_axes=(None, 0)))(seeds, positions).astype(jnp.int32)

    def draft_pass(params, begun: Start, rows) -> tuple[Drafted, Start]:
        """Runs the pending token and noise. The pool holds the pending token's KV then, and garbage behind it; recurrent layers remember it, and no noise."""
        device, page_table, seq_lens, carry, *_ = begun
        pending = carry.bonus[:, None]
        ids = jnp.concatenate([pending, noise(device, rows, seq_lens)], axis=1)
        adapted = jnp.broadcast_to(jnp.arange(width) > 0, ids.shape).reshape(-1)
        batch = verify_batch(rows, seq_lens, ids, page_table, page_size=device.page_size)
        out = forward_adapted(
            params["target"], params["adapter"], adapted, batch, device.kv_pages, recurrent=device.recurrent
        )
        pending_alone = chain_run(rows, seq_lens, jnp.ones_like(rows), page_table, width=width)
        recurrent = target.commit(device.recurrent, out.intermediates, pending_alone)
        hidden = out.hidden.reshape(*ids.shape, -1)
        logits = target.logits(params["target"], hidden)
        path = chain_path(seq_lens, pending)
        clean = adjust_logits(device, rows, logits[:, :1], path, table_width=page_table.shape[1])
        root, finite = sample(device.sampling, rows, clean, seq_lens[:, None] + 1)
        begun = begun._replace(device=dataclasses.replace(device, kv_pages=out.kv_pages, recurrent=recurrent))
        return Drafted(root, finite, hidden[:, :1], logits[:, 1:]), begun

    def verify_as_chain(params, begun: Start, rows, drafted: Drafted) -> Run:
        if rejection_sampling:
            # `begun` stands at the root: what is drawn for a place depends on the place.
            positions = begun.seq_lens[:, None] + 1 + jnp.arange(width - 1, dtype=jnp.int32)
            draw = jax.vmap(draw_tokens, in_axes=(None, None, 1, 1), out_axes=1)
            ids, probs = draw(begun.device.sampling, rows, drafted.logits, positions)
            candidates = jnp.concatenate([drafted.root, ids], axis=1)
            return walk_chain(target, params["target"], begun, rows, candidates, lambda: probs, layers=())
        ids = best_tokens(drafted.logits, 1, scored=False)[1][..., 0]
        candidates = jnp.concatenate([drafted.root, ids], axis=1)
        return walk_chain(target, params["target"], begun, rows, candidates, None, layers=())

    def verify_as_tree(params, begun: Start, rows, drafted: Drafted) -> Run:
        probs, ids = best_tokens(drafted.logits, topk)
        tree = marginal_tree(probs, ids, drafted.root[:, 0], nodes)
        return walk_tree(target, params["target"], begun, rows, tree, layers=(), max_depth=width - 1)

    def verify_phase(params, device: DeviceState, inputs: DecodeInputs, *, table_width: int, depth: int) -> PhaseOutput:
        rows, context_len = inputs.rows, target.facts.context_len
        begun = start(device, inputs, table_width=table_width, depth=depth + 1, context_len=context_len)
        drafted, begun = draft_pass(params, begun, rows)
        # The root takes the pending token's part: it stands one further, and so much less is drafted.
        at_root = begun._replace(seq_lens=begun.seq_lens + 1, num_drafts=jnp.maximum(begun.num_drafts - 1, 0))
        run = commit_run(target, (verify_as_chain if topk == 1 else verify_as_tree)(params, at_root, rows, drafted))
        tokens, accept_lens = jnp.concatenate([drafted.root, run.handoff.tokens], axis=1), 1 + run.handoff.accept_lens
        hidden = jnp.concatenate([drafted.hidden, run.handoff.hidden], axis=1)
        run = Run(
            begun._replace(device=run.begun.device),
            Handoff(begun.seq_lens, tokens, accept_lens, (), hidden),
            jnp.concatenate([drafted.finite, run.finite], axis=1),
        )
        out = publish_run(target, params["target"], run, inputs, output_stride=width + 1)
        bonus = jnp.take_along_axis(tokens, accept_lens[:, None] - 1, axis=1)[:, 0]
        future = stash(out.device.future, rows, Carry(bonus), forward_iter=inputs.forward_iter)
        return out._replace(device=dataclasses.replace(out.device, future=future), handoff=())

    return plain._replace(
        verify_width=nodes,
        output_stride=width + 1,
        alloc_len=nodes + 1,
        num_non_draft_tokens=2,
        fixed_accept=None,
        verify_kind=VerifyKind.CHAIN if topk == 1 else VerifyKind.TREE,
        params={"target": target.params, "adapter": lora.params},
        extend_phase=extend_phase,
        verify_phase=verify_phase,
        depths=(width - 1,),
    )


def _num_nodes(width: int, topk: int, num_draft_tokens: int | None) -> int:
    """Nodes of a verify pass, after checking the sizes."""
    if not 2 <= width <= MAX_VERIFY_WIDTH:
        raise ValueError(
            f"block_size={width} must be at least 2, the pending token and noise to draft from, and at most {MAX_VERIFY_WIDTH}, what can be verified"
        )
    if topk < 1:
        raise ValueError(f"topk={topk} must be at least 1; 1 drafts a chain")
    if topk == 1:
        if num_draft_tokens not in (None, width):
            raise ValueError(
                f"num_draft_tokens={num_draft_tokens} must be block_size={width} for a chain (topk=1): leave it out, or raise topk"
            )
        return width
    most = min(sum(topk**depth for depth in range(width)), MAX_VERIFY_WIDTH)
    nodes = max(width, min(most, 8)) if num_draft_tokens is None else num_draft_tokens
    if not width <= nodes <= most:
        raise ValueError(
            f"num_draft_tokens={nodes} must lie in [{width}, {most}]: a tree has no fewer nodes than the rows of block_size={width}, no more than "
            f"topk={topk} makes of them, and at most {MAX_VERIFY_WIDTH} can be verified"
        )
    return nodes
