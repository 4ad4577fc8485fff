"""What the checkpoints of every kind of draft have in common: how tensors make up a tree of parameters, and the fields that say how a layer is shaped."""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models.rope import RopeScaling
from jspec.models.tensor_files import D2T, T2D, Tensors, check_names, save_tensors, shapes_of, token_ids_of

IGNORED = ("embed_tokens.weight",)
"""Tensors that some exports carry although a draft shares them with its target."""
OTHER_DRAFT = "choose a draft made for this target"


class Leaf(NamedTuple):
    """One leaf of the fused tree and the tensors it is made of, in order."""

    path: tuple[str, ...]
    tensors: tuple[tuple[str, tuple[int, ...]], ...]  # name, shape; matrices are [out, in]
    stacked: bool = False  # vectors, each a row of the leaf; otherwise matrices joined by rows, or one tensor as it is


def layer_leaves(
    config: Any, where: str, prefix: str, *, heads: str, norms: tuple[str, ...], reads: int | None = None
) -> Iterator[Leaf]:
    """The leaves of one layer.

    Args:
      config: of the draft.
      where: the layer's place in the tree.
      prefix: of its tensors.
      heads: which projections attention has, joined in this order: "qkv", or "q" where keys and values are another's.
      norms: names of its norms.
      reads: width of what the projections read; None: `config.hidden_size`.
    """
    q, kv, size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.hidden_size
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    rows = {"q": q, "k": kv, "v": kv}
    yield Leaf((where, heads), tuple((f"{attention}.{n}_proj.weight", (rows[n], reads or size)) for n in heads))
    yield Leaf((where, "o"), ((f"{attention}.o_proj.weight", (size, q)),))
    gate_up = tuple((f"{mlp}.{n}_proj.weight", (config.intermediate_size, size)) for n in ("gate", "up"))
    yield Leaf((where, "gate_up"), gate_up)
    yield Leaf((where, "down"), ((f"{mlp}.down_proj.weight", (size, config.intermediate_size)),))
    yield Leaf((where, "norms"), tuple((f"{prefix}.{n}.weight", (size,)) for n in norms), stacked=True)


def read_leaves(
    tensors: Tensors, leaves: Iterable[Leaf], config: Any, dtype: Any, *, optional: tuple[str, ...] = ()
) -> tuple[dict[str, Any], np.ndarray | None]:
    """`(params, token_ids)`: the tree that the leaves make up, matrices in `dtype` and vectors in f32, and the draft's vocabulary as of `token_ids_of`.

    Args:
      tensors: an open file; names, shapes and dtypes are checked before data is read.
      leaves: all of the tree's.
      config: of the draft: its kind and vocabularies.
      optional: tensors that may be missing, and are zeros then.
    Raises:
      ValueError: the file holds other tensors than these, or a value that is not finite.
    """
    leaves = tuple(leaves)
    known: dict[str, tuple[int, ...]] = {D2T: (config.draft_vocab_size,), T2D: (config.vocab_size,)}
    for leaf in leaves:
        known |= dict(leaf.tensors)
    maps = (T2D,) if config.draft_vocab_size < config.vocab_size else (T2D, D2T)
    why = f": draft_vocab_size={config.draft_vocab_size} is less than vocab_size={config.vocab_size}, so a draft id must be mapped"
    check_names(
        tensors.source,
        shapes_of(tensors, ignored=IGNORED),
        known,
        kind=config.kind,
        optional=(*maps, *optional),
        ignored=IGNORED,
        why={D2T: why},
    )
    token_ids = token_ids_of(tensors, vocab_size=config.vocab_size)
    tree: dict[str, Any] = {}
    for leaf in leaves:
        parts = []
        for name, shape in leaf.tensors:
            found = tensors.read(name)
            parts.append(np.zeros(shape, np.float32) if found is None else found)
        joined = np.stack(parts) if leaf.stacked else np.concatenate(parts)
        *folders, last = leaf.path
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = jnp.asarray(joined, dtype if parts[0].ndim == 2 else jnp.float32)
    return tree, token_ids


def save_leaves(
    path: str | os.PathLike[str],
    raw: Mapping[str, Any],
    leaves: Iterable[Leaf],
    draft: Any,
    *,
    storage: str,
    record: Mapping[str, Any] | None,
) -> None:
    """Write `draft`, whose parameters `leaves` make up and whose `config.json` is `raw`, into directory `path`; errors as of `save_tensors`."""
    tensors: dict[str, np.ndarray] = {}
    for leaf in leaves:
        node: Any = draft.params["own"]
        for key in leaf.path:
            node = node[key]
        value = np.asarray(jax.device_get(node), np.float32)
        if leaf.stacked:
            parts = list(value)
        else:
            parts = np.split(value, np.cumsum([shape[0] for _, shape in leaf.tensors])[:-1])
        tensors |= {name: part for (name, _), part in zip(leaf.tensors, parts, strict=True)}
    save_tensors(
        path,
        raw,
        tensors,
        storage=storage,
        token_ids=draft.params["shared"].get("token_ids"),
        vocab_size=draft.config.vocab_size,
        record=record,
    )


def layers_to_json(config: Any, *, num_layers: int, torch_dtype: str) -> dict[str, Any]:
    """What `config_from_huggingface` reads of a draft's layers, and its vocabulary."""
    return {
        "hidden_act": "silu",
        "num_hidden_layers": num_layers,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_len,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_to_json(config.rope_scaling),
        "tie_word_embeddings": False,
        "torch_dtype": torch_dtype,
    }


def captured_layers(source: str, name: str, given: Any, default: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """Layers of the target that a draft reads, from the field `name` of `config.json`; `default` where it is absent or empty.

    Raises:
      ValueError: they are no list of numbers, or the target has no such layers.
    """
    layers = given or default
    if not isinstance(layers, (list, tuple)) or any(type(i) is not int for i in layers):
        raise ValueError(
            f"{source}: {name}={layers!r} must be a list of layer numbers: correct the file, or download it again"
        )
    if any(not 0 <= i < num_layers for i in layers):
        origin = "" if given else ", the default,"
        raise ValueError(
            f"{source}: {name}={list(layers)}{origin} must lie in 0..{num_layers - 1}, the target's layers: {OTHER_DRAFT}"
        )
    return tuple(layers)


def _rope_to_json(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    fields = dataclasses.asdict(scaling)
    raw = {"rope_type": fields.pop("kind"), "factor": fields["factor"]}
    if scaling.kind == "llama3":
        raw |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context_len,
        }
    return raw
