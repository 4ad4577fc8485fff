"""The `jspec` command. JAX and everything built on it is imported inside the commands, so that `--help` is quick."""

import functools
import json
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from jspec.cli_dspark import calibrate, profile
from jspec.cli_errors import print_error, usage_errors
from jspec.cli_explore import explore
from jspec.cli_sim import bench_sim
from jspec.cli_tpu_report import tpu_report
from jspec.cli_trace import trace as trace_commands
from jspec.cli_train import train
from jspec.config import EngineConfig, SamplingParams

app = typer.Typer(
    help="Speculative decoding for TPUs in JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
bench = typer.Typer(help="Measure the engine.", no_args_is_help=True)
app.add_typer(bench, name="bench")
app.command("train", no_args_is_help=True)(train)
app.command("tpu-report")(tpu_report)
bench.command("sim")(bench_sim)
app.command("explore")(explore)
app.add_typer(trace_commands, name="trace")
app.add_typer(profile, name="profile")
app.add_typer(calibrate, name="calibrate")

Model = Annotated[str, typer.Option(help='A GGUF file, a Hugging Face directory, or "smollm2".')]
Algorithm = Annotated[
    str,
    typer.Option(
        help='How tokens are drafted and verified, as "ngram" or "eagle3": `jspec algorithms` lists them. "plain" does neither.'
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output and nothing else there.")]
PageSize = Annotated[int, typer.Option(help="Tokens a KV page holds.")]
DraftTokens = Annotated[int | None, typer.Option(help="Verify width: the pending token and the drafts.")]
NumSteps = Annotated[int | None, typer.Option(help="Depth of an EAGLE draft.")]
TopK = Annotated[int, typer.Option("--topk", help="Children of a node of an EAGLE draft tree; 1 drafts a chain.")]
Draft = Annotated[
    str | None, typer.Option(help="Directory of a draft model. By default the one that comes with jspec for the model.")
]
MaxNewTokens = Annotated[int, typer.Option(help="Most tokens a prompt may get.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Decode to --max-new-tokens.")]
PromptSets = Annotated[list[str] | None, typer.Option(help="bundled, mt-bench, humaneval or all; repeatable.")]
Raw = Annotated[bool, typer.Option("--raw", help="Prompts as they are, not as a user's message.")]
MaxRunning = Annotated[int, typer.Option(help="Requests decoded at the same time.")]


def _progress(jobs: Iterable, *, total: int, title: str = "Compiling") -> Iterable:
    """A bar on standard error while programs are compiled, or what `title` says; nothing where that is not a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    hidden = not console.is_terminal
    return track(jobs, title, total=total, console=console, transient=True, disable=hidden)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"jspec {version('jspec')}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command("algorithms")
def list_algorithms(as_json: Json = False) -> None:
    """List the algorithms, those of installed packages among them."""
    from jspec.spec_workers import algorithms

    with usage_errors():
        found = algorithms()
    if as_json:
        typer.echo(json.dumps({name: algorithm.summary for name, algorithm in found.items()}))
        return
    width = max(map(len, found))
    for name, algorithm in found.items():
        typer.echo(f"{name:{width}}  {algorithm.summary}")


@app.command()
def generate(
    model: Model = "smollm2",
    algorithm: Algorithm = "ngram",
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given several times.")] = None,
    prompt_file: Annotated[
        str | None,
        typer.Option(help='One prompt a line, or JSONL with the key "prompt"; "-" reads standard input.'),
    ] = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the most likely tokens up to this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep tokens at least this likely, relative to the best.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Fixes every request's tokens, whatever runs beside it.")] = None,
    stop_token_id: Annotated[list[int] | None, typer.Option(help="A token that ends a request; repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends a request's text; repeatable.")] = None,
    min_new_tokens: Annotated[int, typer.Option(help="No end before so many tokens.")] = 0,
    timeout: Annotated[float | None, typer.Option(help="Seconds after which a request ends with what it has.")] = None,
    ignore_eos: IgnoreEos = False,
    repetition_penalty: Annotated[
        float, typer.Option(help="Divides the logits of tokens in prompt or output; 1: off.")
    ] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Taken off the logits of tokens in the output.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, times their number.")] = 0.0,
    logit_bias: Annotated[
        list[str] | None, typer.Option(help='Added to the logit of a token: "ID=BIAS"; repeatable.')
    ] = None,
    bad_word: Annotated[list[str] | None, typer.Option(help="A string that may not come; repeatable.")] = None,
    json_schema: Annotated[
        str | None, typer.Option(help="The output is JSON of this schema: the schema, or a file of it.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="The output matches this regular expression.")] = None,
    ebnf: Annotated[
        str | None, typer.Option(help="The output follows this grammar (GBNF or Lark): the grammar, or a file of it.")
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probability of each token, and of so many of the likeliest.")
    ] = None,
    prompt_logprobs: Annotated[int | None, typer.Option(help="The same for the prompt's tokens.")] = None,
    n: Annotated[int, typer.Option("--n", help="Answers to each prompt.")] = 1,
    draft: Draft = None,
    num_steps: NumSteps = None,
    topk: TopK = 1,
    num_draft_tokens: DraftTokens = None,
    min_draft_prob: Annotated[
        float, typer.Option(help="End a draft chain before a token that the draft finds less likely than this.")
    ] = EngineConfig.min_draft_prob,
    rejection_sampling: Annotated[
        bool, typer.Option("--rejection-sampling", help="Draw drafts from the draft's distribution, accept by ratio.")
    ] = False,
    lossy_threshold: Annotated[
        float,
        typer.Option(
            help="LOSSY below 1: sampled rows accept drafts this likely unseen; not the model's distribution."
        ),
    ] = 1.0,
    adaptive_steps: Annotated[
        str, typer.Option(help='Draft depths to choose among, by batch size: "1:1,3,5 8:0,1,3".')
    ] = "",
    ragged_verify: Annotated[
        str, typer.Option(help='dspark: verify every draft ("static"), or as many as pay ("compact", "cap-accept").')
    ] = EngineConfig.ragged_verify,
    draft_cache: Annotated[
        str, typer.Option(help='dflash, dspark: the draft\'s KV "paged", or in a ring of its "window" for each row.')
    ] = EngineConfig.draft_cache,
    sps: Annotated[str | None, typer.Option(help="dspark: what a verify costs here, from `jspec profile sps`.")] = None,
    sts: Annotated[
        str | None, typer.Option(help="dspark: temperatures of its confidence, from `jspec calibrate sts`.")
    ] = None,
    corpus: Annotated[
        str | None, typer.Option(help="ngram-corpus: a file to propose from; text lines, or a .jsonl of token ids.")
    ] = None,
    corpus_share: Annotated[
        int | None, typer.Option(help="ngram-corpus: drafts of a verify that are kept for --corpus; by default half.")
    ] = None,
    context_len: Annotated[int | None, typer.Option(help="Longest prompt + output; by default what is needed.")] = None,
    page_size: PageSize = EngineConfig.page_size,
    max_running: MaxRunning = EngineConfig.max_running,
    kv_tokens: Annotated[int | None, typer.Option(help="Size of the KV pool in tokens.")] = None,
    max_prefill_tokens: Annotated[
        int | None, typer.Option(help="Most prompt tokens of one launch; longer prompts go in chunks.")
    ] = None,
    mixed_batches: Annotated[bool, typer.Option(help="Running requests ride along while others prefill.")] = True,
    prefix_cache: Annotated[bool, typer.Option(help="Start from the longest prefix whose KV is kept.")] = True,
    policy: Annotated[str, typer.Option(help='Who starts first: "fcfs" or "longest-prefix".')] = EngineConfig.policy,
    overlap: Annotated[bool, typer.Option(help="Launch a step before the last is settled.")] = True,
    kernels: Annotated[
        str | None,
        typer.Option(help='"xla", "pallas" or "pallas_interpret"; by default "pallas" on a TPU, "xla" elsewhere.'),
    ] = None,
    tensor_parallel: Annotated[int, typer.Option(help="Devices that share the model.")] = EngineConfig.tensor_parallel,
    data_parallel: Annotated[
        int, typer.Option(help="Ranks with requests and a KV pool of their own, a device each; they share the MLPs.")
    ] = EngineConfig.data_parallel,
    trace: Annotated[
        str | None, typer.Option(help="A file to record the run in; `jspec trace` reads it.", show_default=False)
    ] = None,
    checked: Annotated[bool, typer.Option("--checked", help="Check every invariant after every transition.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print text as it comes (without --json).")] = False,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="As a user's message, or as it is. By default as the model was made.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve Prometheus metrics at this port meanwhile; 0 takes any free one.")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help='Log on standard error: "info" each request\'s life, "debug" each launch, too.')
    ] = None,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log one JSON object an event.")] = False,
) -> None:
    """Decode prompts.

    Exit code: 0; 1 if a request was refused or failed; 2 if an option or a file is wrong.
    """
    from jspec.cli_generate import Generation
    from jspec.cli_logs import LogsOnStderr

    with usage_errors():
        logs = LogsOnStderr(log_level, as_json=log_json)
        params = SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            stop_token_ids=tuple(stop_token_id or ()),
            stop=tuple(stop or ()),
            min_new_tokens=min_new_tokens,
            timeout_s=timeout,
            ignore_eos=ignore_eos,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=_logit_bias(logit_bias or []),
            bad_words=tuple(bad_word or ()),
            json_schema=_text_or_file(json_schema),
            regex=regex,
            ebnf=_text_or_file(ebnf),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            n=n,
        )
        config = EngineConfig(
            model=model,
            algorithm=algorithm,
            draft=draft,
            num_steps=num_steps,
            topk=topk,
            num_draft_tokens=num_draft_tokens,
            min_draft_prob=min_draft_prob,
            rejection_sampling=rejection_sampling,
            lossy_threshold=lossy_threshold,
            adaptive_steps=_adaptive_steps(adaptive_steps),
            ragged_verify=ragged_verify,
            draft_cache=draft_cache,
            sps=sps,
            corpus=corpus,
            corpus_share=corpus_share,
            sts=sts,
            page_size=page_size,
            max_running=max_running,
            context_len=context_len,
            kv_tokens=kv_tokens,
            max_prefill_tokens=max_prefill_tokens,
            mixed_batches=mixed_batches,
            prefix_cache=prefix_cache,
            policy=policy,
            structured_output=any(text is not None for text in (json_schema, regex, ebnf)),
            overlap=overlap,
            kernels=kernels,
            tensor_parallel=tensor_parallel,
            data_parallel=data_parallel,
            trace=trace,
            checked=checked,
            metrics_port=metrics_port,
        )
        generation = Generation(
            prompt or [], prompt_file, chat=chat, config=config, params=params, progress=_progress, error=print_error
        )
    with logs:
        ok = generation.run(stream=stream, as_json=as_json)
    raise typer.Exit(0 if ok else 1)


def _logit_bias(texts: list[str]) -> dict[int, float]:
    """`logit_bias` from "ID=BIAS" each."""
    try:
        return {int(token): float(bias) for token, bias in (text.split("=") for text in texts)}
    except ValueError:
        raise ValueError(f'logit_bias={texts!r} must read like "42=1.5": a token id, and what is added to it') from None


def _text_or_file(given: str | None) -> str | None:
    """What the file of that name holds, or the text itself."""
    if given is None or len(given) > 255 or not Path(given).is_file():
        return given
    return Path(given).read_text()


def _adaptive_steps(text: str) -> Any:
    """`adaptive_steps` from "1:1,3,5 8:0,1,3"."""
    try:
        slots = [slot.split(":") for slot in text.split()]
        return tuple((int(first), tuple(int(depth) for depth in depths.split(","))) for first, depths in slots)
    except ValueError:
        raise ValueError(
            f'adaptive_steps={text!r} must read like "1:1,3,5 8:0,1,3": batch size, colon, depths, with a space between slots'
        ) from None


def _show(as_json: bool, record: dict[str, Any], tables: Any) -> None:
    """One of the two on standard output."""
    from jspec.bench.tables import console

    if as_json:
        typer.echo(json.dumps(record))
    else:
        console().print(tables)


@bench.command("host")
def bench_host(
    rows: Annotated[list[int] | None, typer.Option(help="Running rows; repeatable. By default 16, 64 and 256.")] = None,
    context_len: Annotated[int, typer.Option(help="Longest prompt + output.")] = 8192,
    page_size: PageSize = 64,
    iterations: Annotated[int, typer.Option(help="Iterations to time.")] = 300,
    as_json: Json = False,
) -> None:
    """Host time of an iteration, over a device step that does almost nothing; and what crosses to the device and back."""
    from jspec.bench.host import host_json, measure_host
    from jspec.bench.tables import host_tables

    with usage_errors():
        costs = [
            measure_host(count, context_len=context_len, page_size=page_size, iterations=iterations, progress=_progress)
            for count in rows or (16, 64, 256)
        ]
    _show(as_json, host_json(costs), host_tables(costs))


@bench.command("decode")
def bench_decode(
    model: Model = "smollm2",
    algorithms: Annotated[
        str | None,
        typer.Option(
            help='Comma-separated; plain always runs. With options: "eagle3:topk=4:num_steps=3". By default those that need no draft, and eagle3 if there is one.'
        ),
    ] = None,
    draft: Draft = None,
    prompts: PromptSets = None,
    num_prompts: Annotated[int | None, typer.Option(help="First prompts of each set; all by default.")] = None,
    max_new_tokens: MaxNewTokens = 128,
    batch: Annotated[int, typer.Option(help="Prompts decoded at the same time.")] = 1,
    page_size: PageSize = EngineConfig.page_size,
    num_draft_tokens: DraftTokens = None,
    repeat: Annotated[int, typer.Option(help="Times each prompt is decoded.")] = 1,
    ignore_eos: IgnoreEos = False,
    raw: Raw = False,
    bare: Annotated[bool, typer.Option(help="Run the bare JAX loop too (at --batch 1).")] = True,
    curve: Annotated[bool, typer.Option(help="Measure the cost of a verify by its width.")] = True,
    as_json: Json = False,
) -> None:
    """Decoding speed with and without speculation, and whether the text is the same.

    Exit code: 1 if a text differs by more than a near tie.
    """
    from jspec.bench.decode import DecodeJob, prepare, run_decode
    from jspec.bench.decode_report import decode_json
    from jspec.bench.tables import decode_tables
    from jspec.models.shipped_drafts import best_algorithm

    best = best_algorithm(model) if draft is None else "eagle3"
    names = algorithms.split(",") if algorithms is not None else dict.fromkeys(("plain", "ngram", best))

    with usage_errors():
        job = DecodeJob(
            prompt_sets=tuple(prompts or ["bundled"]),
            num_prompts=num_prompts,
            algorithms=tuple(name.strip() for name in names),
            params=SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=ignore_eos),
            config=EngineConfig(
                model=model, page_size=page_size, max_running=batch, num_draft_tokens=num_draft_tokens, draft=draft
            ),
            chat=False if raw else None,
            repeat=repeat,
            bare=bare,
            curve=curve,
        )
        result = run_decode(prepare(job), progress=_progress)
    _show(as_json, decode_json(result), decode_tables(result))
    raise typer.Exit(0 if result.lossless else 1)


@bench.command("serve")
def bench_serve(
    model: Model = "smollm2",
    algorithms: Annotated[
        str,
        typer.Option(
            help='Comma-separated, as in "bench decode"; the first is measured with a warm prefix.',
        ),
    ] = "plain,ngram",
    draft: Draft = None,
    requests: Annotated[int, typer.Option(help="Of the trace of arrivals; 0 leaves it out.")] = 32,
    prompts: PromptSets = None,
    random_prompts: Annotated[
        bool, typer.Option("--random-prompts", help="Random token ids instead of the prompt sets.")
    ] = False,
    max_new_tokens: MaxNewTokens = 64,
    long_every: Annotated[int, typer.Option(help="The last of so many prompts is a long one; 0: none.")] = 4,
    long_tokens: Annotated[int, typer.Option(help="Tokens of a long prompt, at most.")] = 800,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests that arrive a second; by default twice what the first algorithm can serve."),
    ] = None,
    max_running: MaxRunning = EngineConfig.max_running,
    max_prefill_tokens: Annotated[int, typer.Option(help="Prompt tokens of one launch of the trace.")] = 256,
    page_size: PageSize = EngineConfig.page_size,
    num_draft_tokens: DraftTokens = None,
    prefix_tokens: Annotated[int, typer.Option(help="Of the warm prefix; 0 leaves it out.")] = 2000,
    rounds: Annotated[int, typer.Option(help="Times each measurement is made, one after another in turn.")] = 3,
    soak: Annotated[int, typer.Option(help="Requests through a worker that computes nothing; 0 leaves it out.")] = 0,
    seed: Annotated[int, typer.Option(help="Of arrivals and random prompts.")] = 0,
    ignore_eos: IgnoreEos = False,
    raw: Raw = False,
    as_json: Json = False,
) -> None:
    """An engine under traffic: prompts that come while others decode, prompts that begin alike, and (--soak) many requests.

    Exit code: 1 if a text differs by more than a near tie, a KV page is lost, or memory grows.
    """
    from jspec.bench.serve import ServeJob, prepare, run_serve
    from jspec.bench.serve_report import serve_json
    from jspec.bench.tables import serve_tables

    with usage_errors():
        job = ServeJob(
            config=EngineConfig(
                model=model,
                draft=draft,
                num_draft_tokens=num_draft_tokens,
                page_size=page_size,
                max_running=max_running,
                max_prefill_tokens=max_prefill_tokens,
            ),
            params=SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=ignore_eos),
            algorithms=tuple(name.strip() for name in algorithms.split(",")),
            requests=requests,
            prompt_sets=tuple(prompts or ["bundled"]),
            random_prompts=random_prompts,
            chat=False if raw else None,
            long_every=long_every,
            long_tokens=long_tokens,
            rate=rate,
            rounds=rounds,
            seed=seed,
            prefix_tokens=prefix_tokens,
            soak=soak,
        )
        result = run_serve(
            prepare(job), progress=_progress, soaking=functools.partial(_progress, title="Serving requests")
        )
    _show(as_json, serve_json(result), serve_tables(result))
    raise typer.Exit(0 if result.ok else 1)


@bench.command("trace")
def bench_trace(
    model: Model = "smollm2",
    algorithm: Algorithm = "ngram",
    draft: Draft = None,
    max_new_tokens: MaxNewTokens = 128,
    batch: Annotated[int, typer.Option(help="Prompts decoded at the same time.")] = 1,
    rounds: Annotated[int, typer.Option(help="Times each way of decoding, and each replay, is timed.")] = 7,
    as_json: Json = False,
) -> None:
    """What --trace adds to a decode step, how long the file gets, and how fast `jspec trace replay` goes through it."""
    from jspec.bench.trace import TraceJob, measure_trace, trace_json, trace_tables

    with usage_errors():
        config = EngineConfig(model=model, algorithm=algorithm, draft=draft, max_running=batch)
        cost = measure_trace(TraceJob(config=config, max_new_tokens=max_new_tokens, rounds=rounds), progress=_progress)
    _show(as_json, trace_json(cost), trace_tables(cost))


@app.command()
def demo(
    model: Model = "smollm2",
    algorithm: Annotated[
        str | None, typer.Option(help="By default eagle3 where a draft comes with jspec, else ngram.")
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Of the bundled ones, evenly spaced; all by default.")] = None,
    max_new_tokens: MaxNewTokens = 80,
) -> None:
    """Decode the bundled prompts with and without speculation: the text as it comes, then both in figures."""
    from jspec.bench.demo import run_demo
    from jspec.models.shipped_drafts import best_algorithm

    with usage_errors():
        lossless = run_demo(model, algorithm or best_algorithm(model), num_prompts, max_new_tokens, progress=_progress)
    raise typer.Exit(0 if lossless else 1)


def main() -> None:
    """The entry point."""
    app()


if __name__ == "__main__":
    main()
