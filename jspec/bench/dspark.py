"""What DSpark's budgets are made of, measured: what a verify of so many tokens costs on this machine, and how far its draft's confidence is to be trusted."""

import json
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jspec.bench.fitting import fit_config
from jspec.bench.prompts import PromptSet, check_readable, encode_prompt, load_prompt_sets
from jspec.config import EngineConfig, SamplingParams
from jspec.engine import Engine
from jspec.models.draft_files import load_draft
from jspec.models.loading import LoadedModel, load_model
from jspec.models.shipped_drafts import find_draft
from jspec.spec_workers.base import HostLaunch, HostOutcome
from jspec.spec_workers.dspark import dspark, token_buckets
from jspec.spec_workers.dspark_budget import SpsTable, Sts

_STEPS, _SKIPPED, _PROMPT_LEN = 8, 2, 16
"""Timed steps of a probe, whose median counts, after the first ones; and tokens of its prompts."""
_BINS = 15
_TEMPERATURES = np.exp(np.linspace(np.log(0.1), np.log(10.0), 121))


class Spent(NamedTuple):
    """A table, and where it comes from."""

    table: SpsTable
    record: dict[str, Any]


def _engine(config: EngineConfig, loaded: LoadedModel, worker: Any, progress) -> Engine:
    return Engine(config, target=loaded.target, tokenizer=loaded.tokenizer, worker=worker, progress=progress)


def _load(config: EngineConfig) -> tuple[LoadedModel, Any]:
    loaded = load_model(config.model, kernels=config.kernels)
    path = find_draft("dspark", config.model) if config.draft is None else pathlib.Path(config.draft)
    draft: Any = load_draft(path, loaded.target, dtype=loaded.target.embedding(loaded.target.params).dtype)
    if draft.config is None or getattr(draft.config, "kind", "") != "dspark":
        raise ValueError(f"draft={str(path)!r} is of kind {draft.config.kind!r}, it must be 'dspark'")
    return loaded, draft


def profile_sps(config: EngineConfig, *, progress: Callable[..., Iterable] | None = None) -> Spent:
    """Steps a second of whole iterations, draft and injection included, at every number of tokens that a verify can be run at: with one row, and with
    `config.max_running`.

    Raises:
        OSError, ValueError: a model or a draft that is not there, or cannot be used.
    """
    loaded, draft = _load(config)
    width, probes = draft.config.num_drafts + 1, {}
    rows = sorted({1, config.max_running})
    rng = np.random.default_rng(0)
    for num_rows in rows:
        amount = [0]

        def inputs(known: Any, launch: HostLaunch, amount: list[int] = amount) -> tuple[np.ndarray, np.ndarray]:
            return np.zeros((len(launch.rows), 0), np.int32), np.array(amount, np.int32)

        worker = dspark(loaded.target, draft, ragged_verify="compact")
        assert worker.host is not None
        forced = worker.host._replace(inputs=inputs)
        # Every probe decodes requests of its own: a short context is a program or two to compile.
        longest = (_SKIPPED + _STEPS + 1) * width
        fitted = fit_config(
            config_of(config, num_rows),
            [_PROMPT_LEN] * num_rows,
            max_new_tokens=longest,
            model_context_len=loaded.target.facts.context_len,
        )
        engine = _engine(fitted, loaded, worker._replace(host=forced), progress)
        params = SamplingParams(max_new_tokens=longest, ignore_eos=True)
        for tokens in token_buckets(num_rows, width):
            amount[0] = tokens - num_rows
            prompts = rng.integers(0, loaded.target.facts.vocab_size, (num_rows, _PROMPT_LEN)).tolist()
            rids = [engine.submit(prompt, params) for prompt in prompts]
            while (engine.state.requests.output_len[1 : num_rows + 1] == 0).any():
                list(engine.step())
            seconds = []
            for _ in range(_SKIPPED + _STEPS):
                start = time.perf_counter()
                list(engine.step())
                seconds.append(time.perf_counter() - start)
            probes[tokens] = 1.0 / statistics.median(seconds[_SKIPPED:])
            for rid in rids:
                engine.abort(rid)
            while engine.has_work:
                list(engine.step())
        engine.close()
    tokens_probed = sorted(probes)
    table = SpsTable(
        sample_batch_tokens=tuple(tokens_probed),
        sample_steps_per_sec=tuple(round(probes[n], 3) for n in tokens_probed),
    )
    record = {
        "model": loaded.name,
        "rows": rows,
        "machine": platform.machine(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    return Spent(table, record)


def config_of(config: EngineConfig, num_rows: int) -> EngineConfig:
    """Of an engine that decodes so many requests at once, and no fewer."""
    return EngineConfig(
        model=config.model,
        page_size=config.page_size,
        kernels=config.kernels,
        max_running=num_rows,
        prefix_cache=False,
        mixed_batches=False,
    )


class Calibrated(NamedTuple):
    """Temperatures, and how far cumulative survival is off, by place, before and after."""

    sts: Sts
    record: dict[str, Any]


def calibrate_sts(
    config: EngineConfig,
    *,
    prompt_sets: Sequence[str] = ("bundled",),
    num_prompts: int | None = None,
    max_new_tokens: int = 128,
    progress: Callable[..., Iterable] | None = None,
) -> Calibrated:
    """Decodes prompts greedily, verifying every draft, and fits a temperature to each place of the block, from left to right.

    Raises:
        OSError, ValueError: a model, a draft or prompts that are not there, or cannot be used.
    """
    sets: list[PromptSet] = load_prompt_sets(list(prompt_sets), num_prompts=num_prompts)
    loaded, draft = _load(config)
    tokenizer = check_readable(loaded, None)
    prompts = [encode_prompt(tokenizer, text) for one in sets for text in one.texts]
    worker = dspark(loaded.target, draft, ragged_verify="cap-accept")
    assert worker.host is not None
    seen: list[tuple[np.ndarray, np.ndarray]] = []

    def observe(known: Any, outcome: HostOutcome) -> Any:
        if len(outcome.words):
            live = np.asarray(outcome.live)
            seen.append((outcome.words.view(np.float32)[live], np.asarray(outcome.accept_lens)[live] - 1))
        return known

    fitted = fit_config(
        config_of(config, config.max_running),
        [len(prompt) for prompt in prompts],
        max_new_tokens=max_new_tokens,
        model_context_len=loaded.target.facts.context_len,
    )
    engine = _engine(fitted, loaded, worker._replace(host=worker.host._replace(observe=observe)), progress)
    engine.generate(prompts, SamplingParams(max_new_tokens=max_new_tokens))
    engine.close()
    if not seen:
        raise ValueError(f"max_new_tokens={max_new_tokens} leaves no step to look at: raise it")
    chances = np.concatenate([chances for chances, _ in seen])
    correct = np.concatenate([correct for _, correct in seen])
    raw = raw_confidence(chances)
    sts, before, after = fit_temperatures(raw, correct)
    record = {
        "dataset": [one.name for one in sets],
        "num_samples": len(correct),
        "ece": after,
        "ece_before": before,
        "model": loaded.name,
    }
    return Calibrated(sts, record)


def raw_confidence(chances: np.ndarray) -> np.ndarray:
    """f64[n, K], logits of the head, from survival f32[n, K] made with temperatures of 1."""
    chances = chances.astype(np.float64)
    before = np.concatenate([np.ones((len(chances), 1)), chances[:, :-1]], axis=1)
    share = np.clip(chances / np.maximum(before, 1e-30), 1e-6, 1 - 1e-6)
    return np.log(share / (1 - share))


def fit_temperatures(raw: np.ndarray, correct: np.ndarray) -> tuple[Sts, list[float], list[float]]:
    """Sequential temperature scaling: the temperature of a place is the one of a grid with which survival up to there is calibrated best, those before it fixed.

    Args:
        raw: f64[n, K], logits of the confidence head.
        correct: i32[n], drafts that were accepted.

    Returns: the temperatures; expected calibration error of survival by place, with temperatures of 1 and with these.

    Source: DSpark (arXiv 2607.05147); the error is Naeini et al.'s (2015), over 15 bins.
    """
    survival, plain = np.ones(len(raw)), np.ones(len(raw))
    temperatures, before, after = [], [], []
    for place in range(raw.shape[1]):
        happened = correct > place

        def error(temperature: float, place=place, survival=survival, happened=happened) -> float:
            return calibration_error(survival * _sigmoid(raw[:, place] / temperature), happened)

        best = min(_TEMPERATURES, key=lambda t: (round(error(t), 12), abs(np.log(t))))
        temperatures.append(float(np.round(best, 4)))
        survival = survival * _sigmoid(raw[:, place] / best)
        plain = plain * _sigmoid(raw[:, place])
        before.append(round(calibration_error(plain, happened), 5))
        after.append(round(calibration_error(survival, happened), 5))
    return Sts(temperatures=tuple(temperatures)), before, after


def calibration_error(chances: np.ndarray, happened: np.ndarray) -> float:
    """Mean distance of a bin's chances from how often it happened, each bin weighing what is in it."""
    place = np.minimum((chances * _BINS).astype(int), _BINS - 1)
    sums = [np.bincount(place, weights=x, minlength=_BINS) for x in (chances, happened.astype(float))]
    return float(np.abs(sums[0] - sums[1]).sum() / max(len(chances), 1))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def write_json(path: pathlib.Path, table: SpsTable | Sts, record: dict[str, Any]) -> None:
    """What `load_sps` and `load_sts` read, and the record beside it."""
    fields = {name: list(value) for name, value in vars(table).items()}
    path.write_text(json.dumps(fields | record, indent=2) + "\n", "utf-8")
