"""Gated delta layers (gated DeltaNet, arXiv 2412.06464), a token at a time."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jspec.models.recurrence import Carried, convolve

_L2_EPS = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """Sizes of a layer, and its arithmetic; a `Mixer`.

    The projection gives, in this order: what is convolved (queries, keys, values), the gate (`out_size`), and of each value head the strength of its write
    and its decay.
    """

    num_key_heads: int  # queries have as many
    num_value_heads: int
    key_dim: int  # of a head
    value_dim: int
    conv_size: int  # K, taps of the convolution

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name}={getattr(self, field.name)} must be at least 1")
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_value_heads={self.num_value_heads} must be a multiple of num_key_heads={self.num_key_heads}"
            )

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return 2 * self.num_key_heads * self.key_dim + self.out_size

    @property
    def in_size(self) -> int:
        return self.channels + self.out_size + 2 * self.num_value_heads

    @property
    def out_size(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def window_shape(self) -> tuple[int, int]:
        return self.conv_size - 1, self.channels

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.num_value_heads, self.key_dim, self.value_dim

    def vectors(self) -> dict[str, tuple[int, ...]]:
        return {
            "conv": (self.conv_size, self.channels),
            "a_log": (self.num_value_heads,),
            "dt_bias": (self.num_value_heads,),
            "mixer_norm": (self.value_dim,),
        }

    def step(self, weights, carried: Carried, projected) -> tuple[Carried, Any]:
        """state = decay * state;  state += k (beta * (v - k^T state));  out = q^T state."""
        per_key = self.num_value_heads // self.num_key_heads
        mixed, _, beta, decay = jnp.split(
            projected,
            [self.channels, self.channels + self.out_size, self.channels + self.out_size + self.num_value_heads],
        )
        window, mixed = convolve(carried.window, mixed, weights["conv"])
        q, k, v = jnp.split(mixed, [self.num_key_heads * self.key_dim, 2 * self.num_key_heads * self.key_dim])
        q, k = (_unit(x.reshape(self.num_key_heads, self.key_dim)) for x in (q, k))
        q, k = (jnp.repeat(x, per_key, axis=0) for x in (q * self.key_dim**-0.5, k))
        decay = jnp.exp(-jnp.exp(weights["a_log"]) * jax.nn.softplus(decay + weights["dt_bias"]))
        state = decay[:, None, None] * carried.state
        known = jnp.sum(state * k[:, :, None], axis=1)
        delta = (v.reshape(known.shape) - known) * jax.nn.sigmoid(beta)[:, None]
        state = state + k[:, :, None] * delta[:, None, :]
        return Carried(window, state), jnp.sum(state * q[:, :, None], axis=1).reshape(-1)

    def finish(self, weights, out, projected, eps: float):
        """RMSNorm of each head, then gated."""
        heads = out.reshape(*out.shape[:-1], self.num_value_heads, self.value_dim)
        scale = jax.lax.rsqrt(jnp.mean(heads * heads, axis=-1, keepdims=True) + eps)
        normed = (heads * scale * weights["mixer_norm"]).reshape(out.shape)
        return normed * jax.nn.silu(projected[..., self.channels : self.channels + self.out_size])


def _unit(x):
    """Vectors of length 1 along the last axis."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _L2_EPS)
