"""Drafts of several origins made into one tree: the part of a proposal that what was emitted since has left open, and a chain as one more branch."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from jspec.spec_workers.chain import Proposal
from jspec.spec_workers.tree import ROOT, Tree, link


class Nodes(NamedTuple):
    """A tree under construction, for every row. `N` places, node 0 the root; the nodes come first, each after its parent, and free places behind them."""

    tokens: Any  # i32[B, N]  the root's is not looked at; -1 at a free place
    parents: Any  # i32[B, N]  smaller than the node's own index; 0 for the root and at a free place

    @property
    def num_nodes(self):
        """`i32[B]`, the root included."""
        return 1 + jnp.sum(self.tokens[:, 1:] >= 0, axis=1, dtype=jnp.int32)


def _along(parents, values, combine):
    """What `combine` makes of the values on each node's path to the root: by doubling, a node knows 2, 4, 8, ... of them. `combine` must bear the root more than
    once."""
    reached = 1
    while reached < parents.shape[1]:
        values = combine(values, jnp.take_along_axis(values, parents, axis=1))
        parents = jnp.take_along_axis(parents, parents, axis=1)
        reached *= 2
    return values


def follow(nodes: Nodes, path, length):
    """How far a path leads down a tree.

    Args:
        path: i32[B, D], the tokens after the root.
        length: i32[B], how many of them count.

    Returns:
        `place, depth: i32[B]`: the deepest node that lies on the path, and how many of its tokens lead there.
    """
    tokens, parents = nodes
    one = jnp.minimum(jnp.arange(tokens.shape[1], dtype=jnp.int32), 1)
    depths = _along(parents, jnp.broadcast_to(one, tokens.shape), jnp.add)
    expected = jnp.take_along_axis(path, jnp.clip(depths - 1, 0, path.shape[1] - 1), axis=1)
    fits = (tokens == expected) & (tokens >= 0) & (depths <= jnp.minimum(length, path.shape[1])[:, None])
    fits = _along(parents, fits | (depths == 0), jnp.logical_and)
    depths = jnp.where(fits, depths, 0)
    return jnp.argmax(depths, axis=1).astype(jnp.int32), jnp.max(depths, axis=1)


def below(nodes: Nodes, place, width: int) -> Nodes:
    """The tree under the node `place: i32[B]`, which becomes its root: the first `width - 1` nodes of it."""
    tokens, parents = nodes
    own = jnp.arange(tokens.shape[1], dtype=jnp.int32) == place[:, None]
    inside = _along(parents, own, jnp.logical_or) & ~own & (tokens >= 0)
    ranks = jnp.cumsum(inside, axis=1, dtype=jnp.int32) * inside  # 0 outside, so that its children hang under the root
    row = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
    to = jnp.where(inside, ranks, width)
    kept = jnp.full((tokens.shape[0], width), -1, jnp.int32).at[row, to].set(tokens, mode="drop")
    above = jnp.zeros_like(kept).at[row, to].set(jnp.take_along_axis(ranks, parents, axis=1), mode="drop")
    return Nodes(kept, above)


def descend(nodes: Nodes, history, lens, settled, width: int) -> Nodes:
    """What is left of a proposal that is older than the text: the tree below the place to which the tokens since have led; nothing where they left it.

    Args:
        nodes: proposed to follow the first `settled` tokens, the root the last of these.
        history: i32[B, L], the row's tokens.
        lens: i32[B], how many of them there are; 0 proposes nothing.
        settled: i32[B].
        width: as of `below`.
    """
    since = settled[:, None] + jnp.arange(nodes.tokens.shape[1] - 1, dtype=jnp.int32)
    path = jnp.take_along_axis(history, jnp.clip(since, 0, history.shape[1] - 1), axis=1)
    place, reached = follow(nodes, path, lens - settled)
    left = below(nodes, place, width)
    there = ((reached == lens - settled) & (lens > 0))[:, None]
    return Nodes(jnp.where(there, left.tokens, -1), jnp.where(there, left.parents, 0))


def add_chain(nodes: Nodes, chain: Proposal) -> Nodes:
    """`nodes` with a chain as one more branch: what of it the tree has already is not added, nor what finds no free place."""
    place, depth = follow(nodes, chain.tokens, chain.num_drafts)
    used = nodes.num_nodes
    offset = jnp.arange(nodes.tokens.shape[1], dtype=jnp.int32) - used[:, None]  # of each place among the free ones
    new = (offset >= 0) & (offset < (chain.num_drafts - depth)[:, None])
    index = jnp.clip(depth[:, None] + offset, 0, chain.tokens.shape[1] - 1)
    tokens = jnp.where(new, jnp.take_along_axis(chain.tokens, index, axis=1), nodes.tokens)
    above = jnp.where(offset == 0, place[:, None], used[:, None] + offset - 1)
    return Nodes(tokens, jnp.where(new, above, nodes.parents))


def as_tree(nodes: Nodes, root) -> Tree:
    """What a verify checks: `root: i32[B]` with its drafts. Free places are deeper than any draft, so that no walk goes there."""
    free = (nodes.tokens < 0).at[:, ROOT].set(False)
    tree = link(jnp.where(free, 0, nodes.tokens).at[:, ROOT].set(root), nodes.parents)
    return tree._replace(depths=jnp.where(free, nodes.tokens.shape[1], tree.depths))
