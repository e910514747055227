"""Ends a process with the one that it works for, whoever forked it."""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import threading
import time

__all__ = ["die_when_closed", "die_with_parent", "end_with"]

_LOOK_SECONDS = 0.5


def die_with_parent() -> None:
    """Asks the kernel to kill this process when the one that started it dies (Linux; elsewhere does nothing)."""
    try:
        libc = ctypes.CDLL(None)
        libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    except (OSError, AttributeError):
        return  # no prctl on this system: the process ends when its pipes close


def die_when_closed(pipe: int) -> None:
    """Asks the kernel to kill this process when the write end of ``pipe`` is closed, that is, when its last holder dies
    (Linux; elsewhere does nothing).

    This holds while all threads are stopped or wait for the GIL. The process that forked this one may die meanwhile,
    which would be the end of it with :func:`die_with_parent`. Nothing may be written to the pipe any more.
    """
    if not hasattr(fcntl, "F_SETSIG"):
        return
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def end_with(pid: int, status: int) -> None:
    """Ends this process, with exit ``status``, soon after process ``pid``, which need not be its parent: with a fork
    server the parent is the server, which may outlive the process that asked for this one, or die before it.
    """

    def watch() -> None:
        _await_end(pid)
        os._exit(status)

    threading.Thread(target=watch, name="recycle-parent-watch", daemon=True).start()


def _await_end(pid: int) -> None:
    """Returns when process ``pid`` has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # not on this system: look now and then; the number may be given to another one
        while True:
            try:
                os.kill(pid, 0)
            except (ProcessLookupError, PermissionError):  # PermissionError: its number went to another user's process
                return
            time.sleep(_LOOK_SECONDS)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
