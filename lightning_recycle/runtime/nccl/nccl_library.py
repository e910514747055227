"""NCCL's C library through ``ctypes``, and streams of a device and their events.

Ending a transfer in milliseconds needs its communicator, which torch's ``ProcessGroupNCCL`` hides behind a watchdog and
makes lazily for each pair. So torch's library is called directly, with communicators that never block.

A call may leave a communicator *in progress*; until :meth:`NcclLibrary.in_progress` denies that, nothing but
:meth:`NcclLibrary.abort` may be called with it, and the request is not on its stream yet. One thread calls at a time.
Communicators that may have kernels on the device are aborted together, between ``group_start`` and ``group_end``. None
is destroyed: that waits for the others. An imitation of a device has the same three classes
(tests/support/fake_nccl.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_recycle.errors import ConfigurationError

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class CudaStreams:
    """The streams of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle: torch.cuda.Stream | None = None

    def use(self) -> None:
        """Makes this device the calling thread's, with streams of its own."""
        torch.cuda.set_device(self._device)
        ignore_recordings()

    @property
    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def create(self) -> torch.cuda.Stream:
        """A new stream, which waits for no other."""
        return torch.cuda.Stream(self._device)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A new tensor for the calling thread, in memory that no enqueued work uses.

        Another stream may write to it at once, if the caller keeps the tensor meanwhile.
        """
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
        """Waits for all enqueued work; a lost device is a RuntimeError ("CUDA error")."""
        torch.cuda.synchronize(self._device)


def ignore_recordings(path: str = "libcuda.so.1") -> bool:
    """Lets this thread go on while another records a CUDA graph; whether it can.

    ``torch.cuda.graph`` records in the mode "global", in which other threads' queries of events and allocations fail,
    and the recording with them. torch's own thread for NCCL does the same. ``path``: CUDA's driver.
    """
    try:
        exchange = ctypes.CDLL(path).cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # nobody records graphs without it
        return False
    exchange.argtypes, exchange.restype = [ctypes.POINTER(ctypes.c_int)], ctypes.c_int
    return bool(exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL))) == 0)


NcclComm: TypeAlias = Any
"""A communicator, as its library names it."""

UNIQUE_ID_BYTES = 128
_SUCCESS, _UNHANDLED_CUDA_ERROR, _IN_PROGRESS = 0, 1, 7  # ncclResult_t
_OLDEST = 22602  # 2.26.2; aborting hangs in 2.25.1, and several at once are not supported before 2.22
_MAGIC = 0xCAFEBEEF  # of ncclConfig_t
_CONFIG_VERSION = 21400  # the first one with a configuration, whose only option is `blocking`
_BYTES = 1  # ncclUint8: whatever is not summed is sent as bytes
_SUM = 0  # ncclRedOp_t
_TYPES = {  # ncclDataType_t
    torch.int8: 0, torch.uint8: 1, torch.int32: 2, torch.int64: 4, torch.float16: 6, torch.float32: 7,
    torch.float64: 8, torch.bfloat16: 9, torch.complex64: 7, torch.complex128: 8,
}  # fmt: skip
SUMMED = frozenset(_TYPES)
"""Types that :meth:`NcclLibrary.all_reduce` takes."""


class NcclError(RuntimeError):
    """A call of NCCL, or its work in the background, failed: a peer is gone."""


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]


class _Config(ctypes.Structure):
    """``ncclConfig_t`` of NCCL 2.14; newer versions fill the fields that it lacks."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    ]


class NcclLibrary:
    """NCCL as torch has loaded it, or at ``path``; ConfigurationError if unsuitable."""

    def __init__(self, path: str = "libnccl.so.2") -> None:
        remedy = 'Install a build of torch for CUDA, or choose CommunicationOptions(transport="gloo").'
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise ConfigurationError(f"There is no NCCL here: {error}. {remedy}") from error
        self._declare()
        version = ctypes.c_int()
        self._check("ncclGetVersion", self._library.ncclGetVersion(ctypes.byref(version)))
        if version.value < _OLDEST:
            raise ConfigurationError(
                f"NCCL {version.value} (as major * 10000 + minor * 100 + patch) cannot be aborted reliably; at least"
                f" {_OLDEST} is needed. {remedy}"
            )

    def _declare(self) -> None:
        comm, stream, pointer, size = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
        exchange = [pointer, size, ctypes.c_int, ctypes.c_int, comm, stream]
        arguments: dict[str, list[Any]] = {
            "ncclGetVersion": [ctypes.POINTER(ctypes.c_int)],
            "ncclGetUniqueId": [ctypes.POINTER(_UniqueId)],
            "ncclCommInitRankConfig": [
                ctypes.POINTER(comm), ctypes.c_int, _UniqueId, ctypes.c_int, ctypes.POINTER(_Config)
            ],
            "ncclCommGetAsyncError": [comm, ctypes.POINTER(ctypes.c_int)],
            "ncclSend": exchange,
            "ncclRecv": exchange,
            "ncclAllReduce": [pointer, pointer, size, ctypes.c_int, ctypes.c_int, comm, stream],
            "ncclBroadcast": [pointer, pointer, size, ctypes.c_int, ctypes.c_int, comm, stream],
            "ncclGroupStart": [],
            "ncclGroupEnd": [],
            "ncclCommAbort": [comm],
        }  # fmt: skip
        for name, types in arguments.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = types, ctypes.c_int
        texts: dict[str, list[Any]] = {"ncclGetErrorString": [ctypes.c_int], "ncclGetLastError": [comm]}
        for name, types in texts.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = types, ctypes.c_char_p

    def _check(self, call: str, result: int) -> None:
        """Raises for the ``result`` of ``call``, unless it succeeded or is not known yet."""
        if result in (_SUCCESS, _IN_PROGRESS):
            return
        text = self._library.ncclGetErrorString(result).decode(errors="replace")
        last = (self._library.ncclGetLastError(None) or b"").decode(errors="replace")
        if result == _UNHANDLED_CUDA_ERROR:
            # These stay until the end of the process: this worker is lost (runtime/machine_errors.py).
            raise RuntimeError(f"CUDA error in {call}: {text}. {last}")
        raise NcclError(f"{call}: {text}. {last}")

    def unique_id(self) -> bytes:
        """The name of a new communicator, made by one member and given to all."""
        found = _UniqueId()
        self._check("ncclGetUniqueId", self._library.ncclGetUniqueId(ctypes.byref(found)))
        return bytes(found)

    def init(self, unique_id: bytes, size: int, rank: int) -> NcclComm:
        """Begins to connect member ``rank`` of ``size`` on the current device."""
        comm = ctypes.c_void_p()
        config = _Config(ctypes.sizeof(_Config), _MAGIC, _CONFIG_VERSION, 0)
        self._check(
            "ncclCommInitRankConfig",
            self._library.ncclCommInitRankConfig(
                ctypes.byref(comm), size, _UniqueId.from_buffer_copy(unique_id), rank, ctypes.byref(config)
            ),
        )
        return comm

    def in_progress(self, comm: NcclComm) -> bool:
        """Whether the last call on ``comm`` is not done yet.

        Raises NcclError if it, or anything else on this communicator, has failed; RuntimeError for a lost device.
        """
        state = ctypes.c_int()
        self._check("ncclCommGetAsyncError", self._library.ncclCommGetAsyncError(comm, ctypes.byref(state)))
        self._check("an earlier call", state.value)
        return state.value == _IN_PROGRESS

    def send(self, comm: NcclComm, tensor: Tensor, peer: int, stream: torch.cuda.Stream) -> None:
        """Enqueues sending the contiguous ``tensor``, which must live until that is done."""
        self._exchange("ncclSend", comm, tensor, peer, stream)

    def receive(self, comm: NcclComm, tensor: Tensor, peer: int, stream: torch.cuda.Stream) -> None:
        """Enqueues filling the contiguous ``tensor``, which must live until that is done."""
        self._exchange("ncclRecv", comm, tensor, peer, stream)

    def _exchange(self, call: str, comm: NcclComm, tensor: Tensor, peer: int, stream: torch.cuda.Stream) -> None:
        assert tensor.is_contiguous()
        result = getattr(self._library, call)(
            tensor.data_ptr(), tensor.nbytes, _BYTES, peer, comm, ctypes.c_void_p(stream.cuda_stream)
        )
        self._check(call, result)

    def all_reduce(self, comm: NcclComm, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """Enqueues replacing ``tensor`` by its sum, the same bits on all members.

        It is contiguous, of a dtype of SUMMED, and must live until that is done.
        """
        assert tensor.is_contiguous()
        count = tensor.numel() * (2 if tensor.is_complex() else 1)
        memory, handle = tensor.data_ptr(), ctypes.c_void_p(stream.cuda_stream)
        result = self._library.ncclAllReduce(memory, memory, count, _TYPES[tensor.dtype], _SUM, comm, handle)
        self._check("ncclAllReduce", result)

    def broadcast(self, comm: NcclComm, tensor: Tensor, root: int, stream: torch.cuda.Stream) -> None:
        """Enqueues replacing the contiguous ``tensor`` by member ``root``'s."""
        assert tensor.is_contiguous()
        memory, handle = tensor.data_ptr(), ctypes.c_void_p(stream.cuda_stream)
        result = self._library.ncclBroadcast(memory, memory, tensor.nbytes, _BYTES, root, comm, handle)
        self._check("ncclBroadcast", result)

    def group_start(self) -> None:
        """Calls from now on happen together, at :meth:`group_end`."""
        self._check("ncclGroupStart", self._library.ncclGroupStart())

    def group_end(self) -> None:
        self._check("ncclGroupEnd", self._library.ncclGroupEnd())

    def abort(self, comm: NcclComm) -> None:
        """Ends ``comm`` and all of its kernels; received data is incomplete."""
        self._check("ncclCommAbort", self._library.ncclCommAbort(comm))


def device_name(device: torch.device) -> str:
    """A unique name of a device, the same in all processes that use it."""
    return str(torch.cuda.get_device_properties(device).uuid)
