"""Memory of tensors; values as tensors and the rest, to be hashed, summed or sent."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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


class _TensorPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, is_apart: Callable[[Any], bool]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        self._is_apart = is_apart

    @override
    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor) or not self._is_apart(obj):
            return None
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._numbers[id(obj)]

    @override
    def reducer_override(self, obj: Any) -> Any:
        return host_reduction(obj)


class _TensorUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Any]) -> None:
        super().__init__(file)
        self._tensors = tensors

    @override
    def persistent_load(self, pid: int) -> Any:
        return self._tensors[pid]


def take_apart(value: Any, is_apart: Callable[[Tensor], bool] = lambda tensor: True) -> tuple[bytes, list[Tensor]]:
    """Pickles ``value`` without the tensors for which ``is_apart``, and these.

    Raises:
        Exception: whatever an object raises that cannot be pickled.
    """
    file = io.BytesIO()
    pickler = _TensorPickler(file, is_apart)
    pickler.dump(value)
    return file.getvalue(), pickler.tensors


def put_together(data: bytes, tensors: Sequence[Any]) -> Any:
    """The inverse of :func:`take_apart`, with ``tensors`` in the places of its."""
    return _TensorUnpickler(io.BytesIO(data), tensors).load()


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
