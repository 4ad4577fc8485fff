"""A model over several devices, in one of two ways; the name of a mesh's axis says which.

"tensor": each device holds a part of every layer's heads and of its MLP, of the vocabulary, and of the KV pool (Megatron-LM, arXiv 1909.08053). The forward
of one device is that of a smaller model, with two sums over the devices in a layer and one behind the embedding.

"data": each device is a rank with requests, and a KV pool, of its own; it holds the whole of attention, embedding and head, and shares the MLPs, which work
on the tokens of all ranks together (the data-parallel attention of SGLang). A whole step runs per rank: the forward gathers tokens before an MLP and keeps
its own sums behind it.

Parameters keep the shapes of the whole model. Where a matrix is fused of several (queries, keys and values; gate and up), its rows lie device by device, so
that each device's part is fused like the whole.
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

AXIS, RANKS = "tensor", "data"

TABLE_LAYOUT = Layout((0, 1))
"""Of the embedding table: row by row. A lookup reads rows; left alone, XLA on TPU keeps a table of narrow rows by columns, and turns it over in each step."""

POOL = PartitionSpec(None, None, AXIS)
"""A KV pool is split by heads."""

_ROWS, _COLUMNS, _WHOLE = (0,), (1,), ()
_SPLIT: dict[str, dict[str, tuple[int, ...]]] = {
    AXIS: {
        "qkv": _ROWS,
        "o": _COLUMNS,
        "gate_up": _ROWS,
        "down": _COLUMNS,
        "embed": _ROWS,
        "head": _ROWS,
        "qkv_bias": _COLUMNS,
    },
    RANKS: {"gate_up": _ROWS, "down": _COLUMNS},
}
"""By the mesh's axis, and the name of a parameter: the dimension that is split over the devices."""


def _spec(mesh: Mesh | None, name: str) -> PartitionSpec:
    """How a parameter is split."""
    if mesh is None:
        return PartitionSpec()
    (axis,) = mesh.axis_names
    return next((PartitionSpec(*[None] * dim, axis) for dim in _SPLIT[axis].get(name, _WHOLE)), PartitionSpec())


def tensor_mesh(size: int) -> Mesh | None:
    """The first `size` devices, to share the model; None for one.

    Raises:
      ValueError: there are not so many.
    """
    return _mesh(size, AXIS, "tensor_parallel")


def data_mesh(size: int) -> Mesh | None:
    """The first `size` devices, a rank each; None for one.

    Raises:
      ValueError: there are not so many.
    """
    return _mesh(size, RANKS, "data_parallel")


def _mesh(size: int, axis: str, field: str) -> Mesh | None:
    devices = jax.local_devices()
    if size > len(devices):
        raise ValueError(f"{field}={size} exceeds the devices of this machine, {len(devices)}: lower it")
    return None if size == 1 else Mesh(np.array(devices[:size]), (axis,))


def num_devices(mesh: Mesh | None) -> int:
    """Devices that share the heads of the model, and the KV of a request."""
    return 1 if mesh is None else mesh.shape.get(AXIS, 1)


def num_ranks(mesh: Mesh | None) -> int:
    """Devices with requests of their own."""
    return 1 if mesh is None else mesh.shape.get(RANKS, 1)


def part_of(config: Any, mesh: Mesh | None) -> Any:
    """The `LlamaConfig` that one device runs.

    Raises:
      ValueError: the devices cannot share the model evenly.
    """
    if (ranks := num_ranks(mesh)) > 1:
        if config.intermediate_size % ranks:
            raise ValueError(
                f"data_parallel={ranks} must divide intermediate_size={config.intermediate_size}: each rank holds an equal part of the MLPs"
            )
        return dataclasses.replace(config, intermediate_size=config.intermediate_size // ranks)
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


def specs(tree: Any, mesh: Mesh | None) -> Any:
    """How the parameters of `Llama` are split, as a tree like theirs."""
    return jax.tree_util.tree_map_with_path(lambda path, _: _spec(mesh, path[-1].key), tree)


def place_leaf(config: Any, mesh: Mesh | None, name: str, value: Any, dtype: Any) -> jax.Array:
    """A parameter of the whole model, from the host to where it is used. Only its parts go to the devices of a mesh."""
    if mesh is None:
        by_rows = Format(TABLE_LAYOUT, SingleDeviceSharding(jax.devices()[0]))
        return jax.device_put(jnp.asarray(value, dtype), by_rows) if name == "embed" else jnp.asarray(value, dtype)
    value, spec = np.asarray(value).astype(jnp.dtype(dtype), copy=False), _spec(mesh, name)
    if any(spec):
        value = _device_by_device(config, mesh.size, name, value)
    return jax.device_put(value, NamedSharding(mesh, spec))


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
    whole = NamedSharding(mesh, PartitionSpec())
    there = set(mesh.devices.flat)

    def one(leaf):
        is_there = isinstance(leaf, jax.Array) and leaf.sharding.device_set == there
        return leaf if is_there else jax.device_put(leaf, whole)

    return jax.tree.map(one, tree)


def everywhere(mesh: Mesh | None, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, run whole on every device that shares the model: what a kernel needs to be told, since the compiler does not split it."""
    whole = PartitionSpec()
    return split(mesh, whole, whole)(function)


def split(mesh: Mesh | None, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """A decorator: the function of one device becomes that of all that share the model. A rank runs it as it is."""
    if num_devices(mesh) == 1:
        return lambda function: function
    return functools.partial(jax.shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def agreed(mesh: Mesh | None, value: jax.Array) -> jax.Array:
    """The largest `value` of the ranks. They must agree on every branch that holds a part of the forward: it works on the tokens of all."""
    return value if num_ranks(mesh) == 1 else jax.lax.pmax(value, RANKS)


def on_ranks(mesh: Mesh | None, function: Callable[..., Any], *shared: Any) -> Callable[..., Any]:
    """`function`, run by every rank on its own share: what it is given and what it returns has a leading axis of ranks, which `function` does not see.

    Args:
      mesh: the ranks; without several the function stays as it is.
      function: of one rank.
      shared: of its first arguments, trees of arrays or of shapes, with where their leaves lie: these are shared by the ranks as they lie there.
    """
    if num_ranks(mesh) == 1:
        return function
    of_shared = tuple(jax.tree.map(lambda leaf: leaf.sharding.spec, tree) for tree in shared)

    def one_rank(*arguments):
        own = jax.tree.map(lambda leaf: leaf[0], arguments[len(shared) :])
        return jax.tree.map(lambda leaf: leaf[None], function(*arguments[: len(shared)], *own))

    def all_ranks(*arguments):
        specs = (*of_shared, *[PartitionSpec(RANKS)] * (len(arguments) - len(shared)))
        run = jax.shard_map(one_rank, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(RANKS), check_vma=False)
        return run(*arguments)

    return all_ranks


def every_rank(mesh: Mesh | None, make: Callable[[], Any]) -> Any:
    """What `make` makes, one on each rank: its leaves get a leading axis of ranks. Without several, as it is."""
    return make() if num_ranks(mesh) == 1 else jax.jit(on_ranks(mesh, make))()
