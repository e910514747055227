"""What every worker is given: the Trainer and what runs in it, pickled once, in a file that no folder has.

Workers inherit its descriptor; replacements do so at any time of the run. It is gone with the last process that
holds it, however that ends, so there is nothing to clean up.
"""

from __future__ import annotations

import errno
import inspect
import mmap
import os
import pickle
import tempfile
from functools import partial
from multiprocessing import reduction
from types import FunctionType
from typing import IO, Any

import torch
from lightning.pytorch.profilers import PyTorchProfiler

from lightning_recycle.errors import ConfigurationError

__all__ = ["Inherited", "Payload"]


class Payload:
    """A value for all workers; in a worker it arrives as :class:`Inherited`.

    It lies in memory where the system has files there (Linux), whatever room TMPDIR has, else in a file without a name
    in TMPDIR.

    Args:
        value: what they are given.

    Raises:
        ConfigurationError: if it cannot be pickled, or there is no room for it.
    """

    def __init__(self, value: Any) -> None:
        self._file = _nameless_file()
        try:
            _Pickler(self._file).dump(value)
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
            raise ConfigurationError(
                f"The Trainer, model or data cannot be sent to the worker processes: {type(error).__name__}: {error}."
                " Define classes and functions at module level, and open files and connections in setup() instead of"
                " __init__."
            ) from error

    def close(self) -> None:
        self._file.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Only as an argument of a new process: what travels is the descriptor."""
        return Inherited, (reduction.DupFd(self._file.fileno()),)


class Inherited:
    """A :class:`Payload` in a worker."""

    def __init__(self, descriptor: Any) -> None:
        self._descriptor = descriptor

    def load(self) -> Any:
        """The value; may be called once. The position in the file is common to all processes, so it is mapped."""
        descriptor = self._descriptor.detach()
        try:
            with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as data:
                return pickle.loads(data)
        finally:
            os.close(descriptor)


def _nameless_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("lightning_recycle"), "w+b")
    return tempfile.TemporaryFile(prefix="lightning_recycle_")


class _Pickler(pickle.Pickler):
    """Also pickles the schedule of torch's profiler, a closure that ``PyTorchProfiler`` holds."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, FunctionType) or obj.__qualname__ != "schedule.<locals>.schedule_fn":
            return NotImplemented
        if obj is PyTorchProfiler._default_schedule():
            return PyTorchProfiler._default_schedule, ()  # recognised by its identity
        return partial(torch.profiler.schedule, **inspect.getclosurevars(obj).nonlocals), ()
