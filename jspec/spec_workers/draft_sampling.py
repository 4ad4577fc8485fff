"""What a draft proposes: its best tokens, or tokens drawn from its own distribution."""

import jax
import jax.numpy as jnp
from jax import lax

from jspec.spec_workers.sampling import DRAFT_TOKEN, SamplingState, filtered_probs, position_key


def best_tokens(logits, topk: int, *, scored: bool = True):
    """The draft's `topk` likeliest tokens and their probabilities, descending; ties go to the lower id.

    Args:
        logits: f32[..., Vd]. A draft that breaks (NaN) proposes with probability 0: it can cost speed, nothing else.
        topk: `K`, static.
        scored: static; False where nobody compares the probabilities, and they are all 1.

    Returns: `probs: f32[..., K]` and `ids: i32[..., K]`.
    """
    logits = jnp.where(jnp.isfinite(logits), logits, -jnp.inf)
    if topk == 1 and not scored:
        ids = jnp.argmax(logits, axis=-1, keepdims=True).astype(jnp.int32)
        return jnp.ones(ids.shape, jnp.float32), ids
    best, ids = lax.top_k(logits, topk)
    probs = jnp.exp(best - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
    return jnp.nan_to_num(probs), ids.astype(jnp.int32)


def draw_tokens(sampling: SamplingState, rows, logits, positions, salts=None):
    """One draft token a row from the distribution that the row's own parameters make of the draft's logits; the best token in greedy rows.

    Args:
        sampling: parameters of all rows.
        rows: i32[B].
        logits: f32[B, Vd].
        positions: i32[B], absolute position the token will take.
        salts: i32[B] or None, what the draws depend on beside seed and position, for workers in which something else depends on the draws.

    Returns: `ids: i32[B]` and `probs: f32[B, Vd]`, the very distribution that each was drawn from.
    """
    logits = jnp.where(jnp.isfinite(logits), logits, jnp.finfo(jnp.float32).min)
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw(item):
        row, logits, position, best, salt = item
        greedy = sampling.temperature[row] <= 0
        probs = lax.cond(
            greedy,
            lambda: jax.nn.one_hot(best, logits.shape[0], dtype=jnp.float32),
            lambda: filtered_probs(sampling, row, logits),
        )
        key = position_key(sampling.seed[row], position, DRAFT_TOKEN)
        key = key if salt is None else jax.random.fold_in(key, salt)
        noise = jax.random.gumbel(key, logits.shape, jnp.float32)
        return jnp.where(greedy, best, jnp.argmax(jnp.log(probs) + noise).astype(jnp.int32)), probs

    return lax.map(draw, (rows, logits, positions, best, salts))
