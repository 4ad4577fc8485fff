"""The header of a GGUF file: metadata and where each tensor lies.

The `gguf` library's own reader makes a NumPy view for every string of the vocabulary, which takes seconds; this one takes a fraction of
one and says what is wrong with a damaged file. Quantised blocks are still the library's business.
Source: the GGUF specification, versions 2 and 3, little-endian.
"""

import dataclasses
import math
import os
import struct
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np

_MAGIC = b"GGUF"
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """One tensor: `data` is a view into the mapped file, nothing is read until it is dequantised."""

    name: str
    shape: tuple[int, ...]  # outermost first, as in NumPy; the file stores it reversed
    kind: gguf.GGMLQuantizationType
    data: np.ndarray  # u8[..., bytes of a row]

    def dequantize(self) -> np.ndarray:
        """f32[shape]."""
        if self.kind == gguf.GGMLQuantizationType.F32:
            return self.data.view(np.float32).reshape(self.shape)
        return gguf.dequantize(self.data, self.kind).reshape(self.shape).astype(np.float32, copy=False)


@dataclasses.dataclass(frozen=True)
class GgufFile:
    path: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


class _Cursor:
    """Reads forward through the mapped file; leaving it is the error."""

    def __init__(self, path: str, data: np.ndarray):
        self.path, self.data, self.at = path, data, 0
        self.buffer = data.data

    def take(self, count: int) -> int:
        start, self.at = self.at, self.at + count
        if self.at > len(self.buffer):
            raise truncated(self.path, self.at, len(self.buffer))
        return start

    def scalar(self, fmt: str) -> Any:
        return struct.unpack_from(fmt, self.buffer, self.take(struct.calcsize(fmt)))[0]

    def string(self) -> str:
        length = self.scalar("<Q")
        start = self.take(length)
        return bytes(self.buffer[start : start + length]).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise ValueError(
                f"{self.path} is damaged: metadata type {kind} at byte {self.at} must be in 0..12; download the file again"
            )
        item, count = self.scalar("<I"), self.scalar("<Q")
        if item in _SCALARS:
            start = self.take(count * struct.calcsize(_SCALARS[item]))
            return np.frombuffer(self.buffer[start : self.at], np.dtype(_SCALARS[item].replace("<?", "?"))).tolist()
        return [self.value(item) for _ in range(count)]


def truncated(path: str, needed_bytes: int, size_bytes: int) -> ValueError:
    return ValueError(
        f"{path} is truncated or damaged: it should have at least {needed_bytes} bytes, it has {size_bytes}; download the file again"
    )


def read_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Map a GGUF file and read its header.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not a GGUF file, of another version, truncated, or a tensor is of a kind that cannot be dequantised.
    """
    path = os.fspath(path)
    size = os.path.getsize(path)
    if size < 24:
        raise truncated(path, 24, size)
    cursor = _Cursor(path, np.memmap(path, np.uint8, mode="r"))
    magic = bytes(cursor.buffer[: cursor.take(4) + 4])
    if magic != _MAGIC:
        raise ValueError(
            f"{path} is not a GGUF file: it should begin with {_MAGIC!r}, it begins with {magic!r}; give a .gguf file or a Hugging Face directory"
        )
    version = cursor.scalar("<I")
    if version not in (2, 3):
        raise ValueError(
            f"{path} has GGUF version {version}; versions 2 and 3, little-endian, can be read: convert it with a newer llama.cpp"
        )
    num_tensors, num_fields = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata = {}
    for _ in range(num_fields):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("<I"))
    entries = []
    for _ in range(num_tensors):
        name, ndim = cursor.string(), cursor.scalar("<I")
        shape = tuple(cursor.scalar("<Q") for _ in range(ndim))[::-1]
        entries.append((name, shape, cursor.scalar("<I"), cursor.scalar("<Q")))
    align = int(metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT))
    start = -(-cursor.at // align) * align
    return GgufFile(path, metadata, {entry[0]: _tensor(path, cursor.data, start, *entry) for entry in entries})


def _tensor(
    path: str, data: np.ndarray, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int
) -> GgufTensor:
    try:
        quantization = gguf.GGMLQuantizationType(kind)
        block, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
        row = shape[-1]
    except (ValueError, KeyError, IndexError):
        raise ValueError(
            f"{path} is damaged: tensor {name!r} has shape {shape} and type {kind}; the type must be one of llama.cpp's"
        ) from None
    if row % block:
        raise ValueError(
            f"{path} is damaged: rows of tensor {name!r} have {row} values, which is no multiple of the {block} of {quantization.name}"
        )
    row_bytes = row // block * block_bytes
    begin, length = start + offset, math.prod(shape[:-1]) * row_bytes
    if begin + length > data.size:
        raise truncated(path, begin + length, data.size)
    return GgufTensor(name, shape, quantization, data[begin : begin + length].reshape(*shape[:-1], row_bytes))
