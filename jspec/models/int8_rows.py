"""Matrices stored as int8 with one scale a row."""

import numpy as np


def quantize_rows(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(int8[O, I], f32[O]): the nearest multiples of each row's scale, which puts its largest weight at 127."""
    scale = np.abs(matrix).max(axis=1).astype(np.float32) / np.float32(127)
    scale = np.where(scale > 0, scale, np.float32(1))  # a row of zeros
    return np.rint(matrix / scale[:, None]).astype(np.int8), scale


def dequantize_rows(matrix: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """f32[O, I] from `quantize_rows`; off by at most half a scale."""
    return matrix.astype(np.float32) * scale.astype(np.float32)[:, None]
