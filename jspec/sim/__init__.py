"""The scheduler under `jit`, `vmap` and `lax.scan`: throughput and latency of thousands of set-ups in one call, without a model, a device or a clock."""

from jspec.sim.acceptance import Acceptance, Drawn, Replayed, by_position, geometric, histogram, recorded
from jspec.sim.inputs import AMPLE, Policy, Requests, closed_batch, grid, open_trace, policy, recorded_run
from jspec.sim.latency import EveryStep, LatencyModel, Measured, Roofline, Work, every_step, measured, roofline
from jspec.sim.run import Report, Simulation, prepare, simulate
from jspec.sim.state import SimState, Sizes, Step

__all__ = [
    "AMPLE",
    "Acceptance",
    "Drawn",
    "EveryStep",
    "LatencyModel",
    "Measured",
    "Policy",
    "Replayed",
    "Report",
    "Requests",
    "Roofline",
    "SimState",
    "Simulation",
    "Sizes",
    "Step",
    "Work",
    "by_position",
    "closed_batch",
    "every_step",
    "geometric",
    "grid",
    "histogram",
    "measured",
    "open_trace",
    "policy",
    "prepare",
    "recorded",
    "recorded_run",
    "roofline",
    "simulate",
]
