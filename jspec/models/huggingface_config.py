"""From a Hugging Face `config.json` to a `LlamaConfig`; whatever the config asks for and this package does not compute is refused by name."""

from collections.abc import Mapping
from typing import Any

from jspec.models.llama import LlamaConfig
from jspec.models.rope import RopeScaling

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
HYBRIDS = ("BambaForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM")
"""Architectures with recurrent layers: see `hybrid_files`."""

_ANYTHING_ELSE = "use a model without it, or run it with another engine"
# Fields that change the forward of one of the architectures, and the values under which it is what is implemented.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1, 1.0, None),
    "quantization_config": (None,),
}


def config_from_huggingface(source: str, raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> LlamaConfig:
    """The model's sizes.

    Args:
      source: what to call the file in an error.
      raw: the parsed `config.json`, of transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`).
      eos_token_ids: already settled, since `generation_config.json` overrules the config.
    Raises:
      ValueError: the architecture or a field's value is not implemented, or a field is missing.
    """
    architecture = architecture_of(source, raw, ARCHITECTURES)
    for name, neutral in _NEUTRAL.items():
        if name in raw and raw[name] not in neutral:
            raise refusal(source, name, raw[name], f"it must be {neutral[0]!r} or absent")
    _refuse_sliding_window(source, raw, architecture)

    def field(name: str, default: Any = None, kind: type = int) -> Any:
        return read_field(source, raw, architecture, name, default, kind)

    num_heads, hidden_size = field("num_attention_heads"), field("hidden_size")
    # A missing `num_key_value_heads` has another default in every architecture; only null, or Llama's, means "one for each query head".
    one_per_head = num_heads if architecture == "LlamaForCausalLM" or "num_key_value_heads" in raw else None
    theta, scaling = _rope(source, raw)
    return LlamaConfig(
        vocab_size=field("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=field("intermediate_size"),
        num_layers=field("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=field("num_key_value_heads", one_per_head),
        head_dim=field("head_dim", 128 if architecture == "Qwen3ForCausalLM" else hidden_size // max(1, num_heads)),
        context_len=field("max_position_embeddings"),
        rms_norm_eps=float(field("rms_norm_eps", 1e-6, float)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=field("tie_word_embeddings", False, bool),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        eos_token_ids=eos_token_ids,
    )


def read_field(source: str, raw: Mapping[str, Any], architecture: str, name: str, default: Any, kind: type) -> Any:
    """A field of the config, or `default` where it is missing or null.

    Raises:
      ValueError: neither is there, or the field is of another type.
    """
    value = raw.get(name)
    value = default if value is None else value
    if value is None:
        raise ValueError(
            f"{source} has no field {name!r}, which {architecture} needs: complete the download, or export the model again"
        )
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise ValueError(
            f"{source}: {name}={value!r} must be of type {kind.__name__}: correct the file, or download it again"
        )
    return value


def architecture_of(source: str, raw: Mapping[str, Any], known: tuple[str, ...]) -> str:
    """The architecture that the config names.

    Raises:
      ValueError: it is none of the `known` ones.
    """
    names = raw.get("architectures") or []
    if len(names) != 1 or names[0] not in known:
        raise ValueError(f"{source}: architectures={names} is not implemented: it must name exactly one of {known}")
    return names[0]


def _refuse_sliding_window(source: str, raw: Mapping[str, Any], architecture: str) -> None:
    # Llama ignores the field; the Qwens obey it only with `use_sliding_window`, which is refused above.
    if architecture == "MistralForCausalLM" and raw.get("sliding_window") is not None:
        raise refusal(source, "sliding_window", raw["sliding_window"], "it must be null, full attention")
    if any(kind != "full_attention" for kind in raw.get("layer_types") or ()):
        raise refusal(source, "layer_types", sorted(set(raw["layer_types"])), "every layer must be 'full_attention'")


def _rope(source: str, raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from transformers 5's `rope_parameters`, or transformers 4's two fields."""
    name = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    rope = raw.get(name) or {}
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor") not in _NEUTRAL["partial_rotary_factor"]:
        raise refusal(source, f"{name}.partial_rotary_factor", rope["partial_rotary_factor"], "it must be 1 or absent")
    if kind == "default":
        return theta, None

    def need(field: str) -> Any:
        if field not in rope:
            raise ValueError(f"{source}: {name} of type {kind!r} has no field {field!r}: export the model again")
        return rope[field]

    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=need("factor"))
    if kind == "llama3":
        scaling = RopeScaling(
            kind="llama3",
            factor=need("factor"),
            low_freq_factor=need("low_freq_factor"),
            high_freq_factor=need("high_freq_factor"),
            original_context_len=need("original_max_position_embeddings"),
        )
        return theta, scaling
    raise refusal(source, f"{name}.rope_type", kind, "it must be 'default', 'linear' or 'llama3'")


def refusal(source: str, field: str, value: Any, rule: str) -> ValueError:
    """What to raise for a field that asks for something that is not implemented."""
    return ValueError(f"{source}: {field}={value!r} is not implemented: {rule}; {_ANYTHING_ELSE}")
