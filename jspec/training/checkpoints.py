"""What a killed run goes on from: parameters and optimizer state by step (orbax), and the options they belong to."""

import contextlib
import dataclasses
import json
import logging
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import orbax.checkpoint as ocp

_KEPT = 2


class TrainState(NamedTuple):
    """All that changes from step to step."""

    params: Any  # of the draft: what is trained
    opt_state: Any


class Checkpoints:
    """The checkpoints of one run. A step is there whole or not at all: orbax writes it aside and renames it."""

    def __init__(self, folder: pathlib.Path, facts: Mapping[str, Any]):
        """`facts`: whatever must be the same for a state to be gone on from; compared with those of the run that `folder` holds.

        Raises:
            ValueError: they differ.
        """
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        _check_facts(self.folder / "run.json", facts)
        options = ocp.CheckpointManagerOptions(max_to_keep=_KEPT, enable_async_checkpointing=False)
        with _quiet():
            self._manager = ocp.CheckpointManager(self.folder / "steps", options=options)

    @property
    def latest(self) -> int | None:
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState) -> None:
        with _quiet():
            self._manager.save(step, args=ocp.args.StandardSave(state._asdict()))

    def restore(self, like: TrainState) -> TrainState:
        """The newest state, placed on devices as `like` is.

        Raises:
            ValueError: the checkpoint is damaged.
        """
        step = self.latest
        try:
            with _quiet():
                found = self._manager.restore(step, args=ocp.args.StandardRestore(like._asdict()))
        except Exception as error:  # whatever the storage below raises
            raise ValueError(
                f"{self.folder / 'steps' / str(step)} cannot be read ({error}): delete this folder to go on from the checkpoint before it"
            ) from error
        return TrainState(**found)

    def close(self) -> None:
        self._manager.close()


def _check_facts(file: pathlib.Path, facts: Mapping[str, Any]) -> None:
    wanted = json.loads(json.dumps(facts, default=dataclasses.asdict))
    if not file.exists():
        file.write_text(json.dumps(wanted, indent=2) + "\n", "utf-8")
        return
    found = json.loads(file.read_text("utf-8"))
    for name in sorted(set(wanted) | set(found)):
        if found.get(name) != wanted.get(name):
            raise ValueError(
                f"{name}={wanted.get(name)!r}, but {file} says that this run has {name}={found.get(name)!r}: "
                "a run goes on as it began; give the same options or another work directory"
            )


@contextlib.contextmanager
def _quiet():
    """Orbax tells absl's log much that is not for people."""
    log = logging.getLogger("absl")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
