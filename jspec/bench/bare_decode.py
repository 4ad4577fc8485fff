"""The baseline: greedy decoding of one sequence as one would write it by hand in plain JAX, with nothing of the engine.

Same weights in the same layout, a dense KV cache per layer that is donated to every step, one jitted function. What the engine loses
against this is what paging, packing and scheduling cost.
"""

import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jspec.models.llama import LlamaConfig
from jspec.models.rope import inverse_frequencies


class BareDecode(NamedTuple):
    token_ids: list[int]
    seconds_per_step: float  # mean over the decode steps, compilation and prefill excluded


def bare_decode(
    config: LlamaConfig, params: Any, prompt_ids: Sequence[int], num_tokens: int, *, cache_len: int = 512
) -> BareDecode:
    """Greedy tokens after a prompt; never stops at an EOS.

    Args:
      config, params: of a Llama-family model, `params` as `llama_weights.fuse` lays them out.
      prompt_ids: at least one token.
      num_tokens: how many to make.
      cache_len: positions of the dense cache.
    Raises:
      ValueError: the sequence does not fit into the cache.
    """
    if not prompt_ids or num_tokens < 1 or len(prompt_ids) + num_tokens > cache_len:
        raise ValueError(f"{len(prompt_ids)=} + {num_tokens=} must fit into {cache_len=}, and both be at least 1")
    step = bare_step(config)
    caches = init_caches(config, cache_len, params["embed"].dtype)
    token, caches = step(params, caches, jnp.asarray(prompt_ids, jnp.int32), jnp.int32(0))
    tokens = [token]
    if num_tokens > 1:
        compiled = step.lower(params, caches, token, jnp.int32(0)).compile()
        positions = list(jnp.arange(len(prompt_ids), len(prompt_ids) + num_tokens - 1, dtype=jnp.int32))
        jax.block_until_ready((token, positions))
        start = time.perf_counter()
        for position in positions:
            token, caches = compiled(params, caches, token, position)
            tokens.append(token)
        jax.block_until_ready(token)
        elapsed = time.perf_counter() - start
    return BareDecode([int(t[0]) for t in tokens], elapsed / (num_tokens - 1) if num_tokens > 1 else 0.0)


def init_caches(config: LlamaConfig, cache_len: int, dtype: Any) -> list[tuple[jax.Array, jax.Array]]:
    """(keys, values) per layer, each [Hkv, S, D]: a head's keys are one matrix."""
    shape = (config.num_kv_heads, cache_len, config.head_dim)
    return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers)]


def bare_step(config: LlamaConfig) -> Any:
    """Jitted `(params, caches, tokens i32[T], start i32) -> (next token i32[1], caches)`; the caches are donated."""
    return jax.jit(functools.partial(_step, config), donate_argnums=1)


def _step(config: LlamaConfig, params: Any, caches: Any, tokens: jax.Array, start: jax.Array):
    c = config
    num_tokens, dtype = tokens.shape[0], params["embed"].dtype
    position = start + jnp.arange(num_tokens)
    angle = position[:, None, None] * inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling)
    cos, sin = lax.optimization_barrier((jnp.cos(angle), jnp.sin(angle)))  # once a step, not once a layer and head
    visible = jnp.arange(caches[0][0].shape[1]) <= position[:, None]  # [T, S]
    group = c.num_heads // c.num_kv_heads
    x = params["embed"][tokens]
    new_caches = []
    for i, (keys, values) in enumerate(caches):
        layer = params[f"layer_{i}"]
        heads = _matmul(_norm(x, params["norms"][i, 0], c), layer["qkv"])
        if c.qkv_bias:
            heads = heads + params["qkv_bias"][i]
        heads = heads.reshape(num_tokens, -1, c.head_dim)
        q, k, v = jnp.split(heads, [c.num_heads, c.num_heads + c.num_kv_heads], axis=1)
        if c.qk_norm:
            q, k = _norm(q, params["qk_norms"][i, 0], c), _norm(k, params["qk_norms"][i, 1], c)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        keys = lax.dynamic_update_slice_in_dim(keys, k.swapaxes(0, 1).astype(dtype), start, axis=1)
        values = lax.dynamic_update_slice_in_dim(values, v.swapaxes(0, 1).astype(dtype), start, axis=1)
        new_caches.append((keys, values))
        q = q.reshape(num_tokens, c.num_kv_heads, group, c.head_dim).transpose(1, 0, 2, 3) * c.head_dim**-0.5
        scores = jnp.einsum("htgd,hsd->htgs", q.astype(dtype), keys, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(visible[:, None, :], scores, -jnp.inf), axis=-1)
        mixed = jnp.einsum("htgs,hsd->htgd", weights.astype(dtype), values, preferred_element_type=jnp.float32)
        x = x + _matmul(mixed.transpose(1, 0, 2, 3).reshape(num_tokens, -1).astype(dtype), layer["o"]).astype(dtype)
        gate, up = jnp.split(_matmul(_norm(x, params["norms"][i, 1], c), layer["gate_up"]), 2, axis=-1)
        x = x + _matmul((jax.nn.silu(gate) * up).astype(dtype), layer["down"]).astype(dtype)
    last = _norm(x[-1:], params["final_norm"], c)
    logits = _matmul(last, params["embed"] if c.tie_embeddings else params["head"])
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), new_caches


def _matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _norm(x: jax.Array, weight: jax.Array, config: LlamaConfig) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + config.rms_norm_eps) * weight).astype(
        x.dtype
    )


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
