"""What comes back from the device, and what the host remembers of a launch until then."""

import dataclasses
import enum
from typing import Any

import jax
import numpy as np

from jspec.state.batches import ForwardMode, ScheduleBatch

NEVER = 1 << 30
"""More than the tokens of any request."""


class RowStatus(enum.IntEnum):
    """What a step says of each row. Raised, if at all, by the shell: never inside a compiled program."""

    OK = 0
    STALE_RELAY = 1  # the FutureMap row was not written by the launch this step follows: a fault of the engine
    NOT_FINITE = 2  # the target's logits held NaN or infinity: the request fails, its neighbours do not


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Launched:
    """A launch whose result is not settled yet. A result counts for a row only while the row's epoch is the one recorded here."""

    forward_iter: Any  # i32[]
    rows: Any  # i32[B]
    epochs: Any  # i32[B]
    emits: Any  # bool[B]  the row emits at least a token: not in the middle of its prompt
    commits: Any  # bool[B]  its tokens' KV is committed when it settles: a decode row or a tail; that of a prompt was when it was planned
    end_lens: Any  # i32[B]  prompt rows: positions whose KV is right once this launch is; 0 elsewhere
    forward_mode: ForwardMode = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationBatchResult:
    """Outcome of one launch, on the host. `O` is the worker's output stride."""

    next_token_ids: Any  # i32[B, O]  the first accept_lens[b] are the run of row b
    accept_lens: Any  # i32[B]     tokens emitted, bonus included; 1 after EXTEND, 0 in the middle of a prompt
    new_seq_lens: Any  # i32[B]     frontier this launch published
    status: Any  # i32[B]     RowStatus
    stop_at: Any  # i32[B]     tokens of the run after which its text holds a stop string; NEVER where it does not. The host's, who alone knows text


def record(batch: ScheduleBatch) -> Launched:
    """What settle needs to know of `batch` after it was launched: its prompts, then its tails."""
    if not batch.forward_mode.is_prefill:
        always = np.ones(batch.rows.shape[0], bool)
        return Launched(
            forward_iter=batch.forward_iter,
            rows=batch.rows,
            epochs=batch.epochs,
            emits=always,
            commits=always,
            end_lens=np.zeros(batch.rows.shape[0], np.int32),
            forward_mode=batch.forward_mode,
        )
    tails = np.zeros(0, np.int32) if batch.tails is None else batch.tails.rows
    tail_epochs = tails if batch.tails is None else batch.tails.epochs
    return Launched(
        forward_iter=batch.forward_iter,
        rows=np.concatenate([batch.rows, tails]),
        epochs=np.concatenate([batch.epochs, tail_epochs]),
        emits=np.concatenate([~batch.goes_on, np.ones(tails.shape, bool)]),
        commits=np.arange(batch.rows.shape[0] + tails.shape[0]) >= batch.rows.shape[0],
        end_lens=np.concatenate([batch.prefix_lens + batch.extend_lens, np.zeros_like(tails)]),
        forward_mode=batch.forward_mode,
    )
