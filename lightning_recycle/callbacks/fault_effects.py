"""Effects of faults: one function for each kind of failure, and bits that flip.

Each function makes the calling process fail as it would in a cluster, in the main thread and without privileges. A bit
flip changes one number, once, in what the worker holds, computes or sends; or arithmetic is wrong from then on, in
every n-th matrix product. The number that flips follows from the fault alone.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_recycle.errors import InjectedFaultError
from lightning_recycle.runtime.comm.connections import drop_everything
from lightning_recycle.torch_internals import TorchDispatchMode

_DEADLOCK_SECONDS = 3600.0  # by then, nothing will find the deadlock any more
_PARTITION_INTERVAL = 0.05  # seconds until a socket opened later is cut off

_SO_MAX_PACING_RATE = 47  # from asm-generic/socket.h; the socket module does not have it


def kill() -> None:
    """SIGKILL: the process is gone, and the system closes its connections."""
    os.kill(os.getpid(), signal.SIGKILL)


def exit() -> None:
    """Ends the process with exit code 1: no ``finally``, no exit handlers, no message."""
    os._exit(1)


def hang() -> None:
    """SIGSTOP: all threads stop, connections stay open; returns after SIGCONT."""
    os.kill(os.getpid(), signal.SIGSTOP)


def deadlock() -> None:
    """Blocks the calling thread in Python; other threads and signal handlers go on.

    Raises:
        InjectedFaultError: if the process was not ended for an hour.
    """
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=_DEADLOCK_SECONDS)
    raise InjectedFaultError(f"An injected deadlock was not found within {_DEADLOCK_SECONDS:.0f} seconds.")


def preempt() -> None:
    """SIGTERM, as from a cluster manager that reclaims the machine."""
    os.kill(os.getpid(), signal.SIGTERM)


@dataclass(frozen=True)
class Slowdown:
    """Makes operations take ``factor`` times as long for a number of steps."""

    factor: float
    first_step: int
    steps: int

    def sleep_after(self, step: int, seconds: float) -> None:
        """Sleeps for the extra time of an operation of ``step`` that took ``seconds``."""
        if self.first_step <= step < self.first_step + self.steps:
            time.sleep((self.factor - 1) * seconds)


# ---------------------------------------------------------------------- partition


def partition() -> None:
    """Cuts this process off for good; its TCP sockets stay open.

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
    """The socket behind ``descriptor``, not duplicated, as others count descriptors."""
    sock = socket.socket(fileno=descriptor)
    try:
        yield sock
    finally:
        sock.detach()


def _cut(sock: socket.socket) -> None:
    """Drops incoming packets by a filter, and slows outgoing ones down to nothing.

    Accepted connections inherit the filter. Outgoing packets wait for a pace of 1 byte/s. Linux does not pace the first
    ten segments of a connection (``tcp_update_skb_after_send``); Nagle's algorithm holds small ones back until what was
    sent before is acknowledged, and the acknowledgements are dropped.
    """
    drop_everything(sock)
    sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)


# ---------------------------------------------------------------------- bit flips

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MANTISSA = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
_PRODUCTS = {
    op for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv") for op in (getattr(torch.ops.aten, name).default,)
}


@torch.no_grad()
def flip(tensors: Iterable[Any], bit: int | None, draw: random.Random) -> bool:
    """Flips a bit of one number of the floating-point tensors, in place.

    Args:
        bit: its place, from the lowest, 0; None for the lowest bit of the exponent, which doubles or halves the number.
        draw: draws the number.

    Returns:
        Whether there was one.
    """
    found = [t for t in tensors if isinstance(t, Tensor) and t.is_floating_point() and t.numel()]
    if not found:
        return False
    place = draw.randrange(sum(tensor.numel() for tensor in found))
    for tensor in found:
        if place < tensor.numel():
            _flip_at(tensor.detach(), place, bit)
            break
        place -= tensor.numel()
    return True


def _flip_at(tensor: Tensor, place: int, bit: int | None) -> None:
    width = 8 * tensor.element_size()
    chosen = _MANTISSA[tensor.dtype] if bit is None else bit % width
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), tensor.shape))
    number = tensor[index].reshape(1).contiguous()
    mask = 1 << chosen if chosen < width - 1 else -(1 << chosen)
    wrong = number.view(_INTEGERS[tensor.element_size()]) ^ mask
    tensor[index] = wrong.view(tensor.dtype)[0]


def flipped(value: Any, bit: int | None, draw: random.Random) -> Any:
    """A copy of a tensor, or of a tuple of tensors and None, with a flipped bit."""
    several = value if isinstance(value, tuple) else (value,)
    copies = tuple(None if t is None else t.detach().clone().requires_grad_(t.requires_grad) for t in several)
    flip([None if t is None else t.detach() for t in copies], bit, draw)
    return copies if isinstance(value, tuple) else copies[0]


def flip_in_next_output(modules: Sequence[nn.Module], bit: int | None, draw: random.Random) -> None:
    """Flips a bit in the next tensor that one of ``modules`` returns, in place."""
    handles: list[Any] = []

    def on_output(module: nn.Module, inputs: Any, output: Any) -> None:
        if not handles:
            return
        if flip(output if isinstance(output, tuple) else (output,), bit, draw):
            for handle in handles:
                handle.remove()
            handles.clear()

    handles += [module.register_forward_hook(on_output) for module in modules]


class WrongArithmetic(TorchDispatchMode):
    """Within the block, every ``every``-th matrix product has a flipped bit.

    The count goes on from block to block. ``bit``: see :func:`flip`; 0 is an error of one unit in the last place.
    """

    def __init__(self, every: int, bit: int | None, draw: random.Random) -> None:
        super().__init__()
        self._every, self._bit, self._draw = every, bit, draw
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _PRODUCTS and result.is_floating_point():
            self._count += 1
            if self._count % self._every == 0:
                flip([result], self._bit, self._draw)
        return result
