"""Load and save drafts of every kind: the files say which."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jspec.models.block_draft import BlockDraftModel
from jspec.models.block_draft_files import load_block_draft, save_block_draft
from jspec.models.block_draft_layout import is_block_draft
from jspec.models.draft import DraftModel
from jspec.models.eagle_files import load_draft as load_eagle_draft
from jspec.models.eagle_files import save_draft as save_eagle_draft
from jspec.models.frozen_kv_draft import FrozenKVDraft
from jspec.models.frozen_kv_files import is_frozen_kv, load_frozen_kv, save_frozen_kv
from jspec.models.json_files import read_json
from jspec.models.target import TargetModel
from jspec.models.tensor_files import CONFIG, existing

AnyDraft = DraftModel | BlockDraftModel | FrozenKVDraft


def load_draft(path: str | os.PathLike[str], target: TargetModel, *, dtype: Any = jnp.float32) -> AnyDraft:
    """The draft in directory `path`, for `target`.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, or the draft is of another target or of a kind that is not implemented.
    """
    raw = read_json(existing(pathlib.Path(path), CONFIG))
    if is_block_draft(raw):
        return load_block_draft(path, target, dtype=dtype)
    return (load_frozen_kv if is_frozen_kv(raw) else load_eagle_draft)(path, target, dtype=dtype)


def save_draft(
    path: str | os.PathLike[str],
    draft: AnyDraft,
    target: TargetModel,
    *,
    storage: str = "float32",
    record: Mapping[str, Any] | None = None,
) -> None:
    """Write `draft`, made for `target`, into directory `path`; arguments and errors as of `save_tensors`."""
    if isinstance(draft, BlockDraftModel):
        layers = target.facts.num_layers
        save_block_draft(path, draft, num_target_layers=layers, storage=storage, record=record)
    elif isinstance(draft, FrozenKVDraft):
        save_frozen_kv(path, draft, storage=storage, record=record)
    else:
        save_eagle_draft(path, draft, storage=storage, record=record)
