"""Small drafts for tests and research, beside the targets of `tiny`."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models.draft import DraftModel
from jspec.models.eagle_draft import EagleConfig, draft_param_shapes, eagle_draft
from jspec.models.target import TargetModel


def markov_draft(
    target: TargetModel,
    next_token: Sequence[int],
    *,
    kind: str = "eagle3",
    wrong_after: Sequence[int] = (),
    rank: int = 0,
    **options: Any,
) -> DraftModel:
    """A draft of `markov_target(next_token)` that foresees its tokens, but for what follows the tokens of `wrong_after`.

    Args:
      target: from `markov_target` with the same table, a permutation for "eagle3".
      next_token: the table.
      kind: see `EagleConfig`.
      wrong_after: after these tokens it proposes what follows another token.
      rank: of "eagle3": place of the right token among its proposals; 0 is the first.
      options: see `tiny_draft_config`.
    """
    config = tiny_draft_config(target, kind, **options)
    size = config.hidden_size
    wrong = list(wrong_after)
    # What the head is shown after token t: the one-hot row of t, or of the next token where the draft shall be wrong.
    shown = np.eye(size, dtype=np.float32)
    for token in wrong:
        shown[:, token] = np.eye(size, dtype=np.float32)[(token + 1) % size]
    params = _zeros(config)
    length = np.sqrt(size / (1 + size * config.rms_norm_eps))  # of a one-hot row under RMSNorm
    if kind == "eagle3":
        # The feature is the one-hot row of token j; the MLP turns it into that of token j + 1, whose successor the head names.
        table = np.zeros((size, size), np.float32)
        table[np.asarray(next_token), np.arange(size)] = 1.0
        module = params["module_0"]
        identity = np.eye(config.intermediate_size, size, dtype=np.float32)
        module["gate_up"] = jnp.asarray(np.concatenate([identity, identity]))
        gain = length / (1 + np.exp(-length)) * length  # silu(length) * length
        module["down"] = jnp.asarray(
            ((table - np.eye(size)) / gain) @ np.eye(size, config.intermediate_size), jnp.float32
        )
        params["fc"] = jnp.asarray(np.eye(size, params["fc"].shape[1]), jnp.float32)
        head = np.array(target.head(target.params)) @ shown
        column, right = np.arange(size), np.asarray(next_token)
        for above in range(1, rank + 1):  # others as likely as the right one, and a little more
            head[(right + above) % size, column] = head[right, column] * (1 + 0.01 * above)
        ids = options.get("token_ids")
        params["head"] = jnp.asarray(head if ids is None else head[np.asarray(ids)])
        return _build(target, config, params, options)
    for i in range(config.num_modules):
        blank = np.zeros((size, size), np.float32)
        halves = (shown * length, blank) if kind == "eagle" else (blank, shown)
        params[f"module_{i}"]["fc"] = jnp.asarray(np.concatenate(halves, axis=1))
    return _build(target, config, params, options)


def random_draft(target: TargetModel, seed: int, *, kind: str = "eagle3", **options: Any) -> DraftModel:
    """A random draft whose proposals depend on every feature, token and KV entry before them. The same seed gives the same weights everywhere."""
    config = tiny_draft_config(target, kind, **options)
    rng = np.random.default_rng(seed)

    def leaf(path, shape):
        if "norm" in path[-1].key:
            return jnp.ones(shape.shape, shape.dtype)
        scale = {"head": 4.0, "qkv": 1.4, "o": 1.5}.get(path[-1].key, 1.0)
        return jnp.asarray(rng.standard_normal(shape.shape, np.float32) * scale / np.sqrt(shape.shape[-1]), shape.dtype)

    params = jax.tree_util.tree_map_with_path(leaf, draft_param_shapes(config))
    return _build(target, config, params, options)


def tiny_draft_config(
    target: TargetModel,
    kind: str,
    *,
    token_ids: Sequence[int] | None = None,
    capture_layers: tuple[int, ...] | None = None,
    num_modules: int = 3,
    chained: bool = False,
    context_len: int | None = None,
    num_heads: int = 2,
    num_kv_heads: int = 1,
    head_dim: int = 8,
) -> EagleConfig:
    """Sizes of a small draft for `target`.

    Args:
      target: the model.
      kind: see `EagleConfig`.
      token_ids: the draft's vocabulary, ids of the target; None is all of them.
      capture_layers: of "eagle3"; None is the last layer.
      num_modules, chained: of "multi-layer".
      context_len: None is the target's.
    """
    facts = target.facts
    return EagleConfig(
        kind=kind,
        vocab_size=facts.vocab_size,
        draft_vocab_size=facts.vocab_size if token_ids is None else len(token_ids),
        hidden_size=facts.hidden_size,
        intermediate_size=facts.hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        context_len=context_len or facts.context_len,
        capture_layers=(capture_layers or (facts.num_layers - 1,)) if kind == "eagle3" else (),
        num_modules=num_modules if kind == "multi-layer" else 1,
        chained=chained,
    )


def _zeros(config: EagleConfig):
    return jax.tree_util.tree_map_with_path(
        lambda path, shape: (jnp.ones if "norm" in path[-1].key else jnp.zeros)(shape.shape, shape.dtype),
        draft_param_shapes(config),
    )


def _build(target: TargetModel, config: EagleConfig, params, options) -> DraftModel:
    ids = options.get("token_ids")
    head = target.head(target.params)
    return eagle_draft(
        config,
        params,
        embed=target.embedding(target.params),
        head=head if ids is None else head[jnp.asarray(ids)],
        token_ids=ids,
        kernels=target.kernels,
        mesh=target.mesh,
    )
