"""Batches: a function of the step; which rows count; held-out text stays out."""

import jax
import numpy as np
import pytest
from training import kit

from jspec.training.batches import make_batches, split_held_out
from jspec.training.shards import Sequences


def sequences(lens, prompt_lens, *, same_prompt=()) -> Sequences:
    """Token `i` of sequence `n` is 1000 n + i, and so is every value of its row; sequences in `same_prompt` share the prompt of sequence 0."""
    tokens = [1000 * n + np.arange(size, dtype=np.int32) for n, size in enumerate(lens)]
    for n in same_prompt:
        tokens[n][: prompt_lens[n]] = tokens[0][: prompt_lens[n]]
    features = [np.broadcast_to(t[:-1, None, None], (len(t) - 1, 3, 4)).astype(np.float16) for t in tokens]
    return Sequences(
        tokens=tuple(tokens),
        prompt_lens=np.array(prompt_lens, np.int32),
        features=tuple(features),
        columns=tuple(range(features[0].shape[1] - 1)),
    )


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_rows_of_the_answer_count_and_windows_cut_long_sequences():
    stored = sequences([7, 10], [4, 2])
    batch = next(make_batches(stored, [0, 1], batch_size=4, seq_len=6).in_order())
    np.testing.assert_array_equal(batch.weight, [[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0] * 6])
    np.testing.assert_array_equal(batch.tokens[1], np.arange(1000, 1007))
    np.testing.assert_array_equal(batch.tokens[2], [1006, 1007, 1008, 1009, 0, 0, 0])
    np.testing.assert_array_equal(batch.hidden[0, :, 0], np.arange(6))
    assert batch.captured.shape == (4, 6, 2, 4) and batch.hidden.dtype == np.float16


def test_rows_of_the_prompt_count_where_asked():
    batches = make_batches(sequences([7], [4]), [0], batch_size=1, seq_len=6, include_prompt=True)
    assert next(batches.in_order()).weight.tolist() == [[1] * 6]


def test_windows_without_a_row_that_counts_are_left_out():
    stored = sequences([20, 6], [15, 6])
    batches = make_batches(stored, [0, 1], batch_size=1, seq_len=5)
    # Row 14, the last of its window, counts, but what follows it lies in the next.
    assert [int(b.tokens[0, 0]) for b in batches.in_order()] == [15]
    with pytest.raises(ValueError, match="no row of 1 sequences counts"):
        make_batches(stored, [1], batch_size=1, seq_len=5)


def test_a_batch_is_a_function_of_its_step():
    stored = sequences([8] * 7, [2] * 7)
    first, again, other = (make_batches(stored, range(7), batch_size=3, seq_len=8, seed=s) for s in (0, 0, 1))
    assert_same(first.at(5), again.at(5))
    assert any(not np.array_equal(first.at(i).tokens, other.at(i).tokens) for i in range(3))


def test_every_pass_is_a_new_order_of_all_windows():
    batches = make_batches(sequences([8] * 6, [2] * 6), range(6), batch_size=3, seq_len=8)
    passes = [np.concatenate([batches.at(i).tokens[:, 0] for i in (2 * p, 2 * p + 1)]) for p in range(4)]
    assert all(sorted(p) == [0, 1000, 2000, 3000, 4000, 5000] for p in passes)
    assert len({tuple(p) for p in passes}) > 1


def test_every_window_is_evaluated_once():
    batches = make_batches(sequences([8] * 5, [2] * 5), range(5), batch_size=2, seq_len=8)
    assert [b.tokens[:, 0].tolist() for b in batches.in_order()] == [[0, 1000], [2000, 3000], [4000, 0]]
    assert [b.weight.sum() for b in batches.in_order()] == [12, 12, 6]
    assert len(list(batches.in_order(2))) == 2


def test_held_out_prompts_never_train():
    stored = sequences([8] * 20, [3] * 20, same_prompt=(4, 9, 10))
    train_on, held_out = split_held_out(stored, every=4)
    assert sorted(train_on + held_out) == list(range(20)) and len(held_out) == 4
    prompts = [{stored.tokens[i][:3].tobytes() for i in part} for part in (train_on, held_out)]
    assert not prompts[0] & prompts[1]


def test_what_is_held_out_stays_so_when_text_is_appended():
    few, many = sequences([8] * 12, [3] * 12), sequences([8] * 24, [3] * 24)
    assert split_held_out(few, every=4)[1] == [i for i in split_held_out(many, every=4)[1] if i < 12]


def test_plain_text_is_its_own_prompt():
    assert split_held_out(sequences([8] * 4, [0] * 4), every=2)[1] == [1, 3]


@pytest.mark.parametrize(("every", "rule"), [(1, "at least 2"), (9, "at most that")])
def test_a_split_without_two_sides_is_refused(every, rule):
    with pytest.raises(ValueError, match=f"held_out_every={every} .*{rule}"):
        split_held_out(sequences([8] * 4, [3] * 4), every=every)


def test_stored_features_make_batches(tmp_path):
    stored = kit.store(tmp_path, kit.answers(3))
    batch = make_batches(stored, [0, 2], batch_size=2, seq_len=20).at(0)
    assert batch.weight.sum(axis=1).tolist() == [19 - kit.PROMPT_LEN + 1] * 2
