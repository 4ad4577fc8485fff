"""Training: a draft learns a target, and a killed run goes on bit for bit."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training import kit

from jspec.models.eagle_draft import eagle_draft
from jspec.models.tiny import random_target
from jspec.training.metrics import read_metrics
from jspec.training.train import METRICS, PLOT, train
from jspec.training.warm_start import warm_start


@pytest.fixture(scope="module", autouse=True)
def _quick_compiles():
    # Compiling takes nearly all the time of these tests: less without most of the optimiser.
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return kit.store(tmp_path_factory.mktemp("features"), kit.answers(40))


def run(folder, stored, options, *, config=None, **kwargs):
    return train(config or kit.draft_config(), kit.target(), stored, options, work_dir=folder, **kwargs)


@pytest.fixture(scope="module")
def trained(stored, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    options = kit.train_options(eval_every=15, checkpoint_every=12)
    return folder, options, run(folder, stored, options)


def assert_learned(folder, result, *, depths):
    losses = [r["loss"] for r in read_metrics(folder / METRICS) if "loss" in r]
    assert len(losses) == 40 and losses[-1] < 0.5 * losses[0]
    assert result.held_out["accept_len"] > 1.5 and len(result.held_out["agree"]) == depths
    assert result.held_out["sequences"] == 8
    # Every answer of 17 tokens has rows 2 to 18 that count; a whole chain of two needs two more.
    assert 8 * 15 / (depths + 1) <= result.held_out["verifies"] <= 8 * 15


def test_a_draft_learns_its_target(trained):
    folder, _, result = trained
    assert_learned(folder, result, depths=2)
    held_out = [(r["step"], r["held_out_accept_len"]) for r in read_metrics(folder / METRICS) if "held_out_loss" in r]
    assert [step for step, _ in held_out] == [14, 29, 40] and held_out[0][1] < held_out[-1][1]
    assert (folder / PLOT).read_bytes().startswith(b"\x89PNG")


def test_the_modules_of_a_multi_layer_draft_learn(stored, tmp_path):
    result = run(tmp_path, stored, kit.train_options(), config=kit.draft_config("multi-layer", chained=True))
    assert_learned(tmp_path, result, depths=2)


class Killed(Exception):
    pass


def killed_at(step):
    def progress(steps, total):
        for i in steps:
            if i == step:
                raise Killed
            yield i

    return progress


def test_a_killed_run_goes_on_bit_for_bit(trained, stored, tmp_path):
    folder, options, whole = trained
    with pytest.raises(Killed):
        run(tmp_path, stored, options, progress=killed_at(31))
    begun = []
    rest = run(tmp_path, stored, options, progress=lambda steps, total: (begun.append(total), steps)[1])
    assert begun == [40 - 24]
    jax.tree.map(np.testing.assert_array_equal, rest.draft.params, whole.draft.params)
    records = [
        [{k: v for k, v in r.items() if k != "seconds"} for r in read_metrics(f / METRICS)] for f in (tmp_path, folder)
    ]
    assert records[0] == records[1]
    again = run(tmp_path, stored, options)  # nothing left to do
    jax.tree.map(np.testing.assert_array_equal, again.draft.params, whole.draft.params)


@pytest.mark.parametrize("change", [{"seed": 1}, {"seq_len": 10}, {"held_out_every": 4}])
def test_a_run_of_other_options_is_refused(trained, stored, change):
    folder, options, _ = trained
    (name,) = change
    with pytest.raises(ValueError, match=f"{name}=.* this run has {name}="):
        run(folder, stored, dataclasses.replace(options, **change))


def test_a_run_of_another_draft_is_refused(trained, stored):
    folder, options, _ = trained
    with pytest.raises(ValueError, match=r"draft=.*run\.json"):
        run(folder, stored, options, config=kit.draft_config(intermediate_size=4))


def test_a_damaged_checkpoint_is_named(trained, stored, tmp_path):
    folder, options, _ = trained
    shutil.copytree(folder, tmp_path / "run")
    for file in (tmp_path / "run" / "checkpoints" / "steps" / "40").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    with pytest.raises(ValueError, match=r"steps/40 cannot be read"):
        run(tmp_path / "run", stored, options)


def test_a_loss_that_is_not_finite_ends_the_run(stored, tmp_path):
    features = tuple(np.full_like(rows, np.nan) for rows in stored.features)
    with pytest.raises(ValueError, match="training diverged at step 0"):
        run(tmp_path, dataclasses.replace(stored, features=features), kit.train_options(unroll_schedule=((0, 1),)))
    assert not any((tmp_path / "checkpoints" / "steps").iterdir())


def test_a_draft_of_a_smaller_vocabulary_proposes_only_its_tokens(stored, tmp_path):
    ids = np.arange(0, kit.VOCAB, 2, dtype=np.int32)
    config = kit.draft_config(draft_vocab_size=len(ids))
    result = run(tmp_path, stored, kit.train_options(steps=2, unroll_schedule=((0, 1),)), config=config, token_ids=ids)
    assert result.draft.params["own"]["head"].shape == (len(ids), kit.VOCAB)
    assert result.draft.token_ids(result.draft.params, jnp.arange(8)).tolist() == ids.tolist()
    assert 1 <= result.held_out["accept_len"] <= 2


def test_training_leaves_the_target_alone(trained):
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(kit.target().params))


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "multi-layer"])
def test_the_start_repeats_the_targets_token(kind):
    """Attention and MLP left out, a draft that passes its feature on says what the target said."""
    target = random_target(0, vocab_size=32, hidden_size=64, num_layers=3)
    own = {"eagle3": {"capture_layers": (0, 2)}, "multi-layer": {"num_modules": 2}}.get(kind, {})
    sizes = {"vocab_size": 32, "draft_vocab_size": 32, "hidden_size": 64, "intermediate_size": 128}
    config = dataclasses.replace(
        kit.draft_config(),
        kind=kind,
        **{"capture_layers": (), **sizes, **own},
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
    )
    params = warm_start(jax.random.key(0), config, target)
    for name in [name for name in params if name.startswith("module")]:
        assert params[name]["gate_up"].shape == (256, 64)
        np.testing.assert_array_equal(params[name]["gate_up"], target.params["layer_2"]["gate_up"])
        np.testing.assert_array_equal(params[name]["qkv"][:, -64:], target.params["layer_2"]["qkv"])
        params[name] |= {"o": jnp.zeros_like(params[name]["o"]), "down": jnp.zeros_like(params[name]["down"])}
    embed, head = target.embedding(target.params), target.head(target.params)
    draft = eagle_draft(config, params, embed=embed, head=head)
    x = np.random.default_rng(0).standard_normal((50, 64)).astype(np.float32)
    captured = jnp.stack([jnp.zeros_like(x), x], axis=1)
    normed = x / np.sqrt((x * x).mean(-1, keepdims=True))
    feature = draft.feature(draft.params, captured, jnp.asarray(normed))
    _, residual = draft.project_in(draft.params, jnp.arange(50) % 32, feature)
    out = draft.project_out(draft.params, residual, jnp.zeros((50, 64)))
    said = draft.logits(draft.params, out).argmax(-1)
    assert (said == (normed @ np.asarray(head).T).argmax(-1)).mean() > 0.8
