"""What a frozen-KV assistant is trained on: to foresee the target's next tokens, asking the target's own keys and values."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jspec.models.frozen_kv_draft import FrozenKVConfig, FrozenKVDraft
from jspec.models.linear import project
from jspec.models.llama import LlamaConfig, rms_norm
from jspec.models.rope import angles, inverse_frequencies, rotate
from jspec.models.target import TargetModel
from jspec.training.loss import NEVER, Batch, draft_ids
from jspec.training.starts import Tally, draw_starts


class KVWeights(NamedTuple):
    """What the target makes keys and values of, in the layers that the assistant asks."""

    norms: Any  # f32[N, H], before attention
    kv: Any  # f32[N, 2 Hkv D, H]
    bias: Any  # f32[N, 2 Hkv D]
    k_norms: Any  # f32[N, D]; () where the target has none


def asked_layers(config: FrozenKVConfig) -> tuple[int, ...]:
    """The target's layers that an assistant asks, each once."""
    return tuple(dict.fromkeys(config.kv_layers))


def kv_weights(target: TargetModel, layers: tuple[int, ...]) -> KVWeights:
    """Those of a Llama-family target."""
    c: LlamaConfig = target.config
    first, params = c.num_heads * c.head_dim, target.params
    kv = [jnp.asarray(params[f"layer_{i}"]["qkv"][first:], jnp.float32) for i in layers]
    bias = [params["qkv_bias"][i][first:] if c.qkv_bias else jnp.zeros(kv[0].shape[0]) for i in layers]
    k_norms = jnp.stack([params["qk_norms"][i][1] for i in layers]) if c.qk_norm else ()
    return KVWeights(jnp.stack([params["norms"][i][0] for i in layers]), jnp.stack(kv), jnp.stack(bias), k_norms)


def target_kv(config: LlamaConfig, weights: KVWeights, index: int, hidden, positions):
    """(keys, values), each [T, Hkv, D], of what goes into a layer, `hidden: [T, H]`: those that the target writes to its pool."""
    heads = (
        project(rms_norm(hidden, weights.norms[index], config.rms_norm_eps), weights.kv[index]) + weights.bias[index]
    )
    k, v = jnp.split(heads.reshape(-1, 2 * config.num_kv_heads, config.head_dim), 2, axis=1)
    if config.qk_norm:
        k = rms_norm(k, weights.k_norms[index], config.rms_norm_eps)
    frequency = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    return rotate(k, *angles(positions, frequency)), v


def frozen_kv_loss(
    draft: FrozenKVDraft,
    params: Any,
    target_config: LlamaConfig,
    weights: KVWeights,
    target_head: Any,
    batch: Batch,
    *,
    depths: int,
    decay: float,
    max_starts: int | None = None,
):
    """Soft cross-entropy against the target's distribution along an unrolled chain: the first step reads the target's hidden state at the start, the others
    the assistant's own; every step reads the text's token, and asks the target's KV from the start's position.

    Args:
        draft: what is trained; its `params["shared"]` is used, its own parameters are not.
        params: the tree that takes the place of `draft.params["own"]`.
        target_config, weights: of the target's layers `asked_layers`.
        target_head: f32[Vd, H], the target's head at the draft's tokens.
        batch: its `captured` holds what goes into these layers, each once, in the order of `asked_layers`.
        depths, decay, max_starts: as of `draft_loss`, but that starts are drawn.

    Returns: as `draft_loss`.
    """
    full, config = {"own": params, "shared": draft.params["shared"]}, draft.config
    starts, (num, length) = draw_starts(batch, max_starts), batch.weight.shape
    shape, row = starts.rows.shape, jnp.arange(length)
    seen = row <= starts.rows[:, :, None]
    positions, everywhere = starts.rows.reshape(-1), jnp.tile(row, num)
    flat = batch.captured.astype(jnp.float32).reshape(num * length, *batch.captured.shape[2:])
    asked = []
    for index in range(len(asked_layers(config))):
        pair = target_kv(target_config, weights, index, flat[:, index], everywhere)
        asked.append(tuple(x.reshape(num, length, *x.shape[1:]) for x in pair))
    tally = Tally(starts, draft_ids(draft, batch.tokens))
    hidden, total = starts.at(batch.hidden, 0).astype(jnp.float32).reshape(-1, batch.hidden.shape[-1]), jnp.zeros(())
    for depth in range(depths):
        x = draft.embed(full, starts.at(batch.tokens[:, 1:], depth).reshape(-1), hidden)
        for layer, of_target in enumerate(config.kv_layers):
            keys, values = asked[asked_layers(config).index(of_target)]
            q = draft.query(full, x, positions, layer=layer)
            q = q.reshape(*shape, config.num_kv_heads, -1, config.head_dim) * config.head_dim**-0.5
            scores = jnp.einsum("bahgd,bshd->bhgas", q, keys, preferred_element_type=jnp.float32)
            share = jax.nn.softmax(jnp.where(seen[:, None, None], scores, NEVER), axis=-1)
            mixed = jnp.einsum("bhgas,bshd->bahgd", share, values)
            x = draft.layer_out(full, x, mixed.reshape(x.shape[0], -1), layer=layer)
        read, hidden = draft.project_out(full, x)
        logits = draft.logits(full, read).reshape(*shape, -1)
        teacher = (starts.at(batch.hidden, 1 + depth).astype(jnp.float32) @ target_head.T).astype(jnp.float32)
        loss = optax.softmax_cross_entropy(logits, jax.nn.softmax(teacher, axis=-1))
        total += decay**depth * tally.add(depth, logits, loss)
    return total, tally.metrics()
