"""Frozen-KV drafts, in flax linen: an assistant without keys and values of its own. Its layers ask questions of the target's KV and write none."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from jspec.models.attention import attend
from jspec.models.draft import shared_with_target
from jspec.models.linear import project, swiglu
from jspec.models.linen_tree import check_params, declared_params, declared_shapes
from jspec.models.llama import rms_norm
from jspec.models.rope import RopeScaling, angles, inverse_frequencies, rotate
from jspec.state.batches import ForwardBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrozenKVConfig:
    """Everything that shapes an assistant.

    Raises:
      ValueError: naming the field, its value and the rule.
    """

    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int  # the target's
    head_dim: int  # the target's
    context_len: int
    kv_layers: tuple[int, ...]  # the target's layer whose KV each layer reads
    num_centroids: int = 0  # of the head; 0: every token is scored
    top_centroids: int = 32
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rotary_dim: int = 0  # how much of a head turns with the position, as of the target's keys; 0: all

    kind = "frozen-kv-mtp"

    def __post_init__(self):
        sizes = (
            "vocab_size",
            "draft_vocab_size",
            "target_hidden_size",
            "hidden_size",
            "intermediate_size",
            "num_heads",
        )
        for name in (*sizes, "num_kv_heads", "head_dim", "context_len", "top_centroids"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if not 0 <= self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise ValueError(
                f"rotary_dim={self.rotary_dim} must be even and lie in [0, head_dim={self.head_dim}]; 0 turns all"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size={self.draft_vocab_size} exceeds vocab_size={self.vocab_size}")
        if not self.kv_layers or min(self.kv_layers) < 0:
            raise ValueError(f"kv_layers={self.kv_layers} must name a layer of the target for each layer of the draft")
        if self.num_centroids < 0 or (self.num_centroids and self.draft_vocab_size % self.num_centroids):
            raise ValueError(
                f"num_centroids={self.num_centroids} must divide draft_vocab_size={self.draft_vocab_size}: each stands for as many tokens; 0 scores all"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrozenKVFacts:
    """Static facts of an assistant that the workers plan with."""

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int  # the target's
    capture_layers: tuple[int, ...]  # ()
    context_len: int


class FrozenKVDraft(NamedTuple):
    """An assistant over the target's KV pool. All functions are pure and traceable.

    * `forward(params, token_ids: i32[T], hidden: [T, H], batch, kv_pages, *, pool_layers) -> (x: [T, Ha], hidden: [T, H])`: what the head reads, and what the
      next step is given. `batch` says what of the target's KV each row sees; the pool is read and not returned. `pool_layers`: static; where in the pool the KV
      lies that each layer of the draft asks.
    * `logits(params, x: [..., Ha]) -> f32[..., Vd]`; with centroids, -inf for tokens whose centroid is none of the best.
    * `token_ids(params, draft_ids: i32[...]) -> i32[...]`: ids in the target's vocabulary.
    * `embed(params, token_ids, hidden) -> [T, Ha]`, `query(params, x, positions, *, layer) -> [T, Hq, D]`, `layer_out(params, x, mixed, *, layer) -> [T, Ha]`,
      `project_out(params, x) -> (x, hidden)`: what `forward` is made of, around attention. Training uses them with dense attention.
    """

    facts: FrozenKVFacts
    config: FrozenKVConfig
    params: Any
    forward: Callable[..., Any]
    logits: Callable[..., Any]
    token_ids: Callable[..., Any]
    embed: Callable[..., Any]
    query: Callable[..., Any]
    layer_out: Callable[..., Any]
    project_out: Callable[..., Any]


class FrozenKVLayer(nn.Module):
    """Queries, output and MLP. `norms`: before attention, before the MLP."""

    config: FrozenKVConfig
    dtype: Any

    def setup(self):
        c, init = self.config, nn.initializers.normal(0.02)
        self.q = self.param("q", init, (c.num_heads * c.head_dim, c.hidden_size), self.dtype)
        self.o = self.param("o", init, (c.hidden_size, c.num_heads * c.head_dim), self.dtype)
        self.gate_up = self.param("gate_up", init, (2 * c.intermediate_size, c.hidden_size), self.dtype)
        self.down = self.param("down", init, (c.hidden_size, c.intermediate_size), self.dtype)
        self.norms = self.param("norms", nn.initializers.ones, (2, c.hidden_size), jnp.float32)

    def query(self, x, cos, sin):
        c = self.config
        heads = project(rms_norm(x, self.norms[0], c.rms_norm_eps), self.q).reshape(-1, c.num_heads, c.head_dim)
        return rotate(heads, cos, sin).astype(self.dtype)

    def layer_out(self, x, mixed):
        x = x + project(mixed.astype(self.dtype), self.o).astype(self.dtype)
        return x + swiglu(rms_norm(x, self.norms[1], self.config.rms_norm_eps), self.gate_up, self.down).astype(
            self.dtype
        )


class FrozenKV(nn.Module):
    """The whole assistant, but for the target's embedding table."""

    config: FrozenKVConfig
    dtype: Any

    def setup(self):
        c, init = self.config, nn.initializers.normal(0.02)
        self.layer = [FrozenKVLayer(c, self.dtype) for _ in c.kv_layers]
        self.pre = self.param("pre", init, (c.hidden_size, 2 * c.target_hidden_size), self.dtype)
        self.post = self.param("post", init, (c.target_hidden_size, c.hidden_size), self.dtype)
        self.final_norm = self.param("final_norm", nn.initializers.ones, (c.hidden_size,), jnp.float32)
        self.head = self.param("head", init, (c.draft_vocab_size, c.hidden_size), self.dtype)
        if c.num_centroids:
            self.centroids = self.param("centroids", init, (c.num_centroids, c.hidden_size), self.dtype)

    def declare(self) -> None:
        """Declares every parameter: what `init` needs to run, in place of a forward."""
        for layer in self.layer:
            _ = layer.q

    def embed(self, embeds, hidden):
        scaled = embeds * jnp.asarray(self.config.target_hidden_size**0.5, embeds.dtype)
        return project(jnp.concatenate([scaled, hidden], axis=-1), self.pre).astype(self.dtype)

    def query(self, x, cos, sin, layer: int):
        return self.layer[layer].query(x, cos, sin)

    def layer_out(self, x, mixed, layer: int):
        return self.layer[layer].layer_out(x, mixed)

    def project_out(self, x):
        x = rms_norm(x, self.final_norm, self.config.rms_norm_eps)
        return x, project(x, self.post).astype(self.dtype)

    def logits(self, x):
        found = project(x.astype(self.dtype), self.head)
        if not self.config.num_centroids:
            return found
        c = self.config
        best = jax.lax.top_k(project(x.astype(self.dtype), self.centroids), min(c.top_centroids, c.num_centroids))[1]
        chosen = jnp.zeros((x.shape[0], c.num_centroids), bool).at[jnp.arange(x.shape[0])[:, None], best].set(True)
        return jnp.where(jnp.repeat(chosen, c.draft_vocab_size // c.num_centroids, axis=1), found, -jnp.inf)


def frozen_kv_draft(
    config: FrozenKVConfig,
    params: Mapping[str, Any],
    *,
    embed: Any,
    token_ids: Any = None,
    kernels: str = "xla",
    dtype=jnp.float32,
) -> FrozenKVDraft:
    """An assistant over `params`.

    Args:
      config: sizes.
      params: the linen tree of `FrozenKV(config, dtype)`.
      embed: [V, H], the target's embedding table, shared.
      token_ids: i32[Vd], the target's id of each draft id; None: they are the same.
      kernels, dtype: as `llama_target`.
    Raises:
      ValueError: a leaf is missing, unknown or of another shape, or the assistant was made for another target.
    """
    dtype = jnp.dtype(dtype)
    check_params(params, frozen_param_shapes(config, dtype))
    shared = shared_with_target(config, hidden_size=config.target_hidden_size, embed=embed, token_ids=token_ids)
    facts = FrozenKVFacts(
        vocab_size=config.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        hidden_size=config.target_hidden_size,
        capture_layers=(),
        context_len=config.context_len,
    )
    functions = _functions(config, kernels, dtype, token_ids is not None)
    return FrozenKVDraft(facts, config, {"own": params, "shared": shared}, **functions)


@functools.lru_cache(maxsize=32)
def _functions(config: FrozenKVConfig, kernels: str, dtype: Any, mapped: bool) -> dict[str, Callable[..., Any]]:
    """The same objects for the same arguments, so that drafts of one shape share their compiled programs."""
    draft, scale = FrozenKV(config, dtype), config.head_dim**-0.5

    def apply(params, *args, method: str):
        return draft.apply({"params": params["own"]}, *args, method=method)

    def embed(params, token_ids, hidden):
        embeds = jnp.take(params["shared"]["embed"], token_ids, axis=0, mode="clip")
        return apply(params, embeds, hidden.astype(dtype), method="embed")

    def query(params, x, positions, *, layer: int):
        turned = config.rotary_dim or config.head_dim
        frequency = inverse_frequencies(turned, config.rope_theta, config.rope_scaling)
        return apply(params, x, *angles(positions, frequency), layer, method="query")

    def layer_out(params, x, mixed, *, layer: int):
        return apply(params, x, mixed, layer, method="layer_out")

    def project_out(params, x):
        return apply(params, x, method="project_out")

    def forward(params, token_ids, hidden, batch: ForwardBatch, kv_pages, *, pool_layers: tuple[int, ...]):
        x = embed(params, token_ids, hidden)
        for layer, in_pool in enumerate(pool_layers):
            q = query(params, x, batch.positions, layer=layer)
            mixed = attend(q, kv_pages, batch, layer=in_pool, scale=scale, backend=kernels)
            x = layer_out(params, x, mixed.reshape(x.shape[0], -1), layer=layer)
        return project_out(params, x)

    def logits(params, x):
        found = apply(params, x.reshape(-1, config.hidden_size), method="logits")
        return found.reshape(*x.shape[:-1], config.draft_vocab_size)

    def token_ids(params, draft_ids):
        return jnp.take(params["shared"]["token_ids"], draft_ids, mode="clip") if mapped else draft_ids

    return {
        "forward": forward,
        "logits": logits,
        "token_ids": token_ids,
        "embed": embed,
        "query": query,
        "layer_out": layer_out,
        "project_out": project_out,
    }


def frozen_param_shapes(config: FrozenKVConfig, dtype=jnp.float32) -> Any:
    """The parameter tree of `FrozenKV(config, dtype)` as shapes and dtypes; allocates nothing."""
    return declared_shapes(FrozenKV(config, jnp.dtype(dtype)))


def init_frozen_params(key, config: FrozenKVConfig, dtype=jnp.float32) -> Any:
    """Random parameters to train from."""
    return declared_params(FrozenKV(config, jnp.dtype(dtype)), key)
