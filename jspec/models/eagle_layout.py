"""How a checkpoint names the tensors of a draft, and how they make up the fused tree of `EagleDraft`."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models.eagle_draft import EagleConfig
from jspec.models.tensor_files import D2T, T2D, check_names

BIAS = "fc.bias"
IGNORED = ("embed_tokens.weight",)
"""Tensors that some exports carry although a draft shares them with its target."""


class Leaf(NamedTuple):
    """One leaf of the fused tree and the tensors it is made of, in order."""

    path: tuple[str, ...]
    tensors: tuple[tuple[str, tuple[int, ...]], ...]  # name, shape; matrices are [out, in]
    stacked: bool = False  # vectors, each a row of the leaf; otherwise matrices joined by rows, or one tensor as it is


def leaves(config: EagleConfig) -> Iterator[Leaf]:
    """Every leaf of `EagleDraft(config)`.

    "eagle3": the names that public EAGLE-3 checkpoints use, `input_layernorm` being of the embedding and `hidden_norm` of the feature. "eagle": those of
    EAGLE-1. "multi-layer": one layer a module, in the names of DeepSeek-V3's multi-token prediction; `eh_proj` reads the feature first.
    """
    size = config.hidden_size
    if config.kind == "eagle3":
        yield Leaf(("fc",), (("fc.weight", (size, len(config.capture_layers) * size)),))
        yield Leaf(("final_norm",), (("norm.weight", (size,)),))
        yield Leaf(("head",), (("lm_head.weight", (config.draft_vocab_size, size)),))
        yield from _layer(config, "midlayer", 0, ("input_layernorm", "hidden_norm", "post_attention_layernorm"))
    elif config.kind == "eagle":
        yield Leaf(("module_0", "fc"), (("fc.weight", (size, 2 * size)),))
        yield Leaf(("module_0", "fc_bias"), ((BIAS, (size,)),))
        yield from _layer(config, "layers.0", 0, ("post_attention_layernorm",))
    else:
        norms = ("hnorm", "enorm", "input_layernorm", "post_attention_layernorm")
        for i in range(config.num_modules):
            yield Leaf((f"module_{i}", "fc"), ((f"layers.{i}.eh_proj.weight", (size, 2 * size)),))
            yield Leaf((f"module_{i}", "final_norm"), ((f"layers.{i}.final_norm.weight", (size,)),))
            yield from _layer(config, f"layers.{i}", i, norms)


def _layer(c: EagleConfig, prefix: str, module: int, norms: tuple[str, ...]) -> Iterator[Leaf]:
    q, kv, size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.hidden_size
    reads = 2 * size if c.kind == "eagle3" else size
    attention, mlp, where = f"{prefix}.self_attn", f"{prefix}.mlp", f"module_{module}"
    qkv = zip("qkv", (q, kv, kv), strict=True)
    yield Leaf((where, "qkv"), tuple((f"{attention}.{n}_proj.weight", (rows, reads)) for n, rows in qkv))
    yield Leaf((where, "o"), ((f"{attention}.o_proj.weight", (size, q)),))
    gate_up = tuple((f"{mlp}.{n}_proj.weight", (c.intermediate_size, size)) for n in ("gate", "up"))
    yield Leaf((where, "gate_up"), gate_up)
    yield Leaf((where, "down"), ((f"{mlp}.down_proj.weight", (size, c.intermediate_size)),))
    yield Leaf((where, "norms"), tuple((f"{prefix}.{n}.weight", (size,)) for n in norms), stacked=True)


def check_tensors(source: str, found: Mapping[str, tuple[int, ...]], config: EagleConfig) -> None:
    """Raise ValueError unless `found` (name to shape) holds the tensors of `config` and nothing that it does not know; reads no data."""
    known: dict[str, tuple[int, ...]] = {D2T: (config.draft_vocab_size,), T2D: (config.vocab_size,)}
    for leaf in leaves(config):
        known |= dict(leaf.tensors)
    check_vocabulary_and_names(source, found, known, config, optional=(BIAS,))


def check_vocabulary_and_names(
    source: str,
    found: Mapping[str, tuple[int, ...]],
    known: Mapping[str, tuple[int, ...]],
    config: Any,
    *,
    optional: tuple[str, ...] = (),
) -> None:
    """`check_names`, for a draft whose vocabulary may be its own: then `d2t` must be there."""
    maps = (T2D,) if config.draft_vocab_size < config.vocab_size else (T2D, D2T)
    why = f": draft_vocab_size={config.draft_vocab_size} is less than vocab_size={config.vocab_size}, so a draft id must be mapped"
    check_names(source, found, known, kind=config.kind, optional=(*maps, *optional), ignored=IGNORED, why={D2T: why})


def fuse(config: EagleConfig, read: Callable[[str], np.ndarray | None], dtype: Any) -> dict[str, Any]:
    """`fuse_leaves` of an EAGLE draft."""
    return fuse_leaves(leaves(config), read, dtype)


def split(config: EagleConfig, tree: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """`split_leaves` of an EAGLE draft."""
    return split_leaves(leaves(config), tree)


def fuse_leaves(leaves: Iterable[Leaf], read: Callable[[str], np.ndarray | None], dtype: Any) -> dict[str, Any]:
    """The linen tree that `leaves` make up; matrices in `dtype`, vectors in f32. `read` gives None for an absent optional tensor, taken as zeros."""

    def part(name: str, shape: tuple[int, ...]) -> np.ndarray:
        found = read(name)
        return np.zeros(shape, np.float32) if found is None else found

    tree: dict[str, Any] = {}
    for leaf in leaves:
        parts = [part(name, shape) for name, shape in leaf.tensors]
        joined = np.stack(parts) if leaf.stacked else np.concatenate(parts)
        matrix = parts[0].ndim == 2
        *folders, last = leaf.path
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = jnp.asarray(joined, dtype if matrix else jnp.float32)
    return tree


def split_leaves(leaves: Iterable[Leaf], tree: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The inverse of `fuse_leaves`: name -> f32 tensor."""
    tensors: dict[str, np.ndarray] = {}
    for leaf in leaves:
        node: Any = tree
        for key in leaf.path:
            node = node[key]
        value = np.asarray(jax.device_get(node), np.float32)
        if leaf.stacked:
            parts = list(value)
        else:
            parts = np.split(value, np.cumsum([shape[0] for _, shape in leaf.tensors])[:-1])
        tensors |= {name: part for (name, _), part in zip(leaf.tensors, parts, strict=True)}
    return tensors
