"""One trace of requests, served once by one engine: they arrive at given times, and every token is timed as it comes."""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from jspec.bench.prompts import encode_prompt
from jspec.config import SamplingParams
from jspec.engine import Engine
from jspec.models.tokenizer import Tokenizer
from jspec.state.batches import ForwardMode
from jspec.state.scheduler_state import SchedulerState

SHORTEST, LONGEST_SHORT = 8, 64
"""Tokens of a short prompt, where prompts are random."""


def arrival_times(count: int, *, rate: float, seed: int) -> list[float]:
    """Seconds at which requests arrive, the first at 0: exponential gaps with a mean of `1 / rate`, the same for a seed whatever the rate but for scale."""
    gaps = np.random.default_rng(seed).exponential(size=max(count - 1, 0))
    return [0.0, *np.cumsum(gaps / rate).tolist()][:count]


def is_long(index: int, long_every: int) -> bool:
    """Whether the request of this number, from 0, brings a long prompt: the last of every `long_every`; none where that is 0."""
    return long_every > 0 and index % long_every == long_every - 1


def random_prompts(count: int, *, long_every: int, long_tokens: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Prompts of random token ids: long ones of `long_tokens`, short ones of 8 to 64."""
    rng = np.random.default_rng(seed)
    short = [min(int(n), long_tokens) for n in rng.integers(SHORTEST, LONGEST_SHORT + 1, count)]
    lens = [long_tokens if is_long(i, long_every) else short[i] for i in range(count)]
    return [rng.integers(0, vocab_size, n).tolist() for n in lens]


def text_prompts(
    texts: Sequence[str], tokenizer: Tokenizer, count: int, *, long_every: int, long_tokens: int, chat: bool | None
) -> list[list[int]]:
    """The texts in turn as prompts. A long one is as many texts in a row as `long_tokens` hold, at least one."""

    def joined(start: int, number: int) -> list[int]:
        text = "\n\n".join(texts[(start + i) % len(texts)] for i in range(number))
        return encode_prompt(tokenizer, text, chat=chat)

    prompts = []
    for i in range(count):
        prompt, number = joined(i, 1), 1
        while is_long(i, long_every) and len(longer := joined(i, number + 1)) <= long_tokens:
            prompt, number = longer, number + 1
        prompts.append(prompt)
    return prompts


@dataclasses.dataclass(kw_only=True)
class Launches:
    """What an engine launched, by kind."""

    prefill: int = 0
    mixed: int = 0  # a prefill with running requests along
    decode: int = 0
    chunks: int = 0  # prompt parts that were not a prompt's last

    def __add__(self, other: "Launches") -> "Launches":
        mine, others = dataclasses.asdict(self), dataclasses.asdict(other)
        return Launches(**{name: mine[name] + others[name] for name in mine})


class LaunchCounter:
    """Counts an engine's launches from its states, one after each `step`. Needs overlap: a launch is seen while it is unsettled."""

    def __init__(self, state: SchedulerState):
        self.launches = Launches()
        self._seen = int(state.forward_iter)

    def see(self, state: SchedulerState) -> None:
        """After a step."""
        if int(state.forward_iter) == self._seen:
            return
        self._seen = int(state.forward_iter)
        launched = state.launched[-1]
        mode = launched.forward_mode
        self.launches.prefill += mode is ForwardMode.EXTEND
        self.launches.mixed += mode is ForwardMode.MIXED
        self.launches.decode += mode is ForwardMode.DECODE
        self.launches.chunks += int((~launched.emits).sum())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """A trace, served. Lists are in the order of arrival."""

    token_ids: list[list[int]]
    first_token_s: list[float]  # from a request's arrival to its first token
    between_tokens_s: list[float]  # of all requests; tokens that come together share the time since those before
    seconds: float  # from the first arrival to the last token
    launches: Launches
    accept_length: float  # tokens a verify, bonus included; 0 without a verify
    retractions: int
    compiles: int

    @property
    def tokens_per_s(self) -> float:
        """Of all requests, waiting for arrivals included."""
        return sum(map(len, self.token_ids)) / self.seconds if self.seconds else 0.0


def serve(
    engine: Engine, prompts: Sequence[Sequence[int]], arrivals_s: Sequence[float], params: SamplingParams
) -> Served:
    """Serves a trace to its end; an idle engine sleeps until the next arrival.

    Args:
        engine: with overlap, and nothing to do.
        prompts: token ids.
        arrivals_s: ascending, from 0, one a prompt.
        params: of every request.

    Raises:
        ValueError: the engine refuses a prompt.
    """
    engine.reset_summary()
    counter = LaunchCounter(engine.state)
    index: dict[str, int] = {}
    outputs: list[list[int]] = [[] for _ in prompts]
    first_s, between_s, last_s = [0.0] * len(prompts), [], list(arrivals_s)
    start, now = time.perf_counter(), 0.0
    while len(index) < len(prompts) or engine.has_work:
        arrived = time.perf_counter() - start
        while len(index) < len(prompts) and arrivals_s[len(index)] <= arrived:
            index[engine.submit(prompts[len(index)], params)] = len(index)
        if not engine.has_work:
            time.sleep(max(arrivals_s[len(index)] - (time.perf_counter() - start), 0.0))
            continue
        emissions = engine.step()
        now = time.perf_counter() - start
        counter.see(engine.state)
        for emission in emissions:
            i, count = index[emission.rid], len(emission.token_ids)
            if emission.output is not None and emission.output.error is not None:
                raise ValueError(f"request {i + 1} failed: {emission.output.error}")
            if not count:
                continue
            since, last_s[i] = now - last_s[i], now
            if outputs[i]:
                between_s += [since / count] * count
            else:
                first_s[i] = since
            outputs[i] += emission.token_ids
    summary = engine.summary()
    return Served(
        token_ids=outputs,
        first_token_s=first_s,
        between_tokens_s=between_s,
        seconds=max(last_s, default=0.0),
        launches=counter.launches,
        accept_length=summary.accept_length,
        retractions=summary.retractions,
        compiles=summary.compiles_after_warmup,
    )
