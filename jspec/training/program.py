"""The compiled steps of training and evaluation, over a mesh of any size."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.training.checkpoints import TrainState
from jspec.training.loss import Batch
from jspec.training.recipes import Recipe

AXIS = "data"


def data_mesh(devices: Any = None) -> Mesh:
    """A mesh of one axis over `devices`, by default all: batches are split over it, everything else is on every device."""
    return Mesh(np.array(jax.devices() if devices is None else devices), (AXIS,))


class Program(NamedTuple):
    """Training of one draft on one mesh.

    * `replicate(tree) -> tree`, copied to every device: `train` may then consume it, and not the target's weights that it was made of.
    * `train(state, batch, depths) -> (state, metrics)`; the state that went in is gone. Metrics are those of `draft_loss`, "total" and "grad_norm".
    * `evaluate(params, batch, depths) -> metrics`.
    """

    replicate: Callable[..., Any]
    train: Callable[..., Any]
    evaluate: Callable[..., Any]


def make_program(
    recipe: Recipe, optimizer: optax.GradientTransformation, *, mesh: Mesh, max_starts: int | None = None
) -> Program:
    """See `Program`. An evaluation computes every start."""
    on_every, by_row = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(AXIS))
    # Arguments of the programs and not constants in them: an embedding table is large.
    fixed = jax.device_put(recipe.fixed, on_every)

    def train(state: TrainState, fixed, batch: Batch, depths: int):
        graded = jax.value_and_grad(recipe.loss, has_aux=True)
        (total, metrics), grads = graded(state.params, fixed, batch, depths=depths, max_starts=max_starts)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        metrics = metrics | {"total": total, "grad_norm": optax.tree.norm(grads)}
        return TrainState(optax.apply_updates(state.params, updates), opt_state), metrics

    def evaluate(params, fixed, batch: Batch, depths: int):
        total, metrics = recipe.loss(params, fixed, batch, depths=depths, max_starts=None)
        return metrics | {"total": total}

    train_step = jax.jit(train, static_argnames="depths", donate_argnums=0, out_shardings=on_every)
    eval_step = jax.jit(evaluate, static_argnames="depths", out_shardings=on_every)
    return Program(
        replicate=lambda tree: jax.device_put(jax.tree.map(lambda x: jnp.array(x, copy=True), tree), on_every),
        train=lambda state, batch, depths: train_step(state, fixed, jax.device_put(batch, by_row), depths=depths),
        evaluate=lambda params, batch, depths: eval_step(params, fixed, jax.device_put(batch, by_row), depths=depths),
    )
