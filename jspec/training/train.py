"""Training of one draft: from cached features to a draft and its figures."""

import dataclasses
import hashlib
import pathlib
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jspec.models.target import TargetModel
from jspec.training.batches import Batches, make_batches, split_held_out
from jspec.training.checkpoints import Checkpoints, TrainState
from jspec.training.loss import Batch
from jspec.training.metrics import MetricsLog, plot_metrics
from jspec.training.optimizer import learning_rate, make_optimizer
from jspec.training.options import TrainOptions
from jspec.training.program import Program, data_mesh, make_program
from jspec.training.recipes import Recipe, recipe_of
from jspec.training.shards import Sequences

METRICS, PLOT = "metrics.jsonl", "metrics.png"
# What may change between two parts of a run: it moves no data and shapes no parameter.
_SCHEDULE = (
    "steps",
    "learning_rate",
    "warmup_steps",
    "weight_decay",
    "clip_norm",
    "unroll_schedule",
    "decay",
    "max_starts",
    "copy_weight",
    "kl_weight",
)
_INTERVALS = ("eval_batches", "log_every", "eval_every", "checkpoint_every")


class Trained(NamedTuple):
    """What a run ends with."""

    draft: Any  # what `Recipe.build` makes
    held_out: dict[str, Any]  # figures of all held-out text: accept_len over `verifies`, agree and loss by depth


def train(
    config: Any,
    target: TargetModel,
    sequences: Sequences,
    options: TrainOptions,
    *,
    work_dir: pathlib.Path,
    token_ids: Any = None,
    start: Any = None,
    mesh: Mesh | None = None,
    progress: Callable[..., Iterable] | None = None,
) -> Trained:
    """Train a draft, from the newest checkpoint in `work_dir` if it has one; then the run is the one that was not interrupted, bit for bit.

    Args:
        config: of the draft: what `recipe_of` knows.
        target: its embedding and head are shared; it is not run, but for an adapter that is trained through it.
        sequences: with the features of `config.capture_layers`.
        work_dir: keeps checkpoints, `metrics.jsonl` and `metrics.png`.
        token_ids: i32[Vd], the draft's vocabulary; None: the target's.
        start: parameters to start from; None: `Recipe.init`.
        mesh: of `data_mesh`; by default over all devices.
        progress: wraps the steps, `progress(iterable, total=n)`.
    Raises:
        ValueError: sizes do not fit, `work_dir` holds another run, or training diverged.
    """
    mesh = data_mesh() if mesh is None else mesh
    if options.batch_size % mesh.size:
        raise ValueError(
            f"batch_size={options.batch_size} must be a multiple of the {mesh.size} devices it is split over"
        )
    recipe = recipe_of(config, target, token_ids, options)
    train_on, held_out = split_held_out(sequences, every=options.held_out_every)
    batch_of: dict[str, Any] = {"batch_size": options.batch_size, "seq_len": options.seq_len, "seed": options.seed}
    batches = make_batches(sequences, train_on, include_prompt=options.include_prompt, **batch_of)
    unseen = make_batches(sequences, held_out, **batch_of)

    params = recipe.init(jax.random.key(options.seed)) if start is None else start
    optimizer = make_optimizer(options)
    program = make_program(recipe, optimizer, mesh=mesh, max_starts=options.max_starts)
    state = program.replicate(TrainState(params, optimizer.init(params)))

    checkpoints = Checkpoints(work_dir / "checkpoints", _facts(config, options, sequences, token_ids))
    first = checkpoints.latest or 0
    if first:
        state = checkpoints.restore(state)
    log = MetricsLog(work_dir / METRICS, next_step=first)
    try:
        state = _run(program, state, batches, unseen, options, recipe, checkpoints, log, first, progress)
    finally:
        checkpoints.close()
    figures = evaluate(program, state.params, unseen.in_order(), depths=recipe.depths)
    last = max(first, options.steps)
    log.add(step=last, **{f"held_out_{name}": value for name, value in figures.items()})
    plot_metrics(work_dir / METRICS, work_dir / PLOT)
    draft = recipe.build(jax.device_get(state.params))
    return Trained(draft, figures | {"sequences": len(held_out), "steps": last})


def evaluate(program: Program, params: Any, batches: Iterable[Batch], *, depths: int) -> dict[str, Any]:
    """Figures of `draft_loss` over `batches`, each batch weighing as many rows, or verifies, as a figure counts in it."""
    sums: dict[str, np.ndarray] = {}
    counts: dict[str, np.ndarray] = {}
    for batch in batches:
        found = jax.device_get(program.evaluate(params, batch, depths))
        pairs = np.array([_num_pairs(batch.weight, ahead) for ahead in range(1, depths + 1)])
        weights = {
            "accept_len": np.asarray(found["verifies"], np.float64),
            "agree": pairs,
            "loss": pairs,
            "copy": pairs,
            "confidence": pairs,
        }
        for name in (name for name in weights if name in found):
            sums[name] = sums.get(name, np.zeros(())) + weights[name] * np.asarray(found[name], np.float64)
            counts[name] = counts.get(name, np.zeros(())) + weights[name]
    figures = {name: np.round(value / np.maximum(counts[name], 1), 6).tolist() for name, value in sums.items()}
    return figures | {"verifies": int(counts["accept_len"])}


def _num_pairs(weight: np.ndarray, ahead: int) -> float:
    """Rows of weight f32[B, T] that count together with the row `ahead` of them."""
    return float((weight[:, :-ahead] * weight[:, ahead:]).sum())


def _run(
    program: Program,
    state: TrainState,
    batches: Batches,
    unseen: Batches,
    options: TrainOptions,
    recipe: Recipe,
    checkpoints: Checkpoints,
    log: MetricsLog,
    first: int,
    progress: Callable[..., Iterable] | None,
) -> TrainState:
    """Steps `first` to the last; a checkpoint of step `n` holds the state after `n` steps."""
    steps: Iterable[int] = range(first, options.steps)
    rate, since = learning_rate(options), time.perf_counter()
    for step in progress(steps, total=len(range(first, options.steps))) if progress else steps:
        state, metrics = program.train(state, batches.at(step), recipe.depths_at(step))
        done = step + 1
        is_last, keeps = done == options.steps, done % options.checkpoint_every == 0
        if step % options.log_every == 0 or is_last or keeps:
            now = time.perf_counter()
            log.add(**_record(step, jax.device_get(metrics), float(rate(step)), now - since))
            since = now
        if keeps or is_last:
            checkpoints.save(done, state)
        if done % options.eval_every == 0 and not is_last:
            figures = evaluate(program, state.params, unseen.in_order(options.eval_batches), depths=recipe.depths)
            log.add(step=step, **{f"held_out_{name}": value for name, value in figures.items()})
    return state


def _record(step: int, metrics: dict[str, Any], rate: float, seconds: float) -> dict[str, Any]:
    """A line of the log.

    Raises:
        ValueError: the loss or the gradient is not finite.
    """
    total, grad_norm = float(metrics["total"]), float(metrics["grad_norm"])
    if not np.isfinite([total, grad_norm]).all():
        raise ValueError(
            f"training diverged at step {step}: loss={total}, gradient norm={grad_norm} must be finite; "
            "lower learning_rate or clip_norm, and go on from the last checkpoint"
        )
    record = {"step": step, "loss": total, "grad_norm": grad_norm, "learning_rate": rate, "seconds": round(seconds, 3)}
    by_depth = {
        f"{name}_by_depth": np.asarray(metrics[name], float).round(6).tolist()
        for name in ("loss", "agree", "copy", "confidence")
        if name in metrics
    }
    return record | by_depth | {"accept_len": float(metrics["accept_len"])}


def _facts(config: Any, options: TrainOptions, sequences: Sequences, token_ids: Any) -> dict[str, Any]:
    """What must be the same when a run goes on."""
    text = hashlib.sha256()
    for tokens, prompt_len in zip(sequences.tokens, sequences.prompt_lens.tolist(), strict=True):
        text.update(f"{prompt_len}:".encode() + np.asarray(tokens, np.int32).tobytes())
    fixed = {
        name: value for name, value in dataclasses.asdict(options).items() if name not in (*_SCHEDULE, *_INTERVALS)
    }
    ids = None if token_ids is None else hashlib.sha256(np.asarray(token_ids, np.int32).tobytes()).hexdigest()
    return {"draft": dataclasses.asdict(config), **fixed, "sequences": text.hexdigest(), "token_ids": ids}
