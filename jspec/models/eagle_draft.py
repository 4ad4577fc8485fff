"""Draft models of the EAGLE family, in flax linen: EAGLE-3, EAGLE-1/2 and the modules of multi-layer EAGLE.

They differ in three places, and nowhere else: what a feature is, how a feature and a token become the input of the layer, and whose head is used.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh

from jspec.models.attention import attend
from jspec.models.draft import DraftFacts, DraftModel, shared_with_target
from jspec.models.linear import project, swiglu
from jspec.models.linen_tree import check_params, declared_params, declared_shapes
from jspec.models.llama import rms_norm
from jspec.models.parallel import everywhere
from jspec.models.rope import RopeScaling, angles, inverse_frequencies, rotate
from jspec.pallas_kernels.paged_kv_write import init_kv_pages, paged_kv_write
from jspec.pallas_kernels.pool_rules import validate_pool
from jspec.state.batches import ForwardBatch

KINDS = ("eagle3", "eagle", "multi-layer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleConfig:
    """Everything that shapes a draft.

    Kinds:
      "eagle3": `fc` fuses hidden states of several target layers; the layer reads norm(embedding) beside norm(feature), its residual stream is
        the feature; own head over a reduced vocabulary (arXiv 2503.01840).
      "eagle": `fc` joins embedding and feature, the target's last hidden state; no norms but the one before the MLP; the target's head
        (arXiv 2401.15077, 2406.16858).
      "multi-layer": `num_modules` modules, each `norm(feature), norm(embedding) -> fc -> layer -> norm -> the target's head`, one for each
        position ahead (DeepSeek-V3, arXiv 2412.19437).
    """

    kind: str
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_len: int
    capture_layers: tuple[int, ...] = ()
    num_modules: int = 1
    chained: bool = False
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} must be one of {', '.join(KINDS)}")
        sizes = ("vocab_size", "draft_vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "context_len", "num_modules"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary encoding turns pairs")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size={self.draft_vocab_size} exceeds vocab_size={self.vocab_size}")
        if (self.kind == "eagle3") != bool(self.capture_layers):
            raise ValueError(
                f"capture_layers={self.capture_layers} must {'name the target layers to fuse' if self.kind == 'eagle3' else 'be empty'} for {self.kind!r}"
            )
        if self.kind != "multi-layer" and self.num_modules != 1:
            raise ValueError(f"num_modules={self.num_modules} must be 1 for {self.kind!r}")
        if self.chained and self.kind != "multi-layer":
            raise ValueError(f"chained=True makes no sense for {self.kind!r}: it has one module")

    @property
    def qkv_heads(self) -> int:
        """Heads in the fused projection: queries, then keys, then values."""
        return self.num_heads + 2 * self.num_kv_heads

    @property
    def own_head(self) -> bool:
        """Whether the head is part of the draft, and not rows of the target's."""
        return self.kind == "eagle3"


class EagleModule(nn.Module):
    """One draft layer and what leads into it. Subclasses say how a feature and an embedding become the layer's input."""

    config: EagleConfig
    dtype: Any

    def declare_layer(self, input_size: int, num_norms: int):
        c, init = self.config, nn.initializers.normal(0.02)
        self.qkv = self.param("qkv", init, (c.qkv_heads * c.head_dim, input_size), self.dtype)
        self.o = self.param("o", init, (c.hidden_size, c.num_heads * c.head_dim), self.dtype)
        self.gate_up = self.param("gate_up", init, (2 * c.intermediate_size, c.hidden_size), self.dtype)
        self.down = self.param("down", init, (c.hidden_size, c.intermediate_size), self.dtype)
        self.norms = self.param("norms", nn.initializers.ones, (num_norms, c.hidden_size), jnp.float32)

    def norm(self, x, index: int):
        return rms_norm(x, self.norms[index], self.config.rms_norm_eps)

    def project_in(self, embeds, hidden):
        """(heads f32[T, Hq + 2 Hkv, D], residual [T, H])."""
        inputs, residual = self.combine(embeds, hidden)
        return project(inputs, self.qkv).reshape(-1, self.config.qkv_heads, self.config.head_dim), residual

    def project_out(self, residual, mixed):
        """Attention's output joins the residual stream; then SwiGLU. The last norm of `norms` is the one before it."""
        x = residual + project(mixed.astype(self.dtype), self.o).astype(self.dtype)
        return x + swiglu(self.norm(x, -1), self.gate_up, self.down).astype(self.dtype)


class Eagle3Module(EagleModule):
    """`norms`: of the embedding, of the feature, before the MLP."""

    def setup(self):
        self.declare_layer(2 * self.config.hidden_size, 3)

    def combine(self, embeds, hidden):
        return jnp.concatenate([self.norm(embeds, 0), self.norm(hidden, 1)], axis=-1), hidden


class Eagle1Module(EagleModule):
    """`norms`: before the MLP."""

    def setup(self):
        size = self.config.hidden_size
        self.declare_layer(size, 1)
        self.fc = self.param("fc", nn.initializers.normal(0.02), (size, 2 * size), self.dtype)
        self.fc_bias = self.param("fc_bias", nn.initializers.zeros, (size,), jnp.float32)

    def combine(self, embeds, hidden):
        x = (project(jnp.concatenate([embeds, hidden], axis=-1), self.fc) + self.fc_bias).astype(self.dtype)
        return x, x


class MultiLayerModule(EagleModule):
    """`norms`: of the feature, of the embedding, before attention, before the MLP."""

    def setup(self):
        size = self.config.hidden_size
        self.declare_layer(size, 4)
        self.fc = self.param("fc", nn.initializers.normal(0.02), (size, 2 * size), self.dtype)
        self.final_norm = self.param("final_norm", nn.initializers.ones, (size,), jnp.float32)

    def combine(self, embeds, hidden):
        joined = jnp.concatenate([self.norm(hidden, 0), self.norm(embeds, 1)], axis=-1)
        x = project(joined, self.fc).astype(self.dtype)
        return self.norm(x, 2), x


_MODULES = {"eagle3": Eagle3Module, "eagle": Eagle1Module, "multi-layer": MultiLayerModule}


class EagleDraft(nn.Module):
    """The whole draft, but for what it shares with the target."""

    config: EagleConfig
    dtype: Any

    def setup(self):
        c, init = self.config, nn.initializers.normal(0.02)
        self.module = [_MODULES[c.kind](c, self.dtype) for _ in range(c.num_modules)]
        if c.kind == "eagle3":
            self.fc = self.param("fc", init, (c.hidden_size, len(c.capture_layers) * c.hidden_size), self.dtype)
            self.final_norm = self.param("final_norm", nn.initializers.ones, (c.hidden_size,), jnp.float32)
            self.head = self.param("head", init, (c.draft_vocab_size, c.hidden_size), self.dtype)

    def declare(self) -> None:
        """Declares every parameter: what `init` needs to run, in place of a forward."""
        for module in self.module:
            _ = module.qkv

    def feature(self, captured, hidden):
        if self.config.kind != "eagle3":
            return hidden
        return project(captured.reshape(captured.shape[0], -1), self.fc).astype(self.dtype)

    def project_in(self, embeds, hidden, module: int):
        return self.module[module].project_in(embeds, hidden)

    def project_out(self, residual, mixed, module: int):
        return self.module[module].project_out(residual, mixed)

    def normed(self, hidden, module: int):
        """What the head reads."""
        c = self.config
        if c.kind == "eagle":
            return hidden
        weight = self.final_norm if c.kind == "eagle3" else self.module[module].final_norm
        return rms_norm(hidden, weight, c.rms_norm_eps)

    def own_head(self):
        return self.head


def eagle_draft(
    config: EagleConfig,
    params: Mapping[str, Any],
    *,
    embed: Any,
    head: Any,
    token_ids: Any = None,
    kernels: str = "xla",
    dtype=jnp.float32,
    mesh: Mesh | None = None,
) -> DraftModel:
    """A draft over `params`.

    Args:
      config: sizes and kind.
      params: the linen tree of `EagleDraft(config, dtype)`.
      embed: [V, H], the target's embedding table, shared.
      head: [Vd, H], the target's head, or the rows of it at `token_ids`; not read by "eagle3".
      token_ids: i32[Vd], the target's id of each draft id; None: they are the same.
      kernels, dtype: as `llama_target`.
      mesh: devices that share the target; each runs the whole draft.
    Raises:
      ValueError: a leaf is missing, unknown or of another shape.
    """
    dtype = jnp.dtype(dtype)
    check_params(params, draft_param_shapes(config, dtype))
    head = None if config.own_head else head
    shared = shared_with_target(config, hidden_size=config.hidden_size, embed=embed, head=head, token_ids=token_ids)
    functions = _functions(config, kernels, dtype, token_ids is not None, mesh)
    return DraftModel(_facts(config, dtype), config, {"own": params, "shared": shared}, **functions)


@functools.lru_cache(maxsize=32)
def _functions(
    config: EagleConfig, kernels: str, dtype: Any, mapped: bool, mesh: Mesh | None
) -> dict[str, Callable[..., Any]]:
    """The same objects for the same arguments, so that drafts of one shape share their compiled programs."""
    draft = EagleDraft(config, dtype)
    scale = config.head_dim**-0.5

    def apply(params, *args, method: str):
        return draft.apply({"params": params["own"]}, *args, method=method)

    def init_kv(num_pages: int, page_size: int):
        validate_pool(page_size=page_size, head_dim=config.head_dim, dtype=dtype, backend=kernels)
        return init_kv_pages(config.num_modules, num_pages, page_size, config.num_kv_heads, config.head_dim, dtype)

    def feature(params, captured, hidden):
        return apply(params, captured, hidden, method="feature")

    def project_in(params, token_ids, hidden, *, module: int = 0):
        embeds = jnp.take(params["shared"]["embed"], token_ids, axis=0, mode="clip")
        return apply(params, embeds, hidden, module, method="project_in")

    def project_out(params, residual, mixed, *, module: int = 0):
        return apply(params, residual, mixed, module, method="project_out")

    def write_and_attend(q, k, v, batch: ForwardBatch, kv_pages, *, layer: int):
        kv_pages = paged_kv_write(kv_pages, k, v, batch.slots, layer=layer, backend=kernels)
        return attend(q, kv_pages, batch, layer=layer, scale=scale, backend=kernels), kv_pages

    def forward(params, token_ids, hidden, batch: ForwardBatch, kv_pages, *, module: int = 0):
        heads, residual = project_in(params, token_ids, hidden, module=module)
        cos, sin = rope(config, batch.positions)
        q, k, v = split_heads(config, heads, cos, sin, dtype)
        mixed, kv_pages = everywhere(mesh, functools.partial(write_and_attend, layer=module))(q, k, v, batch, kv_pages)
        return project_out(params, residual, mixed.reshape(residual.shape[0], -1), module=module), kv_pages

    def logits(params, hidden, *, module: int = 0):
        flat = apply(params, hidden.reshape(-1, config.hidden_size), module, method="normed")
        head = apply(params, method="own_head") if config.own_head else params["shared"]["head"]
        return project(flat.astype(dtype), head).reshape(*hidden.shape[:-1], config.draft_vocab_size)

    def token_ids(params, draft_ids):
        return jnp.take(params["shared"]["token_ids"], draft_ids, mode="clip") if mapped else draft_ids

    return {
        "init_kv": init_kv,
        "feature": feature,
        "forward": forward,
        "logits": logits,
        "token_ids": token_ids,
        "project_in": project_in,
        "project_out": project_out,
    }


def rope(config: EagleConfig, positions):
    """(cos, sin) at `positions`."""
    return angles(positions, inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling))


def split_heads(config: EagleConfig, heads, cos, sin, dtype):
    """(q, k, v), each [T, heads, D], from the fused projection; queries and keys turned."""
    q, k, v = jnp.split(heads, [config.num_heads, config.num_heads + config.num_kv_heads], axis=1)
    return tuple(part.astype(dtype) for part in (rotate(q, cos, sin), rotate(k, cos, sin), v))


def _facts(config: EagleConfig, dtype: Any) -> DraftFacts:
    return DraftFacts(
        vocab_size=config.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        hidden_size=config.hidden_size,
        num_modules=config.num_modules,
        capture_layers=config.capture_layers,
        context_len=config.context_len,
        chained=config.chained,
        kv_bytes_per_token=2 * config.num_modules * config.num_kv_heads * config.head_dim * dtype.itemsize,
    )


def draft_param_shapes(config: EagleConfig, dtype=jnp.float32) -> Any:
    """The parameter tree of `EagleDraft(config, dtype)` as shapes and dtypes; allocates nothing."""
    return declared_shapes(EagleDraft(config, jnp.dtype(dtype)))


def init_draft_params(key, config: EagleConfig, dtype=jnp.float32) -> Any:
    """Random parameters to train from."""
    return declared_params(EagleDraft(config, jnp.dtype(dtype)), key)
