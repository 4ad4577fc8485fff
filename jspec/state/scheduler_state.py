"""Everything the scheduler knows between two transitions, as one value."""

import dataclasses

import jax
import numpy as np
from pyrsistent import PDeque, PMap, pdeque, pmap

from jspec.state.ledger import KVLedger, init_ledger
from jspec.state.prefix_cache import PrefixCache, init_prefix_cache
from jspec.state.requests import RequestTable, init_requests
from jspec.state.results import Launched


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Numbers the scheduler plans with. It knows those of the worker, never its name."""

    context_len: int  # tokens of prompt + output
    alloc_len: int  # 1 + the highest offset past the frontier that one step of the worker writes
    depth: int  # launches that may be unsettled when a plan is made: 1 with overlap, 0 without
    max_prefill_tokens: int  # prompt tokens of one EXTEND batch; a longer prompt is cut into chunks
    max_prefill_rows: int  # requests of one EXTEND batch, tails not counted
    lookahead: int = 0  # prompt tokens past a chunk that its draft needs: no chunk leaves fewer
    mixed: bool = True  # running requests ride in an EXTEND batch as tails
    policy: str = "fcfs"  # one of `config.POLICIES`
    new_token_ratio: float = 0.7  # share of their remaining tokens that running requests are expected to want, at first
    min_new_token_ratio: float = 0.098  # and at last, if no request is retracted
    ratio_steps: int = 600  # decode plans from the first to the last

    @property
    def reserve_len(self) -> int:
        """Tokens a row must have allocated past its committed length: one window per unsettled step and one for the step planned."""
        return (self.depth + 1) * self.alloc_len


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerState:
    """The host's past and present. Token content is not in it: the engine's logs hold that."""

    requests: RequestTable
    ledger: KVLedger
    prefix_cache: PrefixCache
    launched: tuple[Launched, ...]  # unsettled launches, oldest first; at most depth + 1
    forward_iter: np.int32  # number of the newest launch; 0 = none yet
    new_token_ratio: np.float32  # see `Limits`; a retraction raises it
    waiting: PDeque = dataclasses.field(
        metadata={"static": True}
    )  # of Waiting; retracted ones first, then first come first
    admitted: PMap = dataclasses.field(metadata={"static": True})  # serial -> Waiting, of the requests that hold a row


def init_state(*, limits: Limits, max_running: int, num_pages: int, page_size: int) -> SchedulerState:
    """No request, every page free.

    Args:
        limits: numbers to plan with.
        max_running: rows that may run at the same time.
        num_pages: pages of the pool, the sink not counted.
        page_size: tokens a page holds.
    """
    pages_per_row = -(-(limits.context_len + limits.reserve_len) // page_size)
    return SchedulerState(
        requests=init_requests(max_running),
        ledger=init_ledger(
            max_running=max_running, num_pages=num_pages, pages_per_row=pages_per_row, page_size=page_size
        ),
        prefix_cache=init_prefix_cache(num_pages),
        launched=(),
        forward_iter=np.int32(0),
        new_token_ratio=np.float32(limits.new_token_ratio),
        waiting=pdeque(),
        admitted=pmap(),
    )
