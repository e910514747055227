"""Logs as lines of JSON (``RECYCLE_LOG=json``), and records sent by workers.

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

Log handlers configured under the main guard exist in the launching process alone, so they write the workers' records,
too. A record is one message of a shared socket: it arrives whole or not at all, whenever its sender is killed. While
the socket is full, records are dropped and counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import select
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from enum import Enum
from multiprocessing import reduction
from multiprocessing.pool import RemoteTraceback  # type: ignore[attr-defined]
from typing import Any

from lightning_recycle.control.network.addresses_and_keys import machine_name
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.lightning_names import name_here

log = logging.getLogger(__name__)

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
    """Logs JSON if ``RECYCLE_LOG`` is ``json``; ConfigurationError for other values."""
    wanted = os.environ.get("RECYCLE_LOG", "text")
    if wanted not in ("json", "text"):
        remedy = "use json for lines of JSON, or text, the default"
        raise ConfigurationError.for_option("", "RECYCLE_LOG", wanted, remedy, ("json", "text"))
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
    """``value`` in types that JSON has.

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


# ---------------------------------------------------------------------- records of workers

_BUFFER_BYTES = 1 << 20  # wanted; Linux's default limit is 208 KiB
_RECORD_BYTES = 100_000  # fit into any buffer; longer texts are cut
_PATIENCE_MILLISECONDS = 100  # for room in a full socket, once until there is some
_CLOSE_SECONDS = 5.0  # for handlers to write what has arrived


class LogForwarding:
    """The launching process's side; pickled, it arrives as :class:`LogSender`."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._handled = threading.local()
        describe_process(lambda: getattr(self._handled, "origin", {}))
        self._thread = threading.Thread(target=self._receive, name="recycle-log-records", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits until the records of workers, which have ended, are written."""
        with contextlib.suppress(OSError):
            self._sender.shutdown(socket.SHUT_WR)
        self._thread.join(_CLOSE_SECONDS)
        self._sender.close()
        self._receiver.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return LogSender, (reduction.DupFd(self._sender.fileno()),)

    def _receive(self) -> None:
        while True:
            try:
                data = self._receiver.recv(1 << 20)
            except OSError:
                return  # closed while a handler took too long
            if not data:
                return
            try:
                self._handle(**json.loads(data))
            except Exception:  # of a user's filter, for example; as `logging` treats errors of handlers
                traceback.print_exc()

    def _handle(self, fields: dict[str, Any], origin: Mapping[str, int], dropped: int) -> None:
        self._handled.origin = origin
        if dropped:
            log.warning(
                "%d log records of process %s are missing: the handlers of this process took too long.",
                dropped,
                fields["process"],
            )
        if fields["exc_text"] is not None:  # some formatters and handlers look at `exc_info` only
            error = RemoteTraceback(fields["exc_text"])
            fields["exc_info"] = (RemoteTraceback, error, None)
        logging.getLogger(name_here(fields["name"])).handle(logging.makeLogRecord(fields))


class LogSender:
    """A worker's side; ``descriptor``: the socket."""

    def __init__(self, descriptor: Any) -> None:
        self._descriptor = descriptor

    def install(self, origin: Callable[[], Mapping[str, int]]) -> None:
        """Replaces the handlers of this process; may be called once.

        ``origin`` returns the worker's rank and generation, for lines of JSON.
        """
        for logger in (logging.root, *logging.root.manager.loggerDict.values()):
            if isinstance(logger, logging.Logger):  # otherwise it is a place for a logger
                logger.handlers.clear()
                logger.propagate = True
        logging.root.addHandler(_Sender(socket.socket(fileno=self._descriptor.detach()), origin))


class _Sender(logging.Handler):
    def __init__(self, connection: socket.socket, origin: Callable[[], Mapping[str, int]]) -> None:
        super().__init__()
        self._connection, self._origin = connection, origin
        self._room = select.poll()
        self._room.register(connection, select.POLLOUT)
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = {"fields": _plain_fields(record), "origin": dict(self._origin()), "dropped": self._dropped}
            data = json.dumps(message, ensure_ascii=False).encode(errors="backslashreplace")
        except Exception:
            self.handleError(record)
            return
        self._dropped = 0 if self._send(data) else self._dropped + 1

    def _send(self, data: bytes) -> bool:
        while True:
            try:
                self._connection.send(data, socket.MSG_DONTWAIT)
                return True
            except BlockingIOError:
                if self._dropped or not self._room.poll(_PATIENCE_MILLISECONDS):
                    return False
            except OSError:  # the run is over, or what came with the record as `extra` is too large
                return False


def _plain_fields(record: logging.LogRecord) -> dict[str, Any]:
    """The attributes of ``record`` as JSON, with arguments merged into the message."""
    text = record.exc_text
    if record.exc_info and not text:
        text = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
    texts = {"msg": record.getMessage(), "exc_text": text, "stack_info": record.stack_info}
    most = _RECORD_BYTES // 4 // len(texts)  # characters; in UTF-8 each has up to 4 bytes
    cut = {name: _cut(value, most) for name, value in texts.items()}
    return {**{name: plain(value) for name, value in vars(record).items()}, **cut, "args": None, "exc_info": None}


def _cut(text: str | None, most: int) -> str | None:
    if text is None or len(text) <= most:
        return text
    return f"{text[:most]} [... {len(text) - most:,} more characters]"
