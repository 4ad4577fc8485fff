"""A Hugging Face directory with a random model of a few thousand weights and a tokenizer of single bytes, for tests of the command line."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

EOS = "<eos>"
ASSISTANT = "<assistant>"
VOCAB_SIZE = 258
CONTEXT_LEN = 512
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}" + ASSISTANT
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, LAYERS = 32, 2, 1, 16, 64, 1


def write_checkpoint(folder: Path, *, chat: bool = True, tokenizer: bool = True) -> Path:
    """Writes the model into `folder`; `chat` gives it a chat template, `tokenizer` a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT_LEN,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": VOCAB_SIZE - 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(), folder / "model.safetensors")
    if tokenizer:
        _tokenizer().save(str(folder / "tokenizer.json"))
        settings = {"eos_token": EOS} | ({"chat_template": CHAT_TEMPLATE} if chat else {})
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def matrix(out: int, into: int, gain: float = 1.4) -> np.ndarray:
        return (rng.standard_normal((out, into)) * gain / np.sqrt(into)).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": rng.standard_normal((VOCAB_SIZE, HIDDEN)).astype(np.float32),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": matrix(VOCAB_SIZE, HIDDEN, 4.0),
    }
    for i in range(LAYERS):
        layer = {
            "input_layernorm": np.ones(HIDDEN, np.float32),
            "post_attention_layernorm": np.ones(HIDDEN, np.float32),
            "self_attn.q_proj": matrix(HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": matrix(HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": matrix(INTERMEDIATE, HIDDEN),
            "mlp.up_proj": matrix(INTERMEDIATE, HIDDEN),
            "mlp.down_proj": matrix(HIDDEN, INTERMEDIATE),
        }
        weights |= {f"model.layers.{i}.{name}.weight": value for name, value in layer.items()}
    return weights


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS, ASSISTANT])
    return backend
