"""What every worker is given: the Trainer and what runs in it, pickled once, in a file that no folder has.

Workers inherit its descriptor; replacements do so at any time of the run. It is gone with the last process that
holds it, however that ends, so there is nothing to clean up. What of the user's script is in it, and what workers
find for themselves, is the subject of :mod:`lightning_recycle.main_module`.
"""

from __future__ import annotations

import errno
import mmap
import os
import pickle
import sys
import tempfile
from multiprocessing import reduction
from typing import IO, Any

from lightning.pytorch.profilers import PyTorchProfiler

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.launch.log_forwarding import LogForwarding, LogSender
from lightning_recycle.main_module import MainModule, MainPickler, enter_main

__all__ = ["Inherited", "Payload", "dump", "load", "not_sent"]


class Payload:
    """A value for all workers; in a worker it arrives as :class:`Inherited`.

    It lies in memory where the system has files there (Linux), whatever room TMPDIR has, else in a file without a name
    in TMPDIR.

    Args:
        value: what they are given.
        main: what they find in the user's script.

    Attributes:
        logs: receives the log records of the workers.

    Raises:
        ConfigurationError: if it cannot be pickled, or there is no room for it.
    """

    def __init__(self, value: Any, main: MainModule) -> None:
        self._file = _nameless_file()
        self.logs: LogForwarding | None = None
        try:
            dump(value, main, self._file)
            self._file.flush()
        except Exception as error:
            size = self._file.tell()
            self.close()
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise ConfigurationError(
                    f"The Trainer, model and data do not fit into {tempfile.gettempdir()} (no room after {size:,}"
                    " bytes): set TMPDIR to a folder with more room, or let the dataset open its files in the workers"
                    " instead of holding the data."
                ) from error
            raise not_sent(error) from error
        self.logs = LogForwarding()

    def close(self) -> None:
        """To be called when all workers have ended."""
        self._file.close()
        if self.logs is not None:
            self.logs.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Only as an argument of a new process: what travels is the descriptor."""
        return Inherited, (reduction.DupFd(self._file.fileno()), self.logs)


class Inherited:
    """A :class:`Payload` in a worker."""

    def __init__(self, descriptor: Any, logs: LogSender) -> None:
        self._descriptor, self.logs = descriptor, logs

    def load(self) -> Any:
        """The value; may be called once. The position in the file is common to all processes, so it is mapped."""
        descriptor = self._descriptor.detach()
        try:
            with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as data:
                return load(data)
        finally:
            os.close(descriptor)


def dump(value: Any, main: MainModule, file: IO[bytes]) -> None:
    """Pickles ``value``, and what of the user's script comes with it, for :func:`load`."""
    pickler = _Pickler(file, main)
    pickler.dump((value, pickler.definitions))  # these are complete once the value is pickled


def load(data: Any) -> Any:
    """The value that was pickled as ``data``, with the user's ``__main__`` around it; once in a process."""
    enter_main()
    value, definitions = pickle.loads(data)
    vars(sys.modules["__main__"]).update(definitions)
    return value


def not_sent(error: Exception) -> ConfigurationError:
    """The error that says that ``error`` was raised when the Trainer, model and data were pickled."""
    return ConfigurationError(
        f"The Trainer, model or data cannot be sent to the worker processes: {type(error).__name__}: {error}."
        " Open files and connections in setup() instead of __init__, and keep what cannot be pickled out of the"
        " global variables that the functions of your script read."
    )


def _nameless_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("lightning_recycle"), "w+b")
    return tempfile.TemporaryFile(prefix="lightning_recycle_")


class _Pickler(MainPickler):
    """Keeps the identity of the default schedule of ``PyTorchProfiler``, by which it is recognised."""

    def reducer_override(self, value: Any) -> Any:
        if value is PyTorchProfiler._default_schedule():
            return PyTorchProfiler._default_schedule, ()
        return super().reducer_override(value)
