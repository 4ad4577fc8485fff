"""Where copying heads are taught to look, against a search by hand; and that they learn to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.kit import VOCAB, transformer
from training import kit

from jspec.models.tiny_draft import random_draft
from jspec.training.copying import LONGEST, copy_source
from jspec.training.loss import Batch, draft_loss
from jspec.training.metrics import read_metrics
from jspec.training.text import TextSequence
from jspec.training.train import METRICS, train


def source_by_hand(tokens: list[int], start: int, depth: int, row_depth: int) -> int:
    """The row to copy from: of rows 1 to `start`, the one that agrees on most tokens with the end of the chain, the last such one."""
    end, best, found = start + 1 + depth, 0, 0
    for row in range(1, start + 1):
        matched = 0
        while matched < LONGEST:
            theirs, ours = row + row_depth - matched, end - matched
            if theirs < 0 or ours >= len(tokens) or tokens[theirs] != tokens[ours]:
                break
            matched += 1
        if matched and matched >= best:
            best, found = matched, row
    return found


@pytest.mark.parametrize(("depth", "row_depth"), [(0, 0), (1, 0), (3, 0), (1, 1), (2, 2)])
def test_the_source_is_the_one_found_by_hand(depth, row_depth):
    tokens = np.random.default_rng(depth).integers(0, 4, (6, 25)).astype(np.int32)
    found = np.asarray(copy_source(jnp.asarray(tokens), depth=depth, row_depth=row_depth))
    wanted = [[source_by_hand(row.tolist(), t, depth, row_depth) for t in range(24)] for row in tokens]
    np.testing.assert_array_equal(found, wanted)
    assert (found > 0).mean() > 0.5 and (found == 0).any(), "both a match and none are among the cases"


def test_what_follows_the_source_is_what_follows_the_chain():
    """In a text that repeats itself, the row to copy from reads the very token to foresee."""
    tokens = np.tile(np.arange(7, dtype=np.int32), 5)[None]
    length = tokens.shape[1] - 1
    for depth in range(3):
        source = np.asarray(copy_source(jnp.asarray(tokens), depth=depth))[0]
        for start in range(8, length - depth - 1):
            assert tokens[0, source[start] + 1] == tokens[0, start + 2 + depth]


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "multi-layer"])
def test_the_lesson_is_one_more_term_of_the_loss(kind):
    draft, rng = random_draft(transformer(), 1, kind=kind), np.random.default_rng(0)
    size, captured = transformer().facts.hidden_size, max(1, len(draft.facts.capture_layers))
    batch = Batch(
        tokens=rng.integers(0, VOCAB, (2, 15)).astype(np.int32),
        captured=rng.standard_normal((2, 14, captured, size)).astype(np.float32),
        hidden=rng.standard_normal((2, 14, size)).astype(np.float32),
        weight=np.ones((2, 14), np.float32),
    )
    head = transformer().head(transformer().params)
    loss = functools.partial(draft_loss, draft, draft.params["own"], head, batch, unroll=2, decay=0.5)
    plain, metrics = loss()
    assert "copy" not in metrics
    taught, metrics = loss(copy_heads=draft.config.num_heads, copy_weight=0.25)
    np.testing.assert_allclose(taught - plain, 0.25 * (metrics["copy"][0] + 0.5 * metrics["copy"][1]), rtol=1e-4)
    assert float(metrics["copy"].min()) > 0


def test_heads_learn_to_look_where_they_are_taught(tmp_path):
    """Texts of a few random tokens, over and over: the lesson alone tells where to look, and its loss falls far below that of looking anywhere."""
    rng = np.random.default_rng(0)
    texts = [np.tile(rng.permutation(kit.VOCAB)[:6], 4)[:20].astype(np.int32) for _ in range(40)]
    stored = kit.store(tmp_path / "features", [TextSequence(text, kit.PROMPT_LEN) for text in texts])
    options = kit.train_options(copy_heads=2, copy_weight=1.0, steps=80, unroll_schedule=((0, 1),))
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        train(kit.draft_config(), kit.target(), stored, options, work_dir=tmp_path / "run")
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    records = read_metrics(tmp_path / "run" / METRICS)
    copy = [record["copy_by_depth"][0] for record in records if "copy_by_depth" in record]
    assert len(copy) == 80 and copy[-1] < 0.5 * copy[0]
    assert "held_out_copy" in records[-1]


@pytest.mark.parametrize("copy_heads", [1, 4])
def test_heads_that_share_keys_are_taught_together(tmp_path, copy_heads):
    stored = kit.store(tmp_path / "features", kit.answers(10))
    options = kit.train_options(copy_heads=copy_heads)
    with pytest.raises(ValueError, match=f"copy_heads={copy_heads} must be a multiple of 2.*at most 2"):
        train(kit.draft_config(), kit.target(), stored, options, work_dir=tmp_path / "run")
