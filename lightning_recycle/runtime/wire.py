"""Values between stages as bytes: a header with the layout, the tensors, and sums.

Every message carries its layout, so shapes need no agreement. The tensors are packed behind it, or separate. The header
has two sums, of the layout and of the tensors: the 64-bit words of a message, added up by both sides. Any change within
one word shows; changes in several words cancel with a probability of about 2^-64 if they are random. (TCP's own sum has
16 bits, and there is none within a machine.) Only host memory is summed; 0 stands for no sum.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor

from lightning_recycle.devices import is_accelerator
from lightning_recycle.errors import ReCycleError
from lightning_recycle.tensor_memory import memory_of

Value: TypeAlias = Tensor | tuple[Tensor | None, ...]
"""A tensor or a tuple of tensors; in gradients, an item may be None."""

MAX_TENSORS = 31
_ALIGNMENT = 64
_DTYPES: tuple[torch.dtype, ...] = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_LENGTH = struct.Struct("=H")
LAYOUT_BYTES = 1008
"""Size of the header's description of the tensors."""

HEADER_BYTES = LAYOUT_BYTES + 16


class Channel(Enum):
    """The directions between stages: activations one way, gradients the other."""

    ACTIVATIONS = "activations"
    GRADIENTS = "gradients"

    __hash__ = object.__hash__  # members are singletons, and that of Enum is a function in Python


class HostMemory:
    """Memory of the host, for the exchange of tensors of ``device``.

    A device copies to and from *pinned* memory by itself, and otherwise through a small buffer of its driver. Pinning
    is slow, so torch keeps unused memory for the next time. On a CPU all memory is ordinary. Not tried with a device:
    see docs/gpu.md.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=is_accelerator(self._device))

    def staged(self, tensor: Tensor) -> Tensor:
        """``tensor`` if it is on the host, else a complete, contiguous copy there."""
        if tensor.is_cpu:
            return tensor
        copy = self.empty(tensor.shape, tensor.dtype)
        copy.copy_(tensor)
        return copy

    def on_device(self, tensor: Tensor, is_reused: bool) -> Tensor:
        """A copy of ``tensor`` on the device, or itself on a CPU.

        The copy may be incomplete unless the host memory ``is_reused``: torch keeps the memory until it is done.
        """
        return tensor.to(self._device, non_blocking=not is_reused)


@dataclass(frozen=True, slots=True)
class ValueLayout:
    """Structure of a nested value whose tensors are packed into one message.

    ``tensors``: (dtype, shape, whether its gradient is wanted back), or None. ``has_note``: whether the last of them is
    a note's bytes, no part of the value.
    """

    is_tuple: bool
    tensors: tuple[tuple[torch.dtype, tuple[int, ...], bool] | None, ...]
    has_note: bool = False

    @classmethod
    def of(cls, value: Value, note: Tensor | None = None) -> ValueLayout:
        tensors = (*(value if isinstance(value, tuple) else (value,)), *([] if note is None else [note]))
        forms = [None if t is None else (t.dtype, t.shape, t.requires_grad) for t in tensors]
        return cls(isinstance(value, tuple), tuple(forms), note is not None)

    @property
    def packed_bytes(self) -> int:
        """Size of the header and the tensors behind it."""
        return HEADER_BYTES + sum(_aligned(_num_bytes(*item[:2])) for item in self.tensors if item is not None)

    def header(self, packed: bool) -> bytes:
        """The header without its sums, of LAYOUT_BYTES bytes.

        Raises ReCycleError for too many tensors or dimensions, or a dtype that cannot be sent.
        """
        if (count := len(self.tensors) - self.has_note) > MAX_TENSORS:
            raise ReCycleError(f"A layer passes {count} tensors to the next stage; at most {MAX_TENSORS} are allowed.")
        for item in self.tensors:
            if item is not None and item[0] not in _DTYPE_CODES:
                raise ReCycleError(
                    f"A layer passes a tensor of {item[0]} to the next stage; convert it in the layer to one of"
                    f" {', '.join(str(known).removeprefix('torch.') for known in _DTYPES)}."
                )
        items = [None if item is None else (_DTYPE_CODES[item[0]], *item[1:]) for item in self.tensors]
        data = msgspec.msgpack.encode((packed, self.is_tuple, items, self.has_note))
        if len(data) + _LENGTH.size > LAYOUT_BYTES:
            raise ReCycleError(f"The shapes of {len(self.tensors)} tensors between stages do not fit into a header.")
        return (_LENGTH.pack(len(data)) + data).ljust(LAYOUT_BYTES, b"\0")

    @classmethod
    def parse(cls, header: bytes) -> tuple[ValueLayout, bool]:
        """The layout in ``header``, and whether the tensors are packed behind it."""
        (size,) = _LENGTH.unpack_from(header)
        packed, is_tuple, items, has_note = msgspec.msgpack.decode(header[_LENGTH.size :][:size])
        tensors = (None if item is None else (_DTYPES[item[0]], tuple(item[1]), item[2]) for item in items)
        return cls(is_tuple, tuple(tensors), has_note), packed

    def views(self, message: Tensor) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        offset = HEADER_BYTES
        for item in self.tensors:
            if item is None:
                found.append(None)
                continue
            size = _num_bytes(*item[:2])
            found.append(message[offset : offset + size].view(item[0]).view(item[1]))
            offset += _aligned(size)
        return found

    def empty(self, allocate: Callable[[Sequence[int], torch.dtype], Tensor]) -> list[Tensor | None]:
        """New tensors; ``allocate`` makes each from shape and dtype."""
        return [None if item is None else allocate(item[1], item[0]) for item in self.tensors]

    def value(self, tensors: Sequence[Tensor | None]) -> Any:
        """The value with these tensors, which require a gradient where it is wanted."""
        for tensor, item in zip(tensors, self.tensors, strict=True):
            if tensor is not None and item is not None:
                tensor.requires_grad_(item[2])
        return tuple(tensors[: len(tensors) - self.has_note]) if self.is_tuple else tensors[0]

    def note(self, tensors: Sequence[Tensor | None]) -> bytes:
        last = tensors[-1] if self.has_note else None
        return b"" if last is None else last.cpu().numpy().tobytes()


def _num_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    size = dtype.itemsize
    for dim in shape:
        size *= dim
    return size


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


_WORD = 8
_MODULUS = (1 << 63) - 1  # a signed number that is not 0 remains


def sum_of_bytes(data: bytes | np.ndarray) -> int:
    """The sum of contiguous bytes, from 1 to 2^63 - 1."""
    each = np.frombuffer(data, dtype=np.uint8)
    whole = each.size // _WORD * _WORD
    total = int(np.add.reduce(each[:whole].view(np.uint64))) if whole else 0
    return (total + int.from_bytes(each[whole:].tobytes(), sys.byteorder)) % _MODULUS + 1


def sum_of_tensors(tensors: Iterable[Tensor | None]) -> int:
    """The sum of the bits of all tensors; 0 if one is outside host memory."""
    total = 0
    for tensor in tensors:
        if tensor is None:
            continue
        if not tensor.is_cpu:
            return 0
        if tensor.numel():
            flat = memory_of(tensor.detach().resolve_conj().resolve_neg().contiguous())
            total = total * 3 + sum_of_bytes(flat.numpy())
    return total % _MODULUS + 1


class SendBuffer:
    """A prepared message to copy tensors into; ``packs_next``: the next one is packed."""

    def __init__(self, layout: ValueLayout, packed: bool, packs_next: bool, memory: HostMemory) -> None:
        self.layout, self.packed, self.packs_next = layout, packed, packs_next
        self.message = memory.empty((layout.packed_bytes if packed else HEADER_BYTES,))
        self._bytes = self.message.numpy()
        self._bytes[:LAYOUT_BYTES] = np.frombuffer(layout.header(packed), dtype=np.uint8)
        self._sums = self._bytes[LAYOUT_BYTES:HEADER_BYTES].view(np.int64)
        self._sums[0] = sum_of_bytes(self._bytes[:LAYOUT_BYTES])
        self._views = layout.views(self.message) if packed else []

    def pack(self, tensors: Sequence[Tensor | None]) -> None:
        """Copies ``tensors`` into the message, if it is packed."""
        for view, tensor in zip(self._views, tensors, strict=False):
            if view is not None and tensor is not None:
                view.copy_(tensor.detach())

    def add_sum(self, tensors: Sequence[Tensor | None]) -> None:
        """Sums the tensors in the message, or the following ``tensors``."""
        self._sums[1] = sum_of_bytes(self._bytes[HEADER_BYTES:]) if self.packed else sum_of_tensors(tensors)


class ReceiveBuffer:
    """The buffer posted for a tag, and the layout of its last message."""

    def __init__(self, capacity: int, memory: HostMemory) -> None:
        self.message = memory.empty((capacity,))
        self._bytes = self.message.numpy()
        self._sums = self._bytes[LAYOUT_BYTES:HEADER_BYTES].view(np.int64)
        self._header = b""
        self._end = 0  # of the packed tensors
        self.layout: ValueLayout | None = None
        self.next_capacity = capacity
        self.packed = False
        self.views: list[Tensor | None] = []

    def read_header(self, capacity: Callable[[ValueLayout], int]) -> bool:
        """Whether the header arrived intact; ``capacity``: of the next buffer, by layout."""
        header = self._bytes[:LAYOUT_BYTES].tobytes()
        if header != self._header:
            if sum_of_bytes(self._bytes[:LAYOUT_BYTES]) != self._sums[0]:
                return False
            self._header = header
            self.layout, self.packed = ValueLayout.parse(header)
            self.next_capacity, self._end = capacity(self.layout), self.layout.packed_bytes
            self.views = self.layout.views(self.message) if self.packed else []
        return True

    def is_whole(self, tensors: Sequence[Tensor | None]) -> bool:
        """Whether the tensors, in the message or after it, arrived intact."""
        if not self.packed:
            return int(self._sums[1]) in (0, sum_of_tensors(tensors))
        return int(self._sums[1]) == sum_of_bytes(self._bytes[HEADER_BYTES : self._end])


@dataclass(eq=False)
class Incoming:
    """A posted receive; ``note``: the sender's bytes beside the value, once received."""

    channel: Channel
    source: int
    tag: int
    inbox: ReceiveBuffer
    work: Any
    end: Any
    note: bytes = b""
