"""Activity of a worker's main thread, for its heartbeats; detection of debuggers.

Concept: the main thread records what it does or waits for before it does so; the heartbeat thread reads the newest
record and sends it with its age. The coordinator judges by it which worker holds up the others
(:mod:`~lightning_recycle.control.protocol.detection`).

Contract: written by the main thread, read by any; a record is immutable.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_recycle.control.protocol.messages import Activity

__all__ = ["ActivityRecorder", "is_debugged"]


class ActivityRecorder:
    """Records what the main thread does.

    Attributes:
        activity: the newest record.
    """

    def __init__(self) -> None:
        self.activity = Activity(0, "start", "", time.monotonic())

    def doing(self, step: int, operation: str, kind: str = "", microbatch: int = -1) -> None:
        """Records what the main thread does from now on; without a ``kind`` its usual duration is unknown.

        Args:
            step: the optimizer step.
            operation: its name, for people.
            kind: the kind of operation, if it has a usual duration. No hook of the user's may run in it.
            microbatch: the index in the global batch of the micro-batch that it is for; -1 for none.
        """
        self.activity = Activity(step, operation, "", time.monotonic(), kind, microbatch=microbatch)

    @contextmanager
    def busy(self, operation: str, kind: str = "") -> Iterator[None]:
        """Records that the main thread does something else within the block; then times afresh what it did before."""
        before = self.activity
        self.doing(before.step, operation, kind)
        try:
            yield
        finally:
            self.activity = _resumed(before)

    @contextmanager
    def waiting(self, what: str, coordinated: bool = False) -> Iterator[None]:
        """Records that the main thread waits for ``what`` within the block; then times afresh what it did before, as
        waiting does not count. ``coordinated``: what it waits for comes from the coordinator.
        """
        before = self.activity
        self.activity = Activity(
            before.step, before.operation, what, time.monotonic(), coordinated=coordinated, microbatch=before.microbatch
        )
        try:
            yield
        finally:
            self.activity = _resumed(before)

    def progressed(self) -> None:
        """Records progress in what the main thread does or waits for."""
        self.activity = _resumed(self.activity)


def _resumed(before: Activity) -> Activity:
    """``before``, timed afresh; by itself, as ``dataclasses.replace`` takes several times as long."""
    return Activity(
        before.step,
        before.operation,
        before.waiting_for,
        time.monotonic(),
        before.kind,
        before.coordinated,
        before.microbatch,
    )


def is_debugged(main_thread: int | None) -> bool:
    """Whether another process traces this one (gdb, strace), or its main thread is in Python's debugger."""
    try:
        with open("/proc/self/status") as status:
            if any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in status):
                return True
    except OSError:
        pass  # no /proc on this system: debuggers of other processes are not seen
    if "bdb" not in sys.modules:
        return False
    return any(re.search(r"\b[bp]db\.py$", file) for file in _files_on_stack(main_thread or 0))


def _files_on_stack(thread: int) -> list[str]:
    """The files of the functions that a thread is in; none if it is not known.

    Each way to ask for them is fatal in some versions of Python. Before 3.12 ``sys._current_frames()`` can block a
    process forever (seen in 3.11.7; CPython issue 106883): the garbage collector may run inside it, and a finalizer
    release the GIL, while it holds the lock that another thread needs to start a thread. ``faulthandler`` dies by
    SIGSEGV (seen in 3.13.0) at a thread that lets go of the GIL while it clears the frame of a function that C called,
    as torch does whenever it frees a tensor.
    """
    if sys.version_info >= (3, 12):
        frame, files = sys._current_frames().get(thread), []  # noqa: TID251 - not fatal here
        while frame is not None:
            files.append(frame.f_code.co_filename)
            frame = frame.f_back
        return files
    if not hasattr(os, "memfd_create"):
        return []
    try:
        descriptor = os.memfd_create("stacks")
    except OSError:
        return []  # descriptors or memory are used up; the thread counts as where it nearly always is
    with open(descriptor, "w+b") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stacks = file.read().decode(errors="replace")
    stack = re.search(rf"^(?:Current t|T)hread 0x0*{thread:x}\b.*\n((?:  .*\n)*)", stacks, re.MULTILINE)
    return [] if stack is None else re.findall(r'^  File "(.*)", line', stack[1], re.MULTILINE)
