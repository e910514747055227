"""Whether a process of this machine has ended, told by its id: an id means something only where it is seen."""

from __future__ import annotations

import os

__all__ = ["has_ended", "process_space"]


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
