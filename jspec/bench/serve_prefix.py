"""How much sooner a request starts whose prompt begins as an earlier one did."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jspec.bench.decode import contender_config
from jspec.bench.decode_compare import Difference, first_difference
from jspec.bench.serve_report import PrefixTurn, WarmPrefix, spread
from jspec.config import EngineConfig, SamplingParams
from jspec.engine import Engine, RequestOutput
from jspec.engine.buckets import SMALLEST_PREFILL_TOKENS
from jspec.models.target import TargetModel

ENDING_TOKENS = 16
"""Tokens of a prompt that differ from one request to another, after the prefix they share."""

NEW_TOKENS = 4
"""Decoded after each prompt, to be compared: only the first is timed."""

TURNS = ("cold", "the same again", "another ending")


MOST_PREFILL_TOKENS = 2048
"""A launch prefills so many tokens at most: the engine's default."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FittedPrefix:
    """A prefix that fits the model."""

    config: EngineConfig  # of one request at a time, whose prompt is computed in as few launches as the engine's default allows
    prefix_tokens: int
    note: str  # "" where it has the length that was asked for


def _prefill_buckets(most: int, *, warm_tokens: int) -> tuple[int, ...]:
    """Of the sizes that the engine builds by default, those that a warm prompt of `warm_tokens` may take, and the largest."""
    sizes = [SMALLEST_PREFILL_TOKENS]
    while sizes[-1] < warm_tokens:
        sizes.append(2 * sizes[-1])
    return (*(size for size in sizes if size < most), most)


def fit_prefix(config: EngineConfig, prefix_tokens: int, *, model_context_len: int) -> FittedPrefix:
    """`config` for prompts of `prefix_tokens` and an ending, the prefix shortened to the model's context if need be.

    Raises:
        ValueError: the prefix fills no page, so nothing of it would be cached.
    """
    room = model_context_len - ENDING_TOKENS - NEW_TOKENS
    note = ""
    if prefix_tokens > room:
        note = f"prefix_tokens={prefix_tokens} shortened to {room}: the model was made for {model_context_len} tokens, an ending of {ENDING_TOKENS} and {NEW_TOKENS} new ones included"
    fitted = min(prefix_tokens, room)
    if fitted < config.page_size + 1:
        raise ValueError(
            f"prefix_tokens={fitted} must be more than page_size={config.page_size}: the prefix cache keeps whole pages; give a longer prefix or a smaller page_size, or 0 to leave this part out"
        )
    context_len = fitted + ENDING_TOKENS + NEW_TOKENS
    most = min(context_len, MOST_PREFILL_TOKENS)
    config = dataclasses.replace(
        config,
        max_running=1,
        batch_buckets=None,
        prefill_buckets=_prefill_buckets(most, warm_tokens=ENDING_TOKENS + config.page_size),
        max_prefill_tokens=most,
        context_len=context_len,
        prefix_cache=True,
    )
    return FittedPrefix(config=config, prefix_tokens=fitted, note=note)


def _first_token(engine: Engine, prompt: Sequence[int]) -> tuple[float, RequestOutput]:
    """Seconds from submission to the first token, and the request's end. Nothing else runs."""
    start, first, output = time.perf_counter(), None, None
    engine.submit(prompt, SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))
    while engine.has_work:
        for emission in engine.step():
            if first is None and emission.token_ids:
                first = time.perf_counter() - start
            output = emission.output or output
    assert output is not None
    if first is None:
        raise ValueError(f"a prompt of {len(prompt)} tokens brought no token: {output.error}")
    return first, output


def measure_prefix(
    fitted: FittedPrefix,
    algorithm: str,
    target: TargetModel,
    *,
    rounds: int,
    seed: int,
    progress: Callable[..., Iterable] | None = None,
) -> WarmPrefix:
    """Time to first token of three prompts in each round: one that nobody has seen, the same again, and its prefix with another ending.

    Prompts are random token ids, others in each round. A round before the first is not counted.

    Args:
        fitted: what to run.
        algorithm: as in `contender_config`.
        target: the model.
        rounds: how many are counted.
        seed: of the prompts.
        progress: as of `Engine`.
    """
    engine = Engine(contender_config(fitted.config, algorithm), target=target, progress=progress)
    rng = np.random.default_rng(seed)
    seconds: dict[str, list[float]] = {name: [] for name in TURNS}
    cached: dict[str, list[int]] = {name: [] for name in TURNS}
    differences: list[Difference] = []
    for round_ in range(rounds + 1):
        prefix = rng.integers(0, target.facts.vocab_size, fitted.prefix_tokens).tolist()
        # The endings differ from their first token on, so that what is cached of them is known.
        first, other = rng.choice(target.facts.vocab_size, 2, replace=False).tolist()
        rest = rng.integers(0, target.facts.vocab_size, ENDING_TOKENS - 1).tolist()
        cold = [*prefix, first, *rest]
        outputs = {}
        for name, prompt in zip(TURNS, (cold, cold, [*prefix, other, *rest]), strict=True):
            took, outputs[name] = _first_token(engine, prompt)
            if round_:
                seconds[name].append(took)
                cached[name].append(outputs[name].cached_tokens)
        pair = (outputs[name].token_ids for name in TURNS[:2])
        if round_ and (found := first_difference(target, round_ - 1, cold, *pair)) is not None:
            differences.append(found)
    return WarmPrefix(
        algorithm=algorithm,
        prefix_tokens=fitted.prefix_tokens,
        prompt_tokens=fitted.prefix_tokens + ENDING_TOKENS,
        page_size=fitted.config.page_size,
        rounds=rounds,
        turns=[
            PrefixTurn(
                name=name,
                first_token_ms=spread([1e3 * s for s in seconds[name]]),
                speedup=spread([c / s for c, s in zip(seconds[TURNS[0]], seconds[name], strict=True)]),
                cached_tokens=cached[name],
            )
            for name in TURNS
        ],
        differences=differences,
        compiles_after_warmup=engine.summary().compiles_after_warmup,
        note=fitted.note,
    )
