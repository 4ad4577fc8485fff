"""Nodes expanded by several processes."""

import multiprocessing
import pickle
from collections.abc import Iterator

from jspec.explore.config import ExploreConfig
from jspec.explore.expansion import Expander, Expansion, Shape, shape_of
from jspec.explore.moves import Moves
from jspec.explore.node import Node

_CHUNK = 16
"""Nodes that a process takes at once."""


class ExpandingPool:
    """Processes that expand nodes. A node crosses pickled, and is not unpickled here; each process sends a node once.

    Args:
        config: what is explored.
        jobs: processes.
    """

    def __init__(self, config: ExploreConfig, jobs: int):
        # JAX has threads, so processes are made anew, not forked.
        self._pool = multiprocessing.get_context("spawn").Pool(jobs, _start, (config,))

    def __enter__(self) -> "ExpandingPool":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.terminate()
        self._pool.join()

    def pack(self, node: Node) -> bytes:
        """A node as it crosses."""
        return pickle.dumps(node, pickle.HIGHEST_PROTOCOL)

    def expand(self, nodes: list[bytes]) -> Iterator[tuple[Expansion, dict[bytes, tuple[Shape, bytes]]]]:
        """Of each node what follows, in order, and the nodes that are new."""
        found: dict[bytes, tuple[Shape, bytes]] = {}
        for expansion, children in self._pool.imap(_expand, nodes, chunksize=_CHUNK):
            found.update(children)  # a process that finds it later does not send it again
            yield expansion, found


class _Worker:
    """What a process holds."""

    expander: Expander
    sent: set[bytes]


def _start(config: ExploreConfig) -> None:
    _Worker.expander, _Worker.sent = Expander(Moves(config)), set()


def _expand(packed: bytes) -> tuple[Expansion, dict[bytes, tuple[Shape, bytes]]]:
    expander = _Worker.expander
    expansion, children = expander.expand(pickle.loads(packed))
    new = {}
    for key, child in children.items():
        if key not in _Worker.sent:
            _Worker.sent.add(key)
            new[key] = shape_of(expander.moves, child), pickle.dumps(child, pickle.HIGHEST_PROTOCOL)
    return expansion, new
