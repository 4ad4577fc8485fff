"""What a verify of several tokens costs against a plain step, modelled: XLA's cost model for its own operations, the schedule for attention.

What is left out: the KV write (well under a percent of the bytes of attention), the exchange between devices beyond what XLA's model gives it, the host.
"""

import dataclasses
from collections.abc import Callable, Sequence

from jspec.tpu_report.chips import CHIPS
from jspec.tpu_report.jobs import VERIFIES, VERIFY, KernelJob, StepJob, shape_of
from jspec.tpu_report.run import KernelResult, StepResult, compile_jobs


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Of one verify of a batch of rows."""

    chip: str
    model: str
    devices: int
    width: int
    xla_us: float
    attention_us: float
    """All layers."""

    @property
    def total_us(self) -> float:
        return self.xla_us + self.attention_us


def step_times(steps: Sequence[StepResult], num_layers: Callable[[str], int]) -> list[StepTime]:
    """For the workers of `VERIFIES`; compiles the attention kernel at their shapes to read its schedule."""
    times = []
    for step in steps:
        if step.worker not in VERIFIES or step.program != "verify_phase" or step.error:
            continue
        width, job = VERIFIES[step.worker], StepJob(step.model, step.worker)
        shape = shape_of(step.model, step.devices)
        kernel = KernelJob(VERIFY, shape, width, job.page_size, batch=job.batch, context=job.context)
        (found,) = compile_jobs([CHIPS[step.chip]], [kernel])
        if found.block_tokens:
            clock = CHIPS[step.chip].clock_ghz * 1e3  # cycles a microsecond
            attention = num_layers(step.model) * attention_cycles(found)
            times.append(
                StepTime(step.chip, step.model, step.devices, width, step.xla_cycles / clock, attention / clock)
            )
    return times


def attention_cycles(result: KernelResult) -> float:
    """Cycles of one layer: each row walks its blocks, each as slow as its arithmetic or its bytes, and begins and ends once."""
    blocks = result.job.context / result.block_tokens
    row = blocks * max(result.bundles, result.memory_cycles) + result.row_bundles
    return result.job.batch / CHIPS[result.chip].cores * row


def ratio(times: Sequence[StepTime], time: StepTime) -> float | None:
    """Against the plain step of the same model on the same devices."""
    same = (t for t in times if (t.chip, t.model, t.devices, t.width) == (time.chip, time.model, time.devices, 1))
    plain = next(same, None)
    return None if plain is None else time.total_us / plain.total_us
