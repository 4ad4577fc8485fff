"""How attention cuts its work into blocks, and what that takes of a core's memory."""

import functools
import importlib.resources
import json
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

LANES = 128

SMALLEST_VMEM = 16 << 20
"""Bytes of a core of v4, the least of all chips."""

MAX_BLOCK_BYTES = 4 << 20
"""Starting the copies of a block is about a tenth of its bundles by then (modelled): longer ones have little left to save."""


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


def block_sizes(
    pages: jax.Array, *, lines: int, max_len: int, capacity: int = SMALLEST_VMEM, chip: str | None = None
) -> BlockSizes:
    """What the table says for the chip; where it says nothing, the longest blocks that fit. No longer than `max_len` needs.

    Args:
      pages: the pool.
      lines: of a tile of queries.
      max_len: positions that a row's page table covers.
      capacity: bytes of VMEM of a core.
      chip: as Pallas calls its version, such as "v5e" or "7x"; None: no chip that is known.
    """
    _, _, num_kv_heads, _, kv_width = pages.shape
    tuned = _table().get((chip, num_kv_heads, kv_width // 2, pages.dtype.name, lines))
    sizes = tuned or _longest_that_fit(pages, lines, capacity)
    while sizes.block_len > LANES and sizes.block_len >= 2 * max_len:
        sizes = sizes._replace(block_len=sizes.block_len // 2)
    return sizes


def _longest_that_fit(pages: jax.Array, lines: int, capacity: int) -> BlockSizes:
    sizes = BlockSizes(block_len=1024, heads_at_once=8)
    while sizes.block_len > LANES and _block_bytes(pages, sizes) > MAX_BLOCK_BYTES:
        sizes = sizes._replace(block_len=sizes.block_len // 2)
    while vmem_bytes(pages, lines=lines, sizes=sizes) > capacity * 3 // 4:
        if sizes.heads_at_once > 2:
            sizes = sizes._replace(heads_at_once=sizes.heads_at_once // 2)
        elif sizes.block_len > LANES:
            sizes = sizes._replace(block_len=sizes.block_len // 2)
        else:
            break
    return sizes


TABLE = "block_table.json"
"""Made by `scripts/tune-blocks`: of the sizes that compile for a chip, those with the fewest bundles for a token."""


@functools.cache
def _table() -> dict[tuple, BlockSizes]:
    entries = json.loads((importlib.resources.files(__package__) / TABLE).read_text())["sizes"]
    key = ("chip", "num_kv_heads", "head_dim", "dtype", "lines")
    return {
        tuple(entry[name] for name in key): BlockSizes(entry["block_len"], entry["heads_at_once"]) for entry in entries
    }


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
    """VMEM of a core: blocks of keys, running maximum and sums, two blocks of queries and of results, and scores and weights of the heads at once."""
    _, _, num_kv_heads, page_size, kv_width = pages.shape
    out_width, itemsize = value_width(kv_width // 2), pages.dtype.itemsize
    running = num_kv_heads * lines * (2 * LANES + out_width) * 4
    rows = 2 * 2 * num_kv_heads * lines * out_width * itemsize
    block_len = pages_at_once(sizes, page_size)[0] * page_size
    scores = min(sizes.heads_at_once, num_kv_heads) * lines * block_len * (4 + itemsize)
    return sizes.num_buffers * _block_bytes(pages, sizes) + running + rows + scores


def _block_bytes(pages: jax.Array, sizes: BlockSizes) -> int:
    _, _, num_kv_heads, page_size, kv_width = pages.shape
    return pages_at_once(sizes, page_size)[0] * page_size * num_kv_heads * kv_width * pages.dtype.itemsize
