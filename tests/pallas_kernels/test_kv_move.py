"""Moving KV between slots, against copying it one by one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pallas_kernels.pools import quick_jit

from jspec.pallas_kernels.kv_move import kv_move, validate_dynamic

LAYERS, PAGES, HEADS, HEAD_DIM = 3, 6, 2, 64


def pool(page_size, seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    pages = rng.standard_normal((LAYERS, PAGES + 1, HEADS, page_size, 2 * HEAD_DIM))
    return np.asarray(jnp.asarray(pages, dtype), np.float32)


def slow_move(pages, source, target):
    out, size = pages.copy(), pages.shape[3]
    for s, t in zip(source, target, strict=True):
        if t >= size:
            out[:, t // size, :, t % size] = pages[:, s // size, :, s % size]
    return out


@pytest.mark.parametrize(
    ("backend", "page_size", "dtype", "seed"),
    [
        *(("xla", page_size, jnp.float32, seed) for page_size in (1, 4, 16) for seed in range(3)),
        ("pallas_interpret", 16, jnp.float32, 1),
        ("pallas_interpret", 16, jnp.bfloat16, 2),
    ],
)
def test_moves_are_copies_of_what_was_there_before(capfd, backend, page_size, dtype, seed):
    """Source and target overlap in every way; padding goes to the sink, whose bits nobody reads."""
    rng = np.random.default_rng(seed)
    pages, slots = pool(page_size, seed, dtype), np.arange(page_size, (PAGES + 1) * page_size)
    count = min(6 if backend == "xla" else 20, len(slots))
    target = rng.choice(slots, count, replace=False).astype(np.int32)
    source = rng.choice(np.concatenate([slots, target, target]), count).astype(np.int32)
    target[:2] = rng.integers(0, page_size, 2)  # padding
    validate_dynamic(pages, source, target)
    move = quick_jit(functools.partial(kv_move, backend=backend))
    got = np.asarray(move(jnp.asarray(pages, dtype), jnp.asarray(source), jnp.asarray(target)), np.float32)
    np.testing.assert_array_equal(got[:, 1:], slow_move(pages, source, target)[:, 1:])
    if backend != "xla":
        np.testing.assert_array_equal(got[:, 0], pages[:, 0])
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("backend", ["xla", "pallas_interpret"])
def test_a_path_moves_to_the_front(backend):
    """Nodes 0, 2, 5 of a block at slots 4.. to slots 4, 5, 6: the second move's target is the first's neighbour."""
    pages = pool(4)
    got = np.asarray(kv_move(jnp.asarray(pages), jnp.int32([4, 6, 9]), jnp.int32([4, 5, 6]), backend=backend))
    np.testing.assert_array_equal(got[:, 1, :, 0], pages[:, 1, :, 0])
    np.testing.assert_array_equal(got[:, 1, :, 1], pages[:, 1, :, 2])
    np.testing.assert_array_equal(got[:, 1, :, 2], pages[:, 2, :, 1])
    np.testing.assert_array_equal(got[:, 1, :, 3], pages[:, 1, :, 3])
    np.testing.assert_array_equal(got[:, 2:], pages[:, 2:])


def test_the_pool_is_updated_in_place():
    pages = jnp.zeros((LAYERS, 200, HEADS, 16, 2 * HEAD_DIM))
    slots = jnp.zeros(4, jnp.int32)
    compiled = jax.jit(kv_move, donate_argnums=0).lower(pages, slots, slots).compile().memory_analysis()
    assert compiled.alias_size_in_bytes >= pages.nbytes and compiled.temp_size_in_bytes < pages.nbytes / 8


@pytest.mark.parametrize(
    ("source", "target", "options", "message"),
    [
        (np.zeros((2, 2), np.int32), np.zeros((2, 2), np.int32), {}, r"source.shape=\(2, 2\)"),
        (np.zeros(2, np.int32), np.zeros(3, np.int32), {}, r"target.shape=\(3,\) must be \(2,\)"),
        (np.zeros(2, np.int64), np.zeros(2, np.int32), {}, "source.dtype=int64"),
        (np.zeros(2, np.int32), np.zeros(2, np.int32), {"backend": "cuda"}, "does not exist for kv_move"),
        (np.zeros(60_000, np.int32), np.zeros(60_000, np.int32), {"backend": "pallas_interpret"}, "bytes of VMEM"),
    ],
)
def test_what_is_refused(source, target, options, message):
    with pytest.raises(ValueError, match=message):
        kv_move(pool(4), source, target, **options)


def test_dynamic_rules():
    for source, target, message in (
        ([99], [5], "source holds"),
        ([5], [-1], "target holds"),
        ([4, 5], [6, 6], "twice"),
    ):
        with pytest.raises(ValueError, match=message):
            validate_dynamic(pool(4), np.array(source), np.array(target))
    validate_dynamic(pool(4), np.array([4, 5]), np.array([0, 0]))
