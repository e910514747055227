"""Log records of local workers, written by the handlers of the launching process.

Handlers that a script configures under its main guard exist in the launching process alone. A record is one message of
a socket that all workers share: it arrives whole or not at all, whenever its sender is killed. Training does not wait
for slow handlers: while the socket is full, records are dropped and counted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import select
import socket
import threading
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import reduction
from multiprocessing.pool import RemoteTraceback  # type: ignore[attr-defined]
from typing import Any

from lightning_recycle.control.monitoring.json_logs import describe_process, plain
from lightning_recycle.lightning_names import name_here

log = logging.getLogger(__name__)

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
