"""`jspec bench sim`: the scheduler inside a compiled loop."""

import json
from typing import Annotated

import typer

from jspec.cli_errors import usage_errors


def bench_sim(
    rows: Annotated[list[int] | None, typer.Option(help="Running rows; repeatable. By default 16, 64 and 256.")] = None,
    total_rows: Annotated[int, typer.Option(help="Rows of all configurations that run side by side.")] = 4096,
    page_size: Annotated[int, typer.Option(help="Tokens a KV page holds.")] = 64,
    requests_per_row: Annotated[int, typer.Option(help="Of each simulation.")] = 8,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON on standard output and nothing else there.")
    ] = False,
) -> None:
    """Request-rounds a second of reserve and settle alone, and of whole simulations (jspec.sim)."""
    from jspec.bench.sim import measure_sim, sim_json, sim_tables
    from jspec.bench.tables import console

    with usage_errors():
        speeds = measure_sim(
            rows or (16, 64, 256), total_rows=total_rows, page_size=page_size, requests_per_row=requests_per_row
        )
    if as_json:
        typer.echo(json.dumps(sim_json(speeds)))
    else:
        console().print(sim_tables(speeds))
