"""System processes: ending with the one they work for, states by process id.

A process id means something only on one machine, in one boot, in one container (:func:`process_space`). psutil knows
neither the states of single threads nor how the kernel ends a process with another one.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import threading
import time
from pathlib import Path

_LOOK_SECONDS = 0.5


def die_with_parent() -> None:
    """Asks the kernel to kill this process when the one that started it dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def die_when_closed(pipe: int) -> None:
    """Lets the kernel kill this process when the write end of ``pipe`` is closed.

    It holds while all threads are stopped or wait for the GIL, and unlike :func:`die_with_parent` the process that
    forked this one may die. Nothing may be written to the pipe any more.
    """
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def end_with(pid: int, status: int) -> None:
    """Ends this process with exit ``status`` when process ``pid`` has ended.

    With a fork server the parent is the server, not the process that asked for this one.
    """

    def watch() -> None:
        _await_end(pid)
        os._exit(status)

    threading.Thread(target=watch, name="recycle-parent-watch", daemon=True).start()


def _await_end(pid: int) -> None:
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


# ---------------------------------------------------------------------- name


def name_process(name: str) -> None:
    """Names this process in ``ps -o comm`` and ``top``, with a colon for each space.

    Who reads ``/proc/PID/stat`` by words finds no parent behind a space: proctrack/linuxproc of SLURM then sends the
    process no signals.
    """
    with contextlib.suppress(OSError):  # not Linux, or no /proc: the process keeps the name of its program
        Path("/proc/self/comm").write_text(name.replace(" ", ":"))


def name_of(pid: int) -> str:
    """The name of a process of this machine: its program's, or its own; "" if unknown."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text()
    return ""


# ---------------------------------------------------------------------- states of other processes


def process_space() -> str:
    """Where a process id means the same processes; "" if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""  # not Linux


def has_ended(pid: int, space: str) -> bool:
    """Whether process ``pid`` of ``space`` is known to have ended."""
    if not space or space != process_space():
        return False
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in ("Z", "X")
    except FileNotFoundError:
        return True
    except OSError:  # it ends while it is read about
        return not os.path.exists(f"/proc/{pid}")


def thread_states(pid: int, space: str) -> str:
    """The state of each thread of a process, a letter each as in proc(5).

    R runs or waits for a processor, S sleeps, D waits for a disk, T is stopped. "" where that cannot be seen.
    """
    if not space or space != process_space():
        return ""
    states = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/stat") as file:  # it may end meanwhile
                states.append(file.read().rpartition(")")[2].split()[0])
    return "".join(states)
