"""Layers on their way to another worker while the training goes on.

Concept: one thread per connection. What leaves first is as the optimizer left it after some step; it is read where it
is, and copied only if the next step of the optimizer comes before it has left (:meth:`Parcel.secure`). What each step
of the optimizer has used follows.

Contract: nobody depends on what is sent here: a connection that fails, or is closed, leaves what has arrived
completely. A connection on which nothing moves in the middle of a parcel fails after a while. Heads carry a sum; what
else has changed on its way shows in the checksum of the layers that it leads to.

Must not know: what a layer is; who decides what becomes of what has arrived.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import queue
import socket
import struct
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_recycle.runtime.message_sums import sum_of_bytes
from lightning_recycle.tensor_memory import memory_of

__all__ = ["Incoming", "Outgoing", "Parcel"]

log = logging.getLogger(__name__)

_HEAD = struct.Struct(">qqq")  # bytes of the pickled head, the same with all bits inverted, their sum
_CHUNK_BYTES = 16 * 1024 * 1024  # for which a step of the optimizer has to wait
_STALLED_SECONDS = 30.0  # without a byte, in the middle of a parcel
_MOST_WAITING = 8  # parcels; a connection that is slower than the steps is given up


class Parcel:
    """Something that is sent: a skeleton without its tensors, and those.

    Args:
        skeleton: see :func:`~lightning_recycle.model.apart.take_apart`.
        tensors: of any device; they arrive on the CPU.
        receivers: how many it is sent to.
    """

    def __init__(self, skeleton: bytes, tensors: Sequence[Tensor], receivers: int = 1) -> None:
        self.skeleton = skeleton
        self.tensors = list(tensors)
        self.layouts = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
        self._waiting = [receivers] * len(tensors)
        self._lock = threading.Lock()
        self._is_secure = False

    def secure(self) -> None:
        """From now on the tensors may change: those that have not left for all receivers are copied."""
        with self._lock:
            if not self._is_secure:
                self._is_secure = True
                self.tensors = [
                    tensor.detach().clone() if waiting else tensor
                    for tensor, waiting in zip(self.tensors, self._waiting, strict=True)
                ]

    def chunk(self, index: int, offset: int) -> Tensor:
        """At most 16 MiB of tensor ``index``, from byte ``offset`` on, on the CPU; empty at its end."""
        with self._lock:
            tensor = self.tensors[index]
            if not tensor.is_contiguous():
                tensor = self.tensors[index] = tensor.detach().contiguous()
            return _bytes_of(tensor)[offset : offset + _CHUNK_BYTES].to("cpu", copy=True)

    def left(self, index: int) -> None:
        """Tensor ``index`` has left for one of the receivers."""
        with self._lock:
            self._waiting[index] -= 1
            if not self._waiting[index]:
                self.tensors[index] = torch.empty(0)


class Outgoing:
    """Sends parcels, in order, once there is a connection."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Parcel | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._is_over = False

    def put(self, parcel: Parcel) -> None:
        """Has ``parcel`` sent after those before."""
        if self._waiting.qsize() >= _MOST_WAITING:
            self.close()
        if not self._is_over:
            self._waiting.put(parcel)

    def start(self, sock: socket.socket) -> None:
        """Sends over ``sock``, and closes it in the end."""
        with self._lock:
            self._socket = sock
            is_over = self._is_over
        if is_over:
            sock.close()
        else:
            threading.Thread(target=self._run, args=(sock,), name="recycle-layers-out", daemon=True).start()

    def close(self) -> None:
        """Sends no more, and forgets what waits."""
        with self._lock:
            self._is_over = True
            if self._socket is not None:
                _hang_up(self._socket)
        with contextlib.suppress(queue.Empty):
            while True:
                self._waiting.get_nowait()
        self._waiting.put(None)

    def _run(self, sock: socket.socket) -> None:
        sock.settimeout(_STALLED_SECONDS)
        with sock:
            try:
                while (parcel := self._waiting.get()) is not None:
                    _send(sock, parcel)
            except (OSError, RuntimeError) as error:  # of the network, or of a device that is lost
                log.info("Layers are no longer copied ahead: %s", error)
            finally:
                with self._lock:
                    self._is_over, self._socket = True, None


def _send(sock: socket.socket, parcel: Parcel) -> None:
    head = pickle.dumps((parcel.skeleton, parcel.layouts))
    sock.sendall(_HEAD.pack(len(head), ~len(head), sum_of_bytes(head)) + head)
    for index in range(len(parcel.tensors)):
        offset = 0
        while len(chunk := parcel.chunk(index, offset)):
            sock.sendall(chunk.numpy().data)
            offset += len(chunk)
        parcel.left(index)


class Incoming:
    """Receives parcels from ``sock`` in a thread; closes it.

    Args:
        sock: the connection.
        most: parcels that may lie here; then it ends.
        begun: called when the first one is complete, or none will be.

    Attributes:
        parcels: those that have arrived completely, in order.
    """

    def __init__(self, sock: socket.socket, most: int, begun: Callable[[], None]) -> None:
        self._socket, self._most, self._begun = sock, most, begun
        self._lock = threading.Lock()
        self._is_over = False
        self.parcels: list[Parcel] = []
        threading.Thread(target=self._run, name="recycle-layers-in", daemon=True).start()

    def close(self) -> None:
        """Ends the connection."""
        with self._lock:
            if not self._is_over:
                _hang_up(self._socket)

    def _run(self) -> None:
        with self._socket:
            try:
                while len(self.parcels) < self._most:
                    self.parcels.append(self._receive())
                    if len(self.parcels) == 1:
                        self._begun()
            except OSError as error:
                log.debug("Layers are no longer received ahead: %s", error)
            finally:
                with self._lock:
                    self._is_over = True
                if not self.parcels:
                    self._begun()

    def _receive(self) -> Parcel:
        self._socket.settimeout(None)  # until the next step; a sender that is gone has a generation that ends this
        first = self._bytes(1)
        self._socket.settimeout(_STALLED_SECONDS)
        size, inverted, total = _HEAD.unpack(first + self._bytes(_HEAD.size - 1))
        if size != ~inverted or sum_of_bytes(head := self._bytes(size)) != total:
            raise ConnectionError("other bits arrived than were sent")
        skeleton, layouts = pickle.loads(head)
        tensors = [torch.empty(shape, dtype=dtype) for dtype, shape in layouts]
        for tensor in tensors:
            self._read(_bytes_of(tensor).numpy().data)
        return Parcel(skeleton, tensors)

    def _bytes(self, size: int) -> bytes:
        data = bytearray(size)
        self._read(memoryview(data))
        return bytes(data)

    def _read(self, view: memoryview) -> None:
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise ConnectionResetError("the other side has ended the connection")
            view = view[count:]


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended
        sock.shutdown(socket.SHUT_RDWR)


def _bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as a vector of bytes."""
    tensor = tensor.detach()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return memory_of(tensor)
