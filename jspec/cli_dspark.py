"""`jspec profile` and `jspec calibrate`: what DSpark's budgets are made of. JAX is imported when they run, so that `--help` is quick."""

from pathlib import Path
from typing import Annotated

import typer

from jspec.cli_errors import usage_errors
from jspec.config import EngineConfig

profile = typer.Typer(help="Measure what steps cost on this machine.", no_args_is_help=True)
calibrate = typer.Typer(help="Fit what a draft says of itself to what comes true.", no_args_is_help=True)

Model = Annotated[str, typer.Option(help='A GGUF file, a Hugging Face directory, or "smollm2".')]
Draft = Annotated[
    str | None, typer.Option(help="Directory of a DSpark draft; by default the one that comes with jspec.")
]
Out = Annotated[Path, typer.Option(help="The JSON file to write.", show_default=False)]
MaxRunning = Annotated[int, typer.Option(help="Requests decoded at the same time.")]


@profile.command("sps")
def profile_sps(
    out: Out, model: Model = "smollm2", draft: Draft = None, max_running: MaxRunning = EngineConfig.max_running
) -> None:
    """Steps a second by the tokens that a verify checks, for `--sps`."""
    from jspec.bench import dspark

    with usage_errors():
        found = dspark.profile_sps(EngineConfig(model=model, draft=draft, max_running=max_running))
        dspark.write_json(out, found.table, found.record)
    for tokens, rate in zip(found.table.sample_batch_tokens, found.table.sample_steps_per_sec, strict=True):
        typer.echo(f"{tokens:5.0f} tokens  {rate:9.2f} steps a second  {1000 / rate:8.2f} ms")
    typer.echo(str(out))


@calibrate.command("sts")
def calibrate_sts(
    out: Out,
    model: Model = "smollm2",
    draft: Draft = None,
    prompts: Annotated[list[str] | None, typer.Option(help="bundled, mt-bench, humaneval or all; repeatable.")] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Of each set.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 128,
    max_running: MaxRunning = EngineConfig.max_running,
) -> None:
    """Temperatures of a draft's confidence, for `--sts`."""
    from jspec.bench import dspark

    with usage_errors():
        found = dspark.calibrate_sts(
            EngineConfig(model=model, draft=draft, max_running=max_running),
            prompt_sets=prompts or ["bundled"],
            num_prompts=num_prompts,
            max_new_tokens=max_new_tokens,
        )
        dspark.write_json(out, found.sts, found.record)
    columns = (found.sts.temperatures, found.record["ece_before"], found.record["ece"])
    for place, (temperature, before, after) in enumerate(zip(*columns, strict=True)):
        typer.echo(f"place {place}: temperature {temperature:6.3f}, calibration error {before:.4f} -> {after:.4f}")
    typer.echo(str(out))
