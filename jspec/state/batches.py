"""What one iteration runs: the mode, the scheduler's batch, and the device view that a worker builds from it."""

import dataclasses
import enum
from typing import Any

import jax


class ForwardMode(enum.Enum):
    """What a forward does (SGLang's names). The scheduler plans the first four; the last two exist only inside a worker."""

    EXTEND = "extend"
    DECODE = "decode"
    MIXED = "mixed"
    IDLE = "idle"
    TARGET_VERIFY = "target_verify"
    DRAFT_EXTEND_V2 = "draft_extend_v2"

    @property
    def is_planned(self) -> bool:
        """True for the modes a `ScheduleBatch` may carry; a worker's inner mode must never reach the scheduler."""
        return self in (ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED, ForwardMode.IDLE)

    @property
    def is_prefill(self) -> bool:
        """True where prompt tokens enter the KV pool. TARGET_VERIFY is not a prefill, although it too writes several tokens a row."""
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """The device view of one target or draft forward: `T` packed tokens of `B` rows. Lives inside one compiled program.

    Token `t` of row `b` sees KV positions `[0, positions[t]]` of that row: its prefix and, causally, the tokens before it in this batch.
    """

    input_ids: Any  # i32[T]     token ids, rows one after another; padding tokens are 0
    positions: Any  # i32[T]     absolute position of each token in its row; padding tokens 0
    slots: Any  # i32[T]     where the token's KV goes: page * page_size + offset; padding tokens 0 (page 0 is the sink)
    rows: Any  # i32[B]     pool rows; 0 is padding
    prefix_lens: Any  # i32[B]     KV-ready positions before this forward
    extend_lens: Any  # i32[B]     tokens of each row in this forward; 0 for padding rows
    page_table: Any  # i32[B, P]  pages of each row, in position order
    packed: Any = None  # i32[T] or None  of a verify of rows of different lengths: place of each token among the B * W; B * W is padding
    ancestors: Any = None  # u32[B, W] or None  tree verify: bit j of node i is set where node j is on i's path; None is a causal chain
    forward_mode: ForwardMode = dataclasses.field(metadata={"static": True})
    query_len: int | None = dataclasses.field(metadata={"static": True})
    """`W` when every row owns `W` places, as in decode and verify: `T == B * W`, or fewer with `packed`. None when rows are ragged otherwise."""
    num_tails: int = dataclasses.field(default=0, metadata={"static": True})
    """Of a ragged batch: the last so many rows own one packed slot each, the last ones, whatever the other rows fill."""
    query_start: int = dataclasses.field(default=0, metadata={"static": True})
    """Nodes of a tree that earlier forwards wrote: this batch's are the next ones. Needs `ancestors`; see `verify_attention`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleBatch:
    """One planned launch: made once, consumed once, never changed. Rows are distinct pool rows, without padding.

    It holds no KV frontier: that lives in the FutureMap and is read inside the launch. A MIXED batch is an EXTEND batch with a DECODE batch for its
    `tails`, whose rows move on by their one pending token.
    """

    forward_iter: Any  # i32[]      number of this launch, from 1; the relay generation it publishes
    rows: Any  # i32[B]
    epochs: Any  # i32[B]     of the rows when planned
    serials: Any  # i32[B]     submission numbers of the rows' requests
    prefix_lens: Any  # i32[B]     EXTEND: KV-ready tokens before it; DECODE: 0, late bound on the device
    extend_lens: Any  # i32[B]     EXTEND: tokens this launch prefills; DECODE: 0
    expected_iter: Any  # i32[B]     relay generation the launch must find in each row; 0 = none, the row is new
    first_page: Any  # i32[B]     column of the page table where new_pages start; EXTEND: 0
    new_pages: Any  # i32[B, K]  pages granted by this plan, -1 padded: the page-table delta; EXTEND: all pages of the row, shared ones included
    kv_bound: Any  # i32[]      upper bound of every position this launch may touch, in tokens
    goes_on: Any  # bool[B]    EXTEND: more of the prompt is to come, so this launch emits nothing for the row
    tails: "ScheduleBatch | None" = None  # MIXED: running rows that ride along
    forward_mode: ForwardMode = dataclasses.field(metadata={"static": True})
