"""Functional array updates that mean the same on NumPy arrays and on JAX arrays: what lets one transition serve engine and `jit`."""

import numpy as np


def namespace(array):
    """The array API namespace of `array`: `numpy` for NumPy arrays, `jax.numpy` for JAX arrays and tracers."""
    return array.__array_namespace__()


def set_at(array, index, values):
    """`array[index] = values` as a new array. Entries that must not change anything are pointed at a sink entry by the caller."""
    if isinstance(array, np.ndarray):
        array = array.copy()
        array[index] = values
        return array
    return array.at[index].set(values)


def add_at(array, index, values):
    """`array[index] += values` as a new array. Equal indices may repeat only where their `values` are 0 (padding)."""
    if isinstance(array, np.ndarray):
        array = array.copy()
        array[index] += values
        return array
    return array.at[index].add(values)


def round_up(lengths, multiple: int):
    """Smallest multiple of `multiple` that is >= `lengths`."""
    return -(-lengths // multiple) * multiple
