"""Draft trees made of what followed in a corpus where the text last was as it is now."""

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

MAX_BRANCHES = 10
"""Continuations of a node that are looked at, the most frequent ones (the largest breadth of SGLang's n-gram worker)."""


class Source(NamedTuple):
    """A corpus that proposes. What a state is, only the source knows."""

    anchors: Callable[[tuple[int, ...], int], list[Any]]
    """`anchors(tail, shortest) -> states`: where suffixes of the tail of at least `shortest` tokens occur, longest first; of those that occur at the same places
    the longest alone."""
    children: Callable[[Any], list[tuple[int, int, Any]]]
    """`children(state) -> (token, count, state)` of each continuation, the most frequent first."""


class Draft(NamedTuple):
    """A tree of drafts. Node 0 is the last token of the text; the others are listed here, each after its parent."""

    tokens: tuple[int, ...]  # of node 1, 2, ...
    parents: tuple[int, ...]  # index of the parent, 0 for the root


def best_first(source: Source, tail: tuple[int, ...], *, shortest: int, limit: int) -> Iterator[tuple[int, ...]]:
    """Continuations of `tail`, as paths from its end; each after the one that it extends, and some more than once.

    The longest match speaks first, at most `limit` times, then the next longest. Of a match, the path comes first whose product of normalised frequencies is
    largest; ties go to the shorter path, then to the one found first, which is the better child of the better parent.
    """
    for anchor in source.anchors(tail, shortest):
        order = itertools.count()
        heap: list[tuple[float, int, int, tuple[int, ...], Any]] = [(-1.0, 0, next(order), (), anchor)]
        for _ in range(limit + 1):
            if not heap:
                break
            score, depth, _, path, state = heapq.heappop(heap)
            if path:
                yield path
            below = source.children(state)
            total = sum(count for _, count, _ in below)
            for token, count, child in below[:MAX_BRANCHES]:
                heapq.heappush(heap, (score * count / total, depth + 1, next(order), (*path, token), child))


def propose(
    sources: Sequence[Source], tail: tuple[int, ...], *, shortest: int, window: int, windows: int, share: int = 0
) -> Draft:
    """One tree of what all sources propose to follow `tail`, equal paths merged.

    Of each `window` nodes the first source has the first ones, the last source the last `share`; what one leaves the other takes.

    Args:
        sources: one or two.
        tail: the last tokens of a text.
        shortest: tokens of the shortest match that proposes.
        window: nodes that one verify has room for.
        windows: how many times that many are proposed.
        share: nodes of each window kept for the last source, at most `window`.
    """
    paths = [best_first(source, tail, shortest=shortest, limit=window * windows) for source in sources]
    index: dict[tuple[int, ...], int] = {(): 0}

    def take(proposed: Iterator[tuple[int, ...]], most: int) -> None:
        while len(index) <= most and (path := next(proposed, None)) is not None:
            index.setdefault(path, len(index))

    for end in range(window, window * windows + 1, window):
        take(paths[0], end - share)
        take(paths[-1], end)
        take(paths[0], end)
    found = list(index)[1:]
    return Draft(tuple(path[-1] for path in found), tuple(index[path[:-1]] for path in found))
