"""Names of pages: equal where every token up to a page's end, and those its draft looks ahead to, are equal, and nowhere else."""

import collections
import hashlib

import numpy as np
import pytest

from jspec.state.prefix_cache import page_keys

SIZES = [(1, 0), (4, 0), (4, 1), (4, 3), (16, 0), (16, 1)]
"""Page size and lookahead."""


def keys_of(tokens, page_size=4, lookahead=0, **given):
    return page_keys(np.array(tokens, np.int32), page_size=page_size, lookahead=lookahead, **given)


def slow_names(tokens, page_size, lookahead):
    """What a page's name stands for: the tokens themselves."""
    pages = max(len(tokens) - lookahead, 0) // page_size
    return [tuple(tokens[: (i + 1) * page_size + lookahead]) for i in range(pages)]


def test_by_hand():
    """A page's name is that of the page before and of its own tokens, and those behind it that are looked ahead to, as 32-bit numbers."""
    tokens, one = [5, 6, 7, 8, 9], np.int32
    first = hashlib.blake2b(np.array([5, 6], one).tobytes(), digest_size=16).digest()
    second = hashlib.blake2b(first + np.array([7, 8], one).tobytes(), digest_size=16).digest()
    assert keys_of(tokens, 2) == (first, second)
    first = hashlib.blake2b(np.array([5, 6, 7], one).tobytes(), digest_size=16).digest()
    second = hashlib.blake2b(first + np.array([7, 8, 9], one).tobytes(), digest_size=16).digest()
    assert keys_of(tokens, 2, 1) == (first, second)


@pytest.mark.parametrize(("page_size", "lookahead"), SIZES)
def test_as_many_as_there_are_whole_pages(page_size, lookahead):
    """A page that what is looked ahead to does not follow has no name yet."""
    for length in range(3 * page_size + lookahead + 2):
        keys = keys_of(range(length), page_size, lookahead)
        assert len(keys) == len(slow_names(list(range(length)), page_size, lookahead))
        assert isinstance(keys, tuple) and all(isinstance(key, bytes) and len(key) == 16 for key in keys)
        assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(("page_size", "lookahead"), SIZES)
def test_equal_names_mean_equal_tokens_and_the_other_way_round(page_size, lookahead):
    """Thousands of pages of random sequences that have beginnings in common, over few tokens: two names are equal exactly where all they stand for is."""
    rng = np.random.default_rng([page_size, lookahead])
    stems, names, keys = [[]], {}, {}
    met = collections.Counter()
    for _ in range(1500):
        stem = stems[rng.integers(0, len(stems))]
        stem = stem[: rng.integers(0, len(stem) + 1)]
        tokens = stem + rng.integers(0, 2, rng.integers(0, 4 * page_size + 3)).tolist()
        stems.append(tokens)
        found = keys_of(tokens, page_size, lookahead)
        for name, key in zip(slow_names(tokens, page_size, lookahead), found, strict=True):
            met[name] += 1
            assert keys.setdefault(name, key) == key
            assert names.setdefault(key, name) == name
    assert len(keys) > 300
    assert max(met.values()) > 3  # the same prefix was met again


@pytest.mark.parametrize(("page_size", "lookahead"), SIZES)
def test_one_other_token_changes_its_page_and_all_behind_it(page_size, lookahead):
    """And the page that looks ahead to it; those before keep their names."""
    rng = np.random.default_rng([page_size, lookahead])
    tokens = rng.integers(0, 50_000, 5 * page_size + lookahead)
    before = keys_of(tokens, page_size, lookahead)
    assert len(before) == 5
    for place in range(len(tokens)):
        other = tokens.copy()
        other[place] += 1
        after = keys_of(other, page_size, lookahead)
        first = next(i for i in range(5) if place < (i + 1) * page_size + lookahead)
        assert [a == b for a, b in zip(after, before, strict=True)] == [i < first for i in range(5)]


def test_equal_pages_at_other_places_have_other_names():
    """A page is not its own tokens, but all up to its end; and what a token is matters, not which tokens there are."""
    assert len(set(keys_of([1, 2, 3, 4] * 5))) == 5
    assert len(set(keys_of([0] * 20))) == 5
    assert keys_of([1, 2, 3, 4]) != keys_of([4, 3, 2, 1])
    assert keys_of([0, 0, 0, 1]) != keys_of([0, 0, 1, 0])
    assert keys_of([256, 0, 0, 0]) != keys_of([1, 0, 0, 0])


def test_what_is_looked_ahead_to_is_part_of_a_name():
    """Two prompts that part right behind a page: with a draft that has seen the next token they share no page there, without one they do."""
    ours, theirs = [*range(8), 50], [*range(8), 60]
    assert keys_of(ours) == keys_of(theirs)
    ours, theirs = keys_of(ours, lookahead=1), keys_of(theirs, lookahead=1)
    assert ours[0] == theirs[0] and ours[1] != theirs[1]


@pytest.mark.parametrize(("page_size", "lookahead"), SIZES)
def test_known_names_are_gone_on_from(page_size, lookahead):
    """From any number of them, to the names of the whole; they are taken as they are, so that other beginnings give other names."""
    tokens = np.random.default_rng(1).integers(0, 9, 4 * page_size + lookahead + 2)
    whole = keys_of(tokens, page_size, lookahead)
    for count in range(len(whole) + 1):
        assert keys_of(tokens, page_size, lookahead, known=whole[:count]) == whole
    foreign = keys_of(tokens, page_size, lookahead, known=(b"0" * 16,))
    assert foreign[0] == b"0" * 16 and not set(foreign) & set(whole) and len(foreign) == len(whole)


def test_names_of_a_prompt_go_on_into_its_output():
    """As an engine makes them: of the prompt when it comes, of all its tokens when it ends."""
    for lookahead in (0, 1, 3):
        tokens = np.random.default_rng(2).integers(0, 99, 40)
        for prompt_len in range(1, 40):
            prompt = keys_of(tokens[:prompt_len], 4, lookahead)
            for length in (prompt_len, min(prompt_len + 5, 40), 40):
                whole = keys_of(tokens[:length], 4, lookahead)
                assert whole[: len(prompt)] == prompt
                assert keys_of(tokens[:length], 4, lookahead, known=prompt) == whole


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16, np.uint32])
def test_the_type_of_the_tokens_does_not_matter(dtype):
    """Nor how they lie in memory, nor whether they may be written."""
    tokens = np.random.default_rng(3).integers(0, 50_000, 20)
    wanted = keys_of(tokens)
    wide = np.zeros((20, 3), dtype)
    wide[:, 1] = tokens
    column = wide[:, 1]
    assert not column.flags.c_contiguous
    frozen = tokens.astype(dtype)
    frozen.setflags(write=False)
    for same in (column, frozen, np.array(tokens[::-1].astype(dtype))[::-1], tokens.astype(dtype).tolist()):
        assert page_keys(same, page_size=4) == wanted


def test_too_few_tokens_have_no_names():
    for length in range(4):
        assert keys_of(range(length)) == keys_of(range(length + 3), lookahead=3) == ()
    assert keys_of([]) == keys_of([], lookahead=5) == ()
