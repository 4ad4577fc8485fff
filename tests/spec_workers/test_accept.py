"""How much of a chain is accepted."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.spec_workers.accept import accept_chain, prefer_drafts
from jspec.spec_workers.sampling import init_sampling

accept = jax.jit(accept_chain)


def slow_accept(candidates, target_tokens, num_drafts):
    """Drafts are taken while the target would have said the same; its next token, the bonus, always comes on top."""
    accepted = 0
    while accepted < num_drafts and candidates[accepted + 1] == target_tokens[accepted]:
        accepted += 1
    return accepted + 1


def run(candidates, target_tokens, num_drafts):
    got = accept(*(jnp.asarray(x, jnp.int32) for x in (candidates, target_tokens, num_drafts)))
    assert got.dtype == jnp.int32
    return got.tolist()


@pytest.mark.parametrize(
    ("candidates", "target", "num_drafts", "accepted"),
    [
        ([9, 1, 2, 3], [1, 2, 3, 4], 3, 4),  # all, and the bonus 4
        ([9, 1, 2, 3], [1, 2, 8, 4], 3, 3),
        ([9, 1, 2, 3], [8, 2, 3, 4], 3, 1),  # a match behind a miss does not count
        ([9, 1, 2, 3], [1, 8, 3, 4], 3, 2),
        ([9, 1, 2, 3], [1, 2, 3, 4], 0, 1),  # padding that happens to be right is no draft
        ([9, 1, 2, 3], [1, 2, 3, 4], 2, 3),
        ([1, 1, 1, 1], [1, 1, 1, 1], 3, 4),
        ([5], [7], 0, 1),
        ([5], [5], 0, 1),
    ],
)
def test_by_hand(candidates, target, num_drafts, accepted):
    assert run([candidates], [target], [num_drafts]) == [accepted]


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_every_pair_of_chains(width):
    """All candidates and targets of two tokens, with every number of drafts, in one batch."""
    chains = list(itertools.product((0, 1), repeat=width))
    cases = [(c, t, n) for c in chains for t in chains for n in range(width)]
    candidates, targets, num_drafts = zip(*cases, strict=True)
    assert run(candidates, targets, num_drafts) == [slow_accept(*case) for case in cases]


@pytest.mark.parametrize("seed", range(3))
def test_random_chains(seed):
    rng = np.random.default_rng(seed)
    candidates, targets = rng.integers(0, 3, (2, 500, 9))
    targets[:, :-1] = np.where(rng.random((500, 8)) < 0.8, candidates[:, 1:], targets[:, :-1])
    num_drafts = rng.integers(0, 9, 500)
    got = run(candidates, targets, num_drafts)
    assert got == [slow_accept(*case) for case in zip(candidates, targets, num_drafts, strict=True)]
    assert set(got) == set(range(1, 10))
    order = rng.permutation(500)
    assert run(candidates[order], targets[order], num_drafts[order]) == [got[i] for i in order]


def slow_prefer(probs, tokens, drafts, parents, counts, threshold):
    """Node by node: the token that was drawn, unless a draft behind the node is likely enough and none of them is that token."""
    found = []
    for node, drawn in enumerate(tokens):
        behind = [i for i in range(1, len(drafts)) if parents[i] == node and counts[i]]
        likely = [drafts[i] for i in behind if probs[node][drafts[i]] >= threshold]
        found.append(drawn if drawn in [drafts[i] for i in behind] or not likely else likely[0])
    return found


@pytest.mark.parametrize("threshold", [0.05, 0.3])
def test_likely_drafts_are_preferred_where_a_row_samples(threshold):
    rng, (rows, width, vocab) = np.random.default_rng(0), (60, 9, 7)
    logits = rng.normal(0, 2, (rows, width, vocab)).astype(np.float32)
    parents = np.array([[0] + [int(rng.integers(0, i)) for i in range(1, width)] for _ in range(rows)])
    parents[:10] = np.maximum(np.arange(width) - 1, 0)  # chains
    drafts, tokens = rng.integers(0, vocab, (2, rows, width))
    counts = rng.random((rows, width)) < 0.8
    sampling = init_sampling(rows)
    temperature = np.where(np.arange(rows) % 5 == 0, 0.0, 0.7).astype(np.float32)
    sampling = sampling.__class__(**{**vars(sampling), "temperature": jnp.asarray(temperature)})
    prefer = jax.jit(prefer_drafts, static_argnames="threshold")
    rest = (jnp.asarray(x) for x in (logits, tokens, drafts, parents, counts))
    got = np.asarray(prefer(sampling, jnp.arange(rows), *rest, threshold=threshold))
    probs = np.asarray(jax.nn.softmax(logits / 0.7))
    changed = 0
    for row in range(rows):
        wanted = slow_prefer(probs[row], tokens[row], drafts[row], parents[row], counts[row], threshold)
        assert got[row].tolist() == (wanted if temperature[row] else tokens[row].tolist())
        changed += wanted != tokens[row].tolist()
    assert changed > 20


def test_logits_that_are_not_numbers_prefer_no_draft():
    sampling = init_sampling(1)
    sampling = sampling.__class__(**{**vars(sampling), "temperature": jnp.ones(1)})
    row = jnp.zeros(1, jnp.int32)
    chain = (jnp.int32([[3, 1, 2]]), jnp.int32([[0, 0, 1]]), jnp.full((1, 3), True))
    got = prefer_drafts(sampling, row, jnp.full((1, 3, 5), jnp.nan), jnp.int32([[4, 4, 4]]), *chain, threshold=0.1)
    assert got.tolist() == [[4, 4, 4]]
