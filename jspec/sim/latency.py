"""How long a launch takes: from the rates of a chip (a roofline), or from step times that were measured."""

import dataclasses
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jspec.sim.checks import as_array, require


class Work(NamedTuple):
    """What one launch has to do; scalars."""

    rows: Any  # i32[]  rows that decode: those of a DECODE launch, or the tails of a MIXED one
    width: Any  # i32[]  tokens of each of them: `W`, or 1 for tails
    kv_tokens: Any  # f32[]  KV positions before these tokens, summed over the rows
    draft_steps: Any  # i32[]  steps of the draft model, one after another; 0 where nothing drafts
    prefill_rows: Any  # i32[]  prompts
    prefill_tokens: Any  # i32[]  of them, in this launch
    prefill_pairs: Any  # f32[]  query-key pairs of these tokens, causal


class LatencyModel(Protocol):
    """What `simulate` needs: a pytree with these."""

    RANKS: ClassVar[dict[str, int]]
    """Axes of each field without the one of configurations."""

    @property
    def host_s(self) -> Any:
        """f32[] seconds of host time an iteration, hidden behind the device as far as overlap allows."""
        ...

    def device_s(self, work: Work) -> Any:
        """f32[] seconds from the first to the last program of a launch, on traced values."""
        ...


class Rates(Protocol):
    """What `roofline` reads of a chip, such as one of `jspec.tpu_report.chips.CHIPS`."""

    @property
    def hbm_gb_per_s(self) -> float: ...

    @property
    def bf16_tflops(self) -> float: ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """Each half of a layer takes as long as its bytes or its arithmetic, whichever is longer. Made by `roofline`. f32[] each.

    Linear layers read the weights once and multiply every token with them; attention reads the KV of every row once and has a query-key pair for every token
    and position. The two come one after another, so their times add. That is what makes the gain of speculation depend on batch and context: tokens of a
    verify are free while weights (small batch) or KV (long context) are waited for, and cost as much as any once the linear layers compute all the time.

    Source: per-operator rooflines, Yuan et al., "LLM Inference Unveiled", arXiv 2402.16363; the regimes: Chen et al., "MagicDec", arXiv 2408.11049.
    """

    weight_s: Any  # reading the weights
    token_s: Any  # multiplying one token with them
    kv_token_s: Any  # reading one position's KV, all layers
    pair_s: Any  # one query-key pair, all layers and heads
    draft_weight_s: Any  # the same of the draft; 0 where there is none
    draft_token_s: Any
    draft_kv_token_s: Any
    launch_s: Any  # fixed, a launch
    draft_step_s: Any  # fixed, a step of the draft
    host_s: Any
    RANKS: ClassVar[dict[str, int]] = {
        "weight_s": 0, "token_s": 0, "kv_token_s": 0, "pair_s": 0, "draft_weight_s": 0, "draft_token_s": 0,
        "draft_kv_token_s": 0, "launch_s": 0, "draft_step_s": 0, "host_s": 0,
    }  # fmt: skip

    def device_s(self, work: Work):
        """See `LatencyModel`."""
        decoded = jnp.asarray(work.rows * work.width, jnp.float32)
        tokens = decoded + work.prefill_tokens
        pairs = work.kv_tokens * work.width + work.prefill_pairs
        linear = jnp.maximum(self.weight_s, self.token_s * tokens)
        attention = jnp.maximum(self.kv_token_s * (work.kv_tokens + tokens), self.pair_s * pairs)
        draft_linear = jnp.maximum(self.draft_weight_s, self.draft_token_s * work.rows)
        draft = draft_linear + self.draft_kv_token_s * work.kv_tokens + self.draft_step_s
        return self.launch_s + linear + attention + work.draft_steps * draft


def roofline(
    chip: Rates,
    *,
    params: float,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    weight_bytes: float = 2,
    kv_bytes: float = 2,
    draft_params: float = 0,
    draft_layers: int = 0,
    launch_s: Any = 0.0,
    draft_step_s: Any = 0.0,
    host_s: Any = 0.0,
    bandwidth_share: float = 1.0,
    compute_share: float = 1.0,
) -> Roofline:
    """The roofline of a model on a chip.

    Args:
        chip: its rates.
        params: parameters that every token is multiplied with: without the embedding, with the head. A draft: `draft_params`.
        num_layers, num_heads, num_kv_heads, head_dim: of the target's attention; a draft has `draft_layers` of such.
        weight_bytes: a parameter takes.
        kv_bytes: a number in the KV pool takes.
        launch_s: seconds a launch takes beside its work; draft_step_s: a step of the draft; host_s: of host time an iteration. A number, or one for each
            configuration.
        bandwidth_share, compute_share: of the chip's peak rates that programs reach, in (0, 1].

    Raises:
        ValueError: field, value and rule.
    """
    for name, share in (("bandwidth_share", bandwidth_share), ("compute_share", compute_share)):
        require(0 < share <= 1, f"{name}={share} must lie in (0, 1]: it is a share of the peak rate")
    for name, value in (("params", params), ("num_layers", num_layers), ("num_heads", num_heads),
                        ("num_kv_heads", num_kv_heads), ("head_dim", head_dim), ("weight_bytes", weight_bytes),
                        ("kv_bytes", kv_bytes)):  # fmt: skip
        require(value > 0, f"{name}={value} must be above 0")
    for name, value in (("draft_params", draft_params), ("draft_layers", draft_layers)):
        require(value >= 0, f"{name}={value} must be at least 0: 0 where there is no draft model")
    byte_s = 1 / (chip.hbm_gb_per_s * 1e9 * bandwidth_share)
    flop_s = 1 / (chip.bf16_tflops * 1e12 * compute_share)
    kv_layer_bytes = 2 * num_kv_heads * head_dim * kv_bytes  # key and value
    seconds = {
        "weight_s": params * weight_bytes * byte_s,
        "token_s": 2 * params * flop_s,  # multiply and add
        "kv_token_s": num_layers * kv_layer_bytes * byte_s,
        "pair_s": 4 * num_layers * num_heads * head_dim * flop_s,  # with the key, with the value
        "draft_weight_s": draft_params * weight_bytes * byte_s,
        "draft_token_s": 2 * draft_params * flop_s,
        "draft_kv_token_s": draft_layers * kv_layer_bytes * byte_s,
        "launch_s": launch_s,
        "draft_step_s": draft_step_s,
        "host_s": host_s,
    }
    return Roofline(**{name: as_array(name, value, np.float32, low=0) for name, value in seconds.items()})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Step times as measured, by rows and width. Made by `measured`."""

    rows: Any  # i32[B]  ascending
    widths: Any  # i32[V]  ascending
    step_s: Any  # f32[B, V]
    prefill_token_s: Any  # f32[]
    draft_step_s: Any  # f32[]
    host_s: Any  # f32[]
    RANKS: ClassVar[dict[str, int]] = {
        "rows": 1, "widths": 1, "step_s": 2, "prefill_token_s": 0, "draft_step_s": 0, "host_s": 0,
    }  # fmt: skip

    def device_s(self, work: Work):
        """See `LatencyModel`. Between two measurements on a straight line, as much below the first as the first; beyond the last as the last."""
        # A launch of prompts alone costs its tokens, on top of the smallest step.
        low, high, share = _between(self.rows, work.rows)
        left, right, part = _between(self.widths, work.width)
        step_s = jnp.asarray(self.step_s)
        a, b, c, d = (step_s[i, j] for i in (low, high) for j in (left, right))
        step = (1 - share) * ((1 - part) * a + part * b) + share * ((1 - part) * c + part * d)
        return step + self.prefill_token_s * work.prefill_tokens + self.draft_step_s * work.draft_steps

    def check(self, *, rows: int, width: int) -> None:
        """ValueError if more is asked than was measured."""
        for name, value, known in (("max_running", rows, self.rows), ("verify_width", width, self.widths)):
            most = int(np.min(np.asarray(known)[..., -1]))
            require(value <= most, f"{name}={value} is beyond the measured {most}: measure it, or use a roofline")


def _between(known, value):
    """Places of the neighbours of a value among ascending ones, and how far it is from the first to the second, in [0, 1]."""
    known = jnp.asarray(known)
    last = known.shape[0] - 1
    high = jnp.clip(jnp.sum(known < value, dtype=jnp.int32), min(1, last), last)
    low = jnp.maximum(high - 1, 0)
    gap = jnp.maximum(known[high] - known[low], 1)
    return low, high, jnp.clip((value - known[low]) / gap, 0.0, 1.0)


def measured(
    rows, widths, step_s, *, prefill_token_s: Any = 0.0, draft_step_s: Any = 0.0, host_s: Any = 0.0
) -> Measured:
    """A table of measured step times, such as the curve that `jspec bench decode` prints, for several batch sizes.

    Args:
        rows: i32[B], batch sizes measured, ascending.
        widths: i32[V], verify widths measured, ascending.
        step_s: f32[B, V] seconds of a step.
        prefill_token_s: seconds a prompt token adds to a launch.
        draft_step_s: seconds a step of the draft model takes, if the steps measured are those of the target alone.
        host_s: of host time an iteration. These three: a number, or one for each configuration.

    Raises:
        ValueError: field, value and rule.
    """
    rows, widths = as_array("rows", rows, np.int32, low=1), as_array("widths", widths, np.int32, low=1)
    for name, values in (("rows", rows), ("widths", widths)):
        require(values.ndim == 1 and values.size > 0, f"{name}={values.tolist()} must be a sequence, not empty")
        require((np.diff(values) > 0).all(), f"{name}={values.tolist()} must ascend: sort it and drop doubles")
    step_s = as_array("step_s", step_s, np.float32, low=0)
    require(
        step_s.shape == (rows.size, widths.size),
        f"step_s has shape {step_s.shape}, but {rows.size} rows and {widths.size} widths: give one time for each pair",
    )
    extra = {"prefill_token_s": prefill_token_s, "draft_step_s": draft_step_s, "host_s": host_s}
    return Measured(
        rows=rows,
        widths=widths,
        step_s=step_s,
        **{name: as_array(name, value, np.float32, low=0) for name, value in extra.items()},
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class EveryStep:
    """Every iteration takes the same. Made by `every_step`."""

    host_s: Any  # f32[]
    RANKS: ClassVar[dict[str, int]] = {"host_s": 0}

    def device_s(self, work: Work):
        """See `LatencyModel`: all of it is host time, which no overlap hides."""
        return 0.0 * work.kv_tokens


def every_step(seconds: Any = 1.0) -> EveryStep:
    """A clock that counts iterations: the k-th, from 0, starts at `k * seconds`.

    Raises:
        ValueError: field, value and rule.
    """
    return EveryStep(host_s=as_array("seconds", seconds, np.float32, low=0))
