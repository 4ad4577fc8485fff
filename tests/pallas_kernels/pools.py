"""Pools in which all that must not be read is NaN, and attention over them in NumPy, one query at a time."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.pallas_kernels.paged_kv_write import init_kv_pages, paged_kv_write

LAYERS, LAYER = 3, 1

quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
"""Compiling takes nearly all the time of these tests: half of it without LLVM's optimiser."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pool:
    """`B` rows, each with KV at its first positions; shuffled pages, NaN everywhere else, poison behind the pages of a row."""

    pages: Any
    page_table: np.ndarray  # i32[B, P]
    keys: np.ndarray  # f32[B, S, Hkv, D]
    values: np.ndarray  # f32[B, S, Hkv, D]


def make_pool(
    rng, lengths, *, page_size: int, num_kv_heads: int = 2, head_dim: int = 8, dtype=jnp.float32, spare_pages: int = 1
) -> Pool:
    lengths = np.asarray(lengths)
    batch = len(lengths)
    needed = -(-lengths // page_size)
    width = int(needed.max()) + spare_pages
    num_pages = batch * width + 2
    page_table = rng.permutation(np.arange(1, num_pages + 1))[: batch * width].reshape(batch, width).astype(np.int32)
    keys, values = rng.normal(size=(2, batch, width * page_size, num_kv_heads, head_dim)).astype(np.float32)
    keys, values = (np.asarray(jnp.asarray(x, dtype), np.float32) for x in (keys, values))

    row, position = np.nonzero(np.arange(width * page_size) < lengths[:, None])
    slots = page_table[row, position // page_size] * page_size + position % page_size
    pages = jnp.full_like(init_kv_pages(LAYERS, num_pages, page_size, num_kv_heads, head_dim, dtype), jnp.nan)
    if len(slots):
        k, v = (jnp.asarray(x[row, position], dtype) for x in (keys, values))
        pages = paged_kv_write(pages, k, v, jnp.asarray(slots, jnp.int32), layer=LAYER)

    poison = np.array([0, num_pages, 10**6, -1])[np.arange(width) % 4]  # the sink, a page of NaN, ids that do not exist
    page_table = np.where(np.arange(width) < needed[:, None], page_table, poison).astype(np.int32)
    return Pool(pages=pages, page_table=page_table, keys=keys, values=values)


def attend(pool: Pool, row: int, query, positions, scale: float, soft_cap: float | None = None) -> np.ndarray:
    """One query token `[Hq, D]` of a row over the given positions, in f64."""
    out = np.zeros(query.shape)
    group = query.shape[0] // pool.keys.shape[2]
    for head in range(query.shape[0]):
        keys, values = (x[row, positions, head // group].astype(np.float64) for x in (pool.keys, pool.values))
        scores = keys @ query[head].astype(np.float64) * scale
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        if len(scores):
            weights = np.exp(scores - scores.max())
            out[head] = weights / weights.sum() @ values
    return out
