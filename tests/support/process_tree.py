"""Other processes, as tests look at them."""

import contextlib
import os
from collections.abc import Collection

import psutil

from support.waiting import wait_for


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and not only what is left of it until its parent has asked for its status."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def descendants(root: int | None = None) -> dict[int, str]:
    """Living processes below ``root`` (this process), except multiprocessing's own servers: pid -> command line."""
    top = psutil.Process(root)
    found = {}
    for process in top.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it ended while we looked
            command = " ".join(process.cmdline())
            if is_alive(process.pid) and not (process.ppid() == top.pid and "multiprocessing" in command):
                found[process.pid] = command
    return found


def worker_processes(root: int | None = None) -> list[int]:
    """The workers below ``root`` (this process)."""
    return sorted(pid for pid, command in descendants(root).items() if "forkserver" in command)


def orphans(variable: str, value: str) -> dict[int, str]:
    """Living processes with this variable in their environment that are not below this one: pid -> command line."""
    ours = {os.getpid(), *(process.pid for process in psutil.Process().children(recursive=True))}
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it ended while we looked, or is not ours
            if process.pid not in ours and process.environ().get(variable) == value and is_alive(process.pid):
                found[process.pid] = " ".join(process.cmdline())
    return found


def left_after_a_while(
    before: Collection[int], variable: str, value: str, orphans_before: Collection[int] = (), seconds: float = 5.0
) -> dict[int, str]:
    """Descendants and orphans that were not there before, and do not end within ``seconds``."""
    left: dict[int, str] = {}

    def all_gone() -> bool:
        nonlocal left
        left = {pid: command for pid, command in descendants().items() if pid not in before}
        left |= {pid: command for pid, command in orphans(variable, value).items() if pid not in orphans_before}
        return not left

    wait_for(all_gone, seconds)
    return left
