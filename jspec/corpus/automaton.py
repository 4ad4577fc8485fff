"""A suffix automaton: every run of tokens of a corpus that does not change, in a number of states linear in its length."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jspec.corpus.proposal import Source

SEPARATOR = -1
"""Stands between documents: no text holds it, so no match reaches across."""


class SuffixAutomaton(NamedTuple):
    """State 0 is the empty run. All runs of a state occur at the same places. Arrays are read-only."""

    links: Any  # i32[S]  state of the longest suffix that occurs at more places
    lengths: Any  # i32[S]  tokens of the state's longest run
    counts: Any  # i32[S]  places at which it occurs
    first: (
        Any  # i64[S + 1]  where the transitions of each state begin; they come by descending count of where they lead
    )
    tokens: Any  # i32[E]
    targets: Any  # i32[E]


def build_automaton(documents: Sequence[Sequence[int]]) -> SuffixAutomaton:
    """The automaton of some documents, at least one, none of them empty.

    Source: Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985), one token at a time; counts by the suffix links.
    """
    links, lengths, counts, edges = [-1], [0], [0], [dict[int, int]()]
    last = 0
    for token in (token for document in documents for token in (*document, SEPARATOR)):
        new = len(links)
        links.append(0)
        lengths.append(lengths[last] + 1)
        counts.append(1)
        edges.append({})
        state = last
        while state >= 0 and token not in edges[state]:
            edges[state][token] = new
            state = links[state]
        if state >= 0:
            target = edges[state][token]
            if (
                lengths[target] > lengths[state] + 1
            ):  # its longer runs do not end here: they keep the state, the others get their own
                links.append(links[target])
                lengths.append(lengths[state] + 1)
                counts.append(0)
                edges.append(dict(edges[target]))
                links[target] = len(links) - 1
                while state >= 0 and edges[state].get(token) == target:
                    edges[state][token] = len(links) - 1
                    state = links[state]
                target = links[target]
            links[new] = target
        last = new
    for state in np.argsort(lengths, kind="stable")[:0:-1].tolist():
        counts[links[state]] += counts[state]
    return _frozen(links, lengths, counts, edges)


def _frozen(links, lengths, counts, edges) -> SuffixAutomaton:
    first = np.concatenate([[0], np.cumsum([len(of) for of in edges])])
    tokens = np.fromiter((token for of in edges for token in of), np.int32, first[-1])
    targets = np.fromiter((target for of in edges for target in of.values()), np.int32, first[-1])
    occurs = np.asarray(counts, np.int32)
    states = np.repeat(np.arange(len(edges)), np.diff(first))
    order = np.lexsort((tokens, -occurs[targets], states))
    links = np.maximum(np.asarray(links, np.int32), 0)
    arrays = (links, np.asarray(lengths, np.int32), occurs, first, tokens[order], targets[order])
    for array in arrays:
        array.setflags(write=False)
    return SuffixAutomaton(*arrays)


def step(automaton: SuffixAutomaton, state: int, token: int) -> int | None:
    """The state of a run of `state` with `token` behind it; None where that does not occur."""
    begin, end = automaton.first[state : state + 2].tolist()
    (found,) = np.nonzero(automaton.tokens[begin:end] == token)
    return int(automaton.targets[begin + found[0]]) if found.size else None


def longest_suffix(automaton: SuffixAutomaton, tail: Sequence[int]) -> tuple[int, int]:
    """The longest suffix of `tail` that occurs: its state, and its length."""
    state = length = 0
    for token in tail:
        while (to := step(automaton, state, token)) is None and state:
            state = int(automaton.links[state])
            length = int(automaton.lengths[state])
        state, length = (0, 0) if to is None else (to, length + 1)
    return state, length


def source(automaton: SuffixAutomaton) -> Source:
    """Its matches and continuations. Among equally frequent continuations the one of the smaller id comes first."""

    def anchors(tail: tuple[int, ...], shortest: int) -> list[int]:
        state, length = longest_suffix(automaton, tail)
        found = []
        while state and length >= shortest:
            found.append(state)
            state = int(automaton.links[state])
            length = int(automaton.lengths[state])
        return found

    def children(state: int) -> list[tuple[int, int, int]]:
        begin, end = automaton.first[state : state + 2].tolist()
        targets = automaton.targets[begin:end]
        below = zip(
            automaton.tokens[begin:end].tolist(), automaton.counts[targets].tolist(), targets.tolist(), strict=True
        )
        return [child for child in below if child[0] != SEPARATOR]

    return Source(anchors, children)
