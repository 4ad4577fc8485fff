"""Tables for people: one column a contender, one row a figure, so that they stay readable in 80 columns."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from jspec.bench.decode_compare import NEAR_TIE, Difference
from jspec.bench.decode_curve import VerifyCost
from jspec.bench.decode_report import BARE, PLAIN, Contender, DecodeBench
from jspec.bench.host import HostCost
from jspec.bench.serve_report import (
    WARM_GOAL,
    ServeBench,
    ServeContender,
    ServeTrace,
    Spread,
    WarmPrefix,
    contender_name,
)
from jspec.bench.soak import SoakReport


def console(*, stderr: bool = False) -> Console:
    """Wide enough for every table where the output is not a terminal."""
    out = Console(stderr=stderr, highlight=False)
    return out if out.is_terminal else Console(stderr=stderr, highlight=False, width=max(out.width, 150))


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right", overflow="fold")
    return table


def _note(text: str) -> Text:
    return Text(text, style="dim")


def _number(value: float | None, digits: int = 1, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def _spread(value: Spread | None, digits: int = 1, unit: str = "") -> str:
    """The median, then the lowest and the highest of the rounds, where they differ."""
    if value is None:
        return "-"
    low, median, high = (f"{v:.{digits}f}" for v in (value.low, value.median, value.high))
    return f"{median}{unit}" if low == high else f"{median}{unit} ({low}-{high})"


def _identical(contender: Contender | ServeContender) -> str:
    """ "yes", or how many outputs are not what plain decoding gave."""
    different = contender.outputs - contender.identical
    if not different:
        return "yes"
    ties = f", {contender.near_ties} by a near tie" if contender.near_ties else ""
    return f"no: {different} of {contender.outputs}{ties}"


def speed_table(title: str, contenders: Sequence[Contender], *, goals: bool) -> Table:
    """Plain against speculative. `goals` adds what the project wants to reach."""
    goal = {
        "speed-up / accept length": ">= 0.85 on a TPU",
        "exposed host time": "< 2 % of a step",
        "run-ahead": "1.000",
        "compiles after warm-up": "0",
        "identical output": "yes",
    }
    names = [c.algorithm.replace(":", "\n") for c in contenders]  # options below the name
    table = _table(title, [*names, *(["goal"] if goals else [])])

    def row(label: str, cells: Sequence[str]) -> None:
        table.add_row(label, *cells, *([goal.get(label, "")] if goals else []))

    row("tokens/s", [_number(c.tokens_per_s) for c in contenders])
    row("ms a step", [_number(c.step_ms, 2) for c in contenders])
    row("speed-up over plain", [_number(c.speedup, 2, "x") for c in contenders])
    row("  median of the prompts", [_number(c.median_speedup, 2, "x") for c in contenders])
    row("accept length", [_number(c.accept_length, 2) for c in contenders])
    row("speed-up / accept length", [_number(c.speedup_per_accept, 2) for c in contenders])
    row("verifies", [str(c.verifies) for c in contenders])
    row("k (drafts a verify)", [str(c.k) for c in contenders])
    launches = [c.launch for c in contenders]
    row("dispatches a step", ["-" if x is None else str(x.dispatches) for x in launches])
    row("  bytes up, down", ["-" if x is None else f"{x.upload_bytes}, {x.download_bytes}" for x in launches])
    row("  beside the verify", [_number(c.draft_percent, 0, " %") for c in contenders])
    row("exposed host time", [_number(c.exposed_host_ms, 3, " ms") for c in contenders])
    row("  of a step", [_number(c.exposed_host_percent, 2, " %") for c in contenders])
    row("run-ahead", [_number(c.run_ahead, 3) for c in contenders])
    row("compiles after warm-up", [str(c.compiles_after_warmup) for c in contenders])
    row("identical output", [_identical(c) for c in contenders])
    return table


SPEED_NOTE = (
    "tokens/s and ms a step: decoding alone, from a prompt's first token to its last. accept length: tokens a verify, bonus included. "
    "beside the verify: share of a step that a bare step of the target over as many tokens does not take: draft, acceptance, injection. "
    "exposed host time: an iteration's host time during which the device had nothing to do. run-ahead: share of launches made while the one before still ran."
)


def _differences(differences: Mapping[str, Sequence[Difference]]) -> list[Text]:
    lines = []
    for algorithm, found in differences.items():
        for d in found:
            gap = "no gap to measure" if d.logit_gap is None else f"logit gap {d.logit_gap:.2e}"
            kind = f"near tie, gap <= {NEAR_TIE:g}" if d.near_tie else "a real difference"
            lines.append(
                Text(
                    f"{algorithm}, prompt {d.prompt + 1}, token {d.position + 1}: {d.token} for {d.plain_token}, {gap} ({kind})"
                )
            )
    return lines


def _curve_table(costs: Sequence[VerifyCost]) -> Table:
    table = _table("Cost of a verify by its width W (tokens a row)", [f"W = {cost.width}" for cost in costs])
    table.add_row("ms a step", *(f"{cost.step_ms:.2f}" for cost in costs))
    table.add_row("relative to W = 1", *(f"{cost.relative:.2f}x" for cost in costs))
    return table


def decode_tables(bench: DecodeBench) -> RenderableType:
    """All that `jspec bench decode` prints."""
    title = (
        f"{bench.model}, greedy, batch {bench.batch}, up to {bench.max_new_tokens} tokens, {bench.repeat} time(s) each"
    )
    parts: list[RenderableType] = [speed_table(title, bench.contenders, goals=True), *_differences(bench.differences)]
    by_name = {c.algorithm: c for c in bench.contenders}
    if BARE in by_name and by_name[BARE].tokens_per_s:
        ratio = by_name[PLAIN].tokens_per_s / by_name[BARE].tokens_per_s
        parts.append(Text(f"plain over the bare loop: {ratio:.2f}x (goal: at least 0.90x)"))
    parts += [_note(f"prompts: {line}") for line in bench.prompts]
    parts.append(_note(SPEED_NOTE))
    if bench.verify_costs:
        parts += [Text(), _curve_table(bench.verify_costs)]
    return Group(*parts)


def host_tables(costs: Sequence[HostCost]) -> RenderableType:
    """All that `jspec bench host` prints."""
    first = costs[0]
    title = f"Host time of a decode iteration: context {first.context_len}, prompts of {first.prompt_tokens}, page {first.page_size}"
    time = _table(title, [f"{cost.rows} rows" for cost in costs])
    time.add_row("host ms (median)", *(_number(cost.host_ms.median, 3) for cost in costs))
    time.add_row("  p10", *(_number(cost.host_ms.p10, 3) for cost in costs))
    time.add_row("  p90", *(_number(cost.host_ms.p90, 3) for cost in costs))
    time.add_row("goal", *("-" if cost.goal_ms is None else f"<= {cost.goal_ms:.2f}" for cost in costs))
    time.add_row("  plan", *(_number(cost.plan_ms, 3) for cost in costs))
    time.add_row("  pack + dispatch", *(_number(cost.dispatch_ms, 3) for cost in costs))
    time.add_row("  settle", *(_number(cost.settle_ms, 3) for cost in costs))
    time.add_row("CPU ms of the thread", *(_number(cost.cpu_ms, 3) for cost in costs))
    time.add_row("iterations", *(str(cost.iterations) for cost in costs))
    traffic = _table("What crosses in an iteration, counted", [f"{cost.rows} rows" for cost in costs])
    for name, label in (
        ("dispatches", "dispatches"),
        ("uploads", "uploads"),
        ("upload_bytes", "bytes up"),
        ("downloads", "downloads"),
        ("download_bytes", "bytes down"),
    ):
        traffic.add_row(label, *(f"{cost.traffic[name]:g}" for cost in costs))
    short = [
        f"{c.traffic_short_context['upload_bytes']:g} / {c.traffic_short_context['download_bytes']:g}" for c in costs
    ]
    traffic.add_row(f"bytes up / down at context {first.short_context_len}", *short)
    same = all(cost.traffic == cost.traffic_short_context for cost in costs)
    verdict = "Traffic does not depend on context length." if same else "TRAFFIC DEPENDS ON CONTEXT LENGTH."
    note = _note(
        "Host time: wall time of Engine.step without the wait for the device, dispatch included. Parts are medians."
    )
    return Group(time, note, Text(), traffic, Text(verdict, style="" if same else "bold red"))


def _trace_parts(trace: ServeTrace) -> list[RenderableType]:
    lens, contenders = trace.prompt_tokens, trace.contenders
    title = (
        f"{trace.model}, greedy, {trace.requests} requests of {min(lens)} to {max(lens)} tokens and {trace.max_new_tokens} new ones, "
        f"{trace.max_running} at a time, chunks of {trace.max_prefill_tokens}, {trace.rounds} round(s)"
    )
    table = _table(title, [contender_name(c.algorithm, c.mixed).replace(", ", "\n") for c in contenders])
    table.add_row("tokens/s", *(_spread(c.tokens_per_s) for c in contenders))
    table.add_row("  over separate prefill", *(_spread(c.speedup, 2, "x") for c in contenders))
    table.add_row("ms to first token, p50", *(_spread(c.first_token_p50_ms, 0) for c in contenders))
    table.add_row("  p95", *(_spread(c.first_token_p95_ms, 0) for c in contenders))
    table.add_row("ms between tokens, p50", *(_spread(c.between_tokens_p50_ms) for c in contenders))
    table.add_row("  p95", *(_spread(c.between_tokens_p95_ms) for c in contenders))
    table.add_row("  longest", *(_spread(c.between_tokens_max_ms) for c in contenders))
    table.add_row("accept length", *(_number(c.accept_length or None, 2) for c in contenders))
    for field, label in (("prefill", "launches: prefill"), ("mixed", "  mixed"), ("decode", "  decode")):
        table.add_row(label, *(str(getattr(c.launches, field)) for c in contenders))
    table.add_row("chunks before a prompt's last", *(str(c.launches.chunks) for c in contenders))
    table.add_row("retractions", *(str(c.retractions) for c in contenders))
    table.add_row("compiles after warm-up", *(str(c.compiles_after_warmup) for c in contenders))
    table.add_row("identical output", *(_identical(c) for c in contenders))
    how = (
        "as given"
        if trace.arrivals_given
        else "twice what the first contender serves with all requests there from the start"
    )
    return [
        table,
        *_differences(trace.differences),
        *(_note(f"prompts: {line}") for line in trace.prompts),
        _note(f"arrivals: {trace.arrivals_per_s:.3g} a second, exponential gaps, the same for all ({how})"),
        _note(
            "Median of the rounds (lowest-highest). tokens/s: from the first arrival to the last token. To first token: from arrival. Between tokens: tokens "
            "that come together share the time since those before. Launches and chunks: of all rounds. The prefix cache is off here."
        ),
    ]


def _prefix_parts(prefix: WarmPrefix) -> list[RenderableType]:
    title = f"A prefix of {prefix.prefix_tokens} tokens that an earlier request had: {prefix.algorithm}, prompts of {prefix.prompt_tokens}, {prefix.rounds} round(s)"
    table = _table(title, [*(turn.name for turn in prefix.turns), "goal"])
    table.add_row("ms to first token", *(_spread(turn.first_token_ms) for turn in prefix.turns), "")
    table.add_row(
        "times sooner than cold", *(_spread(turn.speedup, 2, "x") for turn in prefix.turns), f">= {WARM_GOAL:g}x"
    )
    cached = [", ".join(str(n) for n in sorted(set(turn.cached_tokens))) for turn in prefix.turns]
    table.add_row(f"cached tokens (pages of {prefix.page_size})", *cached, "")
    same = "yes" if not prefix.differences else f"no: {len(prefix.differences)} of {prefix.rounds}"
    table.add_row("output of the cold one", "", same, "", "yes")
    notes = [_note(prefix.note)] if prefix.note else []
    return [table, *_differences({"the same again": prefix.differences}), *notes]


def _soak_parts(soak: SoakReport) -> list[RenderableType]:
    launches, pages, mib = soak.launches, soak.pages, 2**20
    table = _table(f"{soak.requests} requests in one process, over a worker that computes nothing", [""])
    table.show_header = False
    for label, cell in (
        ("requests/s", _number(soak.requests_per_s)),
        ("seconds", _number(soak.seconds)),
        ("ended", ", ".join(f"{count} by {name}" for name, count in soak.ended.items())),
        ("tokens", str(soak.tokens)),
        ("launches", f"{launches.prefill} prefill, {launches.mixed} mixed, {launches.decode} decode"),
        ("chunks before a prompt's last", str(launches.chunks)),
        ("retractions", str(soak.retractions)),
        ("pages evicted from the cache", str(soak.evicted_pages)),
        ("prompt tokens found in it", str(soak.cached_tokens)),
        ("pages at the end", f"{pages.free} free + {pages.cached} cached of {pages.total}, {pages.locked} locked"),
        ("pages lost", str(pages.lost)),
        ("memory at a tenth", f"{soak.memory_bytes_at_tenth / mib:.1f} MiB"),
        ("memory at the end", f"{soak.memory_bytes_at_end / mib:.1f} MiB"),
        ("  may grow by", f"{soak.memory_growth_allowed_bytes / mib:.1f} MiB"),
    ):
        table.add_row(label, cell)
    verdict = [Text(fault, style="bold red") for fault in soak.faults]
    return [table, *(verdict or [Text("Nothing lost, nothing grows.")])]


def serve_tables(bench: ServeBench) -> RenderableType:
    """All that `jspec bench serve` prints."""
    parts: list[RenderableType] = []
    for made in (
        _trace_parts(bench.trace) if bench.trace is not None else [],
        _prefix_parts(bench.prefix) if bench.prefix is not None else [],
        _soak_parts(bench.soak) if bench.soak is not None else [],
    ):
        parts += [Text(), *made] if parts and made else made
    return Group(*parts)
