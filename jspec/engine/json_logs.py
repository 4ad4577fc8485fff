"""Log records as JSON, one object a line."""

import datetime
import json
import logging

_USUAL = {*vars(logging.LogRecord("", 0, "", 0, "", None, None)), "message", "asctime", "taskName"}
"""What every record has; whatever else one has was given to it as `extra`."""


class JsonFormatter(logging.Formatter):
    """`{"time", "level", "event", "rid", ...}`: the record's `extra` fields as they are, time in UTC. A record that is no event has its message instead.

    Makes a handler of `logging` write the events of `jspec.engine.events` for machines; it formats the records of others, too.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {"time": time.isoformat(timespec="milliseconds"), "level": record.levelname}
        fields = {name: value for name, value in vars(record).items() if name not in _USUAL}
        if "event" not in fields:
            line["message"] = record.getMessage()
        line |= fields
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
