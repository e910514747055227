"""Streams of a device and their events, for the transport by NCCL.

What is enqueued on a stream runs in order. An event is *done* once all that was on its stream when it was recorded has
run; asking does not block. An imitation of a device has the same three classes (tests/support/fake_nccl.py).

Not tried: :class:`CudaStreams` has never run, as there was no device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["CudaStreams", "Event", "Stream", "Streams", "ignore_recordings"]

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class Event(Protocol):
    """A place in a stream."""

    def query(self) -> bool:
        """Whether all before it has run; raises a RuntimeError ("CUDA error") if the device is lost."""


class Stream(Protocol):
    """Work of a device, in order."""

    @property
    def handle(self) -> int:
        """The ``cudaStream_t``."""

    def record(self) -> Event:
        """An event behind all that is enqueued now."""


class Streams(Protocol):
    """The streams of one device."""

    def use(self) -> None:
        """Makes it the device of the calling thread, which owns streams of its own and computes nothing."""

    @property
    def current(self) -> Stream:
        """The stream on which the calling thread computes."""

    def create(self) -> Stream:
        """A new stream, which waits for no other."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A new tensor for the calling thread to compute with, whose memory nothing that is enqueued uses. Another
        stream may write to it at once, if whoever makes it do so keeps the tensor meanwhile.
        """

    def check(self) -> None:
        """Waits for all that is enqueued; raises a RuntimeError ("CUDA error") if the device is lost."""


class CudaStream:
    """A stream of CUDA."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    @property
    def handle(self) -> int:
        return int(self._stream.cuda_stream)

    def record(self) -> Any:
        return self._stream.record_event()


class CudaStreams:
    """The streams of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle: torch.cuda.Stream | None = None

    def use(self) -> None:
        torch.cuda.set_device(self._device)
        ignore_recordings()

    @property
    def current(self) -> CudaStream:
        return CudaStream(torch.cuda.current_stream(self._device))

    def create(self) -> CudaStream:
        return CudaStream(torch.cuda.Stream(self._device))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        # torch gives memory out again as soon as nothing uses it that comes later on the stream that it was allocated
        # for, but what was enqueued before may. So this is allocated for a stream on which nothing runs; and torch
        # waits with memory that was used on another one until that is done.
        if self._idle is None:
            self._idle = torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._idle):
            tensor = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        tensor.record_stream(torch.cuda.current_stream(self._device))
        return tensor

    def check(self) -> None:
        torch.cuda.synchronize(self._device)


def ignore_recordings(path: str = "libcuda.so.1") -> bool:
    """Lets the calling thread go on while another one records a CUDA graph; returns whether that could be done.

    By default ``torch.cuda.graph`` records in the mode "global", in which no thread may ask whether an event is done,
    or allocate memory: the recording and this thread would fail. torch's own thread for NCCL does the same.

    Args:
        path: of the library of CUDA's driver.
    """
    try:
        exchange = ctypes.CDLL(path).cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # nobody records graphs without it
        return False
    exchange.argtypes, exchange.restype = [ctypes.POINTER(ctypes.c_int)], ctypes.c_int
    return bool(exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL))) == 0)
