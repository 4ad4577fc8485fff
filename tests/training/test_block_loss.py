"""Block drafts in training: dense attention says what pages say, the starts are those that count, and a draft learns its target."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_checkpoint import write_checkpoint
from training import kit
from training.test_job import SMALL, TEXT, run

from jspec.models.draft_files import load_draft
from jspec.models.loading import load_model
from jspec.models.tiny import random_target
from jspec.models.tiny_block_draft import random_block_draft, tiny_block_config
from jspec.spec_workers.forward import verify_batch
from jspec.training import prompts
from jspec.training.block_loss import _blocks, block_loss
from jspec.training.loss import Batch
from jspec.training.starts import draw_starts
from jspec.training.train import train


@pytest.fixture(scope="module", autouse=True)
def _quick():
    # Compiling takes nearly all the time of these tests: less without most of the optimiser.
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "stdlib_functions", kit.few_functions)
        yield
    jax.config.update("jax_disable_most_optimizations", False)


def batch_of(target, num: int = 2, length: int = 12, seed: int = 0) -> Batch:
    rng, size = np.random.default_rng(seed), target.facts.hidden_size
    return Batch(
        tokens=jnp.asarray(rng.integers(0, target.facts.vocab_size, (num, length + 1)), jnp.int32),
        captured=jnp.asarray(rng.normal(size=(num, length, 1, size)), jnp.float32),
        hidden=jnp.asarray(rng.normal(size=(num, length, size)), jnp.float32),
        weight=jnp.asarray(rng.random((num, length)) < 0.7, jnp.float32),
    )


@pytest.mark.parametrize("window", [None, 6])
def test_blocks_see_what_they_see_while_decoding(window):
    """Hidden states of training's blocks, against the injection and the forward over pages that the worker runs."""
    target = random_target(0, vocab_size=32, hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8)
    draft, batch = random_block_draft(target, 1, block_size=4, window=window), batch_of(target)
    starts = jnp.asarray([[0, 5, 11], [3, 4, 10]], jnp.int32)
    dense = _blocks(draft, draft.params, batch, starts)
    page, one = 4, jnp.ones(1, jnp.int32)
    table = jnp.asarray([[2, 4, 1, 3, 5]], jnp.int32)
    for b in range(2):
        context = draft.context(draft.params, batch.captured[b])
        for a, start in enumerate(starts[b].tolist()):
            count = start + 1
            slots = table[0, jnp.arange(count) // page] * page + jnp.arange(count) % page
            pool = draft.inject(draft.params, context[:count], jnp.arange(count), slots, draft.init_kv(5, page))
            ids = jnp.full((1, 4), draft.config.mask_token_id).at[0, 0].set(batch.tokens[b, start + 1])
            nodes = {"depths": jnp.arange(4)[None], "ancestors": jnp.full((1, 4), 15, jnp.uint32)}
            rows = verify_batch(one, count * one, ids, table, page_size=page, **nodes)
            hidden, _ = draft.forward(draft.params, rows.input_ids, rows, pool)
            np.testing.assert_allclose(dense[b, a], hidden, atol=2e-5)


def test_starts_are_rows_that_count_drawn_anew():
    target = random_target(0, vocab_size=32, hidden_size=16)
    batch = batch_of(target, num=3, length=40)
    starts = np.asarray(draw_starts(batch, 30).rows)
    weight = np.asarray(batch.weight)
    assert all(weight[b, t] for b in range(3) for t in starts[b]) and (np.diff(starts, axis=1) > 0).all()
    other = batch._replace(tokens=batch.tokens.at[0, 0].add(1))
    assert (np.asarray(draw_starts(other, 30).rows) != starts).any()
    few = batch._replace(weight=jnp.zeros_like(batch.weight).at[:, 5].set(1))
    found = draw_starts(few, 9)
    assert found.rows.tolist() == [[5, 39, 39]] * 3 and found.counts.tolist() == [[1, 0, 0]] * 3


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_rows_that_do_not_count_change_nothing(kind):
    """Neither what they hold nor, where all rows that count are drawn, how many are computed."""
    target = random_target(0, vocab_size=32, hidden_size=16)
    draft = random_block_draft(target, 1, kind=kind, confidence=kind == "dspark")
    batch = batch_of(target, num=2, length=16)
    batch = batch._replace(weight=batch.weight.at[:, 10:].set(0).at[:, :2].set(0))
    head = target.head(target.params)
    total, metrics = block_loss(draft, draft.params["own"], head, batch)
    assert np.isfinite(total) and metrics["agree"].shape == (draft.config.num_drafts,)
    fewer, same = block_loss(draft, draft.params["own"], head, batch, max_starts=2 * 10)
    np.testing.assert_allclose(fewer, total, rtol=1e-5)
    np.testing.assert_allclose(same["accept_len"], metrics["accept_len"], rtol=1e-6)
    changed = batch._replace(hidden=batch.hidden.at[:, 10:].set(9.0), captured=batch.captured.at[:, 10:].set(9.0))
    np.testing.assert_allclose(block_loss(draft, draft.params["own"], head, changed)[0], total, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("dflash", {"block_size": 4}), ("dspark", {"block_size": 3, "confidence": True, "markov_head": "gated"})],
)
def test_a_draft_learns_its_target(tmp_path, kind, options):
    stored = kit.store(tmp_path / "features", kit.answers(40))
    config = tiny_block_config(kit.target(), kind=kind, capture_layers=kit.CAPTURES, **options)
    result = train(config, kit.target(), stored, kit.train_options(steps=60), work_dir=tmp_path / "run")
    assert result.held_out["accept_len"] > 2 and len(result.held_out["agree"]) == 3
    if kind == "dspark":
        assert len(result.held_out["confidence"]) == 3


def test_the_command_trains_a_block_draft_and_one_from_it(tmp_path):
    """A DSPARK draft goes on from a DFLASH one, whose layers it has and whose features it shares."""
    write_checkpoint(tmp_path / "model")
    where = ["--model", tmp_path / "model"]
    small = ["--num-layers", 1, "--storage", "int8"]
    result = run("train", "dflash", *where, "--work-dir", tmp_path / "work", *TEXT, *SMALL, *small, "--block-size", 4)
    assert result.exit_code == 0, result.output
    first = ["--features", tmp_path / "work" / "features", "--init", tmp_path / "work" / "draft"]
    own = ["--block-size", 3, "--markov-rank", 4, "--work-dir", tmp_path / "on"]
    result = run("train", "dspark", *where, *first, *own, *SMALL, *small)
    assert result.exit_code == 0, result.output
    draft = load_draft(tmp_path / "on" / "draft", load_model(tmp_path / "model").target)
    assert draft.config.kind == "dspark" and draft.config.num_drafts == 3 and draft.config.confidence
    record = json.loads((tmp_path / "on" / "draft" / "training.json").read_text())
    assert record["init"]["kind"] == "dflash"
    result = run("train", "dspark", *where, *first, "--block-size", 4, "--work-dir", tmp_path / "off", *SMALL, *small)
    assert result.exit_code == 2 and "block_size=3, the draft to train has 4" in result.stderr
    result = run("train", "eagle3", *where, "--work-dir", tmp_path / "bad", "--block-size", 4)
    assert result.exit_code == 2 and "block_size=4 means nothing to a draft of kind 'eagle3'" in result.stderr
