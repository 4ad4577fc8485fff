"""Which rank a new request goes to."""

from collections.abc import Sequence

import numpy as np

from jspec.scheduler.prefix_cache import match_prefix
from jspec.state.scheduler_state import SchedulerState


def outstanding_tokens(state: SchedulerState) -> int:
    """Tokens that a rank has still to compute: of prompts, and of outputs if each request takes all it may."""
    requests, ledger = state.requests, state.ledger
    alive = requests.serial > 0
    to_fill = np.maximum(requests.fill_len - ledger.kv_committed_len, 0) * alive
    to_emit = (requests.max_new_tokens - requests.output_len) * alive
    waiting = sum(r.fill_len + r.max_new_tokens - r.output_len for r in state.waiting)
    return int(to_fill.sum()) + int(to_emit.sum()) + waiting


def route(states: Sequence[SchedulerState], page_keys: tuple[bytes, ...]) -> int:
    """The rank with the fewest outstanding tokens, less those of the prompt that it has in its prefix cache; of equals the first.

    Args:
        states: of each rank, on NumPy arrays.
        page_keys: names of the prompt's pages.

    Source: SGLang's data-parallel controller sends a request to the shortest queue, its router to the longest cached prefix; this is their sum.
    """

    def cost(state: SchedulerState) -> int:
        cached = match_prefix(state.prefix_cache, page_keys, most=len(page_keys))
        return outstanding_tokens(state) - len(cached) * state.ledger.page_size

    if len(states) == 1:
        return 0
    return min(range(len(states)), key=lambda rank: cost(states[rank]))
