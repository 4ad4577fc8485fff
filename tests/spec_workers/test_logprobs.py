"""Log-probabilities against a softmax of the whole vocabulary, and what a user reads of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config import MAX_LOGPROBS
from jspec.engine.logprobs import TokenLogprob, read_logprobs
from jspec.models.tiny import bigram_target, random_target
from jspec.spec_workers.logprobs import COLUMNS, token_logprobs

SMALL, LARGE = 8, 64
"""Vocabularies: one of fewer tokens than may be told of, one of more."""


@functools.cache
def target(vocab_size):
    return random_target(0, vocab_size=vocab_size, num_layers=1)


@functools.cache
def program(vocab_size):
    model = target(vocab_size)

    @jax.jit
    def run(params, wanted, hidden, tokens):
        return token_logprobs(model, params, wanted, hidden, tokens)

    return run


def told(vocab_size, hidden, tokens, wanted=True):
    """`i32[T, COLUMNS]`."""
    table = program(vocab_size)(target(vocab_size).params, jnp.asarray(wanted), hidden, tokens)
    assert table.dtype == jnp.int32 and table.shape == (len(tokens), COLUMNS)
    return np.asarray(table)


def split(table):
    """Log-probability, ids, log-probabilities of the likeliest."""
    reals = table.view(np.float32)
    return reals[:, 0], table[:, 1 : 1 + MAX_LOGPROBS], reals[:, 1 + MAX_LOGPROBS :]


def some(vocab_size, size):
    rng = np.random.default_rng([vocab_size, size])
    hidden = rng.standard_normal((size, target(vocab_size).facts.hidden_size)).astype(np.float32)
    return hidden, rng.integers(0, vocab_size, size).astype(np.int32)


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 40])
@pytest.mark.parametrize("vocab_size", [SMALL, LARGE])
def test_they_are_those_of_a_softmax(vocab_size, size):
    """Of each token its own, and the likeliest of the vocabulary in falling order, whatever the number of tokens; where there are fewer than may be told of,
    no id and nothing likely."""
    hidden, tokens = some(vocab_size, size)
    table = told(vocab_size, hidden, tokens)
    model = target(vocab_size)
    logprobs = np.asarray(jax.nn.log_softmax(model.logits(model.params, jnp.asarray(hidden))))
    own, ids, best = split(table)
    np.testing.assert_allclose(own, logprobs[np.arange(size), tokens], atol=1e-5)
    count = min(vocab_size, MAX_LOGPROBS)
    order = np.argsort(-logprobs, axis=1, kind="stable")[:, :count]
    assert (ids[:, :count] == order).all()
    np.testing.assert_allclose(best[:, :count], np.take_along_axis(logprobs, order, axis=1), atol=1e-5)
    assert (ids[:, count:] == -1).all() and np.isneginf(best[:, count:]).all()
    if vocab_size <= MAX_LOGPROBS:
        np.testing.assert_allclose(np.exp(best[:, :count]).sum(1), 1, atol=1e-5)


@pytest.mark.parametrize("vocab_size", [SMALL, LARGE])
def test_they_are_zeros_unless_wanted(vocab_size):
    """Whatever is asked about, even where nothing finite could be told."""
    hidden, tokens = some(vocab_size, 17)
    hidden[3] = np.nan
    assert not told(vocab_size, hidden, tokens, wanted=False).any()
    assert told(vocab_size, hidden, tokens).any(axis=1).all()


def test_what_nobody_wants_is_not_computed():
    """The logits of a prefill are as much work as the prefill: they are not made to be thrown away. XLA:CPU would move them out of the loop of `run_if`, which does
    not change what they are made of."""
    model, made = target(LARGE), []

    def logits(params, hidden):
        def note(hidden):
            made.append(len(hidden))
            return hidden

        same = jax.pure_callback(note, jax.ShapeDtypeStruct(hidden.shape, hidden.dtype), hidden)
        return model.logits(params, same)

    run = jax.jit(functools.partial(token_logprobs, model._replace(logits=logits)))
    assert run(model.params, jnp.bool_(True), *some(LARGE, 17)).any() and sum(made) >= 17
    made.clear()
    assert not run(model.params, jnp.bool_(False), *some(LARGE, 17)).any() and not made


def test_a_token_that_is_not_finite_spoils_no_other():
    hidden, tokens = some(LARGE, 20)
    clean = told(LARGE, hidden, tokens)
    hidden[[3, 19]] = np.nan
    spoiled = told(LARGE, hidden, tokens)
    others = np.delete(np.arange(20), [3, 19])
    assert (spoiled[others] == clean[others]).all() and np.isnan(split(spoiled)[0][[3, 19]]).all()


def test_a_token_does_not_depend_on_its_block():
    """At any place, among any others: the very bits."""
    hidden, tokens = some(LARGE, 33)
    whole = told(LARGE, hidden, tokens)
    order = np.random.default_rng(0).permutation(33)
    assert (told(LARGE, hidden[order], tokens[order]) == whole[order]).all()


def test_equal_tokens_are_told_by_id():
    """Logits that are the same on purpose: the lower id first, as the sampler chooses."""
    table = np.zeros((SMALL, SMALL), np.float32)
    table[:, [2, 5]] = 1.5
    model = bigram_target(table, num_layers=1)
    told = jax.jit(lambda p, h, t: token_logprobs(model, p, jnp.bool_(True), h, t))
    found = told(model.params, jnp.ones((3, model.facts.hidden_size)), jnp.array([0, 2, 5]))
    own, ids, best = split(np.asarray(found))
    assert (ids[:, :SMALL] == [2, 5, 0, 1, 3, 4, 6, 7]).all()
    assert own[1] == own[2] == best[0, 0] == best[0, 1] and own[0] == best[0, 2]


def test_whether_they_are_wanted_is_data():
    """One program tells and tells nothing."""
    model, traced = target(LARGE), []

    @jax.jit
    def counted(params, wanted, hidden, tokens):
        traced.append(1)
        return token_logprobs(model, params, wanted, hidden, tokens)

    for wanted in (True, False, True):
        assert counted(model.params, jnp.asarray(wanted), *some(LARGE, 17)).any() == wanted
    assert len(traced) == 1


# --- what a user reads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_top", [0, 1, 3, MAX_LOGPROBS])
@pytest.mark.parametrize("vocab_size", [SMALL, LARGE])
def test_what_is_read_is_what_was_told(vocab_size, num_top):
    """Bits as numbers, most likely first; no more ids than were asked for, nor than there are. Of any slice of the table, which need not be contiguous."""
    hidden, tokens = some(vocab_size, 5)
    wide = np.zeros((10, COLUMNS + 3), np.int32)
    wide[::2, :COLUMNS] = told(vocab_size, hidden, tokens)
    own, ids, best = split(told(vocab_size, hidden, tokens))
    found = read_logprobs(wide[::2, :COLUMNS], tokens.tolist(), num_top)
    count = min(num_top, vocab_size)
    assert found == [
        TokenLogprob(
            int(tokens[i]), float(own[i]), dict(zip(ids[i, :count].tolist(), best[i, :count].tolist(), strict=True))
        )
        for i in range(5)
    ]
    assert [list(one.top) for one in found] == ids[:, :count].tolist()


def test_nothing_is_read_of_nothing():
    assert read_logprobs(np.zeros((0, COLUMNS), np.int32), [], 3) == []
    with pytest.raises(ValueError):
        read_logprobs(np.zeros((2, COLUMNS), np.int32), [1], 3)
