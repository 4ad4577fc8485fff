"""The target's hidden states over text, computed once and cached: training then never runs the target."""

import functools
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models.target import TargetModel
from jspec.spec_workers.forward import prefill_batch
from jspec.state.dense import round_up
from jspec.training.shards import (
    Manifest,
    check_manifest,
    read_manifest,
    read_shard,
    tokens_of,
    write_shard,
)
from jspec.training.text import TextSequence

_PAGE_SIZE = 16
_ROWS = 16
"""Sequences in one forward, at most."""


def write_features(
    folder: str | os.PathLike[str],
    target: TargetModel,
    sequences: Sequence[TextSequence],
    *,
    model: str,
    capture_layers: tuple[int, ...],
    shard_sequences: int = 64,
    forward_tokens: int = 2048,
    progress: Callable[..., Any] | None = None,
) -> None:
    """Run the target over `sequences` and write shards of `shard_sequences`; shards that the folder holds are kept, so a killed run goes on.

    Args:
        folder: made if it is missing.
        sequences: in a fixed order; more may be appended later.
        model: its name, for the manifest.
        capture_layers: see `TargetModel.forward`.
        forward_tokens: most packed tokens of one forward; raised to the longest sequence.
        progress: wraps the shards, `progress(iterable, total=n)`.
    Raises:
        ValueError: the folder holds features of something else, a shard is damaged, or features do not fit f16.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    facts = target.facts
    for number, sequence in enumerate(sequences):
        if not 2 <= len(sequence.tokens) <= facts.context_len + 1:
            raise ValueError(
                f"sequence {number} has {len(sequence.tokens)} tokens, it must have 2 to {facts.context_len + 1}, the model's context: cut it"
            )
    manifest = Manifest(
        model=model, capture_layers=capture_layers, hidden_size=facts.hidden_size, num_sequences=len(sequences)
    )
    found = read_manifest(folder)
    if found is not None:
        check_manifest(folder, found, manifest)
    manifest.write(folder)
    groups = [sequences[start : start + shard_sequences] for start in range(0, len(sequences), shard_sequences)]
    files = [folder / f"{i:05d}.npz" for i in range(len(groups))]
    sizes = {"num_features": len(capture_layers) + 1, "hidden_size": facts.hidden_size, "vocab_size": facts.vocab_size}
    todo = [(f, g) for f, g in zip(files, groups, strict=True) if not _holds(f, g, sizes)]
    lens = [len(s.tokens) - 1 for s in sequences] or [1]
    num_tokens = max(max(lens), min(forward_tokens, round_up(sum(lens), _PAGE_SIZE)))
    run = forward_features(target, capture_layers, num_tokens=num_tokens, longest=max(lens))
    for file, group in progress(todo, total=len(todo)) if progress else todo:
        features = np.concatenate(list(run(group)))
        if not np.isfinite(features).all():
            raise ValueError(
                f"{file}: a hidden state is NaN or exceeds 65504, what f16 holds: choose other capture_layers={capture_layers}"
            )
        write_shard(file, group, features)


def _holds(file: pathlib.Path, group: Sequence[TextSequence], sizes: dict[str, int]) -> bool:
    """Whether `file` holds the features of exactly these sequences. Fewer than these are made again: more text came since."""
    if not file.exists():
        return False
    shard, want = read_shard(file, **sizes), tokens_of(group)
    num = len(shard["lens"])
    same = num <= len(group) and all(np.array_equal(shard[k], want[k][: len(shard[k])]) for k in want)
    if not same:
        raise ValueError(
            f"{file} holds features of other text than this run's sequences: they must be the same; use another folder"
        )
    return num == len(group)


def forward_features(
    target: TargetModel, capture_layers: tuple[int, ...], *, num_tokens: int, longest: int
) -> Callable[[Sequence[TextSequence]], Iterator[np.ndarray]]:
    """A function from sequences to their rows, f16[rows, M + 1, H], several sequences at a time, in order."""
    pages_per_row = -(-longest // _PAGE_SIZE)
    num_pages = num_tokens // _PAGE_SIZE + _ROWS
    program = _compiled(target.forward, target.init_kv, capture_layers, num_pages)

    def run(sequences: Sequence[TextSequence]) -> Iterator[np.ndarray]:
        for pack in _packs([s.tokens[:-1] for s in sequences], num_tokens):
            lens = np.zeros(_ROWS, np.int32)
            lens[: len(pack)] = [len(tokens) for tokens in pack]
            tokens = np.zeros(num_tokens, np.int32)
            tokens[: lens.sum()] = np.concatenate(pack)
            pages = -(-lens // _PAGE_SIZE)
            table = np.cumsum(pages)[:, None] - pages[:, None] + 1 + np.arange(pages_per_row)
            table = np.where(np.arange(pages_per_row) < pages[:, None], table, 0).astype(np.int32)
            yield np.asarray(program(target.params, tokens, lens, table))[: lens.sum()]

    return run


def _packs(sequences: Sequence[np.ndarray], num_tokens: int) -> Iterator[list[np.ndarray]]:
    """Neighbours that fit in one forward."""
    pack: list[np.ndarray] = []
    for tokens in sequences:
        if pack and (len(pack) == _ROWS or sum(map(len, pack)) + len(tokens) > num_tokens):
            yield pack
            pack = []
        pack.append(tokens)
    if pack:
        yield pack


@functools.lru_cache(maxsize=8)
def _compiled(forward, init_kv, capture_layers: tuple[int, ...], num_pages: int):
    @jax.jit
    def run(params, tokens, lens, page_table):
        rows = jnp.where(lens > 0, jnp.arange(1, _ROWS + 1, dtype=jnp.int32), 0)
        batch, _ = prefill_batch(tokens, rows, jnp.zeros_like(lens), lens, page_table, page_size=_PAGE_SIZE)
        out = forward(params, batch, init_kv(num_pages, _PAGE_SIZE), capture_layers=capture_layers)
        return jnp.concatenate([out.captured, out.hidden[:, None]], axis=1).astype(jnp.float16)

    return run
