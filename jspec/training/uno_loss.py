"""What UNO's adapter is trained on: that a target foresees its own next tokens over rows of noise."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.models.llama import LlamaConfig, LlamaLayer, rms_norm
from jspec.models.lora import LoraConfig, fuse_lora
from jspec.models.rope import angles, inverse_frequencies
from jspec.models.target import TargetModel
from jspec.training.loss import NEVER, Batch
from jspec.training.starts import Tally, batch_key, draw_starts


def block_size_at(step: int, steps: int, block_size: int) -> int:
    """Rows of a block at a step of a run: 2, 4, 8 and so on up to all of them, for as many steps each."""
    sizes = [block_size]
    while sizes[0] > 2:
        sizes.insert(0, 1 << (sizes[0] - 1).bit_length() - 1)
    return sizes[min(step * len(sizes) // steps, len(sizes) - 1)]


def uno_loss(
    config: LoraConfig,
    parts: Any,
    target: TargetModel,
    batch: Batch,
    *,
    num_drafts: int,
    decay: float = 1.0,
    kl_weight: float = 0.0,
    max_starts: int | None = None,
) -> tuple[Any, dict[str, Any]]:
    """The loss of blocks that start at rows of the text, each as it will be while decoding: the row's token is pending, uniformly drawn tokens stand behind it.

    At every place it is the total variation between what the adapted row says and what the target says there, having read the text: the chance that
    rejection sampling rejects a draft. The clean copy of the text is run once for all blocks, and has no gradient.

    Args:
        config: of the adapter.
        parts: what is trained, as of `init_lora`.
        target: a Llama-family model with f32 parameters.
        batch: see there; nothing was captured.
        num_drafts: rows of noise in a block.
        decay: weight of place `k` is `decay ** k`.
        kl_weight: of the KL divergence from the target's distribution, beside the total variation.
        max_starts: blocks that are computed, as many of each sequence, drawn from the rows that count. None: one a row.

    Returns:
        The loss, and `metrics` as of `draft_loss`; the clean root counts in "accept_len" as it does in the engine.

    Source: "Unlocking Lossless Speedups in LLMs via Discrete Diffusion" (arXiv 2609.04010).
    """
    starts = draw_starts(batch, max_starts)
    noise = jax.random.randint(batch_key(batch), (*starts.rows.shape, num_drafts), 0, target.facts.vocab_size)
    adapter = fuse_lora(config, parts, target, jnp.float32)
    hidden = block_hidden(target, adapter, batch.tokens[:, :-1], starts.rows, noise)
    tally, head, total = Tally(starts, batch.tokens, certain=2), target.head(target.params), jnp.zeros(())
    for k in range(num_drafts):
        logits = hidden[:, :, k] @ head.T
        drafted = jax.nn.log_softmax(logits, axis=-1)
        teacher = jax.nn.log_softmax(starts.at(batch.hidden, 1 + k).astype(jnp.float32) @ head.T, axis=-1)
        probs = jnp.exp(teacher)
        loss = jnp.sum(jnp.abs(jnp.exp(drafted) - probs), axis=-1) / 2
        if kl_weight:
            loss += kl_weight * jnp.sum(probs * (teacher - drafted), axis=-1)
        total += decay**k * tally.add(k, logits, loss)
    return total, tally.metrics()


def block_hidden(target: TargetModel, adapter: Any, tokens, starts, noise):
    """Hidden states f32[B, A, N, H] of rows of noise, what the target's head reads.

    Args:
        target: a Llama-family model.
        adapter: as of `fuse_lora`.
        tokens: i32[B, T], the text.
        starts: i32[B, A], rows whose tokens are pending: a block sees them and those before.
        noise: i32[B, A, N], the tokens behind each.
    """
    c: LlamaConfig = target.config
    params, (num, length), shape = target.params, tokens.shape, noise.shape
    row = jnp.arange(length)
    sees = _Sees(shape, row <= starts[:, :, None], jnp.tri(shape[2], dtype=bool))
    frequency = inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling)
    clean_angles = angles(jnp.tile(row, num), frequency)
    noise_angles = angles((starts[:, :, None] + 1 + jnp.arange(shape[2])).reshape(-1), frequency)
    embed, everywhere = target.embedding(params), jnp.ones(noise.size, bool)
    clean, noisy = embed[tokens.reshape(-1)], embed[noise.reshape(-1)]
    for i in range(c.num_layers):
        weights = {"params": params[f"layer_{i}"]}
        bias = params["qkv_bias"][i] if c.qkv_bias else None
        vectors = (params["norms"][i], bias, params["qk_norms"][i] if c.qk_norm else None)
        layer, low = (c, clean.dtype, "xla", i), adapter.get(f"layer_{i}", {})
        clean, kv = _CleanLayer(*layer).apply(weights, clean, (), (num, length), *clean_angles, *vectors, {}, None)
        noisy, _ = _NoisyLayer(*layer).apply(weights, noisy, kv, sees, *noise_angles, *vectors, low, everywhere)
    return rms_norm(noisy, params["final_norm"], c.rms_norm_eps).reshape(*shape, -1)


class _Sees(NamedTuple):
    """Which rows those of a block attend to."""

    shape: tuple[int, int, int]  # B, A, N
    text: Any  # bool[B, A, T]
    block: Any  # bool[N, N]


class _CleanLayer(LlamaLayer):
    """The target's layer over whole sequences; gives its keys and values [B, T, Hkv, D] away."""

    def attend(self, x, kv, shape, cos, sin, qkv_bias, qk_norms, change):
        q, k, v = (
            part.reshape(*shape, *part.shape[1:]) for part in self.heads(x, cos, sin, qkv_bias, qk_norms, change)
        )
        q = q.reshape(*k.shape[:3], -1, k.shape[3]) * k.shape[3] ** -0.5
        scores = jnp.einsum("bthgd,bshd->bhgts", q, k, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(jnp.tri(shape[1], dtype=bool), scores, NEVER), axis=-1)
        return jnp.einsum("bhgts,bshd->bthgd", weights, v).reshape(x.shape[0], -1), (k, v)


class _NoisyLayer(LlamaLayer):
    """The target's layer over blocks; each sees the text up to its start by the keys and values of that, and its own earlier rows."""

    def attend(self, x, kv, sees: _Sees, cos, sin, qkv_bias, qk_norms, change):
        q, k, v = self.heads(x, cos, sin, qkv_bias, qk_norms, change)
        q, k, v = (part.reshape(*sees.shape, *part.shape[1:]) for part in (q, k, v))
        q = q.reshape(*k.shape[:4], -1, k.shape[4]) * k.shape[4] ** -0.5
        outside = jnp.einsum("banhgd,bshd->bhgans", q, kv[0], preferred_element_type=jnp.float32)
        outside = jnp.where(sees.text[:, None, None, :, None], outside, NEVER)
        inside = jnp.einsum("banhgd,bamhd->bhganm", q, k, preferred_element_type=jnp.float32)
        inside = jnp.where(sees.block, inside, NEVER)
        weights, length = jax.nn.softmax(jnp.concatenate([outside, inside], axis=-1), axis=-1), kv[0].shape[1]
        mixed = jnp.einsum("bhgans,bshd->banhgd", weights[..., :length], kv[1])
        mixed += jnp.einsum("bhganm,bamhd->banhgd", weights[..., length:], v)
        return mixed.reshape(x.shape[0], -1), kv
