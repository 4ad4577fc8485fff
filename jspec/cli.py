"""The `jspec` command. JAX and everything built on it is imported inside the commands, so that `--help` is quick."""

import json
from collections.abc import Iterable
from importlib.metadata import version
from typing import Annotated, Any

import typer

from jspec.cli_errors import print_error, usage_errors
from jspec.cli_tpu_report import tpu_report
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

Model = Annotated[str, typer.Option(help='A GGUF file, a Hugging Face directory, or "smollm2".')]
Algorithm = Annotated[
    str,
    typer.Option(
        help='"eagle3", "eagle" or "multi-layer-eagle" (draft models), "ngram" (prompt lookup), "plain" (no speculation).'
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


def _progress(jobs: Iterable, *, total: int) -> Iterable:
    """A bar on standard error while programs are compiled; nothing where that is not a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    hidden = not console.is_terminal
    return track(jobs, "Compiling", total=total, console=console, transient=True, disable=hidden)


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
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Decode to --max-new-tokens.")] = False,
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
    context_len: Annotated[int | None, typer.Option(help="Longest prompt + output; by default what is needed.")] = None,
    page_size: PageSize = EngineConfig.page_size,
    max_running: Annotated[int, typer.Option(help="Requests decoded at the same time.")] = EngineConfig.max_running,
    kv_tokens: Annotated[int | None, typer.Option(help="Size of the KV pool in tokens.")] = None,
    overlap: Annotated[bool, typer.Option(help="Launch a step before the last is settled.")] = True,
    kernels: Annotated[
        str | None,
        typer.Option(help='"xla", "pallas" or "pallas_interpret"; by default "pallas" on a TPU, "xla" elsewhere.'),
    ] = None,
    tensor_parallel: Annotated[int, typer.Option(help="Devices that share the model.")] = EngineConfig.tensor_parallel,
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
) -> None:
    """Decode prompts.

    Exit code: 0; 1 if a request was refused or failed; 2 if an option or a file is wrong.
    """
    from jspec.cli_generate import Generation

    with usage_errors():
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
            page_size=page_size,
            max_running=max_running,
            context_len=context_len,
            kv_tokens=kv_tokens,
            overlap=overlap,
            kernels=kernels,
            tensor_parallel=tensor_parallel,
            checked=checked,
        )
        generation = Generation(
            prompt or [], prompt_file, chat=chat, config=config, params=params, progress=_progress, error=print_error
        )
    raise typer.Exit(0 if generation.run(stream=stream, as_json=as_json) else 1)


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
    prompts: Annotated[list[str] | None, typer.Option(help="bundled, mt-bench, humaneval or all; repeatable.")] = None,
    num_prompts: Annotated[int | None, typer.Option(help="First prompts of each set; all by default.")] = None,
    max_new_tokens: MaxNewTokens = 128,
    batch: Annotated[int, typer.Option(help="Prompts decoded at the same time.")] = 1,
    page_size: PageSize = EngineConfig.page_size,
    num_draft_tokens: DraftTokens = None,
    repeat: Annotated[int, typer.Option(help="Times each prompt is decoded.")] = 1,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Decode to --max-new-tokens.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Prompts as they are, not as a user's message.")] = False,
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
