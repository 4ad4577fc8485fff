"""What a worker may ask of a target model: a bundle of pure functions, the way optax bundles `init` and `update`."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """Static facts of a model that the engine and the workers plan with."""

    vocab_size: int
    context_len: int  # longest sequence the position encoding was made for, in tokens
    hidden_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_layers: tuple[int, ...]  # layers that have KV, ascending: these are layers 0, 1, ... of the pool
    eos_token_ids: tuple[int, ...]
    kv_bytes_per_token: int  # K and V of all layers, in the pool's dtype
    recurrent_bytes: int = 0  # what recurrent layers remember of one row; 0 where there are none


class ForwardOutput(NamedTuple):
    """Result of one forward over `T` packed tokens."""

    hidden: Any  # f32|bf16[T, H]      after the final norm: what `logits` takes
    captured: Any  # f32|bf16[T, M, H]   residual stream after each of the M captured layers, in the order asked
    kv_pages: Any  # the pool, with this forward's KV written
    recurrent: Any = ()  # the state of recurrent layers: moved on by a prefill; after a verify or a decode step what it was before
    intermediates: Any = ()  # what a verify leaves of them for `commit`; leaves have axes [W, B, ...] in front


class TargetModel(NamedTuple):
    """A target model. All functions are pure and traceable.

    * `init_kv(num_pages, page_size) -> kv_pages`: zeros for page ids `0..num_pages` (page 0 is the sink for padding).
    * `forward(params, batch: ForwardBatch, kv_pages, *, capture_layers: tuple[int, ...] = (), recurrent=()) -> ForwardOutput`.
    * `forward_adapted(params, adapter, adapted: bool[T], batch, kv_pages, *, recurrent=()) -> ForwardOutput`: the rows `adapted` go through the weights with a low-rank adapter
      (`jspec.models.lora`), all others through the very weights of `forward`. Not every model has it.
    * `logits(params, hidden[..., H]) -> f32[..., V]`.
    * `move_kv(kv_pages, source: i32[T], target: i32[T]) -> kv_pages`: copies the KV of tokens from slot to slot, see `kv_move`.
    * `embedding(params) -> [V, H]` and `head(params) -> [V, H]`: what a draft shares with its target.
    * `init_recurrent(num_rows, num_pages, page_size) -> recurrent`: what recurrent layers remember of rows `0..num_rows - 1`, and at the ends of pages
      `0..num_pages`, from which a prefill may start (`num_pages` of 0: none may); `()` where there are no such layers.
    * `commit(recurrent, intermediates, accepted: Accepted) -> recurrent`: moves the rows of a verify on to the last place that was accepted, after
      `forward` left them where they were. Whoever runs a verify or a decode step owes this before the next forward of the rows.
    * `agreed(value) -> value`: the largest of the ranks that run this model together; `value` itself where there is one. What chooses a branch with a
      `forward` in it must be agreed on: every rank takes part in every forward.
    """

    facts: TargetFacts
    params: Any
    init_kv: Callable[..., Any]
    forward: Callable[..., ForwardOutput]
    logits: Callable[..., Any]
    move_kv: Callable[..., Any]
    embedding: Callable[..., Any]
    head: Callable[..., Any]
    agreed: Callable[..., Any] = lambda value: value
    init_recurrent: Callable[..., Any] = lambda num_rows, num_pages, page_size: ()
    commit: Callable[..., Any] = lambda recurrent, intermediates, accepted: recurrent
    forward_adapted: Callable[..., ForwardOutput] | None = None
    kernels: str = "xla"  # what its kernels run on: a draft's follow
    mesh: Any = (
        None  # devices that share it, see `jspec.models.parallel`; None: one. A draft runs whole on each of them
    )
    config: Any = None  # what shaped the model, of its own type: what a draft is trained after. None where there is nothing to tell
