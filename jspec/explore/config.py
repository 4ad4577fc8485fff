"""What is explored: a scheduler small enough that all its states can be visited, and the requests that may come."""

import dataclasses

import numpy as np

from jspec.config import POLICIES
from jspec.scheduler import pages_to_finish
from jspec.state import Limits

STOPS = ("token", "string", "both", "none")
"""How a request may end before its length: with an end-of-sequence token, in a stop string, in either, or not at all."""

MAX_LENGTH = 250
"""Positions of a row, pages of a pool: they are packed into a byte."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExploreRequest:
    """One request that may arrive, at any time.

    Raises:
        ValueError: a number is out of range, naming the field.
    """

    prompt_len: int  # tokens
    max_new_tokens: int  # tokens
    priority: int = 0  # higher goes first
    shared: int = 0  # first tokens of its prompt that it has in common with all others that share as many

    def __post_init__(self) -> None:
        _at_least(self, "prompt_len", 1)
        _at_least(self, "max_new_tokens", 1)
        _within(self, "priority", -100, 100)
        _within(self, "shared", 0, self.prompt_len)

    @classmethod
    def parse(cls, text: str) -> "ExploreRequest":
        """Reads `"3+4"`, a prompt of 3 tokens and 4 to emit at most; `"3+4,shared=2,priority=1"` says more.

        Raises:
            ValueError: the text does not read so.
        """
        lengths, *options = text.split(",")
        try:
            prompt_len, max_new_tokens = (int(length) for length in lengths.split("+"))
            more = {name: int(value) for name, value in (option.split("=") for option in options)}
            if not more.keys() <= {"priority", "shared"}:
                raise ValueError
        except ValueError:
            raise ValueError(
                f'request={text!r} must read like "3+4" or "3+4,shared=2,priority=1": tokens of its prompt, tokens to emit'
            ) from None
        return cls(prompt_len=prompt_len, max_new_tokens=max_new_tokens, **more)

    def __str__(self) -> str:
        more = [f",{name}={value}" for name in ("shared", "priority") if (value := getattr(self, name))]
        return f"{self.prompt_len}+{self.max_new_tokens}" + "".join(more)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExploreConfig:
    """A scheduler, a device and the requests that may come to them.

    Raises:
        ValueError: a field is out of range, or a request could never run, naming the field.
    """

    requests: tuple[ExploreRequest, ...]
    rows: int = 2  # requests that may run at the same time
    pages: int = 6  # of the pool, the sink not counted
    page_size: int = 2  # tokens a page holds
    verify_width: int = 2  # most tokens that one step of a row may emit; any fewer are tried, so every depth that an adaptive worker drafts to is among them
    alloc_len: int | None = None  # tokens past its frontier that a step writes; None: `verify_width`
    depth: int = 1  # launches that may be unsettled when the next one is planned: 0 is without overlap
    mixed: bool = True  # running requests ride along in launches that prefill
    prefix_cache: bool = True
    caches_output: bool = True  # what a request emitted is left to the prefix cache, too
    max_prefill_tokens: int | None = None  # of one launch; None: any prompt at once
    max_prefill_rows: int = 8
    lookahead: int = 0  # prompt tokens past a page that its name stands for, too
    policy: str = "fcfs"
    new_token_ratio: float = 0.0  # share of their remaining tokens that running requests count with at admission
    aborts: bool = True  # any request may be aborted at any time
    stops: str = "token"  # one of `STOPS`
    failures: bool = False  # any row's logits may be not finite
    reserve_windows: int | None = None  # steps that a reserve is good for; None: `depth + 1`, which is what suffices

    def __post_init__(self) -> None:
        if not self.requests:
            raise ValueError("requests=() must hold at least one request")
        if len(self.requests) > 8:
            raise ValueError(f"requests has {len(self.requests)} entries, at most 8 can be explored: leave some out")
        _within(self, "rows", 1, 8)
        _within(self, "pages", 1, MAX_LENGTH)
        _within(self, "page_size", 1, MAX_LENGTH)
        _within(self, "verify_width", 1, 8)
        if self.alloc_len is not None:
            _within(self, "alloc_len", self.verify_width, 64)
        _within(self, "depth", 0, 3)
        _at_least(self, "max_prefill_rows", 1)
        _within(self, "lookahead", 0, 8)
        if self.reserve_windows is not None:
            _within(self, "reserve_windows", 0, 8)
        if not 0.0 <= self.new_token_ratio <= 1.0:
            raise ValueError(f"new_token_ratio={self.new_token_ratio} must be from 0 to 1")
        if self.policy not in POLICIES:
            raise ValueError(f"policy={self.policy!r} must be one of {', '.join(POLICIES)}")
        if self.stops not in STOPS:
            raise ValueError(f"stops={self.stops!r} must be one of {', '.join(STOPS)}")
        self._check_sizes()

    def _check_sizes(self) -> None:
        limits = self.limits
        longest = limits.context_len + 2 * limits.reserve_len + self.page_size
        if longest > MAX_LENGTH:
            raise ValueError(
                f"a row may come to {longest} positions, reserve included; at most {MAX_LENGTH} can be explored"
            )
        least = min(limits.context_len, self.page_size + self.lookahead)
        if limits.max_prefill_tokens < least:
            raise ValueError(
                f"max_prefill_tokens={self.max_prefill_tokens} must be at least {least}: a chunk is a whole page, and what the draft looks ahead to"
            )
        for request in self.requests:
            lengths = np.int32(request.prompt_len), np.int32(request.max_new_tokens)
            need = int(pages_to_finish(*lengths, limits=limits, page_size=self.page_size))
            if need > self.pages:
                raise ValueError(
                    f"pages={self.pages} cannot hold request {request}: alone it comes to {need} pages of {self.page_size} tokens, reserve included"
                )

    @property
    def context_len(self) -> int:
        """Tokens of the longest request."""
        return max(request.prompt_len + request.max_new_tokens for request in self.requests)

    @property
    def step_len(self) -> int:
        """Tokens past its frontier that a step writes."""
        return self.verify_width if self.alloc_len is None else self.alloc_len

    @property
    def limits(self) -> Limits:
        """The numbers that the scheduler should plan with."""
        return Limits(
            context_len=self.context_len,
            alloc_len=self.step_len,
            depth=self.depth,
            max_prefill_tokens=len(self.requests) * self.context_len
            if self.max_prefill_tokens is None
            else self.max_prefill_tokens,
            max_prefill_rows=self.max_prefill_rows,
            lookahead=self.lookahead,
            mixed=self.mixed,
            policy=self.policy,
            new_token_ratio=self.new_token_ratio,
            min_new_token_ratio=self.new_token_ratio,  # it does not fall, or every plan would lead to a new state
            ratio_steps=1,
        )

    @property
    def plan_limits(self) -> Limits:
        """The numbers that it does plan with: those of another depth, where `reserve_windows` asks for another reserve. What a plan reserves is all that
        the scheduler knows of the depth."""
        if self.reserve_windows is None:
            return self.limits
        return dataclasses.replace(self.limits, depth=self.reserve_windows - 1)


def _within(config, field: str, low: int, high: int) -> None:
    value = getattr(config, field)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{field}={value!r} must be a whole number from {low} to {high}")


def _at_least(config, field: str, low: int) -> None:
    _within(config, field, low, MAX_LENGTH)
