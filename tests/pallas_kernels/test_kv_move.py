"""Moving KV between slots, against copying it one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.pallas_kernels.kv_move import kv_move, validate_dynamic

LAYERS, PAGES, HEADS, HEAD_DIM = 3, 6, 2, 4


def pool(page_size, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((LAYERS, PAGES + 1, HEADS, page_size, 2 * HEAD_DIM)).astype(np.float32)


def slow_move(pages, source, target):
    out, size = pages.copy(), pages.shape[3]
    for s, t in zip(source, target, strict=True):
        if t >= size:
            out[:, t // size, :, t % size] = pages[:, s // size, :, s % size]
    return out


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_moves_are_copies_of_what_was_there_before(page_size, seed):
    """Source and target overlap in every way; padding goes to the sink, whose bits nobody reads."""
    rng = np.random.default_rng(seed)
    pages, slots = pool(page_size, seed), np.arange(page_size, (PAGES + 1) * page_size)
    count = min(6, len(slots))
    target = rng.choice(slots, count, replace=False).astype(np.int32)
    source = rng.choice(np.concatenate([slots, target, target]), count).astype(np.int32)
    target[:2] = rng.integers(0, page_size, 2)  # padding
    validate_dynamic(pages, source, target)
    got = jax.jit(kv_move)(jnp.asarray(pages), jnp.asarray(source), jnp.asarray(target))
    np.testing.assert_array_equal(got[:, 1:], slow_move(pages, source, target)[:, 1:])


def test_a_path_moves_to_the_front():
    """Nodes 0, 2, 5 of a block at slots 4.. to slots 4, 5, 6: the second move's target is the first's neighbour."""
    pages = pool(4)
    got = np.asarray(kv_move(jnp.asarray(pages), jnp.int32([4, 6, 9]), jnp.int32([4, 5, 6])))
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
        (np.zeros(2, np.int32), np.zeros(2, np.int32), {"backend": "pallas"}, "does not exist for kv_move"),
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
