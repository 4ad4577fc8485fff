"""Verify attention: the XLA reference against NumPy over shuffled pages, where whatever must not be read is NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pallas_kernels.pools import LAYER, attend, make_pool, quick_jit

from jspec.pallas_kernels.paged_kv_write import init_kv_pages, paged_kv_write
from jspec.pallas_kernels.verify_attention import validate_dynamic, verify_attention

SCALE = 0.37


@quick_jit
def attend_rows(q, pages, page_table, prefix_lens, query_lens, ancestors):
    return verify_attention(
        q, pages, page_table, prefix_lens, query_lens, layer=LAYER, scale=SCALE, ancestors=ancestors
    )


def verify(q, pages, page_table, prefix_lens, query_lens, ancestors=None):
    rows = (np.asarray(x, np.int32) for x in (page_table, prefix_lens, query_lens))
    return np.asarray(attend_rows(q, pages, *rows, ancestors))


def expected(pool, q, prefix_lens, query_lens, ancestors=None):
    out = np.zeros(q.shape)
    for row, (prefix, count) in enumerate(zip(prefix_lens, query_lens, strict=True)):
        for node in range(count):
            tail = range(node + 1) if ancestors is None else [j for j in range(32) if ancestors[row, node] >> j & 1]
            out[row, node] = attend(pool, row, q[row, node], [*range(prefix), *(prefix + j for j in tail)], SCALE)
    return out


def random_tree(rng, width):
    """Ancestor bits of nodes whose parents come before them, node 0 the root; each node is its own ancestor."""
    bits = np.zeros(width, np.uint32)
    for node in range(width):
        bits[node] = (bits[rng.integers(node)] if node else 0) | np.uint32(1 << node)
    return bits


def ragged_case(seed, page_size, group, width, dtype=jnp.float32):
    """Four rows: a full one, one without a prefix, a padding row, one with fewer queries than `W`."""
    rng = np.random.default_rng(seed)
    prefix_lens = np.array([2 * page_size + 3, 0, 5, page_size])
    query_lens = np.array([width, width, 0, (width + 1) // 2])
    lengths = np.where(query_lens > 0, prefix_lens + query_lens, 0)
    pool = make_pool(rng, lengths, page_size=page_size, dtype=dtype)
    q = rng.normal(size=(4, width, 2 * group, 8)).astype(np.float32)
    validate_dynamic(pool.pages, pool.page_table, prefix_lens, query_lens, width=width)
    return rng, pool, q, prefix_lens, query_lens


@pytest.mark.parametrize(("page_size", "group", "width"), [(1, 2, 3), (4, 1, 8), (4, 3, 1), (16, 4, 4), (64, 3, 2)])
def test_chain_matches_numpy(page_size, group, width):
    _, pool, q, prefix_lens, query_lens = ragged_case(page_size + width, page_size, group, width)
    out = verify(q, pool.pages, pool.page_table, prefix_lens, query_lens)
    np.testing.assert_allclose(out, expected(pool, q, prefix_lens, query_lens), atol=2e-6)
    assert not out[2].any() and not out[3, query_lens[3] :].any()


@pytest.mark.parametrize(("page_size", "width"), [(4, 8), (16, 5)])
def test_tree_matches_numpy(page_size, width):
    rng, pool, q, prefix_lens, query_lens = ragged_case(7, page_size, 2, width)
    for _ in range(3):
        ancestors = np.stack([random_tree(rng, width) for _ in range(4)])
        validate_dynamic(pool.pages, pool.page_table, prefix_lens, query_lens, ancestors, width=width)
        out = verify(q, pool.pages, pool.page_table, prefix_lens, query_lens, ancestors)
        np.testing.assert_allclose(out, expected(pool, q, prefix_lens, query_lens, ancestors), atol=2e-6)


def test_all_32_bits_count_and_a_chain_is_a_tree():
    _, pool, q, prefix_lens, query_lens = ragged_case(3, 32, 1, 32)
    ancestors = np.tile(np.array([(1 << (i + 1)) - 1 for i in range(32)], np.uint32), (4, 1))
    chain = verify(q, pool.pages, pool.page_table, prefix_lens, query_lens)
    np.testing.assert_array_equal(verify(q, pool.pages, pool.page_table, prefix_lens, query_lens, ancestors), chain)


def test_a_node_that_sees_nothing_is_zero():
    _, pool, q, prefix_lens, query_lens = ragged_case(5, 4, 2, 3)
    out = verify(q, pool.pages, pool.page_table, prefix_lens, query_lens, np.zeros((4, 3), np.uint32))
    assert not out[1].any() and out[0].all()  # row 1 has no prefix, row 0 has one


def test_bf16_pool_accumulates_in_f32():
    """The pool's values are exact in f32, so only the order of the sums differs from NumPy."""
    _, pool, q, prefix_lens, query_lens = ragged_case(11, 16, 3, 4, dtype=jnp.bfloat16)
    out = verify(q, pool.pages, pool.page_table, prefix_lens, query_lens)
    np.testing.assert_allclose(out, expected(pool, q, prefix_lens, query_lens), atol=2e-6)
    half = verify(jnp.asarray(q, jnp.bfloat16), pool.pages, pool.page_table, prefix_lens, query_lens)
    assert half.dtype == jnp.bfloat16


def test_rows_do_not_affect_each_other():
    """Permuted rows give permuted results bit for bit, and a row of NaN keys and values stays alone."""
    _, pool, q, prefix_lens, query_lens = ragged_case(13, 4, 2, 3)
    out = verify(q, pool.pages, pool.page_table, prefix_lens, query_lens)
    order = np.array([3, 2, 0, 1])
    moved = verify(q[order], pool.pages, pool.page_table[order], prefix_lens[order], query_lens[order])
    np.testing.assert_array_equal(moved, out[order])

    nan = jnp.full((1, 2, 8), jnp.nan)
    slot = jnp.asarray(pool.page_table[0, :1] * 4, jnp.int32)  # position 0 of row 0
    poisoned = verify(
        q, paged_kv_write(pool.pages, nan, nan, slot, layer=LAYER), pool.page_table, prefix_lens, query_lens
    )
    assert np.isnan(poisoned[0]).all()
    np.testing.assert_array_equal(poisoned[1:], out[1:])


@pytest.mark.parametrize("width", [1, 4])
def test_a_chain_of_layers_keeps_one_pool(width):
    """Write, attend, write, attend on one donated pool: it is aliased, and what is needed beside it does not grow with it."""
    layers, batch, pages_per_row, page_size, heads, head_dim = 3, 2, 4, 16, 2, 16

    def forward(pages, x, page_table, prefix_lens):
        slots = (page_table[:, :1] * page_size + prefix_lens[:, None] + jnp.arange(width)).reshape(-1)
        query_lens = jnp.full((batch,), width, jnp.int32)
        for layer in range(layers):
            kv = x.reshape(batch * width, heads, head_dim)
            pages = paged_kv_write(pages, kv, kv + 1, slots, layer=layer)
            x = x + verify_attention(x, pages, page_table, prefix_lens, query_lens, layer=layer, scale=1.0)
        return pages, x

    @functools.cache
    def memory(num_pages):
        pool = jax.eval_shape(lambda: init_kv_pages(layers, num_pages, page_size, heads, head_dim, jnp.float32))
        x = jax.ShapeDtypeStruct((batch, width, heads, head_dim), jnp.float32)
        rows = jax.ShapeDtypeStruct((batch, pages_per_row), jnp.int32), jax.ShapeDtypeStruct((batch,), jnp.int32)
        lowered = jax.jit(forward, donate_argnums=0).lower(pool, x, *rows)
        analysis = lowered.compile({"xla_backend_optimization_level": 0}).memory_analysis()
        assert analysis.alias_size_in_bytes == pool.size * 4
        return analysis.temp_size_in_bytes, pool.size * 4

    small_temp, _ = memory(500)
    large_temp, pool_bytes = memory(5000)
    assert large_temp == small_temp < pool_bytes / 100


def bad_cases():
    _, pool, q, prefix_lens, query_lens = ragged_case(1, 4, 2, 3)
    good = {
        "q": jnp.asarray(q),
        "pages": pool.pages,
        "page_table": pool.page_table,
        "prefix_lens": prefix_lens.astype(np.int32),
        "query_lens": query_lens.astype(np.int32),
        "ancestors": np.ones((4, 3), np.uint32),
    }
    wide = {"q": jnp.ones((4, 33, 4, 8)), "ancestors": np.ones((4, 33), np.uint32)}
    return good, [
        ({"backend": "cuda"}, "backend='cuda' does not exist for verify_attention"),
        ({"layer": 3}, "layer=3"),
        ({"q": good["q"][0]}, "q.shape"),
        ({"q": good["q"][:, :, :3]}, "q.shape"),
        ({"q": good["q"][..., :4]}, "q.shape"),
        ({"q": good["q"].astype(jnp.int32)}, "q.dtype"),
        ({"pages": pool.pages[0]}, "pages.shape"),
        ({"page_table": pool.page_table[:3]}, "page_table.shape"),
        ({"page_table": pool.page_table.astype(np.int64)}, "page_table.dtype"),
        ({"prefix_lens": good["prefix_lens"][:3]}, "prefix_lens.shape"),
        ({"query_lens": good["query_lens"].astype(np.float32)}, "query_lens.dtype"),
        ({"ancestors": good["ancestors"][:, :2]}, "ancestors.shape"),
        ({"ancestors": good["ancestors"].astype(np.int32)}, "ancestors.dtype"),
        (wide, "at most 32 nodes"),
    ]


def test_bad_arguments_are_named():
    good, cases = bad_cases()
    for change, words in cases:
        args = {"layer": LAYER, "scale": SCALE, **good, **change}
        with pytest.raises(ValueError) as error:
            verify_attention(**args)
        assert words in str(error.value)
    with pytest.raises(TypeError, match="layer"):
        verify_attention(**good, layer=jnp.int32(1), scale=SCALE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prefix_lens": [-1, 0, 0]}, "prefix_lens holds -1"),
        ({"query_lens": [1, -2, 1]}, "query_lens holds -2"),
        ({"query_lens": [1, 4, 1]}, "query_lens holds 4"),
        ({"prefix_lens": [7, 0, 0]}, "holds 9, more than the 8 positions"),
        ({"page_table": [[1, 0], [2, 0], [0, 0]]}, "page_table holds 0"),
        ({"page_table": [[1, 0], [9, 0], [3, 0]]}, "page_table holds 9"),
        ({"ancestors": np.array([[1, 4, 0]] * 3, np.uint32)}, "ancestors"),
    ],
)
def test_concrete_values_are_checked(change, words):
    pages = init_kv_pages(1, 8, 4, 1, 8, jnp.float32)
    good = {"page_table": [[1, 0], [2, 0], [3, 0]], "prefix_lens": [0, 1, 2], "query_lens": [2, 3, 1]}
    validate_dynamic(pages, **good, width=3)
    with pytest.raises(ValueError, match=words):
        validate_dynamic(pages, **{**good, **change}, width=3)
