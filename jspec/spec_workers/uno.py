"""UNO: one model that drafts for itself, its rows of noise going through an adapter."""

import dataclasses

import jax
import jax.numpy as jnp

from jspec.future_map import stash
from jspec.models.lora import Lora
from jspec.models.target import TargetModel
from jspec.spec_workers.accept import accept_chain, accept_rejection
from jspec.spec_workers.adjust import adjust_logits, chain_path
from jspec.spec_workers.base import DeviceState, PhaseOutput, SpecWorker, VerifyKind
from jspec.spec_workers.chain import Carry, chain
from jspec.spec_workers.draft_sampling import best_tokens, draw_tokens
from jspec.spec_workers.featured import Handoff, publish_run, select, start
from jspec.spec_workers.forward import verify_batch
from jspec.spec_workers.sampling import DRAFT_TOKEN, position_key, sample
from jspec.spec_workers.upload import DecodeInputs, ExtendInputs


def uno(
    target: TargetModel,
    lora: Lora,
    *,
    name: str = "uno",
    block_size: int | None = None,
    rejection_sampling: bool = False,
) -> SpecWorker:
    """A worker whose draft is the target itself, run once over the pending token and noise, and once more to verify.

        resolve -> draft pass -> verify pass -> accept -> PUBLISH, stash

    The pending token goes through the target's own weights, so what follows it in the draft pass is the target's token, the *clean root*: emitted whatever
    comes of the rest. Rows of noise go through the adapter, and propose one token each, for the places after it. The verify pass then runs over the clean
    root and the proposals with the target's weights, and writes their KV over that of the noise. Nothing is left to do after publish, so a step is one
    program; it emits two tokens at least, and costs two forwards.

    Near the end of the target's context a row drafts nothing and decodes on.

    Args:
        target: the model, on one device.
        lora: the adapter, from `load_lora`.
        name: how it is listed.
        block_size: `F`, rows of the draft pass. None: what the adapter was trained with.
        rejection_sampling: rows that sample draw their proposals from the adapted distributions, by the request's own temperature and filters, and accept
            them by `accept_rejection`: the output is then another draw than plain decoding's with the same seed, with the same law.

    Raises:
        ValueError: a block or a target that does not fit.

    Source: "Unlocking Lossless Speedups in LLMs via Discrete Diffusion" (arXiv 2609.04010), its linear mode; SGLang's UNO worker.
    """
    width = lora.config.block_size if block_size is None else block_size
    if width < 2:
        raise ValueError(f"block_size={width} must be at least 2: the pending token and noise to draft from")
    if target.forward_adapted is None or target.mesh is not None:
        raise ValueError(
            "uno needs a target that takes an adapter, on one device: a Llama-family model without tensor_parallel or data_parallel"
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

    def verify_phase(params, device: DeviceState, inputs: DecodeInputs, *, table_width: int, depth: int) -> PhaseOutput:
        begun = start(device, inputs, table_width=table_width, depth=depth + 1, context_len=target.facts.context_len)
        rows, (device, page_table, seq_lens, carry, _, num_drafts) = inputs.rows, begun
        num_drafts = jnp.maximum(num_drafts - 1, 0)
        batch_size, table = rows.shape[0], {"table_width": table_width}

        def run(forward, ids, first):
            """(logits, hidden states, pool) of a chain that starts at `first`."""
            batch = verify_batch(rows, first, ids, page_table, page_size=device.page_size)
            out = forward(batch)
            hidden = out.hidden.reshape(batch_size, width, -1)
            return target.logits(params["target"], hidden), hidden, out.kv_pages

        ids = jnp.concatenate([carry.bonus[:, None], noise(device, rows, seq_lens)], axis=1)
        adapted = jnp.broadcast_to(jnp.arange(width) > 0, ids.shape).reshape(-1)
        drafted, clean, kv_pages = run(
            lambda batch: forward_adapted(params["target"], params["adapter"], adapted, batch, device.kv_pages),
            ids,
            seq_lens,
        )
        pending = chain_path(seq_lens, carry.bonus[:, None])
        logits = adjust_logits(device, rows, drafted[:, :1], pending, **table)
        root, root_finite = sample(device.sampling, rows, logits, seq_lens[:, None] + 1)
        ahead = seq_lens[:, None] + 2 + jnp.arange(width, dtype=jnp.int32)
        probs = None
        if rejection_sampling:
            draw = jax.vmap(draw_tokens, in_axes=(None, None, 1, 1), out_axes=1)
            proposed, probs = draw(device.sampling, rows, drafted[:, 1:], ahead[:, :-1])
        else:
            proposed = best_tokens(drafted[:, 1:], 1, scored=False)[1][..., 0]
        candidates = jnp.concatenate([root, proposed], axis=1)
        # The root's KV is written here: what the noise left behind it is overwritten, or lies past the frontier.
        found, hidden, kv_pages = run(
            lambda batch: target.forward(params["target"], batch, kv_pages), candidates, seq_lens + 1
        )
        found = adjust_logits(device, rows, found, chain_path(seq_lens + 1, candidates), **table)
        by_rejection = (device.sampling.temperature[rows] > 0) & rejection_sampling
        place = jnp.arange(width, dtype=jnp.int32)
        active = (place <= num_drafts[:, None]) & ~by_rejection[:, None]
        tokens, finite = sample(device.sampling, rows, found, ahead, active)
        accept_lens = accept_chain(candidates, tokens, num_drafts)
        if probs is not None:
            tokens, accept_lens = jax.lax.cond(
                jnp.any(by_rejection),
                lambda: select(
                    by_rejection,
                    accept_rejection(device.sampling, rows, candidates, found, probs, num_drafts, ahead),
                    (tokens, accept_lens),
                ),
                lambda: (tokens, accept_lens),
            )
        tokens, accept_lens = jnp.concatenate([root, tokens], axis=1), 1 + accept_lens
        handoff = Handoff(seq_lens, tokens, accept_lens, (), jnp.concatenate([clean[:, :1], hidden], axis=1))
        begun = begun._replace(device=dataclasses.replace(device, kv_pages=kv_pages))
        finite = jnp.concatenate([root_finite, finite], axis=1)
        out = publish_run(target, params["target"], begun, inputs, handoff, finite, output_stride=width + 1)
        bonus = jnp.take_along_axis(tokens, accept_lens[:, None] - 1, axis=1)[:, 0]
        future = stash(out.device.future, rows, Carry(bonus), forward_iter=inputs.forward_iter)
        return out._replace(device=dataclasses.replace(out.device, future=future), handoff=())

    return plain._replace(
        verify_width=width,
        output_stride=width + 1,
        alloc_len=width + 1,
        num_non_draft_tokens=2,
        fixed_accept=None,
        verify_kind=VerifyKind.CHAIN,
        params={"target": target.params, "adapter": lora.params},
        extend_phase=extend_phase,
        verify_phase=verify_phase,
        depths=(width - 1,),
    )
