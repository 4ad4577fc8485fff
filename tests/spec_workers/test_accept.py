"""How much of a chain is accepted."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.spec_workers.accept import accept_chain

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
