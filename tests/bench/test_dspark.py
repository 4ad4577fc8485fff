"""What DSpark's budgets are made of: a table that is read back, and temperatures that mend a confidence which is known to be wrong."""

import jax
import numpy as np
import pytest
from tiny_checkpoint import write_checkpoint
from typer.testing import CliRunner

from jspec.bench.dspark import calibration_error, fit_temperatures, raw_confidence
from jspec.cli import app
from jspec.models.draft_files import save_draft
from jspec.models.loading import load_model
from jspec.models.tiny_block_draft import random_block_draft
from jspec.spec_workers.dspark_budget import load_sps, load_sts


@pytest.fixture(scope="module", autouse=True)
def _quick_compiles():
    # Compiling takes nearly all the time of these tests: less without most of the optimiser.
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_temperatures_are_found_again():
    """Drafts accepted with the chances of logits that the head then says 2, 0.5 and 3 times too strongly."""
    rng, wrong = np.random.default_rng(0), np.array([2.0, 0.5, 3.0])
    true = rng.normal(0.5, 1.5, (40_000, 3))
    accepted = np.cumprod(rng.random(true.shape) < sigmoid(true), axis=1).sum(axis=1)
    sts, before, after = fit_temperatures(true * wrong, accepted)
    np.testing.assert_allclose(sts.temperatures, wrong, rtol=0.12)
    assert all(b > 3 * a for b, a in zip(before, after, strict=True)) and max(after) < 0.01


def test_the_head_is_read_from_what_survives():
    raw = np.random.default_rng(1).normal(0, 2, (50, 4))
    survival = np.cumprod(sigmoid(raw), axis=1).astype(np.float32)
    np.testing.assert_allclose(raw_confidence(survival), raw, atol=1e-3)


def test_the_error_by_hand():
    """Two bins: half of it sure and always right, half of it at 0.5 and never right."""
    chances, happened = np.array([1.0, 1.0, 0.5, 0.5]), np.array([True, True, False, False])
    assert calibration_error(chances, happened) == pytest.approx(0.25)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("dspark")
    write_checkpoint(root / "model")
    target = load_model(root / "model").target
    save_draft(root / "draft", random_block_draft(target, 0, kind="dspark", confidence=True, block_size=3), target)
    save_draft(root / "dflash", random_block_draft(target, 0), target)
    return root


def run(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_the_commands_write_what_the_engine_reads(places):
    given = ["--model", places / "model", "--draft", places / "draft", "--max-running", 2]
    result = run("profile", "sps", "--out", places / "sps.json", *given)
    assert result.exit_code == 0, result.output
    table = load_sps(places / "sps.json")
    # One row: 1, 2 or 4 tokens; two rows: 2, 4 or 8.
    assert table.sample_batch_tokens == (1, 2, 4, 8) and min(table.sample_steps_per_sec) > 0
    result = run("calibrate", "sts", "--out", places / "sts.json", *given, "--num-prompts", 2, "--max-new-tokens", 8)
    assert result.exit_code == 0, result.output
    assert len(load_sts(places / "sts.json", num_drafts=3).temperatures) == 3 and "place 2" in result.stdout
    files = ["--ragged-verify", "compact", "--sps", places / "sps.json", "--sts", places / "sts.json"]
    generated = run("generate", "--algorithm", "dspark", *given, *files, "--prompt", "the quick", "--max-new-tokens", 6)
    plain = run(
        "generate", "--algorithm", "plain", "--model", places / "model", "--prompt", "the quick", "--max-new-tokens", 6
    )
    assert generated.exit_code == plain.exit_code == 0, generated.output
    assert generated.stdout == plain.stdout


@pytest.mark.parametrize(
    ("options", "pieces"),
    [
        (["--draft", "dflash"], ["kind 'dflash'", "'dspark'"]),
        (["--draft", "gone"], ["gone"]),
    ],
)
def test_another_draft_is_refused(places, options, pieces):
    options = [options[0], places / options[1]]
    result = run("profile", "sps", "--out", places / "x.json", "--model", places / "model", *options)
    assert result.exit_code == 2 and all(piece in result.stderr for piece in pieces), result.output
