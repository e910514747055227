"""How a process fails: one function for each kind of fault.

Concept: each function makes the calling process fail as it would in a cluster, so an observer cannot tell the
difference. None needs privileges.

Contract: called in the main thread. Functions that end or stop the process do so before they return.

Must not know: faults, schedules, Lightning.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_recycle.errors import InjectedFaultError
from lightning_recycle.runtime.comm.sockets import drop_everything

__all__ = ["Slowdown", "deadlock", "exit_at_once", "hang", "kill", "partition", "preempt", "raise_error"]

_DEADLOCK_SECONDS = 3600.0  # by then, nothing will find the deadlock any more
_PARTITION_INTERVAL = 0.05  # seconds until a socket opened later is cut off

_SO_MAX_PACING_RATE = 47  # from asm-generic/socket.h; the socket module does not have it


def kill() -> None:
    """SIGKILL: the process is gone, and the system closes its connections."""
    os.kill(os.getpid(), signal.SIGKILL)


def exit_at_once() -> None:
    """Ends the process with exit code 1: no ``finally``, no exit handlers, no message."""
    os._exit(1)


def raise_error(reason: str) -> None:
    """Raises InjectedFaultError, which counts as a failure of the infrastructure."""
    raise InjectedFaultError(reason)


def hang() -> None:
    """SIGSTOP: all threads stop, connections stay open. Returns if the process is continued (SIGCONT)."""
    os.kill(os.getpid(), signal.SIGSTOP)


def deadlock() -> None:
    """Blocks the calling thread in Python; other threads and signal handlers go on.

    Raises:
        InjectedFaultError: if nobody ended the process for an hour.
    """
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=_DEADLOCK_SECONDS)
    raise InjectedFaultError(f"An injected deadlock was not found within {_DEADLOCK_SECONDS:.0f} seconds.")


def preempt() -> None:
    """SIGTERM, as from a cluster manager that reclaims the machine; the handler decides what follows."""
    os.kill(os.getpid(), signal.SIGTERM)


@dataclass(frozen=True)
class Slowdown:
    """Makes operations take longer for a while.

    Args:
        factor: factor on the time that an operation takes.
        first_step: the step in which it begins.
        steps: number of steps it lasts.
    """

    factor: float
    first_step: int
    steps: int

    def sleep_after(self, step: int, seconds: float) -> None:
        """Sleeps for the extra time of an operation of ``step`` that took ``seconds``."""
        if self.first_step <= step < self.first_step + self.steps:
            time.sleep((self.factor - 1) * seconds)


# ---------------------------------------------------------------------- partition


def partition() -> None:
    """Cuts this process off for good: nothing more arrives at its TCP sockets or leaves them, but they stay open.

    Existing sockets are cut off when this returns, later ones within 50 ms of opening. One or two packets of each may
    still get out (more on a new connection that sends full segments). Unix sockets, pipes, shared memory and
    RDMA keep working.
    """
    _cut_all_sockets()
    threading.Thread(target=_keep_cutting, name="recycle-partition", daemon=True).start()


def _keep_cutting() -> None:
    while True:
        time.sleep(_PARTITION_INTERVAL)
        _cut_all_sockets()


def _cut_all_sockets() -> None:
    for name in os.listdir("/proc/self/fd"):
        # Another thread may close a descriptor at any moment; then there is nothing to cut off.
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with _borrowed(int(name)) as sock:
                    if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                        _cut(sock)


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """The socket behind ``descriptor``, still owned by its owner. No duplicate: others count the descriptors."""
    sock = socket.socket(fileno=descriptor)
    try:
        yield sock
    finally:
        sock.detach()


def _cut(sock: socket.socket) -> None:
    """Incoming packets are dropped by a filter, which is inherited by accepted connections.

    Outgoing ones wait for a pace of 1 byte/s. Linux does not pace the first ten segments of a connection
    (``tcp_update_skb_after_send``); Nagle's algorithm holds small ones back until what was sent before is acknowledged,
    and the acknowledgements are dropped.
    """
    drop_everything(sock)
    sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)
