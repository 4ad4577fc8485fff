"""Llama models from llama.cpp's GGUF files, weights, config and tokenizer."""

import os
import re
from typing import Any

import numpy as np
import tokenizers
from jax.sharding import Mesh
from tokenizers import decoders, models, pre_tokenizers, processors

from jspec.models import llama_weights
from jspec.models.gguf_file import GgufFile, read_gguf
from jspec.models.llama import LlamaConfig
from jspec.models.rope import RopeScaling
from jspec.models.tokenizer import Tokenizer

_PRE_TOKENIZERS = ("smollm", "gpt-2")
_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
_OUTER = {
    llama_weights.EMBED: "token_embd.weight",
    llama_weights.FINAL_NORM: "output_norm.weight",
    llama_weights.HEAD: "output.weight",
}
_INNER = {
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


def load_gguf(
    path: str | os.PathLike[str], dtype: Any, mesh: Mesh | None = None
) -> tuple[LlamaConfig, dict[str, Any], Tokenizer | None]:
    """(config, params of `Llama(config, dtype)`, tokenizer or None where there is none) of a GGUF file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is damaged, not a Llama, or asks for something that is not implemented; nothing was dequantised by then.
    """
    file = read_gguf(path)
    config = config_from_gguf(file)
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    llama_weights.check_tensors(file.path, shapes, config, names=_gguf_name)
    tokenizer = tokenizer_from_gguf(file)

    def read(name: str) -> np.ndarray:
        tensor = file.tensors[_gguf_name(name)]
        try:
            values = tensor.dequantize()
        except NotImplementedError:
            raise ValueError(
                f"{file.path}: tensor {tensor.name!r} is {tensor.kind.name}, which the gguf library cannot dequantise: use Q8_0 or F16"
            ) from None
        if name.endswith("q_proj.weight"):
            return _rotate_half_rows(values, config.num_heads)
        return _rotate_half_rows(values, config.num_kv_heads) if name.endswith("k_proj.weight") else values

    return config, llama_weights.fuse(config, read, dtype, mesh), tokenizer


def config_from_gguf(file: GgufFile) -> LlamaConfig:
    """The model's sizes from the metadata, refusing what is not implemented."""
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        raise ValueError(
            f"{file.path}: general.architecture is {architecture!r}; only 'llama' is implemented for GGUF: use the model's Hugging Face directory"
        )

    def field(name: str, default: Any = None, kind: type = int) -> Any:
        value = file.metadata.get(f"llama.{name}", default)
        if value is None:
            raise ValueError(
                f"{file.path} has no metadata field 'llama.{name}', which every Llama needs: convert the model again"
            )
        if type(value) is not kind:
            raise ValueError(
                f"{file.path}: llama.{name}={value!r} must be of type {kind.__name__}: the file is damaged, download it again"
            )
        return value

    num_heads, hidden_size = field("attention.head_count"), field("embedding_length")
    head_dim = field("attention.key_length", hidden_size // max(1, num_heads))
    for name, allowed in (
        ("attention.value_length", head_dim),
        ("rope.dimension_count", head_dim),
        ("expert_count", 0),
        ("attention.sliding_window", 0),
    ):
        if field(name, allowed) != allowed:
            raise ValueError(
                f"{file.path}: llama.{name}={field(name)} is not implemented: it must be {allowed} or absent"
            )
    scaling = field("rope.scaling.type", "none", str)
    if scaling not in ("none", "linear"):
        raise ValueError(
            f"{file.path}: llama.rope.scaling.type={scaling!r} is not implemented for GGUF: use the model's Hugging Face directory"
        )
    return LlamaConfig(
        vocab_size=field("vocab_size", len(file.metadata.get("tokenizer.ggml.tokens", ()))),
        hidden_size=hidden_size,
        intermediate_size=field("feed_forward_length"),
        num_layers=field("block_count"),
        num_heads=num_heads,
        num_kv_heads=field("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        context_len=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon", kind=float),
        rope_theta=field("rope.freq_base", 10000.0, float),
        rope_scaling=RopeScaling(kind="linear", factor=field("rope.scaling.factor", kind=float))
        if scaling == "linear"
        else None,
        tie_embeddings="output.weight" not in file.tensors,
        eos_token_ids=_eos_token_ids(file),
    )


def tokenizer_from_gguf(file: GgufFile) -> Tokenizer | None:
    """Byte-level BPE as llama.cpp splits it, or None where the file has no tokenizer.

    `smollm` cuts every digit apart; without that, one text in seven encodes differently.
    """
    meta = file.metadata
    model, split = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre")
    if model in (None, "none"):
        return None
    if model != "gpt2" or split not in _PRE_TOKENIZERS:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.model={model!r} with tokenizer.ggml.pre={split!r} is not implemented: it must be 'gpt2' with"
            f" one of {_PRE_TOKENIZERS}; use the model's Hugging Face directory, which has a tokenizer.json"
        )
    tokens, types, merges = (meta.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type", "merges"))
    if tokens is None or merges is None or types is None or len(types) != len(tokens):
        raise ValueError(
            f"{file.path}: tokenizer.ggml.tokens, token_type (one for each token) and merges must be there: convert the model again"
        )
    try:
        backend = tokenizers.Tokenizer(
            models.BPE({token: i for i, token in enumerate(tokens)}, [tuple(m.split(" ", 1)) for m in merges])
        )
    except Exception as error:  # the library raises bare Exception
        raise ValueError(
            f"{file.path}: tokenizer.ggml.merges do not fit its tokens ({error}): download the file again"
        ) from error
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if split == "smollm" else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*digits, by_bytes])
    backend.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in control])
    whole = [token for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    backend.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in whole])
    bos_id, eos_ids = meta.get("tokenizer.ggml.bos_token_id"), _eos_token_ids(file)
    bos = _token(file, bos_id)
    if bos and meta.get("tokenizer.ggml.add_bos_token", False):
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])
    return Tokenizer(
        backend=backend,
        eos_token_ids=eos_ids,
        chat_template=meta.get("tokenizer.chat_template"),
        bos_token=bos,
        eos_token=_token(file, eos_ids[0]) if eos_ids else "",
    )


def _token(file: GgufFile, token_id: int | None) -> str:
    tokens = file.metadata["tokenizer.ggml.tokens"]
    if token_id is None:
        return ""
    if not 0 <= token_id < len(tokens):
        raise ValueError(
            f"{file.path}: special token id {token_id} must lie in 0..{len(tokens) - 1}, its vocabulary: convert the model again"
        )
    return tokens[token_id]


def _eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    found = (file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    return tuple(dict.fromkeys(i for i in found if i is not None))


def _gguf_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    return f"blk.{match[1]}.{_INNER[match[2]]}.weight" if match else _OUTER[name]


def _rotate_half_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's order of q and k rows, which interleaves the two halves of a head for its own rotary kernel."""
    out, width = weight.shape
    return weight.reshape(num_heads, out // num_heads // 2, 2, width).swapaxes(1, 2).reshape(out, width)
