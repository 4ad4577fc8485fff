"""Draft directories: round trips, and what is said of one that cannot be used."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jspec.models.eagle_draft import EagleConfig, eagle_draft, init_draft_params
from jspec.models.eagle_files import load_draft, save_draft
from jspec.models.int8_rows import dequantize_rows, quantize_rows
from jspec.models.rope import RopeScaling
from jspec.models.tensor_files import CONFIG, RECORD, WEIGHTS
from jspec.models.tiny import random_target

V, VD, H, MLP, HQ, HKV, D, L = 32, 12, 24, 20, 3, 1, 8, 8
IDS = np.sort(np.random.default_rng(0).permutation(V)[:VD]).astype(np.int32)


@pytest.fixture(scope="module")
def target():
    return random_target(
        0, vocab_size=V, hidden_size=H, intermediate_size=16, num_layers=L, num_heads=HQ, num_kv_heads=HKV, head_dim=D
    )


def config_of(kind: str, **changes) -> EagleConfig:
    own = {"eagle3": {"capture_layers": (1, 3, 4)}, "multi-layer": {"num_modules": 2, "chained": True}}.get(kind, {})
    sizes = {"vocab_size": V, "draft_vocab_size": VD, "hidden_size": H, "intermediate_size": MLP, "context_len": 64}
    heads = {"num_heads": HQ, "num_kv_heads": HKV, "head_dim": D, "rms_norm_eps": 1e-6, "rope_theta": 5e5}
    return EagleConfig(kind=kind, **{**sizes, **heads, **own, **changes})


def draft_of(config: EagleConfig, target, token_ids=IDS):
    params = init_draft_params(jax.random.key(0), config)
    shapes = jax.tree.map(lambda leaf: leaf.shape, params)  # norms too become random: a swap of two must show
    rng = np.random.default_rng(1)
    params = jax.tree.map(
        lambda s: jnp.asarray(rng.standard_normal(s), jnp.float32), shapes, is_leaf=lambda s: isinstance(s, tuple)
    )
    token_ids = token_ids if config.draft_vocab_size < V else None
    head = target.head(target.params)
    head = head if token_ids is None else head[token_ids]
    return eagle_draft(config, params, embed=target.embedding(target.params), head=head, token_ids=token_ids)


def tensors_of(folder):
    return safetensors.numpy.load_file(folder / WEIGHTS)


def change_tensors(folder, **changes):
    """Names with "__" for "."; None removes."""
    tensors = tensors_of(folder)
    for name, value in changes.items():
        name = name.replace("__", ".")
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = np.ascontiguousarray(value)
    safetensors.numpy.save_file(tensors, folder / WEIGHTS)


def change_config(folder, **changes):
    raw = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps({k: v for k, v in raw.items() if v != "absent"}))


@pytest.fixture
def folder(tmp_path, target):
    save_draft(tmp_path, draft_of(config_of("eagle3"), target))
    return tmp_path


# --- round trips ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        config_of("eagle3"),
        config_of("eagle3", draft_vocab_size=V, capture_layers=(2,)),
        config_of("eagle3", rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_context_len=32)),
        config_of("eagle"),
        config_of("eagle", draft_vocab_size=V, rope_scaling=RopeScaling(kind="linear", factor=2.0)),
        config_of("multi-layer"),
        config_of("multi-layer", draft_vocab_size=V, num_modules=1, chained=False),
    ],
    ids=lambda c: f"{c.kind}-{c.draft_vocab_size}",
)
def test_a_draft_comes_back_as_it_was(config, target, tmp_path):
    draft = draft_of(config, target)
    save_draft(tmp_path, draft)
    again = load_draft(tmp_path, target)
    assert again.config == config and again.facts == draft.facts
    jax.tree.map(np.testing.assert_array_equal, again.params, draft.params)
    assert sorted(p.name for p in tmp_path.iterdir()) == [CONFIG, WEIGHTS]


@pytest.mark.parametrize(("storage", "error"), [("bfloat16", 2**-8), ("int8", 0.5 / 127)])
def test_smaller_storage_rounds_matrices_only(storage, error, target, tmp_path):
    draft = draft_of(config_of("eagle3"), target)
    save_draft(tmp_path, draft, storage=storage)
    own, found = draft.params["own"], load_draft(tmp_path, target).params["own"]
    np.testing.assert_array_equal(found["module_0"]["norms"], own["module_0"]["norms"])
    largest = jnp.abs(own["fc"]).max(axis=1, keepdims=True)
    assert 0 < (jnp.abs(found["fc"] - own["fc"]) / largest).max() <= error * 1.001
    size = (tmp_path / WEIGHTS).stat().st_size
    save_draft(tmp_path, draft)
    assert size < (0.65 if storage == "bfloat16" else 0.45) * (tmp_path / WEIGHTS).stat().st_size


def test_int8_rows():
    matrix = np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32) * np.array(
        [[1], [1e-3], [1e4], [0], [1]]
    )
    rows, scale = quantize_rows(matrix)
    assert rows.dtype == np.int8 and scale.dtype == np.float32 and np.abs(rows[:3]).max(axis=1).tolist() == [127] * 3
    assert (np.abs(dequantize_rows(rows, scale) - matrix) <= scale[:, None] * 0.5001).all()


def test_d2t_holds_offsets_and_t2d_says_which_tokens_have_one(folder):
    tensors = tensors_of(folder)
    assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == bool
    np.testing.assert_array_equal(tensors["d2t"] + np.arange(VD), IDS)
    np.testing.assert_array_equal(np.nonzero(tensors["t2d"])[0], IDS)


def test_a_record_lies_beside_the_draft(target, tmp_path):
    save_draft(tmp_path, draft_of(config_of("eagle3"), target), record={"steps": 3})
    assert json.loads((tmp_path / RECORD).read_text()) == {"steps": 3}


def test_the_dtype_of_weights_is_chosen_when_loading(folder, target):
    own = load_draft(folder, target, dtype=jnp.bfloat16).params["own"]
    assert own["fc"].dtype == jnp.bfloat16 and own["final_norm"].dtype == jnp.float32


# --- what cannot be used ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "pieces"),
    [
        ({"hidden_size": 48}, ["hidden_size=48", "the target's 24"]),
        ({"vocab_size": 33}, ["vocab_size=33", "the target's 32"]),
        ({"target_hidden_size": 48}, ["target_hidden_size=48"]),
        ({"draft_vocab_size": 33}, ["draft_vocab_size=33", "vocab_size=32"]),
        ({"draft_vocab_size": "12"}, ["draft_vocab_size='12'", "int"]),
        ({"draft_vocab_size": 10}, ["'d2t'", "(12,)", "(10,)"]),
        ({"intermediate_size": 8}, ["gate_proj", "(20, 24)", "(8, 24)"]),
        ({"num_attention_heads": "absent"}, ["num_attention_heads"]),
        ({"architectures": ["Qwen9"]}, ["architectures=['Qwen9']", "LlamaForCausalLMEagle3"]),
        ({"architectures": "absent"}, ["architectures=None"]),
        ({"architectures": ["LlamaForCausalLMEagle"]}, ["'fc.weight'", "(24, 48)"]),
        ({"norm_before_residual": True}, ["norm_before_residual=True"]),
        ({"attention_bias": True}, ["attention_bias=True"]),
        ({"eagle_config": [1]}, ["eagle_config=[1]"]),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 8]}}, ["layer_ids=[0, 1, 8]", "0..7"]),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}, ["'fc.weight'", "(24, 72)", "(24, 48)"]),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "012"}}, ["layer_ids='012'"]),
        ({"eagle_config": {"use_aux_hidden_state": False}}, ["use_aux_hidden_state=False"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, ["rope_scaling.rope_type='yarn'"]),
    ],
)
def test_a_config_that_does_not_fit_is_refused(folder, target, changes, pieces):
    change_config(folder, **changes)
    with pytest.raises(ValueError) as refusal:
        load_draft(folder, target)
    message = str(refusal.value)
    assert message.startswith(str(folder)) and all(piece in message for piece in pieces), message


OFFSETS = IDS.astype(np.int64) - np.arange(VD)
ONES = np.ones((H, H), np.float32)


@pytest.mark.parametrize(
    ("changes", "pieces"),
    [
        ({"d2t": None}, ["'d2t'", "draft_vocab_size=12 is less than vocab_size=32"]),
        ({"d2t": np.where(np.arange(VD) == 3, 40, OFFSETS)}, ["d2t[3]=40", "0..31"]),
        ({"d2t": np.where(np.arange(VD) == 0, -1, OFFSETS)}, ["d2t[0]=-1"]),
        ({"d2t": np.zeros(VD, np.int64) - np.arange(VD)}, ["d2t[0]=0 and d2t[1]=-1", "token 0"]),
        ({"d2t": OFFSETS.astype(np.float32)}, ["'d2t'", "F32", "I64"]),
        ({"d2t": OFFSETS[:-1]}, ["'d2t'", "(11,)", "(12,)"]),
        ({"norm__weight": None}, ["'norm.weight'"]),
        ({"more": ONES}, ["'more'"]),
        ({"fc__weight": ONES}, ["'fc.weight'", "(24, 24)"]),
        ({"fc__weight": np.ones((H, 3 * H), np.int32)}, ["'fc.weight'", "I32"]),
        ({"fc__weight": np.ones((H, 3 * H), np.int8)}, ["'fc.weight_scale'"]),
        ({"norm__weight": np.ones(H, np.int8)}, ["'norm.weight'"]),
        (
            {"fc__weight": np.ones((H, 3 * H), np.int8), "fc__weight_scale": np.ones(3, np.float32)},
            ["'fc.weight_scale'", "(24,)"],
        ),
        ({"fc__weight": np.full((H, 3 * H), np.nan, np.float32)}, ["'fc.weight'", "NaN"]),
    ],
)
def test_tensors_that_do_not_fit_are_refused(folder, target, changes, pieces):
    change_tensors(folder, **changes)
    with pytest.raises(ValueError) as refusal:
        load_draft(folder, target)
    message = str(refusal.value)
    assert message.startswith(str(folder / WEIGHTS)) and all(piece in message for piece in pieces), message


@pytest.mark.parametrize("keep", [0, 4, 300, -10])
def test_a_truncated_file_is_refused(folder, target, keep):
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match="truncated or damaged"):
        load_draft(folder, target)


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_a_config_that_is_none_is_refused(folder, target, content):
    (folder / CONFIG).write_text(content)
    with pytest.raises(ValueError, match=rf"{CONFIG} is damaged"):
        load_draft(folder, target)


def test_missing_files_are_named(folder, target, tmp_path):
    with pytest.raises(FileNotFoundError, match="gone does not exist"):
        load_draft(tmp_path / "gone", target)
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=rf"{WEIGHTS} is missing.*convert pytorch_model\.bin"):
        load_draft(folder, target)
    (folder / "pytorch_model.bin").rename(folder / WEIGHTS)
    (folder / CONFIG).unlink()
    with pytest.raises(FileNotFoundError, match=f"{CONFIG} is missing"):
        load_draft(folder, target)


def test_saving_refuses_unknown_storage_and_weights_that_are_not_finite(target, tmp_path):
    draft = draft_of(config_of("eagle3"), target)
    with pytest.raises(ValueError, match="storage='int4' must be one of"):
        save_draft(tmp_path / "a", draft, storage="int4")
    own = draft.params["own"] | {"fc": draft.params["own"]["fc"].at[0, 0].set(jnp.inf)}
    with pytest.raises(ValueError, match=r"'fc\.weight' holds 1 values"):
        save_draft(tmp_path / "a", draft._replace(params=draft.params | {"own": own}))
    assert not (tmp_path / "a").exists()
