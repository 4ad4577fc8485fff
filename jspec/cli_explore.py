"""`jspec explore`: every state that a small scheduler can reach."""

import pathlib
from typing import Annotated

import typer

from jspec.cli_errors import usage_errors

REQUESTS = ("2+4", "3+3")
"""Without `--request`."""


def explore(
    request: Annotated[
        list[str] | None,
        typer.Option(
            help='One that may arrive: "3+4" is a prompt of 3 tokens and 4 to emit at most, "3+4,shared=2,priority=1" '
            f"shares its first 2 tokens with others and goes first; repeatable. By default {' and '.join(REQUESTS)}."
        ),
    ] = None,
    rows: Annotated[int, typer.Option(help="Requests that may run at the same time.")] = 2,
    pages: Annotated[int, typer.Option(help="Pages of the KV pool.")] = 8,
    page_size: Annotated[int, typer.Option(help="Tokens a KV page holds.")] = 2,
    verify_width: Annotated[int, typer.Option(help="Most tokens one step of a row may emit.")] = 2,
    alloc_len: Annotated[
        int | None, typer.Option(help="Tokens past its frontier that a step writes; by default --verify-width.")
    ] = None,
    depth: Annotated[int, typer.Option(help="Launches that may be unsettled when the next is planned: 0 to 3.")] = 1,
    mixed: Annotated[bool, typer.Option(help="Running requests ride along while others prefill.")] = True,
    prefix_cache: Annotated[bool, typer.Option(help="Prompts start from the longest cached prefix.")] = True,
    caches_output: Annotated[bool, typer.Option(help="What a request emitted is cached, too.")] = True,
    max_prefill_tokens: Annotated[
        int | None, typer.Option(help="Prompt tokens of one launch; longer prompts go in chunks. By default any fit.")
    ] = None,
    max_prefill_rows: Annotated[int, typer.Option(help="Prompts of one launch.")] = 8,
    lookahead: Annotated[int, typer.Option(help="Prompt tokens past a page that its name stands for, too.")] = 0,
    policy: Annotated[str, typer.Option(help='"fcfs" or "longest-prefix".')] = "fcfs",
    new_token_ratio: Annotated[
        float, typer.Option(help="Share of their remaining tokens that running requests count with at admission.")
    ] = 0.0,
    aborts: Annotated[bool, typer.Option(help="Any request may be aborted at any time.")] = True,
    stops: Annotated[
        str, typer.Option(help='How a request may end early: "token" (EOS), "string", "both" or "none".')
    ] = "token",
    failures: Annotated[bool, typer.Option("--failures", help="Any row's logits may be not finite.")] = False,
    reserve_windows: Annotated[
        int | None, typer.Option(help="Steps that a reserve is good for; by default depth + 1, and no fewer suffice.")
    ] = None,
    max_states: Annotated[
        int | None, typer.Option(help="Stop after so many; by default when there are no more.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes that run the transitions.")] = 1,
    out: Annotated[
        pathlib.Path | None, typer.Option(help="A file to record the way to a violation in, for `jspec trace`.")
    ] = None,
) -> None:
    """Visit every state that a small scheduler and any device can reach, by the real transitions, and check each.

    The device accepts any number of drafts and finds a stop anywhere; requests arrive, and are aborted, in any order. Exit code: 0; 1 if something does
    not hold, with the shortest way there; 2 if an option is wrong.
    """
    from rich.console import Console

    from jspec.explore import ExploreConfig, ExploreRequest
    from jspec.explore import explore as search
    from jspec.explore.outcomes import Outcomes
    from jspec.explore.recording import record_path
    from jspec.explore.report import report

    with usage_errors():
        config = ExploreConfig(
            requests=tuple(ExploreRequest.parse(text) for text in request or REQUESTS),
            rows=rows,
            pages=pages,
            page_size=page_size,
            verify_width=verify_width,
            alloc_len=alloc_len,
            depth=depth,
            mixed=mixed,
            prefix_cache=prefix_cache,
            caches_output=caches_output,
            max_prefill_tokens=max_prefill_tokens,
            max_prefill_rows=max_prefill_rows,
            lookahead=lookahead,
            policy=policy,
            new_token_ratio=new_token_ratio,
            aborts=aborts,
            stops=stops,
            failures=failures,
            reserve_windows=reserve_windows,
        )
        Outcomes(config)
        for option, value in (("max_states", max_states), ("jobs", jobs)):
            if value is not None and value < 1:
                raise ValueError(f"{option}={value} must be at least 1")
    errors = Console(stderr=True)
    with errors.status("Exploring") as status:
        result = search(
            config,
            max_states=max_states,
            jobs=jobs,
            progress=lambda states, scheduler_states: status.update(
                f"{states:,} states, {scheduler_states:,} of the scheduler"
            ),
        )
    screen = Console(highlight=False)
    if not screen.is_terminal:
        screen.width = max(screen.width, 150)
    screen.print(report(result))
    if result.found is not None:
        if out is not None:
            with usage_errors():
                record_path(result.found.path, out)
            typer.echo(f"recorded: jspec trace show {out}")
        raise typer.Exit(1)
