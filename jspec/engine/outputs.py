"""What the engine says: a request's result, and the tokens of one settled step."""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from jspec.engine.logprobs import TokenLogprob
from jspec.engine.logs import Request
from jspec.state.requests import FinishReason

FINISH_NAMES = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
    FinishReason.OUT_OF_PAGES: "error",
}

ERRORS = {
    FinishReason.ERROR: "the model's logits were not finite: its weights or the prompt's KV hold NaN or infinity",
    FinishReason.OUT_OF_PAGES: "the KV pool cannot hold the next step of this request, though no other holds a page: raise kv_tokens or kv_memory_bytes",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A request that has ended."""

    rid: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    """Emitted tokens, a stop token or the one that completes a stop string included, none after it."""
    text: str | None
    """Decoded `token_ids` without special tokens, up to a stop string; None if the engine has no tokenizer."""
    finish_reason: str
    """"stop", "length", "abort", "timeout", "error" (non-finite logits, or a KV pool too small for it alone; see `error`), or "refused" (never ran; see
    `error`)."""
    accept_lens: list[int]
    """Tokens of each verify that the user sees, bonus included. Not among them: the first token, which comes from prefill (as does another one after each
    retraction), and those that came one at a time while the request rode along in a MIXED batch."""
    index: int = 0
    """Which of the `SamplingParams.n` answers to the prompt this is."""
    logprobs: list[TokenLogprob] | None = None
    """Of each of `token_ids`, if `SamplingParams.logprobs` asked for them."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """Of each token of the prompt, None for the first, if `SamplingParams.prompt_logprobs` asked for them."""
    cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache when the request first started."""
    retractions: int = 0
    """Times it had to wait again, for want of KV pages or for a request of higher priority."""
    lossy: bool = False
    """Sampled under a `lossy_threshold` below 1: not the target's distribution."""
    error: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Emission:
    """New tokens of one request."""

    rid: str
    token_ids: list[int]
    output: RequestOutput | None
    """Set with the request's last tokens."""
    index: int = 0
    """As of `RequestOutput`."""
    text: str | None = None
    """What the request's text gained: never a part of a character, nor what a stop string may take back. The pieces join to `RequestOutput.text`."""
    logprobs: list[TokenLogprob] | None = None
    """Of `token_ids`, if they were asked for."""


class Emissions:
    """What one step of the engine brought: iterates as `Emission`s, which are made only if somebody looks; for their text, before the next step.

    Attributes:
        tokens: i32[B, O], runs of the settled rows.
        num_visible: i32[B], tokens of each run that the user sees.
        outputs: the requests that ended, by batch row.
    """

    def __init__(
        self,
        requests: list[Request | None],
        tokens: np.ndarray,
        starts: np.ndarray,
        num_visible: np.ndarray,
        outputs: dict[int, RequestOutput],
        so_far: Callable[[int], list[int]],
    ):
        self._requests, self._starts, self._so_far = requests, starts.tolist(), so_far
        self.tokens, self.num_visible, self.outputs = tokens, num_visible, outputs

    def __iter__(self) -> Iterator[Emission]:
        for i, request in enumerate(self._requests):
            if request is None or not (self.num_visible[i] or i in self.outputs):
                continue
            token_ids, output = self.tokens[i, : self.num_visible[i]].tolist(), self.outputs.get(i)
            start = self._starts[i]
            if request.text is not None and output is None:
                request.text.catch_up(self._so_far(i))
            yield Emission(
                rid=request.rid,
                token_ids=token_ids,
                output=output,
                index=request.index,
                text=None if request.text is None else request.text.take(),
                logprobs=None if request.logprobs is None else request.logprobs[start : start + len(token_ids)],
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """Counters since the engine was built, or since `reset_summary`."""

    requests: int
    tokens: int
    """Emitted, those from prefill included."""
    retractions: int
    """Times a request had to wait again."""
    verifies: int
    """Decode steps, counted a request at a time."""
    accept_length: float
    """Tokens per verify, bonus included; those from prefill not counted. 0 before the first verify."""
    tokens_per_s: float
    """Tokens over the time from the first launch to the last settle, idle time between `step` calls included."""
    iterations: int
    """Decode launches settled."""
    step_ms: float
    """Median time between settled decode launches."""
    host_ms_per_iteration: float
    """Median host time of an iteration: plan, pack, dispatch, settle; waiting for the device not included."""
    exposed_host_ms_per_iteration: float
    """Mean host time during which the device had nothing to do: 0 for a launch made while the one before still ran."""
    run_ahead: float
    """Share of decode launches made while the launch before still ran."""
    compiles_after_warmup: int
    """Programs compiled inside an iteration: 0, since all are built before the first."""
