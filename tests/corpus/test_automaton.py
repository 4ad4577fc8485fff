"""The suffix automaton against a search of all documents."""

import numpy as np
import pytest
from corpus.kit import naive_source, occurrences, random_documents, runs_of

from jspec.corpus import automaton, build_automaton, propose


def state_of(found, run):
    state = 0
    for token in run:
        state = automaton.step(found, state, token)
        if state is None:
            return None
    return state


@pytest.mark.parametrize("alphabet", [1, 2, 3, 8])
def test_every_run_and_how_often_it_occurs(alphabet):
    rng = np.random.default_rng(alphabet)
    for _ in range(4):
        documents = random_documents(rng, 4, alphabet=alphabet)
        found = build_automaton(documents)
        assert len(found.links) <= 2 * sum(len(document) + 1 for document in documents)
        runs = runs_of(documents, 30)
        across = {(*a, *b) for a in documents for b in documents} | {(*run, alphabet) for run in runs}
        for run in runs | across:
            places, state = occurrences(documents, run), state_of(found, run)
            assert (state is not None) == bool(places)
            if state is not None:
                assert found.counts[state] == len(places) and found.lengths[state] >= len(run)


@pytest.mark.parametrize("alphabet", [2, 5])
def test_the_longest_suffix(alphabet):
    rng = np.random.default_rng(alphabet)
    documents = random_documents(rng, 3, alphabet=alphabet)
    found = build_automaton(documents)
    lengths = set()
    for _ in range(100):
        tail = rng.integers(0, alphabet + 1, 12).tolist()
        state, length = automaton.longest_suffix(found, tail)
        naive = max(n for n in range(13) if n == 0 or occurrences(documents, tail[-n:]))
        assert length == naive and state == state_of(found, tail[len(tail) - length :])
        lengths.add(length)
    assert len(lengths) > 3


@pytest.mark.parametrize("alphabet", [2, 4])
def test_proposals_are_those_of_a_search_everywhere(alphabet):
    rng = np.random.default_rng(alphabet)
    documents = random_documents(rng, 5, alphabet=alphabet)
    found, naive = automaton.source(build_automaton(documents)), naive_source(documents, by_token=True)
    for _ in range(25):
        tail = tuple(rng.integers(0, alphabet, 8).tolist())
        for shortest in (1, 3):
            sizes = {"shortest": shortest, "window": 6, "windows": 2}
            assert propose([found], tail, **sizes) == propose([naive], tail, **sizes)


def test_it_cannot_be_written_to():
    for array in build_automaton([[1, 2, 1]]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
