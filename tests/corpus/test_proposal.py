"""Draft trees of one corpus and of two: what comes first, what is merged, what is kept for whom."""

import numpy as np
import pytest
from corpus.kit import random_documents

from jspec.corpus import Draft, automaton, build_automaton, empty_trie, insert, propose, trie
from jspec.corpus.proposal import best_first


def of_trie(*documents):
    found = empty_trie()
    for document in documents:
        found = insert(found, document)
    return trie.source(found)


def of_automaton(*documents):
    return automaton.source(build_automaton(documents))


def paths(draft):
    """The path of each node; its parent comes before it, and no two are the same."""
    found = [()]
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True), 1):
        assert 0 <= parent < node
        found.append((*found[parent], token))
    assert len(set(found)) == len(found), "siblings that say the same"
    return found[1:]


@pytest.mark.parametrize("source", [of_trie, of_automaton])
def test_by_hand(source):
    """After 1 2 came 3 4 twice, 5 once: 3 and 4 have two thirds each, 5 one third, so does 8 after 3 4, and 9."""
    found = source([1, 2, 3, 4, 8], [1, 2, 5], [1, 2, 3, 4, 9])
    draft = propose([found], (7, 1, 2), shortest=2, window=5, windows=1)
    third = [(3, 4, 9), (3, 4, 8)] if source is of_trie else [(3, 4, 8), (3, 4, 9)]
    assert paths(draft) == [(3,), (3, 4), (5,), *third]
    assert draft == Draft((3, 4, 5, *(path[-1] for path in third)), (0, 1, 0, 2, 2))
    assert propose([found], (7, 1, 2), shortest=2, window=3, windows=1) == Draft((3, 4, 5), (0, 1, 0))
    assert propose([found], (7, 1, 2), shortest=3, window=5, windows=1) == Draft((), ())
    assert propose([found], (), shortest=1, window=5, windows=1) == Draft((), ())


@pytest.mark.parametrize("source", [of_trie, of_automaton])
def test_the_longest_match_speaks_first(source):
    """1 2 3 was followed by 4 once, 2 3 alone by 5 three times: 4 comes first all the same, and 5 beside it."""
    found = source([1, 2, 3, 4], *[[9, 2, 3, 5]] * 3)
    assert paths(propose([found], (1, 2, 3), shortest=2, window=4, windows=1)) == [(4,), (5,)]


def test_long_text_is_followed_past_the_depth_of_the_trie():
    document = list(range(60))
    found = of_trie(document, document)
    assert propose([found], tuple(range(20)), shortest=2, window=30, windows=1).tokens == tuple(range(20, 50))


@pytest.mark.parametrize("source", [of_trie, of_automaton])
def test_best_first(source):
    """Scores do not rise while one match speaks, what it says first are its best paths, and a path follows the one it extends."""
    rng = np.random.default_rng(0)
    documents = random_documents(rng, 20, alphabet=3)
    found = source(*documents)
    for _ in range(20):
        tail = tuple(rng.integers(0, 3, 3).tolist())
        anchors = found.anchors(tail, 2)
        if not anchors:
            continue

        def scored(state, path=(), score=1.0):
            below = found.children(state)
            total = sum(count for _, count, _ in below)
            for token, count, child in below:
                yield (*path, token), score * count / total
                if score * count / total > 0.05:
                    yield from scored(child, (*path, token), score * count / total)

        score = dict(scored(anchors[0]))
        said = []
        for path in best_first(found, tail, shortest=2, limit=12):
            if path in said or path not in score:
                break  # the next match speaks
            said.append(path)
        said = said[:12]
        values = [score[path] for path in said]
        assert values == sorted(values, reverse=True)
        assert values == sorted(score.values(), reverse=True)[: len(values)]
        assert all(path[:-1] in ((), *said[:i]) for i, path in enumerate(said))


@pytest.mark.parametrize("seed", range(5))
def test_two_corpora_in_one_tree(seed):
    """Each window has what one proposes first, then the share of the other; what both say is there once, and no place stays empty that either could fill."""
    rng = np.random.default_rng(seed)
    ours, theirs = (random_documents(rng, 6, alphabet=4) for _ in range(2))
    sources = [of_trie(*ours), of_automaton(*theirs)]
    tail, window, windows = tuple(rng.integers(0, 4, 6).tolist()), 6, 2
    limits = {"shortest": 1, "limit": window * windows}
    alone = [list(dict.fromkeys(best_first(source, tail, **limits))) for source in sources]
    for share in range(window + 1):
        found = paths(propose(sources, tail, shortest=1, window=window, windows=windows, share=share))
        assert len(found) == window * windows
        first = alone[0][: window - share]
        others = [path for path in alone[1] if path not in first][:share]
        assert found[:window] == first + others
        assert set(found) <= set(alone[0]) | set(alone[1])


def test_what_one_leaves_the_other_takes():
    ours, theirs = of_trie([1, 2, 3]), of_automaton([1, 2, *range(10, 20)])
    sizes = {"window": 4, "windows": 1, "shortest": 2}
    assert paths(propose([ours, theirs], (1, 2), **sizes, share=1)) == [(3,), (10,), (10, 11), (10, 11, 12)]
    ours, theirs = of_trie([1, 2, *range(10, 20)]), of_automaton([1, 2, 3])
    assert paths(propose([ours, theirs], (1, 2), **sizes, share=3)) == [(10,), (3,), (10, 11), (10, 11, 12)]
    assert paths(propose([ours, ours], (1, 2), **sizes, share=2)) == [
        (10,),
        (10, 11),
        (10, 11, 12),
        (10, 11, 12, 13),
    ]
