"""The programs of an engine's steps, without weights: what the report compiles for models too large for this machine."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.engine.programs import jitted
from jspec.models.llama import LlamaConfig, llama_target, param_shapes
from jspec.models.parallel import POOL, TABLE_LAYOUT, num_devices, num_ranks, specs
from jspec.scheduler.reserve import max_new_pages
from jspec.spec_workers import SpecWorker
from jspec.spec_workers.base import DeviceSizes
from jspec.spec_workers.upload import DECODE_COLUMNS, ExtendSizes, unpack_decode, unpack_extend
from jspec.tpu_report.jobs import VERIFIES, StepJob
from jspec.tpu_report.step_workers import WORKERS

MODELS = {
    "SmolLM2-135M": LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
        context_len=8192, rope_theta=1e5, tie_embeddings=True,
    ),
    "Llama-3.1-8B": LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
        context_len=131072, rope_theta=5e5,
    ),
    "Qwen3-8B": LlamaConfig(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128,
        context_len=40960, rms_norm_eps=1e-6, rope_theta=1e6, qk_norm=True,
    ),
}  # fmt: skip
"""From the models' public configs; Llama's scaling of rotary frequencies, which changes no shape, is left out."""


def weights_bytes(model: str) -> int:
    """Bytes of a model's weights in bfloat16."""
    return sum(leaf.size * 2 for leaf in jax.tree.leaves(param_shapes(MODELS[model], jnp.bfloat16)))


def mesh_size(job: StepJob, hbm_bytes: int) -> int:
    """The fewest devices that hold weights and KV pool, with a fifth of their memory to spare."""
    config = MODELS[job.model]
    pool = job.batch * job.context * 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2
    sizes = (n for n in range(1, config.num_kv_heads + 1) if config.num_kv_heads % n == 0)
    return next((n for n in sizes if (weights_bytes(job.model) + pool) / n <= 0.8 * hbm_bytes), config.num_kv_heads)


def build(job: StepJob, mesh: Mesh) -> SpecWorker:
    """The worker, on the kernels of a TPU; a mesh of more than one device shares the target, or its MLPs."""
    config = MODELS[job.model]
    params = placed_params(param_shapes(config, jnp.bfloat16), mesh)
    target = llama_target(config, params, kernels="pallas", dtype=jnp.bfloat16, mesh=mesh if mesh.size > 1 else None)
    return WORKERS[job.worker](target)


def placed_params(shapes: Any, mesh: Mesh) -> Any:
    """Where `parallel.place_params` puts parameters."""

    def one(leaf, spec):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    if mesh.size > 1:
        return jax.tree.map(one, shapes, specs(shapes, mesh))
    placed = jax.tree.map(lambda leaf: one(leaf, PartitionSpec()), shapes)
    embed = placed["embed"]
    by_rows = Format(TABLE_LAYOUT, embed.sharding)
    return placed | {"embed": jax.ShapeDtypeStruct(embed.shape, embed.dtype, sharding=by_rows)}


def programs(job: StepJob, worker: SpecWorker, mesh: Mesh) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Name, `jit` function and shapes of the arguments of each program; the second argument is the donated device state.

    To be called with the mesh of a TPU in place: kernels ask it for the chip.
    """
    pages_per_row = job.context // job.page_size
    sizes = DeviceSizes(
        num_rows=job.batch + 1,
        num_pages=job.batch * pages_per_row,
        pages_per_row=pages_per_row,
        page_size=job.page_size,
    )
    device = jax.eval_shape(functools.partial(worker.init, sizes))
    if (ranks := num_ranks(mesh)) > 1:
        own = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
        device = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((ranks, *leaf.shape), leaf.dtype, sharding=own), device)
    pool = NamedSharding(mesh, POOL if num_devices(mesh) > 1 else PartitionSpec())
    device = _placed(dataclasses.replace(device, kv_pages=_placed(device.kv_pages, pool)), mesh)
    params = _placed(worker.params, mesh)

    width = max_new_pages(alloc_len=worker.alloc_len, depth=1, page_size=job.page_size)
    upload = jax.ShapeDtypeStruct((job.batch, DECODE_COLUMNS + width + sum(worker.input_words)), jnp.int32)
    verify = functools.partial(worker.verify_phase, depth=worker.depths[-1])
    unpack: Callable[..., Any] = functools.partial(unpack_decode, words=worker.input_words)
    yield from _named("verify", unpack, verify, worker.commit_phase, pages_per_row, params, device, upload, mesh)

    if VERIFIES.get(job.worker, 1) > 1:
        return  # its prefill is that of "plain"
    for name, num_tails in (("prefill", 0), ("mixed", job.batch)):
        extend = ExtendSizes(
            num_tokens=job.prefill_tokens,
            num_rows=8,
            num_tails=num_tails,
            lookahead=max(worker.lookahead, 1),
            table_width=pages_per_row,
            max_new_pages=width,
        )
        unpack = functools.partial(unpack_extend, sizes=extend)
        upload = jax.ShapeDtypeStruct((extend.upload_len,), jnp.int32)
        functions = (unpack, worker.extend_phase, worker.extend_commit, pages_per_row)
        yield from _named(name, *functions, params, device, upload, mesh)


def _placed(tree: Any, where: Mesh | NamedSharding) -> Any:
    """Shapes that lie `where`, on each device of a mesh, but for those that say where they lie."""
    whole = NamedSharding(where, PartitionSpec()) if isinstance(where, Mesh) else where

    def one(leaf):
        known = isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None
        return leaf if known else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole)

    return jax.tree.map(one, tree)


def _named(name, *launch):
    for part, (function, arguments) in zip(("phase", "commit"), jitted(*launch), strict=False):
        yield f"{name}_{part}", function, arguments
