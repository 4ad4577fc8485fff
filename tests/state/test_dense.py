"""Updates that mean the same on NumPy arrays and on JAX arrays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import ceil_to, freeze

from jspec.state import init_ledger
from jspec.state.dense import add_at, count_at, namespace, replace, round_up, set_at


@pytest.mark.parametrize("update", [set_at, add_at])
@pytest.mark.parametrize(
    ("index", "values"),
    [
        (np.array([2, 0]), np.array([7, -1], np.int32)),
        (np.array([1, 1, 3]), np.array([0, 0, 5], np.int32)),
        (np.zeros(0, np.int32), np.zeros(0, np.int32)),
        (np.array([3]), 4),
    ],
)
def test_numpy_is_jax(update, index, values):
    array = freeze(np.array([10, 20, 30, 40], np.int32))
    if update is set_at and len(index) == 3:
        values = np.array([6, 6, 5], np.int32)  # a repeated index is written with one value
    host, device = update(array, index, values), update(jnp.asarray(array), index, values)
    assert isinstance(host, np.ndarray) and isinstance(device, jax.Array)
    assert host.dtype == device.dtype == np.int32 and host.tolist() == device.tolist()
    assert array.tolist() == [10, 20, 30, 40] and not np.shares_memory(host, array)


@pytest.mark.parametrize(
    ("index", "where"),
    [
        (np.array([2, 1]), np.array([True, True])),
        (np.array([2, 1, 2, 2]), np.array([True, False, True, True])),  # equal indices add up
        (np.array([[3, 1], [3, 0]]), np.array([[True, False], [True, False]])),
        (np.zeros(0, np.int32), np.zeros(0, bool)),
        (np.array([1, 3]), np.array([False, False])),
        (np.array([3, 3]), np.True_),  # one flag for all
    ],
)
@pytest.mark.parametrize("delta", [1, -2])
def test_counting(index, where, delta):
    """What does not count is pointed at the sink, which stays as it is."""
    array = freeze(np.array([0, 20, 30, 40], np.int32))
    expected = array.tolist()
    for entry, counts in zip(index.reshape(-1), np.broadcast_to(where, index.shape).reshape(-1), strict=True):
        expected[entry] += delta if counts else 0
    host, device = count_at(array, index, delta, where), count_at(jnp.asarray(array), index, delta, where)
    assert isinstance(host, np.ndarray) and isinstance(device, jax.Array) and not np.shares_memory(host, array)
    assert host.dtype == device.dtype == np.int32 and host.tolist() == device.tolist() == expected
    assert array.tolist() == [0, 20, 30, 40]


def test_a_pair_of_indices():
    array = freeze(np.zeros((2, 3), np.int32))
    index = (np.array([[0, 1], [1, 1]]), np.array([[0, 0], [1, 2]]))
    values = np.array([[1, 2], [3, 4]], np.int32)
    host, device = set_at(array, index, values), set_at(jnp.asarray(array), index, values)
    assert host.tolist() == device.tolist() == [[1, 0, 0], [2, 3, 4]]


def test_namespace():
    assert namespace(np.zeros(1)) is np and namespace(np.int32(3)) is np
    assert namespace(jnp.zeros(1)) is jnp
    assert jax.jit(lambda x: namespace(x).ones_like(x))(np.zeros(2)).tolist() == [1, 1]


@pytest.mark.parametrize("multiple", [1, 2, 16, 64])
def test_round_up(multiple):
    lengths = np.arange(0, 200, dtype=np.int32)
    assert round_up(lengths, multiple).tolist() == [ceil_to(length, multiple) for length in range(200)]
    assert round_up(lengths, multiple).dtype == np.int32
    assert round_up(jnp.asarray(lengths), multiple).tolist() == round_up(lengths, multiple).tolist()


def test_replace_is_dataclasses_replace():
    ledger = init_ledger(max_running=2, num_pages=5, pages_per_row=3, page_size=4)
    new = replace(ledger, num_free=np.int32(3), page_size=8)
    expected = dataclasses.replace(ledger, num_free=np.int32(3), page_size=8)
    assert type(new) is type(ledger) and new.__dict__.keys() == expected.__dict__.keys()
    assert all(new.__dict__[name] is expected.__dict__[name] for name in new.__dict__ if name != "num_free")
    assert (new.num_free, new.page_size, ledger.num_free, ledger.page_size) == (3, 8, 5, 4)
    assert jax.tree.structure(new) == jax.tree.structure(expected)
    with pytest.raises(dataclasses.FrozenInstanceError):
        new.num_free = 1
    with pytest.raises(TypeError, match=r"KVLedger has no field \['pages'\]"):
        replace(ledger, pages=1)
