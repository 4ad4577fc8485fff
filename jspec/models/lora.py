"""Low-rank adapters of a Llama-family target (LoRA, arXiv 2106.09685), kept in the layout of PEFT: `adapter_config.json` and `adapter_model.safetensors`.

An adapter is a tree `{"layer_i": {matrix: {"a": [R, I], "b": [O, R]}}}` over the fused matrices of `Llama`: `x` is given `x @ a.T @ b.T` more. Parts of a fused
matrix have rows of `a` of their own, so `b` is block-diagonal; the factor `alpha / rank` is in `b`.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models.json_files import read_json
from jspec.models.llama import LlamaConfig
from jspec.models.target import TargetModel
from jspec.models.tensor_files import check_names, existing_file, open_tensors, save_tensors, shapes_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PARTS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
_WHERE = {
    part: "mlp" if matrix in ("gate_up", "down") else "self_attn" for matrix, parts in _PARTS.items() for part in parts
}
MODULES = tuple(_WHERE)
"""What an adapter may change, as PEFT names it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """What shapes an adapter, and what it is for.

    Raises:
        ValueError: naming the field, its value and the rule.
    """

    rank: int
    alpha: float
    modules: tuple[str, ...] = MODULES
    base: str = ""  # the model that it was trained for, by name
    block_size: int = 0  # of UNO: rows of a draft pass, the pending token among them; 0 where it is for something else

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"r={self.rank} must be at least 1: an adapter of rank 0 changes nothing")
        if not self.alpha > 0:
            raise ValueError(f"lora_alpha={self.alpha} must be positive")
        unknown = [name for name in self.modules if name not in MODULES]
        if unknown or not self.modules:
            raise ValueError(f"target_modules={list(self.modules)} must be some of {', '.join(MODULES)}")
        if self.block_size < 0 or self.block_size == 1:
            raise ValueError(f"block_size={self.block_size} must be at least 2: the pending token and what is drafted")


class Lora(NamedTuple):
    """An adapter and its config."""

    config: LoraConfig
    params: Any  # what `TargetModel.forward_adapted` takes


class LoraParts(NamedTuple):
    """An adapter as it is trained and stored."""

    config: LoraConfig
    parts: Any  # {layer_i: {module: {"a": f32[r, I], "b": f32[O, r]}}}


def module_shapes(target: TargetModel) -> dict[str, tuple[int, int]]:
    """`(out, in)` of each module of one layer.

    Raises:
      ValueError: the target is of no family that adapters are known for.
    """
    c = target.config
    if not isinstance(c, LlamaConfig):
        raise ValueError(
            f"adapters are read and trained for Llama-family models, this one is shaped by {type(c).__name__}: make its `Lora` yourself, or use another model"
        )
    q, kv, size, inner = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.hidden_size, c.intermediate_size
    return {
        "q_proj": (q, size),
        "k_proj": (kv, size),
        "v_proj": (kv, size),
        "o_proj": (size, q),
        "gate_proj": (inner, size),
        "up_proj": (inner, size),
        "down_proj": (size, inner),
    }


def init_lora(key: Any, config: LoraConfig, target: TargetModel) -> dict[str, dict[str, dict[str, Any]]]:
    """Parts of an adapter that changes nothing yet, to train from: `{layer_i: {module: {"a": [r, I], "b": [O, r]}}}`, `a` random and `b` zero."""
    shapes = module_shapes(target)
    layers: dict[str, dict[str, dict[str, Any]]] = {}
    for i in range(target.facts.num_layers):
        layers[f"layer_{i}"] = {}
        for name in config.modules:
            out, size = shapes[name]
            key, own = jax.random.split(key)
            a = jax.random.normal(own, (config.rank, size), jnp.float32) / np.sqrt(size)
            layers[f"layer_{i}"][name] = {"a": a, "b": jnp.zeros((out, config.rank), jnp.float32)}
    return layers


def fuse_lora(config: LoraConfig, parts: Mapping[str, Any], target: TargetModel, dtype: Any) -> dict[str, Any]:
    """The adapter that `forward_adapted` takes, of parts as of `init_lora`. Traceable."""
    shapes, scale = module_shapes(target), config.alpha / config.rank
    adapter: dict[str, Any] = {}
    for layer, modules in parts.items():
        adapter[layer] = {}
        for matrix, names in _PARTS.items():
            own = [name for name in names if name in modules]
            if not own:
                continue
            a = jnp.concatenate([modules[name]["a"] for name in own])
            blocks, place = [], 0
            for name in names:
                out = shapes[name][0]
                if name not in modules:
                    blocks.append(jnp.zeros((out, a.shape[0]), jnp.float32))
                    continue
                b = modules[name]["b"] * scale
                blocks.append(jnp.pad(b, ((0, 0), (place, a.shape[0] - place - b.shape[1]))))
                place += b.shape[1]
            adapter[layer][matrix] = {"a": a.astype(dtype), "b": jnp.concatenate(blocks).astype(dtype)}
    return adapter


def load_lora(path: str | os.PathLike[str], target: TargetModel, *, base: str = "") -> Lora:
    """The adapter in directory `path`, for `target`.

    Args, raises: as `load_lora_parts`.
    """
    config, parts = load_lora_parts(path, target, base=base)
    return Lora(config, fuse_lora(config, parts, target, target.embedding(target.params).dtype))


def load_lora_parts(path: str | os.PathLike[str], target: TargetModel, *, base: str = "") -> LoraParts:
    """What `save_lora` wrote, to train on.

    Args:
      base: the target's name; an adapter that names another base is refused. "": not compared.
    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, the adapter is of another base, or asks for what is not implemented.
    """
    folder = pathlib.Path(path)
    source, file = str(folder / CONFIG), existing_file(folder, WEIGHTS, names=(CONFIG, WEIGHTS), what="an adapter")
    raw = read_json(existing_file(folder, CONFIG, names=(CONFIG, WEIGHTS), what="an adapter"))
    config = _config(source, raw)
    if base and config.base and config.base != base:
        raise ValueError(
            f"{source}: base_model_name_or_path={config.base!r} must be {base!r}: the adapter was trained for another model; use one for this"
        )
    shapes, known = module_shapes(target), {}
    for i in range(target.facts.num_layers):
        for name in config.modules:
            out, size = shapes[name]
            known[_tensor(i, name, "A")], known[_tensor(i, name, "B")] = (config.rank, size), (out, config.rank)
    with open_tensors(file) as tensors:
        check_names(str(file), shapes_of(tensors), known, kind="lora")
        parts = {
            f"layer_{i}": {
                name: {"a": jnp.asarray(tensors.read(_tensor(i, name, "A"))), "b": jnp.asarray(tensors.read(_tensor(i, name, "B")))}
                for name in config.modules
            }
            for i in range(target.facts.num_layers)
        }  # fmt: skip
    return LoraParts(config, parts)


def save_lora(
    path: str | os.PathLike[str],
    config: LoraConfig,
    parts: Mapping[str, Any],
    *,
    storage: str = "float32",
    record: Mapping[str, Any] | None = None,
) -> None:
    """Write an adapter, of parts as of `init_lora`, into directory `path`; errors as of `save_tensors`."""
    raw: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(config.modules),
    }
    if config.block_size:
        raw["uno_config"] = {"block_size": config.block_size}
    tensors = {
        _tensor(int(layer.removeprefix("layer_")), name, which.upper()): np.asarray(value, np.float32)
        for layer, modules in parts.items()
        for name, pair in modules.items()
        for which, value in pair.items()
    }
    save_tensors(path, raw, tensors, storage=storage, record=record, names=(CONFIG, WEIGHTS))


def _tensor(layer: int, module: str, which: str) -> str:
    return f"base_model.model.model.layers.{layer}.{_WHERE[module]}.{module}.lora_{which}.weight"


# Switches of PEFT that change what an adapter computes, and the values under which it is what is implemented.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None,),
    "modules_to_save": (None, []),
    "fan_in_fan_out": (False, None),
}


def _config(source: str, raw: Mapping[str, Any]) -> LoraConfig:
    for name, neutral in _NEUTRAL.items():
        if raw.get(name, neutral[0]) not in neutral:
            raise ValueError(
                f"{source}: {name}={raw[name]!r} is not implemented: it must be {neutral[0]!r}; use an adapter without it"
            )
    for name, kind in (("r", int), ("lora_alpha", (int, float)), ("target_modules", list)):
        if not isinstance(raw.get(name), kind) or isinstance(raw.get(name), bool):
            raise ValueError(
                f"{source}: {name}={raw.get(name)!r} is missing or of another type: export the adapter again"
            )
    own = raw.get("uno_config") or {}
    if not isinstance(own, Mapping) or not isinstance(own.get("block_size", 0), int):
        raise ValueError(f"{source}: uno_config={own!r} must be an object with a number block_size")
    try:
        return LoraConfig(
            rank=raw["r"],
            alpha=float(raw["lora_alpha"]),
            modules=tuple(name for name in MODULES if name in raw["target_modules"])
            + tuple(name for name in raw["target_modules"] if name not in MODULES),
            base=raw.get("base_model_name_or_path") or "",
            block_size=own.get("block_size", 0),
        )
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
