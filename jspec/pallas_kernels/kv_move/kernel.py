"""Move the KV of an accepted tree path into place: a Pallas TPU kernel that changes the pool in place.

Layer by layer: first all sources are read, then the targets are written as `paged_kv_write` writes tokens. So sources and targets may overlap.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..paged_kv_write.kernel import Runs, block_rows, find_runs, scratch_shapes, write_chunk

NUM_READS = 8
"""Copies of sources in flight."""


def vmem_bytes(pages: jax.Array, num_tokens: int) -> int:
    """VMEM that the kernel names: all tokens of a layer in f32, the blocks being read, those being written, and one block in f32."""
    _, _, num_kv_heads, page_size, width = pages.shape
    row = num_kv_heads * width
    block = block_rows(page_size) * row
    return num_tokens * row * 4 + block * (2 * NUM_READS * pages.dtype.itemsize + 4)


def cost_estimate(pages: jax.Array, num_tokens: int) -> pl.CostEstimate:
    """Bytes moved when every token lies in its own block: the source's block in, the target's in and out."""
    num_layers, _, num_kv_heads, page_size, width = pages.shape
    block = block_rows(page_size) * num_kv_heads * width * pages.dtype.itemsize
    return pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=num_layers * num_tokens * 3 * block)


def _kernel(
    sources,  # SMEM i32[T], in the order of their targets
    slots, starts, num_runs, num_kept,  # SMEM, of the targets: see `Runs`
    _,
    pages,
    kv,  # VMEM f32[T, Hkv, 1, 2D]
    found,  # VMEM [NUM_READS, Hkv, block, 2D]
    found_done,
    blocks, staged, read_done, write_done,
    *,
    block: int,
    chunk: int,
):  # fmt: skip
    layer, page_size = pl.program_id(0), pages.shape[3]
    kept = num_kept[0]

    def read(i):
        slot = sources[i]
        first = pl.multiple_of(lax.rem(slot, page_size) // block * block, block)
        source = pages.at[layer, lax.div(slot, page_size), :, pl.ds(first, block), :]
        buffer = lax.rem(i, NUM_READS)
        return pltpu.make_async_copy(source, found.at[buffer], found_done.at[buffer])

    def start(i):
        pl.when(i < kept)(lambda: read(i).start())

    def one_token(i, _):
        read(i).wait()
        staged[...] = found[lax.rem(i, NUM_READS)].astype(jnp.float32)
        kv[i] = staged[:, pl.ds(lax.rem(sources[i], block), 1), :]
        start(i + NUM_READS)

    for i in range(NUM_READS):
        start(jnp.int32(i))
    lax.fori_loop(0, kept, one_token, None)
    write_chunk(
        slots, starts, num_runs, num_kept, kv, pages, blocks, staged, read_done, write_done,
        step=0, layer=layer, block=block, chunk=chunk,
    )  # fmt: skip


def kv_move_kernel(
    pages: jax.Array, source: jax.Array, target: jax.Array, *, interpret: bool | pltpu.InterpretParams = False
) -> jax.Array:
    """See `kv_move`."""
    num_layers, _, num_kv_heads, page_size, width = pages.shape
    block, num_tokens = block_rows(page_size), target.shape[0]
    target = jnp.where(target == source, 0, target)
    runs: Runs = find_runs(target, page_size=page_size, block=block, chunk=num_tokens)
    return pl.pallas_call(
        functools.partial(_kernel, block=block, chunk=num_tokens),
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(num_layers,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.VMEM((num_tokens, num_kv_heads, 1, width), jnp.float32),
                pltpu.VMEM((NUM_READS, num_kv_heads, block, width), pages.dtype),
                pltpu.SemaphoreType.DMA((NUM_READS,)),
                *scratch_shapes(pages),
            ],
        ),
        input_output_aliases={5: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem_bytes(pages, num_tokens) + (4 << 20)
        ),
        cost_estimate=cost_estimate(pages, num_tokens),
        interpret=interpret,
        name="kv_move",
    )(source[runs.order], runs.slots, runs.starts, runs.num_runs, runs.num_kept, pages)
