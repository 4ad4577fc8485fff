"""Sampling state of the rows, and the sampler that every path shares: plain decoding and verification draw the same token from the same logits."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.config import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS

TARGET_TOKEN, DRAFT_TOKEN, ACCEPT_COIN = 0, 1, 2
"""Purposes of a key: the target's own token at a position, a draft's token there, the coin that accepts the draft."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingState:
    """Sampling parameters, one row a request; written when it is prefilled. `FIELDS` says what each row has."""

    temperature: Any  # f32[R]  0 = greedy
    top_k: Any  # i32[R]  0 = all
    top_p: Any  # f32[R]  1 = all
    min_p: Any  # f32[R]  0 = all
    seed: Any  # u32[R]
    prompt_len: Any  # i32[R]  tokens; what lies behind them is output
    stop_from: Any  # i32[R]  absolute position from which on a stop token may be chosen; 0: everywhere
    stop_token_ids: Any  # i32[R, S]  -1 padded
    repetition_penalty: Any  # f32[R]  1 = none
    presence_penalty: Any  # f32[R]  0 = none
    frequency_penalty: Any  # f32[R]  0 = none
    bias_ids: Any  # i32[R, M]  -1 padded
    bias: Any  # f32[R, M]
    bad_words: Any  # i32[R, N, L]  token sequences, each from its last token to its first, -1 padded
    grammar: Any  # i32[R]  names the grammar that the output follows; 0 = none
    num_logprobs: Any  # i32[R]  likeliest tokens to tell of, beside each emitted one; -1 = tell nothing
    num_prompt_logprobs: Any  # i32[R]  the same for the tokens of the prompt


class Field(NamedTuple):
    """One parameter of a row."""

    shape: tuple[int, ...]
    dtype: Any  # of 32 bits
    idle: float  # what a row without an owner has


FIELDS = {
    "temperature": Field((), np.float32, 0),
    "top_k": Field((), np.int32, 0),
    "top_p": Field((), np.float32, 1),
    "min_p": Field((), np.float32, 0),
    "seed": Field((), np.uint32, 0),
    "prompt_len": Field((), np.int32, 0),
    "stop_from": Field((), np.int32, 0),
    "stop_token_ids": Field((MAX_STOP_TOKEN_IDS,), np.int32, -1),
    "repetition_penalty": Field((), np.float32, 1),
    "presence_penalty": Field((), np.float32, 0),
    "frequency_penalty": Field((), np.float32, 0),
    "bias_ids": Field((MAX_LOGIT_BIAS,), np.int32, -1),
    "bias": Field((MAX_LOGIT_BIAS,), np.float32, 0),
    "bad_words": Field((MAX_BAD_WORDS, MAX_BAD_WORD_LEN), np.int32, -1),
    "grammar": Field((), np.int32, 0),
    "num_logprobs": Field((), np.int32, -1),
    "num_prompt_logprobs": Field((), np.int32, -1),
}
"""Every field of `SamplingState`: how it crosses to the device, and what it is at first."""

SAMPLING_COLUMNS = sum(math.prod(field.shape) for field in FIELDS.values())
"""Words of one row."""


def init_sampling(num_rows: int) -> SamplingState:
    """Greedy in every row."""
    return SamplingState(
        **{name: jnp.full((num_rows, *f.shape), f.idle, f.dtype) for name, f in FIELDS.items()}  # type: ignore[arg-type]
    )


def idle_rows(num_rows: int) -> jax.Array:
    """`i32[num_rows, SAMPLING_COLUMNS]`: `init_sampling` as bits."""
    return jnp.asarray(np.repeat(row_sampling([{}]), num_rows, axis=0))


def sampling_bits(state: SamplingState) -> jax.Array:
    """`i32[R, SAMPLING_COLUMNS]`: the inverse of `sampling_of`."""
    parts = (lax.bitcast_convert_type(getattr(state, name), jnp.int32) for name in FIELDS)
    return jnp.concatenate([part.reshape(part.shape[0], -1) for part in parts], axis=1)


def row_sampling(rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """`i32[b, SAMPLING_COLUMNS]`: parameters of some rows, as bits.

    Args:
        rows: of each row, the fields that are not idle. A list may be shorter than its field, and so may the lists in it.
    """
    parts = []
    for name, field in FIELDS.items():
        column = np.full((len(rows), *field.shape), field.idle, field.dtype)
        for i, row in enumerate(rows):
            if name in row and len(field.shape) == 2:
                for j, values in enumerate(row[name]):
                    column[i, j, : len(values)] = values
            elif name in row and field.shape:
                column[i, : len(row[name])] = row[name]
            elif name in row:
                column[i] = row[name]
        parts.append(column.reshape(len(rows), math.prod(field.shape)).view(np.int32))
    return np.concatenate(parts, axis=1)


def sampling_of(columns) -> dict[str, Any]:
    """The fields back from their bits, on the device: `columns` i32[B, SAMPLING_COLUMNS]."""
    found, start = {}, 0
    for name, field in FIELDS.items():
        end = start + math.prod(field.shape)
        bits = columns[:, start:end].reshape(-1, *field.shape)
        found[name] = lax.bitcast_convert_type(bits, field.dtype)
        start = end
    return found


def position_key(seed, position, purpose: int):
    """The key for one position of one request: `fold_in(seed, position, purpose)`. Neighbours, batch place and overlap do not enter."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position), purpose)


def _ordered_bits(values):
    """`u32` whose order is that of the f32 `values`: lets a threshold be found by bisection, exactly."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)  # -0.0 ties with 0.0
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _keep_heaviest(scores, weights, target):
    """`bool[V]`: the highest-scoring tokens, until their weight reaches `target`; equal scores go to the lower id.

    Bisection over the 32 bits of a float instead of a sort: a sort of the vocabulary is slow on every backend.
    """
    keys = _ordered_bits(scores)

    def above(threshold):
        return jnp.sum(jnp.where(keys > threshold, weights, 0.0))

    def halve(_, bounds):
        low, high = bounds  # above(high) < target
        middle = low + (high - low) // 2
        enough = above(middle) < target
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    _, threshold = lax.fori_loop(0, 32, halve, (jnp.uint32(0), jnp.uint32(2**32 - 1)))
    tied = keys == threshold
    tied_before = jnp.cumsum(jnp.where(tied, weights, 0.0)) - jnp.where(tied, weights, 0.0)
    return (keys > threshold) | (tied & (above(threshold) + tied_before < target))


def filter_logits(logits, *, top_k, top_p, min_p):
    """`f32[V]` with -inf where a token is filtered out: top-k, then top-p of the renormalised rest, then min-p.

    Args:
        logits: f32[V], already divided by the temperature.
        top_k: i32[], 0 keeps all.
        top_p: f32[] in (0, 1].
        min_p: f32[] in [0, 1], relative to the most likely token.

    Ensures: at least the most likely token stays; ties break to the lower id.
    """
    best = jnp.max(logits)
    weights = jnp.exp(logits - best)
    keep = lax.cond(
        top_k > 0,
        lambda: _keep_heaviest(logits, jnp.ones_like(logits), top_k.astype(jnp.float32)),
        lambda: jnp.full(logits.shape, True),
    )
    weights = jnp.where(keep, weights, 0.0)
    keep &= lax.cond(
        top_p < 1,
        lambda: _keep_heaviest(logits, weights, top_p * jnp.sum(weights)),
        lambda: jnp.full(logits.shape, True),
    )
    return jnp.where(keep & (weights >= min_p), logits, -jnp.inf)


def filtered_probs(sampling: SamplingState, row, logits):
    """`f32[V]`: the distribution that row `row` (not greedy) draws from, given `f32[V]` logits: temperature, then the filters, renormalised."""
    scaled = logits / jnp.maximum(sampling.temperature[row], 1e-6)
    filters = {name: getattr(sampling, name)[row] for name in ("top_k", "top_p", "min_p")}
    return jax.nn.softmax(filter_logits(scaled, **filters))


def _sample_one(logits, temperature, top_k, top_p, min_p, seed, position):
    """One token from `f32[V]`, by the Gumbel-max rule (Gumbel 1954; Maddison et al., arXiv 1411.0030)."""
    scaled = filter_logits(logits / jnp.maximum(temperature, 1e-6), top_k=top_k, top_p=top_p, min_p=min_p)
    noise = jax.random.gumbel(position_key(seed, position, TARGET_TOKEN), logits.shape, jnp.float32)
    return jnp.argmax(scaled + noise).astype(jnp.int32)


def sample(sampling: SamplingState, rows, logits, positions, active=None):
    """The target's token at each position: argmax where the row is greedy, a draw from the filtered distribution elsewhere.

    A token depends on its logits, its request's seed and its position, on nothing else, so a draw made while verifying a draft is the very draw that
    plain decoding makes there.

    Args:
        sampling: parameters of all rows.
        rows: i32[B].
        logits: f32[B, W, V].
        positions: i32[B, W], absolute position each token will take.
        active: bool[B, W] or None, positions whose token matters; others are not drawn.

    Returns:
        `tokens: i32[B, W]` and `finite: bool[B, W]`, False where the logits are not all finite (the token is then meaningless, but in range).
    """
    vocab_size = logits.shape[-1]
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    finite = jnp.all(jnp.isfinite(logits), axis=-1)
    drawn = jnp.broadcast_to((sampling.temperature[rows] > 0)[:, None], positions.shape)
    if active is not None:
        drawn &= active

    def draw(item):
        row, token, position, wanted, logits = item
        params = (
            sampling.temperature[row],
            sampling.top_k[row],
            sampling.top_p[row],
            sampling.min_p[row],
            sampling.seed[row],
        )
        return lax.cond(wanted, lambda: _sample_one(logits, *params, position), lambda: token)

    def draw_all():
        # One position after another: a vocabulary-wide filter of all of them at once would not fit the cache.
        each = (jnp.broadcast_to(rows[:, None], positions.shape), greedy, positions, drawn)
        flat = (*(x.reshape(-1) for x in each), logits.reshape(-1, vocab_size))
        return lax.map(draw, flat).reshape(positions.shape)

    return lax.cond(jnp.any(drawn), draw_all, lambda: greedy), finite
