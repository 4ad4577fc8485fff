"""Frozen-KV assistants in training: the keys and values that they ask are the target's own, and one learns its target."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_checkpoint import write_checkpoint
from training import kit
from training.test_job import SMALL, TEXT, run

from jspec.models.draft_files import load_draft
from jspec.models.frozen_kv_draft import FrozenKVConfig, frozen_kv_draft, init_frozen_params
from jspec.models.loading import load_model
from jspec.models.tiny import random_target
from jspec.spec_workers.forward import prefill_batch
from jspec.spec_workers.frozen_kv_mtp import frozen_batch
from jspec.training import prompts
from jspec.training.frozen_kv_loss import frozen_kv_loss, kv_weights, target_kv
from jspec.training.loss import Batch
from jspec.training.train import train


@pytest.fixture(scope="module", autouse=True)
def _quick():
    # Compiling takes nearly all the time of these tests: less without most of the optimiser.
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "stdlib_functions", kit.few_functions)
        yield
    jax.config.update("jax_disable_most_optimizations", False)


def config_of(target, **changes) -> FrozenKVConfig:
    facts = target.facts
    sizes = {"vocab_size": facts.vocab_size, "draft_vocab_size": facts.vocab_size, "context_len": facts.context_len}
    sizes |= {"target_hidden_size": facts.hidden_size, "num_kv_heads": facts.num_kv_heads, "head_dim": facts.head_dim}
    own = {"hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "kv_layers": (facts.num_layers - 1,)}
    return FrozenKVConfig(**(sizes | own | changes))


def test_the_loss_is_that_of_what_the_worker_computes():
    """Along a chain of two from each row, by the draft's forward over the target's pages; and the keys and values are those in them."""
    target = random_target(0, vocab_size=32, hidden_size=16, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=8)
    config = config_of(target, kv_layers=(2, 1))
    params = jax.tree.map(lambda x: x * 10 if x.ndim > 1 else x, init_frozen_params(jax.random.key(0), config))
    draft = frozen_kv_draft(config, params, embed=target.embedding(target.params))
    length, one, page = 9, jnp.ones(1, jnp.int32), 4
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, length + 1), jnp.int32)
    table = jnp.asarray([[2, 3, 1]], jnp.int32)
    batch, _ = prefill_batch(tokens[:-1], one, one - 1, length * one, table, page_size=page)
    out = target.forward(target.params, batch, target.init_kv(3, page), capture_layers=(1, 0))
    weights, pages = kv_weights(target, config.kv_layers), np.asarray(out.kv_pages)
    for index, layer in enumerate(config.kv_layers):
        keys, values = target_kv(target.config, weights, index, out.captured[:, index], jnp.arange(length))
        for position in range(length):
            at = (layer, int(table[0, position // page]), slice(None), position % page)
            stored = pages[at]
            np.testing.assert_allclose(stored, np.concatenate([keys[position], values[position]], axis=-1), atol=1e-4)

    head, total = target.head(target.params), 0.0
    hidden, weight = out.hidden, np.ones(length)
    losses = []
    for depth in range(2):
        row_losses, after = [], []
        for t in range(length):
            token = tokens[jnp.minimum(t + 1 + depth, length)]
            asked = frozen_batch(one, (t + 1) * one, table, width=1)
            x, state = draft.forward(
                draft.params, token[None], hidden[t][None], asked, out.kv_pages, pool_layers=(2, 1)
            )
            after.append(state[0])
            if t + 1 + depth < length:
                probs = jax.nn.softmax(head @ out.hidden[t + 1 + depth])
                row_losses.append(-jnp.sum(probs * jax.nn.log_softmax(draft.logits(draft.params, x)[0])))
        losses.append(float(np.mean(row_losses)))
        hidden, total = jnp.stack(after), total + 0.5**depth * losses[-1]
    rows = Batch(tokens[None], out.captured[None], out.hidden[None], jnp.asarray(weight)[None])
    found, metrics = frozen_kv_loss(draft, params, target.config, weights, head, rows, depths=2, decay=0.5)
    np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-4)
    np.testing.assert_allclose(found, total, rtol=1e-4)


def test_an_assistant_learns_its_target(tmp_path):
    stored = kit.store(tmp_path / "features", kit.answers(40))
    config = config_of(kit.target(), kv_layers=(1, 1))
    stored = kit.reopen(tmp_path / "features", capture_layers=(0,))
    result = train(config, kit.target(), stored, kit.train_options(steps=60), work_dir=tmp_path / "run")
    assert result.held_out["accept_len"] > 2 and len(result.held_out["agree"]) == 2


def test_the_command_trains_an_assistant(tmp_path):
    write_checkpoint(tmp_path / "model")
    where = ["--model", tmp_path / "model", "--work-dir", tmp_path / "work"]
    result = run("train", "frozen-kv-mtp", *where, *TEXT, *SMALL, "--hidden-size", 12, "--unroll", 2)
    assert result.exit_code == 0, result.output
    draft = load_draft(tmp_path / "work" / "draft", load_model(tmp_path / "model").target)
    assert draft.config.hidden_size == 12 and len(draft.config.kv_layers) == 2
    where = ["--model", tmp_path / "model", "--work-dir", tmp_path / "no", "--features", tmp_path / "work" / "features"]
    result = run("train", "frozen-kv-mtp", *where, *SMALL, "--copy-heads", 2)
    assert result.exit_code == 2 and "copy_heads=2" in result.stderr
