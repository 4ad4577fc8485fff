"""Growing, pruning and walking draft trees, against oracles that build them node by node."""

import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.spec_workers.tree import Tree, accept_tree, first_level, link, marginal_tree, next_level, prune

grow = jax.jit(next_level)
walk = jax.jit(accept_tree, static_argnames="max_depth")


def slow_tree(levels, width):
    """EAGLE-2's tree as lists of `(token, parent place)`, root excluded, from `levels[i][k]`: the (probabilities, tokens) of the children of the
    `k`-th node that is expanded at level `i`."""
    topk = len(levels[0][0][0])
    everything = []  # (score, index, token, path)
    beam = [(1.0, ())]
    for level in levels:
        children = []
        for (score, path), (probs, tokens) in zip(beam, level, strict=True):
            for prob, token in zip(probs, tokens, strict=True):
                children.append((np.float32(score) * np.float32(prob), len(everything) + len(children), token, path))
        everything += children
        best = heapq.nsmallest(topk, children, key=lambda c: (-c[0], c[1]))
        beam = [(score, (*path, token, index)) for score, index, token, path in best]
        beam = [(score, (*path, token)) for score, _, token, path in best]
    chosen = sorted(heapq.nsmallest(width - 1, everything, key=lambda c: (-c[0], c[1])), key=lambda c: c[1])
    return [(path, token) for _, _, token, path in chosen]


def paths_of(tokens, parents):
    """The path of each node but the root, as tokens, root excluded."""
    paths = [()]
    for node in range(1, len(tokens)):
        assert parents[node] < node
        paths.append((*paths[parents[node]], int(tokens[node])))
    return paths[1:]


def random_levels(rng, batch, topk, steps, vocab=50):
    """`(probs, tokens)` of every level, descending along the last axis, tokens of siblings distinct."""
    levels = []
    for step in range(steps):
        shape = (batch, topk) if step == 0 else (batch, topk, topk)
        probs = -np.sort(-rng.choice([0.5, 0.25, 0.125, 1.0, 0.3], shape).astype(np.float32), axis=-1)
        tokens = np.argsort(rng.random((*shape[:-1], vocab)), axis=-1)[..., :topk].astype(np.int32)
        levels.append((probs, tokens))
    return levels


def grown(levels):
    beam, candidates = first_level(*map(jnp.asarray, levels[0]))
    for probs, tokens in levels[1:]:
        beam, candidates = grow(beam, candidates, jnp.asarray(probs), jnp.asarray(tokens))
    return candidates


@pytest.mark.parametrize(
    ("topk", "steps", "width"), [(2, 1, 3), (2, 3, 6), (3, 3, 8), (4, 4, 16), (4, 3, 32), (2, 5, 4)]
)
def test_trees_are_those_of_a_search_node_by_node(topk, steps, width):
    rng = np.random.default_rng([topk, steps, width])
    levels = random_levels(rng, 20, topk, steps)
    tree = prune(grown(levels), jnp.full(20, 77, jnp.int32), width)
    assert tree.tokens.shape == (20, width) and (tree.tokens[:, 0] == 77).all()
    for row in range(20):
        lists = [[(levels[0][0][row], levels[0][1][row])]]
        lists += [[(probs[row, k], tokens[row, k]) for k in range(topk)] for probs, tokens in levels[1:]]
        wanted = [(*path, token) for path, token in slow_tree(lists, width)]
        assert paths_of(tree.tokens[row].tolist(), tree.parents[row].tolist()) == wanted
        assert tree.depths[row].tolist() == [0, *map(len, wanted)]


def test_a_tree_by_hand():
    """Root 9; children 1 (0.6) and 2 (0.3); 1's children 3 (0.5) and 4 (0.4), 2's 5 (0.9) and 6 (0.1)."""
    candidates = grown(
        [
            (np.float32([[0.6, 0.3]]), np.int32([[1, 2]])),
            (np.float32([[[0.5, 0.4], [0.9, 0.1]]]), np.int32([[[3, 4], [5, 6]]])),
        ]
    )
    np.testing.assert_allclose(candidates.scores[0], [0.6, 0.3, 0.3, 0.24, 0.27, 0.03], rtol=1e-6)
    tree = prune(candidates, jnp.int32([9]), 5)
    assert tree.tokens.tolist() == [[9, 1, 2, 3, 5]]
    assert tree.parents.tolist() == [[0, 0, 0, 1, 2]]
    assert tree.depths.tolist() == [[0, 1, 1, 2, 2]]
    assert tree.ancestors.tolist() == [[0b00001, 0b00011, 0b00101, 0b01011, 0b10101]]


def test_equal_scores_go_to_the_lower_index():
    """Probabilities of 1 make every score equal: a child is never chosen before its parent."""
    levels = [(np.ones((1, 2), np.float32), np.int32([[1, 2]]))]
    levels += [(np.ones((1, 2, 2), np.float32), np.int32([[[3, 4], [5, 6]]]))] * 3
    tree = prune(grown(levels), jnp.int32([0]), 4)
    assert tree.tokens.tolist() == [[0, 1, 2, 3]] and tree.parents.tolist() == [[0, 0, 0, 1]]


@pytest.mark.parametrize("score", [0.0, 1e-38])
def test_scores_that_vanish_still_make_a_tree(score):
    levels = [(np.full((1, 3), score, np.float32), np.int32([[1, 2, 3]]))]
    levels += [(np.full((1, 3, 3), score, np.float32), np.arange(9, dtype=np.int32).reshape(1, 3, 3))] * 3
    tree = prune(grown(levels), jnp.int32([0]), 12)
    paths_of(tree.tokens[0].tolist(), tree.parents[0].tolist())


def slow_marginal_tree(probs, tokens, width):
    """Best first with a heap, from `probs[d][k]` and `tokens[d][k]`: the paths of the nodes, in the order in which they leave the heap."""
    children = list(zip(range(len(probs[0])), probs[0], tokens[0], strict=True))
    heap = [(-p, 1, rank, int(token), 0, (int(token),)) for rank, p, token in children]
    heapq.heapify(heap)
    paths = []
    while len(paths) < width - 1:
        score, depth, _, _, _, path = heapq.heappop(heap)
        paths.append(path)
        if depth < len(probs):
            for rank, (p, token) in enumerate(zip(probs[depth], tokens[depth], strict=True)):
                heapq.heappush(heap, (score * p, depth + 1, rank, int(token), len(paths), (*path, int(token))))
    return paths


@pytest.mark.parametrize(
    ("depth", "topk", "width"), [(1, 4, 5), (3, 2, 8), (4, 3, 12), (3, 8, 32), (7, 4, 16), (4, 1, 5)]
)
def test_trees_of_marginals_are_those_of_a_heap(depth, topk, width):
    """Powers of two, so that products are exact and many of them equal: every tie goes where it must."""
    rng = np.random.default_rng([depth, topk, width])
    probs = -np.sort(-rng.choice([1, 0.5, 0.5, 0.25, 0.125], (40, depth, topk)).astype(np.float32), axis=-1)
    tokens = np.argsort(rng.random((40, depth, 50)), axis=-1)[..., :topk].astype(np.int32)
    for i in np.ndindex(40, depth):  # as top-k leaves them: of equally likely tokens the lower comes first
        tokens[i] = tokens[i][np.lexsort((tokens[i], -probs[i]))]
    root = jnp.full(40, 77, jnp.int32)
    tree = jax.jit(marginal_tree, static_argnums=3)(jnp.asarray(probs), jnp.asarray(tokens), root, width)
    for row in range(40):
        paths = paths_of(tree.tokens[row].tolist(), tree.parents[row].tolist())
        assert tree.tokens[row, 0] == 77 and set(paths) == set(slow_marginal_tree(probs[row], tokens[row], width))
        assert len(set(paths)) == width - 1 and tree.depths[row].tolist() == [0, *map(len, paths)]


def test_a_tree_of_marginals_by_hand():
    """Best first: 1 (0.6), 1 3 (0.54), 1 3 5 (0.54 too, but deeper), 2 (0.4)."""
    probs = jnp.float32([[[0.6, 0.4], [0.9, 0.1], [1.0, 0.0]]])
    tokens = jnp.int32([[[1, 2], [3, 4], [5, 6]]])
    tree = marginal_tree(probs, tokens, jnp.int32([9]), 5)
    assert tree.tokens.tolist() == [[9, 1, 2, 3, 5]] and tree.parents.tolist() == [[0, 0, 0, 1, 3]]


def slow_walk(tokens, parents, target, depth_limit):
    """From the root to the first child that carries the target's token, by first-child and next-sibling order."""
    node, path, depth = 0, [0], 0
    while depth < depth_limit:
        children = [n for n in range(1, len(tokens)) if parents[n] == node]
        node = next((n for n in children if tokens[n] == target[node]), None)
        if node is None:
            break
        path.append(node)
        depth += 1
    return path


def random_tree(rng, width):
    parents, tokens = [0], [99]
    for node in range(1, width):
        parent = int(rng.integers(0, node))
        siblings = {tokens[n] for n in range(1, node) if parents[n] == parent}
        parents.append(parent)
        tokens.append(int(rng.choice([t for t in range(width + 1) if t not in siblings])))
    return tokens, parents


@pytest.mark.parametrize("width", [2, 3, 8, 17, 32])
def test_walks_are_those_of_the_links(width):
    rng = np.random.default_rng(width)
    rows = 300
    trees = [random_tree(rng, width) for _ in range(rows)]
    tokens, parents = (np.array(x, np.int32) for x in zip(*trees, strict=True))
    target = rng.integers(0, width + 1, (rows, width)).astype(np.int32)
    for row in range(rows):  # the target often names a child, so that walks go deep
        for node in range(1, width):
            if rng.random() < 0.5:
                target[row, parents[row, node]] = tokens[row, node]
    limit = rng.integers(0, width, rows).astype(np.int32)
    limit[: rows // 2] = width
    tree = link(jnp.asarray(tokens), jnp.asarray(parents))
    accept_lens, path = walk(tree, jnp.asarray(target), jnp.asarray(limit), max_depth=width - 1)
    deepest = 0
    for row in range(rows):
        wanted = slow_walk(tokens[row], parents[row], target[row], limit[row])
        assert int(accept_lens[row]) == len(wanted)
        got = path[row].tolist()
        assert got[: len(wanted)] == wanted and set(got[len(wanted) :]) <= {wanted[-1]}
        deepest = max(deepest, len(wanted))
    assert deepest >= min(width, 3)


def test_ancestors_of_a_chain_and_of_a_star():
    chain = link(jnp.zeros((1, 32), jnp.int32), jnp.maximum(jnp.arange(32, dtype=jnp.int32) - 1, 0)[None])
    assert [int(word) for word in chain.ancestors[0]] == [(1 << (n + 1)) - 1 for n in range(32)]
    star = link(jnp.zeros((1, 32), jnp.int32), jnp.zeros((1, 32), jnp.int32))
    assert [int(word) for word in star.ancestors[0]] == [1] + [1 | (1 << n) for n in range(1, 32)]
    assert isinstance(star, Tree) and star.depths.tolist() == [[0] + [1] * 31]


def test_rows_do_not_affect_each_other():
    rng = np.random.default_rng(1)
    levels = random_levels(rng, 6, 3, 3)
    tree = prune(grown(levels), jnp.arange(6, dtype=jnp.int32), 8)
    alone = [prune(grown([(p[i : i + 1], t[i : i + 1]) for p, t in levels]), jnp.int32([i]), 8) for i in range(6)]
    for field in Tree._fields:
        together = np.concatenate([np.asarray(getattr(one, field)) for one in alone])
        np.testing.assert_array_equal(np.asarray(getattr(tree, field)), together)
