"""A trie of all runs of tokens that begin in a sliding window over the documents inserted, each with its frequency and recency.

Runs that occur at the same places share a node (a compact trie): there is one only where runs part from each other, so a token costs two at most, however long
the runs are. The trie is a function of its window, not of how it came about. Maps are persistent: a new value shares what it did not change.
"""

from typing import NamedTuple

from rpds import HashTrieMap

from jspec.corpus.proposal import Source


class Node(NamedTuple):
    """Runs that occur at the same places, one `text[begin : begin + n]` for each `n` up to `length`, behind the run that leads here."""

    frequency: int  # starts in the window at which they occur
    recency: int  # the latest of these starts
    text: tuple[int, ...]  # the document of that occurrence
    begin: int
    length: int
    children: "HashTrieMap[int, Node]"  # by their first token; no single one that is as frequent as this


class Place(NamedTuple):
    """A run that occurs, as far down a node as it goes."""

    node: Node
    length: int  # tokens of the node that the run has; past the deepest nodes, of their latest occurrence

    @property
    def follows(self) -> int | None:
        """The token behind the latest occurrence."""
        end = self.node.begin + self.length
        return self.node.text[end] if end < len(self.node.text) else None


class Trie(NamedTuple):
    """Starts are numbered through, document after document. The window holds those from `oldest` to the last one."""

    children: "HashTrieMap[int, Node]"  # of the root
    documents: tuple[tuple[int, ...], ...]  # those with starts in the window, oldest first
    oldest: int  # number of the oldest start, which lies in the first of the documents
    begin: int  # number of that document's first start
    next_start: int  # number of the first start of the next document
    num_nodes: int  # root not counted
    max_depth: int  # longest run that is counted
    capacity: int  # nodes that are kept


NONE: "HashTrieMap[int, Node]" = HashTrieMap()


def empty_trie(*, max_depth: int = 18, capacity: int = 1 << 18) -> Trie:
    """Nothing inserted yet.

    Args:
        max_depth: tokens of the longest run that is counted; longer ones are followed along their latest occurrence.
        capacity: most nodes, about 300 bytes each.

    Raises:
        ValueError: sizes that make no sense.
    """
    if not 1 <= max_depth <= 64:
        raise ValueError(f"max_depth={max_depth} must be at least 1, a run of one token, and at most 64")
    if capacity < 1:
        raise ValueError(f"capacity={capacity} must be at least 1 node: raise it")
    return Trie(NONE, (), 0, 0, 0, 0, max_depth, capacity)


def insert(trie: Trie, tokens) -> Trie:
    """`trie` with one more document: every run in it of up to `max_depth` tokens, none of which reaches into another document.

    Where more nodes would be needed than `capacity`, the oldest starts leave the window: a run goes with its latest occurrence, so the least recently used
    go first, and what is left is counted as if it had always been alone.

    Args:
        trie: left as it is.
        tokens: the document's ids, a sequence of integers.
    """
    text = tuple(map(int, tokens))
    if not text:
        return trie
    trie = trie._replace(documents=(*trie.documents, text))
    for at in range(len(text)):
        children, added = _add(trie.children, text, at, trie.next_start, trie.max_depth)
        trie = trie._replace(children=children, num_nodes=trie.num_nodes + added, next_start=trie.next_start + 1)
        while trie.num_nodes > trie.capacity:
            trie = _evict(trie)
    return trie


def _evict(trie: Trie) -> Trie:
    """Without the oldest start."""
    text = trie.documents[0]
    at = trie.oldest - trie.begin
    children, removed = _drop(trie.children, text[at : at + trie.max_depth])
    trie = trie._replace(children=children, num_nodes=trie.num_nodes - removed, oldest=trie.oldest + 1)
    if at + 1 == len(text):
        trie = trie._replace(documents=trie.documents[1:], begin=trie.oldest)
    return trie


def _add(children, text: tuple[int, ...], at: int, start: int, levels: int):
    """`children` with the runs from `text[at]` on of up to `levels` tokens, and how many nodes that adds."""
    found, end = children.get(text[at]), min(at + levels, len(text))
    if found is None:
        return children.insert(text[at], Node(1, start, text, at, end - at, NONE)), 1
    below, common, added = found.children, _common(found, text[at:end]), 0
    if common < found.length:  # here they part, or the document ends
        rest = found._replace(begin=found.begin + common, length=found.length - common)
        below, added = NONE.insert(rest.text[rest.begin], rest), 1
    if at + common < end:
        below, more = _add(below, text, at + common, start, levels - common)
        added += more
    return children.insert(text[at], Node(found.frequency + 1, start, text, at, common, below)), added


def _common(node: Node, run: tuple[int, ...]) -> int:
    """How many tokens of a node a run begins with."""
    run, own = run[: node.length], node.text[node.begin : node.begin + node.length]
    if run == own:
        return node.length
    return next((n for n, (a, b) in enumerate(zip(run, own, strict=False)) if a != b), len(run))


def _drop(children, run: tuple[int, ...]):
    """The inverse of `_add`, for the oldest start, whose longest run is `run`; and how many nodes less that makes."""
    found = children[run[0]]
    if found.frequency == 1:
        return children.remove(run[0]), 1
    below, removed = found.children, 0
    if len(run) > found.length:
        below, removed = _drop(below, run[found.length :])
    left = found._replace(frequency=found.frequency - 1, children=below)
    if len(below) == 1 and (only := next(iter(below.values()))).frequency == left.frequency:
        left = left._replace(length=left.length + only.length, children=only.children)
        removed += 1
    return children.insert(run[0], left), removed


def find(trie: Trie, run: tuple[int, ...]) -> Place | None:
    """Where a run of 1 to `max_depth` tokens is; None where it does not occur."""
    children = trie.children
    while True:
        node = children.get(run[0])
        if node is None:
            return None
        if len(run) <= node.length:
            return Place(node, len(run)) if _common(node, run) == len(run) else None
        if _common(node, run) < node.length:
            return None
        run, children = run[node.length :], node.children


def source(trie: Trie) -> Source:
    """Its matches and continuations. Among equally frequent continuations the more recent comes first."""

    def anchors(tail: tuple[int, ...], shortest: int) -> list[Place]:
        found: list[Place] = []
        for length in range(shortest, min(len(tail), trie.max_depth) + 1):
            place = find(trie, tail[-length:])
            if place is None:
                break
            if found and found[-1].node.frequency == place.node.frequency:
                found.pop()  # the same occurrences, so the same continuations
            found.append(place)
        return found[::-1]

    def children(place: Place) -> list[tuple[int, int, Place]]:
        node, length = place
        if length >= node.length and node.children:
            below = sorted(node.children.items(), key=lambda item: (-item[1].frequency, -item[1].recency))
            return [(token, child.frequency, Place(child, 1)) for token, child in below]
        token = place.follows
        return [] if token is None else [(token, node.frequency, Place(node, length + 1))]

    return Source(anchors, children)
