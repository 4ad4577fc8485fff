"""What is simulated: a policy, and the requests that meet it. Every field of either is one value, or one for each configuration."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from jspec.config import MAX_VERIFY_WIDTH
from jspec.sim.acceptance import Replayed, recorded
from jspec.sim.checks import as_array, require
from jspec.state import Limits

AMPLE = 1 << 30
"""More pages, or prompt tokens, than anybody asks for."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """How the engine of a configuration is set up. Made by `policy`; names are those of `EngineConfig` and `Limits`."""

    max_running: Any  # i32[]
    verify_width: Any  # i32[]
    draft_steps: Any  # i32[]
    alloc_len: Any  # i32[]
    overlap: Any  # bool[]
    mixed: Any  # bool[]
    kv_pages: Any  # i32[]
    max_prefill_tokens: Any  # i32[]
    new_token_ratio: Any  # f32[]
    min_new_token_ratio: Any  # f32[]
    ratio_steps: Any  # f32[]
    RANKS: ClassVar[dict[str, int]] = {
        "max_running": 0, "verify_width": 0, "draft_steps": 0, "alloc_len": 0, "overlap": 0, "mixed": 0, "kv_pages": 0,
        "max_prefill_tokens": 0, "new_token_ratio": 0, "min_new_token_ratio": 0, "ratio_steps": 0,
    }  # fmt: skip

    @property
    def reserve_len(self):
        """i32[] tokens a running row has allocated past its committed length, as `Limits.reserve_len`."""
        return (self.overlap + 1) * self.alloc_len


def policy(
    *,
    max_running: Any = 16,
    verify_width: Any = 1,
    draft_steps: Any = None,
    alloc_len: Any = None,
    overlap: Any = True,
    mixed: Any = True,
    kv_pages: Any = AMPLE,
    max_prefill_tokens: Any = AMPLE,
    new_token_ratio: Any = Limits.new_token_ratio,
    min_new_token_ratio: Any = Limits.min_new_token_ratio,
    ratio_steps: Any = Limits.ratio_steps,
) -> Policy:
    """A policy, checked. Each argument is a number, or an array with one for each configuration.

    Args:
        max_running: rows that run at the same time, at least 1.
        verify_width: `W`, tokens of a verify, the pending one included; 1 is plain decoding.
        draft_steps: steps that a draft model takes before each verify, one after another, for the latency model; by default `verify_width - 1`, as in a
            chain. 0 for prompt lookup; the depth for a tree.
        alloc_len: 1 + the highest offset past the frontier that a step writes; by default `verify_width`.
        overlap: a step is launched before the last is settled.
        mixed: running requests ride in launches that prefill.
        kv_pages: pages of the KV pool; by default as many as anybody wants.
        max_prefill_tokens: prompt tokens of one launch; longer prompts go in chunks. By default no limit.
        new_token_ratio, min_new_token_ratio, ratio_steps: see `Limits`.

    Raises:
        TypeError, ValueError: field, value and rule.
    """
    widths = as_array("verify_width", verify_width, np.int32, low=1, high=MAX_VERIFY_WIDTH)
    first = as_array("new_token_ratio", new_token_ratio, np.float32, low=0, high=1)
    last = as_array("min_new_token_ratio", min_new_token_ratio, np.float32, low=0, high=1)
    require(
        bool(np.all(last <= first)),
        f"min_new_token_ratio={min_new_token_ratio} exceeds new_token_ratio={new_token_ratio}: the ratio falls from the latter to the former",
    )
    return Policy(
        max_running=as_array("max_running", max_running, np.int32, low=1),
        verify_width=widths,
        draft_steps=as_array("draft_steps", widths - 1 if draft_steps is None else draft_steps, np.int32, low=0),
        alloc_len=as_array("alloc_len", widths if alloc_len is None else alloc_len, np.int32, low=1),
        overlap=as_array("overlap", overlap, bool),
        mixed=as_array("mixed", mixed, bool),
        kv_pages=as_array("kv_pages", kv_pages, np.int32, low=1),
        max_prefill_tokens=as_array("max_prefill_tokens", max_prefill_tokens, np.int32, low=1),
        new_token_ratio=first,
        min_new_token_ratio=last,
        ratio_steps=as_array("ratio_steps", ratio_steps, np.float32, low=1),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Requests:
    """The requests of a configuration, in the order of their arrival. Made by `closed_batch`, `open_trace` or `recorded_run`."""

    prompt_len: Any  # i32[Q]  tokens
    max_new_tokens: Any  # i32[Q]  tokens it may emit: what pages are promised for
    stop_len: Any  # i32[Q]  tokens after which it stops by itself, if that is before `max_new_tokens`
    arrival_s: Any  # f32[Q]  seconds, not falling
    count: Any  # i32[]  how many of the list there are, from its beginning
    RANKS: ClassVar[dict[str, int]] = {
        "prompt_len": 1, "max_new_tokens": 1, "stop_len": 1, "arrival_s": 1, "count": 0,
    }  # fmt: skip


def _wide(values: np.ndarray, count: int) -> np.ndarray:
    """One for each request: the last axis, added where there is none, and stretched."""
    values = values[..., None] if values.ndim == 0 else values
    return np.broadcast_to(values, (*values.shape[:-1], count))


def open_trace(*, arrival_s, prompt_len, max_new_tokens, stop_len=None, count=None) -> Requests:
    """Requests that arrive while others run.

    Args:
        arrival_s: f32[Q] or f32[C, Q] seconds, not falling. A request can start in the first iteration that begins at or after its arrival.
        prompt_len, max_new_tokens: a number, i32[Q], or i32[C, Q]; at least 1.
        stop_len: tokens after which a request stops by itself (its end-of-sequence token is the last of them); by default `max_new_tokens`. The planner
            does not know it: it promises pages for `max_new_tokens`.
        count: the list ends after so many, by default after all: configurations with fewer requests than others. A number or i32[C].

    Raises:
        TypeError, ValueError: field, value and rule.
    """
    arrival = as_array("arrival_s", arrival_s, np.float32, low=0)
    require(arrival.ndim >= 1 and arrival.shape[-1] > 0, f"arrival_s={arrival} must be a sequence, not empty")
    if (falls := np.diff(arrival, axis=-1) < 0).any():
        place = int(np.nonzero(falls)[-1][0]) + 1
        raise ValueError(f"arrival_s falls at request {place}: sort the requests by arrival")
    entries = arrival.shape[-1]
    values = {"prompt_len": prompt_len, "max_new_tokens": max_new_tokens}
    values["stop_len"] = max_new_tokens if stop_len is None else stop_len
    fields = {name: as_array(name, value, np.int32, low=1) for name, value in values.items()}
    for name, field in fields.items():
        if field.ndim and field.shape[-1] not in (1, entries):
            raise ValueError(
                f"{name} has {field.shape[-1]} entries for {entries} requests: give one for each, or one number; "
                "for one number a configuration, add an axis: shape (C, 1)"
            )
    return Requests(
        arrival_s=arrival,
        count=as_array("count", entries if count is None else count, np.int32, low=1, high=entries),
        **{name: _wide(field, entries) for name, field in fields.items()},
    )


def closed_batch(*, num_requests: int, prompt_len, max_new_tokens, stop_len=None, count=None) -> Requests:
    """Requests that are all there from the start: as soon as a row is free, the next one takes it.

    Args:
        num_requests: `Q`, at least 1.
        prompt_len, max_new_tokens, stop_len, count: see `open_trace`.

    Raises:
        TypeError, ValueError: field, value and rule.
    """
    require(num_requests >= 1, f"num_requests={num_requests} must be at least 1: nothing would be simulated")
    return open_trace(
        arrival_s=np.zeros(num_requests, np.float32),
        prompt_len=prompt_len,
        max_new_tokens=max_new_tokens,
        stop_len=stop_len,
        count=count,
    )


def recorded_run(outputs: Iterable[Any], *, max_new_tokens, arrival_s=None) -> tuple[Requests, Replayed]:
    """The requests of an engine's run, and what its verifies accepted.

    Args:
        outputs: `RequestOutput`s in the order of their submission; one that was refused or aborted has nothing to replay.
        max_new_tokens: as they were submitted: a number, or one a request.
        arrival_s: f32[Q] when they were submitted; by default all at the start.

    Raises:
        ValueError: field, value and rule.
    """
    outputs = list(outputs)
    require(bool(outputs), "outputs is empty: record at least one request")
    for output in outputs:
        require(
            len(output.token_ids) > 0,
            f"output {output.rid} has no tokens (finish reason {output.finish_reason!r}): leave it out",
        )
    requests = open_trace(
        arrival_s=np.zeros(len(outputs)) if arrival_s is None else arrival_s,
        prompt_len=[len(output.prompt_token_ids) for output in outputs],
        max_new_tokens=max_new_tokens,
        stop_len=[len(output.token_ids) for output in outputs],
    )
    return requests, recorded([output.accept_lens for output in outputs])


def grid(**axes: Sequence) -> dict[str, np.ndarray]:
    """Every combination of the values, as flat arrays: `C` is the product of their numbers, and the last name changes fastest.

    Example: `points = grid(width=[1, 4], rate=[0.5, 0.9])`, then `points["width"]` is `[1, 1, 4, 4]`.
    """
    for name, values in axes.items():
        require(len(values) > 0, f"{name} is empty: a grid without a point")
    flat = np.meshgrid(*(np.asarray(values) for values in axes.values()), indexing="ij")
    return {name: values.reshape(-1) for name, values in zip(axes, flat, strict=True)}
