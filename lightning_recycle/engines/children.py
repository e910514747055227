"""Processes that end with this one, whatever ends it; the main thread starts them, and is told when they end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lightning_recycle.engines.printing import Printer
from lightning_recycle.parent import die_with_parent

__all__ = ["Child", "Task"]


@dataclass(frozen=True)
class Task:
    """What a process is started with.

    Args:
        name: for people, and for files of logs.
        command: the program and its arguments.
        environ: all of its environment.
        listens: whether it reads from this process on its standard input, which stays open while this process lives.
    """

    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str] = field(repr=False)
    listens: bool = False


class Child:
    """A process, the leader of a group of its own, which the kernel kills when this process dies.

    Args:
        task: what it is started with.
        printer: passes on what it prints; None: it prints where this process does.
        on_end: called from another thread with the status, see :class:`subprocess.Popen`.

    Raises:
        OSError: if there is no such program.

    To be made by the main thread: the kernel looks at the thread that forked.
    """

    def __init__(self, task: Task, printer: Printer | None, on_end: Callable[[Child, int], None]) -> None:
        self.task = task
        self.began = time.monotonic()
        parent = os.getpid()
        pipe = None if printer is None else subprocess.PIPE

        def prepare() -> None:
            die_with_parent()
            if os.getppid() != parent:  # it died before the kernel was asked
                os._exit(1)

        self.process = subprocess.Popen(
            task.command,
            env=dict(task.environ),
            stdin=subprocess.PIPE if task.listens else subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,  # Ctrl-C at a terminal reaches it through this process, and once
            preexec_fn=prepare,
        )
        if printer is not None:
            assert self.process.stdout is not None
            assert self.process.stderr is not None
            printer.follow(task.name, self.process.stdout, to_stderr=False)
            printer.follow(task.name, self.process.stderr, to_stderr=True)
        threading.Thread(target=self._watch, args=(on_end,), daemon=True).start()

    def say(self, text: bytes) -> None:
        """Writes to its standard input."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended
                self.process.stdin.write(text)
                self.process.stdin.flush()

    def signal(self, number: int) -> None:
        """Sends it a signal; its own children are its business."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill(self) -> None:
        """Kills it and what it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the group has ended
            os.killpg(self.process.pid, signal.SIGKILL)

    def _watch(self, on_end: Callable[[Child, int], None]) -> None:
        status = self.process.wait()
        self.kill()  # what it left behind, such as processes that load data
        on_end(self, status)
