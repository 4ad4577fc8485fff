"""Save and load EAGLE drafts: a directory of `config.json` and `model.safetensors`, in the layout of public EAGLE checkpoints."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jspec.models.draft import DraftModel
from jspec.models.draft_layout import read_leaves, save_leaves
from jspec.models.eagle_config_file import config_from_json, config_to_json, draft_kind
from jspec.models.eagle_draft import eagle_draft
from jspec.models.eagle_layout import BIAS, leaves
from jspec.models.json_files import read_json
from jspec.models.target import TargetModel
from jspec.models.tensor_files import CONFIG, WEIGHTS, existing, open_tensors, torch_dtype


def load_draft(path: str | os.PathLike[str], target: TargetModel, *, dtype: Any = jnp.float32) -> DraftModel:
    """The draft in directory `path`, for `target`, whose kernels it runs.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, or the draft is of another target or kind; no weights were read by then. Or a weight is not finite.
    """
    folder = pathlib.Path(path)
    file = existing(folder, WEIGHTS)
    raw = read_json(existing(folder, CONFIG))
    with open_tensors(file) as tensors:
        kind = draft_kind(str(folder / CONFIG), raw, tensors.headers)
        config = config_from_json(str(folder / CONFIG), raw, kind, target.facts)
        params, token_ids = read_leaves(tensors, leaves(config), config, jnp.dtype(dtype), optional=(BIAS,))
    head = None
    if not config.own_head:
        head = target.head(target.params)
        head = head if token_ids is None else head[token_ids]
    return eagle_draft(
        config,
        params,
        embed=target.embedding(target.params),
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
    """Write `draft`, of `eagle_draft`, into directory `path`; arguments and errors as of `save_tensors`."""
    raw = config_to_json(draft.config, torch_dtype=torch_dtype(storage))
    save_leaves(path, raw, leaves(draft.config), draft, storage=storage, record=record)
