"""What happens to requests, as records of Python's `logging`: one an event, with `event`, `rid` and the facts as fields of the record.

INFO tells a request's life, DEBUG every launch. While the logger `jspec.engine` is not enabled for a level, an event costs that question and no more.
"""

import logging
import time
from typing import Any

from jspec.engine.logs import Request
from jspec.engine.outputs import RequestOutput
from jspec.scheduler import Left
from jspec.state.batches import ScheduleBatch

_logger = logging.getLogger("jspec.engine")


def submitted(request: Request, *, max_new_tokens: int) -> None:
    """A request was queued. `max_new_tokens`: as capped by the context length."""
    if _logger.isEnabledFor(logging.INFO):
        _say(
            logging.INFO,
            "submitted",
            request.rid,
            **_index(request),
            prompt_tokens=len(request.prompt),
            max_new_tokens=max_new_tokens,
            priority=request.params.priority,
        )


def refused(rid: str | None, error: Exception) -> None:
    """A request could not be queued. `rid`: None where the caller left the name to the engine."""
    if _logger.isEnabledFor(logging.INFO):
        _say(logging.INFO, "refused", rid, error=str(error))


def started(request: Request, row: int, *, cached_tokens: int) -> None:
    """A request got a row. `cached_tokens`: tokens of its prefill that the prefix cache holds; after a retraction, its own perhaps."""
    if _logger.isEnabledFor(logging.INFO):
        _say(logging.INFO, "started", request.rid, **_index(request), row=row, cached_tokens=cached_tokens)


def retracted(request: Request, gone: Left) -> None:
    """A request lost its row and waits again: for want of KV pages, or for a request of higher priority."""
    if _logger.isEnabledFor(logging.INFO):
        why = "priority" if gone.for_priority else "kv_pages"
        where = {**_index(request), "row": gone.row}
        _say(logging.INFO, "retracted", request.rid, **where, output_tokens=gone.output_len, why=why)


def finished(request: Request, output: RequestOutput) -> None:
    """A request that had been queued is over, whatever the reason. `seconds` since its submission."""
    if _logger.isEnabledFor(logging.INFO):
        lens = output.accept_lens
        _say(
            logging.INFO,
            "finished",
            request.rid,
            **_index(request),
            finish_reason=output.finish_reason,
            tokens=len(output.token_ids),
            seconds=round(time.perf_counter() - request.submitted_at, 6),
            accept_length=sum(lens) / len(lens) if lens else 0.0,
        )


def launched(batch: ScheduleBatch) -> None:
    """A batch was dispatched. `tokens`: of prompts, and the pending one of each running row; drafts are not among them."""
    if _logger.isEnabledFor(logging.DEBUG):
        running = batch.tails if batch.forward_mode.is_prefill else batch
        num_running = 0 if running is None else len(running.rows)
        num_prompts = len(batch.rows) if batch.forward_mode.is_prefill else 0
        _say(
            logging.DEBUG,
            "launched",
            None,
            forward_iter=int(batch.forward_iter),
            mode=batch.forward_mode.value,
            rows=num_prompts + num_running,
            tokens=int(batch.extend_lens.sum()) + num_running,
        )


def _index(request: Request) -> dict[str, int]:
    """Which of several answers to a prompt, where there are several."""
    return {"index": request.index} if request.params.n > 1 else {}


def _say(level: int, event: str, rid: str | None, **fields: Any) -> None:
    named = fields if rid is None else {"rid": rid, **fields}
    message = " ".join([event, *(f"{name}={value!r}" for name, value in named.items())])
    _logger.log(level, message, extra={"event": event, "rid": rid, **fields})
