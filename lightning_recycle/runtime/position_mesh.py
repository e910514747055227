"""Device mesh of a position of several processes, kept over generations.

A position's *members* hold shards of the same layers (tensor parallelism, FSDP2), whose collectives run within the
position. torch finds the groups of a mesh by name, and keeps them in modules, parameters and caches. So each group is
one object for the life of the process, a :class:`MemberGroup`, with another Gloo group in each generation. A default
process group exists with the mesh: torch asks it for the rank. An aborted collective ends within milliseconds with a
:class:`CommunicationError`; therefore it is waited for here, in Python.

Before the first generation, and in a process that is to join, a member *builds alone*
(:meth:`PositionMesh.building_alone`): ``parallelize_module`` and ``fully_shard`` run collectives without siblings. The
member takes its shards from its own copy of the weights, which all members have.

Private API: torch's tables of process groups (``_world``), ``_register_process_group`` and its counterpart,
``_update_default_pg``, ``mesh_scatter`` of ``placement_types``, ``_create_work_from_future``.
"""

from __future__ import annotations

import copyreg
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partialmethod
from typing import Any, NoReturn
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import placement_types

from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.runtime.groups_and_transports import CommunicationError, Group, GroupPlan
from lightning_recycle.tensor_memory import DATA_PARALLEL, TENSOR_PARALLEL, is_divided_by
from lightning_recycle.torch_internals import tree_leaves, tree_map_only

_WHOLE = "position"
_PREFIX = "recycle"
_COLLECTIVES = tuple(
    name
    for name in dir(dist.ProcessGroup)
    if name.startswith(("all", "_all", "reduce", "_reduce", "broadcast", "scatter", "gather", "barrier"))
)


def ranks_by_group(sizes: Sequence[int], member: int) -> dict[str, tuple[int, ...]]:
    """The members of each group of ``member``: of all, and of each dimension."""
    shards, tensor = sizes
    shard, tensor_rank = divmod(member, tensor)
    return {
        _WHOLE: tuple(range(shards * tensor)),
        DATA_PARALLEL: tuple(other * tensor + tensor_rank for other in range(shards)),
        TENSOR_PARALLEL: tuple(shard * tensor + other for other in range(tensor)),
    }


class MemberGroup(dist.ProcessGroup):
    """A group of members for torch, over the Gloo group of the current generation.

    Gloo takes tensors of an accelerator on the host.
    """

    def __init__(self, name: str, rank: int, size: int, device_type: str) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._name, self._device_type = name, device_type
        self.works_with: dist.ProcessGroup | None = None
        self.backend: Any = None
        self.await_work: Callable[[Any, Any, bool], None] = _await_completion
        self.enters_hook: Callable[[], bool] = lambda: False

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def getGroupName(self) -> str:
        return self._name

    def getBackendName(self) -> str:
        return "gloo"

    def connect(self, backend: Any, await_work: Callable[[Any, Any, bool], None]) -> None:
        """Runs collectives over ``backend`` from now on.

        ``await_work`` waits for each, given ``backend``, its work and the prior result of :attr:`enters_hook`.
        """
        kinds = dist.ProcessGroup.BackendType
        kind = kinds.GLOO if isinstance(backend, dist.ProcessGroupGloo) else kinds.CUSTOM
        group = dist.ProcessGroup(self.rank(), self.size())  # type: ignore[call-arg]
        group._set_default_backend(kind)
        group._register_backend(torch.device("cpu"), kind, backend)
        self.works_with, self.backend, self.await_work = group, backend, await_work

    def disconnect(self) -> None:
        """Makes collectives raise CommunicationError until the next :meth:`connect`."""
        self.works_with = None

    def run(self, name: str, *args: Any, **options: Any) -> Any:
        """Runs the collective ``name`` and returns its work when it has ended."""
        in_hook = self.size() > 1 and self.enters_hook()  # which may connect it
        if self.works_with is None:
            raise CommunicationError(f"{name}: the members of this position are not connected.")
        group, backend = self.works_with, self.backend
        is_gloo = isinstance(group, dist.ProcessGroup) and isinstance(backend, dist.ProcessGroupGloo)
        if is_gloo and "reduce_scatter" in name:
            return self._reduce_scatter(group, in_hook, *args, **options)
        given = tree_map_only(Tensor, Tensor.cpu, args) if is_gloo else args
        work = getattr(group, name)(*given, **options)
        self.await_work(backend, work, in_hook)
        for tensor, result in zip(tree_leaves(args[:1]), tree_leaves(given[:1]), strict=True):
            if tensor is not result:
                tensor.copy_(result)
        return work

    def _reduce_scatter(
        self, group: dist.ProcessGroup, in_hook: bool, outputs: Any, inputs: Any, opts: Any = None
    ) -> Any:
        """A sum of all parts, of which this member keeps its own.

        Gloo's wait for it heeds no timeout, so that no end of a generation would end it.
        """
        options = dist.AllreduceOptions()
        if opts is not None:  # otherwise a sum
            options.reduceOp = opts.reduceOp
        work = None
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        for output, parts in zip(outputs, inputs, strict=True):
            parts = parts.chunk(self.size()) if isinstance(parts, Tensor) else parts
            total = torch.stack([part.reshape(-1) for part in parts]).cpu()
            work = group.allreduce([total], options)
            self.await_work(self.backend, work, in_hook)
            output.copy_(total[self.rank()].view_as(output))
        return work


for _name in _COLLECTIVES:
    setattr(MemberGroup, _name, partialmethod(MemberGroup.run, _name))


_meshes: dict[tuple[str, ...], DeviceMesh] = {}
"""The mesh of this process, by the names of its dimensions."""


def _reduced_mesh(mesh: DeviceMesh) -> tuple[Callable[..., DeviceMesh], tuple[Any, ...]]:
    return _mesh_named, (mesh.mesh_dim_names,)


def _mesh_named(names: tuple[str, ...]) -> DeviceMesh:
    """The mesh of this process with the dimensions ``names``, for unpickling."""
    (root,) = _meshes.values()
    return root if names == root.mesh_dim_names else root[names]


def _await_completion(_: Any, work: Any, __: bool) -> None:
    work.wait()


class PositionMesh:
    """The mesh of one position, as one of its members sees it.

    Args:
        sizes: its dimensions, FSDP shards and tensor parallelism.
        member: the number of this process in it, in row-major order.
        joins: whether training may have begun. Until the first generation collectives then return its own part: hooks
            may run some before it enters, and a peer's state replaces the results.
    """

    def __init__(self, sizes: tuple[int, int], member: int, device_type: str = "cpu", joins: bool = False) -> None:
        self.sizes, self.member, self._device_type = sizes, member, device_type
        self._ranks = ranks_by_group(sizes, member)
        self.groups = {
            name: MemberGroup(f"{_PREFIX}-{name}", ranks.index(member), len(ranks), device_type)
            for name, ranks in self._ranks.items()
        }
        for name, group in self.groups.items():
            _register(group, self._ranks[name])
            group.works_with = _OwnPart(group.size(), group.rank()) if joins else None  # type: ignore[assignment]
        copyreg.pickle(DeviceMesh, _reduced_mesh)
        distributed_c10d._update_default_pg(self.groups[_WHOLE])
        self.mesh = DeviceMesh.from_group(
            [self.groups[DATA_PARALLEL], self.groups[TENSOR_PARALLEL]],
            device_type,
            mesh=torch.arange(sizes[0] * sizes[1]).view(sizes),
            mesh_dim_names=(DATA_PARALLEL, TENSOR_PARALLEL),
        )
        _meshes[DATA_PARALLEL, TENSOR_PARALLEL] = self.mesh
        self._room = 0  # for the data of an exchange, in bytes

    @property
    def parts(self) -> tuple[int, int]:
        """This member's part of an FSDP batch: its number, and the number of parts."""
        shards, tensor = self.sizes
        return self.member // tensor, shards

    def counts(self, tensor: torch.Tensor) -> bool:
        """Whether this member counts its part of ``tensor``; replicas count once."""
        coordinates = zip((DATA_PARALLEL, TENSOR_PARALLEL), divmod(self.member, self.sizes[1]), strict=True)
        return not any(at and not is_divided_by(tensor, name) for name, at in coordinates)

    def exchange(self, numbers: Sequence[float], data: bytes) -> list[tuple[list[float], bytes]]:
        """Contributions of all FSDP members, in order; as many numbers each."""
        group = self.groups[DATA_PARALLEL]

        def gathered(payload: bytes, size: int) -> list[bytes]:
            message = torch.frombuffer(bytearray(payload[:size].ljust(size, b"\0")), dtype=torch.uint8)
            received = [torch.empty_like(message) for _ in range(group.size())]
            group.run("allgather", [received], [message])
            return [each.numpy().tobytes() for each in received]

        head = struct.Struct(f"={1 + len(numbers)}d")
        room = self._room  # the same on all members: that which the newest exchange of this generation needed
        messages = gathered(head.pack(len(data), *numbers) + data, head.size + room)
        heads = [head.unpack_from(message) for message in messages]
        sizes = [int(size) for size, *_ in heads]
        self._room = max(sizes)
        contents = [message[head.size :][:size] for message, size in zip(messages, sizes, strict=True)]
        if self._room > room:
            remainders = gathered(data[room:], self._room - room)
            contents = [(c + remainder)[:size] for c, remainder, size in zip(contents, remainders, sizes, strict=True)]
        return [(list(received), content) for (_, *received), content in zip(heads, contents, strict=True)]

    def plans(self, ranks: Sequence[int], loop: int) -> list[GroupPlan]:
        found: dict[tuple[int, ...], str] = {}  # dimensions with the same members share a group
        for members in self._ranks.values():
            numbers = tuple(ranks[member] for member in members)
            found.setdefault(numbers, f"{_PREFIX}-{'-'.join(map(str, numbers))}")
        return [GroupPlan(name, numbers, loop) for numbers, name in found.items() if len(numbers) > 1]

    def connect(
        self,
        ranks: Sequence[int],
        groups: Mapping[str, Group],
        alone: Any,
        await_work: Callable[[Any, Any, bool], None],
    ) -> None:
        """Begins a generation; ``await_work``: see :meth:`MemberGroup.connect`."""
        self._room = 0
        plans = {plan.ranks: plan.name for plan in self.plans(ranks, 0)}
        for name, members in self._ranks.items():
            numbers = tuple(ranks[member] for member in members)
            backend = alone if len(numbers) == 1 else groups[plans[numbers]].whole
            self.groups[name].connect(backend, await_work)

    def set_hook_detector(self, enters_hook: Callable[[], bool]) -> None:
        """Calls ``enters_hook()`` before each collective: whether a hook runs it."""
        for group in self.groups.values():
            group.enters_hook = enters_hook

    def meet(self) -> None:
        self.groups[_WHOLE].run("barrier")

    def disconnect(self) -> None:
        for group in self.groups.values():
            group.disconnect()

    @contextmanager
    def building_alone(self) -> Iterator[None]:
        """Within the block, modules are made parallel without the other members.

        A collective that needs other members' data raises UnsupportedFeatureError.
        """
        with ExitStack() as stack:
            for group in self.groups.values():
                alone = patch.multiple(group, works_with=_Alone(group.size()), await_work=_await_completion)
                stack.enter_context(alone)
            stack.enter_context(patch.object(placement_types, "mesh_scatter", _take_own_part))
            yield

    def close(self) -> None:
        """Takes the groups out of torch's tables."""
        distributed_c10d._update_default_pg(None)
        _meshes.clear()
        for group in self.groups.values():
            _unregister(group)


class _Alone:
    """Collectives of a member that builds alone: broadcasts and barriers do nothing."""

    def __init__(self, size: int) -> None:
        self._size = size

    def broadcast(self, *_: Any, **__: Any) -> Any:
        return _done()

    def barrier(self, *_: Any, **__: Any) -> Any:
        return _done()

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise UnsupportedFeatureError(
                f"configure_model() runs the collective {name!r}, whose result depends on what the other"
                f" {self._size - 1} members of the position hold. A member builds its layers alone, as one that is"
                " replaced later does: use parallelize_module, fully_shard and distribute_tensor there, and what asks"
                " for whole tensors (full_tensor(), redistribute()) in hooks from on_fit_start on."
            )

        return refuse


class _OwnPart:
    """Collectives of a member before it joins, as if the others held the same."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def run(first: Any = (), second: Any = None, *_: Any, **__: Any) -> Any:
            if isinstance(second, (torch.Tensor, list)):  # otherwise it has one argument, the result
                self._fill(first, second)
            return _done()

        return run

    def _fill(self, target: Any, source: Any) -> None:
        if isinstance(target, list):
            for item, one in zip(target, source if isinstance(source, list) else [source] * len(target), strict=False):
                self._fill(item, one)
        elif isinstance(source, list):
            target.copy_(source[self._rank])
        elif source.numel() > target.numel():
            target.view(-1).copy_(source.reshape(self._size, -1)[self._rank])
        elif source.numel():
            target.view(-1, source.numel()).copy_(source.reshape(1, -1).expand(target.numel() // source.numel(), -1))


def _done() -> Any:
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result([])
    return torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]


def _take_own_part(
    output: torch.Tensor, parts: Sequence[torch.Tensor], mesh: DeviceMesh, mesh_dim: int = 0, **_: Any
) -> None:
    """``mesh_scatter`` of a tensor that all members have."""
    output.copy_(parts[mesh.get_local_rank(mesh_dim)])


def _register(group: MemberGroup, ranks: Sequence[int]) -> None:
    world: Any = distributed_c10d._world
    name = group.group_name
    world.pg_map[group] = ("gloo", None)
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    world.pg_backend_config[group] = f"{group._device_type}:gloo"
    world.pg_to_tag[group] = f"user:{name}"
    world.tags_to_pg.setdefault(f"user:{name}", []).append(group)
    c10d: Any = distributed_c10d
    c10d._register_process_group(name, group)


def _unregister(group: MemberGroup) -> None:
    world: Any = distributed_c10d._world
    c10d: Any = distributed_c10d
    c10d._unregister_process_group(group.group_name)
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
        table.pop(group, None)
    world.tags_to_pg.pop(f"user:{group.group_name}", None)
