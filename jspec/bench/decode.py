"""How fast a model decodes with and without speculation, and whether the text is the same. The algorithms take turns, prompt by prompt, in one process."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jspec.bench.decode_bare import BareLoop
from jspec.bench.decode_compare import Difference, first_difference
from jspec.bench.decode_curve import verify_costs
from jspec.bench.decode_report import BARE, PLAIN, DecodeBench, Launch, measure_contender, with_draft_share
from jspec.bench.decode_run import Run, run_engine
from jspec.bench.fitting import fit_config
from jspec.bench.prompts import PromptSet, check_readable, encode_prompt, load_prompt_sets
from jspec.config import EngineConfig, SamplingParams
from jspec.engine import Emission, Engine
from jspec.models.llama import LlamaConfig
from jspec.models.loading import LoadedModel, load_model
from jspec.scheduler import max_new_pages
from jspec.spec_workers import algorithms, check_algorithm, for_algorithm
from jspec.spec_workers.upload import DECODE_COLUMNS, OUTCOME_COLUMNS

WARM_UP_TOKENS = 4

Watch = Callable[[str, int, Emission], None]
"""Told of each emission: the algorithm, the number of the prompt, what came."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeJob:
    """What to measure.

    Raises:
        ValueError: naming the field, its value and the rule.
    """

    config: EngineConfig = dataclasses.field(default_factory=lambda: EngineConfig(max_running=1))
    """Of every engine, but for algorithm and context length. As many prompts run at once as `max_running`."""
    params: SamplingParams = dataclasses.field(default_factory=SamplingParams)  # greedy
    algorithms: tuple[str, ...] = (PLAIN, "ngram")
    """In the order they take turns. Plain runs even if it is not named: the others are measured against it. An algorithm may carry options of its own, so that
    one can run against itself: "eagle3:topk=4:num_steps=3"."""
    prompt_sets: tuple[str, ...] = ("bundled",)
    num_prompts: int | None = None  # of each set
    chat: bool | None = None  # as `encode_prompt`
    repeat: int = 1
    bare: bool = True  # run the bare loop too, where one prompt runs at a time, and the model is of the Llama family
    curve: bool = True  # measure the verify cost curve

    def __post_init__(self):
        if self.repeat < 1:
            raise ValueError(f"repeat={self.repeat} must be at least 1")
        for name in self.algorithms:
            contender_config(self.config, name)


_OPTIONS: dict[str, Callable[[str], Any]] = {
    "num_steps": int,
    "topk": int,
    "num_draft_tokens": int,
    "min_draft_prob": float,
    "ragged_verify": str,
    "sps": str,
    "sts": str,
    "corpus": str,
    "corpus_share": int,
    "draft": str,
}


def contender_config(config: EngineConfig, name: str) -> EngineConfig:
    """`config` for the contender `name`: an algorithm, then perhaps ":field=value" of `EngineConfig`, of those in `_OPTIONS`.

    Raises:
        ValueError: the algorithm or a field is unknown, or a value is no number.
    """
    algorithm, *options = name.split(":")
    if algorithm not in algorithms():
        raise ValueError(f"algorithms: {algorithm!r} is unknown: choose among {', '.join(algorithms())}")
    config = for_algorithm(config, algorithm)
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for option in options:
        field, _, value = option.partition("=")
        try:
            given[field] = _OPTIONS[field](value)
        except (KeyError, ValueError):
            raise ValueError(
                f"algorithms: {option!r} in {name!r} must be one of {', '.join(_OPTIONS)}, '=' and a value"
            ) from None
    return EngineConfig(**given)


class Prepared(NamedTuple):
    """A job with everything read that it needs; nothing has been built or run."""

    job: DecodeJob
    loaded: LoadedModel
    sets: list[PromptSet]
    texts: list[str]
    prompts: list[list[int]]
    config: EngineConfig  # fitted to the prompts


def prepare(job: DecodeJob) -> Prepared:
    """Reads prompts and model.

    Raises:
        OSError, ValueError: a set, a model or a draft that is not there, or cannot be used.
    """
    for name in job.algorithms:
        check_algorithm(contender_config(job.config, name))
    sets = load_prompt_sets(job.prompt_sets, num_prompts=job.num_prompts)
    loaded = load_model(
        job.config.model,
        kernels=job.config.kernels,
        tensor_parallel=job.config.tensor_parallel,
        data_parallel=job.config.data_parallel,
    )
    tokenizer = check_readable(loaded, job.chat)
    texts = [text for prompt_set in sets for text in prompt_set.texts]
    prompts = [encode_prompt(tokenizer, text, chat=job.chat) for text in texts]
    config = fit_config(
        job.config,
        [len(prompt) for prompt in prompts],
        max_new_tokens=job.params.max_new_tokens,
        model_context_len=loaded.target.facts.context_len,
    )
    return Prepared(job, loaded, sets, texts, prompts, config)


def run_decode(
    prepared: Prepared, *, watch: Watch | None = None, progress: Callable[..., Iterable] | None = None
) -> DecodeBench:
    """Decodes every prompt with every algorithm, in turn, then compares.

    Args:
        prepared: what to run.
        watch: told of the engines' tokens, warm-up excluded.
        progress: as of `Engine`.

    Raises:
        ValueError: a prompt that cannot run.
    """
    job, config, target = prepared.job, prepared.config, prepared.loaded.target
    engines = _build_engines(prepared, progress)
    batch, names = config.max_running, list(engines)
    loop = None
    if job.bare and batch == 1 and isinstance(target.config, LlamaConfig):
        loop = BareLoop(target.config, target.params, cache_len=config.context_len or 0)
        names.append(BARE)
    runs: dict[str, list[Run]] = {name: [] for name in names}

    def run(name: str, start: int) -> Run:
        prompts = prepared.prompts[start : start + batch]
        if name == BARE:
            assert loop is not None
            return loop.run(prompts[0], len(runs[PLAIN][-1].token_ids[0]))
        told = (lambda i, emission: watch(name, start + i, emission)) if watch is not None else None
        return run_engine(engines[name], prompts, job.params, told)

    _warm_up(prepared, engines, loop)
    for _ in range(job.repeat):
        for start in range(0, len(prepared.prompts), batch):
            for name in names:
                runs[name].append(run(name, start))
    differences = _differences(prepared, runs)
    contenders = [
        measure_contender(
            name,
            engines[name].worker.verify_width - 1 if name in engines else 0,
            runs[name],
            runs[PLAIN],
            found,
            launch_of(engines[name], batch) if name in engines else None,
        )
        for name, found in differences.items()
    ]
    lens = [len(prompt) for prompt in prepared.prompts]
    context = max(lens) + job.params.max_new_tokens // 2
    costs = verify_costs(target, batch=batch, context=context, page_size=config.page_size) if job.curve else []
    return DecodeBench(
        model=prepared.loaded.name,
        prompts=[f"{s.name} ({len(s.texts)}): {s.note}{_how(prepared)}" for s in prepared.sets],
        max_new_tokens=job.params.max_new_tokens,
        batch=batch,
        repeat=job.repeat,
        contenders=[with_draft_share(contender, costs) for contender in contenders],
        differences=differences,
        verify_costs=costs,
    )


def launch_of(engine: Engine, batch: int) -> Launch:
    """What a decode launch of so many rows takes."""
    worker, limits = engine.worker, engine.limits
    pages = max_new_pages(alloc_len=limits.alloc_len, depth=limits.depth, page_size=engine.config.page_size)
    up = DECODE_COLUMNS + pages + sum(worker.input_words)
    down = OUTCOME_COLUMNS + worker.output_stride + worker.outcome_words
    return Launch(1 if worker.commit_phase is None else 2, 4 * batch * up, 4 * batch * down)


def _how(prepared: Prepared) -> str:
    tokenizer, chat = prepared.loaded.tokenizer, prepared.job.chat
    chat = tokenizer is not None and tokenizer.chat_template is not None if chat is None else chat
    return ", through the model's chat template" if chat else ", as raw text"


def _build_engines(prepared: Prepared, progress) -> dict[str, Engine]:
    """One for each algorithm, over the same weights."""
    named = prepared.job.algorithms
    algorithms = dict.fromkeys(named if PLAIN in named else (PLAIN, *named))
    return {
        name: Engine(
            contender_config(prepared.config, name),
            target=prepared.loaded.target,
            tokenizer=prepared.loaded.tokenizer,
            progress=progress,
        )
        for name in algorithms
    }


def _warm_up(prepared: Prepared, engines: dict[str, Engine], loop: BareLoop | None) -> None:
    prompts, params = prepared.prompts[: prepared.config.max_running], prepared.job.params
    params = dataclasses.replace(params, max_new_tokens=min(WARM_UP_TOKENS, params.max_new_tokens))
    for engine in engines.values():
        run_engine(engine, prompts, params)
    if loop is not None:
        loop.run(prompts[0], params.max_new_tokens)


def _differences(prepared: Prepared, runs: dict[str, list[Run]]) -> dict[str, list[Difference]]:
    """Every first difference from plain's text, by contender: the bare loop and plain first."""
    outputs = {name: [tokens for run in runs[name] for tokens in run.token_ids] for name in runs}

    def compare(other: Sequence[list[int]]) -> list[Difference]:
        found = []
        for i, (plain, tokens) in enumerate(zip(outputs[PLAIN], other, strict=True)):
            prompt = i % len(prepared.prompts)
            found.append(first_difference(prepared.loaded.target, prompt, prepared.prompts[prompt], plain, tokens))
        return [difference for difference in found if difference is not None]

    names = sorted(runs, key=lambda name: (name != BARE, name != PLAIN))
    return {name: compare(outputs[name]) for name in names}
