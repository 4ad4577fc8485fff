"""The demo: the bundled prompts decoded with speculation, as one watches, and without; then all in figures."""

import textwrap
from collections.abc import Callable, Iterable

from rich.text import Text

from jspec.bench.decode import DecodeJob, Prepared, Watch, prepare, run_decode
from jspec.bench.decode_report import PLAIN
from jspec.bench.tables import SPEED_NOTE, console, speed_table
from jspec.config import EngineConfig, SamplingParams
from jspec.engine import Emission
from jspec.models.tokenizer import TokenStream


def _printer(out, prepared: Prepared, algorithm: str) -> Watch:
    """Prints the text of one algorithm as it comes; the others decode in silence."""
    tokenizer = prepared.loaded.tokenizer
    assert tokenizer is not None
    streams: dict[int, TokenStream] = {}

    def say(text: str) -> None:
        out.print(text, end="", markup=False, soft_wrap=True)

    def watch(name: str, prompt: int, emission: Emission) -> None:
        if name != algorithm:
            return
        if prompt not in streams:
            streams[prompt] = tokenizer.stream()
            question = textwrap.shorten(prepared.texts[prompt], 100, placeholder=" ...")
            out.print(Text(f"\n> {question}", style="bold cyan"))
        say(streams[prompt].push(emission.token_ids))
        if emission.output is not None:
            say(streams[prompt].flush() + "\n")

    return watch


def run_demo(
    model: str,
    algorithm: str,
    num_prompts: int | None,
    max_new_tokens: int,
    *,
    progress: Callable[..., Iterable] | None = None,
) -> bool:
    """Prints everything; returns whether speculation left the text as it is without.

    Raises:
        OSError, ValueError: the model or an option cannot be used.
    """
    out = console()
    job = DecodeJob(
        config=EngineConfig(model=model, max_running=1),
        params=SamplingParams(max_new_tokens=max_new_tokens),
        algorithms=tuple(dict.fromkeys((PLAIN, "ngram", algorithm))),
        num_prompts=num_prompts,
        bare=False,
        curve=False,
    )
    out.print(
        f"Loading {model} and compiling its programs: a minute or two the first time, seconds from then on.",
        style="dim",
    )
    prepared = prepare(job)
    bench = run_decode(prepared, watch=_printer(out, prepared, algorithm), progress=progress)
    out.print()
    out.print(speed_table(f"{bench.model}, greedy, {len(prepared.prompts)} prompts", bench.contenders, goals=False))
    out.print(SPEED_NOTE, style="dim")
    verdict = "yes" if all(c.identical == c.outputs for c in bench.contenders) else "no"
    near_ties = sum(c.near_ties for c in bench.contenders)
    ties = f" ({near_ties} near ties)" if near_ties else ""
    out.print(f"\nidentical output: {verdict}{ties}", style="bold green" if bench.lossless else "bold red")
    return bench.lossless
