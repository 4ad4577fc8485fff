"""What a serving bench found: figures over rounds, each ratio between two runs of one round."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from jspec.bench.decode_compare import Difference
from jspec.bench.serve_trace import Launches, Served
from jspec.bench.soak import SoakReport

WARM_GOAL = 5.0
"""Times sooner that a request should start whose prefix of 2000 tokens is cached."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """A figure over the rounds."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value."""
    return Spread(median=statistics.median(values), low=min(values), high=max(values))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeContender:
    """What one engine did with the trace. Percentiles are taken over the requests or tokens of a round."""

    algorithm: str
    mixed: bool  # running requests ride along in launches that prefill; else they wait
    tokens_per_s: Spread
    speedup: Spread  # tokens/s over that of the same algorithm with separate prefill, round by round
    first_token_p50_ms: Spread  # from arrival
    first_token_p95_ms: Spread
    between_tokens_p50_ms: Spread | None  # None where no request got a second token
    between_tokens_p95_ms: Spread | None
    between_tokens_max_ms: Spread | None  # prefill apart makes few wait, and those long: no percentile need show it
    accept_length: float  # of the last round
    launches: Launches  # of all rounds, as are the counts below
    retractions: int
    outputs: int
    identical: int  # outputs equal to those of the first contender's first round, token for token
    near_ties: int  # outputs whose first difference is a near tie
    compiles_after_warmup: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeTrace:
    """The trace, and who served it."""

    model: str
    requests: int
    prompts: list[str]  # a line for each set: name, number, how records became prompts
    prompt_tokens: list[int]  # in the order of arrival
    max_new_tokens: int
    max_prefill_tokens: int | None
    max_running: int
    rounds: int
    arrivals_per_s: float
    arrivals_given: (
        bool  # else measured: twice what the first contender serves a second with all requests there from the start
    )
    contenders: list[ServeContender]
    differences: dict[str, list[Difference]]  # from the first contender's first round, by contender

    @property
    def lossless(self) -> bool:
        """Whether all outputs are the same, near ties aside."""
        return all(c.identical + c.near_ties == c.outputs for c in self.contenders)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixTurn:
    """One of the three prompts of a round."""

    name: str
    first_token_ms: Spread
    speedup: Spread  # over the cold prompt of the same round
    cached_tokens: list[int]  # found in the prefix cache, by round


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmPrefix:
    """What a cached prefix saves."""

    algorithm: str
    prefix_tokens: int  # that the prompts of a round share
    prompt_tokens: int
    page_size: int
    rounds: int
    turns: list[PrefixTurn]  # cold, the same again, another ending
    differences: list[Difference]  # of the same prompt's output when it came again, by round
    compiles_after_warmup: int
    note: str

    @property
    def lossless(self) -> bool:
        """Whether the same prompt brought the same tokens, near ties aside."""
        return all(difference.near_tie for difference in self.differences)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeBench:
    """All of it; None of what was left out."""

    trace: ServeTrace | None
    prefix: WarmPrefix | None
    soak: SoakReport | None

    @property
    def ok(self) -> bool:
        """Whether nothing was found that must not be: another output, a lost page, memory that grows."""
        texts = all(part is None or part.lossless for part in (self.trace, self.prefix))
        return texts and (self.soak is None or self.soak.ok)


def contender_name(algorithm: str, mixed: bool) -> str:
    return f"{algorithm}, {'mixed' if mixed else 'separate'}"


def measure_served(
    algorithm: str, mixed: bool, runs: Sequence[Served], separate: Sequence[Served], differences: Sequence[Difference]
) -> ServeContender:
    """The figures of one contender.

    Args:
        algorithm, mixed: who it is.
        runs: its rounds.
        separate: those of the same algorithm with separate prefill.
        differences: every output that differs.
    """

    def percentile(field: str, q: int) -> Spread | None:
        rounds = [1e3 * float(np.percentile(getattr(run, field), q)) for run in runs if getattr(run, field)]
        return spread(rounds) if rounds else None

    first_p50, first_p95 = (percentile("first_token_s", q) for q in (50, 95))
    assert first_p50 is not None and first_p95 is not None
    outputs = sum(len(run.token_ids) for run in runs)
    return ServeContender(
        algorithm=algorithm,
        mixed=mixed,
        tokens_per_s=spread([run.tokens_per_s for run in runs]),
        speedup=spread([r.tokens_per_s / s.tokens_per_s for r, s in zip(runs, separate, strict=True)]),
        first_token_p50_ms=first_p50,
        first_token_p95_ms=first_p95,
        between_tokens_p50_ms=percentile("between_tokens_s", 50),
        between_tokens_p95_ms=percentile("between_tokens_s", 95),
        between_tokens_max_ms=percentile("between_tokens_s", 100),
        accept_length=runs[-1].accept_length,
        launches=sum((run.launches for run in runs), Launches()),
        retractions=sum(run.retractions for run in runs),
        outputs=outputs,
        identical=outputs - len(differences),
        near_ties=sum(difference.near_tie for difference in differences),
        compiles_after_warmup=sum(run.compiles for run in runs),
    )


def _told(differences: Sequence[Difference]) -> list[dict[str, Any]]:
    return [{**dataclasses.asdict(d), "near_tie": d.near_tie} for d in differences]


def serve_json(bench: ServeBench) -> dict[str, Any]:
    """The object that `jspec bench serve --json` prints."""
    record: dict[str, Any] = {**dataclasses.asdict(bench), "ok": bench.ok}
    if bench.trace is not None:
        told = {name: _told(found) for name, found in bench.trace.differences.items()}
        record["trace"] |= {"differences": told, "lossless": bench.trace.lossless}
    if bench.prefix is not None:
        record["prefix"] |= {
            "differences": _told(bench.prefix.differences),
            "lossless": bench.prefix.lossless,
            "goal": WARM_GOAL,
        }
    if bench.soak is not None:
        record["soak"]["ok"] = bench.soak.ok
    return record
