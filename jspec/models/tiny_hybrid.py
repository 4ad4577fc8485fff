"""Small hybrid targets for tests and research, beside those of `tiny`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models.gated_delta import GatedDelta
from jspec.models.hybrid import HybridConfig, hybrid_shapes, hybrid_target
from jspec.models.llama import LlamaConfig
from jspec.models.mamba2 import Mamba2
from jspec.models.target import TargetModel

MIXERS: dict[str, Mamba2 | GatedDelta] = {
    "mamba2": Mamba2(num_heads=4, head_dim=8, num_groups=2, state_size=8, conv_size=4),
    "gated-delta": GatedDelta(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=8, conv_size=4),
}

# As in `tiny`. The convolution's taps are of one size, so that the last inputs matter as much as the newest; decays lie between 0.6 and 0.98 a token.
_GAINS = {"embed": 1.0, "in": 1.4, "out": 1.5, "gate_up": 1.0, "down": 1.0, "head": 4.0}


def random_hybrid(
    seed: int,
    mixer: str = "mamba2",
    *,
    vocab_size: int = 64,
    hidden_size: int = 32,
    num_layers: int = 3,
    attention_layers: tuple[int, ...] = (1,),
    context_len: int = 512,
    eos_token_ids: tuple[int, ...] = (),
    kernels: str = "xla",
    dtype: Any = jnp.float32,
) -> TargetModel:
    """A random hybrid whose logits depend on every token before them, and lie well apart. The same seed gives the same weights on every machine.

    Args:
      seed: of the weights.
      mixer: "mamba2" or "gated-delta": what the layers without attention are.
      num_layers, attention_layers, kernels, dtype: see `HybridConfig` and `hybrid_target`.
    """
    if mixer not in MIXERS:
        raise ValueError(f"{mixer=} is unknown: choose one of {tuple(MIXERS)}")
    base = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        context_len=context_len,
        eos_token_ids=eos_token_ids,
    )
    config = HybridConfig(
        base=base,
        mixer=MIXERS[mixer],
        attention_layers=attention_layers,
        rotary_dim=8,
        attention_gate=mixer == "gated-delta",
    )
    rng = np.random.default_rng(seed)

    def leaf(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> jax.Array:
        name, size = path[-1].key, shape.shape
        if name in ("norms", "final_norm", "qk_norms", "mixer_norm", "skip"):
            value = np.ones(size, np.float32)
        elif name == "a_log":
            value = np.log(rng.uniform(0.05, 0.5, size))
        elif name in ("conv_bias", "dt_bias"):
            value = 0.3 * rng.standard_normal(size)
        elif name == "conv":
            value = rng.standard_normal(size)
        else:
            value = rng.standard_normal(size) * _GAINS[name] / np.sqrt(1 if name == "embed" else size[-1])
        return jnp.asarray(value.astype(np.float32), shape.dtype)

    params = jax.tree_util.tree_map_with_path(leaf, hybrid_shapes(config, dtype))
    return hybrid_target(config, params, kernels=kernels, dtype=dtype)
