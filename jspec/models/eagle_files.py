"""Save and load drafts: a directory of `config.json` and `model.safetensors`, in the layout of public EAGLE checkpoints.

A matrix may be stored as f32, bf16, f16, or int8 beside f32 scales of its rows named `<name>_scale`. Token `i` of the draft is token `i + d2t[i]` of the
target.
"""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from jspec.models import eagle_layout
from jspec.models.draft import DraftModel
from jspec.models.eagle_config_file import config_from_json, config_to_json, draft_kind
from jspec.models.eagle_draft import EagleConfig, eagle_draft
from jspec.models.eagle_layout import D2T, IGNORED, T2D
from jspec.models.int8_rows import dequantize_rows, quantize_rows
from jspec.models.json_files import read_json
from jspec.models.target import TargetModel

CONFIG, WEIGHTS, RECORD = "config.json", "model.safetensors", "training.json"
STORAGE = ("float32", "bfloat16", "int8")
_SCALE = "_scale"
_FLOATS, _INTS = ("F32", "F16", "BF16"), ("I64", "I32")
_AGAIN = "download it again"


class _Header(NamedTuple):
    """What a safetensors file says of a tensor before its data."""

    dtype: str
    shape: tuple[int, ...]


def load_draft(path: str | os.PathLike[str], target: TargetModel, *, dtype: Any = jnp.float32) -> DraftModel:
    """The draft in directory `path`, for `target`, whose kernels it runs.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, or the draft is of another target or kind; no weights were read by then. Or a weight is not finite.
    """
    folder = pathlib.Path(path)
    file = _existing(folder, WEIGHTS)
    raw = read_json(_existing(folder, CONFIG))
    with _open(file) as tensors:
        headers = _headers(tensors)
        kind = draft_kind(str(folder / CONFIG), raw, headers)
        config = config_from_json(str(folder / CONFIG), raw, kind, target.facts)
        _check_headers(str(file), headers, config)
        token_ids = _token_ids(str(file), tensors, config) if D2T in headers else None

        def read(name: str) -> np.ndarray | None:
            if name not in headers:
                return None
            value = np.asarray(tensors.get_tensor(name))
            scale = np.asarray(tensors.get_tensor(name + _SCALE)) if headers[name].dtype == "I8" else None
            value = value.astype(np.float32) if scale is None else dequantize_rows(value, scale)
            _check_finite(f"{file}: tensor {name!r}", value, "download it again, or train the draft again")
            return value

        params = eagle_layout.fuse(config, read, jnp.dtype(dtype))
    head = None
    if not config.own_head:
        head = target.head(target.params)
        head = head if token_ids is None else head[token_ids]
    embed = target.embedding(target.params)
    return eagle_draft(
        config,
        params,
        embed=embed,
        head=head,
        token_ids=token_ids,
        kernels=target.kernels,
        dtype=dtype,
        mesh=target.mesh,
    )


def save_draft(
    path: str | os.PathLike[str],
    draft: DraftModel,
    *,
    storage: str = "float32",
    record: Mapping[str, Any] | None = None,
) -> None:
    """Write `draft` into directory `path`. Files are replaced whole: a reader sees the old or the new one.

    Args:
      path: made if it is missing.
      draft: of `eagle_draft`.
      storage: of the matrices: "float32", "bfloat16" or "int8"; vectors are f32.
      record: how the draft came to be, written to `training.json`.
    Raises:
      ValueError: `storage` is unknown, or a weight is not finite; nothing was written by then.
    """
    if storage not in STORAGE:
        raise ValueError(f"storage={storage!r} must be one of {', '.join(STORAGE)}")
    config: EagleConfig = draft.config
    tensors: dict[str, np.ndarray] = {}
    for name, value in eagle_layout.split(config, draft.params["own"]).items():
        _check_finite(f"draft: tensor {name!r}", value, "training diverged; lower the learning rate")
        if value.ndim == 2 and storage == "int8":
            tensors[name], tensors[name + _SCALE] = quantize_rows(value)
        else:
            tensors[name] = value.astype(ml_dtypes.bfloat16) if value.ndim == 2 and storage == "bfloat16" else value
    token_ids = draft.params["shared"].get("token_ids")
    if token_ids is not None:
        ids = np.asarray(jax.device_get(token_ids), np.int64)
        tensors[D2T] = ids - np.arange(len(ids))
        tensors[T2D] = np.isin(np.arange(config.vocab_size), ids)
    # What follows is contiguous: safetensors writes the memory as it lies.
    tensors = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    folder = pathlib.Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    with _replacing(folder / WEIGHTS) as new:
        new.write_bytes(safetensors.numpy.save(tensors, metadata={"format": "pt"}))
    texts = {CONFIG: config_to_json(config, torch_dtype="float32" if storage == "int8" else storage)}
    if record is not None:
        texts[RECORD] = dict(record)
    for name, content in texts.items():
        with _replacing(folder / name) as new:
            new.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _check_headers(source: str, headers: Mapping[str, _Header], config: EagleConfig) -> None:
    """Names, shapes and dtypes; reads no data."""
    scales = {name + _SCALE: name for name, header in headers.items() if header.dtype == "I8"}
    for scale, name in scales.items():
        if scale not in headers:
            raise ValueError(
                f"{source} has no tensor {scale!r}: {name!r} is int8 and needs the scales of its rows; export the draft again"
            )
        want = _Header("F32", headers[name].shape[:1])
        if headers[scale] != want:
            raise ValueError(
                f"{source}: tensor {scale!r} is {headers[scale]}, it must be {want}: export the draft again"
            )
    shapes = {name: header.shape for name, header in headers.items() if name not in scales}
    eagle_layout.check_tensors(source, shapes, config)
    for name, shape in shapes.items():
        dtypes = {D2T: _INTS, T2D: ("BOOL", "U8")}.get(name, (*_FLOATS, "I8") if len(shape) == 2 else _FLOATS)
        if name not in IGNORED and headers[name].dtype not in dtypes:
            raise ValueError(
                f"{source}: tensor {name!r} has dtype {headers[name].dtype}, it must be one of {', '.join(dtypes)}: export the draft again"
            )


def _token_ids(source: str, tensors: Any, config: EagleConfig) -> np.ndarray | None:
    """i32[Vd]: the target's id of each draft id; None where every id is its own."""
    offsets = np.asarray(tensors.get_tensor(D2T)).astype(np.int64)
    ids = np.arange(len(offsets)) + offsets
    outside = (ids < 0) | (ids >= config.vocab_size)
    if outside.any():
        i = int(outside.argmax())
        raise ValueError(
            f"{source}: d2t[{i}]={offsets[i]} makes draft token {i} the target's {ids[i]}, which must lie in 0..{config.vocab_size - 1}: "
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
    full = config.draft_vocab_size == config.vocab_size
    return None if full and not offsets.any() else ids.astype(np.int32)


def _check_finite(what: str, value: np.ndarray, way_out: str) -> None:
    bad = value.size - int(np.isfinite(value).sum())
    if bad:
        raise ValueError(f"{what} holds {bad} values that are NaN or infinite; all must be finite: {way_out}")


def _existing(folder: pathlib.Path, name: str) -> pathlib.Path:
    file = folder / name
    if file.exists():
        return file
    if not folder.exists():
        raise FileNotFoundError(f"{folder} does not exist: give the directory of a draft, with {CONFIG} and {WEIGHTS}")
    other = name == WEIGHTS and sorted(p.name for p in folder.glob("*.bin"))
    hint = f"convert {other[0]} to safetensors" if other else "give the directory of a complete draft"
    raise FileNotFoundError(f"{file} is missing: a draft must have it; {hint}")


@contextlib.contextmanager
def _open(file: pathlib.Path) -> Iterator[Any]:
    try:
        opened = safetensors.safe_open(str(file), framework="numpy")
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{file} is truncated or damaged ({error}): it has {file.stat().st_size} bytes; {_AGAIN}"
        ) from error
    with opened as tensors:
        yield tensors


def _headers(tensors: Any) -> dict[str, _Header]:
    slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  (not a dict)
    return {name: _Header(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}


@contextlib.contextmanager
def _replacing(file: pathlib.Path) -> Iterator[pathlib.Path]:
    """A new file that takes the place of `file` once it is complete."""
    new = file.with_name(f".{file.name}.new")
    yield new
    os.replace(new, file)
