"""Hybrid models in Hugging Face's layout: Bamba (Mamba-2), Qwen3-Next and Qwen3.5 (gated delta), with dense MLPs."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models.gated_delta import GatedDelta
from jspec.models.huggingface_config import read_field, refusal
from jspec.models.hybrid import HybridConfig
from jspec.models.llama import LlamaConfig
from jspec.models.llama_weights import EMBED, HEAD, layer_shapes
from jspec.models.mamba2 import Mamba2
from jspec.models.parallel import place_leaf

Field = Callable[..., Any]
"""`field(name, default=None, kind=int)`: of the config file, checked."""

Read = Callable[[str], np.ndarray]

IGNORED = ("mtp.",)
"""Beginnings of the names of tensors that are no part of the model: modules for drafting."""


class Family(NamedTuple):
    """How the checkpoints of one architecture name and lay out what they hold."""

    mixer: Callable[[Field], Mamba2 | GatedDelta]
    layers: Callable[[Field], tuple[int, ...]]  # with attention
    neutral: Mapping[str, tuple[Any, ...]]  # fields, and the values under which they ask for what is implemented
    rotary_share: float  # of a head, where the config does not tell
    norms: tuple[str, str]  # of a layer, before the mixer and before the MLP
    final_norm: str
    mlp: str
    prefix: str  # of the mixer's tensors
    shapes: Callable[[Any, int], dict[str, tuple[int, ...]]]  # `shapes(mixer, H)`: of the mixer's tensors
    fuse: Callable[[Any, Read], dict[str, np.ndarray]]  # `fuse(mixer, read)`: its leaves, "in" and "out" among them
    qwen: bool = False  # norms are stored around 0, attention has a gate, queries and keys a norm


def hybrid_config(source: str, raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> HybridConfig:
    """The model's sizes. Arguments and errors as of `config_from_huggingface`."""
    architecture = raw["architectures"][0]
    family = FAMILIES[architecture]
    for name, neutral in {**_NEUTRAL, **family.neutral}.items():
        if name in raw and raw[name] not in neutral:
            raise refusal(source, name, raw[name], f"it must be {neutral[0]!r} or absent")
    if family.qwen:
        _refuse_experts(source, raw)

    def field(name: str, default: Any = None, kind: type = int) -> Any:
        return read_field(source, raw, architecture, name, default, kind)

    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if (rope_type := rope.get("rope_type", rope.get("type", "default"))) != "default":
        raise refusal(source, "rope_parameters.rope_type", rope_type, "it must be 'default'")
    share = rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or family.rotary_share
    num_heads, hidden_size = field("num_attention_heads"), field("hidden_size")
    head_dim = field("head_dim", hidden_size // max(1, num_heads))
    base = LlamaConfig(
        vocab_size=field("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=field("intermediate_size"),
        num_layers=field("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=field("num_key_value_heads"),
        head_dim=head_dim,
        context_len=field("max_position_embeddings"),
        rms_norm_eps=float(field("rms_norm_eps", 1e-6, float)),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        tie_embeddings=field("tie_word_embeddings", False, bool),
        qk_norm=family.qwen,
        eos_token_ids=eos_token_ids,
    )
    return HybridConfig(
        base=base,
        mixer=family.mixer(field),
        attention_layers=family.layers(field),
        rotary_dim=int(head_dim * share),
        attention_gate=family.qwen,
    )


def hybrid_tensors(architecture: str, config: HybridConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor that a checkpoint of `config` must hold."""
    family, base = FAMILIES[architecture], config.base
    yield EMBED, (base.vocab_size, base.hidden_size)
    yield family.final_norm, (base.hidden_size,)
    if not base.tie_embeddings:
        yield HEAD, (base.vocab_size, base.hidden_size)
    llama = layer_shapes(base)
    if config.attention_gate:
        llama["self_attn.q_proj.weight"] = (2 * base.num_heads * base.head_dim, base.hidden_size)
    both: dict[str, tuple[int, ...]] = {f"{norm}.weight": (base.hidden_size,) for norm in family.norms}
    both |= {name.replace("mlp", family.mlp): shape for name, shape in llama.items() if name.startswith("mlp.")}
    attention = {name: shape for name, shape in llama.items() if name.startswith("self_attn.")}
    mixer = {f"{family.prefix}.{n}": shape for n, shape in family.shapes(config.mixer, base.hidden_size).items()}
    for i in range(base.num_layers):
        for name, shape in (both | (attention if i in config.attention_layers else mixer)).items():
            yield f"model.layers.{i}.{name}", shape


def fuse_hybrid(architecture: str, config: HybridConfig, read: Read, dtype: Any) -> dict[str, Any]:
    """The parameter tree of `Hybrid(config, dtype)`, of a checkpoint that was checked with `hybrid_tensors`; matrices in `dtype`, vectors f32."""
    family, base = FAMILIES[architecture], config.base

    def matrix(name: str, *parts: np.ndarray) -> jax.Array:
        return place_leaf(None, None, name, np.concatenate(parts) if len(parts) > 1 else parts[0], dtype)

    def norm(name: str) -> np.ndarray:
        return np.asarray(read(name), np.float32) + np.float32(family.qwen)

    params: dict[str, Any] = {"embed": matrix("embed", read(EMBED)), "final_norm": jnp.asarray(norm(family.final_norm))}
    if not base.tie_embeddings:
        params["head"] = matrix("head", read(HEAD))
    norms, qk_norms = [], []
    vectors: dict[str, list[np.ndarray]] = {name: [] for name in config.mixer.vectors()}
    for i in range(base.num_layers):
        of = f"model.layers.{i}"
        if i in config.attention_layers:
            q, *kv = (read(f"{of}.self_attn.{n}_proj.weight") for n in "qkv")
            gate: list[np.ndarray] = []
            if config.attention_gate:  # stored head by head, its query and its gate
                q, *gate = np.split(q.reshape(base.num_heads, 2, base.head_dim, -1), 2, axis=1)
                q, *gate = (part.reshape(-1, part.shape[-1]) for part in (q, *gate))
            layer = {
                "in": matrix("in", q, *kv, *gate),
                "out": matrix("out", read(f"{of}.self_attn.o_proj.weight")),
            }
            if base.qk_norm:
                qk_norms.append(np.stack([norm(f"{of}.self_attn.{n}_norm.weight") for n in "qk"]))
        else:
            leaves = family.fuse(config.mixer, _prefixed(read, f"{of}.{family.prefix}."))
            layer = {name: matrix(name, leaves.pop(name)) for name in ("in", "out")}
            for name, value in leaves.items():
                vectors[name].append(np.asarray(value, np.float32))
        mlp = f"{of}.{family.mlp}"
        layer["gate_up"] = matrix("gate_up", read(f"{mlp}.gate_proj.weight"), read(f"{mlp}.up_proj.weight"))
        layer["down"] = matrix("down", read(f"{mlp}.down_proj.weight"))
        params[f"layer_{i}"] = layer
        norms.append(np.stack([norm(f"{of}.{name}.weight") for name in family.norms]))
    params["norms"] = jnp.asarray(np.stack(norms))
    if base.qk_norm:
        params["qk_norms"] = jnp.asarray(np.stack(qk_norms))
    return params | {name: jnp.asarray(np.stack(values)) for name, values in vectors.items()}


def _prefixed(read: Read, prefix: str) -> Read:
    return lambda name: read(prefix + name)


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "quantization_config": (None,),
}


def _refuse_experts(source: str, raw: Mapping[str, Any]) -> None:
    if not raw.get("num_experts"):
        return
    dense, step = raw.get("mlp_only_layers") or (), raw.get("decoder_sparse_step") or 1
    sparse = [i for i in range(raw.get("num_hidden_layers", 0)) if i not in dense and (i + 1) % step == 0]
    if sparse:
        raise refusal(source, "num_experts", raw["num_experts"], "every layer must have a dense MLP")


# --- Bamba ----------------------------------------------------------------------------------------------------------------


def _mamba2(field: Field) -> Mamba2:
    heads = field("mamba_n_heads")
    inner = field("mamba_expand", 2) * field("hidden_size")
    return Mamba2(
        num_heads=heads,
        head_dim=inner // heads,
        num_groups=field("mamba_n_groups"),
        state_size=field("mamba_d_state"),
        conv_size=field("mamba_d_conv"),
    )


def _bamba_layers(field: Field) -> tuple[int, ...]:
    return tuple(sorted(field("attn_layer_indices", [], list)))


def _bamba_shapes(mixer: Mamba2, hidden_size: int) -> dict[str, tuple[int, ...]]:
    return {
        "in_proj.weight": (mixer.in_size, hidden_size),
        "conv1d.weight": (mixer.channels, 1, mixer.conv_size),
        "conv1d.bias": (mixer.channels,),
        "dt_bias": (mixer.num_heads,),
        "A_log": (mixer.num_heads,),
        "D": (mixer.num_heads,),
        "norm.weight": (mixer.inner,),
        "out_proj.weight": (hidden_size, mixer.inner),
    }


def _fuse_bamba(mixer: Mamba2, read: Read) -> dict[str, np.ndarray]:
    del mixer
    return {
        "in": read("in_proj.weight"),
        "out": read("out_proj.weight"),
        "conv": read("conv1d.weight")[:, 0].T,
        "conv_bias": read("conv1d.bias"),
        "a_log": read("A_log"),
        "dt_bias": read("dt_bias"),
        "skip": read("D"),
        "mixer_norm": read("norm.weight"),
    }


# --- Qwen3-Next and Qwen3.5 -------------------------------------------------------------------------------------------------


def _gated_delta(field: Field) -> GatedDelta:
    return GatedDelta(
        num_key_heads=field("linear_num_key_heads"),
        num_value_heads=field("linear_num_value_heads"),
        key_dim=field("linear_key_head_dim"),
        value_dim=field("linear_value_head_dim"),
        conv_size=field("linear_conv_kernel_dim"),
    )


def _qwen_layers(field: Field) -> tuple[int, ...]:
    count = field("num_hidden_layers")
    step = field("full_attention_interval", 4)
    told = field("layer_types", ["full_attention" if (i + 1) % step == 0 else "" for i in range(count)], list)
    return tuple(i for i, kind in enumerate(told) if kind == "full_attention")


def _delta_shapes(mixer: GatedDelta, hidden_size: int) -> dict[str, tuple[int, ...]]:
    return {
        "conv1d.weight": (mixer.channels, 1, mixer.conv_size),
        "dt_bias": (mixer.num_value_heads,),
        "A_log": (mixer.num_value_heads,),
        "norm.weight": (mixer.value_dim,),
        "out_proj.weight": (hidden_size, mixer.out_size),
    }


def _next_shapes(mixer: GatedDelta, hidden_size: int) -> dict[str, tuple[int, ...]]:
    return _delta_shapes(mixer, hidden_size) | {
        "in_proj_qkvz.weight": (mixer.channels + mixer.out_size, hidden_size),
        "in_proj_ba.weight": (2 * mixer.num_value_heads, hidden_size),
    }


def _qwen35_shapes(mixer: GatedDelta, hidden_size: int) -> dict[str, tuple[int, ...]]:
    return _delta_shapes(mixer, hidden_size) | {
        "in_proj_qkv.weight": (mixer.channels, hidden_size),
        "in_proj_z.weight": (mixer.out_size, hidden_size),
        "in_proj_b.weight": (mixer.num_value_heads, hidden_size),
        "in_proj_a.weight": (mixer.num_value_heads, hidden_size),
    }


def _delta_leaves(read: Read, *projections: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "in": np.concatenate(projections),
        "out": read("out_proj.weight"),
        "conv": read("conv1d.weight")[:, 0].T,
        "a_log": read("A_log"),
        "dt_bias": read("dt_bias"),
        "mixer_norm": read("norm.weight"),
    }


def _fuse_next(mixer: GatedDelta, read: Read) -> dict[str, np.ndarray]:
    """Rows are stored key head by key head: its query, its key, then values and gates of the value heads that share it; likewise strength and decay."""
    heads, shared = mixer.num_key_heads, mixer.num_value_heads // mixer.num_key_heads
    ends = np.cumsum([mixer.key_dim, mixer.key_dim, shared * mixer.value_dim])
    qkvz, ba = read("in_proj_qkvz.weight"), read("in_proj_ba.weight")
    of_heads = np.split(qkvz.reshape(heads, -1, qkvz.shape[1]), ends, axis=1)
    of_heads += np.split(ba.reshape(heads, -1, ba.shape[1]), 2, axis=1)
    return _delta_leaves(read, *(part.reshape(-1, part.shape[-1]) for part in of_heads))


def _fuse_qwen35(mixer: GatedDelta, read: Read) -> dict[str, np.ndarray]:
    del mixer
    return _delta_leaves(read, *(read(f"in_proj_{name}.weight") for name in ("qkv", "z", "b", "a")))


_QWEN = Family(
    mixer=_gated_delta,
    layers=_qwen_layers,
    neutral={},
    rotary_share=0.25,
    norms=("input_layernorm", "post_attention_layernorm"),
    final_norm="model.norm.weight",
    mlp="mlp",
    prefix="linear_attn",
    shapes=_next_shapes,
    fuse=_fuse_next,
    qwen=True,
)

# What newer and older exports write for "no limit".
_NO_LIMIT = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}], None)

FAMILIES: dict[str, Family] = {
    "BambaForCausalLM": Family(
        mixer=_mamba2,
        layers=_bamba_layers,
        neutral={"mamba_proj_bias": (False,), "mamba_conv_bias": (True,), "time_step_limit": _NO_LIMIT},
        rotary_share=0.5,
        norms=("input_layernorm", "pre_ff_layernorm"),
        final_norm="model.final_layernorm.weight",
        mlp="feed_forward",
        prefix="mamba",
        shapes=_bamba_shapes,
        fuse=_fuse_bamba,
    ),
    "Qwen3NextForCausalLM": _QWEN,
    "Qwen3_5ForCausalLM": _QWEN._replace(shapes=_qwen35_shapes, fuse=_fuse_qwen35),
}
