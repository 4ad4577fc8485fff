"""Drafts of several origins in one tree, against trees made of dictionaries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.spec_workers.chain import Proposal
from jspec.spec_workers.grafting import Nodes, add_chain, as_tree, below, descend, follow
from jspec.spec_workers.tree import accept_tree

ROWS, SIZE, WIDTH, ALPHABET = 64, 13, 6, 3


def random_paths(rng, count):
    """Paths of the nodes of a random tree, each after its parent, siblings distinct."""
    paths = [()]
    while len(paths) <= count:
        path = (*paths[rng.integers(len(paths))], int(rng.integers(ALPHABET)))
        if path not in paths:
            paths.append(path)
    return paths


def as_nodes(trees, size):
    """The arrays of these trees."""
    tokens, parents = np.full((len(trees), size), -1, np.int32), np.zeros((len(trees), size), np.int32)
    for row, paths in enumerate(trees):
        for node, path in enumerate(paths[1:], 1):
            tokens[row, node], parents[row, node] = path[-1], paths.index(path[:-1])
    return Nodes(jnp.asarray(tokens), jnp.asarray(parents))


def as_paths(nodes):
    """The paths of each row's nodes; free places are empty, and behind them."""
    trees = []
    for count, tokens, parents in zip(
        nodes.num_nodes.tolist(), nodes.tokens.tolist(), nodes.parents.tolist(), strict=True
    ):
        paths = [()]
        for node in range(1, count):
            assert 0 <= parents[node] < node and tokens[node] >= 0
            paths.append((*paths[parents[node]], tokens[node]))
        assert tokens[count:] == [-1] * (len(tokens) - count)
        assert not any(parents[count:])
        trees.append(paths)
    return trees


@pytest.fixture(scope="module")
def trees():
    rng = np.random.default_rng(0)
    return [random_paths(rng, count) for count in rng.integers(0, SIZE, ROWS)]


@pytest.fixture(scope="module")
def walks():
    """Tokens, and how many of them count; behind those lies garbage that would fit."""
    rng = np.random.default_rng(1)
    return rng.integers(0, ALPHABET, (ROWS, 7)).astype(np.int32), rng.integers(-1, 9, ROWS).astype(np.int32)


def deepest(paths, walk):
    return max((path for path in paths if walk[: len(path)] == path), key=len)


def test_following_a_path(trees, walks):
    place, depth = jax.jit(follow)(as_nodes(trees, SIZE), *walks)
    depths = set()
    for row, paths in enumerate(trees):
        walk = tuple(walks[0][row, : max(walks[1][row], 0)].tolist())
        assert paths[int(place[row])] == deepest(paths, walk) and int(depth[row]) == len(deepest(paths, walk))
        depths.add(int(depth[row]))
    assert depths >= {0, 1, 2, 3}


def test_what_hangs_below_a_place(trees):
    rng = np.random.default_rng(2)
    places = [int(rng.integers(len(paths))) for paths in trees]
    places[:20] = [0] * 20
    found = as_paths(jax.jit(below, static_argnames="width")(as_nodes(trees, SIZE), jnp.asarray(places), width=WIDTH))
    for paths, place, got in zip(trees, places, found, strict=True):
        top = paths[place]
        expected = [path[len(top) :] for path in paths if path[: len(top)] == top]
        assert got == expected[:WIDTH]
    assert {len(got) for got in found} == set(range(1, WIDTH + 1))


def test_an_older_proposal(trees):
    """The tokens since lead somewhere in the tree, or out of it; a row without tokens has no proposal, nor one whose text is shorter than the proposal's."""
    rng = np.random.default_rng(3)
    history = rng.integers(0, ALPHABET, (ROWS, 9)).astype(np.int32)
    settled, lens = rng.integers(0, 9, ROWS).astype(np.int32), np.zeros(ROWS, np.int32)
    for row, paths in enumerate(trees):
        lag = [-1, 0, 1, 2, 3][row % 5]
        lens[row] = 0 if row % 11 == 0 else min(settled[row] + lag, 9)
        path = paths[rng.integers(len(paths))]
        if row % 3:  # along the tree, as far as that goes
            history[row, settled[row] :][: len(path)] = path[: 9 - settled[row]]
    found = as_paths(
        jax.jit(descend, static_argnames="width")(as_nodes(trees, SIZE), history, lens, settled, width=WIDTH)
    )
    sizes = set()
    for row, (paths, got) in enumerate(zip(trees, found, strict=True)):
        since = tuple(history[row, settled[row] : lens[row]].tolist())
        there = lens[row] >= max(settled[row], 1) and since in paths
        expected = [path[len(since) :] for path in paths if path[: len(since)] == since] if there else [()]
        assert got == expected[:WIDTH], row
        sizes.add((there, len(got) > 1, len(since) > 0))
    assert sizes >= {(False, False, True), (True, True, True), (True, True, False), (True, False, True)}


def test_a_chain_as_one_more_branch(trees, walks):
    trees = [paths[:WIDTH] for paths in trees]
    chain = Proposal(jnp.asarray(walks[0]), jnp.maximum(walks[1], 0).clip(max=7))
    found = as_paths(jax.jit(add_chain)(as_nodes(trees, WIDTH), chain))
    added = set()
    for row, (paths, got) in enumerate(zip(trees, found, strict=True)):
        tokens = tuple(walks[0][row, : int(chain.num_drafts[row])].tolist())
        branch = [tokens[:n] for n in range(1, len(tokens) + 1)]
        expected = paths + [path for path in branch if path not in paths]
        assert got == expected[:WIDTH]
        added.add(len(got) - len(paths))
    assert added >= {0, 1, 2, 3, WIDTH - 1}


def test_free_places_are_never_walked(trees):
    """Not even where the target says the token that fills them, 0."""
    trees = [paths[:WIDTH] for paths in trees]
    tree = as_tree(as_nodes(trees, WIDTH), jnp.full(ROWS, 9))
    assert (tree.tokens[:, 0] == 9).all() and (tree.tokens >= 0).all()
    target = jnp.zeros((ROWS, WIDTH), jnp.int32)
    accept_lens, _ = accept_tree(tree, target, jnp.full(ROWS, WIDTH - 1), max_depth=WIDTH - 1)
    for paths, accepted, depths in zip(trees, accept_lens.tolist(), tree.depths.tolist(), strict=True):
        assert accepted == 1 + len(deepest(paths, (0,) * WIDTH))
        assert depths == [len(path) for path in paths] + [WIDTH] * (WIDTH - len(paths))
    assert len(set(accept_lens.tolist())) > 2
