"""Where training starts: a draft that already repeats what the target knows of the next token."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jspec.models.block_draft import BlockDraftConfig, init_block_params
from jspec.models.eagle_draft import EagleConfig, init_draft_params
from jspec.models.target import TargetModel

_SMALL = 0.1
"""Of the usual spread, for the parts of `fc` that the start does not need."""


def warm_start(key: Any, config: EagleConfig, target: TargetModel, token_ids: Any = None) -> dict[str, Any]:
    """Parameters of `EagleDraft(config)` in f32, made of the target's where they fit, random elsewhere.

    `fc` passes its feature on: of "eagle3", the last captured layer. An own head is the target's at `token_ids`. A layer is the target's last one, where
    sizes agree; it reads the feature, and nothing yet of the embedding.
    """
    params = jax.tree.map(lambda leaf: leaf, init_draft_params(key, config, jnp.float32))  # a new dict
    size = config.hidden_size
    source: Mapping[str, Any] = target.params if isinstance(target.params, Mapping) else {}
    final_norm = source.get("final_norm", jnp.ones(size, jnp.float32))
    if config.kind == "eagle3":
        head = target.head(target.params)
        params["head"] = jnp.asarray(head if token_ids is None else head[token_ids], jnp.float32)
        params["final_norm"] = jnp.asarray(final_norm, jnp.float32)
        params["fc"] = _pass_on(params["fc"], first=(len(config.capture_layers) - 1) * size)
    for i in range(config.num_modules):
        module = _layer(params[f"module_{i}"], config, source, target.facts.num_layers - 1)
        if config.kind == "multi-layer":
            module["fc"] = _pass_on(module["fc"], first=0)
            # What the target's head reads has passed its norm already; only the length of it is to be kept.
            module["final_norm"] = jnp.full(size, jnp.sqrt(jnp.mean(jnp.square(final_norm))), jnp.float32)
        elif config.kind == "eagle":
            module["fc"] = _pass_on(module["fc"], first=size)
        params[f"module_{i}"] = module
    return params


def block_warm_start(key: Any, config: BlockDraftConfig, target: TargetModel) -> dict[str, Any]:
    """Parameters of `BlockDraft(config)` in f32, made of the target's where they fit, random elsewhere.

    `fc` passes the last captured layer on, in the norm of the layer that reads it; the draft's layers are those of the target from there on, as many as
    there are, or the last ones.
    """
    params = jax.tree.map(lambda leaf: leaf, init_block_params(key, config, jnp.float32))  # a new dict
    size, source = config.hidden_size, target.params if isinstance(target.params, Mapping) else {}
    first = max(min(config.capture_layers[-1] + 1, target.facts.num_layers - config.num_layers), 0)
    params["fc"] = _pass_on(params["fc"], first=(len(config.capture_layers) - 1) * size)
    if "norms" in source and source["norms"].shape[-1] == size:
        params["hidden_norm"] = jnp.asarray(source["norms"][first][0], jnp.float32)
        params["final_norm"] = jnp.asarray(source["final_norm"], jnp.float32)
    for i in range(config.num_layers):
        params[f"layer_{i}"] = _layer(params[f"layer_{i}"], config, source, min(first + i, target.facts.num_layers - 1))
    return params


def _pass_on(fc: jax.Array, *, first: int) -> jax.Array:
    """The identity on the inputs from `first` on, little of the others."""
    size = fc.shape[0]
    return (_SMALL * fc).at[:, first : first + size].set(jnp.eye(size, dtype=fc.dtype))


def _layer(
    module: Mapping[str, Any], config: EagleConfig | BlockDraftConfig, source: Mapping[str, Any], last: int
) -> dict[str, Any]:
    """`module` with the matrices and norms of the target's layer `last` that fit; a narrower MLP gets the neurons that weigh most."""
    module, layer = dict(module), source.get(f"layer_{last}")
    if not isinstance(layer, Mapping) or "norms" not in source:
        return module
    if "o" in layer and layer["o"].shape == module["o"].shape:
        module["o"] = jnp.asarray(layer["o"], jnp.float32)
    width, size = config.intermediate_size, config.hidden_size
    if {"gate_up", "down"} <= set(layer) and layer["down"].shape[0] == size and layer["down"].shape[1] >= width:
        gate, up = jnp.split(jnp.asarray(layer["gate_up"], jnp.float32), 2)
        down = jnp.asarray(layer["down"], jnp.float32)
        weight = jnp.linalg.norm(down, axis=0) * jnp.linalg.norm(up, axis=1)
        neurons = jnp.sort(jax.lax.top_k(weight, width)[1])
        module["gate_up"] = jnp.concatenate([gate[neurons], up[neurons]])
        module["down"] = down[:, neurons]
    feature = slice(-config.hidden_size, None)  # of "eagle3" the second half of the input, the only one elsewhere
    if "qkv" in layer and layer["qkv"].shape == module["qkv"][:, feature].shape:
        module["qkv"] = module["qkv"].at[:, feature].set(jnp.asarray(layer["qkv"], jnp.float32))
    before_attention, before_mlp = source["norms"][last]
    norms = module["norms"].at[-1].set(before_mlp)
    if config.kind != "eagle":
        norms = norms.at[-2].set(before_attention)
    return module | {"norms": norms}
