"""Has every job compiled for every chip, each chip in a process of its own."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jspec
from jspec.tpu_report.chips import CHIPS, Chip
from jspec.tpu_report.jobs import PEER, SHAPES, WRITE, KernelJob, StepJob


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """What any compiled program tells, or why there is none."""

    error: str | None = None
    compile_s: float = 0.0
    argument_bytes: int = 0
    alias_bytes: int = 0
    temp_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class KernelResult(Compiled):
    """What compiling one job for one chip gave."""

    chip: str
    job: KernelJob
    block_tokens: int = 0
    """Tokens of one pass of the loop over blocks of keys, or of the KV write's over runs; 0 where there is none, or its schedule could not be read."""
    bundles: int = 0
    row_bundles: int = 0
    """Those of a row beside the passes over whole blocks: its beginning, its last block, its end."""
    copies: int = 0
    spills: int = 0

    @property
    def block_bytes(self) -> int:
        """Bytes that one pass of the loop moves: the KV write takes its block in and puts it back."""
        shape = SHAPES[self.job.shape]
        ways = 2 if self.job.kernel == WRITE else 1
        size = 4 if self.job.dtype == "float32" else 2
        return ways * self.block_tokens * shape.num_kv_heads * 2 * shape.head_dim * size

    @property
    def bundles_per_512(self) -> float:
        return 512 * self.bundles / max(self.block_tokens, 1)

    @property
    def memory_cycles(self) -> float:
        """Cycles of one core in which the bytes of a block arrive. JAX's kernel and the KV write run on one core of a device, whatever its number."""
        chip = CHIPS[self.chip]
        cores = 1 if self.job.kernel in (PEER, WRITE) else chip.cores
        return cores * self.block_bytes / chip.hbm_gb_per_s * chip.clock_ghz

    @property
    def hbm_share(self) -> float:
        """Modelled share of the HBM bandwidth that the loop can use: 1 where its work takes no longer than its bytes."""
        return min(1.0, self.memory_cycles / max(self.bundles, 1))


@dataclasses.dataclass(frozen=True)
class StepResult(Compiled):
    """What compiling one program of an engine's step for one chip gave."""

    chip: str
    model: str
    worker: str
    program: str
    devices: int = 1
    """That share the target; all bytes are those of one."""
    pool_bytes: int = 0
    """Of the target's KV pool."""
    xla_cycles: int = 0
    """By XLA's cost model, Pallas kernels left out, the body of a loop counted once."""
    host_transfers: int = 0
    f64: bool = False


def check_libtpu() -> None:
    """Raises ValueError where there is nothing to compile with."""
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("jspec tpu-report compiles with libtpu, which is not installed: pip install '.[tpu]'")


def compile_jobs(
    chips: Sequence[Chip], jobs: Sequence[KernelJob], *, progress: Callable[..., Any] | None = None
) -> list[KernelResult]:
    """Results in the order of chips, then jobs."""
    work = (result for chip in chips for result in _compile_for(chip, jobs))
    return list(progress(work, total=len(chips) * len(jobs)) if progress else work)


def compile_steps(
    chips: Sequence[Chip], jobs: Sequence[StepJob], *, progress: Callable[..., Any] | None = None
) -> list[StepResult]:
    """Results in the order of chips, then jobs, then programs."""

    def work() -> Iterator[list[StepResult]]:
        for chip in chips:
            with _compiler(chip, "steps") as ask:
                for job in jobs:
                    found = ask(dataclasses.asdict(job))
                    yield [StepResult(chip.name, job.model, job.worker, **figures) for figures in found]

    finished = work()
    return [
        result
        for results in (progress(finished, total=len(chips) * len(jobs)) if progress else finished)
        for result in results
    ]


def _compile_for(chip: Chip, jobs: Sequence[KernelJob]) -> Iterator[KernelResult]:
    fields = {field.name for field in dataclasses.fields(KernelResult)}
    with _compiler(chip, "kernels") as ask:
        for job in jobs:
            found = next(ask(dataclasses.asdict(job)))
            yield KernelResult(chip.name, job, **{name: value for name, value in found.items() if name in fields})


@contextlib.contextmanager
def _compiler(chip: Chip, what: str) -> Iterator[Callable[[dict[str, Any]], Iterator[dict[str, Any]]]]:
    """A compiler process for a chip, as a function from a job to its results."""
    root = str(pathlib.Path(jspec.__file__).parents[1])
    env = os.environ | {"PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    command = [sys.executable, "-m", "jspec.tpu_report.compiler", chip.name, what]
    # libtpu writes to standard error whatever happens: it is shown only where the process itself fails.
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=env
        ) as child,
    ):
        assert child.stdin and child.stdout
        stdin, stdout = child.stdin, child.stdout

        def ask(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
            with contextlib.suppress(BrokenPipeError):
                stdin.write(json.dumps(job) + "\n")
                stdin.flush()
            while line := stdout.readline():
                if not line.strip():
                    return
                yield json.loads(line)
            errors.seek(0)
            said = errors.read().strip().splitlines()
            raise RuntimeError(f"the compiler process for {chip.name} ended at {job}: {said[-1] if said else ''}")

        yield ask
        with contextlib.suppress(BrokenPipeError):
            stdin.close()
