"""The workers whose steps the report compiles, with drafts of shapes alone: those of public drafts of 8B models where there are any."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models.block_draft import BlockDraftConfig, block_draft, block_param_shapes
from jspec.models.eagle_draft import EagleConfig, draft_param_shapes, eagle_draft
from jspec.models.frozen_kv_draft import FrozenKVConfig, frozen_kv_draft, frozen_param_shapes
from jspec.models.llama import LlamaConfig
from jspec.models.lora import Lora, LoraConfig, fuse_lora, init_lora
from jspec.models.target import TargetModel
from jspec.spec_workers import (
    EagleSizes,
    Proposal,
    SpecWorker,
    chain,
    dflash,
    dspark,
    eagle,
    frozen_kv_mtp,
    multi_layer_eagle,
    ngram,
    ngram_corpus,
    plain,
    uno,
)
from jspec.tpu_report.jobs import RANKS, VERIFIES

_DTYPE = jnp.bfloat16

WORKERS: dict[str, Callable[[TargetModel], SpecWorker]] = {
    "plain": plain,
    "verify of 8": lambda target: chain("verify of 8", target, _eight, verify_width=VERIFIES["verify of 8"]),
    "ngram": ngram,
    "ngram-corpus": ngram_corpus,
    "eagle3 chain of 3": lambda target: eagle(target, _draft(target, "eagle3"), sizes=EagleSizes(num_steps=3)),
    "eagle3 tree of 8": lambda target: eagle(
        target, _draft(target, "eagle3"), sizes=EagleSizes(num_steps=3, topk=4, num_draft_tokens=8)
    ),
    "multi-layer": lambda target: multi_layer_eagle(target, _draft(target, "multi-layer")),
    "dflash": lambda target: dflash(target, _block(target, "dflash")),
    "dspark compact": lambda target: dspark(target, _block(target, "dspark"), ragged_verify="compact"),
    "frozen-kv tree of 8": lambda target: frozen_kv_mtp(
        target, _assistant(target), sizes=EagleSizes(num_steps=3, topk=4, num_draft_tokens=8)
    ),
    "uno of 4": lambda target: uno(target, _adapter(target)),
    **dict.fromkeys(RANKS, ngram),
}


def _eight(history, lens) -> Proposal:
    """Seven drafts: what they are does not matter."""
    return Proposal(history[:, : VERIFIES["verify of 8"] - 1], jnp.full_like(lens, VERIFIES["verify of 8"] - 1))


def _draft(target: TargetModel, kind: str):
    config: LlamaConfig = target.config
    draft = EagleConfig(
        kind=kind,
        vocab_size=config.vocab_size,
        draft_vocab_size=min(32000, config.vocab_size) if kind == "eagle3" else config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        context_len=config.context_len,
        capture_layers=(1, config.num_layers // 2 - 1, config.num_layers - 4) if kind == "eagle3" else (),
        num_modules=3 if kind == "multi-layer" else 1,
    )
    return eagle_draft(
        draft,
        draft_param_shapes(draft, _DTYPE),
        embed=target.embedding(target.params),
        head=target.head(target.params),
        token_ids=np.arange(draft.draft_vocab_size) if kind == "eagle3" else None,
        kernels=target.kernels,
        dtype=_DTYPE,
        mesh=target.mesh,
    )


def _sizes(target: TargetModel) -> dict[str, Any]:
    """What a draft has of its target."""
    config: LlamaConfig = target.config
    names = ("vocab_size", "num_heads", "num_kv_heads", "head_dim", "context_len", "rope_theta")
    return {name: getattr(config, name) for name in names}


def _block(target: TargetModel, kind: str):
    """Blocks of 8 in five layers over five of the target's, as the public drafts of Qwen3-8B; DSpark's heads have rank 256."""
    config: LlamaConfig = target.config
    own: dict[str, Any] = {"markov_rank": 256, "confidence": True} if kind == "dspark" else {}
    layers = tuple(round(1 + i * (config.num_layers - 4) / 4) for i in range(5))
    draft = BlockDraftConfig(
        **_sizes(target),
        **own,
        kind=kind,
        draft_vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=5,
        capture_layers=layers,
        block_size=8,
        mask_token_id=0,
    )
    return block_draft(
        draft,
        block_param_shapes(draft, _DTYPE),
        embed=target.embedding(target.params),
        head=target.head(target.params),
        kernels=target.kernels,
        dtype=_DTYPE,
        mesh=target.mesh,
    )


def _assistant(target: TargetModel):
    """Four layers of 256, as Gemma 4's, that ask the target's last layer."""
    draft = FrozenKVConfig(
        **_sizes(target),
        draft_vocab_size=target.facts.vocab_size,
        target_hidden_size=target.facts.hidden_size,
        hidden_size=256,
        intermediate_size=2048,
        kv_layers=(target.facts.kv_layers[-1],) * 4,
    )
    embed = target.embedding(target.params)
    return frozen_kv_draft(draft, frozen_param_shapes(draft, _DTYPE), embed=embed, kernels=target.kernels, dtype=_DTYPE)


def _adapter(target: TargetModel) -> Lora:
    """Of rank 128, the one of the paper."""
    config = LoraConfig(rank=128, alpha=2048.0, block_size=4)
    make = functools.partial(init_lora, config=config, target=target)
    parts = jax.eval_shape(make, jax.random.key(0))
    return Lora(config, jax.eval_shape(lambda parts: fuse_lora(config, parts, target, _DTYPE), parts))
