"""Prefill attention: the XLA reference against NumPy over ragged rows, where whatever must not be read is NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pallas_kernels.pools import LAYER, attend, make_pool, quick_jit

from jspec.pallas_kernels.paged_kv_write import init_kv_pages
from jspec.pallas_kernels.prefill_attention import prefill_attention, validate_dynamic
from jspec.pallas_kernels.prefill_attention.reference import QUERY_BLOCK
from jspec.pallas_kernels.verify_attention import verify_attention

SCALE = 0.37


@quick_jit
def attend_rows(q, pages, page_table, prefix_lens, query_lens):
    return prefill_attention(q, pages, page_table, prefix_lens, query_lens, layer=LAYER, scale=SCALE)


def prefill(q, pages, *rows):
    return np.asarray(attend_rows(q, pages, *(np.asarray(x, np.int32) for x in rows)))


def expected(pool, q, prefix_lens, query_lens):
    out, token = np.zeros(q.shape), 0
    for row, (prefix, count) in enumerate(zip(prefix_lens, query_lens, strict=True)):
        for i in range(count):
            out[token] = attend(pool, row, q[token], range(prefix + i + 1), SCALE)
            token += 1
    return out


def ragged_case(seed, page_size, group, prefix_lens, query_lens, padding):
    rng = np.random.default_rng(seed)
    prefix_lens, query_lens = np.array(prefix_lens), np.array(query_lens)
    lengths = np.where(query_lens > 0, prefix_lens + query_lens, 0)
    pool = make_pool(rng, lengths, page_size=page_size)
    q = rng.normal(size=(query_lens.sum() + padding, 2 * group, 8)).astype(np.float32)
    validate_dynamic(pool.pages, pool.page_table, prefix_lens, query_lens, num_tokens=len(q))
    return pool, q, prefix_lens, query_lens


@pytest.mark.parametrize(
    ("page_size", "group", "prefix_lens", "query_lens", "padding"),
    [
        (4, 1, [3, 0, 9, 6], [5, 7, 0, 1], 3),  # less than one block of queries
        (16, 3, [0, 40, 5, 0, 17], [QUERY_BLOCK + 6, 0, 1, QUERY_BLOCK, 9], 5),  # whole and broken blocks
        (64, 2, [0], [2 * QUERY_BLOCK + 1], 0),
        (1, 4, [2, 0, 0], [3, 4, 0], 1),
        (4, 2, [0, 3], [0, 0], 4),  # padding only
    ],
)
def test_ragged_rows_match_numpy(page_size, group, prefix_lens, query_lens, padding):
    pool, q, *rows = ragged_case(page_size, page_size, group, prefix_lens, query_lens, padding)
    out = prefill(q, pool.pages, pool.page_table, *rows)
    np.testing.assert_allclose(out, expected(pool, q, *rows), atol=2e-6)
    assert not out[len(q) - padding :].any()


def test_a_row_does_not_affect_the_next():
    """The first row overflows to NaN; its neighbours in the packed tokens keep their bits."""
    pool, q, *rows = ragged_case(2, 4, 1, [1, 0, 5], [6, 3, 2], 2)
    out = prefill(q, pool.pages, pool.page_table, *rows)
    q[:6] = np.inf
    poisoned = prefill(q, pool.pages, pool.page_table, *rows)
    assert np.isnan(poisoned[:6]).any()
    np.testing.assert_array_equal(poisoned[6:], out[6:])


def test_agrees_with_verify_attention():
    """The same rows through both: a decode of three tokens a row is a prefill of three tokens a row."""
    pool, q, prefix_lens, query_lens = ragged_case(4, 16, 3, [20, 0, 7], [3, 3, 3], 0)
    rows = [jnp.asarray(x, jnp.int32) for x in (pool.page_table, prefix_lens, query_lens)]
    verified = verify_attention(jnp.asarray(q).reshape(3, 3, 6, 8), pool.pages, *rows, layer=LAYER, scale=SCALE)
    prefilled = prefill(q, pool.pages, *rows)
    np.testing.assert_allclose(prefilled, np.asarray(verified).reshape(9, 6, 8), atol=1e-6)


def test_memory_is_bounded():
    """8,192 tokens over 8,192 positions: the whole score matrix would be 2 GiB; needed is little more than the queries, twice."""
    tokens, heads, head_dim, page_size = 8192, 8, 64, 64
    spec = jax.ShapeDtypeStruct
    q = spec((tokens, heads, head_dim), jnp.float32)
    pool = jax.eval_shape(lambda: init_kv_pages(2, 1000, page_size, 2, head_dim, jnp.float32))
    lens = spec((4,), jnp.int32)
    lowered = jax.jit(lambda *a: prefill_attention(*a, layer=0, scale=1.0)).lower(
        q, pool, spec((4, tokens // page_size), jnp.int32), lens, lens
    )
    temp = lowered.compile({"xla_backend_optimization_level": 0}).memory_analysis().temp_size_in_bytes
    assert temp < 3.5 * q.size * 4


def test_bad_arguments_are_named():
    pool, q, prefix_lens, query_lens = ragged_case(1, 4, 2, [3, 0], [2, 4], 1)
    good = {
        "q": jnp.asarray(q),
        "pages": pool.pages,
        "page_table": pool.page_table,
        "prefix_lens": prefix_lens.astype(np.int32),
        "query_lens": query_lens.astype(np.int32),
    }
    for change, words in [
        ({"backend": "cuda"}, "backend='cuda' does not exist for prefill_attention"),
        ({"layer": -1}, "layer=-1"),
        ({"q": good["q"][None]}, "q.shape"),
        ({"q": good["q"][:, :3]}, "q.shape"),
        ({"pages": pool.pages[0]}, "pages.shape"),
        ({"page_table": pool.page_table[:, :0]}, "page_table.shape"),
        ({"prefix_lens": good["prefix_lens"][:1]}, "prefix_lens.shape"),
        ({"query_lens": good["query_lens"].astype(np.int64)}, "query_lens.dtype"),
    ]:
        args = {"layer": LAYER, "scale": SCALE, **good, **change}
        with pytest.raises(ValueError) as error:
            prefill_attention(**args)
        assert words in str(error.value)
    with pytest.raises(ValueError, match="query_lens sums to 6"):
        validate_dynamic(pool.pages, pool.page_table, prefix_lens, query_lens, num_tokens=5)
