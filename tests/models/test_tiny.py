"""The test targets do what other tests rely on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.paging import PAGE_SIZE, PagedRows

from jspec.models.tiny import bigram_target, markov_target, random_target
from jspec.state.batches import ForwardBatch, ForwardMode


def test_markov_target_follows_its_table():
    table = [3, 3, 0, 4, 1, 2]
    target = markov_target(table, margin=7.0, eos_token_ids=(4,))
    assert (target.facts.vocab_size, target.facts.eos_token_ids) == (6, (4,))
    (prefill,), _, _ = PagedRows(target, 1).forward([[0, 1, 2, 3, 4, 5]])
    np.testing.assert_array_equal(prefill.argmax(-1), table)
    np.testing.assert_allclose(np.sort(prefill)[:, -1], 7.0, rtol=1e-3)
    np.testing.assert_allclose(np.sort(prefill)[:, :-1], 0.0, atol=1e-5)
    assert PagedRows(target, 1).greedy([5], 7) == [2, 0, 3, 4, 1, 3, 4]


def test_bigram_target_has_exactly_these_logits():
    table = np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32)
    rows = PagedRows(bigram_target(table, eos_token_ids=(4,)), 1)
    np.testing.assert_allclose(rows.forward([[4, 0, 2]])[0][0], table[[4, 0, 2]], atol=1e-5)
    np.testing.assert_allclose(rows.forward([[5]], width=1)[0][0], table[[5]], atol=1e-5)


def test_bad_tables_are_refused():
    with pytest.raises(ValueError, match=r"next_token\[1\]=2 must lie in 0..1"):
        markov_target([0, 2])
    with pytest.raises(ValueError, match=r"table.shape=\(2, 3\) must be square"):
        bigram_target(np.zeros((2, 3)))


def test_random_target_feels_every_kv_entry_and_nothing_else():
    """Nudge each number of the pool in turn: the next logits change exactly for the numbers that belong to the row's prefix."""
    target = random_target(0, num_layers=2)
    rows = PagedRows(target, 1, pages_per_row=2)
    prompt = [11, 42, 7, 63, 5]
    rows.forward([prompt])
    slot = jnp.asarray(rows.slots(0, np.array([5])))
    one = jnp.ones(1, jnp.int32)
    batch = ForwardBatch(
        input_ids=one,
        positions=5 * one,
        slots=slot,
        rows=one,
        prefix_lens=5 * one,
        extend_lens=one,
        page_table=jnp.asarray(rows.page_table),
        forward_mode=ForwardMode.DECODE,
        query_len=1,
    )
    flat = rows.kv_pages.reshape(-1)

    def logits(kv):
        out = target.forward(target.params, batch, kv.reshape(rows.kv_pages.shape))
        return target.logits(target.params, out.hidden)[0]

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def changes():
        every = jax.lax.map(lambda i: logits(flat.at[i].add(0.5, mode="drop")), jnp.arange(flat.size + 1))
        return jnp.abs(every - every[-1]).max(axis=-1)  # the last nudge falls outside the pool

    change, facts = np.asarray(changes()), target.facts
    assert (change > 0).sum() == 2 * facts.num_layers * len(prompt) * facts.num_kv_heads * facts.head_dim
    assert flat.size == 2 * facts.num_layers * 3 * PAGE_SIZE * facts.num_kv_heads * facts.head_dim


def test_random_target_is_reproducible_and_its_best_tokens_lie_apart():
    a, b, other = random_target(4), random_target(4), random_target(5)
    tokens = np.random.default_rng(0).integers(0, 64, 15).tolist()
    (x,), (y,), (z,) = (PagedRows(t, 1).forward([tokens])[0] for t in (a, b, other))
    np.testing.assert_array_equal(x, y)
    assert np.abs(x - z).max() > 1.0
    best = np.sort(x)[:, -2:]
    assert (best[:, 1] - best[:, 0]).min() > 1e-3
    assert 1.0 < x.std() < 10.0
