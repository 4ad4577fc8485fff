"""What a draft is trained on: to foresee the target's next tokens along its own unrolled chain."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jspec.models.draft import DraftModel
from jspec.models.eagle_draft import rope, split_heads


class Batch(NamedTuple):
    """`B` sequences with the target's features of them. Row `t` is token `t`; `M` layers are captured."""

    tokens: Any  # i32[B, T + 1]
    captured: Any  # f16|f32[B, T, M, H]  target's hidden states after the captured layers
    hidden: Any  # f16|f32[B, T, H]  target's hidden state after its final norm
    weight: (
        Any  # f32[B, T]  1 where a draft that starts at row `t` counts: rows of the answer; 0 for prompt and padding
    )


class _Unrolled(NamedTuple):
    """One depth of the chain, for every start `t`."""

    hidden: Any  # [B * T, H]
    keys: Any  # [B, T, Hkv, D]
    values: Any  # [B, T, Hkv, D]


def draft_loss(draft: DraftModel, params: Any, target_head: Any, batch: Batch, *, unroll: int, decay: float = 0.9):
    """Soft cross-entropy against the target's distribution over the draft's vocabulary, along an unrolled chain.

    "eagle3" and "eagle": training-time test (EAGLE-3, arXiv 2503.01840): depth `k` of the chain that starts at row `t` reads its own hidden state of
    depth `k - 1` and the text's token `t + 1 + k`, and attends to the features' rows up to `t` and to its own earlier depths, exactly as it will while
    drafting. "multi-layer": module `k` is depth `k`.

    Where the text's next token is outside the draft's vocabulary there is nothing to foresee, and no loss.

    Args:
        draft: what is trained; its `params["shared"]` is used, its own parameters are not.
        params: the tree that takes the place of `draft.params["own"]`.
        target_head: f32[Vd, H], the target's head at the draft's tokens.
        batch: see there.
        unroll: depths of the chain.
        decay: weight of depth `k` is `decay ** k`.

    Returns:
        The loss, and `metrics`: "loss" f32[unroll] by depth, "agree" f32[unroll], how often the draft's best token is the text's (for text that the target
        wrote greedily: the target's best), "accept_len" f32[], mean length of a verify that takes the draft's best tokens, the bonus token included.
    """
    full = {"own": params, "shared": draft.params["shared"]}
    num, length = batch.tokens.shape[0], batch.tokens.shape[1] - 1
    dtype = target_head.dtype
    start = draft.feature(
        full,
        batch.captured.reshape(num * length, *batch.captured.shape[2:]).astype(dtype),
        batch.hidden.reshape(num * length, -1).astype(dtype),
    )
    teacher = jnp.einsum("bth,vh->btv", batch.hidden.astype(dtype), target_head, preferred_element_type=jnp.float32)
    known = _draft_ids(draft, batch.tokens)

    depths: list[_Unrolled] = []
    total, losses, agrees = jnp.zeros(()), [], []
    run = jnp.ones((num, length))  # whether every depth so far foresaw its token
    accept_len = jnp.ones((num, length))
    for depth in range(unroll):
        multi = draft.facts.num_modules > 1
        reads = start if depth == 0 or (multi and not draft.facts.chained) else depths[-1].hidden
        step = _unroll(draft, full, _shift(batch.tokens[:, 1:], depth), reads, depths, depth=depth, multi=multi)
        depths.append(step)
        logits = draft.logits(full, step.hidden, module=depth if multi else 0).reshape(num, length, -1)
        ahead = 1 + depth
        label = _shift(known[:, 1:], ahead)  # draft id of the token to foresee, -1 where it has none
        counted = batch.weight * _shift(batch.weight, ahead)
        weight = counted * (label >= 0)
        nll = optax.softmax_cross_entropy(logits, jax.nn.softmax(_shift(teacher, ahead), axis=-1))
        loss = jnp.sum(nll * weight) / jnp.maximum(jnp.sum(weight), 1.0)
        hit = (jnp.argmax(logits, axis=-1) == label).astype(jnp.float32)
        total += loss * decay**depth
        losses.append(loss)
        agrees.append(jnp.sum(hit * counted) / jnp.maximum(jnp.sum(counted), 1.0))
        run = run * hit * counted
        accept_len += run
    # Starts whose whole chain lies in the text: near its end a chain is cut short and would look worse than it is.
    whole = batch.weight * _shift(batch.weight, unroll)
    mean_len = jnp.sum(accept_len * whole) / jnp.maximum(jnp.sum(whole), 1.0)
    metrics = {"loss": jnp.stack(losses), "agree": jnp.stack(agrees), "accept_len": mean_len}
    return total, jax.tree.map(jax.lax.stop_gradient, metrics)


def _draft_ids(draft: DraftModel, tokens):
    """Draft ids of the target's `tokens`; -1 where the draft's vocabulary lacks them."""
    ids = draft.token_ids(draft.params, jnp.arange(draft.facts.draft_vocab_size))
    inverse = jnp.full(draft.facts.vocab_size, -1, jnp.int32).at[ids].set(jnp.arange(ids.shape[0], dtype=jnp.int32))
    return inverse[tokens]


def _shift(x, by: int):
    """`x[:, t + by]` at `t`; zeros past the end."""
    return jnp.pad(x[:, by:], ((0, 0), (0, min(by, x.shape[1])), *[(0, 0)] * (x.ndim - 2)))


def _unroll(draft: DraftModel, full, next_tokens, hidden, depths: list[_Unrolled], *, depth: int, multi: bool):
    """One forward of every chain: dense attention over the whole batch."""
    config = draft.config
    num, length = next_tokens.shape
    heads, residual = draft.project_in(full, next_tokens.reshape(-1), hidden, module=depth if multi else 0)
    position = jnp.tile(jnp.arange(length), num) + (0 if multi else depth)
    cos, sin = rope(config, position)
    q, k, v = split_heads(config, heads, cos, sin, hidden.dtype)
    q, k, v = (x.reshape(num, length, -1, config.head_dim) for x in (q, k, v))
    if multi or depth == 0:
        mixed = _attend(q, k, v, [], [])
    else:
        keys, values = [d.keys for d in depths] + [k], [d.values for d in depths] + [v]
        mixed = _attend(q, keys[0], values[0], keys[1:], values[1:])
    out = draft.project_out(full, residual, mixed.reshape(num * length, -1), module=depth if multi else 0)
    return _Unrolled(out, k, v)


def _attend(q, k, v, own_keys, own_values):
    """Causal attention to `k`, `v`, and of every query to the one key of its own chain in each of `own_keys`."""
    num, length, num_heads, head_dim = q.shape
    group = num_heads // k.shape[2]
    q = q.reshape(num, length, -1, group, head_dim) * head_dim**-0.5
    scores = jnp.einsum("bthgd,bshd->bhgts", q, k, preferred_element_type=jnp.float32)
    seen = jnp.tril(jnp.ones((length, length), bool))
    scores = [jnp.where(seen, scores, -jnp.inf)]
    scores += [jnp.einsum("bthgd,bthd->bhgt", q, key)[..., None] for key in own_keys]
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
    out = jnp.einsum("bhgts,bshd->bthgd", weights[..., :length], v)
    for i, value in enumerate(own_values):
        share = jnp.moveaxis(weights[..., length + i], -1, 1)  # [B, T, Hkv, G]
        out += share[..., None] * value[:, :, :, None, :]
    return out
