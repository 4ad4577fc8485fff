"""`jspec trace`: what a recorded run says of itself."""

import pathlib
from typing import TYPE_CHECKING, Annotated

import typer

from jspec.cli_errors import usage_errors

if TYPE_CHECKING:
    from jspec.trace.timeline import Iteration, Timeline

trace = typer.Typer(help="Read the record of a run (jspec generate --trace FILE).", no_args_is_help=True)

File = Annotated[pathlib.Path, typer.Argument(help="A recording.", show_default=False)]
Rid = Annotated[str | None, typer.Option(help="A request, by name; by default all.")]


def _timeline(file: pathlib.Path) -> "Timeline":
    """The run, and a word on standard error where its record is not whole."""
    from jspec.trace.format import read_trace
    from jspec.trace.timeline import timeline

    found = timeline(read_trace(file))
    _say_broken(file, found.broken)
    return found


def _say_broken(file: pathlib.Path, broken: str | None) -> None:
    if broken is not None:
        typer.echo(f"{file}: {broken}; what is before it is read", err=True)


def _chosen(found: "Timeline", iterations: str | None) -> "list[Iteration]":
    """Of the run, the iterations A to B of "A:B", or A alone."""
    if iterations is None:
        return found.iterations
    first, colon, last = iterations.partition(":")
    try:
        low = 1 if colon and not first else int(first)
        high = (int(last) if last else 1 << 62) if colon else low
    except ValueError:
        raise ValueError(f'iter={iterations!r} must be "A:B", both included, or one number') from None
    chosen = [it for it in found.iterations if low <= it.forward_iter <= high]
    if not chosen:
        end = found.iterations[-1].forward_iter if found.iterations else 0
        raise ValueError(f"iter={iterations!r} holds no iteration of this trace: it has 1 to {end}")
    return chosen


def _serials(found: "Timeline", rid: str | None) -> set[int] | None:
    from jspec.trace.explain import lives_of

    return None if rid is None else {life.serial for life in lives_of(found, rid)}


@trace.command()
def show(
    file: File,
    rid: Rid = None,
    iterations: Annotated[
        str | None, typer.Option("--iter", help="A:B, both included; by default all.", show_default=False)
    ] = None,
) -> None:
    """Print the clocks side by side, one line a request and iteration.

    Under each name stand its time (host: what the host had settled when it planned the launch; launch: what the launch found; future: what the device decided)
    and its only writer.
    """
    with usage_errors():
        found = _timeline(file)
        chosen, serials = _chosen(found, iterations), _serials(found, rid)

    from rich.console import Console

    from jspec.trace.show import clock_table

    screen = Console(highlight=False)
    screen.width = max(screen.width, 240)  # a line of a terminal may wrap, but no cell is cut
    screen.print(clock_table(found, chosen, serials))


@trace.command()
def explain(
    file: File,
    rid: Annotated[str, typer.Option(help="The request.")],
    iteration: Annotated[int, typer.Option("--iter", help="The iteration.")],
    field: Annotated[str, typer.Option(help="A clock: a column of `jspec trace show` that has an owner.")],
    index: Annotated[int | None, typer.Option(help="Which of several answers to the prompt, from 0.")] = None,
) -> None:
    """Say of one number which clock it is, who owns it, which boundary it marks, in which mode, and why it differs from its neighbours by so much."""
    from jspec.trace.explain import explain as answers
    from jspec.trace.explain import line_of

    with usage_errors():
        found = _timeline(file)
        its, line = line_of(found, rid, iteration, index=index)
        text = answers(found, line, its, field)
    for answer in text:
        typer.echo(answer)


@trace.command()
def view(
    file: File,
    out: Annotated[pathlib.Path | None, typer.Option(help="The page; by default FILE.html.")] = None,
) -> None:
    """Write one HTML page that needs no network: iterations on a time line, the clocks of each request, who holds the pages."""
    from jspec.trace.view import write_page

    with usage_errors():
        target = out or file.with_name(file.name + ".html")
        write_page(_timeline(file), target)
    typer.echo(str(target))


@trace.command()
def export(
    file: File,
    perfetto: Annotated[bool, typer.Option("--perfetto", help="For https://ui.perfetto.dev; the only form there is.")],
    out: Annotated[pathlib.Path | None, typer.Option(help="The file; by default FILE.perfetto.json.")] = None,
) -> None:
    """Write the run as a file that other viewers open."""
    from jspec.trace.perfetto import write_perfetto

    with usage_errors():
        if not perfetto:
            raise ValueError("no form given: say --perfetto")
        target = out or file.with_name(file.name + ".perfetto.json")
        write_perfetto(_timeline(file), target)
    typer.echo(str(target))


@trace.command()
def replay(
    file: File,
    until: Annotated[
        int | None, typer.Option(help="Stop before the plan that follows this iteration; by default at the end.")
    ] = None,
    repl: Annotated[
        bool, typer.Option("--repl", help="Then open a Python prompt: `states`, `state`, `state_diff`.")
    ] = False,
) -> None:
    """Rebuild every state from the inputs alone, with no model, and check every invariant in each.

    Exit code 1 where the transitions answer other than they did when it was recorded, or a state is not sound: the first such place is printed.
    """
    from jspec.state.invariants import InvariantError
    from jspec.trace.format import read_trace
    from jspec.trace.replay import Divergence, replay_until

    with usage_errors():
        recording = read_trace(file)
        _say_broken(file, recording.broken)
        try:
            result = replay_until(recording, until)
        except (Divergence, InvariantError) as error:
            typer.echo(f"diverged: {error}")
            raise typer.Exit(1) from None
    typer.echo(
        f"{result.num_iterations} iterations, {result.num_states} states, all as recorded, every invariant holds; "
        f"{result.seconds:.2f} s for {result.run_seconds:.2f} s of the run ({result.speed:.0f}x)"
    )
    if repl:
        _open_prompt(result.states)


def _open_prompt(states) -> None:
    import code

    from jspec.trace.diff import state_diff

    values = {"states": states, "state": states[0], "state_diff": state_diff}
    banner = "states: of each rank; state: the first one; state_diff(a, b): what differs, a line each. Ctrl-D ends it."
    code.interact(banner=banner, local=values, exitmsg="")
