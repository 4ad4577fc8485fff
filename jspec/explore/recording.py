"""A path as a recording, for `jspec trace`: time in it is the number of the step."""

from pathlib import Path as File
from typing import Any

from jspec.explore.moves import Moves
from jspec.explore.path import Abort, Path, Replay, Submit
from jspec.scheduler import plan, settle_oldest
from jspec.state import GenerationBatchResult
from jspec.trace.format import Header, TraceWriter, digest
from jspec.trace.recorder import planned_frame, settled_frame


def record_path(path: Path, file: str | File) -> None:
    """Writes the frames of a path, up to the transition that does not hold; a plan that gave a launch is among them, although what it led to is not.

    Args:
        path: from an exploration.
        file: is created, or written over.

    Raises:
        OSError: the file cannot be written.
    """
    config, moves = path.config, Moves(path.config)
    header = Header(
        limits=moves.plan_limits,
        max_running=config.rows,
        num_pages=config.pages,
        page_size=config.page_size,
        num_ranks=1,
        verify_width=config.verify_width,
        output_stride=config.verify_width,
        algorithm="explore",
        model="any",
        carry="none",
        started_at=0.0,
    )
    writer = TraceWriter(file, header)
    for frame in _frames(path, moves):
        writer.write(frame)
    writer.write(["end", len(path.inputs)])
    writer.close()


def _frames(path: Path, moves: Moves):
    run, unsettled = Replay(moves), list[GenerationBatchResult]()
    prompt_keys: dict[int, tuple[bytes, ...]] = {}
    for now, given in enumerate(path.inputs):
        before = run.node.state
        if isinstance(given, Submit):
            run.submit(given.request)
            prompt_keys[given.serial] = moves.contents.prompt_keys(given.request)
            prompt = " ".join(map(str, given.prompt))
            lens = [len(given.prompt), given.max_new_tokens, given.priority]
            names: list[Any] = [f"r{given.serial}", 0, prompt]
            stops, keys = list(given.stop_token_ids), list(prompt_keys[given.serial])
            yield ["submit", now, 0, given.serial, *names, *lens, stops, keys]
            continue
        if isinstance(given, Abort):
            run.abort(given.serial)
            yield ["abort", now, 0, given.serial]
            continue
        planned = plan(before, limits=moves.plan_limits)
        yield ["plan", [now] * 3, 0, [planned_frame(*planned)]]
        if given.result is not None:
            unsettled.append(given.result)
        digits = given.digits
        run.iterate(lambda launch, digits=digits: digits)  # type: ignore[misc]
        if run.frames[-1].violation is not None:
            return
        if given.settles:
            result = unsettled.pop(0)
            state, launched, settled = settle_oldest(planned.state, result)
            after = digest(run.node.state)
            yield [
                "settle",
                [now] * 3,
                [settled_frame(state, launched, settled, result, moves.ends, prompt_keys, after)],
            ]
