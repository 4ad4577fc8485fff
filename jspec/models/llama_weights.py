"""From a checkpoint's tensors to the fused parameter tree of `Llama`, whatever file they come from."""

import concurrent.futures
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jspec.models.llama import LlamaConfig
from jspec.models.parallel import part_of, place_leaf

EMBED, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def layer_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of one layer, without its prefix, in Hugging Face's names; matrices are [out, in]."""
    c = config
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (c.hidden_size,),
        "post_attention_layernorm.weight": (c.hidden_size,),
        "self_attn.q_proj.weight": (q, c.hidden_size),
        "self_attn.k_proj.weight": (kv, c.hidden_size),
        "self_attn.v_proj.weight": (kv, c.hidden_size),
        "self_attn.o_proj.weight": (c.hidden_size, q),
        "mlp.gate_proj.weight": (c.intermediate_size, c.hidden_size),
        "mlp.up_proj.weight": (c.intermediate_size, c.hidden_size),
        "mlp.down_proj.weight": (c.hidden_size, c.intermediate_size),
    }
    if c.qkv_bias:
        shapes |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    if c.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (c.head_dim,), "self_attn.k_norm.weight": (c.head_dim,)}
    return shapes


def tensor_shapes(config: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor that a checkpoint of `config` must hold, in Hugging Face's names."""
    yield EMBED, (config.vocab_size, config.hidden_size)
    yield FINAL_NORM, (config.hidden_size,)
    if not config.tie_embeddings:
        yield HEAD, (config.vocab_size, config.hidden_size)
    one_layer = layer_shapes(config)
    for i in range(config.num_layers):
        for name, shape in one_layer.items():
            yield f"model.layers.{i}.{name}", shape


def check_tensors(
    source: str, found: Mapping[str, tuple[int, ...]], config: LlamaConfig, *, names: Callable[[str], str] = str
) -> None:
    """Raise ValueError unless `found` (name to shape) holds exactly the tensors of `config`; reads no data.

    An extra tensor is refused as well: it means that the model computes something this package does not.
    `names` says what the file calls a tensor.
    """
    check_shapes(source, found, ((names(name), shape) for name, shape in tensor_shapes(config)))


def check_shapes(
    source: str, found: Mapping[str, tuple[int, ...]], expected: Iterable[tuple[str, tuple[int, ...]]]
) -> None:
    """As `check_tensors`, for these names and shapes."""
    known = set()
    for name, shape in expected:  # lazily: a damaged config may claim a billion layers
        known.add(name)
        if name not in found:
            raise ValueError(
                f"{source} has no tensor {name!r}, which its config asks for: the download is incomplete, or the config is another model's"
            )
        if tuple(found[name]) != shape:
            raise ValueError(
                f"{source}: tensor {name!r} has shape {tuple(found[name])}, its config says {shape}: config and weights are of different models"
            )
    for name in sorted(set(found) - known):
        raise ValueError(
            f"{source} holds tensor {name!r}, which no supported model uses: it is of an architecture that is not implemented"
        )


def fuse(
    config: LlamaConfig, read: Callable[[str], np.ndarray], dtype: Any, mesh: Mesh | None = None
) -> dict[str, Any]:
    """The parameter tree of `Llama(config, dtype)`.

    Args:
      config: of the checkpoint, already checked with `check_tensors`.
      read: Hugging Face tensor name -> array [out, in]; called once a tensor, from several threads.
      dtype: of the matrices; vectors stay f32.
      mesh: devices that share the model: each is given its part of a matrix when that is read. None: one device.
    Raises:
      ValueError: the devices cannot share it evenly; nothing was read by then.
    """
    part_of(config, mesh)

    def place(leaf: str, value: np.ndarray, dtype=jnp.float32) -> jax.Array:
        return place_leaf(config, mesh, leaf, value, dtype)

    def matrix(leaf: str, *names: str) -> jax.Array:
        parts = [np.asarray(read(name)) for name in names]
        return place(leaf, np.concatenate(parts) if len(parts) > 1 else parts[0], dtype)

    def vectors(*names: str) -> np.ndarray:
        return np.stack([np.asarray(read(name), np.float32) for name in names])

    def layer(i: int) -> dict[str, Any]:
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        return {
            "qkv": matrix("qkv", *(f"{attention}.{n}_proj.weight" for n in "qkv")),
            "o": matrix("o", f"{attention}.o_proj.weight"),
            "gate_up": matrix("gate_up", f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"),
            "down": matrix("down", f"{mlp}.down_proj.weight"),
        }

    # NumPy drops the interpreter lock while it dequantises and copies.
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        embed = pool.submit(matrix, "embed", EMBED)
        head = None if config.tie_embeddings else pool.submit(matrix, "head", HEAD)
        layers = list(pool.map(layer, range(config.num_layers)))
        params: dict[str, Any] = {f"layer_{i}": leaves for i, leaves in enumerate(layers)}
        params["embed"] = embed.result()
        if head is not None:
            params["head"] = head.result()

    prefixes = [f"model.layers.{i}" for i in range(config.num_layers)]
    norms = [vectors(f"{p}.input_layernorm.weight", f"{p}.post_attention_layernorm.weight") for p in prefixes]
    params["norms"] = place("norms", np.stack(norms))
    params["final_norm"] = place("final_norm", vectors(FINAL_NORM)[0])
    if config.qkv_bias:
        biases = [
            np.concatenate([np.asarray(read(f"{p}.self_attn.{n}_proj.bias"), np.float32) for n in "qkv"])
            for p in prefixes
        ]
        params["qkv_bias"] = place("qkv_bias", np.stack(biases))
    if config.qk_norm:
        qk = [vectors(f"{p}.self_attn.q_norm.weight", f"{p}.self_attn.k_norm.weight") for p in prefixes]
        params["qk_norms"] = place("qk_norms", np.stack(qk))
    return params
