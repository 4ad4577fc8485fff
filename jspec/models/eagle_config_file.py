"""A draft's `config.json`, in the fields that public EAGLE checkpoints use."""

from collections.abc import Iterable, Mapping
from typing import Any

from jspec.models.draft_layout import OTHER_DRAFT, captured_layers, layers_to_json
from jspec.models.eagle_draft import EagleConfig
from jspec.models.huggingface_config import config_from_huggingface
from jspec.models.target import TargetFacts

ARCHITECTURES = {
    "eagle3": "LlamaForCausalLMEagle3",
    "eagle": "LlamaForCausalLMEagle",
    "multi-layer": "JspecMultiLayerEagle",
}
_PLAIN = "LlamaForCausalLM"
"""What the first public drafts say, EAGLE-1 and EAGLE-3 alike; their tensors tell them apart."""

# Switches of other trainers that change the forward, and the values under which it is what is implemented.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "norm_before_residual": (False, None),
    "use_aux_hidden_state": (True, None),
    "use_last_layernorm": (True, None),
    "use_mtp_layernorm": (False, None),
    "use_input_layernorm_in_first_layer": (True, None),
}


def default_capture_layers(num_layers: int) -> tuple[int, ...]:
    """Target layers that an EAGLE-3 draft reads unless it says otherwise: low, middle and high (SpecForge's and SGLang's convention)."""
    return (1, num_layers // 2 - 1, num_layers - 4)


def draft_kind(source: str, raw: Mapping[str, Any], tensor_names: Iterable[str]) -> str:
    """The `EagleConfig.kind` of a checkpoint."""
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if name == _PLAIN:
        return "eagle3" if any(tensor.startswith("midlayer.") for tensor in tensor_names) else "eagle"
    for kind, architecture in ARCHITECTURES.items():
        if name == architecture:
            return kind
    raise ValueError(
        f"{source}: architectures={names!r} is not implemented: it must name one of {sorted(ARCHITECTURES.values())}; "
        "use a draft of one of these"
    )


def config_from_json(source: str, raw: Mapping[str, Any], kind: str, facts: TargetFacts) -> EagleConfig:
    """The draft's sizes, fit to its target.

    Args:
      source: what to call the file in an error.
      raw: the parsed `config.json`.
      kind: of `draft_kind`.
      facts: of the target.
    Raises:
      ValueError: a field is missing, not implemented, or does not fit the target.
    """
    nested = raw.get("eagle_config") or {}
    if not isinstance(nested, Mapping):
        raise ValueError(f"{source}: eagle_config={nested!r} must be an object: correct the file, or download it again")
    for where in (raw, nested):
        for name, neutral in _NEUTRAL.items():
            if where.get(name) not in neutral:
                raise ValueError(
                    f"{source}: {name}={where[name]!r} is not implemented: it must be {neutral[0]!r} or absent; use a draft without it"
                )
    # The layer of a draft is one of Llama: the same fields, rules and errors.
    layer = config_from_huggingface(source, {**raw, "architectures": [_PLAIN], "num_hidden_layers": 1}, ())
    for name, have in (("vocab_size", layer.vocab_size), ("hidden_size", layer.hidden_size)):
        want = getattr(facts, name)
        if have != want:
            raise ValueError(f"{source}: {name}={have} must be the target's {want}: {OTHER_DRAFT}")
    if raw.get("target_hidden_size") not in (None, facts.hidden_size):
        raise ValueError(
            f"{source}: target_hidden_size={raw['target_hidden_size']!r} must be the target's {facts.hidden_size}: {OTHER_DRAFT}"
        )

    def field(name: str, default: Any, of: type) -> Any:
        value = default if raw.get(name) is None else raw[name]
        if type(value) is not of:
            raise ValueError(
                f"{source}: {name}={value!r} must be of type {of.__name__}: correct the file, or download it again"
            )
        return value

    name = "eagle_aux_hidden_state_layer_ids"
    default = default_capture_layers(facts.num_layers)
    captures = captured_layers(source, name, nested.get(name), default, facts.num_layers) if kind == "eagle3" else ()
    try:
        return EagleConfig(
            kind=kind,
            vocab_size=layer.vocab_size,
            draft_vocab_size=field("draft_vocab_size", layer.vocab_size, int),
            hidden_size=layer.hidden_size,
            intermediate_size=layer.intermediate_size,
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            context_len=layer.context_len,
            capture_layers=captures,
            num_modules=field("num_nextn_predict_layers", 1, int) if kind == "multi-layer" else 1,
            chained=field("chained", False, bool) if kind == "multi-layer" else False,
            rms_norm_eps=layer.rms_norm_eps,
            rope_theta=layer.rope_theta,
            rope_scaling=layer.rope_scaling,
        )
    except ValueError as error:
        raise error if str(error).startswith(source) else ValueError(f"{source}: {error}") from error


def config_to_json(config: EagleConfig, *, torch_dtype: str) -> dict[str, Any]:
    """What `config_from_json` reads."""
    raw = {
        "architectures": [ARCHITECTURES[config.kind]],
        "model_type": "llama",
        **layers_to_json(config, num_layers=config.num_modules, torch_dtype=torch_dtype),
    }
    if config.kind == "eagle3":
        raw["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": list(config.capture_layers),
            "use_aux_hidden_state": True,
        }
    elif config.kind == "multi-layer":
        raw |= {"num_nextn_predict_layers": config.num_modules, "chained": config.chained}
    return raw
