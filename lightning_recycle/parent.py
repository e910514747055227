"""Ends a process with the one that it works for."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

__all__ = ["die_with_parent", "end_with"]

_LOOK_SECONDS = 0.5


def die_with_parent() -> None:
    """Asks the kernel to kill this process when the one that started it dies (Linux; elsewhere does nothing)."""
    try:
        libc = ctypes.CDLL(None)
        libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    except (OSError, AttributeError):
        return  # no prctl on this system: the process ends when its pipes close


def end_with(pid: int, status: int) -> None:
    """Ends this process, with exit ``status``, soon after process ``pid``, which need not be its parent: with a fork
    server the parent is the server, which may outlive the process that asked for this one.
    """

    def watch() -> None:
        while True:
            try:
                os.kill(pid, 0)
            except (ProcessLookupError, PermissionError):  # PermissionError: its number went to another user's process
                os._exit(status)
            time.sleep(_LOOK_SECONDS)

    threading.Thread(target=watch, name="recycle-parent-watch", daemon=True).start()
