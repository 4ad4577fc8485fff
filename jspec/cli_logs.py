"""What the engine logs, on standard error, while a command runs."""

import logging

from jspec.engine.json_logs import JsonFormatter

LEVELS = ("debug", "info", "warning", "error")


class LogsOnStderr:
    """A context in which jspec's log records are printed on standard error.

    Args:
        level: least level that is printed, one of `LEVELS`. None: none is, unless `as_json` asks for them, from "info" on.
        as_json: one JSON object a line.

    Raises:
        ValueError: there is no such level.
    """

    def __init__(self, level: str | None, *, as_json: bool):
        if level is not None and level not in LEVELS:
            raise ValueError(f"log_level={level!r} must be one of {', '.join(LEVELS)}")
        self._level = level or ("info" if as_json else None)
        self._formatter = (
            JsonFormatter() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
        )
        self._logger = logging.getLogger("jspec")

    def __enter__(self) -> "LogsOnStderr":
        self._before = self._logger.level
        self._handler = logging.StreamHandler()
        self._handler.setFormatter(self._formatter)
        if self._level is not None:
            self._logger.addHandler(self._handler)
            self._logger.setLevel(self._level.upper())
        return self

    def __exit__(self, *_) -> None:
        self._logger.removeHandler(self._handler)
        self._logger.setLevel(self._before)
