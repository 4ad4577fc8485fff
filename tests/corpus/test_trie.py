"""The trie against a search of all documents: what it knows, what it forgets, and that a value stays what it was."""

import numpy as np
import pytest
from corpus.kit import naive_source, occurrences, random_documents, runs_of

from jspec.corpus import empty_trie, insert, propose, trie

DEPTH = 4


def filled(documents, **sizes):
    found = empty_trie(**{"max_depth": DEPTH, **sizes})
    for document in documents:
        found = insert(found, document)
    return found


def nodes_of(children):
    """`(run, node)` of every node, the longest of its runs."""
    for token, node in children.items():
        own = node.text[node.begin : node.begin + node.length]
        assert own[0] == token and len(own) == node.length
        yield own, node
        yield from (((*own, *run), below) for run, below in nodes_of(node.children))


def shape(found):
    return {run: (node.frequency, node.recency, node.length) for run, node in nodes_of(found.children)}


def check(found, documents):
    """All that it says of any run, against the documents; `documents` from the first ever inserted on."""
    runs = runs_of(documents, DEPTH)
    for run in runs | {(*run[:-1], run[-1] + 1) for run in runs}:
        places, place = occurrences(documents, run, oldest=found.oldest), trie.find(found, run)
        if not places:
            assert place is None, run
        else:
            assert (place.node.frequency, place.node.recency) == (len(places), places[-1][0]), run
            assert place.follows == places[-1][1]
    for run, node in nodes_of(found.children):
        assert len(run) <= DEPTH
        assert [child.frequency for child in node.children.values()] != [node.frequency], "two nodes of the same runs"
    assert found.num_nodes == sum(1 for _ in nodes_of(found.children)) <= found.capacity
    assert found.next_start == sum(map(len, documents))


@pytest.mark.parametrize("alphabet", [1, 2, 3, 8])
def test_random_walks_without_a_limit(alphabet):
    rng = np.random.default_rng(alphabet)
    for _ in range(5):
        documents = random_documents(rng, 6, alphabet=alphabet)
        found = filled(documents)
        assert found.oldest == 0
        check(found, documents)


@pytest.mark.parametrize("alphabet", [1, 2, 5])
def test_random_walks_at_capacity(alphabet):
    """The window is the longest that fits: with one start more there would be too many nodes. It ends up as if the rest had never been there."""
    rng, evicted = np.random.default_rng(alphabet), 0
    for _ in range(4):
        documents, found = [], empty_trie(max_depth=DEPTH, capacity=6 if alphabet < 5 else 20)
        for document in random_documents(rng, 8, alphabet=alphabet):
            documents.append(document)
            found = insert(found, document)
            check(found, documents)
        evicted += found.oldest
        whole = filled(documents)
        while whole.oldest < found.oldest:
            before, whole = whole, trie._evict(whole)
        assert shape(whole) == shape(found) and whole.num_nodes == found.num_nodes
        assert (whole.documents, whole.begin) == (found.documents, found.begin)
        assert not found.oldest or before.num_nodes > found.capacity
    assert bool(evicted) == (alphabet > 1)  # a single token needs DEPTH nodes, however often it comes


def test_what_is_used_again_stays():
    """Least recently used goes first: a phrase that keeps coming outlives younger ones that came once."""
    phrase = [1, 2, 3]
    found = empty_trie(max_depth=DEPTH, capacity=30)
    for i in range(20):
        found = insert(found, [*phrase, *range(100 + 10 * i, 105 + 10 * i)])
    assert trie.find(found, (1, 2, 3)) is not None
    assert trie.find(found, (290, 291)) is not None
    assert trie.find(found, (100, 101)) is None and trie.find(found, (200, 201)) is None
    assert len(found.documents) < 10


def test_a_value_stays_what_it_was():
    rng = np.random.default_rng(0)
    documents = random_documents(rng, 12, alphabet=3)
    values = [empty_trie(max_depth=DEPTH, capacity=40)]
    for document in documents:
        values.append(insert(values[-1], document))
    again = insert(values[3], [7, 7, 7])  # another future of an old value
    assert trie.find(again, (7, 7)).node.frequency == 2 and trie.find(values[4], (7, 7)) is None
    assert values[-1].oldest > 0
    for count, value in enumerate(values):
        check(value, documents[:count])
    assert insert(values[5], []) is values[5]


def test_a_token_costs_two_nodes_at_most():
    """Text that comes again costs none, and no time: where it parts from what came before is what counts."""
    rng = np.random.default_rng(0)
    document = rng.integers(0, 1000, 2000).tolist()
    once = filled([document], max_depth=18)
    assert 2000 <= once.num_nodes < 2 * 2000
    again = insert(insert(once, document), document)
    assert once.num_nodes <= again.num_nodes < once.num_nodes + 18
    run = tuple(document[100:118])
    assert trie.find(once, run).node.recency == 100 and trie.find(once, (*run[:-1], 1000)) is None
    assert trie.find(again, run).node[:2] == (3, 4100)


@pytest.mark.parametrize("alphabet", [2, 4])
def test_proposals_are_those_of_a_search_everywhere(alphabet):
    rng = np.random.default_rng(alphabet)
    sizes = {"shortest": 1, "window": 6, "windows": 2}
    proposed = 0
    for capacity in (1 << 20, 24):
        documents = random_documents(rng, 5, alphabet=alphabet)
        found = filled(documents, capacity=capacity)
        assert (found.oldest > 0) == (capacity == 24)
        naive = naive_source(documents, oldest=found.oldest, max_depth=DEPTH)
        for _ in range(25):
            tail = tuple(rng.integers(0, alphabet, 8).tolist())
            draft = propose([trie.source(found)], tail, **sizes)
            assert draft == propose([naive], tail, **sizes)
            proposed += len(draft.tokens)
    assert proposed > 100


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_depth": 0}, "max_depth=0 must be at least 1"),
        ({"max_depth": 65}, "max_depth=65 must be at least 1.* at most 64"),
        ({"capacity": 0}, "capacity=0 must be at least 1 node"),
    ],
)
def test_sizes_that_make_no_sense(sizes, message):
    with pytest.raises(ValueError, match=message):
        empty_trie(**sizes)
