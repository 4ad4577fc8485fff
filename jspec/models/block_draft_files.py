"""Save and load block drafts: a directory of `config.json` and `model.safetensors`, in the layout of DFlash's public checkpoints."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jspec.models import block_draft_layout
from jspec.models.block_draft import BlockDraftConfig, BlockDraftModel, block_draft
from jspec.models.eagle_layout import IGNORED, check_vocabulary_and_names, fuse_leaves, split_leaves
from jspec.models.json_files import read_json
from jspec.models.target import TargetModel
from jspec.models.tensor_files import (
    CONFIG,
    D2T,
    T2D,
    WEIGHTS,
    existing,
    open_tensors,
    save_tensors,
    shapes_of,
    token_ids_of,
    torch_dtype,
)


def load_block_draft(path: str | os.PathLike[str], target: TargetModel, *, dtype: Any = jnp.float32) -> BlockDraftModel:
    """The draft in directory `path`, for `target`, whose kernels it runs.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, or the draft is of another target or kind; no weights were read by then. Or a weight is not finite.
    """
    folder = pathlib.Path(path)
    file = existing(folder, WEIGHTS)
    source, raw = str(folder / CONFIG), read_json(existing(folder, CONFIG))
    with open_tensors(file) as tensors:
        qk_norm = any(name.endswith("q_norm.weight") for name in tensors.headers)
        config = block_draft_layout.config_from_json(source, raw, qk_norm=qk_norm, facts=target.facts)
        _check_tensors(str(file), shapes_of(tensors, ignored=IGNORED), config)
        token_ids = token_ids_of(tensors, vocab_size=config.vocab_size)
        params = fuse_leaves(block_draft_layout.leaves(config), tensors.read, jnp.dtype(dtype))
    head = target.head(target.params)
    return block_draft(
        config,
        params,
        embed=target.embedding(target.params),
        head=head if token_ids is None else head[token_ids],
        token_ids=token_ids,
        kernels=target.kernels,
        dtype=dtype,
        mesh=target.mesh,
    )


def save_block_draft(
    path: str | os.PathLike[str],
    draft: BlockDraftModel,
    *,
    num_target_layers: int,
    storage: str = "float32",
    record: Mapping[str, Any] | None = None,
) -> None:
    """Write `draft` into directory `path`; arguments and errors as of `save_tensors`. `num_target_layers`: of the target that it was trained for."""
    config = draft.config
    save_tensors(
        path,
        block_draft_layout.config_to_json(
            config, num_target_layers=num_target_layers, torch_dtype=torch_dtype(storage)
        ),
        split_leaves(block_draft_layout.leaves(config), draft.params["own"]),
        storage=storage,
        token_ids=draft.params["shared"].get("token_ids"),
        vocab_size=config.vocab_size,
        record=record,
    )


def _check_tensors(source: str, found: Mapping[str, tuple[int, ...]], config: BlockDraftConfig) -> None:
    known: dict[str, tuple[int, ...]] = {D2T: (config.draft_vocab_size,), T2D: (config.vocab_size,)}
    for leaf in block_draft_layout.leaves(config):
        known |= dict(leaf.tensors)
    check_vocabulary_and_names(source, found, known, config)
