"""Prompts to train on."""

import itertools

from jspec.bench.prompts import load_prompt_sets
from jspec.training.prompts import overlaps, training_prompts, word_runs


def first(count, seed=0):
    return list(itertools.islice(training_prompts(seed), count))


def test_the_same_seed_gives_the_same_prompts_and_another_one_others():
    assert first(50) == first(50) != first(50, seed=1)


def test_no_prompt_repeats_eight_words_of_the_bundled_set():
    unseen = word_runs(load_prompt_sets(["bundled"])[0].texts)
    assert not [prompt for prompt in first(300) if overlaps(prompt, unseen)]


def test_overlap_is_a_run_of_words_whatever_the_case_and_the_marks():
    unseen = word_runs(["One two, three four five six seven eight nine!"])
    assert overlaps("x ONE two three (four) five six seven eight y", unseen)
    assert not overlaps("one two three four five six seven and eight nine", unseen)
    assert not overlaps("", unseen) and not overlaps("anything", word_runs([]))


def test_a_short_text_is_one_run():
    assert overlaps("What is love?", word_runs(["what is love"]))
    assert not overlaps("What is love, really?", word_runs(["what is love"]))
