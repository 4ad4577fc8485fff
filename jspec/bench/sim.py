"""How fast the scheduler is inside a compiled loop: reserve and settle alone, and whole simulations."""

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from jspec import sim
from jspec.scheduler import reserve, settle
from jspec.state import ForwardMode, GenerationBatchResult, Launched, init_ledger, init_requests
from jspec.state.dense import replace
from jspec.state.results import NEVER

GOAL = 10e6
"""Request-rounds a second that one core should reach."""

VERIFY_WIDTH, PROMPT_TOKENS, NEW_TOKENS = 8, 256, 256
SHARES = (0.5, 1.0)  # of these lengths: requests differ, so that rows do not end together
ROUNDS_TIMED = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimSpeed:
    """One kind of loop, measured. A request-round is one row advanced by one iteration."""

    name: str
    rows: int  # of a configuration
    configurations: int
    request_rounds: int  # in one run
    seconds: float  # of wall time, the median of the runs; compiling is not in it
    cpu_seconds: float  # of processor time: what one core takes that has nothing else to do

    @property
    def per_s(self) -> float:
        """Request-rounds a second of wall time."""
        return self.request_rounds / self.seconds

    @property
    def per_core_s(self) -> float:
        """Request-rounds a second of one core."""
        return self.request_rounds / self.cpu_seconds


@contextlib.contextmanager
def _one_core() -> Iterator[None]:
    """Keeps the process on one core, where the system can: XLA then starts one thread, if this is the first that it does."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _timed(run: Callable[[], Any]) -> tuple[float, float]:
    """Median wall and processor seconds of a run; the first compiles and is not timed."""
    run()
    wall, cpu = [], []
    for _ in range(ROUNDS_TIMED):
        started, used = time.perf_counter(), time.process_time()
        run()
        wall.append(time.perf_counter() - started)
        cpu.append(time.process_time() - used)
    return float(np.median(wall)), float(np.median(cpu))


def _iteration(carry, _):
    """An overlapped engine's reserve and settle, every row in every launch, each settled with a run of tokens."""
    requests, ledger, accept_lens = carry
    size = accept_lens.shape[0]
    ledger, reserved = reserve(ledger, requests.serial > 0, alloc_len=VERIFY_WIDTH, depth=1)
    always, zeros = jnp.ones(size, bool), jnp.zeros(size, jnp.int32)
    launched = Launched(
        forward_iter=jnp.int32(0),
        rows=jnp.arange(size, dtype=jnp.int32) * reserved.granted,
        epochs=requests.epoch,
        emits=always,
        commits=always,
        end_lens=zeros,
        forward_mode=ForwardMode.DECODE,
    )
    result = GenerationBatchResult(
        next_token_ids=jnp.zeros((size, VERIFY_WIDTH), jnp.int32),
        accept_lens=accept_lens,
        new_seq_lens=zeros,
        status=zeros,
        stop_at=jnp.full(size, NEVER, jnp.int32),
    )
    requests, ledger, _ = settle(requests, ledger, launched, result)
    return (requests, ledger, accept_lens), None


def measure_transitions(rows: int, *, configurations: int, page_size: int, iterations: int) -> SimSpeed:
    """`reserve` and `settle` under `vmap` and `lax.scan`, every row in every iteration.

    Args:
        rows: of a configuration.
        configurations: side by side in one program.
        page_size: tokens a KV page holds.
        iterations: of the scan; each row accepts 3 tokens in each.
    """
    size, accept_len = rows + 1, 3
    pages_per_row = -(-(accept_len * iterations + 2 * VERIFY_WIDTH) // page_size)
    ledger = init_ledger(
        max_running=rows, num_pages=rows * pages_per_row, pages_per_row=pages_per_row, page_size=page_size
    )
    requests = replace(
        init_requests(rows),
        serial=np.arange(size, dtype=np.int32),
        max_new_tokens=np.full(size, NEVER, np.int32),
    )
    one = (requests, ledger, np.full(size, accept_len, np.int32))
    start = jax.tree.map(lambda x: jnp.broadcast_to(jnp.asarray(x), (configurations, *np.shape(x))), one)
    scan = jax.jit(jax.vmap(lambda carry: jax.lax.scan(_iteration, carry, length=iterations)[0]))
    wall, cpu = _timed(lambda: jax.block_until_ready(scan(start)))
    return SimSpeed(
        name="reserve + settle",
        rows=rows,
        configurations=configurations,
        request_rounds=rows * configurations * iterations,
        seconds=wall,
        cpu_seconds=cpu,
    )


def measure_simulation(rows: int, *, configurations: int, page_size: int, requests_per_row: int) -> SimSpeed:
    """Whole simulations, `jspec.sim.simulate` from its arguments to its report: admission, prefill, decode, ends, latencies.

    Args:
        rows: of a configuration, all of them busy until the requests run out.
        configurations: in one call, each with an acceptance rate of its own.
        page_size: tokens a KV page holds.
        requests_per_row: of the list, times the rows.
    """
    rng, count = np.random.default_rng(0), requests_per_row * rows

    def lengths(most: int) -> np.ndarray:
        low, high = (int(share * most) for share in SHARES)
        return rng.integers(low, high + 1, count)

    run = functools.partial(
        sim.simulate,
        sim.policy(max_running=rows, verify_width=VERIFY_WIDTH),
        sim.closed_batch(num_requests=count, prompt_len=lengths(PROMPT_TOKENS), max_new_tokens=lengths(NEW_TOKENS)),
        sim.geometric(np.linspace(0.3, 0.9, configurations), max_width=VERIFY_WIDTH),
        sim.every_step(),
        page_size=page_size,
    )
    wall, cpu = _timed(run)
    return SimSpeed(
        name="full simulation",
        rows=rows,
        configurations=configurations,
        request_rounds=int(np.sum(run().row_rounds, dtype=np.int64)),
        seconds=wall,
        cpu_seconds=cpu,
    )


def measure_sim(
    rows: Sequence[int] = (16, 64, 256),
    *,
    total_rows: int = 4096,
    page_size: int = 64,
    requests_per_row: int = 8,
    progress: Callable[..., Any] | None = None,
) -> list[SimSpeed]:
    """Both, for several sizes of a batch.

    Args:
        rows: batch sizes.
        total_rows: rows of all configurations together; there are as many as this makes.
        page_size: tokens a KV page holds.
        requests_per_row: of a simulation.
        progress: wraps the list of measurements, `progress(iterable, total=n)`.

    Raises:
        ValueError: field, value and rule.
    """
    for name, value in (("total_rows", total_rows), ("page_size", page_size), ("requests_per_row", requests_per_row)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if bad := [count for count in rows if count < 1]:
        raise ValueError(f"rows={bad[0]} must be at least 1")
    jobs: list[Callable[[], SimSpeed]] = []
    for count in rows:
        sizes = {"configurations": max(total_rows // count, 1), "page_size": page_size}
        jobs.append(functools.partial(measure_transitions, count, **sizes, iterations=NEW_TOKENS))
        jobs.append(functools.partial(measure_simulation, count, **sizes, requests_per_row=requests_per_row))
    with _one_core():
        return [job() for job in (progress(jobs, total=len(jobs)) if progress is not None else jobs)]


def sim_json(speeds: Sequence[SimSpeed]) -> dict[str, Any]:
    """The object that `jspec bench sim --json` prints."""
    return {
        "goal_per_core_s": GOAL,
        "loops": [{**dataclasses.asdict(s), "per_s": s.per_s, "per_core_s": s.per_core_s} for s in speeds],
    }


def sim_tables(speeds: Sequence[SimSpeed]) -> RenderableType:
    """All that `jspec bench sim` prints."""
    table = Table(
        title="Request-rounds a second: rows advanced by an iteration",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
    )
    for name in ("", "rows", "configurations", "request-rounds", "of one core", "of wall time", "seconds", "goal"):
        table.add_column(name, justify="left" if not name else "right")
    for s in speeds:
        table.add_row(
            s.name,
            str(s.rows),
            str(s.configurations),
            f"{s.request_rounds:,}",
            f"{s.per_core_s / 1e6:.1f} M/s",
            f"{s.per_s / 1e6:.1f} M/s",
            f"{s.seconds:.3f}",
            f">= {GOAL / 1e6:g} M/s",
        )
    note = (
        "Compile time excluded; medians. Of one core: by processor time, so that other processes do not count. A full simulation goes from the arguments of "
        "jspec.sim.simulate to its report: admission, prefill, reserve, draws, settle, release, latencies."
    )
    return Group(table, Text(note, style="dim"))
