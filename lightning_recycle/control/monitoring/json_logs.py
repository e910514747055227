"""Logs as lines of JSON, for what collects them: ``RECYCLE_LOG=json``.

=============  ====================================================================================================
``time``       RFC 3339, UTC, microseconds
``level``      ``DEBUG``, ``INFO``, ``WARNING``, ``ERROR``, ``CRITICAL``
``logger``     the name of the logger, ``lightning_recycle.events`` for the record of the run
``message``    the text; of an event its kind
``host``       the machine, by ``RECYCLE_NODE`` or its host name
``pid``        the process
``rank``       the worker's position, in a worker that has one
``generation`` the generation that a worker is in; of an event, its own
``event``      of an event: all its fields
``exception``  a traceback, if there is one
=============  ====================================================================================================

Concept: the handlers that write to this process' terminal stay where they are and get another formatter, and the
package's logger is at INFO. Files that the user's own handlers write stay as they are. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from enum import Enum
from typing import Any

from lightning_recycle.control.network.addresses import machine_name
from lightning_recycle.errors import ConfigurationError

_LOGGERS = ("", "lightning_recycle", "lightning", "lightning.pytorch", "lightning.fabric")

_described: Callable[[], Mapping[str, int]] = dict


def describe_process(described: Callable[[], Mapping[str, int]]) -> None:
    """From now on each line of this process has the fields of ``described``."""
    global _described
    _described = described


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON; the fields are described above."""

    def __init__(self) -> None:
        super().__init__()
        self._host = machine_name()

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="microseconds")
        line: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "host": self._host,
            "pid": record.process,
            **_described(),
        }
        event = getattr(record, "event", None)
        if isinstance(event, Mapping):
            line |= {"message": event["kind"], "generation": event["generation"], "event": event}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(plain(line))


def install_if_wanted() -> bool:
    """Makes this process log JSON if ``RECYCLE_LOG`` is ``json``; returns whether so.

    Raises ConfigurationError for any other value.
    """
    wanted = os.environ.get("RECYCLE_LOG", "text")
    if wanted not in ("json", "text"):
        raise ConfigurationError(f"RECYCLE_LOG={wanted!r}: use json for lines of JSON, or text, the default.")
    if wanted == "text":
        return False
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(logging.StreamHandler())
    for name in _LOGGERS:
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stderr, sys.stdout):
                handler.setFormatter(JsonFormatter())
    logging.captureWarnings(True)  # lines of the logger "py.warnings"
    package = logging.getLogger("lightning_recycle")
    if package.level == logging.NOTSET:
        package.setLevel(logging.INFO)
    return True


def plain(value: Any) -> Any:
    """``value`` as JSON has it.

    Objects for dataclasses, lists for tuples, values for enums, null for NaN and infinity, and text for all else.
    """
    if isinstance(value, Enum):  # before the others: one of texts is a text
        return plain(value.value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list, set, frozenset)):
        return [plain(item) for item in value]
    return str(value)
