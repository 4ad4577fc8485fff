"""How a checkpoint names the tensors of an EAGLE draft."""

from collections.abc import Iterator

from jspec.models.draft_layout import Leaf, layer_leaves
from jspec.models.eagle_draft import EagleConfig

BIAS = "fc.bias"


def leaves(config: EagleConfig) -> Iterator[Leaf]:
    """Every leaf of `EagleDraft(config)`.

    "eagle3": the names that public EAGLE-3 checkpoints use, `input_layernorm` being of the embedding and `hidden_norm` of the feature. "eagle": those of
    EAGLE-1. "multi-layer": one layer a module, in the names of DeepSeek-V3's multi-token prediction; `eh_proj` reads the feature first.
    """
    size = config.hidden_size
    if config.kind == "eagle3":
        yield Leaf(("fc",), (("fc.weight", (size, len(config.capture_layers) * size)),))
        yield Leaf(("final_norm",), (("norm.weight", (size,)),))
        yield Leaf(("head",), (("lm_head.weight", (config.draft_vocab_size, size)),))
        yield from _layer(config, "midlayer", 0, ("input_layernorm", "hidden_norm", "post_attention_layernorm"))
    elif config.kind == "eagle":
        yield Leaf(("module_0", "fc"), (("fc.weight", (size, 2 * size)),))
        yield Leaf(("module_0", "fc_bias"), ((BIAS, (size,)),))
        yield from _layer(config, "layers.0", 0, ("post_attention_layernorm",))
    else:
        norms = ("hnorm", "enorm", "input_layernorm", "post_attention_layernorm")
        for i in range(config.num_modules):
            yield Leaf((f"module_{i}", "fc"), ((f"layers.{i}.eh_proj.weight", (size, 2 * size)),))
            yield Leaf((f"module_{i}", "final_norm"), ((f"layers.{i}.final_norm.weight", (size,)),))
            yield from _layer(config, f"layers.{i}", i, norms)


def _layer(config: EagleConfig, prefix: str, module: int, norms: tuple[str, ...]) -> Iterator[Leaf]:
    reads = 2 * config.hidden_size if config.kind == "eagle3" else None
    return layer_leaves(config, f"module_{module}", prefix, heads="qkv", norms=norms, reads=reads)
