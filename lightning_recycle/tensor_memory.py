"""Memory of tensors; values as tensors and the rest, to be hashed, summed or sent.

**Checksums** of 128 bits are computed where the tensors are. The bits of all tensors, in order, are a stream of
integers x of at most 32 bits, in rows of 4096. Each row is summed with pseudo-random 64-bit weights by column, and the
sums are summed with weights by row, modulo 2^64; twice, with independent weights. This linear hash (Carter and Wegman,
1979) needs one multiplication per integer and no order of evaluation, so only two numbers leave the device.

A wrong integer goes unnoticed with probability 2^-(2 * (64 - k)) for its lowest wrong bit k, at most 2^-66 (k = 31, the
sign of a float32). Errors in several places cancel with at most about 2^-54 (the sign bit in two places of one column),
and 2^-114 for the lowest bit. The weights are fixed: the promise is about faults, not about attackers.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from typing_extensions import override

from lightning_recycle.devices import is_accelerator
from lightning_recycle.torch_internals import offset_of, tree_map_only

DATA_PARALLEL, TENSOR_PARALLEL = "data_parallel", "tensor_parallel"
"""Names of the dimensions of a position's mesh, as of Lightning's ``ModelParallelStrategy``."""


def memory_of(tensor: Tensor, dtype: torch.dtype = torch.uint8) -> Tensor:
    """The memory of a contiguous ``tensor`` as a vector of ``dtype``, without a copy."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(dtype)  # a single element may have any stride


def is_sharded(value: Any) -> bool:
    """Whether ``value`` is a DTensor."""
    # torch's module of DTensors takes long to import; what a tensor lacks takes long to look for.
    return type(value) is not Tensor and isinstance(value, Tensor) and hasattr(value, "to_local")


def is_divided_by(tensor: Tensor, name: str) -> bool:
    """Whether processes along a mesh dimension hold different parts of ``tensor``."""
    if not is_sharded(tensor):
        return False
    sharded: Any = tensor
    names = sharded.device_mesh.mesh_dim_names
    return name in names and not sharded.placements[names.index(name)].is_replicate()


def local_part(tensor: Tensor) -> Tensor:
    """The shard of a DTensor in this process, in the same memory; else all of it."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()  # type: ignore[no-any-return, attr-defined]


def whole(value: Any) -> Any:
    """``value`` with full tensors for DTensors; all processes of their mesh call it."""
    if type(value) is tuple:
        return tuple(whole(item) for item in value)
    return value if type(value) is Tensor or not is_sharded(value) else value.full_tensor()


def sharded_like(tensor: Tensor, part: Tensor) -> Tensor:
    """``part`` as this process's shard of a tensor divided like ``tensor``."""
    if not is_sharded(tensor):
        return part
    layout: Any = tensor
    return type(layout.data).from_local(  # type: ignore[no-any-return]
        part, layout.device_mesh, layout.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def reduced_shard(tensor: Tensor) -> tuple[Any, ...]:
    """The reduction of a DTensor for a pickler: this process's shard and the layout.

    The receiver gets it as a shard in its own mesh. torch's own reduction fails if the shard begins within its storage.
    """
    layout: Any = tensor
    form = (layout.device_mesh, layout.placements, tensor.shape, tensor.stride(), tensor.requires_grad)
    arguments = (type(tensor.detach()), local_part(tensor).detach(), *form)
    return _sharded, arguments, vars(tensor), None, None, _set_attributes


def _sharded(
    kind: Any, part: Tensor, mesh: Any, placements: Any, shape: torch.Size, stride: tuple[int, ...], has_grad: bool
) -> Tensor:
    made = kind.from_local(part.to(mesh.device_type), mesh, placements, run_check=False, shape=shape, stride=stride)
    return made.requires_grad_(has_grad)  # type: ignore[no-any-return]


def _set_attributes(tensor: Tensor, attributes: dict[str, Any]) -> None:
    vars(tensor).update(attributes)


def host_reduction(value: Any) -> Any:
    """The reduction of an accelerator's tensor: its values on the host.

    For a pickler's ``reducer_override``; NotImplemented for the standard reduction.
    """
    if is_sharded(value):
        return reduced_shard(value)
    if not isinstance(value, Tensor) or not is_accelerator(value.device):
        return NotImplemented
    return _host_tensor, (value.detach().cpu(), isinstance(value, nn.Parameter), value.requires_grad)


def _host_tensor(tensor: Tensor, is_parameter: bool, requires_grad: bool) -> Tensor:
    return nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def has_plain_memory(tensor: Tensor) -> bool:
    """Whether the memory of ``tensor``, with its shape and strides, is all that it is."""
    is_strided = not tensor.is_meta and tensor.layout is torch.strided
    return is_strided and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def memory_address(tensor: Tensor) -> int:
    """The address of the storage of ``tensor``, which its views share; 0 if none."""
    tensor = local_part(tensor)
    if tensor.layout is not torch.strided or is_lazy(tensor) or tensor.is_meta:
        return 0
    return tensor.untyped_storage().data_ptr()


# ---------------------------------------------------------------------- any value as tensors and the rest


def take_apart(value: Any, is_apart: Callable[[Tensor], bool] = lambda tensor: True) -> tuple[bytes, list[Tensor]]:
    """Pickles ``value`` without the tensors for which ``is_apart``; returns both."""
    tensors: dict[int, Tensor] = {}
    numbers: dict[int, int] = {}

    def number(obj: Any) -> int | None:
        if not isinstance(obj, Tensor) or not is_apart(obj):
            return None
        tensors[id(obj)] = obj
        return numbers.setdefault(id(obj), len(numbers))

    return pack_tensors(value, number), list(tensors.values())


def put_together(data: bytes, tensors: Sequence[Any]) -> Any:
    """The inverse of :func:`take_apart`, with ``tensors`` in the places of its."""
    return unpack_tensors(data, tensors.__getitem__)


# ---------------------------------------------------------------------- on the way between workers


@dataclass(frozen=True)
class TensorShard:
    """One process's part of a tensor of ``shape``, which begins at ``offset``."""

    part: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def place(self) -> tuple[slice, ...]:
        return tuple(slice(at, at + size) for at, size in zip(self.offset, self.part.shape, strict=True))


def shard_of(tensor: Tensor) -> TensorShard:
    """The part of a DTensor that this process holds."""
    return TensorShard(local_part(tensor).detach(), tuple(tensor.shape), offset_of(tensor))


def merge_shards(parts: Sequence[Any]) -> Any:
    """One value from those of several processes, with their shards as whole tensors.

    Only dicts, lists and tuples are looked into; everything else is as the first one has it.
    """
    first = parts[0]
    if isinstance(first, TensorShard):
        merged = torch.empty(first.shape, dtype=first.part.dtype)
        for shard in parts:
            merged[shard.place] = shard.part
        return merged
    if len(parts) == 1 or not isinstance(first, (Mapping, list, tuple)):
        return first
    if isinstance(first, Mapping):
        return {key: merge_shards([part[key] for part in parts]) for key in first}
    items = [merge_shards(each) for each in zip(*parts, strict=True)]
    return type(first)(items) if type(first) in (list, tuple) else first


def part_like(given: Tensor, tensor: Tensor) -> Tensor:
    """``given``, a whole tensor, sharded as ``tensor`` is, in memory of its own."""
    if not is_sharded(tensor) or is_sharded(given):
        return given
    shard = shard_of(tensor)
    part = given[shard.place].to(shard.part.device, copy=True, memory_format=torch.contiguous_format)
    return sharded_like(tensor, part)


def empty_like(shape: Sequence[int], dtype: torch.dtype, tensor: Any) -> Tensor:
    """Memory on the CPU for a tensor; for its shard if ``tensor`` has that shape."""
    if not is_sharded(tensor) or tensor.shape != shape:
        return torch.empty(shape, dtype=dtype)
    return sharded_like(tensor, torch.empty(local_part(tensor).shape, dtype=dtype))


def to_cpu(value: Any, copies: bool = True) -> Any:
    """``value`` with its tensors on the CPU in storages of their own, for pickling.

    Only dicts, lists and tuples are looked into; DTensors become :class:`TensorShard`. Without ``copies`` a tensor that
    is like that already is not copied.
    """
    if is_sharded(value):
        shard = shard_of(value)
        return replace(shard, part=to_cpu(shard.part, copies))
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
        return tensor.clone() if copies or tensor.untyped_storage().nbytes() != tensor.nbytes else tensor
    if isinstance(value, Mapping):
        return {key: to_cpu(item, copies) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(to_cpu(item, copies) for item in value)
    return value


def on_device(value: Any, device: torch.device) -> Any:
    """``value`` with its tensors on ``device``."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


@dataclass(frozen=True)
class _OfDevice:
    tensor: Tensor


def to_host(value: Any) -> Any:
    """:func:`to_cpu` of ``value``, which :func:`from_host` undoes."""
    return to_cpu(tree_map_only(Tensor, lambda t: _OfDevice(to_cpu(t)) if is_accelerator(t.device) else t, value))


def from_host(value: Any, device: torch.device) -> Any:
    """The value given to :func:`to_host`, with its accelerator tensors on ``device``."""
    return tree_map_only(_OfDevice, lambda marked: marked.tensor.to(device), value)


def pack_tensors(value: Any, name: Callable[[Any], Any] | None = None) -> bytes:
    """Pickles ``value`` for another process, with its tensors as bytes on the host.

    ``name`` returns what stands for an object that the receiver has as well. torch would write every storage as a file
    of its own, which takes longer than all else. Two tensors that share memory get memory of their own.
    """
    file = io.BytesIO()
    pickler = _BytesPickler(file, protocol=pickle.HIGHEST_PROTOCOL)
    if name is not None:
        pickler.persistent_id = name  # type: ignore[method-assign]
    pickler.dump(value)
    return file.getvalue()


def unpack_tensors(data: bytes, find: Callable[[Any], Any] | None = None) -> Any:
    """The value that :func:`pack_tensors` was given; ``find``: the object of a name."""
    unpickler = pickle.Unpickler(io.BytesIO(data))
    if find is not None:
        unpickler.persistent_load = find  # type: ignore[method-assign]
    return unpickler.load()


class _BytesPickler(pickle.Pickler):
    @override
    def reducer_override(self, obj: Any) -> tuple[Callable[..., Any], tuple[Any, ...]] | Any:
        if type(obj) is not Tensor or obj.requires_grad or not has_plain_memory(obj):
            return host_reduction(obj)
        data = memory_of(obj.cpu().contiguous()).numpy().tobytes()
        return _tensor_of, (data, obj.dtype, tuple(obj.shape))


def _tensor_of(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


# ---------------------------------------------------------------------- checksums

_ROW = 4096  # integers; the weights of a row stay in the cache
_BLOCK_ROWS = {"cpu": 16}  # rows that are multiplied at once: what stays in the cache
_MOST_ROWS = 1024  # elsewhere: 32 MiB of products
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_COLUMN_SEEDS, _ROW_SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344), (0xA4093822299F31D0, 0x082EFA98EC4E6C89)


@torch.no_grad()
def checksum(values: Iterable[Any]) -> bytes:
    """The checksum of ``values``, 16 bytes, in their order but without shapes.

    Tensors of any shape, dtype and device, and numbers; other objects are left out.
    """
    numbers = hashlib.blake2b(digest_size=16)
    streams: dict[tuple[torch.device, torch.dtype], _Stream] = {}
    for value in values:
        if isinstance(value, Tensor):
            bits = _bits(value)
            stream = streams.get((bits.device, bits.dtype))
            if stream is None:
                stream = streams[bits.device, bits.dtype] = _Stream(bits.device)
            stream.add(bits)
        elif isinstance(value, (bool, int)):
            numbers.update(f"{value};".encode())
        elif isinstance(value, float):
            numbers.update(struct.pack("<d", value))
    for key, stream in sorted(streams.items(), key=lambda item: str(item[0][1])):
        numbers.update(str(key[1]).encode() + struct.pack("<qq", *stream.sums()))
    return numbers.digest()


def _bits(tensor: Tensor) -> Tensor:
    tensor = local_part(tensor.detach())
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    tensor = tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor
    return memory_of(tensor.contiguous(), _INTEGERS[tensor.element_size()])


class _Stream:
    """The integers of one type on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._block = _ROW * _BLOCK_ROWS.get(device.type, _MOST_ROWS)
        self._pending: list[Tensor] = []  # small tensors, and what is left of large ones
        self._size = 0
        # On the CPU 1.2 to 2.2 GB/s; by products in new memory, or even in the same, 0.3 or 2, as it happens
        # (measured). CUDA has no product of a matrix of integers and a vector.
        is_cpu = device.type == "cpu"
        self._wide = torch.empty(self._block // _ROW, _ROW, dtype=torch.int64) if is_cpu else None
        self._rows: tuple[list[Tensor], list[Tensor]] = ([], [])

    def add(self, bits: Tensor) -> None:
        whole = len(bits) // self._block * self._block
        for start in range(0, whole, self._block):
            self._multiply(bits[start : start + self._block])
        if whole < len(bits):
            self._pending.append(bits[whole:])
            self._size += len(bits) - whole
            if self._size >= self._block:
                self._flush()

    def _flush(self) -> None:
        joined = torch.cat(self._pending) if len(self._pending) > 1 else self._pending[0]
        self._pending, self._size = [], 0
        if padding := -len(joined) % _ROW:
            joined = torch.nn.functional.pad(joined, (0, padding))
        for part in joined.split(self._block):
            self._multiply(part)

    def _multiply(self, block: Tensor) -> None:
        rows = block.view(-1, _ROW)
        if self._wide is not None:
            rows = self._wide[: len(rows)].copy_(rows)
        for weights, sums in zip(_column_weights(self._device), self._rows, strict=True):
            sums.append((rows * weights).sum(1) if self._wide is None else torch.mv(rows, weights))

    def sums(self) -> Iterator[int]:
        if self._pending:
            self._flush()
        if not self._rows[0]:
            return iter((0, 0))
        totals = [
            (torch.cat(sums) * (_weights(seed, sum(map(len, sums)), self._device) | 1)).sum()
            for seed, sums in zip(_ROW_SEEDS, self._rows, strict=True)
        ]
        return iter(torch.stack(totals).tolist())


@cache
def _column_weights(device: torch.device) -> tuple[Tensor, ...]:
    return tuple(_weights(seed, _ROW, device) for seed in _COLUMN_SEEDS)


def _weights(seed: int, count: int, device: torch.device) -> Tensor:
    """Pseudo-random 64-bit integers, by SplitMix64 (Steele, Lea and Flood 2014)."""
    state = torch.arange(1, count + 1, device=device) * _signed(0x9E3779B97F4A7C15) + _signed(seed)
    state = (state ^ _shifted(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shifted(state, 27)) * _signed(0x94D049BB133111EB)
    return state ^ _shifted(state, 31)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's copies the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
