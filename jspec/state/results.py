"""What comes back from the device, and what the host remembers of a launch until then."""

import dataclasses
import enum
from typing import Any

import jax

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
    forward_mode: ForwardMode = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationBatchResult:
    """Outcome of one launch, on the host. `O` is the worker's output stride."""

    next_token_ids: Any  # i32[B, O]  the first accept_lens[b] are the run of row b
    accept_lens: Any  # i32[B]     tokens emitted, bonus included; 1 after EXTEND
    new_seq_lens: Any  # i32[B]     frontier this launch published
    status: Any  # i32[B]     RowStatus
    stop_at: Any  # i32[B]     tokens of the run after which its text holds a stop string; NEVER where it does not. The host's, who alone knows text


def record(batch: ScheduleBatch) -> Launched:
    """What settle needs to know of `batch` after it was launched."""
    return Launched(
        forward_iter=batch.forward_iter, rows=batch.rows, epochs=batch.epochs, forward_mode=batch.forward_mode
    )
