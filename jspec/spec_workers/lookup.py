"""Prompt lookup: where a text last went on from what it says now."""

import jax.numpy as jnp

from jspec.spec_workers.chain import Proposal


def lookup(history, lens, *, min_ngram: int, max_ngram: int, num_drafts: int) -> Proposal:
    """Finds where the last tokens occurred before, and proposes what followed.

    The longest match up to `max_ngram` tokens wins, among equals the most recent. A continuation that runs into the present goes on from its own start,
    so a loop of any period is drafted to full length.

    Args:
        history: i32[B, L], prompt and output of each row.
        lens: i32[B], tokens known; 0 for padding.
        min_ngram, max_ngram: lengths of match that count.
        num_drafts: `D`.

    Returns:
        A `Proposal` of `D` tokens a row, or of none where nothing matched.

    Source: prompt lookup decoding (Saxena 2023); the n-gram worker of vLLM and SGLang does the same on the host.
    """
    end = jnp.arange(history.shape[1], dtype=jnp.int32)  # a match ends before this index; what followed starts here
    matched = jnp.zeros(history.shape, jnp.int32)
    equal = (end < lens[:, None]) & (end > 0)
    for n in range(1, max_ngram + 1):
        tail = jnp.take_along_axis(history, jnp.maximum(lens - n, 0)[:, None], axis=1)
        equal &= (jnp.roll(history, n, axis=1) == tail) & (end >= n) & (lens >= n)[:, None]
        matched += equal
    score = jnp.where(matched >= min_ngram, matched * history.shape[1] + end, 0)
    best = jnp.argmax(score, axis=1).astype(jnp.int32)
    found = jnp.max(score, axis=1) > 0
    period = jnp.maximum(lens - best, 1)
    index = best[:, None] + jnp.arange(num_drafts, dtype=jnp.int32) % period[:, None]
    tokens = jnp.take_along_axis(history, index, axis=1)
    return Proposal(tokens, jnp.where(found, num_drafts, 0).astype(jnp.int32))
