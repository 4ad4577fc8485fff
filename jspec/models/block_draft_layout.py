"""How a checkpoint describes a block draft: the fields of its `config.json`, the names of its tensors."""

from collections.abc import Iterator, Mapping
from typing import Any

from jspec.models.block_draft import BlockDraftConfig
from jspec.models.draft_layout import OTHER_DRAFT, Leaf, captured_layers, layer_leaves, layers_to_json
from jspec.models.huggingface_config import config_from_huggingface
from jspec.models.target import TargetFacts

ARCHITECTURES = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}


def default_block_captures(num_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """Target layers that a block draft reads unless it says otherwise: as many as it has layers, evenly spaced (DFlash's and SGLang's convention)."""
    if num_draft_layers == 1:
        return (num_layers // 2,)
    places = (1 + i * (num_layers - 4) / (num_draft_layers - 1) for i in range(num_draft_layers))
    return tuple(round(place) for place in places)


def is_block_draft(raw: Mapping[str, Any]) -> bool:
    """Whether a parsed `config.json` is of a block draft."""
    return any(name in raw for name in ("dflash_config", "dspark_config")) or any(
        name in (raw.get("architectures") or ()) for name in ARCHITECTURES.values()
    )


def config_from_json(source: str, raw: Mapping[str, Any], *, qk_norm: bool, facts: TargetFacts) -> BlockDraftConfig:
    """The draft's sizes, fit to its target.

    Args:
      source: what to call the file in an error.
      raw: the parsed `config.json`.
      qk_norm: whether the checkpoint has norms of queries and keys.
      facts: of the target.
    Raises:
      ValueError: a field is missing, not implemented, or does not fit the target.
    """
    for name in ("speculators_model_type", "speculators_config"):
        if name in raw:
            raise ValueError(
                f"{source}: {name}={raw[name]!r} says that rows of a block mean other positions than in DFlash's own checkpoints: use one of those"
            )
    kind = "dspark" if "dspark_config" in raw else "dflash"
    own = raw.get(f"{kind}_config")
    if not isinstance(own, Mapping):
        raise ValueError(f"{source}: {kind}_config={own!r} must be an object: correct the file, or download it again")
    layer = config_from_huggingface(
        source, {**raw, "architectures": ["Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM"]}, ()
    )
    for name, have in (("vocab_size", layer.vocab_size), ("hidden_size", layer.hidden_size)):
        want = getattr(facts, name)
        if have != want:
            raise ValueError(f"{source}: {name}={have} must be the target's {want}: {OTHER_DRAFT}")
    told = raw.get("num_target_layers")
    if told not in (None, facts.num_layers):
        raise ValueError(f"{source}: num_target_layers={told!r} must be the target's {facts.num_layers}: {OTHER_DRAFT}")

    def field(name: str, default: Any, of: type, where: Mapping[str, Any] = own) -> Any:
        value = where.get(name)
        value = default if value is None else value
        if value is None:
            raise ValueError(
                f"{source} has no field {name!r}, which a draft of kind {kind!r} needs: complete the download, or export the draft again"
            )
        if type(value) is not of:
            raise ValueError(
                f"{source}: {name}={value!r} must be of type {of.__name__}: correct the file, or download it again"
            )
        return value

    heads: dict[str, Any] = {}
    if kind == "dspark":
        heads = {
            "markov_rank": field("markov_rank", None, int),
            "markov_head": field("markov_head_type", "vanilla", str),
            "confidence": field("confidence_head", False, bool),
            "sample_from_anchor": field("sample_from_anchor", False, bool),
        }
    block_size = raw.get("block_size") if own.get("block_size") is None else own["block_size"]
    name, default = "target_layer_ids", default_block_captures(facts.num_layers, layer.num_layers)
    captures = captured_layers(source, name, own.get(name), default, facts.num_layers)
    try:
        return BlockDraftConfig(
            kind=kind,
            vocab_size=layer.vocab_size,
            draft_vocab_size=field("draft_vocab_size", layer.vocab_size, int, raw),
            hidden_size=layer.hidden_size,
            intermediate_size=layer.intermediate_size,
            num_layers=layer.num_layers,
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            context_len=layer.context_len,
            capture_layers=captures,
            block_size=field("block_size", 16, int, {"block_size": block_size}),
            mask_token_id=field("mask_token_id", None, int),
            qk_norm=qk_norm,
            window=own.get("window"),
            rms_norm_eps=layer.rms_norm_eps,
            rope_theta=layer.rope_theta,
            rope_scaling=layer.rope_scaling,
            **heads,
        )
    except ValueError as error:
        raise error if str(error).startswith(source) else ValueError(f"{source}: {error}") from error


def config_to_json(config: BlockDraftConfig, *, num_target_layers: int, torch_dtype: str) -> dict[str, Any]:
    """What `config_from_json` reads."""
    own: dict[str, Any] = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.capture_layers),
    }
    if config.window is not None:
        own["window"] = config.window
    if config.kind == "dspark":
        own |= {
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_head,
            "confidence_head": config.confidence,
            "sample_from_anchor": config.sample_from_anchor,
        }
    return {
        "architectures": [ARCHITECTURES[config.kind]],
        "model_type": "qwen3" if config.qk_norm else "llama",
        "block_size": config.block_size,
        f"{config.kind}_config": own,
        "num_target_layers": num_target_layers,
        **layers_to_json(config, num_layers=config.num_layers, torch_dtype=torch_dtype),
    }


def leaves(config: BlockDraftConfig) -> Iterator[Leaf]:
    """Every leaf of `BlockDraft(config)`, in the names of DFlash's public checkpoints; those of the heads are `markov_head.*` and `confidence_head.*`."""
    c, size = config, config.hidden_size
    yield Leaf(("fc",), (("fc.weight", (size, len(c.capture_layers) * size)),))
    yield Leaf(("hidden_norm",), (("hidden_norm.weight", (size,)),))
    yield Leaf(("final_norm",), (("norm.weight", (size,)),))
    norms = ("input_layernorm", "post_attention_layernorm")
    for i in range(c.num_layers):
        where, prefix = f"layer_{i}", f"layers.{i}"
        yield from layer_leaves(c, where, prefix, heads="qkv", norms=norms)
        if c.qk_norm:
            pair = tuple((f"{prefix}.self_attn.{n}_norm.weight", (c.head_dim,)) for n in "qk")
            yield Leaf((where, "qk_norms"), pair, stacked=True)
    if c.kind == "dspark":
        rank = c.markov_rank
        yield Leaf(("markov_in",), (("markov_head.w1.weight", (c.vocab_size, rank)),))
        yield Leaf(("markov_out",), (("markov_head.w2.weight", (c.draft_vocab_size, rank)),))
        if c.markov_head != "vanilla":
            shape = (rank, size + rank) if c.markov_head == "gated" else (2 * rank, size + 2 * rank)
            yield Leaf(("markov_mix",), (("markov_head.mix.weight", shape),))
    if c.confidence:
        yield Leaf(("confidence_head",), (("confidence_head.weight", (1, size + c.markov_rank)),))
        yield Leaf(("confidence_bias",), (("confidence_head.bias", (1,)),))
