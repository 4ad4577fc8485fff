"""The `jspec train` command, from a model directory to a draft directory."""

import json

import jax
import pytest
from tiny_checkpoint import VOCAB_SIZE, write_checkpoint
from training import kit
from typer.testing import CliRunner

from jspec.cli import app
from jspec.models.eagle_files import load_draft
from jspec.models.loading import load_model
from jspec.training import prompts

SMALL = ["--steps", 2, "--batch-size", 2, "--seq-len", 64, "--held-out-every", 3, "--draft-vocab-size", 100]
TEXT = ["--num-prompts", 6, "--max-new-tokens", 8]


@pytest.fixture(scope="module", autouse=True)
def _quick():
    # Compiling takes nearly all the time of these tests: less without most of the optimiser.
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "stdlib_functions", kit.few_functions)
        yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("job")
    write_checkpoint(path / "model")
    (path / "more.txt").write_text("The quick brown fox jumps over the lazy dog. " * 20)
    return path


def run(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture(scope="module")
def eagle3(root):
    options = [*TEXT, *SMALL, "--text", root / "more.txt", "--unroll", "0:1,1:2", "--storage", "int8"]
    return run("train", "eagle3", "--model", root / "model", "--work-dir", root / "work", *options, "--json")


def test_a_draft_comes_out(root, eagle3):
    assert eagle3.exit_code == 0, eagle3.output
    said = json.loads(eagle3.stdout)
    assert said["out"] == str(root / "work" / "draft") and said["steps"] == 2 and 1 <= said["accept_len"] <= 3
    draft = load_draft(said["out"], load_model(root / "model").target)
    assert draft.facts.draft_vocab_size == 100 and draft.config.kind == "eagle3" and draft.facts.capture_layers == (0,)
    ids = set(draft.params["shared"]["token_ids"].tolist())
    assert VOCAB_SIZE - 2 in ids  # the end of a sequence
    record = json.loads((root / "work" / "draft" / "training.json").read_text())
    assert record["held_out"]["accept_len"] == said["accept_len"] and record["text_files"] == ["more.txt"]
    assert str(root) not in json.dumps(record)


def test_features_serve_another_kind_of_draft(root, eagle3):
    assert eagle3.exit_code == 0, eagle3.output
    where = ["--model", root / "model", "--work-dir", root / "other", "--features", root / "work" / "features"]
    result = run("train", "multi-layer", *where, *SMALL, "--num-modules", 2, "--chained", "--out", root / "modules")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{root / 'modules'}: accept length ")
    draft = load_draft(root / "modules", load_model(root / "model").target)
    assert draft.facts.num_modules == 2 and draft.facts.chained


def test_training_goes_on_from_a_draft(root, eagle3):
    assert eagle3.exit_code == 0, eagle3.output
    where = ["--model", root / "model", "--work-dir", root / "on", "--features", root / "work" / "features"]
    start = ["--init", root / "work" / "draft", "--unroll", 1]
    result = run("train", "eagle3", *where, *SMALL, *start, "--copy-heads", 2)
    assert result.exit_code == 0, result.output
    first, then = (json.loads((root / at / "draft" / "training.json").read_text()) for at in ("work", "on"))
    assert then["init"] == {"draft": "draft", **first} and first["init"] is None
    assert str(root) not in json.dumps(then)
    other = ["--init", root / "work" / "draft", "--work-dir", root / "off", "--intermediate-size", 5]
    result = run("train", "eagle3", *where[:2], *where[4:], *SMALL, *other)
    assert result.exit_code == 2 and "intermediate_size" in result.stderr and "init=" in result.stderr


@pytest.mark.parametrize(
    ("options", "pieces"),
    [
        (["--steps", 0], ["steps=0"]),
        (["--unroll", "x"], ["unroll='x'"]),
        (["--storage", "int4"], ["storage='int4'"]),
        (["--unroll", ""], ["unroll=''"]),
        (["--unseen", "nothing"], ["unseen='nothing'"]),
        (["--chained"], ["chained=True", "'eagle3'", "multi-layer"]),
        (["--copy-heads", -1], ["copy_heads=-1"]),
        (["--features", "gone"], ["gone", "no .npz shard"]),
        (["--features", "gone", "--text", "a.txt"], ["features=", "text_files="]),
    ],
)
def test_a_bad_option_is_one_line(root, options, pieces):
    result = run("train", "eagle3", "--model", root / "model", "--work-dir", root / "bad", *options)
    assert result.exit_code == 2 and result.stdout == "", result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and all(piece in line for piece in pieces)


def test_a_kind_that_there_is_not(tmp_path):
    result = run("train", "medusa", "--work-dir", tmp_path)
    assert result.exit_code == 2 and "kind='medusa'" in result.stderr and "eagle3" in result.stderr
