"""What a simulation carries from one iteration to the next: the scheduler's own tables, and the little that stands for engine and device."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.state import ForwardMode, KVLedger, Launched, RequestTable, init_ledger, init_requests
from jspec.state.dense import replace


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Shapes of a compiled simulation, common to all its configurations. Each is the largest that any of them needs."""

    rows: int  # requests that run at the same time
    num_requests: int  # `Q`
    num_pages: int  # pages of the pool
    pages_per_row: int  # `P`
    page_size: int  # tokens a page holds
    reserve_len: int  # tokens a row reserves past its committed length
    prefill_rows: int  # prompts of one launch

    @property
    def at_once(self) -> int:
        """Rows that one turn starts, or frees: more in one iteration take another turn, with the same outcome. Most iterations have few, and every turn pays for
        all it could do."""
        return min(self.rows, 2 if self.rows < 32 else 4)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RowFacts:
    """What the scheduler does not know of the request in each row. `R = rows + 1`; row 0 is padding, as in the tables."""

    stop_len: Any  # i32[R]  tokens after which its stop token comes
    verifies: Any  # i32[R]  settled: which draw is next
    first_token_s: Any  # f32[R]  when its first token came; NaN before


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Flight:
    """The launch that is not settled yet; rows all 0 where there is none. One entry a row of the table: entry `r` is row `r`, or padding."""

    launched: Launched
    accept_lens: Any  # i32[R]  what its result will say
    verifies: Any  # bool[R] the row verifies drafts: not a prompt, not a tail
    exists: Any  # bool[]
    is_decode: Any  # bool[]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Queue:
    """Who waits: retracted requests, the last one first, then those that were never started, in the order of their arrival."""

    stack: Any  # i32[R + 1]  serials of retracted requests; the last entry is a sink
    stacked: Any  # i32[]  how many
    fresh: Any  # i32[]  requests that were started once, which are the first of the list


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PerRequest:
    """What is kept of a request while it holds no row, by serial; entry 0 is a sink."""

    settled_len: Any  # i32[Q + 1]  tokens it has
    verifies: Any  # i32[Q + 1]
    first_token_s: Any  # f32[Q + 1]
    finish_s: Any  # f32[Q + 1]  NaN until it has ended
    retractions: Any  # i32[Q + 1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Clock:
    """Time of the host, and how far the device is ahead of it.

    A sum of many short steps would lose them in single precision: `lost` is what rounding took (Kahan's summation), and the lead is kept apart.
    """

    now_s: Any  # f32[]
    lost: Any  # f32[]
    lead_s: Any  # f32[]  from now until the device has nothing to do; below 0 it waits already
    busy_s: Any  # f32[]  the device ran programs for so long
    busy_lost: Any  # f32[]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """i32[] each."""

    steps: Any  # calls of `Engine.step` that did something
    iterations: Any  # decode launches settled: `Summary.iterations`
    prefills: Any  # launches with prompts, those with tails included
    row_rounds: Any  # rows of all launches: a row advanced by an iteration
    verifies: Any  # settled verifies, counted a request at a time: `Summary.verifies`
    wasted: Any  # rows of settled launches whose request had ended, or lost its row, meanwhile
    tokens: Any  # emitted
    verified_tokens: Any  # of these, by verifies
    retractions: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SimState:
    """One simulated scheduler, its queue and its device. A pytree, so that many go through `vmap` together."""

    requests: RequestTable
    ledger: KVLedger
    facts: RowFacts
    flight: Flight
    queue: Queue
    per_request: PerRequest
    clock: Clock
    counts: Counts
    new_token_ratio: Any  # f32[]  see `Limits`


class Step(NamedTuple):
    """What one iteration did. Scalars of a configuration."""

    now_s: Any  # f32[]  at its end
    is_prefill: Any  # bool[]
    rows: Any  # i32[]   rows launched
    settled_tokens: Any  # i32[]
    finished: Any  # i32[]   requests that ended
    retracted: Any  # i32[]
    free_pages: Any  # i32[]   at its end
    running: Any  # i32[]   requests that hold a row at its end


def no_flight(rows: int) -> Flight:
    """Nothing under way, in a table of `rows` rows."""
    zeros, never = jnp.zeros(rows, jnp.int32), jnp.zeros(rows, bool)
    launched = Launched(
        forward_iter=jnp.int32(0),
        rows=zeros,
        epochs=zeros,
        emits=never,
        commits=never,
        end_lens=zeros,
        forward_mode=ForwardMode.DECODE,
    )
    none = jnp.zeros((), bool)
    return Flight(launched=launched, accept_lens=zeros, verifies=never, exists=none, is_decode=none)


def init(sizes: Sizes, kv_pages, new_token_ratio) -> SimState:
    """Nobody has arrived, every page is free.

    Args:
        sizes: shapes.
        kv_pages: i32[], pages of this pool: `sizes.num_pages` at most.
        new_token_ratio: f32[], the first.
    """
    num_rows, entries = sizes.rows + 1, sizes.num_requests + 1
    ledger = init_ledger(
        max_running=sizes.rows,
        num_pages=sizes.num_pages,
        pages_per_row=sizes.pages_per_row,
        page_size=sizes.page_size,
    )
    # Of a smaller pool, the pages are the first ones: the stack is as `init_ledger` would make it, and has room to spare.
    kv_pages = jnp.asarray(kv_pages, jnp.int32)
    stack = jnp.maximum(kv_pages - jnp.arange(sizes.num_pages + 1, dtype=jnp.int32), 0)
    ledger = replace(ledger, free_pages=stack, num_free=kv_pages)
    # Tokens have no content here, so nobody compares them with stop tokens: `stop_at` says where a request stops.
    requests = replace(init_requests(sizes.rows), stop_token_ids=np.zeros((num_rows, 0), np.int32))
    ledger, requests = jax.tree.map(jnp.asarray, (ledger, requests))

    def zeros(length):
        return jnp.zeros(length, jnp.int32)

    def nothing(length):
        return jnp.full(length, jnp.nan, jnp.float32)

    zero, second = jnp.int32(0), jnp.float32(0)
    return SimState(
        requests=requests,
        ledger=ledger,
        facts=RowFacts(stop_len=zeros(num_rows), verifies=zeros(num_rows), first_token_s=nothing(num_rows)),
        flight=no_flight(num_rows),
        queue=Queue(stack=zeros(num_rows + 1), stacked=zero, fresh=zero),
        per_request=PerRequest(
            settled_len=zeros(entries),
            verifies=zeros(entries),
            first_token_s=nothing(entries),
            finish_s=nothing(entries),
            retractions=zeros(entries),
        ),
        clock=Clock(now_s=second, lost=second, lead_s=second, busy_s=second, busy_lost=second),
        counts=Counts(**{field.name: zero for field in dataclasses.fields(Counts)}),
        new_token_ratio=jnp.asarray(new_token_ratio, jnp.float32),
    )
