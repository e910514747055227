"""The worker processes of this machine: how they are started, watched and ended."""

from __future__ import annotations

import contextlib
import inspect
import io
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.context import BaseContext
from types import FunctionType
from typing import Any

import torch
from lightning.pytorch.profilers import PyTorchProfiler

from lightning_recycle.control.client import EXIT_STOPPED
from lightning_recycle.errors import ConfigurationError, WorkerStartError

__all__ = ["Crew", "LocalWorker", "process_context"]

_EXIT_SECONDS = 10.0  # for a killed process to be gone


def process_context() -> BaseContext:
    """A fork server that has done the slow imports; spawn on systems without one."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning_recycle.strategy", "lightning_recycle.launch.worker_process"])
    return context


class LocalWorker:
    """A worker process on this machine that runs ``target(argument)``."""

    def __init__(self, context: BaseContext, target: Callable[[Any], None], argument: Any, name: str) -> None:
        # Not daemonic: DataLoader processes are its children.
        self._process = context.Process(target=target, args=(argument,), name=name, daemon=False)  # type: ignore[attr-defined]
        try:
            self._process.start()
        except RuntimeError as error:
            if "bootstrapping phase" in str(error):
                raise WorkerStartError(
                    "The script that calls trainer.fit() is imported again by the workers and has no main guard."
                    " Put the code that runs under: if __name__ == '__main__':"
                ) from error
            raise
        self.sentinel: int = self._process.sentinel
        self._released = False

    @property
    def pid(self) -> int | None:
        pid: int | None = self._process.pid
        return pid

    def describe_exit(self, timeout: float) -> str | None:
        """How the process ended, or None if it is alive after ``timeout`` seconds."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            return None
        if code < 0:
            return f"it was killed by {signal.Signals(-code).name}"
        return "it was told to stop" if code == EXIT_STOPPED else f"it exited with code {code}"

    def kill(self) -> None:
        if self._process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def release(self) -> None:
        """Lets the crew close it once it has ended."""
        self._released = True

    @property
    def is_over(self) -> bool:
        """Whether it was released and has ended."""
        return self._released and self._process.exitcode is not None

    def close(self) -> None:
        """Frees its descriptors; it must have ended, and may not be used any more."""
        with contextlib.suppress(ValueError):  # not even killing ended it, so it cannot be closed
            self._process.close()


class _Pickler(pickle.Pickler):
    """Also pickles the schedule of torch's profiler, a closure that ``PyTorchProfiler`` holds."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, FunctionType) or obj.__qualname__ != "schedule.<locals>.schedule_fn":
            return NotImplemented
        if obj is PyTorchProfiler._default_schedule():
            return PyTorchProfiler._default_schedule, ()  # recognised by its identity
        return partial(torch.profiler.schedule, **inspect.getclosurevars(obj).nonlocals), ()


class Crew:
    """All worker processes that one run starts here. Use it as a context manager: none survives it.

    Args:
        target: what a worker runs; takes one argument.
        payload: what every worker needs; written once to a private file instead of to one pipe per worker.

    Raises:
        ConfigurationError: if the payload cannot be pickled.
    """

    def __init__(self, target: Callable[[Any], None], payload: Any) -> None:
        self._target = target
        self._context = process_context()
        self._workers: list[LocalWorker] = []
        self._lock = threading.Lock()
        self._closed = False
        try:
            buffer = io.BytesIO()
            _Pickler(buffer).dump(payload)
            data = buffer.getvalue()
        except Exception as error:
            raise ConfigurationError(
                f"The Trainer, model or data cannot be sent to the worker processes: {type(error).__name__}: {error}."
                " Define classes and functions at module level, and open files and connections in setup() instead of"
                " __init__."
            ) from error
        fd, self.payload_path = tempfile.mkstemp(prefix="lightning_recycle_", suffix=".pickle")
        with os.fdopen(fd, "wb") as file:
            file.write(data)

    def start(self, argument: Any, name: str) -> LocalWorker:
        """Starts a worker; callable from any thread.

        Raises:
            WorkerStartError: if the run is over, or workers cannot be started from here at all.
        """
        worker = LocalWorker(self._context, self._target, argument, name)
        with self._lock:
            if not self._closed:
                for over in [other for other in self._workers if other.is_over]:
                    self._workers.remove(over)
                    over.close()
            self._workers.append(worker)
            if not self._closed:
                return worker
        worker.kill()
        raise WorkerStartError("The run is over.")

    def end(self, patience: float) -> None:
        """Waits ``patience`` seconds for all workers to end, then kills the rest."""
        with self._lock:
            self._closed = True
            workers = list(self._workers)
        deadline = time.monotonic() + patience
        for worker in workers:
            worker.describe_exit(max(0.0, deadline - time.monotonic()))
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.describe_exit(_EXIT_SECONDS)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(0.0)
        for worker in self._workers:
            worker.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.payload_path)
