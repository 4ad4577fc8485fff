"""Batches of a fixed size from cached sequences: which sequences are held out, which rows count, in which order they come."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jspec.training.loss import Batch
from jspec.training.shards import Sequences


def split_held_out(sequences: Sequences, *, every: int) -> tuple[list[int], list[int]]:
    """(numbers to train on, numbers held out): every `every`-th different prompt is held out, with all its answers. Plain text is its own prompt.

    Raises:
        ValueError: nothing would be held out, or nothing left.
    """
    if every < 2:
        raise ValueError(f"held_out_every={every} must be at least 2: something must be left to train on")
    places: dict[bytes, int] = {}
    parts: tuple[list[int], list[int]] = ([], [])
    for number, (tokens, prompt_len) in enumerate(zip(sequences.tokens, sequences.prompt_lens, strict=True)):
        prompt = (tokens[:prompt_len] if prompt_len else tokens).tobytes()
        place = places.setdefault(prompt, len(places))
        parts[place % every == every - 1].append(number)
    if not parts[1]:
        raise ValueError(
            f"held_out_every={every} holds nothing out of {len(places)} different prompts: it must be at most that; lower it or add prompts"
        )
    return parts


class _Window(NamedTuple):
    """Rows of one sequence that fill one row of a batch."""

    number: int  # of the sequence
    start: int  # its first row
    length: int  # rows, at most `seq_len`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batches:
    """Batches [B, T + 1] of sequences, one sequence or window of one a row. Batch `step` is a function of the fields alone, so training resumes at any."""

    sequences: Sequences
    windows: tuple[_Window, ...]
    batch_size: int
    seq_len: int  # T, rows
    seed: int
    include_prompt: bool

    def at(self, step: int) -> Batch:
        """Training batch number `step`: every pass over the windows is a new permutation."""
        num, chosen = len(self.windows), []
        for place in range(step * self.batch_size, (step + 1) * self.batch_size):
            order = np.random.default_rng([self.seed, place // num]).permutation(num)
            chosen.append(self.windows[order[place % num]])
        return self._fill(chosen)

    def in_order(self, limit: int | None = None) -> Iterator[Batch]:
        """Every window once, the last batch padded with rows of weight 0; at most `limit` batches, evenly spaced."""
        groups = [self.windows[i : i + self.batch_size] for i in range(0, len(self.windows), self.batch_size)]
        count = len(groups) if limit is None else min(limit, len(groups))
        for i in range(count):
            yield self._fill(groups[i * len(groups) // count])

    def _fill(self, windows: Sequence[_Window]) -> Batch:
        columns = [*self.sequences.columns, -1]
        hidden = self.sequences.features[0].shape[-1]
        tokens = np.zeros((self.batch_size, self.seq_len + 1), np.int32)
        rows = np.zeros((self.batch_size, self.seq_len, len(columns), hidden), np.float16)
        weight = np.zeros((self.batch_size, self.seq_len), np.float32)
        for i, window in enumerate(windows):
            stop = window.start + window.length
            tokens[i, : window.length + 1] = self.sequences.tokens[window.number][window.start : stop + 1]
            rows[i, : window.length] = self.sequences.features[window.number][window.start : stop, columns]
            weight[i, _first_row(self, window.number, window.start) : window.length] = 1
        return Batch(tokens, rows[:, :, :-1], rows[:, :, -1], weight)


def make_batches(
    sequences: Sequences,
    numbers: Sequence[int],
    *,
    batch_size: int,
    seq_len: int,
    seed: int = 0,
    include_prompt: bool = False,
) -> Batches:
    """Batches of the sequences `numbers`, long ones cut in windows of `seq_len` rows.

    The first row that counts is the last one of the prompt: it is where drafting begins. With `include_prompt` all rows count.

    Raises:
        ValueError: no row would count.
    """
    batches = Batches(
        sequences=sequences,
        windows=(),
        batch_size=batch_size,
        seq_len=seq_len,
        seed=seed,
        include_prompt=include_prompt,
    )
    windows = []
    for number in numbers:
        num_rows = len(sequences.tokens[number]) - 1
        for start in range(0, num_rows, seq_len):
            length = min(seq_len, num_rows - start)
            if (
                length - _first_row(batches, number, start) >= 2
            ):  # a row counts where the next one is there to say what comes
                windows.append(_Window(number, start, length))
    if not windows:
        raise ValueError(
            f"no row of {len(numbers)} sequences counts: an answer must have at least 3 tokens; add prompts"
        )
    return dataclasses.replace(batches, windows=tuple(windows))


def _first_row(batches: Batches, number: int, start: int) -> int:
    """First row of a window that counts."""
    if batches.include_prompt:
        return 0
    return max(0, int(batches.sequences.prompt_lens[number]) - 1 - start)
