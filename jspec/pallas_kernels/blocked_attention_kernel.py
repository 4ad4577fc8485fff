"""Attention of blocks of queries over pages: the Pallas TPU kernel behind verify and prefill attention.

Decoding is bound by the bytes of the KV pages, so the loop over blocks of them must take less time than a block takes to arrive:

* All `Q` query tokens of a block times the query heads of a group are one matrix tile of `M` lines, so a page is pushed through the matrix unit once.
* `scale * log2(e)` is folded into the queries, weights are powers of two, in the pool's dtype; the division comes once, at the end of a block.
* Scores of all heads come first, then softmax and weighted sums, so that the compiler overlaps heads.
* Keys that every query sees have a loop of their own, without a mask. The mask is for the last positions and for a window's edge.
* Copies run ahead of the arithmetic along one list of all key blocks of all query blocks: while one ends, the first keys of the next arrive.

The running maximum and the sums are kept for each line of the tile as 128 equal lanes and as 128 partial sums.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .block_sizes import (
    LANES,
    SMALLEST_VMEM,
    BlockSizes,
    block_sizes,
    pages_at_once,
    tile_lines,
    value_width,
)
from .blocked_attention import QueryBlocks

LOWEST = -1e30
"""Where the running maximum starts: below every score, and finite, so that a difference of two of them is never NaN."""


NUM_SCALARS = 6
"""Arguments of the kernel that lie in scalar memory."""


class Static(NamedTuple):
    """What fixes the program, beside shapes."""

    width: int  # Q, query tokens of a block
    group: int  # query heads of one KV head
    tail_pages: int  # pages that a masked step takes at a time
    heads_at_once: int
    window: int | None
    soft_cap: float | None
    query_start: int
    table_width: int  # P


def _kernel(
    layer,  # SMEM i32[1]; no constant, so that all layers of a model are one program
    page_table,  # SMEM i32[B * P]
    rows,  # SMEM i32[N], row of the table
    positions,  # SMEM i32[N], of the block's first query
    key_ends,  # SMEM i32[N], position behind the block's last key; 0: an empty block
    following,  # SMEM i32[N + C], the next block of the same core that is not empty; the last C: the first one of each core
    ancestors,  # u32[Q, 128], a column a block, this one's among them; None: a chain
    q,  # [1, Hkv, M, Dv]
    pages,
    out,  # [1, Hkv, M, Dv]
    buffers,  # [buffers, pages, Hkv, page_size, 2D]
    top,  # f32[Hkv, M, 128]
    total,  # f32[Hkv, M, 128]
    acc,  # f32[Hkv, M, Dv]
    cursor,  # SMEM i32[4]: query block and key block to fetch next; key blocks fetched and used so far
    done,  # DMA semaphores [buffers]
    *,
    static: Static,
):
    is_tree = ancestors is not None
    num_kv_heads, lines, _ = q.shape[1:]
    num_buffers, pages_per_block, _, page_size, kv_width = buffers.shape
    block_len = pages_per_block * page_size
    head_dim = kv_width // 2
    split = head_dim % LANES == 0
    num_blocks = positions.shape[0]
    core, step = pl.program_id(0), pl.program_id(1)
    me = core * pl.num_programs(1) + step
    tail_tokens = static.tail_pages * page_size
    precision = lax.Precision.HIGHEST if buffers.dtype == jnp.float32 else None

    def first_key_block(block):
        if static.window is None:
            return jnp.int32(0)
        return lax.div(jnp.maximum(positions[block] - static.window + 1, 0), block_len)

    def is_in_window(block, index, i):
        """Whether page `i` of a key block is one that the first query sees, or a later one."""
        if static.window is None:
            return True
        return (index * pages_per_block + i + 1) * page_size > positions[block] - static.window + 1

    def copy_page(page_id, buffer, i):
        return pltpu.make_async_copy(pages.at[layer[0], page_id], buffers.at[buffer, i], done.at[buffer])

    def fetch_next():
        """Starts the copies of the next key block of the list, and moves the cursor on."""
        exists = cursor[0] < num_blocks
        block, index, fetched = jnp.minimum(cursor[0], num_blocks - 1), cursor[1], cursor[2]
        buffer = lax.rem(fetched, num_buffers)
        left = pl.cdiv(key_ends[block], page_size) - index * pages_per_block
        num_pages = jnp.where(exists, left, 0)
        base = rows[block] * static.table_width + index * pages_per_block
        for i in range(pages_per_block):
            pl.when((i < num_pages) & is_in_window(block, index, i))(
                lambda i=i: copy_page(page_table[base + i], buffer, i).start()
            )
        is_last = left <= pages_per_block
        after = following[block]
        cursor[0] = jnp.where(exists & ~is_last, block, after)
        cursor[1] = jnp.where(is_last, first_key_block(jnp.minimum(after, num_blocks - 1)), index + 1)
        cursor[2] = fetched + 1

    @pl.when(step == 0)
    def start_copies():
        start = following[num_blocks + core]
        cursor[0] = start
        cursor[1] = first_key_block(jnp.minimum(start, num_blocks - 1))
        cursor[2] = 0
        cursor[3] = 0
        for _ahead in range(num_buffers - 1):
            fetch_next()

    def keys_and_values(buffer, head, start, count):
        """Keys and values of `count` pages of a block from page `start` on, [tokens, D] each; side by side where a head is narrower than the lanes."""
        tile = buffers[buffer, pl.ds(start, count), head]
        tile = tile.reshape(count * page_size, kv_width)
        return (tile[:, :head_dim], tile[:, head_dim:]) if split else (tile, tile)

    def score(head, keys):
        scores = lax.dot_general(
            q[0, head], keys, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )
        if static.soft_cap is not None:
            scores = jnp.tanh(scores) * (static.soft_cap * math.log2(math.e))
        return scores

    def absorb(head, scores, values):
        """One step of the running softmax."""
        tiles = scores.shape[1] // LANES
        old = top[head]
        new = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp2(scores - jnp.tile(new, (1, tiles)))
        decay = jnp.exp2(old - new)
        partial = weights[:, :LANES]
        for i in range(1, tiles):
            partial += weights[:, i * LANES : (i + 1) * LANES]
        total[head] = decay * total[head] + partial
        added = jnp.dot(weights.astype(buffers.dtype), values, precision=precision, preferred_element_type=jnp.float32)
        acc[head] = jnp.tile(decay, (1, acc.shape[2] // LANES)) * acc[head] + added
        top[head] = new

    def full_block(_, used):
        buffer = lax.rem(used, num_buffers)
        fetch_next()
        pltpu.make_async_copy(buffers.at[buffer], buffers.at[buffer], done.at[buffer]).wait()
        for start in range(0, num_kv_heads, static.heads_at_once):
            heads = range(start, min(start + static.heads_at_once, num_kv_heads))
            pairs = [keys_and_values(buffer, head, 0, pages_per_block) for head in heads]
            scores = [score(head, keys) for head, (keys, _) in zip(heads, pairs, strict=True)]
            for head, found, (_, values) in zip(heads, scores, pairs, strict=True):
                absorb(head, found, values)
        return used + 1

    position, key_end = positions[me], key_ends[me]

    @pl.when(key_end == 0)
    def nothing():
        out[...] = jnp.zeros(out.shape, out.dtype)

    @pl.when(key_end > 0)
    def attend():
        top[...] = jnp.full(top.shape, LOWEST, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        acc[...] = jnp.zeros(acc.shape, jnp.float32)

        query = lax.div(lax.broadcasted_iota(jnp.int32, (lines, 1), 0), static.group)
        if is_tree:
            column = lax.broadcasted_iota(jnp.int32, ancestors.shape, 1) == lax.rem(me, ancestors.shape[1])
            words = lax.bitcast_convert_type(ancestors[...], jnp.int32)
            mine = jnp.sum(jnp.where(column, words, 0), axis=1, keepdims=True)
            bits = jnp.zeros((lines, 1), jnp.int32)
            for node in range(static.width):
                bits = jnp.where(query == node, mine[node : node + 1], bits)

        def masked_block(index, used):
            buffer = lax.rem(used, num_buffers)
            fetch_next()
            num_pages = jnp.minimum(pl.cdiv(key_end, page_size) - index * pages_per_block, pages_per_block)

            def wait(i, _):
                pl.when(is_in_window(me, index, i))(lambda: copy_page(0, buffer, i).wait())

            lax.fori_loop(0, num_pages, wait, None)

            def some_pages(i, _):
                # Counted from the first query: negative before it.
                first = index * block_len + i * tail_tokens - position
                tail = first + lax.broadcasted_iota(jnp.int32, (lines, tail_tokens), 1)
                if is_tree:
                    bit = lax.shift_right_logical(bits, jnp.clip(tail, 0, 31)) & 1
                    seen = (tail < 0) | ((bit == 1) & (tail < key_end - position))
                else:
                    seen = tail <= jnp.minimum(query, key_end - position - 1)
                if static.window is not None:
                    # A node's position is that of its depth.
                    depth = sum(lax.shift_right_logical(bits, i) & 1 for i in range(32)) - 1 if is_tree else query
                    seen &= tail > depth - static.window
                key = first + lax.broadcasted_iota(jnp.int32, (tail_tokens, 1), 0)
                exists = key < key_end - position
                if static.window is not None:
                    exists &= key > -static.window
                for head in range(num_kv_heads):
                    keys, values = keys_and_values(buffer, head, i * static.tail_pages, static.tail_pages)
                    values = jnp.where(exists, values, jnp.zeros_like(values))
                    absorb(head, jnp.where(seen, score(head, keys), 2 * LOWEST), values)
                return None

            lax.fori_loop(0, pl.cdiv(num_pages * page_size, tail_tokens), some_pages, None)
            return used + 1

        num_key_blocks = pl.cdiv(key_end, block_len)
        first, used = first_key_block(me), cursor[3]
        num_full = lax.div(position, block_len)
        if static.window is not None:
            edge = jnp.minimum(
                pl.cdiv(jnp.maximum(position + static.query_start + static.width - static.window, 0), block_len),
                num_full,
            )
            edge = jnp.maximum(edge, first)
            used = lax.fori_loop(first, edge, masked_block, used)
            first = edge
        used = lax.fori_loop(first, num_full, full_block, used)
        used = lax.fori_loop(num_full, num_key_blocks, masked_block, used)
        cursor[3] = used

        is_query = query < key_end - position - static.query_start
        for head in range(num_kv_heads):
            summed = jnp.sum(total[head], axis=1, keepdims=True)
            found = acc[head] / jnp.where(summed == 0.0, 1.0, summed)
            out[0, head] = jnp.where(is_query, found, 0.0).astype(out.dtype)


def _chain_kernel(*refs, static: Static):
    _kernel(*(*refs[:NUM_SCALARS], None, *refs[NUM_SCALARS:]), static=static)


def blocked_attention_kernel(
    q: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    blocks: QueryBlocks,
    *,
    layer: jax.Array | int,
    scale: float,
    query_start: int = 0,
    window: int | None = None,
    soft_cap: float | None = None,
    sizes: BlockSizes | None = None,
    num_cores: int | None = None,
    interpret: bool | pltpu.InterpretParams = False,
    name: str = "blocked_attention",
) -> jax.Array:
    """Attends `N` blocks of `Q` queries to the KV of their rows.

    Args:
      q: [N, Q, Hq, D].
      pages: the pool.
      page_table: i32[B, P], pages of each row in position order.
      blocks: what each block sees; `first` is not read. With `query_start` its first query lies that much behind `position`.
      layer: i32[], layer of the pool.
      scale: factor on the scores.
      query_start: nodes of a tree that came before the queries.
      window: positions that a query sees, its own among them; None: all.
      soft_cap: scores become `soft_cap * tanh(score / soft_cap)`; None: they stay.
      sizes: how the work is cut; by default what `block_sizes` finds for the chip.
      num_cores: cores that share the blocks, each a part of them in one piece; by default those of the chip.
      interpret: for the TPU interpreter.
      name: of the kernel in a profile.

    Returns: [N, Q, Hq, D] in q's dtype; zeros for a query that is not there or sees nothing.
    """
    num_blocks, width, num_q_heads, head_dim = q.shape
    _, _, num_kv_heads, page_size, kv_width = pages.shape
    group = num_q_heads // num_kv_heads
    lines, out_width = tile_lines(width, group, pages.dtype), value_width(head_dim)
    info = None if interpret else pltpu.get_tpu_info()
    capacity = info.vmem_capacity_bytes if info else SMALLEST_VMEM
    if sizes is None:
        sizes = block_sizes(
            pages,
            lines=lines,
            max_len=page_table.shape[1] * page_size,
            capacity=capacity,
            chip=info.chip_version.value if info else None,
        )
    if num_cores is None:
        num_cores = info.num_cores if info else 1
    num_pages, tail_pages = pages_at_once(sizes, page_size)

    factor = scale * math.log2(math.e) if soft_cap is None else scale / soft_cap
    tile = (
        (q.astype(jnp.float32) * factor).astype(pages.dtype).reshape(num_blocks, width, num_kv_heads, group, head_dim)
    )
    tile = jnp.swapaxes(tile, 1, 2).reshape(num_blocks, num_kv_heads, width * group, head_dim)
    per_core = -(-num_blocks // num_cores)
    missing = per_core * num_cores - num_blocks
    tile = jnp.pad(tile, ((0, missing), (0, 0), (0, lines - width * group), (0, out_width - head_dim)))
    key_ends = jnp.where(blocks.count > 0, blocks.position + blocks.keys, 0)
    rows, positions, key_ends = (jnp.pad(x, (0, missing)) for x in (blocks.row, blocks.position, key_ends))

    static = Static(
        width=width,
        group=group,
        tail_pages=tail_pages,
        heads_at_once=sizes.heads_at_once,
        window=window,
        soft_cap=soft_cap,
        query_start=query_start,
        table_width=page_table.shape[1],
    )
    one = pl.BlockSpec((1, num_kv_heads, lines, out_width), lambda core, step, *_: (core * per_core + step, 0, 0, 0))
    inputs, specs = [tile, pages], [one, pl.BlockSpec(memory_space=pl.ANY)]
    if blocks.ancestors is not None:
        # Transposed, as XLA keeps an array of so few columns: nothing is laid out anew.
        inputs.insert(0, blocks.ancestors.T)
        together = min(LANES, num_blocks)
        last = (num_blocks - 1) // together
        specs.insert(
            0,
            pl.BlockSpec(
                (width, together), lambda core, step, *_: (0, jnp.minimum((core * per_core + step) // together, last))
            ),
        )
    out = pl.pallas_call(
        functools.partial(_chain_kernel if blocks.ancestors is None else _kernel, static=static),
        out_shape=jax.ShapeDtypeStruct(tile.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=NUM_SCALARS,
            grid=(num_cores, per_core),
            in_specs=specs,
            out_specs=one,
            scratch_shapes=[
                pltpu.VMEM((sizes.num_buffers, num_pages, num_kv_heads, page_size, kv_width), pages.dtype),
                pltpu.VMEM((num_kv_heads, lines, LANES), jnp.float32),
                pltpu.VMEM((num_kv_heads, lines, LANES), jnp.float32),
                pltpu.VMEM((num_kv_heads, lines, out_width), jnp.float32),
                pltpu.SMEM((4,), jnp.int32),
                pltpu.SemaphoreType.DMA((sizes.num_buffers,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel" if num_cores > 1 else "arbitrary", "arbitrary"),
            vmem_limit_bytes=capacity,
            disable_bounds_checks=True,  # on v5e checking every copy took 7 % of a block (modelled)
        ),
        cost_estimate=cost_estimate(q, pages, page_table),
        interpret=interpret,
        name=name,
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        page_table.reshape(-1),
        rows,
        positions,
        key_ends,
        _following(key_ends, num_cores),
        *inputs,
    )
    out = out[:num_blocks, :, : width * group, out_width - head_dim :]
    out = out.reshape(num_blocks, num_kv_heads, width, group, head_dim)
    return jnp.swapaxes(out, 1, 2).reshape(q.shape)


def cost_estimate(q: jax.Array, pages: jax.Array, page_table: jax.Array) -> pl.CostEstimate:
    """For tables that are full: the true lengths are not known while tracing."""
    num_blocks, width, num_q_heads, head_dim = q.shape
    _, _, num_kv_heads, page_size, kv_width = pages.shape
    num_keys = num_blocks * page_table.shape[1] * page_size
    return pl.CostEstimate(
        flops=4 * num_keys * width * num_q_heads * head_dim,
        transcendentals=num_keys * width * num_q_heads,
        bytes_accessed=num_keys * num_kv_heads * kv_width * pages.dtype.itemsize + 2 * q.size * q.dtype.itemsize,
    )


def _following(key_ends: jax.Array, num_cores: int) -> jax.Array:
    """i32[N + C]: for each block the next one of its core that is not empty, then the first such block of each core; `N` where there is none."""
    num_blocks = key_ends.shape[0]
    present = jnp.where(key_ends > 0, jnp.arange(num_blocks, dtype=jnp.int32), num_blocks).reshape(num_cores, -1)
    from_here = lax.cummin(present, axis=1, reverse=True)
    behind = jnp.pad(from_here[:, 1:], ((0, 0), (0, 1)), constant_values=num_blocks)
    return jnp.concatenate([behind.reshape(-1), from_here[:, 0]])
