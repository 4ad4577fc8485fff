"""AdamW with a warm-up and a cosine."""

from typing import Any

import jax
import optax

from jspec.training.options import TrainOptions

_VECTORS = ("norms", "final_norm", "fc_bias")


def learning_rate(options: TrainOptions) -> optax.Schedule:
    """step -> f32: up to the peak over the warm-up, then along a cosine down to a tenth of it at the last step."""
    peak, warmup = options.learning_rate, min(options.warmup_steps, options.steps - 1)
    return optax.warmup_cosine_decay_schedule(peak / (warmup + 1), peak, warmup, max(options.steps, 1), peak / 10)


def make_optimizer(options: TrainOptions) -> optax.GradientTransformation:
    """Decays matrices only; gradients are clipped by their global norm."""
    return optax.chain(
        optax.clip_by_global_norm(options.clip_norm),
        optax.adamw(learning_rate(options), b1=0.9, b2=0.95, weight_decay=options.weight_decay, mask=_is_matrix),
    )


def _is_matrix(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in _VECTORS, params)
