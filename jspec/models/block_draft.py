"""Block drafts, in flax linen: a few layers that fill in a block of masked tokens at once, over keys and values made of the target's hidden states.

The backbone is DFlash's (arXiv 2602.06036). DSpark (arXiv 2607.05147) puts two small heads on it: a Markov head, which lets each proposed token know
the one before it, and a confidence head.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh

from jspec.models.attention import attend
from jspec.models.draft import shared_with_target
from jspec.models.linear import project, swiglu
from jspec.models.linen_tree import check_params, declared_params, declared_shapes
from jspec.models.llama import rms_norm
from jspec.models.parallel import everywhere
from jspec.models.rope import RopeScaling, angles, inverse_frequencies, rotate
from jspec.pallas_kernels.paged_kv_write import init_kv_pages, paged_kv_write
from jspec.pallas_kernels.pool_rules import validate_pool
from jspec.state.batches import ForwardBatch

KINDS = ("dflash", "dspark")
MARKOV_HEADS = ("vanilla", "gated", "rnn")
MAX_BLOCK = 32
"""Rows of a block see each other by the bits of one word."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockDraftConfig:
    """Everything that shapes a block draft.

    Kinds:
      "dflash": the block is the pending token and `block_size - 1` masks; row `k` proposes the token at its own position.
      "dspark": the same backbone with a Markov head of rank `markov_rank`, and a confidence head where `confidence` is set. `block_size` counts the
        proposed tokens. With `sample_from_anchor` the block has as many rows, and row `k` proposes the token after its position; without, it has one
        more and works as in "dflash".
    """

    kind: str
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_len: int
    capture_layers: tuple[int, ...]
    block_size: int
    mask_token_id: int
    qk_norm: bool = True
    window: int | None = None  # positions of the context that a row sees, its block's among them; None: all
    markov_rank: int = 0
    markov_head: str = "vanilla"
    confidence: bool = False
    sample_from_anchor: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} must be one of {', '.join(KINDS)}")
        sizes = ("vocab_size", "draft_vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
        for name in (*sizes, "num_kv_heads", "head_dim", "context_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary encoding turns pairs")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size={self.draft_vocab_size} exceeds vocab_size={self.vocab_size}")
        if not self.capture_layers:
            raise ValueError("capture_layers=() must name the target layers whose hidden states the draft reads")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id={self.mask_token_id} must lie in 0..{self.vocab_size - 1}: it is a row of the target's embedding table"
            )
        if self.num_drafts < 1 or self.num_rows > MAX_BLOCK:
            fewest, most = self.block_size - self.num_drafts + 1, self.block_size - self.num_rows + MAX_BLOCK
            raise ValueError(
                f"block_size={self.block_size} must lie in {fewest}..{most} for {self.kind!r}: a block proposes something, and its rows see each other "
                "by the bits of one word"
            )
        if self.window is not None and self.window < self.num_rows:
            raise ValueError(f"window={self.window} must be at least {self.num_rows}, the rows of a block")
        if self.kind == "dspark":
            if self.markov_rank < 1:
                raise ValueError(f"markov_rank={self.markov_rank} must be at least 1 for 'dspark'")
            if self.markov_head not in MARKOV_HEADS:
                raise ValueError(f"markov_head={self.markov_head!r} must be one of {', '.join(MARKOV_HEADS)}")
        elif self.markov_rank or self.confidence or self.sample_from_anchor:
            raise ValueError(
                f"markov_rank={self.markov_rank}, confidence={self.confidence}, sample_from_anchor={self.sample_from_anchor} "
                "must be left out for 'dflash': they are of 'dspark'"
            )

    @property
    def num_drafts(self) -> int:
        """Tokens that a block proposes."""
        return self.block_size if self.kind == "dspark" else self.block_size - 1

    @property
    def num_rows(self) -> int:
        """Rows of a block, the pending token's included."""
        return self.block_size + (self.kind == "dspark" and not self.sample_from_anchor)

    @property
    def qkv_heads(self) -> int:
        """Heads in the fused projection: queries, then keys, then values."""
        return self.num_heads + 2 * self.num_kv_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockDraftFacts:
    """Static facts of a draft that the engine and the workers plan with."""

    vocab_size: int  # of the target: what `token_ids` maps into
    draft_vocab_size: int  # tokens that the draft can propose
    hidden_size: int  # the target's too: both read one embedding table
    num_layers: int  # of the draft, each a layer of the draft's pool
    capture_layers: tuple[int, ...]  # target layers whose hidden states `context` fuses
    context_len: int  # longest sequence the position encoding was made for, in tokens
    kv_bytes_per_token: int  # K and V of all layers, in the pool's dtype


class BlockDraftModel(NamedTuple):
    """A block draft over the paged KV pool, at the target's page ids. All functions are pure and traceable.

    A token of the context enters as keys and values only, made of the target's hidden states of it; no query runs for it.

    * `init_kv(num_pages, page_size) -> kv_pages`.
    * `context(params, captured: [T, M, H]) -> [T, H]`: the fused hidden states that keys and values are made of.
    * `inject(params, context: [T, H], positions: i32[T], slots: i32[T], kv_pages) -> kv_pages`: writes them, for all layers; slot 0 is the sink.
    * `forward(params, token_ids: i32[B * W], batch, kv_pages) -> (hidden: [B * W, H], kv_pages)`: the rows of blocks, after the final norm. Every row of a
      block sees the context and the whole block. The block's own KV lies at its positions until `inject` puts the context's there.
    * `logits(params, hidden: [..., H]) -> f32[..., Vd]`, by the target's head.
    * `token_ids(params, draft_ids: i32[...]) -> i32[...]`: ids in the target's vocabulary.
    * `previous(params, token_ids: i32[...]) -> [..., R]`: the Markov head's embedding of a token, given in the target's ids. "dspark".
    * `markov(params, hidden: [..., H], previous: [..., R], state: [..., R]) -> (f32[..., Vd], state)`: what the token before adds to the logits of a row.
      `state` starts as zeros, and is used by the "rnn" head only. "dspark".
    * `confidence(params, hidden: [..., H], previous: [..., R]) -> f32[...]`: logit of the chance that a row's token is accepted if those before it are.
      "dspark" with a confidence head.
    * `layer_in(params, x: [T, H], positions, *, layer) -> (q, k, v)`, `layer_out(params, x, mixed: [T, Hq * D], *, layer) -> [T, H]`,
      `context_kv(params, context, positions, *, layer) -> (k, v)`, `normed(params, x)`: what `forward` and `inject` are made of, around attention. Training
      uses them with dense attention.
    """

    facts: BlockDraftFacts
    config: BlockDraftConfig
    params: Any
    init_kv: Callable[..., Any]
    context: Callable[..., Any]
    inject: Callable[..., Any]
    forward: Callable[..., Any]
    logits: Callable[..., Any]
    token_ids: Callable[..., Any]
    previous: Callable[..., Any]
    markov: Callable[..., Any]
    confidence: Callable[..., Any]
    layer_in: Callable[..., Any]
    layer_out: Callable[..., Any]
    context_kv: Callable[..., Any]
    normed: Callable[..., Any]


class BlockLayer(nn.Module):
    """One layer. `norms`: before attention, before the MLP."""

    config: BlockDraftConfig
    dtype: Any

    def setup(self):
        c, init = self.config, nn.initializers.normal(0.02)
        self.qkv = self.param("qkv", init, (c.qkv_heads * c.head_dim, c.hidden_size), self.dtype)
        self.o = self.param("o", init, (c.hidden_size, c.num_heads * c.head_dim), self.dtype)
        self.gate_up = self.param("gate_up", init, (2 * c.intermediate_size, c.hidden_size), self.dtype)
        self.down = self.param("down", init, (c.hidden_size, c.intermediate_size), self.dtype)
        self.norms = self.param("norms", nn.initializers.ones, (2, c.hidden_size), jnp.float32)
        self.qk_norms = (
            self.param("qk_norms", nn.initializers.ones, (2, c.head_dim), jnp.float32) if c.qk_norm else None
        )

    def layer_in(self, x, cos, sin):
        """(q, k, v) of the rows of a block, each [T, heads, D]."""
        c = self.config
        heads = project(rms_norm(x, self.norms[0], c.rms_norm_eps), self.qkv).reshape(-1, c.qkv_heads, c.head_dim)
        q, k, v = jnp.split(heads, [c.num_heads, c.num_heads + c.num_kv_heads], axis=1)
        return self.turned(q, 0, cos, sin), self.turned(k, 1, cos, sin), v.astype(self.dtype)

    def context_kv(self, context, cos, sin):
        """(k, v) of tokens of the context."""
        c = self.config
        heads = project(context, self.qkv[c.num_heads * c.head_dim :]).reshape(-1, 2 * c.num_kv_heads, c.head_dim)
        k, v = jnp.split(heads, 2, axis=1)
        return self.turned(k, 1, cos, sin), v.astype(self.dtype)

    def turned(self, heads, norm: int, cos, sin):
        if self.qk_norms is not None:
            heads = rms_norm(heads, self.qk_norms[norm], self.config.rms_norm_eps)
        return rotate(heads, cos, sin).astype(self.dtype)

    def layer_out(self, x, mixed):
        x = x + project(mixed.astype(self.dtype), self.o).astype(self.dtype)
        return x + swiglu(rms_norm(x, self.norms[1], self.config.rms_norm_eps), self.gate_up, self.down).astype(
            self.dtype
        )


class BlockDraft(nn.Module):
    """The whole draft, but for what it shares with the target."""

    config: BlockDraftConfig
    dtype: Any

    def setup(self):
        c, init = self.config, nn.initializers.normal(0.02)
        self.layer = [BlockLayer(c, self.dtype) for _ in range(c.num_layers)]
        self.fc = self.param("fc", init, (c.hidden_size, len(c.capture_layers) * c.hidden_size), self.dtype)
        self.hidden_norm = self.param("hidden_norm", nn.initializers.ones, (c.hidden_size,), jnp.float32)
        self.final_norm = self.param("final_norm", nn.initializers.ones, (c.hidden_size,), jnp.float32)
        rank = c.markov_rank
        if c.kind == "dspark":
            self.markov_in = self.param("markov_in", init, (c.vocab_size, rank), self.dtype)
            self.markov_out = self.param("markov_out", nn.initializers.zeros, (c.draft_vocab_size, rank), self.dtype)
            inputs = {"vanilla": 0, "gated": c.hidden_size + rank, "rnn": c.hidden_size + 2 * rank}[c.markov_head]
            outputs = {"vanilla": 0, "gated": rank, "rnn": 2 * rank}[c.markov_head]
            self.markov_mix = self.param("markov_mix", init, (outputs, inputs), self.dtype) if inputs else None
        if c.confidence:
            self.confidence_head = self.param("confidence_head", init, (1, c.hidden_size + rank), self.dtype)
            self.confidence_bias = self.param("confidence_bias", nn.initializers.zeros, (1,), jnp.float32)

    def declare(self) -> None:
        """Declares every parameter: what `init` needs to run, in place of a forward."""
        for layer in self.layer:
            _ = layer.qkv

    def context(self, captured):
        fused = project(captured.reshape(captured.shape[0], -1), self.fc).astype(self.dtype)
        return rms_norm(fused, self.hidden_norm, self.config.rms_norm_eps)

    def context_kv(self, context, cos, sin, layer: int):
        return self.layer[layer].context_kv(context, cos, sin)

    def layer_in(self, x, cos, sin, layer: int):
        return self.layer[layer].layer_in(x, cos, sin)

    def layer_out(self, x, mixed, layer: int):
        return self.layer[layer].layer_out(x, mixed)

    def normed(self, x):
        return rms_norm(x, self.final_norm, self.config.rms_norm_eps)

    def previous(self, token_ids):
        return jnp.take(self.markov_in, token_ids, axis=0, mode="clip")

    def markov(self, hidden, previous, state):
        if self.config.markov_head == "gated":
            gate = nn.sigmoid(project(jnp.concatenate([hidden, previous], axis=-1), self.markov_mix))
            previous = (gate * previous).astype(self.dtype)
        elif self.config.markov_head == "rnn":
            # A gated cell: how much of the state stays, and what comes in its place.
            inputs = jnp.concatenate([state, previous, hidden.astype(state.dtype)], axis=-1)
            keep, new = jnp.split(project(inputs.astype(self.dtype), self.markov_mix), 2, axis=-1)
            keep = nn.sigmoid(keep)
            state = (keep * state + (1 - keep) * jnp.tanh(new + previous)).astype(state.dtype)
            previous = state.astype(self.dtype)
        return project(previous, self.markov_out), state

    def confidence(self, hidden, previous):
        inputs = jnp.concatenate([hidden, previous.astype(hidden.dtype)], axis=-1)
        return (project(inputs.astype(self.dtype), self.confidence_head) + self.confidence_bias)[:, 0]


def block_draft(
    config: BlockDraftConfig,
    params: Mapping[str, Any],
    *,
    embed: Any,
    head: Any,
    token_ids: Any = None,
    kernels: str = "xla",
    dtype=jnp.float32,
    mesh: Mesh | None = None,
) -> BlockDraftModel:
    """A draft over `params`.

    Args:
      config: sizes and kind.
      params: the linen tree of `BlockDraft(config, dtype)`.
      embed: [V, H], the target's embedding table, shared.
      head: [Vd, H], the target's head, or the rows of it at `token_ids`.
      token_ids: i32[Vd], the target's id of each draft id; None: they are the same.
      kernels, dtype: as `llama_target`.
      mesh: devices that share the target; each runs the whole draft.
    Raises:
      ValueError: a leaf is missing, unknown or of another shape, or the draft was made for another target.
    """
    dtype = jnp.dtype(dtype)
    check_params(params, block_param_shapes(config, dtype))
    shared = shared_with_target(config, hidden_size=config.hidden_size, embed=embed, head=head, token_ids=token_ids)
    functions = _functions(config, kernels, dtype, token_ids is not None, mesh)
    return BlockDraftModel(_facts(config, dtype), config, {"own": params, "shared": shared}, **functions)


@functools.lru_cache(maxsize=32)
def _functions(
    config: BlockDraftConfig, kernels: str, dtype: Any, mapped: bool, mesh: Mesh | None
) -> dict[str, Callable[..., Any]]:
    """The same objects for the same arguments, so that drafts of one shape share their compiled programs."""
    draft = BlockDraft(config, dtype)
    scale = config.head_dim**-0.5

    def apply(params, *args, method: str):
        return draft.apply({"params": params["own"]}, *args, method=method)

    def flat(method: str, params, *rows):
        """A head, over rows of any leading shape."""
        leading = rows[0].shape[:-1]
        found = apply(params, *(x.reshape(-1, x.shape[-1]) for x in rows), method=method)
        return jax.tree.map(lambda x: x.reshape(*leading, *x.shape[1:]), found)

    def init_kv(num_pages: int, page_size: int):
        validate_pool(page_size=page_size, head_dim=config.head_dim, dtype=dtype, backend=kernels)
        return init_kv_pages(config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_dim, dtype)

    def context(params, captured):
        return apply(params, captured, method="context")

    def context_kv(params, context, positions, *, layer: int):
        return apply(params, context, *_rope(config, positions), layer, method="context_kv")

    def layer_in(params, x, positions, *, layer: int):
        return apply(params, x, *_rope(config, positions), layer, method="layer_in")

    def layer_out(params, x, mixed, *, layer: int):
        return apply(params, x, mixed, layer, method="layer_out")

    def normed(params, x):
        return apply(params, x, method="normed")

    def inject(params, context, positions, slots, kv_pages):
        for layer in range(config.num_layers):
            k, v = context_kv(params, context, positions, layer=layer)
            write = functools.partial(paged_kv_write, layer=layer, backend=kernels)
            kv_pages = everywhere(mesh, write)(kv_pages, k, v, slots)
        return kv_pages

    def write_and_attend(q, k, v, batch: ForwardBatch, kv_pages, *, layer: int):
        kv_pages = paged_kv_write(kv_pages, k, v, batch.slots, layer=layer, backend=kernels)
        mixed = attend(q, kv_pages, batch, layer=layer, scale=scale, backend=kernels, window=config.window)
        return mixed, kv_pages

    def forward(params, token_ids, batch: ForwardBatch, kv_pages):
        x = jnp.take(params["shared"]["embed"], token_ids, axis=0, mode="clip")
        for layer in range(config.num_layers):
            q, k, v = layer_in(params, x, batch.positions, layer=layer)
            run = everywhere(mesh, functools.partial(write_and_attend, layer=layer))
            mixed, kv_pages = run(q, k, v, batch, kv_pages)
            x = layer_out(params, x, mixed.reshape(x.shape[0], -1), layer=layer)
        return normed(params, x), kv_pages

    def logits(params, hidden):
        rows = hidden.reshape(-1, config.hidden_size).astype(dtype)
        return project(rows, params["shared"]["head"]).reshape(*hidden.shape[:-1], config.draft_vocab_size)

    def token_ids(params, draft_ids):
        return jnp.take(params["shared"]["token_ids"], draft_ids, mode="clip") if mapped else draft_ids

    def previous(params, token_ids):
        return apply(params, token_ids, method="previous")

    def markov(params, hidden, previous, state):
        return flat("markov", params, hidden, previous, state)

    def confidence(params, hidden, previous):
        return flat("confidence", params, hidden, previous)

    return {
        "init_kv": init_kv,
        "context": context,
        "inject": inject,
        "forward": forward,
        "logits": logits,
        "token_ids": token_ids,
        "previous": previous,
        "markov": markov,
        "confidence": confidence,
        "layer_in": layer_in,
        "layer_out": layer_out,
        "context_kv": context_kv,
        "normed": normed,
    }


def _rope(config: BlockDraftConfig, positions):
    return angles(positions, inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling))


def _facts(config: BlockDraftConfig, dtype: Any) -> BlockDraftFacts:
    return BlockDraftFacts(
        vocab_size=config.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        capture_layers=config.capture_layers,
        context_len=config.context_len,
        kv_bytes_per_token=2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize,
    )


def block_param_shapes(config: BlockDraftConfig, dtype=jnp.float32) -> Any:
    """The parameter tree of `BlockDraft(config, dtype)` as shapes and dtypes; allocates nothing."""
    return declared_shapes(BlockDraft(config, jnp.dtype(dtype)))


def init_block_params(key, config: BlockDraftConfig, dtype=jnp.float32) -> Any:
    """Random parameters to train from."""
    return declared_params(BlockDraft(config, jnp.dtype(dtype)), key)
