"""How attention cuts its work into blocks, and what that takes of a core's memory."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

LANES = 128

VMEM_FOR_COMPILER = 16 << 20
"""What the compiler may use beside the buffers of the kernel: scores and weights of several heads at a time."""


class BlockSizes(NamedTuple):
    """How the work is cut: the same result for all, at another speed."""

    block_len: int
    """Tokens that one step reads, see `pages_at_once`."""
    heads_at_once: int
    """KV heads whose scores are computed before their softmax."""
    num_buffers: int = 2
    """Blocks in VMEM: one in use, the others on their way."""
    tail_tokens: int = 256
    """Tokens that a masked step takes at a time."""


def block_sizes(pages: jax.Array, *, lines: int, max_len: int) -> BlockSizes:
    """The longest blocks whose buffers leave room in VMEM, and no longer than `max_len`, the positions of a row, needs."""
    _, _, num_kv_heads, _, kv_width = pages.shape
    token = num_kv_heads * kv_width * pages.dtype.itemsize
    block_len = 1024
    while block_len > LANES and (block_len * token > 4 << 20 or block_len >= 2 * max_len):
        block_len //= 2
    return BlockSizes(block_len=block_len, heads_at_once=4 if lines == 64 else 8)


def pages_at_once(sizes: BlockSizes, page_size: int) -> tuple[int, int]:
    """Pages of a block, and of a masked step, which divides it: whole pages that fill whole lanes with their scores."""
    unit = math.lcm(page_size, LANES)
    units = max(1, sizes.block_len // unit)
    tail = max(n for n in range(1, units + 1) if units % n == 0 and (n == 1 or n * unit <= sizes.tail_tokens))
    return units * unit // page_size, tail * unit // page_size


def tile_lines(width: int, group: int, dtype) -> int:
    """`M`: lines of a tile of queries, a multiple of what a register holds of the type."""
    unit = 32 // jnp.dtype(dtype).itemsize
    return -(-width * group // unit) * unit


def value_width(head_dim: int) -> int:
    """Lanes of a weighted sum: the values of a head, with its keys beside them where a head is narrower than the lanes."""
    return head_dim if head_dim % LANES == 0 else 2 * head_dim


def vmem_bytes(pages: jax.Array, *, lines: int, sizes: BlockSizes) -> int:
    """VMEM that the kernel names: blocks of keys, running maximum and sums, and two blocks of queries and of results."""
    _, _, num_kv_heads, page_size, kv_width = pages.shape
    block = pages_at_once(sizes, page_size)[0] * page_size * num_kv_heads * kv_width * pages.dtype.itemsize
    out_width = value_width(kv_width // 2)
    running = num_kv_heads * lines * (2 * LANES + out_width) * 4
    return sizes.num_buffers * block + running + 2 * 2 * num_kv_heads * lines * out_width * 4
