"""The host catches up with one launch: tokens accepted, KV committed, requests ended."""

from typing import Any, NamedTuple

import numpy as np

from jspec.state.dense import add_at, namespace, replace
from jspec.state.ledger import KVLedger
from jspec.state.requests import FinishReason, RequestTable
from jspec.state.results import NEVER, GenerationBatchResult, Launched, RowStatus

# NumPy scalars, so that codes are i32 on every backend.
_LENGTH, _STOP, _ERROR, _ABORT = (
    np.int32(code) for code in (FinishReason.LENGTH, FinishReason.STOP, FinishReason.ERROR, FinishReason.ABORT)
)
_NOT_FINITE = np.int32(RowStatus.NOT_FINITE)


class Settled(NamedTuple):
    """What one settle did, per row of the launch."""

    live: Any  # bool[B]  the row still belonged to the request it was launched for
    start: Any  # i32[B]   output length before
    num_new: Any  # i32[B]   tokens appended to the log, those after a stop included; 0 for rows that are not live
    num_visible: Any  # i32[B]   of these, tokens the user sees
    finish_reason: Any  # i32[B]   FinishReason; NONE while the request goes on


def settle(
    requests: RequestTable, ledger: KVLedger, launched: Launched, result: GenerationBatchResult
) -> tuple[RequestTable, KVLedger, Settled]:
    """Applies the outcome of `launched`; the only writer of `kv_committed_len` for speculative rows.

    A run is appended whole, and what a stop hides of it is said in `Settled.num_visible`, so `seqlen == kv_committed_len + 1` holds even for a
    request that ends inside a run.

    Args:
        requests, ledger: host state.
        launched: what the launch was; rows i32[B], 0 is padding.
        result: its outcome.

    Returns:
        The table, the ledger, and a `Settled`. Finished rows are released by the caller (`release`), in the same iteration.

    Requires: rows other than padding are distinct.
    Ensures: a row whose epoch moved on, and padding, change nothing; a live row of an OK step advances by at least one token, but in the middle of its
        prompt by none.
    Clock: `output_len`; `kv_committed_len` of decode rows and of the tails of a MIXED batch.
    Source: SGLang `process_batch_result_decode` / `_resolve_spec_v2_tokens` / `Req.update_finish_state`: an abort waiting to be taken comes first and
        hides nothing; then the first token of the run that is a stop token or completes a stop string (there the string comes first, wherever it is:
        plain decoding would have ended at the token); then the length, which caps a stop found beyond it.
    """
    xp = namespace(requests.output_len)
    rows = launched.rows
    live = (requests.epoch[rows] == launched.epochs) & (rows > 0)
    bad = result.status == _NOT_FINITE
    num_new = result.accept_lens * (live & ~bad)
    start, limit = requests.output_len[rows], requests.max_new_tokens[rows]
    end = start + num_new
    cut = xp.minimum(end, limit)

    # Reduced axes come first: NumPy reduces a short last axis an element at a time.
    is_stop = xp.any(requests.stop_token_ids[rows].T[:, None, :] == result.next_token_ids.T, axis=0)  # [O, B]
    place = xp.arange(1, result.next_token_ids.shape[1] + 1, dtype=xp.int32)
    stop_end = start + xp.minimum(xp.min(xp.where(is_stop, place[:, None], NEVER), axis=0), result.stop_at)

    aborted = requests.to_finish[rows] & live
    ended = xp.maximum((end >= limit) * _LENGTH, (stop_end <= cut) * _STOP)
    failed = xp.maximum(bad * _ERROR, aborted * _ABORT)
    reason = xp.maximum(ended, failed) * live
    # A row that is not live has no new tokens, so nothing of it is visible either.
    visible_end = xp.where(aborted, end, xp.minimum(stop_end, cut))

    requests = replace(requests, output_len=add_at(requests.output_len, rows, num_new))
    ledger = replace(ledger, kv_committed_len=add_at(ledger.kv_committed_len, rows, num_new * launched.commits))
    return requests, ledger, Settled(live, start, num_new, visible_end - start, reason)
