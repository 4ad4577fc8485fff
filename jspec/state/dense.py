"""Functional updates that mean the same on NumPy arrays and on JAX arrays: what lets one transition serve the engine and `jit`."""

from typing import Any, TypeVar

import numpy as np

Value = TypeVar("Value")


def replace(value: Value, **changes: Any) -> Value:
    """`dataclasses.replace` for the frozen state types, at a tenth of its cost: the hot path makes half a dozen such values an iteration.

    The state types have no `__post_init__`, so copying the fields is all there is to do.
    """
    fields = value.__dict__
    if not changes.keys() <= fields.keys():
        raise TypeError(f"{type(value).__name__} has no field {sorted(changes.keys() - fields.keys())}")
    new = object.__new__(type(value))
    new.__dict__.update(fields, **changes)
    return new


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


def count_at(array, index, delta: int, where):
    """`array[index] += delta` at entries `where`, as a new array; equal indices add up. The others point at a sink entry, 0."""
    index = where * index
    if isinstance(array, np.ndarray):
        array = array.copy()
        np.add.at(array, index, where * np.int32(delta))
        return array
    return array.at[index].add(where * delta)


def ceil_div(lengths, size: int):
    """`lengths / size`, rounded up."""
    return (lengths + (size - 1)) // size


def round_up(lengths, multiple: int):
    """Smallest multiple of `multiple` that is >= `lengths`."""
    return ceil_div(lengths, multiple) * multiple
