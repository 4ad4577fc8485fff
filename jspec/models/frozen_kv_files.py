"""Save and load frozen-KV assistants: a directory of `config.json` and `model.safetensors`, in a layout of jspec's own."""

import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from jspec.models.draft_layout import OTHER_DRAFT, Leaf, layer_leaves, layers_to_json, read_leaves, save_leaves
from jspec.models.frozen_kv_draft import FrozenKVConfig, FrozenKVDraft, frozen_kv_draft
from jspec.models.huggingface_config import config_from_huggingface
from jspec.models.json_files import read_json
from jspec.models.target import TargetFacts, TargetModel
from jspec.models.tensor_files import CONFIG, WEIGHTS, existing, open_tensors, torch_dtype

ARCHITECTURE = "JspecFrozenKVAssistant"


def is_frozen_kv(raw: Mapping[str, Any]) -> bool:
    """Whether a parsed `config.json` is of an assistant."""
    return ARCHITECTURE in (raw.get("architectures") or ())


def load_frozen_kv(path: str | os.PathLike[str], target: TargetModel, *, dtype: Any = jnp.float32) -> FrozenKVDraft:
    """The assistant in directory `path`, for `target`, whose kernels it runs.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, or the assistant is of another target; no weights were read by then. Or a weight is not finite.
    """
    folder = pathlib.Path(path)
    file = existing(folder, WEIGHTS)
    config = config_from_json(str(folder / CONFIG), read_json(existing(folder, CONFIG)), target.facts)
    with open_tensors(file) as tensors:
        params, token_ids = read_leaves(tensors, leaves(config), config, jnp.dtype(dtype))
    embed = target.embedding(target.params)
    return frozen_kv_draft(config, params, embed=embed, token_ids=token_ids, kernels=target.kernels, dtype=dtype)


def save_frozen_kv(
    path: str | os.PathLike[str],
    draft: FrozenKVDraft,
    *,
    storage: str = "float32",
    record: Mapping[str, Any] | None = None,
) -> None:
    """Write `draft` into directory `path`; arguments and errors as of `save_tensors`."""
    raw = config_to_json(draft.config, torch_dtype=torch_dtype(storage))
    save_leaves(path, raw, leaves(draft.config), draft, storage=storage, record=record)


def config_from_json(source: str, raw: Mapping[str, Any], facts: TargetFacts) -> FrozenKVConfig:
    """The assistant's sizes, fit to its target.

    Raises:
      ValueError: a field is missing, not implemented, or does not fit the target.
    """
    layer = config_from_huggingface(source, {**raw, "architectures": ["LlamaForCausalLM"]}, ())
    given = raw.get("assistant_config")
    own: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    layers = own.get("kv_layers")
    if not isinstance(layers, list) or any(type(i) is not int for i in layers) or len(layers) != layer.num_layers:
        raise ValueError(
            f"{source}: assistant_config.kv_layers={layers!r} must be a list of the target's layers, one for each of the draft's {layer.num_layers}"
        )
    for name, have, want in (
        ("vocab_size", layer.vocab_size, facts.vocab_size),
        ("target_hidden_size", raw.get("target_hidden_size"), facts.hidden_size),
        ("num_key_value_heads", layer.num_kv_heads, facts.num_kv_heads),
        ("head_dim", layer.head_dim, facts.head_dim),
    ):
        if have != want:
            raise ValueError(f"{source}: {name}={have} must be the target's {want}: {OTHER_DRAFT}")
    if not set(layers) <= set(facts.kv_layers):
        raise ValueError(
            f"{source}: kv_layers={layers} must be among {list(facts.kv_layers)}, the target's layers that have KV: {OTHER_DRAFT}"
        )
    defaults = {"num_centroids": 0, "top_centroids": 32, "rotary_dim": 0}
    numbers = {name: own.get(name, default) for name, default in defaults.items()}
    numbers["draft_vocab_size"] = raw.get("draft_vocab_size", layer.vocab_size)
    for name, value in numbers.items():
        if type(value) is not int:
            raise ValueError(f"{source}: {name}={value!r} must be a number: correct the file, or download it again")
    try:
        return FrozenKVConfig(
            vocab_size=layer.vocab_size,
            target_hidden_size=facts.hidden_size,
            hidden_size=layer.hidden_size,
            intermediate_size=layer.intermediate_size,
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            context_len=layer.context_len,
            kv_layers=tuple(layers),
            rms_norm_eps=layer.rms_norm_eps,
            rope_theta=layer.rope_theta,
            rope_scaling=layer.rope_scaling,
            **numbers,
        )
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def config_to_json(config: FrozenKVConfig, *, torch_dtype: str) -> dict[str, Any]:
    """What `config_from_json` reads."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        **layers_to_json(config, num_layers=len(config.kv_layers), torch_dtype=torch_dtype),
        "target_hidden_size": config.target_hidden_size,
        "assistant_config": {
            "kv_layers": list(config.kv_layers),
            "num_centroids": config.num_centroids,
            "top_centroids": config.top_centroids,
            "rotary_dim": config.rotary_dim,
        },
    }


def leaves(config: FrozenKVConfig) -> Iterator[Leaf]:
    """Every leaf of `FrozenKV(config)`."""
    c, size = config, config.hidden_size
    yield Leaf(("pre",), (("pre_projection.weight", (size, 2 * c.target_hidden_size)),))
    yield Leaf(("post",), (("post_projection.weight", (c.target_hidden_size, size)),))
    yield Leaf(("final_norm",), (("norm.weight", (size,)),))
    yield Leaf(("head",), (("lm_head.weight", (c.draft_vocab_size, size)),))
    if c.num_centroids:
        yield Leaf(("centroids",), (("centroids.weight", (c.num_centroids, size)),))
    norms = ("input_layernorm", "post_attention_layernorm")
    for i in range(len(c.kv_layers)):
        yield from layer_leaves(c, f"layer_{i}", f"layers.{i}", heads="q", norms=norms)
