"""Small targets for tests and research that go through the real Llama forward."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jspec.models.llama import LlamaConfig, llama_target, param_shapes
from jspec.models.parallel import place_params
from jspec.models.target import TargetModel


def markov_target(next_token: Sequence[int], *, margin: float = 10.0, **options: Any) -> TargetModel:
    """A target whose next token is a table: after token `t` it says `next_token[t]`.

    Args:
      next_token: one id in `0..V-1` for each of the V ids.
      margin: logit of the next token; all others have 0.
      options: see `bigram_target`.
    """
    table = np.zeros((len(next_token), len(next_token)), np.float32)
    for token, successor in enumerate(next_token):
        if not 0 <= successor < len(next_token):
            raise ValueError(
                f"next_token[{token}]={successor} must lie in 0..{len(next_token) - 1}: the table is its own vocabulary"
            )
        table[token, successor] = margin
    return bigram_target(table, **options)


def bigram_target(
    logits: Any,
    *,
    num_layers: int = 2,
    num_heads: int = 2,
    num_kv_heads: int = 1,
    head_dim: int = 8,
    context_len: int = 512,
    eos_token_ids: tuple[int, ...] = (),
    kernels: str = "xla",
    dtype: Any = jnp.float32,
) -> TargetModel:
    """A target whose logits after token `t` are `logits[t]`, whatever came before: its distribution is known exactly.

    KV is written and read as in any model; only what attention and MLP add to the residual stream is zero.

    Args:
      logits: f32[V, V].
    """
    table = np.asarray(logits, np.float32)
    vocab_size = len(table)
    if table.shape != (vocab_size, vocab_size):
        raise ValueError(f"{table.shape=} must be square: one row of logits for each token")
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=vocab_size,
        intermediate_size=8,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        context_len=context_len,
        eos_token_ids=eos_token_ids,
    )
    params = random_params(0, config, dtype)
    for i in range(num_layers):
        params[f"layer_{i}"] |= {name: jnp.zeros_like(params[f"layer_{i}"][name]) for name in ("o", "down")}
    # One-hot rows stay one-hot under RMSNorm and come out with this length.
    length = 1.0 / np.sqrt(1.0 / vocab_size + config.rms_norm_eps)
    params["embed"] = jnp.eye(vocab_size, dtype=dtype)
    params["head"] = jnp.asarray(table.T / length, dtype)
    return llama_target(config, params, kernels=kernels, dtype=dtype)


def random_target(
    seed: int,
    *,
    vocab_size: int = 64,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    context_len: int = 512,
    eos_token_ids: tuple[int, ...] = (),
    kernels: str = "xla",
    dtype: Any = jnp.float32,
    mesh: Mesh | None = None,
) -> TargetModel:
    """A random transformer whose logits depend on every KV entry before them and lie well apart.

    The same seed gives the same weights on every machine, and on any number of devices.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        context_len=context_len,
        eos_token_ids=eos_token_ids,
    )
    params = place_params(config, mesh, random_params(seed, config, dtype))
    return llama_target(config, params, kernels=kernels, dtype=dtype, mesh=mesh)


# Gain of each matrix: the spread of an output for inputs of spread 1. Queries and keys of spread 1.4 give scores of spread 2, so that attention
# neither averages nor looks at one position; the head's 4 keeps the two best tokens apart.
_GAINS = {"embed": 1.0, "qkv": 1.4, "o": 1.5, "gate_up": 1.0, "down": 1.0, "head": 4.0, "qkv_bias": 1.0}


def random_params(seed: int, config: LlamaConfig, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Parameters of `Llama(config, dtype)`, spread so that every matrix matters; norms are 1, biases random."""
    rng = np.random.default_rng(seed)

    def leaf(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> jax.Array:
        name = path[-1].key
        if name in ("norms", "final_norm", "qk_norms"):
            return jnp.ones(shape.shape, shape.dtype)
        fan_in = 1 if name in ("embed", "qkv_bias") else shape.shape[-1]
        return jnp.asarray(rng.standard_normal(shape.shape, np.float32) * _GAINS[name] / np.sqrt(fan_in), shape.dtype)

    return jax.tree_util.tree_map_with_path(leaf, param_shapes(config, dtype))
