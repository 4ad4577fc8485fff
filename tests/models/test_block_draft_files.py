"""Directories of block drafts: round trips, and what is said of one that cannot be used."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jspec.models.block_draft import BlockDraftConfig, block_param_shapes
from jspec.models.block_draft_layout import default_block_captures
from jspec.models.draft_files import load_draft, save_draft
from jspec.models.rope import RopeScaling
from jspec.models.tensor_files import CONFIG, RECORD, WEIGHTS
from jspec.models.tiny import random_target
from jspec.models.tiny_block_draft import build_block_draft, tiny_block_config

V, L = 32, 8
IDS = tuple(sorted(np.random.default_rng(0).permutation(V)[:12].tolist()))
SHAPES = {
    "dflash": {"num_layers": 1, "qk_norm": False},
    "dflash, a window": {"window": 24, "capture_layers": (1, 3, 4), "rope_scaling": RopeScaling(kind="linear", factor=2.0)},
    "dspark": {"kind": "dspark", "confidence": True},
    "dspark gated": {"kind": "dspark", "markov_head": "gated", "sample_from_anchor": True},
    "dspark rnn": {"kind": "dspark", "markov_head": "rnn", "confidence": True, "token_ids": IDS},
}  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return random_target(0, vocab_size=V, hidden_size=24, intermediate_size=16, num_layers=L, num_heads=3, num_kv_heads=1, head_dim=8)  # fmt: skip


def draft_of(target, name: str):
    """Every leaf random, norms too: a swap of two must show."""
    options = dict(SHAPES[name])
    ids = options.pop("token_ids", None)
    config = tiny_block_config(target, token_ids=ids, **options)
    rng = np.random.default_rng(1)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), jnp.float32), block_param_shapes(config)
    )
    return build_block_draft(target, config, params, ids)


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_saved_is_loaded(tmp_path, target, name):
    draft = draft_of(target, name)
    save_draft(tmp_path, draft, target, record={"steps": 3})
    again = load_draft(tmp_path, target)
    assert again.config == draft.config and again.facts == draft.facts
    jax.tree.map(np.testing.assert_array_equal, again.params, draft.params)
    assert json.loads((tmp_path / RECORD).read_text()) == {"steps": 3}


def test_int8_is_off_by_half_a_scale(tmp_path, target):
    draft = draft_of(target, "dspark")
    save_draft(tmp_path, draft, target, storage="int8")
    again = load_draft(tmp_path, target).params["own"]
    for path, leaf in jax.tree_util.tree_leaves_with_path(draft.params["own"]):
        found = again
        for key in path:
            found = found[key.key]
        most = (
            np.abs(leaf).max(axis=-1, keepdims=True) / 254 * 1.001
            if leaf.ndim == 2 and "norm" not in path[-1].key
            else 0
        )
        assert (np.abs(found - leaf) <= most + 1e-7).all(), path


def change(folder, **fields):
    raw = json.loads((folder / CONFIG).read_text())
    for name, value in fields.items():
        where = raw
        *folders, last = name.split("__")
        for part in folders:
            where = where[part]
        where[last] = value
        if value is None:
            del where[last]
    (folder / CONFIG).write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("fields", "pieces"),
    [
        ({"dspark_config__mask_token_id": None}, ["no field 'mask_token_id'"]),
        ({"dspark_config__mask_token_id": V}, [f"mask_token_id={V} must lie in 0..{V - 1}"]),
        ({"dspark_config__markov_rank": 0}, ["markov_rank=0 must be at least 1"]),
        ({"dspark_config__markov_head_type": "lstm"}, ["markov_head='lstm' must be one of vanilla, gated, rnn"]),
        ({"dspark_config__block_size": 40}, ["block_size=40 must lie in 1..31"]),
        ({"dspark_config__target_layer_ids": [0, 8]}, ["target_layer_ids=[0, 8] must lie in 0..7"]),
        ({"dspark_config__target_layer_ids": "0"}, ["target_layer_ids='0' must be a list"]),
        ({"hidden_size": 48}, ["hidden_size=48 must be the target's 24", "made for this target"]),
        ({"vocab_size": 33}, ["vocab_size=33 must be the target's 32"]),
        ({"num_target_layers": 9}, ["num_target_layers=9 must be the target's 8"]),
        ({"speculators_model_type": "dflash"}, ["speculators_model_type='dflash'", "other positions"]),
        ({"intermediate_size": 25}, ["tensor 'layers.0.mlp.gate_proj.weight' has shape", "its config says"]),
        ({"dspark_config__confidence_head": False}, ["holds tensor 'confidence_head.bias'", "'dspark' does not use"]),
        ({"draft_vocab_size": 12}, ["no tensor 'd2t'", "draft_vocab_size=12 is less than"]),
        ({"layer_types": ["sliding_attention", "full_attention"]}, ["layer_types", "not implemented"]),
    ],
)
def test_a_bad_draft_names_its_field(tmp_path, target, fields, pieces):
    save_draft(tmp_path, draft_of(target, "dspark"), target)
    change(tmp_path, **fields)
    with pytest.raises(ValueError) as error:
        load_draft(tmp_path, target)
    assert all(piece in str(error.value) for piece in (str(tmp_path), *pieces)), str(error.value)


def test_a_missing_head_and_a_broken_weight(tmp_path, target):
    save_draft(tmp_path, draft_of(target, "dspark"), target)
    tensors = safetensors.numpy.load_file(tmp_path / WEIGHTS)
    broken = tensors | {"fc.weight": np.full_like(tensors["fc.weight"], np.nan)}
    safetensors.numpy.save_file(broken, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=r"tensor 'fc.weight' holds \d+ values that are NaN"):
        load_draft(tmp_path, target)
    del tensors["markov_head.w1.weight"]
    safetensors.numpy.save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=r"no tensor 'markov_head\.w1\.weight', which its config asks for"):
        load_draft(tmp_path, target)


def test_layers_that_are_read_by_default():
    """The convention of DFlash's own checkpoints: five layers of a draft for a target of 36."""
    assert default_block_captures(36, 5) == (1, 9, 17, 25, 33)
    assert default_block_captures(30, 1) == (15,)


@pytest.mark.parametrize(
    ("fields", "pieces"),
    [
        ({"kind": "eagle3"}, ["kind='eagle3'"]),
        ({"block_size": 1}, ["block_size=1 must lie in 2..32"]),
        ({"window": 4}, ["window=4 must be at least 5"]),
        ({"num_heads": 3, "num_kv_heads": 2}, ["num_heads=3 must be a multiple"]),
        ({"capture_layers": ()}, ["capture_layers=()"]),
        ({"markov_rank": 4}, ["markov_rank=4", "left out for 'dflash'"]),
        ({"head_dim": 7}, ["head_dim=7 must be even"]),
    ],
)
def test_sizes_that_do_not_fit(target, fields, pieces):
    with pytest.raises(ValueError) as error:
        tiny_block_config(target, **fields)
    assert all(piece in str(error.value) for piece in pieces), str(error.value)


def test_the_config_is_a_value(target):
    assert isinstance(hash(tiny_block_config(target)), int)
    assert BlockDraftConfig.__dataclass_params__.frozen
