"""Both backends of attention against NumPy: the Pallas kernel in the TPU interpreter, where races are reported, memory starts as NaN
and a read out of bounds raises; in pools where whatever must not be read is NaN and page ids that must not be read do not exist."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pallas_kernels.pools import LAYER, attend, make_pool, quick_jit

from jspec.pallas_kernels.block_sizes import BlockSizes, _table, block_sizes, pages_at_once, tile_lines, vmem_bytes
from jspec.pallas_kernels.interpret import INTERPRET
from jspec.pallas_kernels.prefill_attention import kernel as prefill_kernel
from jspec.pallas_kernels.prefill_attention import prefill_attention
from jspec.pallas_kernels.prefill_attention.kernel import prefill_attention_kernel
from jspec.pallas_kernels.verify_attention import validate_dynamic, verify_attention
from jspec.pallas_kernels.verify_attention.kernel import verify_attention_kernel

SCALE = 0.37
SMALL = BlockSizes(block_len=128, heads_at_once=8, tail_tokens=128)
"""Blocks so short that a few hundred tokens are several of them."""


def random_tree(rng, width):
    bits = np.zeros(width, np.uint32)
    for node in range(width):
        bits[node] = (bits[rng.integers(node)] if node else 0) | np.uint32(1 << node)
    return bits


def seen_by(prefix, node, bits, window):
    """Positions that a query sees, and where their KV lies."""
    nodes = range(node + 1) if bits is None else [j for j in range(32) if bits[node] >> j & 1]
    position = prefix + len(nodes) - 1
    lowest = 0 if window is None else max(0, position - window + 1)
    nodes = nodes if bits is not None else [j for j in nodes if prefix + j >= lowest]
    return [*range(lowest, prefix), *(prefix + j for j in nodes)]


def expected(pool, q, prefix_lens, query_lens, ancestors, window, soft_cap):
    out = np.zeros(q.shape)
    for row, (prefix, count) in enumerate(zip(prefix_lens, query_lens, strict=True)):
        for node in range(count):
            where = seen_by(prefix, node, None if ancestors is None else ancestors[row], window)
            out[row, node] = attend(pool, row, q[row, node], where, SCALE, soft_cap)
    return out


def forget(pool, prefix_lens, query_lens, window, page_size):
    """Page ids that do not exist, for pages whose positions no query sees."""
    table = pool.page_table.copy()
    for row, (prefix, count) in enumerate(zip(prefix_lens, query_lens, strict=True)):
        if count:
            table[row, : max(0, prefix - window + 1) // page_size] = 10**6
    return table


CASES = {
    "one token, no group": dict(width=1, group=1),
    "SmolLM2's heads": dict(num_kv_heads=3, group=3, width=4),
    "bf16": dict(dtype=jnp.bfloat16, head_dim=128, group=4, width=5),
    "tree": dict(width=8, tree=True, dtype=jnp.bfloat16),
    "trees of 130 rows": dict(
        width=3, tree=True, group=1, num_kv_heads=1, prefix_lens=[7] * 130, query_lens=[3, *[0] * 125, 3, 2, 3, 3]
    ),
    "tree in f32, 32 nodes": dict(width=32, tree=True, group=1, num_kv_heads=1),
    "window": dict(window=100, width=3),
    "window at a block's edge": dict(window=128, width=3, prefix_lens=[255, 256, 257, 0, 383], query_lens=[3] * 5),
    "window of one": dict(window=1, width=2),
    "tree in a window": dict(window=40, width=7, tree=True),
    "soft cap": dict(soft_cap=2.0, width=2),
    "head of 256": dict(head_dim=256, width=2, group=1, num_kv_heads=1),
    "page of 48": dict(page_size=48, width=2, prefix_lens=[700, 40, 47], query_lens=[2, 2, 1]),
    "page longer than a block": dict(page_size=256, width=2),
    "everything": dict(dtype=jnp.bfloat16, window=150, soft_cap=3.0, width=6, tree=True, num_kv_heads=3, group=2),
}


IN_CI = ("SmolLM2's heads", "bf16", "tree", "trees of 130 rows", "window at a block's edge", "everything")
"""What the interpreter runs in CI: it takes seconds a case. The others are marked slow."""


def make_case(*, page_size=16, num_kv_heads=2, head_dim=64, group=2, width, tree=False, dtype=jnp.float32, window=None,
              soft_cap=None, prefix_lens=(300, 0, 5, 127, 128), query_lens=None):  # fmt: skip
    rng = np.random.default_rng(width)
    prefix_lens = np.array(prefix_lens, np.int32)
    if query_lens is None:
        query_lens = [width, width, 0, (width + 1) // 2, width]
    query_lens = np.array(query_lens, np.int32)
    lengths = np.where(query_lens > 0, prefix_lens + query_lens, 0)
    pool = make_pool(rng, lengths, page_size=page_size, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    q = rng.normal(size=(len(lengths), width, num_kv_heads * group, head_dim)).astype(np.float32)
    q = np.asarray(jnp.asarray(q, dtype), np.float32)
    ancestors = np.stack([random_tree(rng, width) for _ in lengths]) if tree else None
    validate_dynamic(pool.pages, pool.page_table, prefix_lens, query_lens, ancestors, width=width)
    table = pool.page_table if window is None else forget(pool, prefix_lens, query_lens, window, page_size)
    return pool, q, table, prefix_lens, query_lens, ancestors


def no_race(capfd):
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "xla") for name in CASES),
        *(pytest.param(name, "pallas_interpret", marks=() if name in IN_CI else pytest.mark.slow) for name in CASES),
    ],
)
def test_verify_matches_numpy(capfd, name, backend):
    case = CASES[name]
    options = {key: case.get(key) for key in ("window", "soft_cap")}
    pool, q, table, prefix_lens, query_lens, ancestors = make_case(**case)
    if backend == "xla":
        attend_rows = functools.partial(verify_attention, backend="xla")
        table = pool.page_table  # clipped ids are harmless there, but a block of XLA's may begin before the window
    else:
        attend_rows = functools.partial(verify_attention_kernel, sizes=SMALL, interpret=INTERPRET)
    out = quick_jit(functools.partial(attend_rows, layer=LAYER, scale=SCALE, **options))(
        jnp.asarray(q), pool.pages, table, prefix_lens, query_lens, ancestors=ancestors
    )
    wanted = expected(pool, q, prefix_lens, query_lens, ancestors, *options.values())
    exact = pool.pages.dtype == jnp.float32 or backend == "xla"
    np.testing.assert_allclose(np.asarray(out), wanted, atol=1e-5 if exact else 4e-2)
    for row, count in enumerate(query_lens):
        assert not np.asarray(out)[row, count:].any()
    no_race(capfd)


def run(case, **options):
    pool, q, table, prefix_lens, query_lens, ancestors = case
    attend_rows = functools.partial(
        verify_attention_kernel, interpret=INTERPRET, layer=LAYER, scale=SCALE, **{"sizes": SMALL, **options}
    )
    out = quick_jit(attend_rows)(jnp.asarray(q), pool.pages, table, prefix_lens, query_lens, ancestors=ancestors)
    return np.asarray(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        dict(num_cores=2),  # 5 rows, so one is added
        dict(sizes=SMALL._replace(num_buffers=4)),  # several rows in flight
        dict(sizes=BlockSizes(block_len=256, heads_at_once=1, tail_tokens=256)),
    ],
    ids=["two cores", "four buffers", "one head at a time"],
)
def test_how_the_work_is_cut_does_not_matter(capfd, options):
    case = make_case(width=3)
    pool, q, _, *rows = case
    np.testing.assert_allclose(run(case, **options), expected(pool, q, *rows, None, None), atol=1e-5)
    no_race(capfd)


@pytest.mark.parametrize("num_cores", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_rows_without_queries_are_zero(capfd, num_cores):
    """None at all; and the only row there is, the first or the last of its core."""
    for query_lens in ([0, 0, 0], [0, 0, 2]):
        case = make_case(width=2, prefix_lens=[140, 3, 200], query_lens=query_lens)
        pool, q, _, *rows = case
        out = run(case, num_cores=num_cores)
        np.testing.assert_allclose(out, expected(pool, q, *rows, None, None), atol=1e-5)
    no_race(capfd)


def test_a_tree_grown_level_by_level(capfd):
    """The last nodes of a tree alone: as in the tree as a whole."""
    case = make_case(width=8, tree=True, query_lens=[8, 8, 0, 8, 8])
    pool, q, table, prefix_lens, query_lens, ancestors = case
    late = (pool, q[:, 5:], table, prefix_lens, np.where(query_lens > 0, 3, 0).astype(np.int32), ancestors[:, 5:])
    wanted = expected(pool, q, prefix_lens, query_lens, ancestors, None, None)[:, 5:]
    np.testing.assert_allclose(run(late, query_start=5), wanted, atol=1e-5)
    no_race(capfd)


@pytest.mark.slow  # the engine's test runs it too
def test_the_public_function_runs_it(capfd):
    """With the sizes that it finds itself."""
    pool, q, table, prefix_lens, query_lens, _ = make_case(width=3)
    out = verify_attention(
        jnp.asarray(q), pool.pages, table, prefix_lens, query_lens, layer=LAYER, scale=SCALE, backend="pallas_interpret"
    )
    wanted = expected(pool, q, prefix_lens, query_lens, None, None, None)
    np.testing.assert_allclose(np.asarray(out), wanted, atol=1e-5)
    no_race(capfd)


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 37])
def test_prefill_matches_numpy(capfd, monkeypatch, window):
    """Whole and broken blocks of queries, padding in between and behind."""
    monkeypatch.setattr(prefill_kernel, "QUERY_BLOCK", 8)
    prefix_lens, query_lens = np.array([0, 150, 7, 3, 0], np.int32), np.array([19, 0, 1, 8, 11], np.int32)
    rng = np.random.default_rng(3)
    pool = make_pool(rng, np.where(query_lens > 0, prefix_lens + query_lens, 0), page_size=16, head_dim=64)
    q = rng.normal(size=(query_lens.sum() + 4, 4, 64)).astype(np.float32)
    rows = (jnp.asarray(q), pool.pages, pool.page_table, prefix_lens, query_lens)
    out = quick_jit(
        functools.partial(
            prefill_attention_kernel, sizes=SMALL, interpret=INTERPRET, layer=LAYER, scale=SCALE, window=window
        )
    )(*rows)
    by_xla = quick_jit(functools.partial(prefill_attention, layer=LAYER, scale=SCALE, window=window))(*rows)
    wanted, token = np.zeros(q.shape), 0
    for row, (prefix, count) in enumerate(zip(prefix_lens, query_lens, strict=True)):
        for i in range(count):
            wanted[token] = attend(pool, row, q[token], seen_by(prefix, i, None, window), SCALE)
            token += 1
    for found in (out, by_xla):
        np.testing.assert_allclose(np.asarray(found), wanted, atol=1e-5)
    no_race(capfd)


# --- what is refused, and sizes -------------------------------------------------------------------------------------


def pool_like(page_size=16, head_dim=64, dtype=jnp.float32):
    return jax.ShapeDtypeStruct((LAYER + 1, 9, 2, page_size, 2 * head_dim), dtype)


@pytest.mark.parametrize(
    ("pages", "options", "words"),
    [
        (pool_like(page_size=33), {}, "page_size=33 must be a multiple of 8 for backend='pallas' and float32"),
        (pool_like(page_size=8, dtype=jnp.bfloat16), {}, "page_size=8 must be a multiple of 16"),
        (pool_like(head_dim=32), {}, "head_dim=32 must be 64 or a multiple of 128"),
        (pool_like(head_dim=192), {}, "head_dim=192 must be 64"),
        (pool_like(dtype=jnp.float16), {}, "must be float32 or bfloat16"),
        (pool_like(), {"window": 0}, "window=0 must be at least 1"),
        (pool_like(), {"window": 2.0}, "window=2.0 must be at least 1"),
        (pool_like(), {"soft_cap": 0.0}, "soft_cap=0.0 must be positive"),
        (pool_like(), {"window": 2, "ancestors": jax.ShapeDtypeStruct((4, 3), jnp.uint32)}, "window=2 must be at least 3"),
        (pool_like(), {"table_width": 100_000}, "takes 400016 words of scalar memory"),
    ],
)  # fmt: skip
def test_what_is_refused(pages, options, words):
    options = dict(options)
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    q = jax.ShapeDtypeStruct((4, 3, 4, pages.shape[4] // 2), pages.dtype)
    table = ints((4, options.pop("table_width", 2)))
    attend_rows = functools.partial(verify_attention, layer=LAYER, scale=1.0, backend="pallas", **options)
    with pytest.raises(ValueError) as error:
        jax.eval_shape(attend_rows, q, pages, table, ints((4,)), ints((4,)))
    assert words in str(error.value)


@pytest.mark.parametrize("page_size", [8, 16, 24, 48, 128, 256, 384])
@pytest.mark.parametrize("block_len", [128, 256, 1024])
def test_blocks_are_whole_pages_and_whole_lanes(page_size, block_len):
    pages, tail = pages_at_once(BlockSizes(block_len=block_len, heads_at_once=1), page_size)
    assert pages * page_size % 128 == 0 and tail * page_size % 128 == 0 and pages % tail == 0
    assert pages * page_size <= max(block_len, np.lcm(page_size, 128))


def test_the_table_decides_for_a_chip_that_it_names():
    pages = jax.ShapeDtypeStruct((1, 9, 8, 128, 256), jnp.bfloat16)
    named, other = (block_sizes(pages, lines=64, max_len=4096, chip=chip) for chip in ("v5p", "v9"))
    assert (named.block_len, named.heads_at_once) != (other.block_len, other.heads_at_once)
    assert other == block_sizes(pages, lines=64, max_len=4096)
    assert block_sizes(pages, lines=64, max_len=200, chip="v5p").block_len == 256
    for (_, heads, _, _, lines), sizes in _table().items():
        assert sizes.block_len in (512, 1024, 2048) and 1 <= sizes.heads_at_once <= heads and lines % 16 == 0


@pytest.mark.parametrize("heads", [1, 8, 32])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sizes_fit_the_smallest_memory(heads, head_dim):
    """v4 has 16 MiB of VMEM; what is asked of it grows with heads until blocks are as short as they can be."""
    pages = jax.ShapeDtypeStruct((1, 9, heads, 128, 2 * head_dim), jnp.bfloat16)
    lines = tile_lines(32, 4, jnp.bfloat16)
    assert lines == 128 and tile_lines(1, 3, jnp.bfloat16) == 16 and tile_lines(1, 3, jnp.float32) == 8
    sizes = block_sizes(pages, lines=lines, max_len=4096)
    assert vmem_bytes(pages, lines=lines, sizes=sizes) <= 12 << 20 or (sizes.block_len, sizes.heads_at_once) == (128, 2)
    assert block_sizes(pages, lines=lines, max_len=100).block_len == 128
    large = block_sizes(pages, lines=lines, max_len=4096, capacity=128 << 20)
    assert large.block_len * heads * 2 * head_dim * 2 == min(4 << 20, 1024 * heads * 2 * head_dim * 2)
