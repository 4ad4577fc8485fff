"""Drafts as others publish them, written by hand: every tensor lands where it belongs."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jspec.models.eagle_files import load_draft
from jspec.models.tensor_files import CONFIG, WEIGHTS
from jspec.models.tiny import random_target

V, VD, H, MLP, HQ, HKV, D, L = 32, 12, 24, 20, 3, 1, 8, 8
IDS = np.sort(np.random.default_rng(0).permutation(V)[:VD]).astype(np.int32)


@pytest.fixture(scope="module")
def target():
    return random_target(
        0, vocab_size=V, hidden_size=H, intermediate_size=16, num_layers=L, num_heads=HQ, num_kv_heads=HKV, head_dim=D
    )


PUBLIC = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "vocab_size": V,
    "draft_vocab_size": VD,
    "hidden_size": H,
    "intermediate_size": MLP,
    "num_attention_heads": HQ,
    "num_key_value_heads": HKV,
    "head_dim": D,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def public_layer(prefix: str, reads: int, norms) -> dict:
    shapes = {
        "self_attn.q_proj": (HQ * D, reads),
        "self_attn.k_proj": (HKV * D, reads),
        "self_attn.v_proj": (HKV * D, reads),
        "self_attn.o_proj": (H, HQ * D),
        "mlp.gate_proj": (MLP, H),
        "mlp.up_proj": (MLP, H),
        "mlp.down_proj": (H, MLP),
    } | dict.fromkeys(norms, (H,))
    return {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}


EAGLE3 = {"fc.weight": (H, 3 * H), "norm.weight": (H,), "lm_head.weight": (VD, H)} | public_layer(
    "midlayer", 2 * H, ("input_layernorm", "hidden_norm", "post_attention_layernorm")
)
EAGLE1 = {"fc.weight": (H, 2 * H), "embed_tokens.weight": (V, H)} | public_layer(
    "layers.0", H, ("post_attention_layernorm",)
)
NO_DRAFT_VOCAB = {"draft_vocab_size": "absent", "architectures": ["LlamaForCausalLM"]}


def write_public(folder, shapes, *, dtype=np.float32, extra=(), **config):
    rng = np.random.default_rng(2)
    tensors = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    safetensors.numpy.save_file(tensors | dict(extra), folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps({k: v for k, v in (PUBLIC | config).items() if v != "absent"}))
    return {name: value.astype(np.float32) for name, value in tensors.items()}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLMEagle3", "LlamaForCausalLM"])
def test_a_public_eagle3_draft(dtype, architecture, target, tmp_path):
    maps = {"d2t": IDS.astype(np.int64) - np.arange(VD), "t2d": np.isin(np.arange(V), IDS)}
    want = write_public(tmp_path, EAGLE3, dtype=dtype, extra=maps, architectures=[architecture])
    draft = load_draft(tmp_path, target)
    own, layer = draft.params["own"], draft.params["own"]["module_0"]
    assert draft.facts.capture_layers == (1, L // 2 - 1, L - 4)  # the convention, where the config does not say
    assert draft.config.rope_theta == 10000.0 and draft.config.rms_norm_eps == 1e-6
    np.testing.assert_array_equal(own["fc"], want["fc.weight"])
    np.testing.assert_array_equal(own["head"], want["lm_head.weight"])
    np.testing.assert_array_equal(own["final_norm"], want["norm.weight"])
    attention = [want[f"midlayer.self_attn.{n}_proj.weight"] for n in "qkv"]
    np.testing.assert_array_equal(layer["qkv"], np.concatenate(attention))
    gate_up = [want[f"midlayer.mlp.{n}_proj.weight"] for n in ("gate", "up")]
    np.testing.assert_array_equal(layer["gate_up"], np.concatenate(gate_up))
    norms = [want[f"midlayer.{n}.weight"] for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
    np.testing.assert_array_equal(layer["norms"], norms)
    np.testing.assert_array_equal(draft.token_ids(draft.params, jnp.arange(VD)), IDS)


@pytest.mark.parametrize("bias", [True, False])
def test_a_public_eagle1_draft(bias, target, tmp_path):
    shapes = EAGLE1 | ({"fc.bias": (H,)} if bias else {})
    want = write_public(tmp_path, shapes, **NO_DRAFT_VOCAB)
    draft = load_draft(tmp_path, target)
    assert draft.config.kind == "eagle" and draft.facts.draft_vocab_size == V and draft.facts.capture_layers == ()
    np.testing.assert_array_equal(draft.params["own"]["module_0"]["fc"], want["fc.weight"])
    np.testing.assert_array_equal(draft.params["own"]["module_0"]["fc_bias"], want["fc.bias"] if bias else np.zeros(H))
    np.testing.assert_array_equal(draft.params["shared"]["embed"], target.embedding(target.params))
    np.testing.assert_array_equal(draft.params["shared"]["head"], target.head(target.params))


def test_layers_to_capture_and_a_full_vocabulary(target, tmp_path):
    shapes = EAGLE3 | {"fc.weight": (H, 2 * H), "lm_head.weight": (V, H)}
    config = {"draft_vocab_size": V, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 7]}}
    write_public(tmp_path, shapes, extra={"d2t": np.zeros(V, np.int64)}, **config)
    draft = load_draft(tmp_path, target)
    assert draft.facts.capture_layers == (2, 7) and "token_ids" not in draft.params["shared"]
