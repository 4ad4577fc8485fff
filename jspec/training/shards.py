"""Cached features on disk: `.npz` shards of a few dozen sequences beside a `manifest.json`.

A shard holds `tokens` i32[sum(lens)], `lens` i32[n], `prompt_lens` i32[n] and `feats` f16[sum(lens - 1), M + 1, H]: the captured layers in order, then
the hidden state after the final norm. The last token of a sequence has no row: nothing follows it. Rows are mapped, not read, so a set may be larger than
memory.
"""

import dataclasses
import json
import os
import pathlib
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from jspec.training.text import TextSequence

MANIFEST = "manifest.json"
_KINDS = {"tokens": np.int32, "lens": np.int32, "prompt_lens": np.int32, "feats": np.float16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What the shards of a folder hold."""

    model: str
    capture_layers: tuple[int, ...]
    hidden_size: int
    num_sequences: int

    def write(self, folder: pathlib.Path) -> None:
        new = folder / f".{MANIFEST}.new"
        new.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", "utf-8")
        os.replace(new, folder / MANIFEST)


def read_manifest(folder: pathlib.Path) -> Manifest | None:
    """None where the folder has none.

    Raises:
        ValueError: it is damaged.
    """
    file = folder / MANIFEST
    if not file.exists():
        return None
    try:
        raw = json.loads(file.read_text("utf-8"))
        return Manifest(**{**raw, "capture_layers": tuple(raw["capture_layers"])})
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} is damaged ({error!r}): make the features again in another folder") from None


def check_manifest(folder: pathlib.Path, found: Manifest, wanted: Manifest) -> None:
    """Raise ValueError where `found` differs from `wanted` in anything but the number of sequences."""
    for name in ("model", "capture_layers", "hidden_size"):
        have, want = getattr(found, name), getattr(wanted, name)
        if have != want:
            raise ValueError(
                f"{folder / MANIFEST}: {name}={have!r} must be {want!r}: "
                "the features are of another model or other layers; use those they were made with, or another folder"
            )


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Every sequence of a folder, with its rows."""

    tokens: tuple[np.ndarray, ...]  # i32[n] each
    prompt_lens: np.ndarray  # i32[num]
    features: tuple[np.ndarray, ...]  # f16[n - 1, M + 1, H] each, mapped
    columns: tuple[int, ...]  # of them, those of the layers asked for; the last hidden state is always the last

    def __len__(self) -> int:
        return len(self.tokens)


def open_shards(
    folder: str | os.PathLike[str], *, model: str, capture_layers: tuple[int, ...], hidden_size: int, vocab_size: int
) -> Sequences:
    """The sequences of all shards in `folder`, in the order of the files' names. A folder without manifest is taken at the caller's word.

    Args:
        capture_layers: the layers to read; the folder may hold more of them, for other drafts.

    Raises:
        FileNotFoundError: there is no folder, or no shard in it.
        ValueError: a shard is damaged, or features are of another model or other layers, or shards are missing.
    """
    folder = pathlib.Path(folder)
    files = sorted(folder.glob("[!.]*.npz"))
    if not files:
        raise FileNotFoundError(
            f"{folder} holds no .npz shard: make features first, or give the folder that holds them"
        )
    manifest = read_manifest(folder)
    stored = capture_layers
    if manifest is not None and set(capture_layers) <= set(manifest.capture_layers):
        stored = manifest.capture_layers
    wanted = Manifest(model=model, capture_layers=stored, hidden_size=hidden_size, num_sequences=0)
    if manifest is not None:
        check_manifest(folder, manifest, wanted)
    tokens: list[np.ndarray] = []
    features: list[np.ndarray] = []
    prompt_lens: list[np.ndarray] = []
    for file in files:
        shard = read_shard(file, num_features=len(stored) + 1, hidden_size=hidden_size, vocab_size=vocab_size)
        ends = np.cumsum(shard["lens"])
        tokens += np.split(shard["tokens"], ends[:-1])
        features += np.split(shard["feats"], (ends - np.arange(1, len(ends) + 1))[:-1])
        prompt_lens.append(shard["prompt_lens"])
    if manifest is not None and manifest.num_sequences != len(tokens):
        raise ValueError(
            f"{folder / MANIFEST}: num_sequences={manifest.num_sequences}, but the shards hold {len(tokens)}: "
            "every sequence must be there; run the command that made them again, it goes on where it stopped"
        )
    columns = tuple(stored.index(layer) for layer in capture_layers)
    return Sequences(tuple(tokens), np.concatenate(prompt_lens), tuple(features), columns)


def write_shard(file: pathlib.Path, sequences: Sequence[TextSequence], features: np.ndarray) -> None:
    """`features` f16[sum(lens - 1), M + 1, H]. The file appears whole or not at all."""
    new = file.with_name(f".{file.name}.new")
    with new.open("wb") as stream:
        arrays: dict[str, Any] = {**tokens_of(sequences), "feats": features}
        np.savez(stream, **arrays)
    os.replace(new, file)


def tokens_of(sequences: Sequence[TextSequence]) -> dict[str, np.ndarray]:
    """The arrays of a shard but for its features."""
    return {
        "tokens": np.concatenate([s.tokens for s in sequences]).astype(np.int32),
        "lens": np.array([len(s.tokens) for s in sequences], np.int32),
        "prompt_lens": np.array([s.prompt_len for s in sequences], np.int32),
    }


def read_shard(file: pathlib.Path, *, num_features: int, hidden_size: int, vocab_size: int) -> dict[str, np.ndarray]:
    """The arrays of one shard; `feats` is mapped. Its checksums are compared, which reads the file once."""
    try:
        with zipfile.ZipFile(file) as members:
            if bad := members.testzip():
                raise zipfile.BadZipFile(f"checksum of {bad}")
            shard = {name: _member(file, members.getinfo(f"{name}.npy")) for name in _KINDS}
    except (zipfile.BadZipFile, KeyError, EOFError, ValueError) as error:
        raise ValueError(
            f"{file} is truncated or damaged ({error}): a shard must be written by numpy.savez and hold {', '.join(_KINDS)}; "
            "delete it and make it again"
        ) from error
    _check_shard(file, shard, num_features, hidden_size, vocab_size)
    return {name: value if name == "feats" else np.array(value) for name, value in shard.items()}


def _check_shard(
    file: pathlib.Path, shard: dict[str, np.ndarray], num_features: int, hidden_size: int, vocab_size: int
):
    def refuse(field: str, value: Any, rule: str):
        raise ValueError(f"{file}: {field}={value} {rule}: it was made for another model, or is damaged; make it again")

    for name, dtype in _KINDS.items():
        if shard[name].dtype != dtype:
            refuse(f"{name}.dtype", shard[name].dtype, f"must be {np.dtype(dtype)}")
    lens, prompt_lens, tokens = shard["lens"], shard["prompt_lens"], shard["tokens"]
    if lens.ndim != 1 or not len(lens) or lens.min() < 2:
        refuse("lens", lens.tolist()[:8], "must be one length a sequence, each at least 2")
    if prompt_lens.shape != lens.shape or (prompt_lens < 0).any() or (prompt_lens > lens).any():
        refuse("prompt_lens", prompt_lens.tolist()[:8], "must lie in 0..len of each sequence")
    if tokens.shape != (lens.sum(),):
        refuse("tokens.shape", tokens.shape, f"must be ({lens.sum()},), the sum of lens")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        refuse("tokens", int(tokens.max()), f"must lie in 0..{vocab_size - 1}, the target's vocabulary")
    want = (int((lens - 1).sum()), num_features, hidden_size)
    if shard["feats"].shape != want:
        refuse(
            "feats.shape",
            shard["feats"].shape,
            f"must be {want}: rows, captured layers and the last hidden state, hidden size",
        )


def _member(file: pathlib.Path, info: zipfile.ZipInfo) -> np.ndarray:
    """An array of an `.npz` file, mapped: a stored member is the array's bytes as they lie."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{info.filename} is compressed, use numpy.savez")
    with file.open("rb") as stream:
        stream.seek(info.header_offset + 26)  # the two lengths that end the local header
        name_len, extra_len = np.frombuffer(stream.read(4), "<u2").tolist()
        stream.seek(name_len + extra_len, os.SEEK_CUR)
        version = np.lib.format.read_magic(stream)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read_header(stream)
        if fortran or dtype.hasobject:
            raise ValueError(f"{info.filename} must be a plain array in C order")
        if 0 in shape:
            return np.zeros(shape, dtype)
        return np.memmap(file, dtype, "r", stream.tell(), shape)
