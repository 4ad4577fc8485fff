"""Hybrid targets: recurrent layers (Mamba-2, gated delta) beside attention over the paged KV pool."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jspec.config import KERNEL_BACKENDS
from jspec.models.attention import attend
from jspec.models.gated_delta import GatedDelta
from jspec.models.linear import adapt, project
from jspec.models.llama import LlamaConfig, check_params, rms_norm
from jspec.models.mamba2 import Mamba2
from jspec.models.recurrence import RecurrentState, bytes_per_entry, commit, init_recurrent, walk
from jspec.models.rope import angles, inverse_frequencies, rotate
from jspec.models.target import ForwardOutput, TargetFacts, TargetModel
from jspec.pallas_kernels.kv_move import kv_move
from jspec.pallas_kernels.paged_kv_write import init_kv_pages, paged_kv_write
from jspec.pallas_kernels.pool_rules import validate_pool
from jspec.state.batches import ForwardBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """Everything that shapes the forward of one model."""

    base: LlamaConfig  # sizes, attention, norms, MLP: all that a Llama has too
    mixer: Mamba2 | GatedDelta  # of every layer that is not one of attention
    attention_layers: tuple[int, ...]  # ascending; these have KV, and are layers 0, 1, ... of the pool
    rotary_dim: int  # of a head of `head_dim`: the first so many turn with the position
    attention_gate: bool = False  # what attention says is multiplied by the sigmoid of a projection of its own

    def __post_init__(self):
        layers, count, head_dim = self.attention_layers, self.base.num_layers, self.base.head_dim
        if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= count:
            raise ValueError(
                f"attention_layers={layers} must ascend within 0..{count - 1}, and be at least one: a model needs a layer with KV"
            )
        if len(layers) == count:
            raise ValueError(f"attention_layers={layers} are all layers: a hybrid has one without attention")
        if not 2 <= self.rotary_dim <= head_dim or self.rotary_dim % 2:
            raise ValueError(f"rotary_dim={self.rotary_dim} must be even and lie in [2, head_dim={head_dim}]")
        if self.base.qkv_bias:
            raise ValueError("base.qkv_bias=True is not implemented: no hybrid family has it")

    @property
    def num_recurrent(self) -> int:
        return self.base.num_layers - len(self.attention_layers)

    @property
    def fused_heads(self) -> int:
        """Heads of the fused projection of attention: queries, keys, values, and gates where there are."""
        return self.base.qkv_heads + (self.base.num_heads if self.attention_gate else 0)


class HybridLayer(nn.Module):
    """One block: attention or recurrence, then SwiGLU. Its vectors come stacked from the parent, so that a model has few leaves."""

    config: HybridConfig
    dtype: Any
    kernels: str
    kind: str  # "attention" or "recurrent"
    index: int  # among the layers of its kind

    def setup(self):
        c, mixer, init = self.config.base, self.config.mixer, nn.initializers.normal(0.02)
        attends = self.kind == "attention"
        into = self.config.fused_heads * c.head_dim if attends else mixer.in_size
        out = c.num_heads * c.head_dim if attends else mixer.out_size
        self.project_in = self.param("in", init, (into, c.hidden_size), self.dtype)
        self.project_out = self.param("out", init, (c.hidden_size, out), self.dtype)
        self.gate_up = self.param("gate_up", init, (2 * c.intermediate_size, c.hidden_size), self.dtype)
        self.down = self.param("down", init, (c.hidden_size, c.intermediate_size), self.dtype)

    def __call__(self, x, kv_pages, recurrent, batch: ForwardBatch, cos, sin, norms, vectors, adapter, adapted):
        """x[T, H] -> (x[T, H], the pool, the recurrent state, what a verify leaves for `commit`). `adapter`: of this layer, as of `adapt`."""
        eps, change = self.config.base.rms_norm_eps, functools.partial(adapt, adapter, adapted)
        after: Any = ()
        read = rms_norm(x, norms[0], eps)
        projected = change("in", read, project(read, self.project_in))
        if self.kind == "attention":
            mixed, kv_pages = self.attend(projected, kv_pages, batch, cos, sin, vectors)
        else:
            mixer = self.config.mixer
            step = functools.partial(mixer.step, vectors)
            mixed, recurrent, after = walk(step, recurrent, batch, projected, layer=self.index)
            mixed = mixer.finish(vectors, mixed, projected, eps)
        mixed = mixed.astype(self.dtype)
        x = x + change("out", mixed, project(mixed, self.project_out)).astype(self.dtype)
        read = rms_norm(x, norms[1], eps)
        gate, up = jnp.split(change("gate_up", read, project(read, self.gate_up)), 2, axis=-1)
        inner = (nn.silu(gate) * up).astype(self.dtype)
        return x + change("down", inner, project(inner, self.down)).astype(self.dtype), kv_pages, recurrent, after

    def attend(self, heads, kv_pages, batch: ForwardBatch, cos, sin, vectors):
        """Projected heads, f32 -> (attention output[T, Hq * D], the pool with this layer's KV written)."""
        c = self.config.base
        ends = [c.num_heads, c.num_heads + c.num_kv_heads, c.qkv_heads]
        q, k, v, gate = jnp.split(heads.reshape(-1, self.config.fused_heads, c.head_dim), ends, axis=1)
        if c.qk_norm:
            norms = vectors["qk_norms"]
            q, k = rms_norm(q, norms[0], c.rms_norm_eps), rms_norm(k, norms[1], c.rms_norm_eps)
        q, k, v = (part.astype(self.dtype) for part in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        kv_pages = paged_kv_write(kv_pages, k, v, batch.slots, layer=self.index, backend=self.kernels)
        out = attend(q, kv_pages, batch, layer=self.index, scale=c.head_dim**-0.5, backend=self.kernels)
        out = out.reshape(-1, c.num_heads * c.head_dim)
        if self.config.attention_gate:
            out = out * jax.nn.sigmoid(gate.reshape(out.shape))
        return out, kv_pages


class Hybrid(nn.Module):
    """The whole model. Matrices are one leaf a layer, vectors are stacked, see `Llama`."""

    config: HybridConfig
    dtype: Any
    kernels: str = "xla"

    def setup(self):
        c = self.config.base
        normal, ones, zeros = nn.initializers.normal(0.02), nn.initializers.ones, nn.initializers.zeros
        self.embed = self.param("embed", normal, (c.vocab_size, c.hidden_size), self.dtype)
        self.head = self.embed if c.tie_embeddings else self.param("head", normal, self.embed.shape, self.dtype)
        layers, seen = [], {"attention": 0, "recurrent": 0}
        for i in range(c.num_layers):
            kind = "attention" if i in self.config.attention_layers else "recurrent"
            layers.append(HybridLayer(self.config, self.dtype, self.kernels, kind, seen[kind]))
            seen[kind] += 1
        self.layer = layers
        self.norms = self.param("norms", ones, (c.num_layers, 2, c.hidden_size), jnp.float32)
        self.final_norm = self.param("final_norm", ones, (c.hidden_size,), jnp.float32)
        shape = (len(self.config.attention_layers), 2, c.head_dim)
        self.qk_norms = self.param("qk_norms", ones, shape, jnp.float32) if c.qk_norm else None
        self.vectors = {
            name: self.param(name, zeros, (self.config.num_recurrent, *shape), jnp.float32)
            for name, shape in self.config.mixer.vectors().items()
        }

    def __call__(
        self, batch: ForwardBatch, kv_pages, recurrent, capture_layers: tuple[int, ...] = (), adapter=None, adapted=None
    ) -> ForwardOutput:
        """See `TargetModel.forward` and `TargetModel.forward_adapted`."""
        c = self.config.base
        cos, sin = angles(batch.positions, inverse_frequencies(self.config.rotary_dim, c.rope_theta, c.rope_scaling))
        x = jnp.take(self.embed, batch.input_ids, axis=0, mode="clip")
        after, left = [], []
        for i, layer in enumerate(self.layer):
            if layer.kind == "attention":
                vectors = {} if self.qk_norms is None else {"qk_norms": self.qk_norms[layer.index]}
            else:
                vectors = {name: stacked[layer.index] for name, stacked in self.vectors.items()}
            low = {} if adapter is None else adapter.get(f"layer_{i}", {})
            given = (batch, cos, sin, self.norms[i], vectors, low, adapted)
            x, kv_pages, recurrent, remembered = layer(x, kv_pages, recurrent, *given)
            after.append(x)
            if remembered:
                left.append(remembered)
        captured = [after[i] for i in capture_layers]
        stacked = jnp.stack(captured, axis=1) if captured else jnp.zeros((x.shape[0], 0, c.hidden_size), x.dtype)
        hidden = rms_norm(x, self.final_norm, c.rms_norm_eps)
        return ForwardOutput(hidden, stacked, kv_pages, recurrent, tuple(left))

    def declare(self) -> None:
        """Declares every parameter: what `init` needs to run, in place of a forward."""
        for layer in self.layer:
            _ = layer.down  # linen sets a submodule up when it is first touched

    def logits(self, hidden: jax.Array) -> jax.Array:
        """See `TargetModel.logits`."""
        c = self.config.base
        flat = hidden.reshape(-1, c.hidden_size)
        return project(flat.astype(self.dtype), self.head).reshape(*hidden.shape[:-1], c.vocab_size)


def hybrid_target(
    config: HybridConfig, params: Mapping[str, Any], *, kernels: str = "xla", dtype=jnp.float32
) -> TargetModel:
    """A target model over `params`, on one device.

    Args:
      config: sizes and switches.
      params: the linen tree of `Hybrid(config, dtype)`; `hybrid_files.fuse_hybrid` makes one from a checkpoint.
      kernels: as of `llama_target`; recurrence is XLA's either way.
      dtype: of weights, activations, KV and convolution windows: f32 or bf16. Recurrent states are f32.
    Raises:
      ValueError: `kernels` is unknown, or a leaf is missing, unknown or of another shape.
    """
    if kernels not in KERNEL_BACKENDS:
        raise ValueError(f"{kernels=} is unknown: choose one of {KERNEL_BACKENDS}")
    dtype = jnp.dtype(dtype)
    check_params(params, hybrid_shapes(config, dtype))
    return TargetModel(
        _facts(config, dtype), params, **_functions(config, kernels, dtype), kernels=kernels, config=config
    )


@functools.lru_cache(maxsize=32)
def _functions(config: HybridConfig, kernels: str, dtype: Any) -> dict[str, Callable[..., Any]]:
    """The same objects for the same arguments, so that models of one shape share their compiled programs."""
    base, apply = config.base, Hybrid(config, dtype, kernels).apply

    def init_kv(num_pages: int, page_size: int):
        validate_pool(page_size=page_size, head_dim=base.head_dim, dtype=dtype, backend=kernels)
        layers = len(config.attention_layers)
        return init_kv_pages(layers, num_pages, page_size, base.num_kv_heads, base.head_dim, dtype)

    def init_state(num_rows: int, num_pages: int, page_size: int) -> RecurrentState:
        return init_recurrent(config.mixer, config.num_recurrent, num_rows, num_pages, page_size, dtype)

    def forward(
        params, batch: ForwardBatch, kv_pages, *, capture_layers: tuple[int, ...] = (), recurrent: Any = ()
    ) -> ForwardOutput:
        for i in capture_layers:
            if not 0 <= i < base.num_layers:
                raise ValueError(
                    f"{capture_layers=} must lie in 0..{base.num_layers - 1}: the model has {base.num_layers} layers"
                )
        if not isinstance(recurrent, RecurrentState):
            raise ValueError(f"{recurrent=} must be the state of the rows: give what `init_recurrent` made")
        return apply({"params": params}, batch, kv_pages, recurrent, tuple(capture_layers))

    def forward_adapted(params, adapter, adapted, batch: ForwardBatch, kv_pages, *, recurrent) -> ForwardOutput:
        return apply({"params": params}, batch, kv_pages, recurrent, (), adapter, adapted)

    def logits(params, hidden: jax.Array) -> jax.Array:
        return apply({"params": params}, hidden, method="logits")

    def move_kv(kv_pages, source, target):
        return kv_move(kv_pages, source, target, backend=kernels)

    def embedding(params) -> jax.Array:
        return params["embed"]

    def head(params) -> jax.Array:
        return params["embed" if base.tie_embeddings else "head"]

    return {
        "init_kv": init_kv,
        "init_recurrent": init_state,
        "forward": forward,
        "forward_adapted": forward_adapted,
        "commit": commit,
        "logits": logits,
        "move_kv": move_kv,
        "embedding": embedding,
        "head": head,
    }


def _facts(config: HybridConfig, dtype: Any) -> TargetFacts:
    base = config.base
    return TargetFacts(
        vocab_size=base.vocab_size,
        context_len=base.context_len,
        hidden_size=base.hidden_size,
        num_layers=base.num_layers,
        num_kv_heads=base.num_kv_heads,
        head_dim=base.head_dim,
        kv_layers=config.attention_layers,
        eos_token_ids=base.eos_token_ids,
        kv_bytes_per_token=2 * len(config.attention_layers) * base.num_kv_heads * base.head_dim * dtype.itemsize,
        recurrent_bytes=bytes_per_entry(config.mixer, config.num_recurrent, dtype),
    )


def hybrid_shapes(config: HybridConfig, dtype=jnp.float32) -> Any:
    """The parameter tree of `Hybrid(config, dtype)` as shapes and dtypes; allocates nothing."""
    init = functools.partial(Hybrid(config, jnp.dtype(dtype)).init, method="declare")
    return jax.eval_shape(init, jax.random.key(0))["params"]
