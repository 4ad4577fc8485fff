"""Writes small GGUF files the way llama.cpp's converter does."""

import gguf
import numpy as np

from jspec.models.llama import LlamaConfig
from jspec.models.llama_weights import tensor_shapes

CONFIG = LlamaConfig(
    vocab_size=270,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    context_len=64,
    rope_theta=1000.0,
    eos_token_ids=(2,),
)
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def random_tensors(config: LlamaConfig = CONFIG, seed: int = 0) -> dict[str, np.ndarray]:
    """A checkpoint in Hugging Face's names."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in tensor_shapes(config)}


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's `permute` of convert_hf_to_gguf.py: what the loader has to undo."""
    return (
        weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def write(
    path,
    tensors: dict[str, np.ndarray],
    config: LlamaConfig = CONFIG,
    *,
    fields=None,
    architecture="llama",
    quantize=None,
) -> None:
    """`fields` adds or replaces metadata ("llama.expert_count": 8); a value of None leaves the field out. `quantize` is a type for matrices."""
    writer = gguf.GGUFWriter(path, architecture)
    byte_tokens = [chr(c) for c in [*range(33, 127), *range(161, 173), *range(174, 256)]] + [
        chr(256 + i) for i in range(68)
    ]
    meta = {
        "llama.vocab_size": config.vocab_size,
        "llama.context_length": config.context_len,
        "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.num_layers,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": config.rope_theta,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["<unk>", "<|im_start|>", "<|im_end|>", *byte_tokens, "ab", "abc", "12"],
        "tokenizer.ggml.token_type": [3, 3, 3, *[1] * len(byte_tokens), 1, 1, 1],
        "tokenizer.ggml.merges": ["a b", "ab c", "1 2"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}{{ eos_token }}{% endfor %}",
    } | (fields or {})
    for key, value in meta.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        heads = {"q_proj.weight": config.num_heads, "k_proj.weight": config.num_kv_heads}
        for ending, count in heads.items():
            if name.endswith(ending):
                tensor = permute(tensor, count)
        for old, new in _NAMES.items():
            name = name.replace(old, new)
        if quantize is not None and tensor.ndim == 2:
            writer.add_tensor(name, gguf.quantize(tensor, quantize), raw_dtype=quantize)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
