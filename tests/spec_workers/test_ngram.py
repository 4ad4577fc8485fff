"""Prompt lookup against the same search in loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.spec_workers.ngram import lookup, ngram

LENGTH, ROWS = 24, 300


def slow_lookup(tokens, *, min_ngram, max_ngram, num_drafts):
    """The drafts for a text, or None."""
    for n in range(min(max_ngram, len(tokens) - 1), min_ngram - 1, -1):  # the longest match
        for end in range(len(tokens) - 1, n - 1, -1):  # the most recent one
            if tokens[end - n : end] == tokens[-n:]:
                text = list(tokens)
                for _ in range(num_drafts):
                    text.append(text[end + len(text) - len(tokens)])  # goes on into what it has just said
                return text[len(tokens) :]
    return None


@functools.cache
def compiled(min_ngram, max_ngram, num_drafts):
    return jax.jit(functools.partial(lookup, min_ngram=min_ngram, max_ngram=max_ngram, num_drafts=num_drafts))


def run(texts, *, min_ngram=1, max_ngram=4, num_drafts=5, garbage=0):
    """Drafts of each text, or None; what lies behind a text is `garbage`."""
    history, lens = np.full((ROWS, LENGTH), garbage, np.int32), np.zeros(ROWS, np.int32)
    for i, text in enumerate(texts):
        history[i, : len(text)], lens[i] = text, len(text)
    proposal = compiled(min_ngram, max_ngram, num_drafts)(history, lens)
    assert proposal.tokens.shape == (ROWS, num_drafts)
    assert proposal.tokens.dtype == proposal.num_drafts.dtype == jnp.int32
    counts = proposal.num_drafts.tolist()
    assert set(counts) <= {0, num_drafts} and not any(counts[len(texts) :])
    drafts = [row if count else None for row, count in zip(proposal.tokens.tolist(), counts, strict=True)]
    return drafts[: len(texts)]


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ([], None),
        ([3], None),
        ([3, 4], None),
        ([3, 3], [3, 3, 3, 3, 3]),
        ([1, 2, 3, 1], [2, 3, 1, 2, 3]),  # it goes round
        ([1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 5, 6, 1]),
        ([1, 7, 1, 8, 1], [8, 1, 8, 1, 8]),  # the most recent of two equal matches
        ([1, 7, 9, 9, 1, 8, 9, 9, 1], [8, 9, 9, 1, 8]),
        ([5, 1, 2, 8, 4, 2, 9, 5, 1, 2], [8, 4, 2, 9, 5]),  # three tokens match at 8, one more recent token at 9
        (
            [6, 1, 2, 3, 4, 0, 7, 1, 2, 3, 4, 9, 6, 1, 2, 3, 4],
            [9, 6, 1, 2, 3],
        ),  # a fifth token would prefer 0: it is not looked at
        ([1, 2, 1, 2], [1, 2, 1, 2, 1]),
        ([4, 4, 4, 4], [4, 4, 4, 4, 4]),
    ],
)
def test_by_hand(text, drafts):
    assert run([text]) == [drafts]
    assert slow_lookup(text, min_ngram=1, max_ngram=4, num_drafts=5) == drafts


@pytest.mark.parametrize("alphabet", [1, 2, 3, 5])
@pytest.mark.parametrize("sizes", [(1, 4, 5), (1, 1, 3), (2, 3, 7), (3, 3, 1)])
def test_random_texts(alphabet, sizes):
    rng = np.random.default_rng([alphabet, *sizes])
    texts = [rng.integers(0, alphabet, rng.integers(0, LENGTH + 1)).tolist() for _ in range(ROWS)]
    texts[:5] = [[], [0], [0, 0], [0] * LENGTH, [alphabet - 1] * 2]
    options = dict(zip(("min_ngram", "max_ngram", "num_drafts"), sizes, strict=True))
    expected = [slow_lookup(text, **options) for text in texts]
    assert run(texts, **options) == expected
    assert run(texts, **options, garbage=7) == expected  # what lies behind a text is not read
    assert any(expected) and not all(expected)


@pytest.mark.parametrize("period", range(1, 8))
def test_a_loop_of_any_period_is_drafted_to_full_length(period):
    loop = list(range(10, 10 + period))
    text = (loop * LENGTH)[: 2 * period + 1]
    expected = (loop * 9)[1 % period :][:7]
    assert run([text], min_ngram=2, max_ngram=3, num_drafts=7) == [expected]


def test_rows_do_not_depend_on_their_place():
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, 3, rng.integers(0, LENGTH)).tolist() for _ in range(20)]
    order = rng.permutation(20)
    together = run(texts)
    assert run([texts[i] for i in order]) == [together[i] for i in order]
    assert [run([text])[0] for text in texts[:4]] == together[:4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_draft_tokens=1), "num_draft_tokens=1 must be at least 2"),
        (dict(min_ngram=0), "min_ngram=0 and max_ngram=4"),
        (dict(min_ngram=5), "min_ngram=5 and max_ngram=4"),
        (dict(min_ngram=3, max_ngram=2), "min_ngram=3 and max_ngram=2"),
    ],
)
def test_sizes_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        ngram(None, **options)
