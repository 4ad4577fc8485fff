"""What training needs to know of a kind of draft: where it starts, what it learns, and over how many depths."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.models.block_draft import BlockDraftConfig, block_draft, block_param_shapes
from jspec.models.eagle_draft import EagleConfig, draft_param_shapes, eagle_draft
from jspec.models.frozen_kv_draft import FrozenKVConfig, frozen_kv_draft, frozen_param_shapes, init_frozen_params
from jspec.models.lora import LoraConfig, LoraParts, init_lora
from jspec.models.target import TargetModel
from jspec.training.block_loss import block_loss
from jspec.training.frozen_kv_loss import asked_layers, frozen_kv_loss, kv_weights
from jspec.training.loss import Batch, draft_loss
from jspec.training.options import TrainOptions
from jspec.training.uno_loss import block_size_at, uno_loss
from jspec.training.warm_start import block_warm_start, warm_start


class Recipe(NamedTuple):
    """How one draft is trained over one target. The functions are pure and, but for `init` and `build`, traceable."""

    config: Any  # of the draft, a frozen dataclass
    fixed: Any  # pytree of arrays that training reads and does not change: what is shared with the target
    init: Callable[[Any], Any]  # `init(key) -> params`
    loss: Callable[..., Any]
    """`loss(params, fixed, batch, *, depths: int, max_starts: int | None) -> (f32[], metrics)`; metrics as of `draft_loss`."""
    build: Callable[[Any], Any]  # `build(params) -> draft`
    depths_at: Callable[[int], int]  # depths of the chain at a step
    depths: int  # of an evaluation: always the same, so that figures of one run compare


def recipe_of(config: Any, target: TargetModel, token_ids: Any, options: TrainOptions) -> Recipe:
    """The recipe of the drafts that `config` describes.

    Raises:
        ValueError: options that this kind of draft has no use for, or that do not fit it.
    """
    make: Callable[..., Recipe] = _eagle_recipe
    if isinstance(config, BlockDraftConfig):
        make = _block_recipe
    elif isinstance(config, FrozenKVConfig):
        make = _frozen_kv_recipe
    elif isinstance(config, LoraConfig):
        make = _uno_recipe
    return make(config, target, token_ids, options)


def _shared(target: TargetModel, token_ids: Any) -> tuple[Any, Any]:
    """(embedding, the target's head at the draft's tokens), both in f32, what training needs."""
    head = target.head(target.params)
    head = jnp.asarray(head if token_ids is None else head[token_ids], jnp.float32)
    return jnp.asarray(target.embedding(target.params), jnp.float32), head


def _eagle_recipe(config: EagleConfig, target: TargetModel, token_ids: Any, options: TrainOptions) -> Recipe:
    group = config.num_heads // config.num_kv_heads
    if options.copy_heads > config.num_heads or options.copy_heads % group:
        raise ValueError(
            f"copy_heads={options.copy_heads} must be a multiple of {group}, the query heads of one "
            f"key-value head, and at most {config.num_heads}, all heads"
        )
    embed, head = _shared(target, token_ids)

    def build(params):
        return eagle_draft(config, params, embed=embed, head=head, token_ids=token_ids)

    like = build(draft_param_shapes(config))
    lesson: dict[str, Any] = {name: getattr(options, name) for name in ("decay", "copy_heads", "copy_weight")}

    def loss(params, fixed, batch: Batch, *, depths: int, max_starts: int | None):
        shared, target_head = fixed
        draft = like._replace(params={"own": params, "shared": shared})
        return draft_loss(draft, params, target_head, batch, unroll=depths, max_starts=max_starts, **lesson)

    modules = config.num_modules if config.kind == "multi-layer" else None
    return Recipe(
        config=config,
        fixed=(like.params["shared"], head),
        init=lambda key: warm_start(key, config, target, token_ids),
        loss=loss,
        build=build,
        depths_at=lambda step: modules or options.unroll_at(step),
        depths=modules or options.max_unroll,
    )


def _frozen_kv_recipe(config: FrozenKVConfig, target: TargetModel, token_ids: Any, options: TrainOptions) -> Recipe:
    if options.copy_heads:
        raise ValueError(f"copy_heads={options.copy_heads} must be 0 for {config.kind!r}: its keys are the target's")
    if config.num_centroids:
        raise ValueError(
            f"num_centroids={config.num_centroids} must be 0 in training: a choice of centroids has no gradient"
        )
    embed, head = _shared(target, token_ids)

    def build(params):
        return frozen_kv_draft(config, params, embed=embed, token_ids=token_ids)

    like = build(frozen_param_shapes(config))

    def loss(params, fixed, batch: Batch, *, depths: int, max_starts: int | None):
        shared, target_head, weights = fixed
        draft = like._replace(params={"own": params, "shared": shared})
        asked = (target.config, weights, target_head, batch)
        return frozen_kv_loss(draft, params, *asked, depths=depths, decay=options.decay, max_starts=max_starts)

    return Recipe(
        config=config,
        fixed=(like.params["shared"], head, kv_weights(target, asked_layers(config))),
        init=lambda key: init_frozen_params(key, config),
        loss=loss,
        build=build,
        depths_at=options.unroll_at,
        depths=options.max_unroll,
    )


def _uno_recipe(config: LoraConfig, target: TargetModel, token_ids: Any, options: TrainOptions) -> Recipe:
    if token_ids is not None:
        raise ValueError(
            f"token_ids: {len(token_ids)} must be None for UNO: the target drafts for itself, in its words"
        )
    if options.copy_heads:
        raise ValueError(f"copy_heads={options.copy_heads} must be 0 for UNO: its heads are the target's")
    if config.block_size < 2:
        raise ValueError(f"block_size={config.block_size} must be at least 2 for UNO: the pending token and noise")

    def loss(params, fixed, batch: Batch, *, depths: int, max_starts: int | None):
        weights = {"decay": options.decay, "kl_weight": options.kl_weight}
        whole = target._replace(params=fixed)
        return uno_loss(config, params, whole, batch, num_drafts=depths, max_starts=max_starts, **weights)

    return Recipe(
        config=config,
        fixed=jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), target.params),
        init=lambda key: init_lora(key, config, target),
        loss=loss,
        build=lambda params: LoraParts(config, params),
        depths_at=lambda step: block_size_at(step, options.steps, config.block_size) - 1,
        depths=config.block_size - 1,
    )


def _block_recipe(config: BlockDraftConfig, target: TargetModel, token_ids: Any, options: TrainOptions) -> Recipe:
    if options.copy_heads:
        raise ValueError(
            f"copy_heads={options.copy_heads} must be 0 for {config.kind!r}: a row of a block does not know where the one before it looks"
        )
    embed, head = _shared(target, token_ids)

    def build(params):
        return block_draft(config, params, embed=embed, head=head, token_ids=token_ids)

    like = build(block_param_shapes(config))

    def loss(params, fixed, batch: Batch, *, depths: int, max_starts: int | None):
        del depths  # those of the block
        draft = like._replace(params={"own": params, "shared": fixed})
        return block_loss(draft, params, fixed["head"], batch, max_starts=max_starts)

    return Recipe(
        config=config,
        fixed=like.params["shared"],
        init=lambda key: block_warm_start(key, config, target),
        loss=loss,
        build=build,
        depths_at=lambda step: config.num_drafts,
        depths=config.num_drafts,
    )
