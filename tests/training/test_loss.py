"""The loss unrolls exactly the chain that a worker drafts, and what it is told not to compute changes nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.kit import (
    ACCEPT,
    VOCAB,
    markov,
    markov_continuation,
    markov_table,
    oracle_accept_lens,
    transformer,
    wrong_tokens,
)

from jspec.models.tiny_draft import markov_draft, random_draft
from jspec.spec_workers.forward import verify_batch
from jspec.training.features import forward_features
from jspec.training.loss import Batch, draft_loss
from jspec.training.text import TextSequence

B, T = 3, 14
HOT = tuple(range(0, VOCAB, 2))
KINDS = [("eagle3", {"token_ids": HOT}), ("eagle", {}), ("multi-layer", {}), ("multi-layer", {"chained": True})]


@functools.cache
def batch(num_captured: int) -> Batch:
    rng = np.random.default_rng(0)
    size = transformer().facts.hidden_size
    return Batch(
        tokens=rng.integers(0, VOCAB, (B, T + 1)).astype(np.int32),
        captured=rng.standard_normal((B, T, num_captured, size)).astype(np.float32),
        hidden=rng.standard_normal((B, T, size)).astype(np.float32),
        weight=(rng.random((B, T)) < 0.6).astype(np.float32),
    )


def draft_of(kind, options):
    draft = random_draft(transformer(), 1, kind=kind, **options)
    head = transformer().head(transformer().params)
    return draft, head[jnp.asarray(HOT)] if "token_ids" in options else head


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_starts_that_are_left_out_change_nothing(kind, options):
    """As many chains as there are starts: the loss, its gradient and every figure are those of all rows."""
    draft, head = draft_of(kind, options)
    text = batch(max(1, len(draft.facts.capture_layers)))
    count = int(text.weight.sum())

    def run(max_starts):
        loss = functools.partial(draft_loss, draft, unroll=3, max_starts=max_starts)
        return jax.value_and_grad(lambda params: loss(params, head, text), has_aux=True)(draft.params["own"])

    (all_loss, all_metrics), all_grads = run(None)
    for max_starts in (count, count + 5):
        (loss, metrics), grads = run(max_starts)
        np.testing.assert_allclose(loss, all_loss, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), metrics, all_metrics)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), grads, all_grads)
    (fewer, _), _ = run(count // 2)
    assert abs(float(fewer - all_loss)) > 1e-3, "half of the starts are another loss"


@pytest.mark.parametrize(("kind", "options"), KINDS[:2])
def test_the_unrolled_chain_is_the_one_that_drafts(kind, options):
    """The draft over its paged pool, as a worker runs it: prefill, then a chain from one row. Its best tokens are those that the unrolled chain of
    that row calls right: they are written into the text, and every depth agrees."""
    draft, head = draft_of(kind, options)
    text = batch(max(1, len(draft.facts.capture_layers)))
    length, depths, pages = 6, 3, 8
    page_table = jnp.arange(1, pages + 1, dtype=jnp.int32)[None]
    tokens = text.tokens[:1].copy()
    feature = draft.feature(draft.params, text.captured[0], text.hidden[0])

    def forward(next_ids, hidden, start, kv_pages):
        place = verify_batch(jnp.int32([1]), jnp.int32([start]), next_ids[None], page_table, page_size=4)
        return draft.forward(draft.params, next_ids, hidden, place, kv_pages)

    kv_pages = draft.init_kv(pages, 4)
    hidden, kv_pages = forward(jnp.asarray(tokens[0, 1 : length + 1]), feature[:length], 0, kv_pages)
    for depth in range(depths):
        best = draft.token_ids(draft.params, jnp.argmax(draft.logits(draft.params, hidden[-1:]), axis=-1))
        tokens[0, length + 1 + depth] = int(best[0])
        hidden, kv_pages = forward(best, hidden[-1:], length + depth, kv_pages)

    weight = np.zeros((1, T), np.float32)
    weight[0, length - 1 :] = 1
    one = Batch(tokens, text.captured[:1], text.hidden[:1], weight)
    only = {"max_starts": 1, "unroll": depths}
    _, metrics = draft_loss(draft, draft.params["own"], head, one, **only)
    np.testing.assert_array_equal(metrics["agree"], np.ones(depths))
    assert metrics["accept_len"] == depths + 1
    tokens[0, length + 2] = (tokens[0, length + 2] + 2) % VOCAB  # another token at the second depth
    _, metrics = draft_loss(draft, draft.params["own"], head, one._replace(tokens=tokens), **only)
    assert metrics["agree"].tolist()[:2] == [1.0, 0.0] and metrics["accept_len"] == 2


@pytest.mark.parametrize("level", ACCEPT)
@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_the_accept_length_is_that_of_decoding(kind, level):
    """Where every verify begins and how long it is, against the runs that an engine makes of the same text."""
    token, depths = ACCEPT[level][1], 4
    tokens = np.array([token, *markov_continuation(token, 61)], np.int32)
    draft = markov_draft(markov(), markov_table(), kind=kind, wrong_after=wrong_tokens())
    captures = draft.facts.capture_layers or (0,)
    (rows,) = forward_features(markov(), captures, num_tokens=64, longest=64)([TextSequence(tokens, 1)])
    weight = np.ones((1, len(rows)), np.float32)
    batch = Batch(tokens[None], rows[None, :, :-1], rows[None, :, -1], weight)
    head = markov().head(markov().params)
    _, metrics = draft_loss(draft, draft.params["own"], head, batch, unroll=depths)
    # The engine's first token comes from the prefill; a verify too near the end of the text to run whole does not count.
    lens = oracle_accept_lens(token, 61)
    whole = [n for n, start in zip(lens, np.cumsum([0, *lens]), strict=False) if start + depths < len(rows)]
    assert int(metrics["verifies"]) == len(whole)
    np.testing.assert_allclose(metrics["accept_len"], np.mean(whole), rtol=1e-6)
    assert {"all": 5.0, "none": 1.0}.get(level, np.mean(whole)) == np.mean(whole)
