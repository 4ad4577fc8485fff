"""Mamba-2 layers (state space duality, arXiv 2405.21060), a token at a time."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jspec.models.recurrence import Carried, convolve


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2:
    """Sizes of a layer, and its arithmetic; a `Mixer`.

    The projection gives, in this order: the gate (`inner`), what is convolved (x, B, C), and the step size of each head.
    """

    num_heads: int
    head_dim: int
    num_groups: int  # of B and C, and of the norm: heads of a group share them
    state_size: int
    conv_size: int  # K, taps of the convolution

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name}={getattr(self, field.name)} must be at least 1")
        if self.num_heads % self.num_groups:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_groups={self.num_groups}")

    @property
    def inner(self) -> int:
        """Channels of x."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.inner + 2 * self.num_groups * self.state_size

    @property
    def in_size(self) -> int:
        return self.inner + self.channels + self.num_heads

    @property
    def out_size(self) -> int:
        return self.inner

    @property
    def window_shape(self) -> tuple[int, int]:
        return self.conv_size - 1, self.channels

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.num_heads, self.head_dim, self.state_size

    def vectors(self) -> dict[str, tuple[int, ...]]:
        return {
            "conv": (self.conv_size, self.channels),
            "conv_bias": (self.channels,),
            "a_log": (self.num_heads,),
            "dt_bias": (self.num_heads,),
            "skip": (self.num_heads,),
            "mixer_norm": (self.inner,),
        }

    def step(self, weights, carried: Carried, projected) -> tuple[Carried, Any]:
        """state = exp(dt * A) * state + dt * x B^T;  out = state C + skip * x."""
        per_group = self.num_heads // self.num_groups
        _, mixed, dt = jnp.split(projected, [self.inner, self.inner + self.channels])
        window, mixed = convolve(carried.window, mixed, weights["conv"], weights["conv_bias"])
        x, b, c = jnp.split(mixed, [self.inner, self.inner + self.num_groups * self.state_size])
        x = x.reshape(self.num_heads, self.head_dim)
        b, c = (jnp.repeat(v.reshape(self.num_groups, self.state_size), per_group, axis=0) for v in (b, c))
        dt = jax.nn.softplus(dt + weights["dt_bias"])
        decay = jnp.exp(-jnp.exp(weights["a_log"]) * dt)
        state = decay[:, None, None] * carried.state + (dt[:, None] * x)[..., None] * b[:, None, :]
        out = jnp.sum(state * c[:, None, :], axis=-1) + weights["skip"][:, None] * x
        return Carried(window, state), out.reshape(-1)

    def finish(self, weights, out, projected, eps: float):
        """Gated, then RMSNorm over each group."""
        gated = out * jax.nn.silu(projected[..., : self.inner])
        groups = gated.reshape(*gated.shape[:-1], self.num_groups, -1)
        scale = jax.lax.rsqrt(jnp.mean(groups * groups, axis=-1, keepdims=True) + eps)
        return (groups * scale).reshape(gated.shape) * weights["mixer_norm"]
