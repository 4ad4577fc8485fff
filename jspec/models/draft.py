"""What a worker may ask of a draft model: a bundle of pure functions beside `TargetModel`."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple


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
