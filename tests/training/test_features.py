"""Cached features: those of a fresh forward, made once, and refused where they are not what is asked for."""

import json
import shutil

import numpy as np
import pytest
from models.paging import PagedRows
from training import kit

from jspec.models.tiny import random_target
from jspec.training.features import forward_features, write_features
from jspec.training.shards import MANIFEST
from jspec.training.text import TextSequence


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("features")
    kit.store(path, kit.answers(10), shard_sequences=4)
    return path


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "features")


def test_features_are_those_of_a_fresh_forward():
    target = random_target(0, vocab_size=32, hidden_size=32, num_layers=3)
    rng = np.random.default_rng(0)
    sequences = [TextSequence(rng.integers(0, 32, n).astype(np.int32), 0) for n in (2, 20, 33, 7, 40)]
    run = forward_features(target, (2, 0), num_tokens=64, longest=39)
    rows = np.split(np.concatenate(list(run(sequences))), np.cumsum([len(s.tokens) - 1 for s in sequences])[:-1])
    for sequence, found in zip(sequences, rows, strict=True):
        _, (captured,), (hidden,) = PagedRows(target, 1, pages_per_row=10).forward(
            [sequence.tokens[:-1].tolist()], capture_layers=(2, 0)
        )
        want = np.concatenate([captured, hidden[:, None]], axis=1)
        np.testing.assert_allclose(found, want, rtol=2e-3, atol=2e-3)  # f16 keeps 11 bits


def test_shards_hold_every_sequence_in_order(folder):
    stored, wanted = kit.reopen(folder), kit.answers(10)
    assert sorted(p.name for p in folder.iterdir()) == ["00000.npz", "00001.npz", "00002.npz", MANIFEST]
    assert len(stored) == 10 and stored.prompt_lens.tolist() == [kit.PROMPT_LEN] * 10
    for tokens, features, want in zip(stored.tokens, stored.features, wanted, strict=True):
        np.testing.assert_array_equal(tokens, want.tokens)
        assert features.shape == (len(tokens) - 1, 3, kit.VOCAB) and features.dtype == np.float16
        # This target's residual stream is the token, one-hot: each row is the row of its own token.
        np.testing.assert_array_equal(features[:, 0].argmax(-1), tokens[:-1])


def test_a_killed_run_makes_only_what_is_missing(copy):
    before = (copy / "00000.npz").stat().st_mtime_ns
    (copy / "00001.npz").unlink()
    with pytest.raises(ValueError, match="num_sequences=10, but the shards hold 6"):
        kit.reopen(copy)
    made = []
    kit.store(copy, kit.answers(10), shard_sequences=4, progress=lambda jobs, total: (made.append(total), jobs)[1])
    assert made == [1] and (copy / "00000.npz").stat().st_mtime_ns == before


def test_more_text_is_appended(copy):
    assert len(kit.store(copy, kit.answers(14), shard_sequences=4)) == 14


def test_features_of_other_text_are_refused(copy):
    with pytest.raises(ValueError, match=r"00000\.npz holds features of other text"):
        kit.store(copy, kit.answers(10, seed=1), shard_sequences=4)


def test_a_folder_without_manifest_is_taken_at_the_callers_word(copy):
    (copy / MANIFEST).unlink()
    assert len(kit.reopen(copy, model="whatever")) == 10


@pytest.mark.parametrize(("field", "value"), [("model", "other"), ("capture_layers", (0, 7))])
def test_features_of_another_model_are_refused(folder, field, value):
    with pytest.raises(ValueError, match=f"{field}=.* must be"):
        kit.reopen(folder, **{field: value})


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"capture_layers": (0,)}, "feats.shape"), ({"hidden_size": 8}, "feats.shape"), ({"vocab_size": 4}, "tokens")],
)
def test_features_that_do_not_fit_are_refused(copy, changes, field):
    (copy / MANIFEST).unlink()
    with pytest.raises(ValueError, match=rf"00000\.npz: {field}=.* must"):
        kit.reopen(copy, **changes)


def _truncate(file):
    file.write_bytes(file.read_bytes()[:-100])


def _flip(file):
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)


def _drop(file):
    arrays = dict(np.load(file))
    del arrays["lens"]
    np.savez(file, **arrays)


def _compress(file):
    np.savez_compressed(file, **np.load(file))


@pytest.mark.parametrize(
    ("damage", "why"), [(_truncate, ""), (_flip, "checksum"), (_drop, "lens"), (_compress, "compressed")]
)
def test_a_damaged_shard_is_named(copy, damage, why):
    damage(copy / "00001.npz")
    with pytest.raises(ValueError, match=rf"00001\.npz is truncated or damaged .*{why}"):
        kit.reopen(copy)


def test_a_damaged_manifest_is_named(copy):
    (copy / MANIFEST).write_text(json.dumps({"model": "markov"}))
    with pytest.raises(ValueError, match=rf"{MANIFEST} is damaged"):
        kit.reopen(copy)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no \.npz shard"):
        kit.reopen(tmp_path)


def test_a_sequence_longer_than_the_context_is_refused(tmp_path):
    long = TextSequence(np.zeros(514, np.int32), 0)
    with pytest.raises(ValueError, match="sequence 0 has 514 tokens"):
        write_features(tmp_path, kit.target(), [long], model="markov", capture_layers=kit.CAPTURES)
