"""The compiled steps of training and evaluation, over a mesh of any size."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.models.draft import DraftModel
from jspec.training.checkpoints import TrainState
from jspec.training.loss import Batch, draft_loss

AXIS = "data"


def data_mesh(devices: Any = None) -> Mesh:
    """A mesh of one axis over `devices`, by default all: batches are split over it, everything else is on every device."""
    return Mesh(np.array(jax.devices() if devices is None else devices), (AXIS,))


class Program(NamedTuple):
    """Training of one draft on one mesh.

    * `replicate(tree) -> tree`, copied to every device: `train` may then consume it, and not the target's weights that it was made of.
    * `train(state, batch, unroll) -> (state, metrics)`; the state that went in is gone. Metrics are those of `draft_loss`, "total" and "grad_norm".
    * `evaluate(params, batch, unroll) -> metrics`.
    """

    replicate: Callable[..., Any]
    train: Callable[..., Any]
    evaluate: Callable[..., Any]


def make_program(
    draft: DraftModel,
    target_head: Any,
    optimizer: optax.GradientTransformation,
    *,
    decay: float,
    mesh: Mesh,
    max_starts: int | None = None,
    copy_heads: int = 0,
    copy_weight: float = 0.0,
) -> Program:
    """See `Program`; arguments as of `draft_loss`. An evaluation computes every start."""
    on_every, by_row = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(AXIS))
    # Arguments of the programs and not constants in them: an embedding table is large.
    fixed = jax.device_put((draft.params["shared"], target_head), on_every)

    def loss(params, fixed, batch: Batch, unroll: int, max_starts: int | None = None):
        shared, head = fixed
        whole = draft._replace(params={"own": params, "shared": shared})
        lesson: dict[str, Any] = {"copy_heads": copy_heads, "copy_weight": copy_weight}
        return draft_loss(whole, params, head, batch, unroll=unroll, decay=decay, max_starts=max_starts, **lesson)

    def train(state: TrainState, fixed, batch: Batch, unroll: int):
        graded = jax.value_and_grad(loss, has_aux=True)
        (total, metrics), grads = graded(state.params, fixed, batch, unroll, max_starts)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        metrics = metrics | {"total": total, "grad_norm": optax.tree.norm(grads)}
        return TrainState(optax.apply_updates(state.params, updates), opt_state), metrics

    def evaluate(params, fixed, batch: Batch, unroll: int):
        total, metrics = loss(params, fixed, batch, unroll)
        return metrics | {"total": total}

    train_step = jax.jit(train, static_argnames="unroll", donate_argnums=0, out_shardings=on_every)
    eval_step = jax.jit(evaluate, static_argnames="unroll", out_shardings=on_every)
    return Program(
        replicate=lambda tree: jax.device_put(jax.tree.map(lambda x: jnp.array(x, copy=True), tree), on_every),
        train=lambda state, batch, unroll: train_step(state, fixed, jax.device_put(batch, by_row), unroll=unroll),
        evaluate=lambda params, batch, unroll: eval_step(params, fixed, jax.device_put(batch, by_row), unroll=unroll),
    )
