"""Save and load block drafts: a directory of `config.json` and `model.safetensors`, in the layout of DFlash's public checkpoints."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jspec.models import block_draft_layout
from jspec.models.block_draft import BlockDraftModel, block_draft
from jspec.models.draft_layout import read_leaves, save_leaves
from jspec.models.json_files import read_json
from jspec.models.target import TargetModel
from jspec.models.tensor_files import CONFIG, WEIGHTS, existing, open_tensors, torch_dtype


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
        params, token_ids = read_leaves(tensors, block_draft_layout.leaves(config), config, jnp.dtype(dtype))
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
    raw = block_draft_layout.config_to_json(
        config, num_target_layers=num_target_layers, torch_dtype=torch_dtype(storage)
    )
    save_leaves(path, raw, block_draft_layout.leaves(config), draft, storage=storage, record=record)
