"""Small block drafts for tests and research, beside the targets of `tiny`."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models.block_draft import BlockDraftConfig, BlockDraftModel, block_draft, block_param_shapes
from jspec.models.target import TargetModel

# Gain of each matrix: the spread of an output for inputs of spread 1, as for `tiny.random_params`.
_GAINS = {"qkv": 1.4, "o": 1.5, "markov_in": 1.0, "markov_out": 8.0, "confidence_head": 2.0}


def random_block_draft(target: TargetModel, seed: int, **options: Any) -> BlockDraftModel:
    """A random draft whose proposals depend on every row of the block, every token of the context and every KV entry. The same seed gives the same weights
    everywhere.

    Args:
      options: fields of `BlockDraftConfig`, and `token_ids`, the draft's vocabulary.
    """
    token_ids = options.pop("token_ids", None)
    config = tiny_block_config(target, token_ids=token_ids, **options)
    rng = np.random.default_rng(seed)

    def leaf(path, shape):
        name = path[-1].key
        if "norm" in name:
            return jnp.ones(shape.shape, shape.dtype)
        if name == "confidence_bias":
            return jnp.zeros(shape.shape, shape.dtype)
        scale = _GAINS.get(name, 1.0) / np.sqrt(shape.shape[-1])
        return jnp.asarray(rng.standard_normal(shape.shape, np.float32) * scale, shape.dtype)

    params = jax.tree_util.tree_map_with_path(leaf, block_param_shapes(config))
    return build_block_draft(target, config, params, token_ids)


def markov_block_draft(
    target: TargetModel, next_token: Sequence[int], *, wrong_after: Sequence[int] = (), **options: Any
) -> BlockDraftModel:
    """A "dspark" draft of `markov_target(next_token)` that foresees its tokens by its Markov head, but for what follows the tokens of `wrong_after`. It is
    sure of the former and unsure of the latter.

    Args:
      options: fields of `BlockDraftConfig`.
    """
    size = len(next_token)
    options = {"kind": "dspark", "markov_rank": size, "confidence": True, "markov_head": "vanilla", **options}
    draft = random_block_draft(target, 0, **options)
    wrong = set(wrong_after)
    table = np.zeros((size, size), np.float32)
    for token, follows in enumerate(next_token):
        table[(follows + (token in wrong)) % size, token] = 100.0  # far above what the block itself says
    own = dict(draft.params["own"])
    own["markov_in"], own["markov_out"] = jnp.eye(size, dtype=jnp.float32), jnp.asarray(table)
    sure = np.where(np.isin(np.arange(size), list(wrong)), -4.0, 4.0)
    own["confidence_head"] = jnp.asarray(np.concatenate([np.zeros(target.facts.hidden_size), sure])[None], jnp.float32)
    return draft._replace(params=draft.params | {"own": own})


def tiny_block_config(
    target: TargetModel, *, kind: str = "dflash", token_ids: Sequence[int] | None = None, **options: Any
) -> BlockDraftConfig:
    """Sizes of a small draft for `target`.

    Args:
      target: the model.
      kind: see `BlockDraftConfig`.
      token_ids: the draft's vocabulary, ids of the target; None is all of them.
      options: other fields.
    """
    facts = target.facts
    sizes: dict[str, Any] = {
        "intermediate_size": facts.hidden_size,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "context_len": facts.context_len,
        "capture_layers": (facts.num_layers - 1,),
        "block_size": 5 if kind == "dflash" else 4,
        "mask_token_id": 0,
        "markov_rank": 8 if kind == "dspark" else 0,
    }
    return BlockDraftConfig(
        kind=kind,
        vocab_size=facts.vocab_size,
        draft_vocab_size=facts.vocab_size if token_ids is None else len(token_ids),
        hidden_size=facts.hidden_size,
        **(sizes | options),
    )


def build_block_draft(
    target: TargetModel, config: BlockDraftConfig, params: Any, token_ids: Sequence[int] | None = None
) -> BlockDraftModel:
    """A draft over `params` that shares what it needs with `target`."""
    head = target.head(target.params)
    return block_draft(
        config,
        params,
        embed=target.embedding(target.params),
        head=head if token_ids is None else head[jnp.asarray(token_ids)],
        token_ids=token_ids,
        kernels=target.kernels,
        mesh=target.mesh,
    )
