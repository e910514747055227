"""Payload of a worker: environment, settings, pickled Trainer; its log records.

The fork server has the environment of the first run, so each run's variables travel with every worker, before it
imports the user's script. Global settings (dtype, precision, determinism, OmegaConf's resolvers, warning filters, log
levels) made under the script's main guard reach the launching process alone. The Trainer and its function are pickled
once, in a file in memory whose descriptor workers inherit.

Log handlers configured under the main guard exist in the launching process alone, so they write the workers' records,
too. A record is one message of a shared socket: it arrives whole or not at all, whenever its sender is killed. While
the socket is full, records are dropped and counted.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import logging
import mmap
import os
import pickle
import select
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.pool import RemoteTraceback  # type: ignore[attr-defined]
from types import FunctionType
from typing import IO, Any

import cloudpickle
import torch
from omegaconf.basecontainer import BaseContainer
from torch import Tensor

from lightning_recycle.control.monitoring.json_logs import describe_process, plain
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.lightning_names import name_here
from lightning_recycle.pickling import MainModule, MainPickler, enter_main
from lightning_recycle.session.lightning_internals import GlobalStateSnapshot, default_profiler_schedule

log = logging.getLogger(__name__)

_THREADS = "OMP_NUM_THREADS"
_threads_at_import = os.environ.get(_THREADS)  # in a worker: what torch has gone by in the fork server
_has_entered = False


class NameWithEnvironment(str):
    """The name of a worker process, which brings its environment along.

    A process is sent its name first, before it imports the main module (``multiprocessing.spawn.prepare``).
    """

    environment: Mapping[str, str]

    def __new__(cls, name: str, environment: Mapping[str, str]) -> NameWithEnvironment:
        made = super().__new__(cls, name)
        made.environment = environment
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _enter, (str(self), dict(self.environment))


def _enter(name: str, environment: dict[str, str]) -> str:
    """Sets the environment in the worker once, as its name comes twice."""
    global _has_entered
    if not _has_entered:
        _has_entered = True
        for variable in os.environ.keys() - environment.keys():
            del os.environ[variable]
        os.environ.update(environment)
    return name


def set_num_threads(workers: int) -> None:
    """Lets torch use the number of threads in this worker's environment.

    If there is none, this worker's share of the processors, and for child processes as well.
    """
    wanted = os.environ.get(_THREADS)
    if wanted is None:
        wanted = os.environ[_THREADS] = str(max(1, len(os.sched_getaffinity(0)) // workers))
    if wanted != _threads_at_import:
        with contextlib.suppress(ValueError):  # a list, or nonsense, which OpenMP itself takes or leaves
            torch.set_num_threads(int(wanted))


@contextlib.contextmanager
def modules_found() -> Iterator[None]:
    """Python processes that start in the block find this one's modules.

    The fork server does not get ``sys.path`` before Python 3.13; and the working directory, such as a checkout of this
    package, would come first (before Python 3.11 it still does).
    """
    wanted = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# ---------------------------------------------------------------------- settings


@dataclass(frozen=True)
class Settings:
    """Settings of a process, captured there and restored in another one."""

    lightning: Any
    dtype: torch.dtype
    matmul_precision: str
    filters: tuple[Any, ...]
    levels: dict[str, int]
    disabled: int
    resolvers: dict[str, Any]

    @classmethod
    def capture(cls) -> Settings:
        known = {name: logging.getLogger(name) for name in ["", *logging.root.manager.loggerDict]}
        return cls(
            lightning=GlobalStateSnapshot.capture(),
            dtype=torch.get_default_dtype(),
            matmul_precision=torch.get_float32_matmul_precision(),
            filters=tuple(warnings.filters),
            levels={name: logger.level for name, logger in known.items() if logger.level != logging.NOTSET},
            disabled=logging.root.manager.disable,
            resolvers={
                name: resolver for name, resolver in BaseContainer._resolvers.items() if _is_own(name, resolver)
            },
        )

    def restore(self) -> None:
        self.lightning.restore()
        torch.set_default_dtype(self.dtype)
        torch.set_float32_matmul_precision(self.matmul_precision)
        # The script's own logger, where multiprocessing has imported the script under another name.
        logger = logging.root.manager.loggerDict["__main__"] = logging.getLogger("__mp_main__")
        logger.name = "__main__"
        for name, level in self.levels.items():
            logger = logging.getLogger(name_here(name))
            if logger.level != level:  # each change empties the caches of all loggers
                logger.setLevel(level)
        logging.disable(self.disabled)
        BaseContainer._resolvers.update(self.resolvers)
        warnings.filters[:] = self.filters  # type: ignore[index]
        with warnings.catch_warnings():
            pass  # lets Python know that the filters have changed: it remembers what it has shown


def _is_own(name: str, resolver: Any) -> bool:
    """Whether a resolver is none of OmegaConf's, and can be sent."""
    if name.startswith("oc."):
        return False
    try:
        cloudpickle.dumps(resolver)
    except Exception as error:
        log.debug("The resolver %r stays in this process: %s", name, error)
        return False
    return True


def ignore_deprecations_of_lightning() -> None:
    """Hides newer torch's deprecations in Lightning 2.6."""
    warnings.filterwarnings("ignore", message=r".*treespec, LeafSpec.*")


def ignore_untrue_warnings() -> None:
    """Hides warnings of Lightning that do not hold in a worker."""
    ignore_deprecations_of_lightning()
    # Data is addressed: any epoch can resume in the middle.
    warnings.filterwarnings("ignore", message=r"(?s).*ended before the epoch ended and your dataloader is not resum.*")
    # Every PipelineModule has a validation_step, whether or not validation is wanted.
    warnings.filterwarnings("ignore", "You defined a `validation_step` but have no `val_dataloader`")


# ---------------------------------------------------------------------- Trainer, module and data


class WorkerPayload:
    """A value for all workers, in a nameless file in memory; there a ReceivedPayload.

    Raises ConfigurationError if it cannot be pickled.
    """

    def __init__(self, value: Any, main: MainModule) -> None:
        self._file: IO[bytes] = os.fdopen(os.memfd_create("lightning_recycle"), "w+b")
        self.logs: LogForwarding | None = None
        try:
            dump(value, main, self._file)
        except ConfigurationError:
            self.close()
            raise
        self.logs = LogForwarding()

    def close(self) -> None:
        self._file.close()
        if self.logs is not None:
            self.logs.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Only as an argument of a new process, to which the descriptor travels."""
        return ReceivedPayload, (reduction.DupFd(self._file.fileno()), self.logs)


class ReceivedPayload:
    """A :class:`WorkerPayload` in a worker."""

    def __init__(self, descriptor: Any, logs: LogSender) -> None:
        self._descriptor, self.logs = descriptor, logs

    def load(self) -> Any:
        """The value; may be called once.

        The position in the file is common to all processes, so it is mapped.
        """
        descriptor = self._descriptor.detach()
        try:
            with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as data:
                return load(data)
        finally:
            os.close(descriptor)


def dump(value: Any, main: MainModule, file: IO[bytes]) -> None:
    """Pickles ``value``, whose first item is the Trainer's call, for :func:`load`.

    Raises ConfigurationError with the path of an unpicklable member.
    """
    try:
        _dump(value, main, file)
        file.flush()
    except Exception as error:
        raise ConfigurationError(
            f"{_find_unpicklable(value, main) or 'The Trainer, model or data'} cannot be sent to the worker processes:"
            f" {type(error).__name__}: {error}. Open files and connections in setup() instead of __init__, and keep"
            " what cannot be pickled out of the global variables that the functions of your script read."
        ) from error


def _dump(value: Any, main: MainModule, file: Any) -> None:
    pickler = _PayloadPickler(file, main)
    pickler.dump((value, pickler.definitions))  # these are complete once the value is pickled


def load(data: Any) -> Any:
    """The value pickled as ``data``, with the user's ``__main__``; once in a process."""
    enter_main()
    value, definitions = pickle.loads(data)
    vars(sys.modules["__main__"]).update(definitions)
    return value


class _PayloadPickler(MainPickler):
    """Keeps the identity of ``PyTorchProfiler``'s default schedule."""

    def reducer_override(self, value: Any) -> Any:
        if value is default_profiler_schedule()():
            return default_profiler_schedule(), ()
        return super().reducer_override(value)


# ---------------------------------------------------------------------- what cannot be sent


class _NullFile(io.RawIOBase):
    def write(self, data: Any) -> int:
        return memoryview(data).nbytes


def _find_unpicklable(payload: Any, main: MainModule) -> str | None:
    """Path of the member that cannot be pickled, such as ``model.helpers['db']``.

    Members are pickled one by one, down to the one in which nothing else fails.
    """
    call = payload[0] if isinstance(payload, tuple) and payload else None
    roots = dict(getattr(call, "arguments", {}))
    trainer = getattr(call, "trainer", None)
    if trainer is not None:
        roots |= {"trainer.callbacks": trainer.callbacks, "trainer.loggers": trainer.loggers, "trainer": trainer}
    seen: set[int] = set()

    def path_from(path: str, value: Any) -> str | None:
        if id(value) in seen or isinstance(value, Tensor):
            return None
        seen.add(id(value))
        try:
            _dump(value, main, _NullFile())
        except Exception:  # of whatever kind: the caller has the one that is reported
            with contextlib.suppress(Exception):  # by one that shows nothing of what it has
                inner = (path_from(f"{path}{step}", member) for step, member in _members(value))
                return next(filter(None, inner), path)
            return path
        return None

    return next(filter(None, (path_from(name, value) for name, value in roots.items())), None)


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """Objects that are pickled with ``value``, each with its path."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", member) for key, member in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", member) for index, member in enumerate(value))
    elif isinstance(value, FunctionType):
        variables = inspect.getclosurevars(value)
        for name, member in {**variables.globals, **variables.nonlocals}.items():
            yield f", which uses the variable {name}", member
    else:
        own = getattr(value, "__getstate__", None)  # objects have one from Python 3.11 on
        state = own() if callable(own) else getattr(value, "__dict__", None)
        for name, member in (state if isinstance(state, dict) else {}).items():
            if name == "_modules":
                yield from ((f".{child}", module) for child, module in member.items())
            else:
                yield f".{name}", member


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
