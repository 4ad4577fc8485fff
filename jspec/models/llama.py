"""Llama-family targets (Llama, Mistral, Qwen2, Qwen3, SmolLM) over the paged KV pool, in flax linen."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.config import KERNEL_BACKENDS
from jspec.models.attention import attend
from jspec.models.linear import adapt, project
from jspec.models.linen_tree import check_params, declared_shapes
from jspec.models.parallel import AXIS, POOL, RANKS, agreed, num_devices, num_ranks, part_of, specs, split
from jspec.models.rope import RopeScaling, angles, inverse_frequencies, rotate
from jspec.models.target import ForwardOutput, TargetFacts, TargetModel
from jspec.pallas_kernels.kv_move import kv_move
from jspec.pallas_kernels.paged_kv_write import init_kv_pages, paged_kv_write
from jspec.pallas_kernels.pool_rules import validate_pool
from jspec.state.batches import ForwardBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Everything that shapes the forward of one model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_len: int  # longest sequence the position encoding was made for, in tokens
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False  # the head is the embedding table
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3: RMSNorm of every query and key head
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "context_len",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary encoding turns pairs")

    @property
    def qkv_heads(self) -> int:
        """Heads in the fused projection: queries, then keys, then values."""
        return self.num_heads + 2 * self.num_kv_heads


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * weight over the last axis, computed in f32, returned in x's dtype."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight).astype(x.dtype)


class LlamaLayer(nn.Module):
    """One block: attention over the pages, then SwiGLU. Its vectors come stacked from the parent, so that a model has few leaves."""

    config: LlamaConfig
    dtype: Any
    kernels: str
    index: int
    axis: str | None = None
    ranks: str | None = None

    def setup(self):
        c, init = self.config, nn.initializers.normal(0.02)
        self.qkv = self.param("qkv", init, (c.qkv_heads * c.head_dim, c.hidden_size), self.dtype)
        self.o = self.param("o", init, (c.hidden_size, c.num_heads * c.head_dim), self.dtype)
        self.gate_up = self.param("gate_up", init, (2 * c.intermediate_size, c.hidden_size), self.dtype)
        self.down = self.param("down", init, (c.hidden_size, c.intermediate_size), self.dtype)

    def __call__(self, x, kv_pages, batch: ForwardBatch, cos, sin, norms, qkv_bias, qk_norms, adapter, adapted):
        """x[T, H] -> (x[T, H], kv_pages). `adapter`: of this layer, see `jspec.models.lora`; {} where there is none."""
        eps, change = self.config.rms_norm_eps, functools.partial(adapt, adapter, adapted)
        read = rms_norm(x, norms[0], eps)
        mixed, kv_pages = self.attend(read, kv_pages, batch, cos, sin, qkv_bias, qk_norms, change)
        x = x + self.summed(change("o", mixed, project(mixed, self.o))).astype(self.dtype)
        return x + self.mlp(rms_norm(x, norms[1], eps), change).astype(self.dtype), kv_pages

    def mlp(self, x, change):
        """SwiGLU. Ranks hold a part of it each, and run it on the tokens of all: x[T, H] -> f32[T, H]."""
        if self.ranks is not None:
            x = lax.all_gather(x, self.ranks, tiled=True)
        gate, up = jnp.split(change("gate_up", x, project(x, self.gate_up)), 2, axis=-1)
        inner = (nn.silu(gate) * up).astype(self.dtype)
        part = change("down", inner, project(inner, self.down))
        return self.summed(part) if self.ranks is None else lax.psum_scatter(part, self.ranks, tiled=True)

    def summed(self, part):
        """A product of which each device has a part."""
        return part if self.axis is None else lax.psum(part, self.axis)

    def attend(self, x, kv_pages, batch, cos, sin, qkv_bias, qk_norms, change):
        """x[T, H] -> (attention output[T, Hq * D], kv_pages with this layer's KV written)."""
        c = self.config
        q, k, v = self.heads(x, cos, sin, qkv_bias, qk_norms, change)
        kv_pages = paged_kv_write(kv_pages, k, v, batch.slots, layer=self.index, backend=self.kernels)
        out = attend(q, kv_pages, batch, layer=self.index, scale=c.head_dim**-0.5, backend=self.kernels)
        return out.reshape(-1, c.num_heads * c.head_dim), kv_pages

    def heads(self, x, cos, sin, qkv_bias, qk_norms, change):
        """x[T, H] -> (queries[T, Hq, D], keys and values[T, Hkv, D]), rotated."""
        c = self.config
        heads = change("qkv", x, project(x, self.qkv))
        if qkv_bias is not None:
            heads = heads + qkv_bias
        heads = heads.reshape(-1, c.qkv_heads, c.head_dim)
        q, k, v = jnp.split(heads, [c.num_heads, c.num_heads + c.num_kv_heads], axis=1)
        if qk_norms is not None:
            q, k = rms_norm(q, qk_norms[0], c.rms_norm_eps), rms_norm(k, qk_norms[1], c.rms_norm_eps)
        return tuple(part.astype(self.dtype) for part in (rotate(q, cos, sin), rotate(k, cos, sin), v))


class Llama(nn.Module):
    """The whole model, or with the name of a mesh axis the part of it that one device runs: of everything (`axis`), or of the MLPs (`ranks`).

    Big matrices are one leaf a layer, since a slice of a stacked one is a copy on CPU; vectors are stacked.
    """

    config: LlamaConfig
    dtype: Any
    kernels: str = "xla"
    axis: str | None = None
    ranks: str | None = None

    def setup(self):
        c, none = self.config, [None] * self.config.num_layers
        normal, ones, zeros = nn.initializers.normal(0.02), nn.initializers.ones, nn.initializers.zeros
        self.embed = self.param("embed", normal, (c.vocab_size, c.hidden_size), self.dtype)
        self.head = self.embed if c.tie_embeddings else self.param("head", normal, self.embed.shape, self.dtype)
        layers = range(c.num_layers)
        self.layer = [LlamaLayer(c, self.dtype, self.kernels, i, self.axis, self.ranks) for i in layers]
        self.norms = self.param("norms", ones, (c.num_layers, 2, c.hidden_size), jnp.float32)
        self.final_norm = self.param("final_norm", ones, (c.hidden_size,), jnp.float32)
        bias_shape, norm_shape = (c.num_layers, c.qkv_heads * c.head_dim), (c.num_layers, 2, c.head_dim)
        self.qkv_bias = self.param("qkv_bias", zeros, bias_shape, jnp.float32) if c.qkv_bias else none
        self.qk_norms = self.param("qk_norms", ones, norm_shape, jnp.float32) if c.qk_norm else none

    def __call__(
        self, batch: ForwardBatch, kv_pages, capture_layers: tuple[int, ...] = (), adapter=None, adapted=None
    ) -> ForwardOutput:
        """See `TargetModel.forward` and `TargetModel.forward_adapted`."""
        c = self.config
        cos, sin = angles(batch.positions, inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling))
        x = self.embedded(batch.input_ids)
        after = []
        # Unrolled: a scan over layers would copy the weights and the pool on CPU.
        for i, layer in enumerate(self.layer):
            vectors = (self.norms[i], self.qkv_bias[i], self.qk_norms[i])
            low = {} if adapter is None else adapter.get(f"layer_{i}", {})
            x, kv_pages = layer(x, kv_pages, batch, cos, sin, *vectors, low, adapted)
            after.append(x)
        captured = [after[i] for i in capture_layers]
        stacked = jnp.stack(captured, axis=1) if captured else jnp.zeros((x.shape[0], 0, c.hidden_size), x.dtype)
        return ForwardOutput(rms_norm(x, self.final_norm, c.rms_norm_eps), stacked, kv_pages)

    def embedded(self, ids):
        """Rows of the embedding table; of a device's part of it, added up: each row lies on one device."""
        if self.axis is None:
            return jnp.take(self.embed, ids, axis=0, mode="clip")
        size = self.embed.shape[0]
        ids = jnp.clip(ids, 0, size * lax.axis_size(self.axis) - 1) - size * lax.axis_index(self.axis)
        rows = jnp.take(self.embed, ids, axis=0, mode="clip")
        return lax.psum(jnp.where(((ids >= 0) & (ids < size))[:, None], rows, 0), self.axis)

    def declare(self) -> None:
        """Declares every parameter: what `init` needs to run, in place of a forward."""
        for layer in self.layer:
            _ = layer.qkv  # linen sets a submodule up when it is first touched

    def logits(self, hidden: jax.Array) -> jax.Array:
        """See `TargetModel.logits`."""
        flat = hidden.reshape(-1, self.config.hidden_size)
        return project(flat.astype(self.dtype), self.head).reshape(*hidden.shape[:-1], self.config.vocab_size)


def llama_target(
    config: LlamaConfig, params: Mapping[str, Any], *, kernels: str = "xla", dtype=jnp.float32, mesh: Mesh | None = None
) -> TargetModel:
    """A target model over `params`.

    Args:
      config: sizes and switches.
      params: the linen tree of `Llama(config, dtype)`; `llama_weights.fuse` makes one from a checkpoint.
      kernels: which implementation the kernels run: "xla", "pallas" or "pallas_interpret".
      dtype: of weights, activations and the KV pool: f32 or bf16. Products accumulate in f32, norms and logits are f32.
      mesh: devices that share the model, where `parallel.place_params` put the parameters; None: one device. With a mesh of ranks, `forward` is one rank's
        part, to be run by all of them at once: see `parallel.on_ranks`.
    Raises:
      ValueError: `kernels` is unknown, the devices cannot share the model, or a leaf is missing, unknown or of another shape.
    """
    if kernels not in KERNEL_BACKENDS:
        raise ValueError(f"{kernels=} is unknown: choose one of {KERNEL_BACKENDS}")
    dtype = jnp.dtype(dtype)
    check_params(params, param_shapes(config, dtype))
    functions = _functions(config, kernels, dtype, mesh)
    return TargetModel(_facts(config, dtype), params, **functions, kernels=kernels, mesh=mesh, config=config)


@functools.lru_cache(maxsize=32)
def _functions(config: LlamaConfig, kernels: str, dtype: Any, mesh: Mesh | None) -> dict[str, Callable[..., Any]]:
    """The same objects for the same arguments, so that models of one shape share their compiled programs."""
    part = part_of(config, mesh)
    axis, ranks = AXIS if num_devices(mesh) > 1 else None, RANKS if num_ranks(mesh) > 1 else None
    apply: Callable[..., Any] = Llama(part, dtype, kernels, axis, ranks).apply
    params_spec, whole = specs(param_shapes(config, dtype), mesh), PartitionSpec()

    def init_kv(num_pages: int, page_size: int):
        validate_pool(page_size=page_size, head_dim=config.head_dim, dtype=dtype, backend=kernels)
        where = None if axis is None else NamedSharding(mesh, POOL)
        heads = config.num_kv_heads
        return init_kv_pages(config.num_layers, num_pages, page_size, heads, config.head_dim, dtype, where=where)

    def forward(
        params, batch: ForwardBatch, kv_pages, *, capture_layers: tuple[int, ...] = (), recurrent: Any = ()
    ) -> ForwardOutput:
        del recurrent  # there is none
        for i in capture_layers:
            if not 0 <= i < config.num_layers:
                raise ValueError(
                    f"{capture_layers=} must lie in 0..{config.num_layers - 1}: the model has {config.num_layers} layers"
                )

        @split(mesh, (params_spec, whole, POOL), ForwardOutput(whole, whole, POOL))
        def run(params, batch, kv_pages):
            return apply({"params": params}, batch, kv_pages, tuple(capture_layers))

        return run(params, batch, kv_pages)

    def forward_adapted(
        params, adapter, adapted, batch: ForwardBatch, kv_pages, *, recurrent: Any = ()
    ) -> ForwardOutput:
        del recurrent  # it has none
        if mesh is not None:
            raise ValueError("an adapter runs on one device: build the target without a mesh")
        return apply({"params": params}, batch, kv_pages, (), adapter, adapted)

    def logits(params, hidden: jax.Array) -> jax.Array:
        @split(mesh, (params_spec, whole), PartitionSpec(*[None] * (hidden.ndim - 1), AXIS))
        def run(params, hidden):
            return apply({"params": params}, hidden, method="logits")

        return run(params, hidden)

    @split(mesh, (POOL, whole, whole), POOL)
    def move_kv(kv_pages, source, target):
        return kv_move(kv_pages, source, target, backend=kernels)

    def embedding(params) -> jax.Array:
        return params["embed"]

    def head(params) -> jax.Array:
        return params["embed" if config.tie_embeddings else "head"]

    return {
        "init_kv": init_kv,
        "forward": forward,
        "forward_adapted": forward_adapted,
        "logits": logits,
        "move_kv": move_kv,
        "embedding": embedding,
        "head": head,
        "agreed": functools.partial(agreed, mesh),
    }


def _facts(config: LlamaConfig, dtype: Any) -> TargetFacts:
    return TargetFacts(
        vocab_size=config.vocab_size,
        context_len=config.context_len,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        kv_layers=tuple(range(config.num_layers)),
        eos_token_ids=config.eos_token_ids,
        kv_bytes_per_token=2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize,
    )


def param_shapes(config: LlamaConfig, dtype=jnp.float32) -> Any:
    """The parameter tree of `Llama(config, dtype)` as shapes and dtypes; allocates nothing."""
    return declared_shapes(Llama(config, jnp.dtype(dtype)))
