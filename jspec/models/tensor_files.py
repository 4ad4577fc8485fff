"""Directories of `config.json` and `model.safetensors`: what every draft's files share.

A matrix may be stored as f32, bf16, f16, or int8 beside f32 scales of its rows named `<name>_scale`. A draft with a vocabulary of its own says by `d2t` what its
tokens are: token `i` is token `i + d2t[i]` of the target.
"""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from jspec.models.int8_rows import dequantize_rows, quantize_rows

CONFIG, WEIGHTS, RECORD = "config.json", "model.safetensors", "training.json"
STORAGE = ("float32", "bfloat16", "int8")
D2T, T2D = "d2t", "t2d"
_SCALE = "_scale"
_FLOATS, _INTS = ("F32", "F16", "BF16"), ("I64", "I32")
_AGAIN = "download it again"


class Header(NamedTuple):
    """What a safetensors file says of a tensor before its data."""

    dtype: str
    shape: tuple[int, ...]


class Tensors(NamedTuple):
    """An open safetensors file."""

    source: str
    headers: Mapping[str, Header]
    tensors: Any  # of the safetensors library

    def read(self, name: str) -> np.ndarray | None:
        """f32 values of a tensor; None where there is none of this name.

        Raises:
          ValueError: a value is not finite.
        """
        if name not in self.headers:
            return None
        value = self.raw(name)
        scale = self.raw(name + _SCALE) if self.headers[name].dtype == "I8" else None
        value = value.astype(np.float32) if scale is None else dequantize_rows(value, scale)
        _check_finite(f"{self.source}: tensor {name!r}", value, "download it again, or train the draft again")
        return value

    def raw(self, name: str) -> np.ndarray:
        return np.asarray(self.tensors.get_tensor(name))


@contextlib.contextmanager
def open_tensors(file: pathlib.Path) -> Iterator[Tensors]:
    """The tensors of `file`; reads the header only.

    Raises:
      ValueError: it is damaged.
    """
    try:
        opened = safetensors.safe_open(str(file), framework="numpy")
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{file} is truncated or damaged ({error}): it has {file.stat().st_size} bytes; {_AGAIN}"
        ) from error
    with opened as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  (not a dict)
        headers = {name: Header(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
        yield Tensors(str(file), headers, tensors)


def shapes_of(tensors: Tensors, *, ignored: tuple[str, ...] = ()) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor but the scales of others; dtypes are checked, no data is read.

    Raises:
      ValueError: a tensor has a dtype that is not read, or an int8 one lacks its scales.
    """
    source, headers = tensors.source, tensors.headers
    scales = {name + _SCALE: name for name, header in headers.items() if header.dtype == "I8"}
    for scale, name in scales.items():
        if scale not in headers:
            raise ValueError(
                f"{source} has no tensor {scale!r}: {name!r} is int8 and needs the scales of its rows; export the draft again"
            )
        want = Header("F32", headers[name].shape[:1])
        if headers[scale] != want:
            raise ValueError(
                f"{source}: tensor {scale!r} is {headers[scale]}, it must be {want}: export the draft again"
            )
    shapes = {name: header.shape for name, header in headers.items() if name not in scales}
    for name, shape in shapes.items():
        dtypes = {D2T: _INTS, T2D: ("BOOL", "U8")}.get(name, (*_FLOATS, "I8") if len(shape) == 2 else _FLOATS)
        if name not in ignored and headers[name].dtype not in dtypes:
            raise ValueError(
                f"{source}: tensor {name!r} has dtype {headers[name].dtype}, it must be one of {', '.join(dtypes)}: export the draft again"
            )
    return shapes


def check_names(
    source: str,
    found: Mapping[str, tuple[int, ...]],
    known: Mapping[str, tuple[int, ...]],
    *,
    kind: str,
    optional: tuple[str, ...] = (),
    ignored: tuple[str, ...] = (),
    why: Mapping[str, str] | None = None,
) -> None:
    """Raise ValueError unless `found` (name to shape) holds the tensors of `known` and no others; reads no data.

    Args:
      kind: of the draft, for the message.
      optional: names that may be missing.
      ignored: names that may be there although nothing reads them.
      why: of some names, why they are needed.
    """
    for name, shape in known.items():
        if name not in found:
            if name in optional:
                continue
            reason = (why or {}).get(name, "")
            raise ValueError(
                f"{source} has no tensor {name!r}, which its config asks for{reason}: complete the download, or correct config.json"
            )
        if tuple(found[name]) != shape:
            raise ValueError(
                f"{source}: tensor {name!r} has shape {tuple(found[name])}, its config says {shape}: "
                "config and weights are of different drafts; download both again"
            )
    for name in sorted(set(found) - set(known) - set(ignored)):
        raise ValueError(
            f"{source} holds tensor {name!r}, which a draft of kind {kind!r} does not use: "
            "it must hold exactly the tensors of its kind; use a draft of an architecture that is implemented"
        )


def token_ids_of(tensors: Tensors, *, vocab_size: int) -> np.ndarray | None:
    """i32[Vd]: the target's id of each draft id; None where every id is its own.

    Raises:
      ValueError: `d2t` leaves the target's vocabulary, or maps two tokens to one.
    """
    if D2T not in tensors.headers:
        return None
    source, offsets = tensors.source, tensors.raw(D2T).astype(np.int64)
    ids = np.arange(len(offsets)) + offsets
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        i = int(outside.argmax())
        raise ValueError(
            f"{source}: d2t[{i}]={offsets[i]} makes draft token {i} the target's {ids[i]}, which must lie in 0..{vocab_size - 1}: "
            "d2t holds offsets, target id minus draft id; choose a draft made for this target"
        )
    values, counts = np.unique(ids, return_counts=True)
    if len(values) < len(ids):
        token = int(values[counts.argmax()])
        first, second = np.nonzero(ids == token)[0][:2].tolist()
        raise ValueError(
            f"{source}: d2t[{first}]={offsets[first]} and d2t[{second}]={offsets[second]} both make the target's token {token}: "
            "each draft token must have its own; download the draft again"
        )
    return None if len(ids) == vocab_size and not offsets.any() else ids.astype(np.int32)


def save_tensors(
    path: str | os.PathLike[str],
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    storage: str,
    token_ids: Any = None,
    vocab_size: int = 0,
    record: Mapping[str, Any] | None = None,
    names: tuple[str, str] = (CONFIG, WEIGHTS),
) -> None:
    """Write a directory. Files are replaced whole: a reader sees the old or the new one.

    Args:
      path: made if it is missing.
      config: what `config.json` says.
      tensors: name -> f32 values.
      storage: of the matrices: "float32", "bfloat16" or "int8"; vectors are f32.
      token_ids: i32[Vd], the target's id of each draft id, of `vocab_size`; None: they are the same.
      record: how the draft came to be, written to `training.json`.
      names: of the files.
    Raises:
      ValueError: `storage` is unknown, or a weight is not finite; nothing was written by then.
    """
    check_storage(storage)
    stored: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        _check_finite(f"draft: tensor {name!r}", value, "training diverged; lower the learning rate")
        if value.ndim == 2 and storage == "int8":
            stored[name], stored[name + _SCALE] = quantize_rows(value)
        else:
            stored[name] = value.astype(ml_dtypes.bfloat16) if value.ndim == 2 and storage == "bfloat16" else value
    if token_ids is not None:
        ids = np.asarray(jax.device_get(token_ids), np.int64)
        stored[D2T] = ids - np.arange(len(ids))
        stored[T2D] = np.isin(np.arange(vocab_size), ids)
    # What follows is contiguous: safetensors writes the memory as it lies.
    stored = {name: np.ascontiguousarray(value) for name, value in stored.items()}
    folder = pathlib.Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / names[1]) as new:
        new.write_bytes(safetensors.numpy.save(stored, metadata={"format": "pt"}))
    texts: dict[str, Mapping[str, Any]] = {names[0]: config}
    if record is not None:
        texts[RECORD] = dict(record)
    for name, content in texts.items():
        with replacing(folder / name) as new:
            new.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def check_storage(storage: str) -> None:
    """Raise ValueError unless matrices can be stored so."""
    if storage not in STORAGE:
        raise ValueError(f"storage={storage!r} must be one of {', '.join(STORAGE)}")


def torch_dtype(storage: str) -> str:
    """What `config.json` calls it."""
    return "float32" if storage == "int8" else storage


def existing(folder: pathlib.Path, name: str) -> pathlib.Path:
    """The file of a draft's directory.

    Raises:
      FileNotFoundError: it is missing.
    """
    return existing_file(folder, name, names=(CONFIG, WEIGHTS), what="a draft")


def existing_file(folder: pathlib.Path, name: str, *, names: tuple[str, str], what: str) -> pathlib.Path:
    """The file `name` of a directory that must hold the files `names`, the second one of tensors.

    Raises:
      FileNotFoundError: it is missing.
    """
    file = folder / name
    if file.exists():
        return file
    if not folder.exists():
        raise FileNotFoundError(
            f"{folder} does not exist: give the directory of {what}, with {names[0]} and {names[1]}"
        )
    other = name == names[1] and sorted(p.name for p in folder.glob("*.bin"))
    hint = f"convert {other[0]} to safetensors" if other else f"give the directory of {what} that is complete"
    raise FileNotFoundError(f"{file} is missing: {what} must have it; {hint}")


def _check_finite(what: str, value: np.ndarray, way_out: str) -> None:
    bad = value.size - int(np.isfinite(value).sum())
    if bad:
        raise ValueError(f"{what} holds {bad} values that are NaN or infinite; all must be finite: {way_out}")


@contextlib.contextmanager
def replacing(file: pathlib.Path) -> Iterator[pathlib.Path]:
    """A new file that takes the place of `file` once it is complete."""
    new = file.with_name(f".{file.name}.new")
    yield new
    os.replace(new, file)
