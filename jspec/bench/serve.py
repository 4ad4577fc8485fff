"""An engine under traffic: prompts that come while others decode, prompts that begin alike, and many requests in one process."""

import dataclasses
import gc
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from jspec.bench.decode import contender_config
from jspec.bench.decode_compare import Difference, first_difference
from jspec.bench.decode_report import PLAIN
from jspec.bench.fitting import smallest_context
from jspec.bench.prompts import check_readable, load_prompt_sets
from jspec.bench.serve_prefix import MOST_PREFILL_TOKENS, FittedPrefix, fit_prefix, measure_prefix
from jspec.bench.serve_report import ServeBench, ServeTrace, contender_name, measure_served
from jspec.bench.serve_trace import LONGEST_SHORT, SHORTEST, Served, arrival_times, random_prompts, serve, text_prompts
from jspec.bench.soak import run_soak
from jspec.config import EngineConfig, SamplingParams
from jspec.engine import Engine
from jspec.engine.buckets import SMALLEST_PREFILL_TOKENS
from jspec.models.loading import LoadedModel, load_model
from jspec.spec_workers import check_algorithm

WARM_UP_TOKENS = 4

OVERLOAD = 2.0
"""Where no rate is given, so many times the requests arrive that the first contender can serve: at less, all would serve at the speed of the arrivals."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeJob:
    """What to measure.

    Raises:
        ValueError: naming the field, its value and the rule.
    """

    config: EngineConfig = dataclasses.field(default_factory=lambda: EngineConfig(max_prefill_tokens=256))
    """Of every engine that serves the trace, but for algorithm, context length, mixed batches and the prefix cache, which is off there: it would make the
    second round another one than the first. Where it names no buckets, few are built: several engines are alive at once, and a process on Linux may map
    only so much code (`vm.max_map_count`; SmolLM2 takes a thousand maps a program)."""
    params: SamplingParams = dataclasses.field(default_factory=lambda: SamplingParams(max_new_tokens=64))  # greedy
    algorithms: tuple[str, ...] = (PLAIN, "ngram")
    """As in `DecodeJob`. Each serves the trace twice a round: with mixed batches and without. The first is measured with a warm prefix."""
    requests: int = 32  # of the trace; 0 leaves it out
    prompt_sets: tuple[str, ...] = ("bundled",)
    random_prompts: bool = False  # token ids instead of the prompt sets
    chat: bool | None = None  # as `encode_prompt`
    long_every: int = 4  # the last of so many prompts is a long one; 0: none
    long_tokens: int = 800  # of a long prompt, at most
    rate: float | None = None  # requests that arrive a second; None: `OVERLOAD` times what the first contender serves
    rounds: int = 3
    seed: int = 0  # of arrivals and random prompts
    prefix_tokens: int = 2000  # 0 leaves the warm prefix out
    soak: int = 0  # requests; 0 leaves it out

    def __post_init__(self):
        for field, low in (
            ("requests", 0),
            ("long_every", 0),
            ("long_tokens", 1),
            ("rounds", 1),
            ("seed", 0),
            ("prefix_tokens", 0),
            ("soak", 0),
        ):
            if getattr(self, field) < low:
                raise ValueError(f"{field}={getattr(self, field)} must be at least {low}")
        if self.rate is not None and not (math.isfinite(self.rate) and self.rate > 0):
            raise ValueError(
                f"rate={self.rate} must be positive and finite: requests a second; leave it out to have it measured"
            )
        if not (self.requests or self.prefix_tokens or self.soak):
            raise ValueError("requests=0, prefix_tokens=0 and soak=0 leave nothing to measure: give one of them")
        if self.requests and self.config.max_running < 2:
            raise ValueError(
                f"max_running={self.config.max_running} must be at least 2: a request alone has no other to ride along with; requests=0 leaves the trace out"
            )
        for name in self.algorithms:
            contender_config(self.config, name)

    @property
    def needs_model(self) -> bool:
        """The soak alone does without."""
        return bool(self.requests or self.prefix_tokens)


class PreparedTrace(NamedTuple):
    """A trace but for its rate; nothing has been built or run."""

    config: EngineConfig  # fitted to the prompts
    sets: list[str]  # a line for each set of prompts
    prompts: list[list[int]]


class Prepared(NamedTuple):
    """A job with everything read that it needs."""

    job: ServeJob
    loaded: LoadedModel | None  # None where only the soak runs
    trace: PreparedTrace | None
    prefix: FittedPrefix | None


def prepare(job: ServeJob) -> Prepared:
    """Reads prompts and model.

    Raises:
        OSError, ValueError: a set, a model or a draft that is not there, or cannot be used; a prompt that does not fit the model.
    """
    if not job.needs_model:
        return Prepared(job, None, None, None)
    for name in job.algorithms:
        check_algorithm(contender_config(job.config, name))
    loaded = load_model(
        job.config.model,
        kernels=job.config.kernels,
        tensor_parallel=job.config.tensor_parallel,
        data_parallel=job.config.data_parallel,
    )
    context_len = loaded.target.facts.context_len
    trace = _prepare_trace(job, loaded) if job.requests else None
    prefix = fit_prefix(job.config, job.prefix_tokens, model_context_len=context_len) if job.prefix_tokens else None
    return Prepared(job, loaded, trace, prefix)


def _prepare_trace(job: ServeJob, loaded: LoadedModel) -> PreparedTrace:
    facts, sizes = loaded.target.facts, {"long_every": job.long_every, "long_tokens": job.long_tokens}
    if job.long_every and job.long_tokens + job.params.max_new_tokens > facts.context_len:
        raise ValueError(
            f"long_tokens={job.long_tokens} and max_new_tokens={job.params.max_new_tokens} must fit the {facts.context_len} tokens the model was made for: lower one of them"
        )
    if job.random_prompts:
        prompts = random_prompts(job.requests, vocab_size=facts.vocab_size, seed=job.seed, **sizes)
        sets = [f"random token ids: {SHORTEST} to {LONGEST_SHORT} a short prompt"]
    else:
        found = load_prompt_sets(job.prompt_sets)
        tokenizer = check_readable(loaded, job.chat)
        texts = [text for prompt_set in found for text in prompt_set.texts]
        prompts = text_prompts(texts, tokenizer, job.requests, chat=job.chat, **sizes)
        chat = tokenizer.chat_template is not None if job.chat is None else job.chat
        how = ", through the model's chat template" if chat else ", as raw text"
        sets = [f"{s.name} ({len(s.texts)}): {s.note}{how}; a long prompt is several in a row" for s in found]
    lens = [len(prompt) for prompt in prompts]
    most = job.config.max_prefill_tokens or MOST_PREFILL_TOKENS
    config = dataclasses.replace(
        job.config,
        context_len=smallest_context(lens, job.params.max_new_tokens, facts.context_len),
        max_prefill_tokens=most,
        batch_buckets=job.config.batch_buckets or (job.config.max_running,),
        prefill_buckets=job.config.prefill_buckets or tuple(sorted({min(SMALLEST_PREFILL_TOKENS, most), most})),
        prefix_cache=False,
    )
    return PreparedTrace(config, sets, prompts)


def run_serve(
    prepared: Prepared,
    *,
    progress: Callable[..., Iterable] | None = None,
    soaking: Callable[..., Iterable] | None = None,
) -> ServeBench:
    """Runs what the job asks for, one part after another; the soak first, while the process is small.

    Args:
        prepared: what to run.
        progress: as of `Engine`.
        soaking: the same, of the requests of the soak.

    Raises:
        ValueError: a prompt that cannot run.
    """
    job, loaded = prepared.job, prepared.loaded
    trace = prefix = None
    soak = run_soak(job.soak, seed=job.seed, progress=progress, soaking=soaking) if job.soak else None
    if loaded is not None and prepared.trace is not None:
        trace = _run_trace(job, loaded, prepared.trace, progress)
    if loaded is not None and prepared.prefix is not None:
        gc.collect()  # engines that served the trace, and the code they mapped
        prefix = measure_prefix(
            prepared.prefix, job.algorithms[0], loaded.target, rounds=job.rounds, seed=job.seed, progress=progress
        )
    return ServeBench(trace=trace, prefix=prefix, soak=soak)


class _Contender(NamedTuple):
    algorithm: str
    mixed: bool

    @property
    def name(self) -> str:
        return contender_name(self.algorithm, self.mixed)


def _run_trace(job: ServeJob, loaded: LoadedModel, trace: PreparedTrace, progress) -> ServeTrace:
    """Every contender serves the trace in every round, in an order that turns round from one to the next."""
    contenders = [_Contender(name, mixed) for name in dict.fromkeys(job.algorithms) for mixed in (False, True)]
    engines = {
        contender: Engine(
            dataclasses.replace(contender_config(trace.config, contender.algorithm), mixed_batches=contender.mixed),
            target=loaded.target,
            progress=progress,
        )
        for contender in contenders
    }
    at_once = [0.0] * len(trace.prompts)
    few = dataclasses.replace(job.params, max_new_tokens=min(WARM_UP_TOKENS, job.params.max_new_tokens))
    for engine in engines.values():
        serve(engine, trace.prompts, at_once, few)
    rate = job.rate
    if rate is None:
        rate = OVERLOAD * len(trace.prompts) / serve(engines[contenders[0]], trace.prompts, at_once, job.params).seconds
    arrivals = arrival_times(len(trace.prompts), rate=rate, seed=job.seed)
    runs: dict[_Contender, list[Served]] = {contender: [] for contender in contenders}
    for round_ in range(job.rounds):
        for contender in contenders if round_ % 2 == 0 else contenders[::-1]:
            runs[contender].append(serve(engines[contender], trace.prompts, arrivals, job.params))
    differences = _differences(loaded, trace.prompts, runs)
    return ServeTrace(
        model=loaded.name,
        requests=job.requests,
        prompts=trace.sets,
        prompt_tokens=[len(prompt) for prompt in trace.prompts],
        max_new_tokens=job.params.max_new_tokens,
        max_prefill_tokens=engines[contenders[0]].limits.max_prefill_tokens,
        max_running=trace.config.max_running,
        rounds=job.rounds,
        arrivals_per_s=rate,
        arrivals_given=job.rate is not None,
        contenders=[
            measure_served(c.algorithm, c.mixed, runs[c], runs[_Contender(c.algorithm, False)], differences[c])
            for c in contenders
        ],
        differences={c.name: found for c, found in differences.items()},
    )


def _differences(
    loaded: LoadedModel, prompts: Sequence[Sequence[int]], runs: dict[_Contender, list[Served]]
) -> dict[_Contender, list[Difference]]:
    """Every first difference from the outputs of the first contender's first round."""
    expected = next(iter(runs.values()))[0].token_ids

    def compare(served: Served) -> list[Difference | None]:
        outputs = zip(prompts, expected, served.token_ids, strict=True)
        return [first_difference(loaded.target, i, prompt, *pair) for i, (prompt, *pair) in enumerate(outputs)]

    return {
        contender: [found for served in rounds for found in compare(served) if found is not None]
        for contender, rounds in runs.items()
    }
