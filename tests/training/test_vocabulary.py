"""Tokens that a draft may propose."""

import numpy as np
import pytest

from jspec.training.text import TextSequence
from jspec.training.vocabulary import choose_vocabulary

TEXT = [TextSequence(np.array([5, 5, 5, 7, 3, 3]), 3), TextSequence(np.array([2, 7, 7, 1]), 1)]
"""In answers: 7 three times, 3 twice, 1 once; in prompts only: 5 three times, 2 once."""


@pytest.mark.parametrize(
    ("size", "always", "ids"),
    [
        (1, (), [7]),
        (3, (), [1, 3, 7]),
        (4, (), [1, 3, 5, 7]),
        (7, (), [0, 1, 2, 3, 4, 5, 7]),
        (2, (9,), [7, 9]),
        (2, (9, 9, 8), [8, 9]),
        (10, (9,), list(range(10))),
    ],
)
def test_the_most_used_tokens_of_answers_then_of_prompts_then_the_lowest(size, always, ids):
    found = choose_vocabulary(TEXT, size=size, vocab_size=10, always=always)
    assert found.tolist() == ids and found.dtype == np.int32


@pytest.mark.parametrize(("size", "always"), [(0, ()), (11, ()), (1, (8, 9))])
def test_a_size_that_cannot_be_is_refused(size, always):
    with pytest.raises(ValueError, match=f"draft_vocab_size={size} must lie in"):
        choose_vocabulary(TEXT, size=size, vocab_size=10, always=always)
