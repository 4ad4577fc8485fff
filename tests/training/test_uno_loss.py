"""UNO's adapter in training: rows of noise say what they say in the worker's draft pass, and an adapter learns its target."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.kit import build, greedy
from tiny_checkpoint import write_checkpoint
from training import kit
from training.test_job import TEXT, run

from jspec.models.llama import LlamaConfig, llama_target
from jspec.models.loading import load_model
from jspec.models.lora import Lora, LoraConfig, LoraParts, fuse_lora, init_lora, load_lora_parts
from jspec.models.target import TargetModel
from jspec.models.tiny import random_params
from jspec.spec_workers import uno
from jspec.spec_workers.forward import prefill_batch, verify_batch
from jspec.training import prompts
from jspec.training.loss import Batch
from jspec.training.metrics import read_metrics
from jspec.training.starts import batch_key
from jspec.training.train import train
from jspec.training.uno_loss import block_hidden, block_size_at, uno_loss

VOCAB, PAGE, LENGTH, NOISE = 32, 4, 11, 3


@pytest.fixture(scope="module", autouse=True)
def _quick():
    # Compiling takes nearly all the time of these tests: less without most of the optimiser.
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "stdlib_functions", kit.few_functions)
        yield
    jax.config.update("jax_disable_most_optimizations", False)


def target_of(**changes) -> TargetModel:
    """A random target whose biases and norms say something too."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_layers": 3, "num_heads": 4}
    config = LlamaConfig(**sizes, num_kv_heads=2, head_dim=8, context_len=64, **changes)
    params, rng = dict(random_params(0, config, jnp.float32)), np.random.default_rng(0)
    vectors = [name for name in ("norms", "qkv_bias", "qk_norms", "final_norm") if name in params]
    for name in vectors:
        params[name] = params[name] + jnp.asarray(rng.normal(0, 0.3, params[name].shape), jnp.float32)
    return llama_target(config, params)


def parts_of(config: LoraConfig, target: TargetModel, seed: int = 0):
    rng = np.random.default_rng(seed)
    shapes = init_lora(jax.random.key(0), config, target)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.2, x.shape), jnp.float32), shapes)


def over_pages(target: TargetModel):
    """`(adapter, tokens, start, noise) -> (hidden f32[1 + N, H], logits)`: what the worker's draft pass computes behind the pending token `tokens[start]`."""
    one, table = jnp.ones(1, jnp.int32), jnp.asarray([[2, 4, 1, 3, 5]], jnp.int32)

    @jax.jit
    def run(adapter, tokens, start, noise):
        batch, _ = prefill_batch(tokens, one, 0 * one, start * one, table, page_size=PAGE)
        pool = target.forward(target.params, batch, target.init_kv(5, PAGE)).kv_pages
        ids = jnp.concatenate([tokens[start][None], noise])[None]
        batch = verify_batch(one, start * one, ids, table, page_size=PAGE)
        out = target.forward_adapted(target.params, adapter, jnp.arange(ids.size) > 0, batch, pool)
        return out.hidden, target.logits(target.params, out.hidden)

    return run


@pytest.mark.parametrize(
    "changes",
    [pytest.param({}, marks=pytest.mark.slow), {"qkv_bias": True, "qk_norm": True, "tie_embeddings": True}],
)
def test_noise_reads_what_it_reads_in_the_draft_pass(changes):
    """Every row of a block, at starts on both sides of a page's end, against the forward over pages."""
    target, config = target_of(**changes), LoraConfig(rank=2, alpha=4.0, block_size=NOISE + 1)
    adapter = fuse_lora(config, parts_of(config, target), target, jnp.float32)
    rng = np.random.default_rng(1)
    tokens = jnp.asarray(rng.integers(0, VOCAB, (2, LENGTH)), jnp.int32)
    starts = jnp.asarray([[0, 5, 10], [3, 4, 7]], jnp.int32)
    noise = jnp.asarray(rng.integers(0, VOCAB, (2, 3, NOISE)), jnp.int32)
    dense = jax.jit(lambda *args: block_hidden(target, *args))(adapter, tokens, starts, noise)
    run = over_pages(target)
    for b in range(2):
        for a, start in enumerate(starts[b].tolist()):
            hidden, _ = run(adapter, tokens[b], start, noise[b, a])
            np.testing.assert_allclose(dense[b, a], hidden[1:], atol=2e-5)


@pytest.mark.parametrize("kl_weight", [0.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_the_loss_is_that_of_what_the_worker_computes(kl_weight):
    """The total variation of the two passes' distributions, start by start: that of the draft pass, and that of the target over the text."""
    target, config = target_of(), LoraConfig(rank=2, alpha=4.0, block_size=NOISE + 1)
    parts = parts_of(config, target)
    adapter = fuse_lora(config, parts, target, jnp.float32)
    tokens = jnp.asarray(np.random.default_rng(5).integers(0, VOCAB, LENGTH + 1), jnp.int32)
    one = jnp.ones(1, jnp.int32)
    text, _ = prefill_batch(tokens[:-1], one, 0 * one, LENGTH * one, jnp.asarray([[2, 3, 1]]), page_size=PAGE)
    hidden = target.forward(target.params, text, target.init_kv(3, PAGE)).hidden
    weight = jnp.ones(LENGTH).at[:2].set(0)
    batch = Batch(tokens[None], jnp.zeros((1, LENGTH, 0, 16)), hidden[None], weight[None])
    noise = jax.random.randint(batch_key(batch), (1, LENGTH, NOISE), 0, VOCAB)[0]
    run = over_pages(target)
    drafted = {start: np.asarray(run(adapter, tokens, start, noise[start - 2])[1]) for start in range(2, LENGTH)}
    teacher = jax.nn.softmax(target.logits(target.params, hidden))
    losses, hits = [], []
    for k in range(NOISE):
        row_losses, row_hits = [], []
        for start in range(2, LENGTH - 1 - k):
            logits = drafted[start]
            p, q = teacher[start + 1 + k], jax.nn.softmax(logits[1 + k])
            row_losses.append(1 - jnp.sum(jnp.minimum(p, q)) + kl_weight * jnp.sum(p * jnp.log(p / q)))
            row_hits.append(jnp.argmax(logits[1 + k]) == tokens[start + 2 + k])
        losses.append(float(np.mean(row_losses)))
        hits.append(float(np.mean(row_hits)))
    asked = {"num_drafts": NOISE, "decay": 0.5, "kl_weight": kl_weight}
    found, metrics = jax.jit(lambda parts, batch: uno_loss(config, parts, target, batch, **asked))(parts, batch)
    np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-4)
    assert any(hits), "no draft is right: the test shows less"
    np.testing.assert_allclose(metrics["agree"], hits, rtol=1e-5)
    np.testing.assert_allclose(found, losses[0] + losses[1] / 2 + losses[2] / 4, rtol=1e-4)


def test_rows_that_do_not_count_change_nothing():
    """Neither what they hold nor, where all rows that count are drawn, how many are computed."""
    target, config = target_of(), LoraConfig(rank=2, alpha=4.0, block_size=2)
    rng = np.random.default_rng(3)
    weight = jnp.zeros((2, 16)).at[:, 2:10].set(1)
    tokens, hidden = rng.integers(0, VOCAB, (2, 17)), rng.normal(size=(2, 16, 16))
    batch = Batch(jnp.asarray(tokens), jnp.zeros((2, 16, 0, 16)), jnp.asarray(hidden, jnp.float32), weight)
    # The noise that is drawn depends on how many rows are: here there is one token to draw from.
    parts = parts_of(config, target)
    silent = target._replace(facts=dataclasses.replace(target.facts, vocab_size=1))

    @functools.partial(jax.jit, static_argnums=1)
    def loss(batch, max_starts=None):
        return uno_loss(config, parts, silent, batch, num_drafts=1, max_starts=max_starts)

    total, metrics = loss(batch)
    fewer, same = loss(batch, 2 * 10)
    np.testing.assert_allclose(fewer, total, rtol=1e-5)
    np.testing.assert_allclose(same["accept_len"], metrics["accept_len"], rtol=1e-6)
    changed = batch._replace(hidden=batch.hidden.at[:, 10:].set(9.0))
    np.testing.assert_allclose(loss(changed)[0], total, rtol=1e-5)
    assert metrics["accept_len"] >= 2  # the clean root and one more, whatever is drafted


@pytest.mark.parametrize(
    ("steps", "block_size", "sizes"),
    [(6, 8, [2, 2, 4, 4, 8, 8]), (4, 4, [2, 2, 4, 4]), (3, 2, [2, 2, 2]), (6, 6, [2, 2, 4, 4, 6, 6]), (1, 8, [2])],
)
def test_blocks_grow(steps, block_size, sizes):
    assert [block_size_at(step, steps, block_size) for step in range(steps)] == sizes
    assert block_size_at(steps + 5, steps, block_size) == (block_size if steps > 1 else 8)


def accept_length(worker) -> float:
    """Of the engine on a few prompts, whose text is the target's."""
    sequences = kit.answers(3, seed=9, length=kit.PROMPT_LEN + 24)
    engine = build(kit.target(), worker=worker, max_running=1, context_len=32)
    outputs = engine.generate([s.tokens[: kit.PROMPT_LEN].tolist() for s in sequences], greedy(24))
    for sequence, output in zip(sequences, outputs, strict=True):
        assert output.token_ids == sequence.tokens[kit.PROMPT_LEN :].tolist()
    return engine.summary().accept_length


def test_an_adapter_learns_its_target(tmp_path):
    """From one that changes nothing to one whose drafts are accepted; the text is plain decoding's before and after."""
    target, config = kit.target(), LoraConfig(rank=4, alpha=8.0, block_size=4)
    stored = kit.store(tmp_path / "features", kit.answers(40))
    options = kit.train_options(steps=400, learning_rate=3e-2, kl_weight=0.5)
    result = train(config, target, stored, options, work_dir=tmp_path / "run")
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    first, last = records[0]["loss_by_depth"], records[-2]["loss_by_depth"]
    assert len(first) == 1 and len(last) == 3 and max(last) < first[0] / 2  # blocks of two at first, of four at last
    assert result.held_out["accept_len"] > 2.8 and len(result.held_out["agree"]) == 3

    nothing = LoraParts(config, init_lora(jax.random.key(0), config, target))
    workers = (
        uno(target, Lora(config, fuse_lora(*adapter, target, jnp.float32))) for adapter in (nothing, result.draft)
    )
    before, after = (accept_length(worker) for worker in workers)
    assert before < 2.4 and after > 2.8


SMALL = ["--steps", 4, "--batch-size", 2, "--seq-len", 64, "--held-out-every", 3]


def test_the_command_trains_an_adapter(tmp_path):
    """From text to an adapter that the engine loads; another run goes on from it."""
    write_checkpoint(tmp_path / "model")
    where, sizes = ["--model", tmp_path / "model"], ["--block-size", 4, "--rank", 3, "--alpha", 6]
    first = ["--work-dir", tmp_path / "work", *TEXT, "--storage", "bfloat16", "--kl-weight", 0.5]
    result = run("train", "uno", *where, *SMALL, *sizes, *first)
    assert result.exit_code == 0, result.output
    model, out = load_model(tmp_path / "model"), tmp_path / "work" / "draft"
    config, parts = load_lora_parts(out, model.target, base=model.name)
    assert (config.rank, config.alpha, config.block_size, config.base) == (3, 6.0, 4, "model")
    learnt = [np.abs(pair["b"]).max() for layer in parts.values() for pair in layer.values()]
    assert min(learnt) > 0  # it started from zero
    record = json.loads((out / "training.json").read_text())
    assert record["kind"] == "uno" and record["options"]["kl_weight"] == 0.5
    assert 2 <= record["held_out"]["accept_len"] <= 5 and len(record["held_out"]["loss"]) == 3
    on = ["--work-dir", tmp_path / "on", "--features", tmp_path / "work" / "features", "--init", out]
    result = run("train", "uno", *where, *SMALL, *sizes, *on)
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "on" / "draft" / "training.json").read_text())["init"]["kind"] == "uno"
    result = run("train", "uno", *where, *SMALL, *sizes[:2], *on, "--work-dir", tmp_path / "off")
    assert result.exit_code == 2 and "init=" in result.stderr and "rank=3, the draft to train has 16" in result.stderr


@pytest.mark.parametrize(
    ("kind", "options", "pieces"),
    [
        ("uno", ["--rank", 0], ["rank=0", "at least 1"]),
        ("uno", ["--alpha", 0], ["alpha=0.0", "positive"]),
        ("uno", ["--block-size", 1], ["block_size=1", "at least 2"]),
        ("uno", ["--block-size", 33], ["block_size=33", "at most 32"]),
        ("uno", ["--kl-weight", -1], ["kl_weight=-1.0", "at least 0"]),
        ("uno", ["--copy-heads", 2], ["copy_heads=2", "'uno'"]),
        ("uno", ["--draft-vocab-size", 100], ["draft_vocab_size=100", "'uno'"]),
        ("uno", ["--intermediate-size", 8], ["intermediate_size=8", "'uno'"]),
        ("uno", ["--unroll", 3], ["unroll=3", "'uno'"]),
        ("eagle3", ["--rank", 4], ["rank=4", "'eagle3'", "it is for uno"]),
        ("dflash", ["--kl-weight", 0.5], ["kl_weight=0.5", "'dflash'", "it is for uno"]),
    ],
)
def test_options_that_do_not_fit(tmp_path, kind, options, pieces):
    """Refused before anything is read or written."""
    result = run("train", kind, "--model", tmp_path / "none", "--work-dir", tmp_path / "work", *options)
    assert result.exit_code == 2 and result.stdout == "" and not (tmp_path / "work").exists(), result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and all(piece in line for piece in pieces)
