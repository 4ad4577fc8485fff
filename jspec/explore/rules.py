"""What a transition must leave alone, read off the tables."""

from typing import NamedTuple

from jspec.explore.node import Node
from jspec.explore.violation import require
from jspec.state import SchedulerState


class Columns(NamedTuple):
    """Columns of the tables, as lists: at this size quicker than arrays."""

    serial: list[int]
    epoch: list[int]
    prompt_len: list[int]
    output_len: list[int]
    max_new_tokens: list[int]
    to_finish: list[bool]
    committed: list[int]
    allocated: list[int]

    @classmethod
    def of(cls, state: SchedulerState) -> "Columns":
        """Those of a state."""
        r, ledger = state.requests, state.ledger
        columns = (r.serial, r.epoch, r.prompt_len, r.output_len, r.max_new_tokens, r.to_finish)
        return cls(*(array.tolist() for array in (*columns, ledger.kv_committed_len, ledger.kv_allocated_len)))


def outputs_of(state: SchedulerState) -> dict[int, int]:
    """Tokens that each request has emitted, by serial."""
    requests = state.requests
    found = {
        serial: output
        for serial, output in zip(requests.serial.tolist(), requests.output_len.tolist(), strict=True)
        if serial
    }
    found.update((request.serial, request.output_len) for request in state.waiting)
    return found


def require_same_requests(after: Node, outputs: dict[int, int], name: str) -> None:
    """The requests in the state are those that live, each once, with the tokens that they had; one that is new has none."""
    held = [serial for serial in after.state.requests.serial.tolist() if serial]
    there = [*held, *(request.serial for request in after.state.waiting)]
    require(
        sorted(there) == [serial for serial, _ in after.live],
        name,
        found=sorted(there),
        wanted=[s for s, _ in after.live],
    )
    for serial, output in outputs_of(after.state).items():
        require(output == outputs.get(serial, 0), name, serial=serial, tokens=output, wanted=outputs.get(serial, 0))


def require_rows_kept(before: SchedulerState, after: SchedulerState, name: str) -> None:
    """What a user does touches no row, but to mark it."""
    require(after.ledger is before.ledger and after.launched is before.launched, name)
    require(bool((after.requests.serial == before.requests.serial).all()), name)
    require(bool((after.requests.output_len == before.requests.output_len).all()), name)


def require_kept_row(before: SchedulerState, after: SchedulerState, row: int) -> None:
    """A row that keeps its request through a plan: what it has committed stays, but for the chunk it goes on with, and its pages do, too."""
    old, new = before.ledger, after.ledger
    require(after.requests.serial[row] == before.requests.serial[row], "a request keeps its row", row=row)
    require(after.requests.epoch[row] == before.requests.epoch[row], "a request keeps its row", row=row)
    require(bool(new.kv_allocated_len[row] >= old.kv_allocated_len[row]), "an allocation never shrinks", row=row)
    filling = old.kv_committed_len[row] < before.requests.fill_len[row]
    same = new.kv_committed_len[row] == old.kv_committed_len[row]
    require(bool(filling or same), "a plan commits prompts only", row=row)
    require(bool(after.requests.to_finish[row] == before.requests.to_finish[row]), "an abort is not forgotten", row=row)
