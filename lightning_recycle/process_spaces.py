"""What the kernel says of another process of this machine, by its id: an id means something only where it is seen."""

from __future__ import annotations

import contextlib
import os

__all__ = ["has_ended", "process_space", "thread_states"]


def process_space() -> str:
    """A name for what a process id means here, the same in all processes that see the same ones; "" if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""  # not Linux


def has_ended(pid: int, space: str) -> bool:
    """Whether process ``pid`` of ``space`` is known to have ended; False where that cannot be seen."""
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
    """The state of each thread of process ``pid`` of ``space``, a letter each as in proc(5): R runs or waits for a
    processor, S sleeps, D waits for a disk, T is stopped. "" where that cannot be seen.
    """
    if not space or space != process_space():
        return ""
    states = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/stat") as file:  # it may end meanwhile
                states.append(file.read().rpartition(")")[2].split()[0])
    return "".join(states)
