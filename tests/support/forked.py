"""Processes of a test that the fork server of the workers starts: a new interpreter would import everything again."""

import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def fork_context() -> Any:
    """A context of multiprocessing, whose fork server runs."""
    from lightning_recycle.launch import worker_group  # not for the tests of what needs no torch

    context = worker_group.process_context()
    worker_group._ensure_fork_server()
    return context


class ForkedProcess:
    """A process that runs ``target(*args)``, used like a ``subprocess.Popen`` whose output is a pipe of text."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        context = fork_context()
        reader, writer = context.Pipe(duplex=False)
        self.args = (target.__name__, *args)
        self._process = context.Process(target=_run, args=(writer, target, args))
        self._process.start()
        writer.close()
        self.stdout = os.fdopen(os.dup(reader.fileno()))
        reader.close()

    def send_signal(self, signum: int) -> None:
        os.kill(self._process.pid, signum)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, seconds: float) -> int:
        self._process.join(seconds)
        assert self._process.exitcode is not None, f"{self.args} still runs after {seconds} s"
        return self._process.exitcode


def _run(writer: Connection, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.dup2(writer.fileno(), 1)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    target(*args)
    sys.stdout.flush()
