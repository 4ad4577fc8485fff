"""What a wider verify costs: the time of one target step by the number of tokens a row checks at once."""

import functools
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models.target import TargetModel
from jspec.spec_workers.forward import verify_batch

WIDTHS = (1, 2, 4, 8, 16)


class VerifyCost(NamedTuple):
    """One point of the curve."""

    width: int  # W, the pending token included
    step_ms: float
    relative: float  # to W = 1


def _step(target: TargetModel, page_size: int, params, kv_pages, recurrent, tokens, seq_lens, page_table):
    rows = jnp.arange(1, tokens.shape[0] + 1, dtype=jnp.int32)
    batch = verify_batch(rows, seq_lens, tokens, page_table, page_size=page_size)
    out = target.forward(params, batch, kv_pages, recurrent=recurrent)
    return out.kv_pages, jnp.argmax(target.logits(params, out.hidden), axis=-1).astype(jnp.int32)


def verify_costs(
    target: TargetModel, *, batch: int, context: int, page_size: int, widths: tuple[int, ...] = WIDTHS, rounds: int = 10
) -> list[VerifyCost]:
    """Median time of a step at each width, over rounds that go through all widths in turn.

    Args:
        target: the model.
        batch: rows of a step.
        context: tokens in the KV pool before each step.
        page_size: tokens a KV page holds.
        widths: the first is the one others are relative to.
        rounds: steps a width.
    """
    pages = -(-(context + max(widths)) // page_size)
    page_table = jnp.arange(1, batch * pages + 1, dtype=jnp.int32).reshape(batch, pages)
    seq_lens = jnp.full(batch, context, jnp.int32)
    kv_pages = target.init_kv(batch * pages, page_size)
    recurrent = target.init_recurrent(batch + 1, 0, page_size)
    step = jax.jit(functools.partial(_step, target, page_size), donate_argnums=1)
    inputs = {width: jnp.ones((batch, width), jnp.int32) for width in widths}
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    for round_ in range(rounds + 1):
        for width in widths:
            start = time.perf_counter()
            kv_pages, tokens = step(target.params, kv_pages, recurrent, inputs[width], seq_lens, page_table)
            jax.block_until_ready(tokens)
            if round_:  # the first compiles
                seconds[width].append(time.perf_counter() - start)
    step_ms = [1e3 * float(np.median(seconds[width])) for width in widths]
    return [VerifyCost(width, ms, ms / step_ms[0]) for width, ms in zip(widths, step_ms, strict=True)]
