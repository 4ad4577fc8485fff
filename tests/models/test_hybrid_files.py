"""Hybrid models from Hugging Face directories: what is refused, by name, and what is not part of the model. Logits: see `test_against_transformers`."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jspec.models.gated_delta import GatedDelta
from jspec.models.hybrid_files import hybrid_config, hybrid_tensors
from jspec.models.loading import load_model
from jspec.models.mamba2 import Mamba2
from jspec.models.tiny_hybrid import random_hybrid

COMMON = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": 2,
}
BAMBA = COMMON | {
    "architectures": ["BambaForCausalLM"],
    "attn_layer_indices": [1],
    "mamba_n_heads": 4,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
NEXT = COMMON | {
    "architectures": ["Qwen3NextForCausalLM"],
    "head_dim": 16,
    "full_attention_interval": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 0,
}


def parse(raw, **changes):
    return hybrid_config("config.json", {k: v for k, v in (raw | changes).items() if v != "absent"}, (2,))


def test_sizes_and_what_is_left_to_defaults():
    config = parse(BAMBA)
    assert config.mixer == Mamba2(num_heads=4, head_dim=8, num_groups=1, state_size=8, conv_size=4)
    assert (config.attention_layers, config.rotary_dim, config.base.head_dim) == ((1,), 2, 4)
    assert not config.attention_gate and not config.base.qk_norm
    config = parse(NEXT)
    assert config.mixer == GatedDelta(num_key_heads=2, num_value_heads=4, key_dim=4, value_dim=8, conv_size=4)
    assert (config.attention_layers, config.rotary_dim) == ((1,), 4) and config.attention_gate and config.base.qk_norm
    assert parse(NEXT, layer_types=["linear_attention"] * 2 + ["full_attention"]).attention_layers == (2,)
    assert parse(NEXT, partial_rotary_factor=0.5).rotary_dim == 8
    assert parse(NEXT, rope_parameters={"rope_theta": 500.0, "partial_rotary_factor": 1.0}).rotary_dim == 16
    assert parse(NEXT, rope_theta=500).base.rope_theta == 500.0
    assert parse(BAMBA, time_step_limit=[0.0, float("inf")]) == parse(BAMBA)
    assert parse(NEXT, num_experts=8, mlp_only_layers=[0, 1, 2]) == parse(NEXT)
    assert parse(NEXT, num_experts=8, decoder_sparse_step=4) == parse(NEXT)


@pytest.mark.parametrize(
    ("raw", "changes", "message"),
    [
        (NEXT, {"num_experts": 8}, r"num_experts=8 is not implemented: every layer must have a dense MLP"),
        (NEXT, {"num_experts": 8, "mlp_only_layers": [0, 2]}, r"num_experts=8 is not implemented"),
        (NEXT, {"rope_parameters": {"rope_type": "yarn"}}, r"rope_type='yarn' is not implemented: it must be 'default'"),
        (NEXT, {"attention_bias": True}, r"attention_bias=True is not implemented"),
        (NEXT, {"linear_num_key_heads": "absent"}, r"no field 'linear_num_key_heads', which Qwen3NextForCausalLM needs"),
        (NEXT, {"linear_num_key_heads": 3}, r"num_value_heads=4 must be a multiple of num_key_heads=3"),
        (NEXT, {"layer_types": ["linear_attention"] * 3}, r"attention_layers=\(\) must ascend within 0..2"),
        (NEXT, {"layer_types": ["full_attention"] * 3}, r"attention_layers=\(0, 1, 2\) are all layers"),
        (NEXT, {"partial_rotary_factor": 0.2}, r"rotary_dim=3 must be even and lie in \[2, head_dim=16\]"),
        (BAMBA, {"mamba_proj_bias": True}, r"mamba_proj_bias=True is not implemented"),
        (BAMBA, {"mamba_conv_bias": False}, r"mamba_conv_bias=False is not implemented: it must be True or absent"),
        (BAMBA, {"time_step_limit": [0.0, 1.0]}, r"time_step_limit=\[0.0, 1.0\] is not implemented"),
        (BAMBA, {"attn_layer_indices": [3]}, r"attention_layers=\(3,\) must ascend within 0..2, and be at least one"),
        (BAMBA, {"attn_layer_indices": "absent"}, r"attention_layers=\(\) must ascend within 0..2"),
        (BAMBA, {"mamba_n_groups": 3}, r"num_heads=4 must be a multiple of num_groups=3"),
        (BAMBA, {"mamba_d_state": 0}, r"state_size=0 must be at least 1"),
        (BAMBA, {"hidden_act": "gelu"}, r"hidden_act='gelu' is not implemented"),
    ],
)  # fmt: skip
def test_what_is_not_implemented_is_refused(raw, changes, message):
    with pytest.raises(ValueError, match=message):
        parse(raw, **changes)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(NEXT))
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in hybrid_tensors("Qwen3NextForCausalLM", parse(NEXT))
    }
    safetensors.numpy.save_file(
        tensors | {"mtp.fc.weight": np.ones((2, 2), np.float32)}, tmp_path / "model.safetensors"
    )
    return tmp_path, tensors


def test_modules_for_drafting_are_left_out_and_other_tensors_refused(folder):
    folder, tensors = folder
    model = load_model(folder, dtype="bfloat16")
    assert model.target.params["layer_0"]["in"].dtype == jnp.bfloat16
    assert model.target.params["a_log"].dtype == jnp.float32 and model.target.facts.eos_token_ids == (2,)
    safetensors.numpy.save_file(
        tensors | {"model.layers.0.mlp.extra": np.ones(2, np.float32)}, folder / "model.safetensors"
    )
    with pytest.raises(ValueError, match=r"holds tensor 'model.layers.0.mlp.extra', which no supported model uses"):
        load_model(folder)
    safetensors.numpy.save_file({k: v for k, v in tensors.items() if "A_log" not in k}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no tensor 'model.layers.0.linear_attn.A_log'"):
        load_model(folder)


@pytest.mark.parametrize("field", ["tensor_parallel", "data_parallel"])
def test_a_hybrid_runs_on_one_device(folder, field, monkeypatch):
    devices = load_model.__globals__["jax"].devices() * 2
    monkeypatch.setattr("jspec.models.parallel.jax.local_devices", lambda: devices)
    with pytest.raises(ValueError, match=f"{field}=2 is not implemented for Qwen3NextForCausalLM, which has recurrent"):
        load_model(folder[0], **{field: 2})


def test_bad_sizes_are_refused():
    config = random_hybrid(0).config
    with pytest.raises(ValueError, match=r"base.qkv_bias=True is not implemented"):
        dataclasses.replace(config, base=dataclasses.replace(config.base, qkv_bias=True))
    with pytest.raises(ValueError, match=r"mixer='mamba3' is unknown: choose one of"):
        random_hybrid(0, "mamba3")
