"""Who a worker is among the others, and the collectives that Lightning asks a strategy for.

They go through the coordinator, which makes them transparent to failures; there is no torch process group that they
could use. They are for control, not for data: flags, metrics, the parts of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from typing_extensions import override

from lightning_recycle.control.client import ControlClient
from lightning_recycle.control.protocol.state import leader, stage_leads
from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.planning.grid import Grid, Worker
from lightning_recycle.runtime.executor import Executor
from lightning_recycle.session.optimizer_states import to_cpu

__all__ = ["CollectiveStrategy", "WorkerContext"]


@dataclass(frozen=True)
class WorkerContext:
    """What a worker process knows before Lightning starts in it.

    Args:
        rank: its position.
        grid: of the run.
        client: its connection to the coordinator.
        host: the address that it exchanges data at.
        profiles: whether to measure the model.
        incarnation: 0 for the first process of its position, 1 for its replacement, ...
        device: index of its device.
        batch_pipelines: number of pipelines that the DataLoader's ``batch_size`` was meant for.
        parts: the layers of each stage.
    """

    rank: int
    grid: Grid
    client: ControlClient
    host: str
    profiles: bool
    incarnation: int
    device: int
    batch_pipelines: int
    parts: tuple[range, ...]


class CollectiveStrategy(ParallelStrategy):
    """A strategy whose workers find each other through the coordinator; arguments are those of its parent.

    In the launching process, where there is no :class:`WorkerContext`, it is alone.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.executor: Executor | None = None
        self.at_point: list[Callable[[str, int], None]] = []
        """Called with a point of the run ("setup", "recovery", "checkpoint", "end") and the step."""
        self._context: WorkerContext | None = None

    # ------------------------------------------------------------------ this worker

    @property
    def grid(self) -> Grid:
        assert self._context is not None, "the grid is known in the workers"
        return self._context.grid

    @property
    def worker(self) -> Worker:
        """The position of this worker."""
        return self.grid.worker(self.global_rank)

    @property
    def live_workers(self) -> tuple[int, ...]:
        """Ranks of the live workers of the current generation."""
        if self._context is None:
            return ()
        return self._context.client.roster or tuple(range(self.grid.num_workers))

    @property
    def leader(self) -> int:
        """Rank of the worker that speaks for the run."""
        assert self._context is not None
        known = self._context.client.leader
        return leader(self.grid, range(self.grid.num_workers)) if known < 0 else known

    @property
    def incarnation(self) -> int:
        """0 for the first process of this worker's position, 1 for its replacement, and so on."""
        return 0 if self._context is None else self._context.incarnation

    @property
    def generation(self) -> int:
        """Number of the current generation; -1 before the first."""
        return -1 if self._context is None else self._context.client.generation

    @property
    def counters(self) -> Mapping[str, float]:
        """Numbers of the run so far (failures, seconds of recovery, ...), the same on all workers at a step's end."""
        return {} if self._context is None else self._context.client.counters

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    @override
    def global_rank(self) -> int:
        return self._context.rank if self._context is not None else 0

    @property
    @override
    def local_rank(self) -> int:
        return self._context.device if self._context is not None else 0

    @property
    @override
    def node_rank(self) -> int:
        return 0

    @property
    @override
    def world_size(self) -> int:
        if self._context is not None:
            return self.grid.num_workers
        return len(self.parallel_devices) if self.parallel_devices else 1

    @property
    @override
    def is_global_zero(self) -> bool:
        """Whether this process speaks for the run: the leader, which changes when it dies; the supervisor before."""
        if self._context is None:
            return True
        return not self._context.client.joining and self.global_rank == self.leader

    def _follow_leader(self) -> None:
        rank_zero_only.rank = 0 if self.is_global_zero else max(1, self.global_rank)  # type: ignore[attr-defined]

    def _reach(self, point: str, step: int) -> None:
        for hook in self.at_point:
            hook(point, step)

    # ------------------------------------------------------------------ collectives

    def _gather(self, name: str, value: Any) -> Mapping[int, Any]:
        if self._context is None:
            return {0: value}
        return self._context.client.arrive(name, value)

    @override
    def barrier(self, name: str | None = None) -> None:
        self._gather(f"barrier {name or ''}", None)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns the object of worker ``src``; 0 means the leader, which every rank can be."""
        payloads = self._gather("broadcast", to_cpu(obj))
        source = self.global_rank
        if len(payloads) > 1:
            source = src if src != 0 and src in payloads else self.leader
        return obj if source == self.global_rank else payloads[source]

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        values = torch.stack([torch.as_tensor(v) for _, v in sorted(self._gather("reduce", to_cpu(tensor)).items())])
        name = str(reduce_op or "sum").rsplit(".", 1)[-1].lower()
        operations: dict[str, Callable[[Tensor], Tensor]] = {
            "sum": lambda v: v.sum(0),
            "mean": lambda v: v.mean(0) if v.is_floating_point() else v.float().mean(0),
            "avg": lambda v: v.float().mean(0),
            "min": lambda v: v.amin(0),
            "max": lambda v: v.amax(0),
        }
        if name not in operations:
            raise UnsupportedFeatureError(
                f"reduce_op={reduce_op!r} is not supported; use one of {', '.join(operations)}."
            )
        return operations[name](values).to(tensor.device)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if sync_grads:
            raise UnsupportedFeatureError("all_gather(sync_grads=True) is not supported: it would bypass the schedule.")
        return torch.stack([v for _, v in sorted(self._gather("all_gather", to_cpu(tensor)).items())]).to(tensor.device)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        decisions = [bool(d) for d in self._gather("decision", bool(decision)).values()]
        return decisions.count(True) == len(decisions) if all else any(decisions)

    def _gather_stages(self, name: str, part: Callable[[], Any]) -> list[Any]:
        """Returns one part of each stage, in order, on all workers; asks again if a speaker dies on the way."""
        while True:
            speaks = stage_leads(self.grid, self.live_workers)[self.worker.stage] == self.global_rank
            payloads = self._gather(name, (part(),) if speaks else None)
            parts = {
                self.grid.worker(rank).stage: value[0] for rank, value in sorted(payloads.items()) if value is not None
            }
            if len(parts) == self.grid.stages:
                return [parts[stage] for stage in range(self.grid.stages)]
