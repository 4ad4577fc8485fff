"""GGUF files: what is read is what was written, and a bad file says what is wrong with it."""

import dataclasses

import gguf
import numpy as np
import pytest
from models.gguf_writing import CONFIG, random_tensors, write

from jspec.models.gguf import load_gguf
from jspec.models.gguf_file import read_gguf
from jspec.models.llama_weights import fuse
from jspec.models.loading import load_model


@pytest.fixture
def file(tmp_path):
    write(tmp_path / "tiny.gguf", random_tensors())
    return tmp_path / "tiny.gguf"


def same(a, b) -> bool:
    return set(a) == set(b) and all(
        same(a[k], b[k]) if isinstance(a[k], dict) else np.array_equal(a[k], b[k]) for k in a
    )


def test_weights_config_and_tokenizer_come_back(file):
    config, params, tokenizer = load_gguf(file, np.float32)
    assert dataclasses.replace(config, rms_norm_eps=1e-5) == CONFIG and np.float32(config.rms_norm_eps) == np.float32(
        1e-5
    )
    assert same(params, fuse(CONFIG, random_tensors().__getitem__, np.float32))
    assert (tokenizer.eos_token_ids, tokenizer.bos_token, tokenizer.eos_token) == ((2,), "<|im_start|>", "<|im_end|>")
    assert [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("abc12")] == ["abc", "1", "2"]
    assert tokenizer.chat("ab") == [1, *tokenizer.encode("ab"), 2]
    loaded = load_model(file)
    assert loaded.name == "tiny" and loaded.target.facts.num_layers == 2 and loaded.target.facts.eos_token_ids == (2,)


def test_tied_head_linear_rope_bos_and_no_tokenizer(tmp_path):
    tensors = {name: t for name, t in random_tensors().items() if name != "lm_head.weight"}
    fields = {
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 2.0,
        "tokenizer.ggml.add_bos_token": True,
    }
    write(tmp_path / "a.gguf", tensors, fields=fields)
    config, params, tokenizer = load_gguf(tmp_path / "a.gguf", np.float32)
    assert config.tie_embeddings and "head" not in params
    assert (config.rope_scaling.kind, config.rope_scaling.factor) == ("linear", 2.0)
    assert tokenizer.encode("ab")[0] == 1 and tokenizer.encode("ab", add_special_tokens=False)[0] != 1
    write(tmp_path / "b.gguf", tensors, fields={key: None for key in ("tokenizer.ggml.model", "tokenizer.ggml.tokens")})
    assert load_gguf(tmp_path / "b.gguf", np.float32)[2] is None


def test_quantised_matrices_are_dequantised(tmp_path):
    tensors, kind = random_tensors(), gguf.GGMLQuantizationType.Q8_0
    write(tmp_path / "q.gguf", tensors, quantize=kind)
    _, params, _ = load_gguf(tmp_path / "q.gguf", np.float32)
    want = gguf.dequantize(gguf.quantize(tensors["model.layers.1.mlp.down_proj.weight"], kind), kind)
    np.testing.assert_array_equal(params["layer_1"]["down"], want)


def test_every_truncation_is_refused_by_name(file):
    whole = file.read_bytes()
    for length in [0, 3, 4, 8, 23, 24, 40, *range(100, len(whole) - 1, 4099), len(whole) - 32]:
        cut = file.with_name(f"cut{length}.gguf")
        cut.write_bytes(whole[:length])
        with pytest.raises(
            ValueError,
            match=rf"{cut}.* truncated or damaged: it should have at least \d+ bytes, it has {length}; download",
        ):
            read_gguf(cut)


def test_damaged_headers_load_or_raise_value_error(file):
    """Never another exception, whatever byte is wrong."""
    whole = file.read_bytes()
    broken, rng = file.with_name("broken.gguf"), np.random.default_rng(0)
    for at in [*range(24, 1000, 13), *rng.integers(24, 10000, 40)]:
        broken.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            load_gguf(broken, np.float32)
        except ValueError as error:
            assert str(error)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda b: b"PK\3\4" + b[4:],
            r"is not a GGUF file: it should begin with b'GGUF', it begins with b'PK\\x03\\x04'",
        ),
        (lambda b: b[:4] + b"\0\0\0\3" + b[8:], r"has GGUF version 50331648; versions 2 and 3, little-endian"),
        (lambda b: b[:4] + b"\1\0\0\0" + b[8:], r"has GGUF version 1; versions 2 and 3"),
    ],
)
def test_foreign_files_are_refused(file, change, message):
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ValueError, match=message):
        read_gguf(file)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"architecture": "qwen2"}, "general.architecture is 'qwen2'; only 'llama' is implemented for GGUF"),
        ({"fields": {"llama.block_count": None}}, "has no metadata field 'llama.block_count'"),
        ({"fields": {"llama.block_count": "two"}}, "llama.block_count='two' must be of type int"),
        ({"fields": {"llama.block_count": 3}}, r"has no tensor 'blk.2.attn_norm.weight', which its config asks for"),
        ({"fields": {"llama.block_count": 1}}, r"holds tensor 'blk.1.attn_k.weight', which no supported model uses"),
        (
            {"fields": {"llama.feed_forward_length": 96}},
            r"'blk.0.ffn_gate.weight' has shape \(64, 32\), its config says \(96, 32\)",
        ),
        ({"fields": {"llama.expert_count": 8}}, "llama.expert_count=8 is not implemented: it must be 0 or absent"),
        (
            {"fields": {"llama.rope.dimension_count": 4}},
            "llama.rope.dimension_count=4 is not implemented: it must be 8",
        ),
        ({"fields": {"llama.rope.scaling.type": "yarn"}}, "llama.rope.scaling.type='yarn' is not implemented"),
        (
            {"fields": {"tokenizer.ggml.model": "llama"}},
            "tokenizer.ggml.model='llama' with tokenizer.ggml.pre='smollm' is not implemented",
        ),
        ({"fields": {"tokenizer.ggml.pre": "qwen2"}}, "tokenizer.ggml.pre='qwen2' is not implemented"),
        ({"fields": {"tokenizer.ggml.merges": None}}, r"tokenizer.ggml.tokens, token_type .* and merges must be there"),
        ({"fields": {"tokenizer.ggml.merges": ["q zzz"]}}, "tokenizer.ggml.merges do not fit its tokens"),
        ({"fields": {"tokenizer.ggml.eos_token_id": 999}}, r"special token id 999 must lie in 0..\d+"),
    ],
)
def test_what_is_not_implemented_is_refused(tmp_path, options, message):
    write(tmp_path / "x.gguf", random_tensors(), **options)
    with pytest.raises(ValueError, match=message) as error:
        load_gguf(tmp_path / "x.gguf", np.float32)
    assert str(tmp_path / "x.gguf") in str(error.value)
