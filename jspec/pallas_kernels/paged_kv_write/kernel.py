"""Write the KV of packed tokens into the pool: a Pallas TPU kernel that changes the pool in place.

A copy between HBM and VMEM moves whole tiles of `BLOCK_ROWS` tokens, so one token cannot be written alone: the kernel reads the block
its slot lies in, puts the token there and writes the block back. Tokens of one block must go through one such copy, or the later write
would undo the earlier one. So the tokens are sorted by slot, and those of one block form a *run*; runs touch disjoint memory, and
several are in flight at a time. A run that fills its block is not read first.

It stays apart from attention. A run of 8 tokens is 328 bundles on v5e and 287 on v7x (modelled, 8 KV heads of 128 in bfloat16), a verify of 8 tokens at most
two runs a row: 2 % and 6 % of what attention takes for 4096 positions. To hide that, attention would have to hold back the copies that it runs ahead over
the rows to come, whose last page is not written yet.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

BLOCK_ROWS = 8
"""Tokens in one tile of a page, in 2-byte and in 4-byte types; a page of 1, 2 or 4 tokens is one tile."""

NUM_BUFFERS = 8
"""Blocks in VMEM, on their way in or out."""

READ_AHEAD = 4
"""Runs whose block is fetched before it is needed; the other buffers are being written back."""

CHUNK_BYTES = 1 << 20
"""VMEM for the new tokens of one grid step (twice: the next chunk is fetched meanwhile)."""

NOWHERE = np.iinfo(np.int32).max  # slot of a token that is dropped: sorts behind all others


class Runs(NamedTuple):
    """Tokens in slot order, in chunks of `C`, with the runs of each chunk. A block that spans two chunks is two runs, one after the other."""

    order: jax.Array  # i32[T]  token at each place of the order
    slots: jax.Array  # i32[n * C]  slot at each place; NOWHERE behind the last token that is kept
    starts: jax.Array  # i32[n * C]  for each chunk, where its runs start, counted from the chunk's first place
    num_runs: jax.Array  # i32[n]
    num_kept: jax.Array  # i32[1]  tokens that are not padding


def block_rows(page_size: int) -> int:
    """Tokens that one copy moves."""
    return min(page_size, BLOCK_ROWS)


def chunk_tokens(num_tokens: int, num_kv_heads: int, width: int) -> int:
    """Tokens of one grid step: a multiple of 8 that fits in CHUNK_BYTES, between 8 and 256."""
    fitting = CHUNK_BYTES // (num_kv_heads * width * 4) // 8 * 8
    return min(num_tokens, max(8, min(256, fitting)))


def vmem_bytes(pages: jax.Array, num_tokens: int) -> int:
    """VMEM that the kernel holds: two chunks of tokens in f32, the blocks in flight, and one block in f32."""
    _, _, num_kv_heads, page_size, width = pages.shape
    row = num_kv_heads * width
    block = block_rows(page_size) * row
    return 2 * chunk_tokens(num_tokens, num_kv_heads, width) * row * 4 + block * (
        NUM_BUFFERS * pages.dtype.itemsize + 4
    )


def scratch_shapes(pages: jax.Array) -> list[Any]:
    """The blocks in flight, one block in f32, and a semaphore for each copy in and out."""
    _, _, num_kv_heads, page_size, width = pages.shape
    shape = (num_kv_heads, block_rows(page_size), width)
    return [
        pltpu.VMEM((NUM_BUFFERS, *shape), pages.dtype),
        pltpu.VMEM(shape, jnp.float32),
        pltpu.SemaphoreType.DMA((NUM_BUFFERS,)),
        pltpu.SemaphoreType.DMA((NUM_BUFFERS,)),
    ]


def cost_estimate(pages: jax.Array, num_tokens: int) -> pl.CostEstimate:
    """Bytes moved when every token lies in its own block, as in decode: the block in and out, and the token in."""
    _, _, num_kv_heads, page_size, width = pages.shape
    token = num_kv_heads * width * (4 + 2 * block_rows(page_size) * pages.dtype.itemsize)
    return pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=num_tokens * token)


def find_runs(slots: jax.Array, *, page_size: int, block: int, chunk: int) -> Runs:
    """Sorts the tokens by slot and finds the runs. Depends on the slots only: XLA does it once for all layers."""
    slots = jnp.where(slots >= page_size, slots, NOWHERE)
    order = jnp.argsort(slots)
    slots = jnp.pad(slots[order], (0, -slots.shape[0] % chunk), constant_values=NOWHERE)
    chunks = slots.reshape(-1, chunk)
    kept = chunks != NOWHERE
    blocks = chunks // block
    opens = kept & jnp.concatenate([kept[:, :1], blocks[:, 1:] != blocks[:, :-1]], axis=1)
    starts = jnp.sort(jnp.where(opens, jnp.arange(chunk), chunk), axis=1)
    return Runs(
        order=order,
        slots=slots,
        starts=starts.reshape(-1).astype(jnp.int32),
        num_runs=jnp.sum(opens, axis=1, dtype=jnp.int32),
        num_kept=jnp.sum(kept, dtype=jnp.int32)[None],
    )


def _kernel(
    layer, slots, starts, num_runs, num_kept, kv, _, pages, blocks, staged, read_done, write_done, *, block, chunk
):
    write_chunk(
        slots, starts, num_runs, num_kept, kv, pages, blocks, staged, read_done, write_done,
        step=pl.program_id(0), layer=layer[0], block=block, chunk=chunk,
    )  # fmt: skip


def write_chunk(
    slots, starts, num_runs, num_kept, kv, pages, blocks, staged, read_done, write_done, *, step, layer, block, chunk
):
    """Writes the tokens of chunk `step`: for each of its runs it reads the block, puts the tokens, writes it back.

    Args:
      slots, starts, num_runs, num_kept: SMEM, see `Runs`.
      kv: f32[C, Hkv, 1, 2D], the tokens of the chunk in slot order.
      pages: the pool, in HBM.
      blocks, staged, read_done, write_done: see `scratch_shapes`.
      step, layer: i32[].
      block, chunk: tokens of a copy, and `C`.
    """
    base = step * chunk
    runs = num_runs[step]
    page_size = pages.shape[3]
    chunk_end = jnp.minimum(num_kept[0] - base, chunk)

    def span(run):
        """First and last + 1 of the run's places in the chunk."""
        following = starts[base + jnp.minimum(run + 1, chunk - 1)]
        return starts[base + run], jnp.where(run + 1 < runs, following, chunk_end)

    def is_partial(run):
        start, end = span(run)
        return end - start < block

    def target(run):
        slot = slots[base + starts[base + run]]
        first = pl.multiple_of(lax.rem(slot, page_size) // block * block, block)
        return pages.at[layer, lax.div(slot, page_size), :, pl.ds(first, block), :]

    def read(run):
        buffer = lax.rem(run, NUM_BUFFERS)
        return pltpu.make_async_copy(target(run), blocks.at[buffer], read_done.at[buffer])

    def write(run):
        buffer = lax.rem(run, NUM_BUFFERS)
        return pltpu.make_async_copy(blocks.at[buffer], target(run), write_done.at[buffer])

    def prepare(run):
        """Frees the run's buffer and starts the read into it."""

        @pl.when(run < runs)
        def _():
            pl.when(run >= NUM_BUFFERS)(lambda: write(run - NUM_BUFFERS).wait())
            pl.when(is_partial(run))(lambda: read(run).start())

    def put(run, block_ref):
        def one_token(place, _):
            row = lax.rem(slots[base + place], block)
            block_ref[:, pl.ds(row, 1), :] = kv[place]

        start, end = span(run)
        lax.fori_loop(start, end, one_token, None)

    def one_run(run, _):
        prepare(run + READ_AHEAD)
        pl.when(is_partial(run))(lambda: read(run).wait())
        buffer = lax.rem(run, NUM_BUFFERS)
        if pages.dtype == jnp.float32:
            put(run, blocks.at[buffer])
        else:  # two tokens share a 32-bit word: put them in f32, which holds every bf16 exactly
            staged[...] = blocks[buffer].astype(jnp.float32)
            put(run, staged)
            blocks[buffer] = staged[...].astype(pages.dtype)
        write(run).start()

    for run in range(READ_AHEAD):
        prepare(jnp.int32(run))
    lax.fori_loop(0, runs, one_run, None)
    lax.fori_loop(jnp.maximum(0, runs - NUM_BUFFERS), runs, lambda run, _: write(run).wait(), None)


def paged_kv_write_kernel(
    pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    *,
    layer: jax.Array | int,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """See `paged_kv_write`."""
    _, _, num_kv_heads, page_size, width = pages.shape
    num_tokens = slots.shape[0]
    block = block_rows(page_size)
    chunk = chunk_tokens(num_tokens, num_kv_heads, width)
    runs = find_runs(slots, page_size=page_size, block=block, chunk=chunk)

    # A token is [Hkv, 1, 2D]: its index is not a tiled dimension, so any token can be read, and a row can be stored at any place of a block.
    kv = jnp.concatenate([k, v], axis=-1).astype(jnp.float32)[runs.order][:, :, None]
    kv = jnp.pad(kv, ((0, -num_tokens % chunk), (0, 0), (0, 0), (0, 0)))
    return pl.pallas_call(
        functools.partial(_kernel, block=block, chunk=chunk),
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(kv.shape[0] // chunk,),
            in_specs=[
                pl.BlockSpec((chunk, num_kv_heads, 1, width), lambda i, *_: (i, 0, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=scratch_shapes(pages),
        ),
        input_output_aliases={6: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=cost_estimate(pages, num_tokens),
        interpret=interpret,
        name="paged_kv_write",
    )(jnp.asarray(layer, jnp.int32).reshape(1), runs.slots, runs.starts, runs.num_runs, runs.num_kept, kv, pages)
