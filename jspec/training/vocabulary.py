"""Which of the target's tokens a draft may propose."""

from collections.abc import Iterable, Sequence

import numpy as np

from jspec.training.text import TextSequence


def choose_vocabulary(
    sequences: Iterable[TextSequence], *, size: int, vocab_size: int, always: Sequence[int] = ()
) -> np.ndarray:
    """The `size` tokens that answers use most; ties go to the token that prompts use more, then to the lower id.

    Args:
        sequences: to train on.
        vocab_size: of the target.
        always: ids that are among them whatever their count: those that end a sequence.
    Returns:
        i32[size], ascending.
    Raises:
        ValueError: `size` is too large, or too small for `always`.
    """
    always = sorted(set(always))
    if not max(1, len(always)) <= size <= vocab_size:
        raise ValueError(
            f"draft_vocab_size={size} must lie in {max(1, len(always))}..{vocab_size}: the end-of-sequence ids and the target's vocabulary"
        )
    counts = np.zeros((2, vocab_size), np.int64)
    for tokens, prompt_len in sequences:
        for i, part in enumerate((tokens[prompt_len:], tokens[:prompt_len])):
            counts[i] += np.bincount(part, minlength=vocab_size)
    counts[0, always] = np.iinfo(np.int64).max
    order = np.lexsort((np.arange(vocab_size), -counts[1], -counts[0]))
    return np.sort(order[:size]).astype(np.int32)
