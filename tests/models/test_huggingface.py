"""Hugging Face directories: every shape they come in, and what is said when one cannot be loaded."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.flax
import safetensors.numpy
import tokenizers
from models.gguf_writing import CONFIG, random_tensors

from jspec.models.huggingface import load_huggingface
from jspec.models.huggingface_config import config_from_huggingface
from jspec.models.loading import load_model
from jspec.models.rope import RopeScaling

RAW = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 270,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "eos_token_id": 2,
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    safetensors.numpy.save_file(random_tensors(), tmp_path / "model.safetensors")
    return tmp_path


def parse(**changes):
    raw = {key: value for key, value in (RAW | changes).items() if value != "absent"}
    return config_from_huggingface("config.json", raw, (2,))


def test_a_directory_without_tokenizer_loads(folder):
    config, params, tokenizer = load_huggingface(folder, jnp.float32)
    assert config == CONFIG and tokenizer is None
    want = random_tensors()
    np.testing.assert_array_equal(params["embed"], want["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["norms"][1, 0], want["model.layers.1.input_layernorm.weight"])
    qkv = np.concatenate([want[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv"])
    np.testing.assert_array_equal(params["layer_1"]["qkv"], qkv)


def test_shards_bfloat16_old_buffers_and_a_stored_tied_head(folder):
    (folder / "model.safetensors").unlink()
    tensors = {name: jnp.asarray(t, jnp.bfloat16) for name, t in random_tensors().items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = jnp.ones(4)
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        safetensors.flax.save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(RAW | {"tie_word_embeddings": True}))
    for dtype in (jnp.float32, jnp.bfloat16):
        config, params, _ = load_huggingface(folder, dtype)
        assert config.tie_embeddings and "head" not in params and params["embed"].dtype == dtype
        np.testing.assert_array_equal(
            params["layer_0"]["o"], tensors["model.layers.0.self_attn.o_proj.weight"].astype(dtype)
        )
    (folder / "b.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"b.safetensors is missing, but .*index.json names it: complete the download"
    ):
        load_huggingface(folder, jnp.float32)


def test_tokenizer_chat_template_and_eos(folder):
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "hi": 1, "</s>": 2, "user:": 3, "<s>": 4}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.save(str(folder / "tokenizer.json"))
    template = "{{ bos_token }} {% for m in messages %}{{ m.role }}: {{ m.content }} {{ eos_token }}{% endfor %}"
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = load_model(folder, dtype="float32")
    assert loaded.tokenizer.chat("hi") == [4, 3, 1, 2]
    assert loaded.target.facts.eos_token_ids == loaded.tokenizer.eos_token_ids == (2,)

    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 4]}))
    settings["chat_template"] = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "hi hi"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = load_model(folder, dtype="float32")
    assert loaded.target.facts.eos_token_ids == (2, 4) and loaded.tokenizer.chat("x") == [1, 1]
    (folder / "chat_template.jinja").write_text("hi")
    assert load_model(folder, dtype="float32").tokenizer.chat("x") == [1]
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json is damaged: .*; download it again"):
        load_model(folder, dtype="float32")


def test_rope_of_both_generations_of_transformers():
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    want = RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_len=32)
    assert parse(rope_scaling=llama3 | {"rope_type": "llama3"}).rope_scaling == want
    new = parse(rope_theta="absent", rope_parameters=llama3 | {"rope_type": "llama3", "rope_theta": 5e5})
    assert (new.rope_scaling, new.rope_theta) == (want, 5e5)
    assert parse(rope_scaling={"type": "linear", "factor": 2.0}).rope_scaling == RopeScaling(kind="linear", factor=2.0)
    assert parse(rope_scaling=None).rope_scaling is None
    assert parse(rope_theta="absent").rope_theta == 10000.0


def test_defaults_differ_by_architecture():
    assert parse(num_key_value_heads="absent").num_kv_heads == 4
    assert parse(num_key_value_heads=None, architectures=["MistralForCausalLM"]).num_kv_heads == 4
    assert parse(architectures=["Qwen3ForCausalLM"]).head_dim == 128
    assert parse(architectures=["Qwen2ForCausalLM"]).qkv_bias and parse(architectures=["Qwen3ForCausalLM"]).qk_norm
    # fields that this architecture does not obey may hold anything
    assert parse(sliding_window=4096, use_sliding_window=False, architectures=["Qwen2ForCausalLM"])


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            r"architectures=\['GPT2LMHeadModel'\] is not implemented: it must name exactly one of",
        ),
        ({"architectures": "absent"}, r"architectures=\[\] is not implemented"),
        ({"hidden_size": "absent"}, "has no field 'hidden_size', which LlamaForCausalLM needs"),
        ({"hidden_size": "32"}, "hidden_size='32' must be of type int"),
        (
            {"num_key_value_heads": "absent", "architectures": ["Qwen2ForCausalLM"]},
            "has no field 'num_key_value_heads'",
        ),
        ({"num_key_value_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not implemented: it must be 'silu' or absent"),
        ({"attention_bias": True}, "attention_bias=True is not implemented: it must be False or absent"),
        ({"mlp_bias": True}, "mlp_bias=True is not implemented"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not implemented"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.* is not implemented"),
        (
            {"sliding_window": 4096, "architectures": ["MistralForCausalLM"]},
            "sliding_window=4096 is not implemented: it must be null",
        ),
        (
            {"use_sliding_window": True, "architectures": ["Qwen2ForCausalLM"]},
            "use_sliding_window=True is not implemented",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types=.* is not implemented: every layer must be 'full_attention'",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "rope_scaling.rope_type='yarn' is not implemented: it must be 'default', 'linear' or 'llama3'",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
            "rope_scaling of type 'llama3' has no field 'low_freq_factor'",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "rope scaling factor=0.5 must be at least 1"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            "rope_parameters.partial_rotary_factor=0.25",
        ),
    ],
)
def test_what_is_not_implemented_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        parse(**changes)


def test_missing_and_damaged_files(folder):
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()

    def refuses(kind, message):
        with pytest.raises(kind, match=message):
            load_huggingface(folder, jnp.float32)

    for length in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:length])
        refuses(ValueError, rf"model.safetensors is truncated or damaged .*: it has {length} bytes; download it again")

    tensors = random_tensors()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    safetensors.numpy.save_file(tensors, weights)
    refuses(ValueError, "has no tensor 'model.layers.1.mlp.up_proj.weight', which its config asks for")

    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((32, 64), np.float32)
    safetensors.numpy.save_file(tensors, weights)
    refuses(ValueError, r"'model.layers.1.mlp.up_proj.weight' has shape \(32, 64\), its config says \(64, 32\)")

    safetensors.numpy.save_file(
        random_tensors() | {"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)}, weights
    )
    refuses(ValueError, "holds tensor 'model.layers.0.self_attn.q_proj.bias', which no supported model uses")

    safetensors.numpy.save_file(random_tensors() | {"lm_head.weight": np.zeros((270, 32), np.int8)}, weights)
    refuses(ValueError, "tensor 'lm_head.weight' has dtype I8; it must be one of .*: use the unquantised model")

    weights.unlink()
    refuses(
        FileNotFoundError, "has neither model.safetensors nor model.safetensors.index.json: weights must be safetensors"
    )
    (folder / "config.json").write_text("{")
    refuses(ValueError, "config.json is damaged, it is not JSON")
    (folder / "config.json").write_text("[]")
    refuses(ValueError, "config.json is damaged: it must hold a JSON object, it holds a list")
    (folder / "config.json").unlink()
    refuses(FileNotFoundError, "config.json is missing: a model directory must have it")
