"""What a worker may ask of a draft model: a bundle of pure functions beside `TargetModel`."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftFacts:
    """Static facts of a draft that the engine and the workers plan with."""

    vocab_size: int  # of the target: what `token_ids` maps into
    draft_vocab_size: int  # tokens that the draft can propose
    hidden_size: int  # the target's too: both read one embedding table
    num_modules: int  # draft layers with a KV of their own; module `i` uses layer `i` of the draft's pool
    capture_layers: tuple[
        int, ...
    ]  # target layers whose hidden states `feature` fuses; () where it takes the last hidden state
    context_len: int  # longest sequence the position encoding was made for, in tokens
    chained: bool  # module `i` reads the hidden state of module `i - 1` instead of the target's
    kv_bytes_per_token: int  # K and V of all modules, in the pool's dtype


class DraftModel(NamedTuple):
    """A draft model over the paged KV pool, at the target's page ids. All functions are pure and traceable.

    Row `j` of a draft reads the feature of token `j` and the embedding of token `j + 1`, sits at position `j`, and predicts token `j + 2`
    (EAGLE, arXiv 2401.15077).

    * `init_kv(num_pages, page_size) -> kv_pages`, one layer a module.
    * `feature(params, captured: [T, M, H], hidden: [T, H]) -> [T, H]`: from a target's `ForwardOutput` to what the first module reads.
    * `forward(params, token_ids: i32[T], hidden: [T, H], batch: ForwardBatch, kv_pages, *, module: int = 0) -> (hidden: [T, H], kv_pages)`.
      `token_ids` are those of the *next* positions; `batch.input_ids` is not read.
    * `logits(params, hidden: [..., H], *, module: int = 0) -> f32[..., Vd]`.
    * `token_ids(params, draft_ids: i32[...]) -> i32[...]`: ids in the target's vocabulary.
    * `project_in(params, token_ids, hidden, *, module) -> (heads: f32[T, Hq + 2 Hkv, D], residual: [T, H])` and
      `project_out(params, residual, mixed: [T, Hq * D], *, module) -> hidden: [T, H]`: what `forward` is made of, around attention. Training uses
      them with dense attention.
    """

    facts: DraftFacts
    config: Any
    params: Any
    init_kv: Callable[..., Any]
    feature: Callable[..., Any]
    forward: Callable[..., Any]
    logits: Callable[..., Any]
    token_ids: Callable[..., Any]
    project_in: Callable[..., Any]
    project_out: Callable[..., Any]


def shared_with_target(
    config: Any, *, hidden_size: int, embed: Any, head: Any = None, token_ids: Any = None
) -> dict[str, Any]:
    """What a draft holds beside its own parameters: the target's embedding table and head, and its vocabulary.

    Args:
      config: of the draft: its vocabularies.
      hidden_size: of the target that it was made for.
      embed: [V, H].
      head: [Vd, H], the target's head at the draft's tokens; None where the draft has a head of its own.
      token_ids: i32[Vd], the target's id of each draft id; None: they are the same.
    Raises:
      ValueError: they are of another target, or the vocabulary is not told.
    """
    if embed.shape != (config.vocab_size, hidden_size):
        raise ValueError(
            f"the target embeds {embed.shape[0]} tokens in {embed.shape[1]} dimensions; the draft was made for "
            f"vocab_size={config.vocab_size}, hidden_size={hidden_size}: choose a draft made for this target"
        )
    shared = {"embed": embed}
    if head is not None:
        shared["head"] = head
        if head.shape != (config.draft_vocab_size, hidden_size):
            raise ValueError(f"{head.shape=} must be ({config.draft_vocab_size}, {hidden_size})")
    if token_ids is not None:
        shared["token_ids"] = jnp.asarray(token_ids, jnp.int32)
    elif config.draft_vocab_size != config.vocab_size:
        raise ValueError(
            f"token_ids (d2t) is missing: draft_vocab_size={config.draft_vocab_size} differs from vocab_size={config.vocab_size}"
        )
    return shared
