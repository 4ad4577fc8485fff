"""What a block draft is trained on: to fill in the target's next tokens behind a known one, all at once."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jspec.models.block_draft import BlockDraftModel
from jspec.training.loss import NEVER, Batch, draft_ids
from jspec.training.starts import Tally, draw_starts

_FADE = 4.0
"""Tokens over which a token's weight falls by e: later ones count only where those before were right (DFlash, arXiv 2602.06036)."""
_CE, _L1, _CONFIDENCE = 0.1, 0.9, 1.0
"""Weights of the losses of a DSpark draft (arXiv 2607.05147)."""


def block_loss(
    draft: BlockDraftModel, params: Any, target_head: Any, batch: Batch, *, max_starts: int | None = None
) -> tuple[Any, dict[str, Any]]:
    """The loss of blocks that start at rows of the text, each as it will be while decoding: the row's next token is pending, the context is the row and
    those before it, the rest of the block is masked.

    "dflash": soft cross-entropy against the target's distribution over the draft's vocabulary. "dspark": a tenth of that, and the L1 distance of the two
    distributions, whose half is what rejection sampling rejects; its Markov head is shown the text's own tokens. Its confidence head learns
    `1 - L1 / 2`, the chance of acceptance, by cross-entropy.

    Where the text's token is outside the draft's vocabulary there is nothing to foresee, and no loss.

    Args:
        draft: what is trained; its `params["shared"]` is used, its own parameters are not.
        params: the tree that takes the place of `draft.params["own"]`.
        target_head: f32[Vd, H], the target's head at the draft's tokens.
        batch: see there.
        max_starts: blocks that are computed, as many of each sequence, drawn from the rows that count. None: one a row.

    Returns:
        The loss, and `metrics` as of `draft_loss`; with a confidence head also "confidence" f32[K], its cross-entropy by place.
    """
    config, full = draft.config, {"own": params, "shared": draft.params["shared"]}
    dtype, starts = target_head.dtype, draw_starts(batch, max_starts)
    hidden = _blocks(draft, full, batch, starts.rows)[:, :, config.num_rows - config.num_drafts :]
    tally = Tally(starts, draft_ids(draft, batch.tokens))
    state = jnp.zeros((*starts.rows.shape, config.markov_rank), dtype)
    total = jnp.zeros(())
    for k in range(config.num_drafts):
        row, others = hidden[:, :, k], {}
        logits = draft.logits(full, row)
        teacher = (starts.at(batch.hidden, 1 + k).astype(dtype) @ target_head.T).astype(jnp.float32)
        target_probs = jax.nn.softmax(teacher, axis=-1)
        if config.kind == "dspark":
            previous = draft.previous(full, starts.at(batch.tokens[:, 1:], k))
            bias, state = draft.markov(full, row, previous, state)
            logits = logits + bias
        loss = optax.softmax_cross_entropy(logits, target_probs)
        if config.kind == "dspark":
            distance = jnp.sum(jnp.abs(jax.nn.softmax(logits, axis=-1) - target_probs), axis=-1)
            loss = _CE * loss + _L1 * distance
            if config.confidence:
                chance = jax.lax.stop_gradient(1 - distance / 2)
                told = optax.sigmoid_binary_cross_entropy(draft.confidence(full, row, previous), chance)
                others["confidence"] = told
                loss = loss + _CONFIDENCE * told
        total += jnp.exp(-k / _FADE) * tally.add(k, logits, loss, **others)
    return total, tally.metrics()


def _blocks(draft: BlockDraftModel, full, batch: Batch, starts):
    """Hidden states [B, A, N, H] of the blocks."""
    config = draft.config
    num, length = batch.weight.shape
    shape = (*starts.shape, config.num_rows)
    context = draft.context(full, batch.captured.reshape(num * length, *batch.captured.shape[2:]).astype(_dtype(full)))
    pending = jnp.take_along_axis(batch.tokens, starts + 1, axis=1)
    ids = jnp.full(shape, config.mask_token_id, jnp.int32).at[:, :, 0].set(pending)
    positions = (starts[:, :, None] + 1 + jnp.arange(config.num_rows)).reshape(-1)
    row = jnp.arange(length)
    seen = row <= starts[:, :, None]  # [B, A, T]
    if config.window is not None:
        seen &= row > starts[:, :, None] + config.num_rows - config.window
    x = jnp.take(full["shared"]["embed"], ids.reshape(-1), axis=0)
    for layer in range(config.num_layers):
        q, k, v = (part.reshape(*shape, *part.shape[1:]) for part in draft.layer_in(full, x, positions, layer=layer))
        keys, values = draft.context_kv(full, context, jnp.tile(row, num), layer=layer)
        keys, values = (part.reshape(num, length, *part.shape[1:]) for part in (keys, values))
        q = q.reshape(*shape, config.num_kv_heads, -1, config.head_dim) * config.head_dim**-0.5
        outside = jnp.einsum("banhgd,bshd->bhgans", q, keys, preferred_element_type=jnp.float32)
        outside = jnp.where(seen[:, None, None, :, None], outside, NEVER)
        inside = jnp.einsum("banhgd,bamhd->bhganm", q, k, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.concatenate([outside, inside], axis=-1), axis=-1)
        mixed = jnp.einsum("bhgans,bshd->banhgd", weights[..., :length], values)
        mixed += jnp.einsum("bhganm,bamhd->banhgd", weights[..., length:], v)
        x = draft.layer_out(full, x, mixed.reshape(x.shape[0], -1), layer=layer)
    return draft.normed(full, x).reshape(*shape, -1)


def _dtype(full):
    return full["own"]["fc"].dtype
