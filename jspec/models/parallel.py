"""A model over several devices: each holds a part of every layer's heads and of its MLP, of the vocabulary, and of the KV pool (Megatron-LM, arXiv 1909.08053).

The forward of one device is that of a smaller model, with two sums over the devices in a layer and one behind the embedding. Parameters keep the shapes of
the whole model. Where a matrix is fused of several (queries, keys and values; gate and up), its rows lie device by device, so that each device's part is
fused like the whole.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

AXIS = "tensor"

TABLE_LAYOUT = Layout((0, 1))
"""Of the embedding table: row by row. A lookup reads rows; left alone, XLA on TPU keeps a table of narrow rows by columns, and turns it over in each step."""

POOL = PartitionSpec(None, None, AXIS)
"""A KV pool is split by heads."""

_ROWS, _COLUMNS, _WHOLE = PartitionSpec(AXIS), PartitionSpec(None, AXIS), PartitionSpec()
_SPECS = {
    "qkv": _ROWS,
    "o": _COLUMNS,
    "gate_up": _ROWS,
    "down": _COLUMNS,
    "embed": _ROWS,
    "head": _ROWS,
    "qkv_bias": _COLUMNS,
}


def tensor_mesh(size: int) -> Mesh | None:
    """The first `size` devices; None for one.

    Raises:
      ValueError: there are not so many.
    """
    devices = jax.local_devices()
    if size > len(devices):
        raise ValueError(f"tensor_parallel={size} exceeds the devices of this machine, {len(devices)}: lower it")
    return None if size == 1 else Mesh(np.array(devices[:size]), (AXIS,))


def num_devices(mesh: Mesh | None) -> int:
    return 1 if mesh is None else mesh.shape[AXIS]


def part_of(config: Any, mesh: Mesh | None) -> Any:
    """The `LlamaConfig` that one device runs.

    Raises:
      ValueError: the devices cannot share the model evenly.
    """
    n = num_devices(mesh)
    for name in ("num_kv_heads", "intermediate_size", "vocab_size"):
        if getattr(config, name) % n:
            raise ValueError(
                f"tensor_parallel={n} must divide {name}={getattr(config, name)}: each device holds an equal part of it"
            )
    return dataclasses.replace(
        config,
        num_heads=config.num_heads // n,
        num_kv_heads=config.num_kv_heads // n,
        intermediate_size=config.intermediate_size // n,
        vocab_size=config.vocab_size // n,
    )


def specs(tree: Any) -> Any:
    """How the parameters of `Llama` are split, as a tree like theirs."""
    return jax.tree_util.tree_map_with_path(lambda path, _: _SPECS.get(path[-1].key, _WHOLE), tree)


def place_leaf(config: Any, mesh: Mesh | None, name: str, value: Any, dtype: Any) -> jax.Array:
    """A parameter of the whole model, from the host to where it is used. Only its parts go to the devices of a mesh."""
    if mesh is None:
        by_rows = Format(TABLE_LAYOUT, SingleDeviceSharding(jax.devices()[0]))
        return jax.device_put(jnp.asarray(value, dtype), by_rows) if name == "embed" else jnp.asarray(value, dtype)
    value = _device_by_device(config, num_devices(mesh), name, np.asarray(value).astype(jnp.dtype(dtype), copy=False))
    return jax.device_put(value, NamedSharding(mesh, _SPECS.get(name, _WHOLE)))


def place_params(config: Any, mesh: Mesh | None, params: Mapping[str, Any]) -> Any:
    """`place_leaf` for every parameter, each in its own dtype."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: place_leaf(config, mesh, path[-1].key, leaf, leaf.dtype), params
    )


def _device_by_device(config: Any, n: int, name: str, value: np.ndarray) -> np.ndarray:
    """The rows of a fused matrix (the columns of a stacked bias) in the order in which devices hold them."""
    c = config
    heads = [c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim]
    sizes = {"qkv": heads, "qkv_bias": heads, "gate_up": [c.intermediate_size] * 2}.get(name)
    if sizes is None:
        return value
    axis = 1 if name == "qkv_bias" else 0
    parts = [np.split(part, n, axis) for part in np.split(value, np.cumsum(sizes)[:-1], axis)]
    return np.concatenate([part[device] for device in range(n) for part in parts], axis)


def replicate(tree: Any, mesh: Mesh | None) -> Any:
    """`tree` with a copy of each leaf on every device of the mesh, but for leaves that lie there already, split or not."""
    if mesh is None:
        return tree
    whole = NamedSharding(mesh, _WHOLE)
    there = set(mesh.devices.flat)

    def one(leaf):
        is_there = isinstance(leaf, jax.Array) and leaf.sharding.device_set == there
        return leaf if is_there else jax.device_put(leaf, whole)

    return jax.tree.map(one, tree)


def everywhere(mesh: Mesh | None, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, run whole on every device: what a kernel needs to be told, since the compiler does not split it."""
    if mesh is None:
        return function
    return jax.shard_map(function, mesh=mesh, in_specs=_WHOLE, out_specs=_WHOLE, check_vma=False)


def split(mesh: Mesh | None, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """A decorator: the function of one device becomes that of all."""
    if mesh is None:
        return lambda function: function
    return functools.partial(jax.shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
