"""What the host costs an iteration: the real scheduler, ledger and FutureMap in the real engine, over a device step that does almost nothing."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jspec.bench.host_probe import Iteration, counted_traffic, timed_parts
from jspec.bench.stub import VOCAB_SIZE, stub_target, stub_worker
from jspec.config import EngineConfig, SamplingParams
from jspec.engine import Engine

GOALS_MS = {16: 0.15, 64: 0.25, 256: 0.5}
"""Most host time an iteration should take, by running rows."""

ACCEPT_LEN = 3
VERIFY_WIDTH = 4
WARM_UP, SHORT_WARM_UP = 20, 2
COUNTED = 16  # iterations that traffic is counted over
PROMPT_SHARE = 0.73  # of the context: a long page table, and room to decode


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """Milliseconds."""

    median: float
    p10: float
    p90: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostCost:
    """One engine, measured."""

    rows: int
    context_len: int
    prompt_tokens: int
    page_size: int
    iterations: int
    host_ms: Spread  # wall time of `Engine.step` without the wait for the device
    plan_ms: float
    dispatch_ms: float
    settle_ms: float
    cpu_ms: float  # processor time of the engine's thread, free of what other processes take
    goal_ms: float | None  # None for numbers of rows that have no goal
    traffic: dict[str, float]  # an iteration; see `Traffic`
    traffic_short_context: dict[str, float]  # the same at a quarter of the context
    short_context_len: int


def _start(rows: int, context_len: int, page_size: int, num_iterations: int, progress) -> tuple[Engine, int]:
    """An engine whose rows have all been prefilled and will decode for `num_iterations` more; also the prompt's length."""
    prompt_tokens = int(context_len * PROMPT_SHARE)
    max_new_tokens = 1 + ACCEPT_LEN * (num_iterations + 2)
    if prompt_tokens + max_new_tokens > context_len:
        room = (context_len - prompt_tokens - 1) // ACCEPT_LEN - 2
        raise ValueError(
            f"iterations={num_iterations} do not fit context_len={context_len} after a prompt of {prompt_tokens} tokens: at most {room} do, warm-up included"
        )
    config = EngineConfig(
        page_size=page_size,
        max_running=rows,
        context_len=context_len,
        batch_buckets=(rows,),
        prefill_buckets=(min(context_len, 2048),),
        mixed_batches=False,  # so that nobody decodes before all are prefilled
    )
    worker = stub_worker(verify_width=VERIFY_WIDTH, accept_len=ACCEPT_LEN)
    engine = Engine(config, target=stub_target(context_len), worker=worker, progress=progress)
    prompt = [i % VOCAB_SIZE for i in range(prompt_tokens)]
    for _ in range(rows):
        engine.submit(prompt, SamplingParams(max_new_tokens=max_new_tokens))
    while engine.state.waiting:
        engine.step()
    return engine, prompt_tokens


def _steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step()


def _spread_ms(seconds: Sequence[float]) -> Spread:
    p10, median, p90 = (1e3 * float(np.percentile(seconds, q)) for q in (10, 50, 90))
    return Spread(median=median, p10=p10, p90=p90)


def _traffic(engine: Engine) -> dict[str, float]:
    with counted_traffic(engine) as traffic:
        _steps(engine, COUNTED)
    return traffic.per_launch()


def measure_host(
    rows: int,
    *,
    context_len: int = 8192,
    page_size: int = 64,
    iterations: int = 300,
    progress: Callable[..., Iterable] | None = None,
) -> HostCost:
    """Host time and traffic of a decode iteration with `rows` running requests.

    Args:
        rows: requests that run, all of them in every batch.
        context_len: longest prompt + output; the prompts take about three quarters of it.
        page_size: tokens a KV page holds.
        iterations: how many are timed.
        progress: as of `Engine`.

    Raises:
        ValueError: the iterations do not fit the context.
    """
    engine, prompt_tokens = _start(rows, context_len, page_size, WARM_UP + iterations + COUNTED, progress)
    _steps(engine, WARM_UP)
    with timed_parts(engine) as meters:
        _steps(engine, iterations)
    kept = meters.kept
    parts = Iteration(*(1e3 * float(np.median(part)) for part in zip(*kept, strict=True)))
    traffic = _traffic(engine)
    short_context_len = context_len // 4
    short, _ = _start(rows, short_context_len, page_size, SHORT_WARM_UP + COUNTED, progress)
    _steps(short, SHORT_WARM_UP)
    return HostCost(
        rows=rows,
        context_len=context_len,
        prompt_tokens=prompt_tokens,
        page_size=page_size,
        iterations=len(kept),
        host_ms=_spread_ms([it.plan + it.dispatch + it.settle for it in kept]),
        plan_ms=parts.plan,
        dispatch_ms=parts.dispatch,
        settle_ms=parts.settle,
        cpu_ms=parts.cpu,
        goal_ms=GOALS_MS.get(rows),
        traffic=traffic,
        traffic_short_context=_traffic(short),
        short_context_len=short_context_len,
    )


def host_json(costs: Sequence[HostCost]) -> dict[str, Any]:
    """The object that `jspec bench host --json` prints."""
    return {"rows": [dataclasses.asdict(cost) for cost in costs]}
