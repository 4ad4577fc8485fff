"""Rotary position encoding of the rotate-half kind, with the two scalings that are implemented."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

KINDS = ("linear", "llama3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How frequencies are stretched for a context longer than the one the model was first trained on."""

    kind: str  # "linear": all by `factor`; "llama3": low frequencies by `factor`, high ones not, a ramp between
    factor: float
    low_freq_factor: float = 1.0  # llama3 only
    high_freq_factor: float = 4.0  # llama3 only
    original_context_len: int = 8192  # llama3 only, tokens

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(
                f"rope scaling kind={self.kind!r} is not implemented: use one of {KINDS}, or None for no scaling"
            )
        if not self.factor >= 1.0:
            raise ValueError(f"rope scaling factor={self.factor} must be at least 1: it stretches the context")
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope scaling low_freq_factor={self.low_freq_factor} and high_freq_factor={self.high_freq_factor}"
                " must be positive and in this order"
            )


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """f32[D / 2]: radians per position. Computed in f32, as the frameworks these models were trained with do."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequency = np.float32(1.0) / np.power(np.float32(theta), exponent)
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        return (frequency / np.float32(scaling.factor)).astype(np.float32)
    # Llama 3.1: wavelengths above `original / low` are stretched in full, below `original / high` not at all.
    wavelength = 2 * math.pi / frequency
    ratio = scaling.original_context_len / wavelength
    ramp = (ratio - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    ramp = np.clip(ramp, 0.0, 1.0)
    return ((1 - ramp) * frequency / scaling.factor + ramp * frequency).astype(np.float32)


def angles(positions: jax.Array, frequency: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """(cos, sin), each f32[T, 1, D / 2], of i32[T] positions; made once a forward and used by every layer."""
    angle = positions.astype(jnp.float32)[:, None, None] * frequency
    # Without the barrier XLA fuses the cosines into every layer and computes them anew for every head.
    return jax.lax.optimization_barrier((jnp.cos(angle), jnp.sin(angle)))


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """f32[T, N, D]: each head's two halves rotated by the token's angles. Where there are angles for a part of the head, so are the halves of its first part."""
    first, second, rest = jnp.split(x, [cos.shape[-1], 2 * cos.shape[-1]], axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
