"""What a decode bench found: one contender a column, and every difference between two texts."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jspec.bench.decode_compare import Difference
from jspec.bench.decode_curve import VerifyCost
from jspec.bench.decode_run import Run

BARE, PLAIN = "bare loop", "plain"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """What one algorithm did over all prompts. Times are of decoding alone: from the first token of a prompt to its last."""

    algorithm: str
    k: int  # drafts that one verify checks at most: W - 1
    tokens: int
    verifies: int
    tokens_per_s: float
    step_ms: float
    speedup: float  # tokens/s over plain's
    median_speedup: float  # median over the prompts of the same ratio
    accept_length: float  # tokens a verify, bonus included
    exposed_host_ms: float | None  # an iteration; None of the bare loop
    exposed_host_percent: float | None  # of a step
    host_ms: float | None
    run_ahead: float | None
    outputs: int
    speedup_per_accept: float  # speed-up over accept length: what the cost of a verify leaves of it
    identical: int  # outputs equal to plain's, token for token
    near_ties: int  # outputs whose first difference is a near tie
    compiles_after_warmup: int
    launch: "Launch | None" = None  # None of the bare loop
    draft_percent: float | None = (
        None  # of a step, what is left beside a verify of as many tokens; None where no curve was measured
    )


class Launch(NamedTuple):
    """What a decode launch takes, whatever the context."""

    dispatches: int
    upload_bytes: int
    download_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeBench:
    """All of it."""

    model: str
    prompts: list[str]  # a line for each set: name, number, how records became prompts
    max_new_tokens: int
    batch: int
    repeat: int
    contenders: list[Contender]
    differences: dict[str, list[Difference]]  # from plain, by algorithm
    verify_costs: list[VerifyCost]  # empty if not measured

    @property
    def lossless(self) -> bool:
        """Whether every text of the engine is plain's, near ties aside. The bare loop promises nothing."""
        return all(c.identical + c.near_ties == c.outputs for c in self.contenders if c.algorithm != BARE)


def decode_json(bench: DecodeBench) -> dict[str, Any]:
    """The object that `jspec bench decode --json` prints."""
    record = dataclasses.asdict(bench)
    for algorithm, found in bench.differences.items():
        record["differences"][algorithm] = [{**dataclasses.asdict(d), "near_tie": d.near_tie} for d in found]
    for found, contender in zip(record["contenders"], bench.contenders, strict=True):
        found["launch"] = None if contender.launch is None else contender.launch._asdict()
    return {**record, "verify_costs": [cost._asdict() for cost in bench.verify_costs], "lossless": bench.lossless}


def with_draft_share(contender: Contender, costs: Sequence[VerifyCost]) -> Contender:
    """`contender`, told by the curve of the target's own steps what of its step is not the target's."""
    if not costs or contender.launch is None or not contender.step_ms:
        return contender
    verify_ms = float(np.interp(contender.k + 1, [c.width for c in costs], [c.step_ms for c in costs]))
    return dataclasses.replace(contender, draft_percent=100 * max(0.0, 1 - verify_ms / contender.step_ms))


def _weighted(runs: Sequence[Run], field: str) -> float | None:
    """Mean over the iterations of all runs."""
    pairs = [(getattr(run.summary, field), run.summary.iterations) for run in runs if run.summary is not None]
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total if total else None


def measure_contender(
    algorithm: str,
    k: int,
    runs: list[Run],
    plain: list[Run],
    differences: list[Difference],
    launch: Launch | None = None,
) -> Contender:
    tokens, seconds = sum(run.decode_tokens for run in runs), sum(run.decode_s for run in runs)
    verifies = sum(len(lens) for run in runs for lens in run.accept_lens)
    steps = sum(run.steps for run in runs)
    step_ms = 1e3 * seconds / steps if steps else 0.0
    tokens_per_s = tokens / seconds if seconds else 0.0
    plain_seconds = sum(run.decode_s for run in plain)
    plain_tokens_per_s = sum(run.decode_tokens for run in plain) / plain_seconds if plain_seconds else 0.0
    ratios = [r.tokens_per_s / p.tokens_per_s for r, p in zip(runs, plain, strict=True) if p.tokens_per_s]
    speedup = tokens_per_s / plain_tokens_per_s if plain_tokens_per_s else 0.0
    accept_length = tokens / verifies if verifies else 0.0
    exposed, outputs = _weighted(runs, "exposed_host_ms_per_iteration"), sum(len(run.token_ids) for run in runs)
    return Contender(
        algorithm=algorithm,
        k=k,
        tokens=tokens,
        verifies=verifies,
        tokens_per_s=tokens_per_s,
        step_ms=step_ms,
        speedup=speedup,
        median_speedup=statistics.median(ratios) if ratios else 0.0,
        accept_length=accept_length,
        speedup_per_accept=speedup / accept_length if accept_length else 0.0,
        exposed_host_ms=exposed,
        exposed_host_percent=100 * exposed / step_ms if exposed is not None and step_ms else None,
        host_ms=_weighted(runs, "host_ms_per_iteration"),
        run_ahead=_weighted(runs, "run_ahead"),
        outputs=outputs,
        identical=outputs - len(differences),
        near_ties=sum(difference.near_tie for difference in differences),
        compiles_after_warmup=sum(run.compiles for run in runs),
        launch=launch,
    )
