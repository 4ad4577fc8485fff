"""Documents at random, and searches that look at every place of them."""

import math

from jspec.corpus import Source


def random_documents(rng, count, *, alphabet, longest=30):
    return [rng.integers(0, alphabet, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


def runs_of(documents, longest):
    """Every run of up to `longest` tokens."""
    return {
        tuple(doc[at : at + n])
        for doc in documents
        for at in range(len(doc))
        for n in range(1, longest + 1)
        if at + n <= len(doc)
    }


def occurrences(documents, run, *, oldest=0):
    """Numbers of the starts, counted through all documents, at which `run` occurs from `oldest` on; with the token that follows, or None."""
    found, number = [], 0
    for doc in documents:
        for at in range(len(doc)):
            if number >= oldest and tuple(doc[at : at + len(run)]) == tuple(run):
                found.append((number, doc[at + len(run)] if at + len(run) < len(doc) else None))
            number += 1
    return found


def naive_source(documents, *, oldest=0, max_depth=math.inf, by_token=False):
    """Proposes by looking everywhere. A state is a run; one longer than `max_depth` is followed where it occurred last."""

    def anchors(tail, shortest):
        found = []
        for length in range(shortest, min(len(tail), max_depth) + 1):
            run = tuple(tail[-length:])
            places = occurrences(documents, run, oldest=oldest)
            if not places:
                break
            if found and len(found[-1][1]) == len(places):
                found.pop()
            found.append((run, places))
        return [(run, None) for run, _ in reversed(found)]

    def children(state):
        run, only = state
        places = occurrences(documents, run, oldest=oldest)
        if only is not None:
            places = [place for place in places if place[0] == only]
        elif len(run) >= max_depth:
            places = places[-1:]
        following = [place for place in places if place[1] is not None]
        by = {}
        for start, token in following:
            by.setdefault(token, []).append(start)
        order = sorted(by, key=lambda token: (-len(by[token]), token if by_token else -by[token][-1]))
        last = len(run) >= max_depth
        return [(token, len(by[token]), ((*run, token), by[token][-1] if last else None)) for token in order]

    return Source(anchors, children)
