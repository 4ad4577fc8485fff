"""Draft trees: grown level by level, pruned to the best nodes, walked by the target's own tokens.

A tree of `W` nodes is three arrays: `tokens`, `parents` and `ancestors`. Node 0 is the root, the pending token; a node comes after its parent, so its index in
the tree is also the offset of its KV slot past the frontier. Bit `j` of a node's ancestors says that node `j` lies on the path from the root to it, itself
included.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

ROOT = 0


class Tree(NamedTuple):
    """What one verify checks, for every row of a batch."""

    tokens: Any  # i32[B, W]  the pending token, then the drafts
    parents: Any  # i32[B, W]  index of the parent, smaller than the node's own; the root is its own parent
    ancestors: Any  # u32[B, W]
    depths: Any  # i32[B, W]  0 for the root


class Beam(NamedTuple):
    """The `K` nodes of one level that are expanded further, best first."""

    tokens: Any  # i32[B, K]  draft ids
    scores: Any  # f32[B, K]  product of the draft's probabilities from the root on
    ids: Any  # i32[B, K]  of the nodes among all candidates
    parents: Any  # i32[B, K]  place of each one's parent in the beam of the level before


class Candidates(NamedTuple):
    """All nodes ever proposed, level after level: `C = K + (S - 1) * K * K` of them."""

    tokens: Any  # i32[B, C]  draft ids
    scores: Any  # f32[B, C]
    parents: Any  # i32[B, C]  candidate id of the parent; -1: the root


def first_level(probs, tokens) -> tuple[Beam, Candidates]:
    """The root's children.

    Args:
        probs: f32[B, K], descending.
        tokens: i32[B, K], distinct.
    """
    ids = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    parents = jnp.full_like(ids, -1)
    return Beam(tokens, probs, ids, jnp.zeros_like(ids)), Candidates(tokens, probs, parents)


def next_level(beam: Beam, candidates: Candidates, probs, tokens) -> tuple[Beam, Candidates]:
    """Every node of the beam gets `K` children; the best `K` of them all are the next beam.

    Args:
        beam: the level before.
        candidates: all nodes so far.
        probs: f32[B, K, K], of the children of each node, descending.
        tokens: i32[B, K, K], distinct along the last axis.

    Source: EAGLE-2 (arXiv 2406.16858). Ties go to the lower index, so that a node never outranks its parent.
    """
    batch, topk, _ = probs.shape
    scores = (beam.scores[:, :, None] * probs).reshape(batch, -1)
    flat = tokens.reshape(batch, -1)
    start = candidates.tokens.shape[1]
    parents = jnp.repeat(beam.ids, topk, axis=1)
    best, chosen = lax.top_k(scores, topk)
    chosen = chosen.astype(jnp.int32)
    grown = Candidates(
        *(jnp.concatenate(pair, axis=1) for pair in zip(candidates, (flat, scores, parents), strict=True))
    )
    return Beam(jnp.take_along_axis(flat, chosen, axis=1), best, start + chosen, chosen // topk), grown


def marginal_tree(probs, tokens, root, width: int) -> Tree:
    """The tree of `root` and the `W - 1` best nodes under it, where the probabilities at a depth are the same on every path: best first, to the end.

    Args:
        probs: f32[B, D, K], of the best tokens of each depth, descending and at most 1; the root's children are at depth 0.
        tokens: i32[B, D, K], target's ids, distinct along the last axis.
        root: i32[B].
        width: `W`, at most 1 + K + K ** 2 + ... + K ** D.

    A node's score is the product of the probabilities from the root on. Ties go to the shallower node, then to the likelier token of its depth (of two equally
    likely ones, to that of the lower id), then to the better parent.

    Source: the tree of UNO (arXiv 2609.04010) in SGLang. A level keeps its best `W - 1` nodes, as many as any tree could need of it, so that no heap is needed.
    """
    topk, above = probs.shape[2], jnp.ones_like(probs[:, 0, :1])
    ids = jnp.full(above.shape, -1, jnp.int32)
    levels: list[Candidates] = []
    start = 0
    for level in range(probs.shape[1]):
        # By rank, then by parent.
        scores = (probs[:, level, :, None] * above[:, None, :]).reshape(above.shape[0], -1)
        best, chosen = lax.top_k(scores, min(topk * above.shape[1], width - 1))
        rank, parent = chosen // above.shape[1], chosen % above.shape[1]
        grown = jnp.take_along_axis(tokens[:, level], rank, axis=1), best, jnp.take_along_axis(ids, parent, axis=1)
        levels.append(Candidates(*grown))
        above = best
        ids = jnp.broadcast_to(start + jnp.arange(best.shape[1], dtype=jnp.int32), best.shape)
        start += best.shape[1]
    return prune(Candidates(*(jnp.concatenate(x, axis=1) for x in zip(*levels, strict=True))), root, width)


def prune(candidates: Candidates, bonus, width: int) -> Tree:
    """The tree of the pending token and the `W - 1` best candidates, in the order of the candidates.

    Args:
        candidates: tokens in the target's ids; at least `W - 1` of them.
        bonus: i32[B], the pending token.
        width: `W`.
    """
    _, chosen = lax.top_k(candidates.scores, width - 1)
    chosen = jnp.sort(chosen.astype(jnp.int32), axis=1)
    tokens = jnp.concatenate([bonus[:, None], jnp.take_along_axis(candidates.tokens, chosen, axis=1)], axis=1)
    parent_ids = jnp.take_along_axis(candidates.parents, chosen, axis=1)
    # A node is never chosen without its parent: the parent's score is as high and its index lower.
    parents = 1 + jnp.sum(chosen[:, None, :] < parent_ids[:, :, None], axis=-1, dtype=jnp.int32)
    parents = jnp.where(parent_ids < 0, ROOT, parents)
    return link(tokens, jnp.pad(parents, ((0, 0), (1, 0))))


def link(tokens, parents) -> Tree:
    """The tree of these nodes. `parents: i32[B, W]`, each smaller than the node's own index but the root's, which is 0."""
    width = tokens.shape[1]
    own = jnp.uint32(1) << jnp.arange(width, dtype=jnp.uint32)
    ancestors = jnp.broadcast_to(own, tokens.shape)
    above, levels = parents, 1
    while levels < width:  # doubling: a node knows 2, 4, 8, ... nodes of its path
        ancestors |= jnp.take_along_axis(ancestors, above, axis=1)
        above = jnp.take_along_axis(above, above, axis=1)
        levels *= 2
    depths = lax.population_count(ancestors).astype(jnp.int32) - 1
    return Tree(tokens, parents, ancestors, depths)


def accept_tree(tree: Tree, target_tokens, depth_limit, *, max_depth: int):
    """Walks from the root to the child that carries the target's own token, as long as there is one.

    Greedy or sampled, as in `accept_chain`: a sampled token is drawn first and compared afterwards. So every emitted token has the target's law, and a step
    accepts with the target's probability of the children: the rate of target-only tree sampling with thresholds of 1 (as in SGLang's default), with output
    that is plain decoding's, token for token.

    Args:
        tree: siblings carry distinct tokens.
        target_tokens: i32[B, W], the target's token after each node.
        depth_limit: i32[B], deepest node that counts; 0 accepts no draft.
        max_depth: `S`, static; no node is deeper.

    Returns:
        `accept_lens: i32[B]`, 1 to `S + 1`: accepted nodes and the bonus token; `path: i32[B, S + 1]`, the nodes of the accepted path, root first (past
        `accept_lens`: the last one again).

    Source: the tree walk of SpecInfer (arXiv 2305.09781) and EAGLE; the ancestor words make it one comparison a node.
    """
    width = tree.tokens.shape[1]
    node = jnp.arange(width, dtype=jnp.int32)
    matches = tree.tokens == jnp.take_along_axis(target_tokens, tree.parents, axis=1)
    matches = (matches & (tree.depths <= depth_limit[:, None])) | (node == ROOT)
    bits = jnp.sum(jnp.where(matches, jnp.uint32(1) << node.astype(jnp.uint32), 0), axis=1, dtype=jnp.uint32)
    accepted = (tree.ancestors & ~bits[:, None]) == 0
    accept_lens = jnp.sum(accepted, axis=1, dtype=jnp.int32)
    # Along a path, depth and index ascend together.
    last = jnp.max(jnp.where(accepted, node, 0), axis=1)
    order = jnp.sort(jnp.where(accepted, node, width), axis=1)[:, : max_depth + 1]
    order = jnp.pad(order, ((0, 0), (0, max(max_depth + 1 - width, 0))), constant_values=width)
    return accept_lens, jnp.where(order < width, order, last[:, None])
