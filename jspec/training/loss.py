"""What a draft is trained on: to foresee the target's next tokens along its own unrolled chain."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jspec.models.draft import DraftModel
from jspec.models.eagle_draft import rope, split_heads
from jspec.training.copying import copy_source


class Batch(NamedTuple):
    """`B` sequences with the target's features of them. Row `t` is token `t`; `M` layers are captured."""

    tokens: Any  # i32[B, T + 1]
    captured: Any  # f16|f32[B, T, M, H]  target's hidden states after the captured layers
    hidden: Any  # f16|f32[B, T, H]  target's hidden state after its final norm
    weight: (
        Any  # f32[B, T]  1 where a draft that starts at row `t` counts: rows of the answer; 0 for prompt and padding
    )


NEVER = -1e30
"""A score that weighs nothing; finite, so that its gradient is."""


class _Depth(NamedTuple):
    """One depth of the chains. `N` starts of a chain are trained on, each a row of the flattened batch."""

    hidden: Any  # [N, H], or [B * T, H] where the next module reads all rows
    keys: Any  # [B, T, Hkv, D]; zeros where no chain starts, past the first depth
    values: Any  # [B, T, Hkv, D]
    looks: Any = None  # f32[B, T, Hq, T], log of how much each query looks at each row


def draft_loss(
    draft: DraftModel,
    params: Any,
    target_head: Any,
    batch: Batch,
    *,
    unroll: int,
    decay: float = 0.9,
    max_starts: int | None = None,
    copy_heads: int = 0,
    copy_weight: float = 0.0,
):
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
        copy_heads: query heads, the first ones, that are taught to look at `copy_source`; 0: none.
        copy_weight: of that lesson: the mean of -log of how much they look there.
        max_starts: chains that are computed, the first ones in the batch; the others do not count. None: one a row. Prompt and padding start none, so a
            part of the rows is enough, and costs as much less.

    Returns:
        The loss, and `metrics`: "loss" f32[unroll] by depth, "agree" f32[unroll], how often the draft's best token is the text's (for text that the target
        wrote greedily: the target's best), "accept_len" f32[], mean length of the verifies that decoding this text would
        make, one where the last one ended, each taking the draft's best tokens, bonus token included; "verifies" f32[], how many they are;
        with `copy_heads` also "copy" f32[unroll], what the lesson costs by depth.
    """
    full = {"own": params, "shared": draft.params["shared"]}
    num, length = batch.tokens.shape[0], batch.tokens.shape[1] - 1
    size, dtype = min(max_starts or num * length, num * length), target_head.dtype
    (starts,) = jnp.nonzero(batch.weight.reshape(-1) > 0, size=size, fill_value=num * length)
    feature = draft.feature(
        full,
        batch.captured.reshape(num * length, *batch.captured.shape[2:]).astype(dtype),
        batch.hidden.reshape(num * length, -1).astype(dtype),
    )

    def at_starts(x, ahead: int):
        """`x[b, t + ahead]` of the starts; 0 past the end."""
        shifted = shift(x, ahead)
        return shifted.reshape(num * length, *x.shape[2:]).at[starts].get(mode="fill", fill_value=0)

    known = draft_ids(draft, batch.tokens)
    depths: list[_Depth] = []
    total, losses, agrees, copies = jnp.zeros(()), [], [], []
    run = accept_len = jnp.ones(size)  # whether every depth so far foresaw its token
    counts = at_starts(batch.weight, 0)
    for depth in range(unroll):
        depths.append(_one_depth(draft, full, batch, feature, depths, starts))
        hidden = _take(depths[-1].hidden, starts) if draft.facts.chained else depths[-1].hidden
        logits = draft.logits(full, hidden, module=depth if draft.facts.num_modules > 1 else 0)
        ahead = 1 + depth
        teacher = at_starts(batch.hidden, ahead).astype(dtype) @ target_head.T
        label = at_starts(known[:, 1:], ahead)  # draft id of the token to foresee, -1 where it has none
        counted = counts * at_starts(batch.weight, ahead)
        weight = counted * (label >= 0)
        nll = optax.softmax_cross_entropy(logits, jax.nn.softmax(teacher.astype(jnp.float32), axis=-1))
        loss = jnp.sum(nll * weight) / jnp.maximum(jnp.sum(weight), 1.0)
        hit = (jnp.argmax(logits, axis=-1) == label).astype(jnp.float32)
        total += loss * decay**depth
        if copy_heads:
            rows = depth if draft.facts.num_modules > 1 else 0
            where = copy_source(batch.tokens, depth=depth, row_depth=rows)[:, :, None, None]
            looks = jnp.take_along_axis(depths[-1].looks[:, :, :copy_heads], where, axis=-1)[..., 0]
            missed = -jnp.sum(at_starts(looks, 0).mean(-1) * counted) / jnp.maximum(jnp.sum(counted), 1.0)
            total += copy_weight * missed * decay**depth
            copies.append(missed)
        losses.append(loss)
        agrees.append(jnp.sum(hit * counted) / jnp.maximum(jnp.sum(counted), 1.0))
        run = run * hit * counted
        accept_len += run
    # Starts whose whole chain lies in the text: near its end a chain is cut short and would look worse than it is.
    whole = counts * at_starts(batch.weight, unroll)
    lens, verifies = mean_accept_len(accept_len, whole, starts, batch.weight)
    metrics = {"loss": jnp.stack(losses), "agree": jnp.stack(agrees), "accept_len": lens, "verifies": verifies}
    if copies:
        metrics["copy"] = jnp.stack(copies)
    return total, jax.tree.map(jax.lax.stop_gradient, metrics)


def mean_accept_len(accept_len, whole, starts, weight):
    """Mean length of the verifies that decoding a text would make, and how many they are.

    Args:
        accept_len: f32[N], tokens that a verify at each start would accept.
        whole: f32[N], 1 for starts that count.
        starts: i32[N], rows of the flattened batch; those past its end are none.
        weight: f32[B, T], rows that count.
    """
    lens = jnp.zeros(weight.size).at[starts].set(accept_len, mode="drop").reshape(weight.shape)
    verified = whole * _take(_verified(lens, weight).reshape(-1), starts)
    verifies = jnp.sum(verified)
    return jnp.sum(accept_len * verified) / jnp.maximum(verifies, 1.0), verifies


def _verified(lens, weight):
    """f32[B, T], 1 at the rows where a verify begins: the first that counts, and each where the verify before ends. Easy text is passed in few of them,
    so they are harder than rows are on average.

    Args:
        lens: f32[B, T], tokens that a verify at each row would accept.
        weight: f32[B, T], rows that count.
    """

    def pass_row(ends, row):
        at, lens, weight = row
        begins = (weight > 0) & (at >= ends)
        return jnp.where(begins, at + lens, ends), begins

    rows = (jnp.arange(lens.shape[1], dtype=lens.dtype), lens.T, weight.T)
    return jax.lax.scan(pass_row, jnp.zeros(lens.shape[0], lens.dtype), rows)[1].T.astype(jnp.float32)


def draft_ids(draft: Any, tokens):
    """Draft ids of the target's `tokens`; -1 where the draft's vocabulary lacks them."""
    ids = draft.token_ids(draft.params, jnp.arange(draft.facts.draft_vocab_size))
    inverse = jnp.full(draft.facts.vocab_size, -1, jnp.int32).at[ids].set(jnp.arange(ids.shape[0], dtype=jnp.int32))
    return inverse[tokens]


def shift(x, by: int):
    """`x[:, t + by]` at `t`; zeros past the end."""
    return jnp.pad(x[:, by:], ((0, 0), (0, min(by, x.shape[1])), *[(0, 0)] * (x.ndim - 2)))


def _take(rows, starts):
    """`rows[starts]`; zeros for starts that there are not."""
    return rows.at[starts].get(mode="fill", fill_value=0)


def _one_depth(draft: DraftModel, full, batch: Batch, feature, depths: list[_Depth], starts) -> _Depth:
    """The next depth: projections where they are needed, dense attention over the batch."""
    config, depth = draft.config, len(depths)
    several, chained = draft.facts.num_modules > 1, draft.facts.chained  # only modules are chained
    num, length = batch.tokens.shape[0], batch.tokens.shape[1] - 1
    module = depth if several else 0
    next_tokens = shift(batch.tokens[:, 1:], depth).reshape(-1)
    position = jnp.tile(jnp.arange(length), num)
    all_rows = several or depth == 0  # the first depth, and every module, reads a feature at each row
    if all_rows:
        reads = depths[-1].hidden if chained and depth else feature
    else:
        reads, next_tokens, position = depths[-1].hidden, _take(next_tokens, starts), _take(position, starts) + depth
    heads, residual = draft.project_in(full, next_tokens, reads, module=module)
    cos, sin = rope(config, position)
    q, k, v = split_heads(config, heads, cos, sin, reads.dtype)
    if not all_rows:
        q, k, v = (jnp.zeros((num * length, *x.shape[1:]), x.dtype).at[starts].set(x, mode="drop") for x in (q, k, v))
    q, k, v = (x.reshape(num, length, *x.shape[1:]) for x in (q, k, v))
    own = [] if all_rows else [*depths[1:], _Depth(None, k, v)]
    first = _Depth(None, k, v) if all_rows else depths[0]
    mixed, looks = _attend(q, first.keys, first.values, [d.keys for d in own], [d.values for d in own])
    mixed = mixed.reshape(num * length, -1)
    if not chained:
        mixed = _take(mixed, starts)
        residual = _take(residual, starts) if all_rows else residual
    return _Depth(draft.project_out(full, residual, mixed, module=module), k, v, looks)


def _attend(q, k, v, own_keys, own_values):
    """Causal attention to `k`, `v`, and of every query to the one key of its own chain in each of `own_keys`.

    Returns:
        [B, T, Hkv, G, D], and the log of the weights of `k`, f32[B, T, Hq, T].
    """
    num, length, num_heads, head_dim = q.shape
    group = num_heads // k.shape[2]
    q = q.reshape(num, length, -1, group, head_dim) * head_dim**-0.5
    scores = jnp.einsum("bthgd,bshd->bhgts", q, k, preferred_element_type=jnp.float32)
    seen = jnp.tril(jnp.ones((length, length), bool))
    scores = [jnp.where(seen, scores, NEVER)]
    scores += [jnp.einsum("bthgd,bthd->bhgt", q, key)[..., None] for key in own_keys]
    log_weights = jax.nn.log_softmax(jnp.concatenate(scores, axis=-1), axis=-1)
    weights = jnp.exp(log_weights)
    out = jnp.einsum("bhgts,bshd->bthgd", weights[..., :length], v)
    for i, value in enumerate(own_values):
        share = jnp.moveaxis(weights[..., length + i], -1, 1)  # [B, T, Hkv, G]
        out += share[..., None] * value[:, :, :, None, :]
    looks = log_weights[..., :length].reshape(num, num_heads, length, length)
    return out, jnp.moveaxis(looks, 1, 2)
