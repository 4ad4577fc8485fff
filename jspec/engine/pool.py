"""How many KV pages the engine may have."""

import os

import jax
import numpy as np

from jspec.config import EngineConfig
from jspec.scheduler import pages_to_finish
from jspec.state.scheduler_state import Limits

_WORKSPACE_SHARE = 0.1


def memory_budget_bytes(*, vocab_size: int, batch: int, verify_width: int) -> int:
    """Bytes the KV pool may take, by default: what the device has free, less a tenth and less the logits of one verify of the largest batch.

    A CPU does not say what it has: a quarter of the machine's memory there, shared by its virtual devices.
    """
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        free = int((stats["bytes_limit"] - stats.get("bytes_in_use", 0)) * (1 - _WORKSPACE_SHARE))
    else:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4 // jax.local_device_count()
    logits_bytes = batch * verify_width * vocab_size * 4
    return free - 2 * logits_bytes  # the logits and one filtered copy of them


def num_kv_pages(
    config: EngineConfig,
    limits: Limits,
    *,
    vocab_size: int,
    kv_bytes_per_token: int,
    verify_width: int,
    recurrent_bytes: int = 0,
    draft_row_bytes: int = 0,
) -> int:
    """Pages of the pool: `kv_tokens` if given, else what the memory budget holds, and no more than all rows can use.

    `kv_bytes_per_token` counts every pool that lies at these pages: the target's and the draft's. `recurrent_bytes` are those that a row's recurrent state takes:
    each row has one, each token of a verify leaves one, and so does each page where there is a prefix cache. `draft_row_bytes`: what a draft keeps for a row.

    Raises:
        ValueError: not even the shortest request fits.
    """
    page = config.page_size
    longest = int(pages_to_finish(np.int32(1), np.int32(limits.context_len - 1), limits=limits, page_size=page))
    if config.kv_tokens is not None:
        pages, given = config.kv_tokens // page, f"kv_tokens={config.kv_tokens}"
    else:
        budget = config.kv_memory_bytes or memory_budget_bytes(
            vocab_size=vocab_size, batch=config.max_running, verify_width=verify_width
        )
        of_rows = recurrent_bytes * (config.max_running + 1 + config.max_running * verify_width)
        of_rows += draft_row_bytes * config.max_running
        of_page = kv_bytes_per_token * page + (recurrent_bytes if config.prefix_cache else 0)
        pages = min((budget - of_rows) // of_page, config.max_running * longest)
        given = f"kv_memory_bytes={budget} ({of_page} bytes a page{f', {of_rows} that rows keep beside them' if of_rows else ''})"
    shortest = int(pages_to_finish(np.int32(1), np.int32(2), limits=limits, page_size=page))
    if pages < shortest:
        raise ValueError(
            f"{given} holds {max(pages, 0)} pages of page_size={page}, but one request needs at least {shortest} "
            f"(its prompt and a speculative reserve of {limits.reserve_len} tokens): raise it to {shortest * page} tokens or more"
        )
    return pages
