"""Attention of blocks of queries over pages, one page after another with a running softmax: the common core of the attention references.

The work is a list of pairs (block of queries, block of keys), and one loop with a dynamic end walks it. So the cost follows the true
lengths and not the padded shapes, a padding row costs nothing, and the memory is one block. The context is never gathered as a whole,
which on XLA:CPU is also faster than gathering the pages and attending densely.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

MIN_KEY_BLOCK = 32
"""Smaller pages are read several at a time, so that a page of one token does not make the loop one token long."""

LOWEST = -1e30
"""Where the running maximum starts: below every score, and finite, so that a difference of two of them is never NaN."""


class QueryBlocks(NamedTuple):
    """`N` blocks of at most `Q` consecutive queries each. Query `i` of a block sees the row's positions up to `position + i`."""

    row: jax.Array  # i32[N]  row of the page table
    first: jax.Array  # i32[N]  index of the block's first query among the packed queries
    position: jax.Array  # i32[N]  position of the block's first query in its row
    count: jax.Array  # i32[N]  queries in the block; 0: an empty block, which costs nothing
    keys: jax.Array  # i32[N]  keys from `position` on that exist: those of its queries, and of earlier nodes of a tree
    ancestors: jax.Array | None = None
    """u32[N, Q] or None: bit j of query i says that it sees key `position + j`; None: all keys up to its own."""


class _Work(NamedTuple):
    """One pair (block of queries, block of keys), or with a leading dimension all of them in order."""

    block: jax.Array  # i32[]
    first: jax.Array  # i32[]  of the block
    count: jax.Array  # i32[]  of the block
    keys: jax.Array  # i32[]  of the block
    tail: jax.Array  # i32[]  position of the first key, counted from the block's first query: negative in the prefix
    is_first: jax.Array  # bool[]  the first pair of its block
    page_ids: jax.Array  # i32[K]


def _work_list(
    page_table: jax.Array, blocks: QueryBlocks, page_size: int, window: int | None
) -> tuple[jax.Array, _Work]:
    """Number of pairs, and the pairs. Depends on lengths and tables only: compiled once for all layers."""
    key_pages = min(max(1, MIN_KEY_BLOCK // page_size), page_table.shape[1])
    key_len = key_pages * page_size
    page_table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % key_pages)))
    page_table = page_table.reshape(page_table.shape[0], -1, key_pages)

    skipped = jnp.zeros_like(blocks.position)
    if window is not None:
        skipped = jnp.maximum(blocks.position - window + 1, 0) // key_len
    key_blocks = jnp.where(blocks.count > 0, -(-(blocks.position + blocks.keys) // key_len) - skipped, 0)
    ends = jnp.cumsum(key_blocks)
    work = jnp.arange(blocks.row.shape[0] * page_table.shape[1], dtype=jnp.int32)
    block = jnp.minimum(jnp.searchsorted(ends, work, side="right", method="compare_all"), ends.shape[0] - 1).astype(
        jnp.int32
    )
    rank = work - (ends - key_blocks)[block]
    key_block = rank + skipped[block]
    return ends[-1], _Work(
        block=block,
        first=blocks.first[block],
        count=blocks.count[block],
        keys=blocks.keys[block],
        tail=key_block * key_len - blocks.position[block],
        is_first=rank == 0,
        page_ids=page_table.at[blocks.row[block], key_block].get(mode="clip"),
    )


def blocked_attention(
    q: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    blocks: QueryBlocks,
    *,
    block_len: int,
    layer: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """Attend each block of queries to the KV of its row, up to the block's last position.

    Args:
      q: [T, Hq, D], packed queries; a block is `T[first : first + count]`.
      pages: the pool.
      page_table: i32[B, P], pages of each row in position order.
      blocks: the blocks, disjoint.
      block_len: `Q`.
      layer: layer of the pool.
      scale: factor on the scores.
      window: positions that a query sees, its own among them; None: all.
      soft_cap: scores become `soft_cap * tanh(score / soft_cap)`; None: they stay.

    Returns: [T, Hq, D] in q's dtype; zeros for a query that is in no block or sees nothing.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, page_size = pages.shape[2], pages.shape[3]
    group = num_q_heads // num_kv_heads
    lines = block_len * group
    num_work, work_list = _work_list(page_table, blocks, page_size, window)

    # One block of padding behind, so that a block which starts near the end is not shifted back by its slice.
    grouped = (q.astype(jnp.float32) * scale).reshape(num_tokens, num_kv_heads, group, head_dim)
    grouped = jnp.pad(grouped, ((0, block_len), (0, 0), (0, 0), (0, 0)))
    query = jnp.arange(block_len)

    def one_pair(i, carry):
        top, total, acc, out = carry
        work = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False, allow_negative_indices=False), work_list
        )
        kv = pages.at[layer, work.page_ids].get(mode="clip")  # [K, Hkv, page_size, 2D]
        kv = jnp.moveaxis(kv, 0, 1).reshape(num_kv_heads, -1, 2 * head_dim).astype(jnp.float32)
        tail = work.tail + jnp.arange(kv.shape[1])

        # Both selects matter: a key behind the last may be NaN, and a weight of zero times a NaN value is NaN.
        exists = tail < work.keys if window is None else (tail < work.keys) & (tail > -window)
        values = jnp.where(exists[:, None], kv[..., head_dim:], 0.0)
        if blocks.ancestors is None:
            seen = tail <= jnp.minimum(query, work.count - 1)[:, None]
        else:
            bits = lax.dynamic_index_in_dim(blocks.ancestors, work.block, keepdims=False)[:, None]
            bit = jnp.right_shift(bits, jnp.clip(tail, 0, 31).astype(jnp.uint32)) & 1
            seen = (tail < 0) | ((bit == 1) & (tail < work.keys))
        if window is not None:
            depth = query if blocks.ancestors is None else lax.population_count(bits[:, 0]).astype(jnp.int32) - 1
            seen &= tail > (depth - window)[:, None]
        queries = lax.dynamic_slice_in_dim(grouped, work.first, block_len)  # [Q, Hkv, G, D]
        queries = jnp.moveaxis(queries, 1, 0).reshape(num_kv_heads, lines, head_dim)
        scores = jnp.einsum("hmd,hsd->hms", queries, kv[..., :head_dim], preferred_element_type=jnp.float32)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(jnp.repeat(seen, group, axis=0), scores, -jnp.inf)

        top = jnp.where(work.is_first, LOWEST, top)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.exp(scores - new_top)
        decay = jnp.exp(top - new_top)
        total = jnp.where(work.is_first, 0.0, total) * decay + jnp.sum(weights, axis=-1, keepdims=True)
        acc = jnp.where(work.is_first, 0.0, acc) * decay
        acc += jnp.einsum("hms,hsd->hmd", weights, values, preferred_element_type=jnp.float32)

        new = (acc / jnp.where(total == 0.0, 1.0, total)).reshape(num_kv_heads, block_len, group, head_dim)
        new = jnp.moveaxis(new, 0, 1).reshape(block_len, num_q_heads, head_dim).astype(out.dtype)
        old = lax.dynamic_slice_in_dim(out, work.first, block_len)
        new = jnp.where((query < work.count)[:, None, None], new, old)
        return new_top, total, acc, lax.dynamic_update_slice_in_dim(out, new, work.first, axis=0)

    start = (
        jnp.zeros((num_kv_heads, lines, 1), jnp.float32),
        jnp.zeros((num_kv_heads, lines, 1), jnp.float32),
        jnp.zeros((num_kv_heads, lines, head_dim), jnp.float32),
        jnp.zeros((num_tokens + block_len, num_q_heads, head_dim), q.dtype),
    )
    return lax.fori_loop(0, num_work, one_pair, start)[3][:num_tokens]
