"""Profiles: measured seconds and bytes, as costs and limits of plans.

A :class:`Profile`, in ``profile.json``, is of one model on one kind of machine with one number of stages, whatever the
number of pipelines and micro-batches. A :class:`Footprint` is the memory of one worker. The :class:`Memory` of a plan
follows from those of all: peers are alike, so the largest of a stage counts, and the smallest share of a device.

File (schema 1)::

    {"schema": 1, "steps": 20,
     "communication": {"latency": 1e-4, "bandwidth": 1e10},
     "stages": [{"forward": 0.010, "backward_input": 0.011, "backward_weight": 0.009, "reduce": 0.002,
                 "optimizer": 0.001, "activation_bytes": 25000000, "output_bytes": 1000000,
                 "waiting_bytes": 12000000}, ...]}
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from os import PathLike
from typing import Any, Literal, TypeAlias, TypeGuard

from lightning_recycle.arguments import at_least, is_integer, is_number, whole
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.files import read_json, refusing, write_atomically
from lightning_recycle.planning.costs import Costs, Memory
from lightning_recycle.planning.grid import Grid, Worker

PROFILE_SCHEMA = 1
"""Version of the file's format; a reader refuses newer ones."""


@dataclass(frozen=True, slots=True)
class StageProfile:
    """One stage: seconds per micro-batch (F, B, W) or step (REDUCE, STEP), and bytes."""

    forward: float
    backward_input: float
    backward_weight: float
    reduce: float = 0.0
    optimizer: float = 0.0
    activation_bytes: int = 0
    """Held from F to B; to W where ``waiting_bytes`` is not known."""
    output_bytes: int = 0
    """Sent to the next stage for one micro-batch; its gradient is as large."""
    waiting_bytes: int | None = None
    """Held for one micro-batch from its B to its W; None if that was not measured."""

    def __post_init__(self) -> None:
        for item in fields(self):
            check = whole if item.name.endswith("_bytes") else at_least
            if item.name != "waiting_bytes" or self.waiting_bytes is not None:
                check("StageProfile", item.name, getattr(self, item.name))


@dataclass(frozen=True, slots=True)
class Profile:
    """A measured model.

    Args:
        stages: the profile of each stage.
        latency: seconds for an empty message.
        bandwidth: bytes per second between neighbouring stages; 0 if unknown; messages then cost the latency.
        steps: number of measured steps.
    """

    stages: tuple[StageProfile, ...]
    latency: float = 0.0
    bandwidth: float = 0.0
    steps: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self.stages))
        if not self.stages:
            raise ConfigurationError("Profile(stages=()): give at least one stage.")
        at_least("Profile", "latency", self.latency)
        at_least("Profile", "bandwidth", self.bandwidth)
        whole("Profile", "steps", self.steps)

    def costs(self) -> Costs:
        """The planner's costs, in seconds, with the largest message of any stage."""
        message = max((stage.output_bytes for stage in self.stages[:-1]), default=0)
        transfer = message / self.bandwidth if self.bandwidth else 0.0
        return Costs(
            forward=tuple(stage.forward for stage in self.stages),
            backward_input=tuple(stage.backward_input for stage in self.stages),
            backward_weight=tuple(stage.backward_weight for stage in self.stages),
            reduce=tuple(stage.reduce for stage in self.stages),
            optimizer=tuple(stage.optimizer for stage in self.stages),
            communication=self.latency + transfer if len(self.stages) > 1 else 0.0,
        )

    def memory(self, activation_memory: float) -> Memory:
        """The memory of a plan with ``activation_memory`` bytes for micro-batches."""
        return Memory(
            capacity=(activation_memory,) * len(self.stages),
            fixed=(0.0,) * len(self.stages),
            after_forward=tuple(stage.activation_bytes for stage in self.stages),
            after_backward=tuple(
                stage.activation_bytes if stage.waiting_bytes is None else stage.waiting_bytes for stage in self.stages
            ),
        )


def save_profile(path: str | PathLike[str], profile: Profile) -> None:
    """Write ``profile.json``, atomically.

    Raises:
        ConfigurationError: when the file cannot be written.
    """
    data = {
        "schema": PROFILE_SCHEMA,
        "steps": profile.steps,
        "communication": {"latency": profile.latency, "bandwidth": profile.bandwidth},
        "stages": [asdict(stage) for stage in profile.stages],
    }
    with refusing(f"write the profile to {path}"):
        write_atomically(path, json.dumps(data, indent=2, allow_nan=False) + "\n")


def load_profile(path: str | PathLike[str]) -> Profile:
    """Read ``profile.json``.

    Raises:
        ConfigurationError: when it cannot be read, is damaged, or of a newer schema.
    """
    data = read_json(path, "the profile", "measure again")
    schema = data.get("schema") if isinstance(data, Mapping) else None
    if schema != PROFILE_SCHEMA:
        raise ConfigurationError(
            f"the profile {path} has schema {schema!r}, this version reads {PROFILE_SCHEMA}: "
            "measure again, or update lightning-recycle."
        )
    try:
        return _profile(data)
    except ConfigurationError as error:
        raise ConfigurationError(f"the profile {path} is damaged: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"the profile {path} is damaged ({error!r}): measure again.") from error


def _profile(data: Mapping[str, Any]) -> Profile:
    communication = data["communication"]
    return Profile(
        stages=tuple(StageProfile(**stage) for stage in data["stages"]),
        latency=communication["latency"],
        bandwidth=communication["bandwidth"],
        steps=data["steps"],
    )


MemoryLimit: TypeAlias = float | int | Literal["auto"]
"""Bytes of a worker as an integer; a fraction of its share of the device; "auto"."""

_AUTO = 0.9
"""Part of a share of a device that plans may use.

The rest is for what is not measured: temporary tensors within an operation (on CUDA they are), messages on their way,
and what an allocator cannot use.
"""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory that one worker measured.

    Args:
        place: the device or machine whose memory it uses; workers with the same place share it.
        capacity: what that has.
        overhead: what the worker's process needs there besides tensors: libraries, a CUDA context.
        fixed: its tensors between two steps: parameters, buffers, gradients, optimizer state, the previous version.
        messages: buffers for the messages of one micro-batch, which stay from step to step.
        after_forward: what one micro-batch holds from F on.
        after_backward: what one micro-batch holds from B on, until W.
        checkpoint: what one micro-batch holds from F on, until R, if its forward is computed again.
        temporary: what an operation takes besides while it runs, at most; 0 if that is not known.
    """

    place: str
    capacity: int
    overhead: int
    fixed: int
    messages: int
    after_forward: int
    after_backward: int
    checkpoint: int
    temporary: int = 0

    def __post_init__(self) -> None:
        for item in fields(self)[1:]:
            whole("Footprint", item.name, getattr(self, item.name))


def is_memory_limit(value: object) -> TypeGuard[MemoryLimit]:
    """Whether ``value`` is a limit in bytes, a fraction or "auto"."""
    fraction = isinstance(value, float) and is_number(value, 0, above=True) and value <= 1.0
    return value == "auto" or is_integer(value, 1) or fraction


def memory_of(
    grid: Grid,
    failed: Collection[Worker],
    footprints: Mapping[Worker, Footprint],
    limit: MemoryLimit,
    *,
    recompute: bool = False,
) -> Memory:
    """The memory of a worker of each stage while ``failed`` are gone.

    Args:
        footprints: of at least one worker of each stage. The micro-batches of dead workers, and their messages, are
            their peers'.
        limit: what may be used of a device.
        recompute: whether forwards may be computed again.
    """
    sharing = Counter(footprint.place for footprint in footprints.values())
    by_stage: list[list[Footprint]] = [[] for _ in range(grid.stages)]
    for worker, footprint in footprints.items():
        by_stage[worker.stage].append(footprint)
    live = Counter(worker.stage for worker in grid.workers() if worker not in failed)
    capacity, fixed = [], []
    for stage, found in enumerate(by_stage):
        capacity.append(min(_allowed(footprint, sharing[footprint.place], limit) for footprint in found))
        most = -(-grid.global_microbatches // max(1, live[stage]))
        own = max(footprint.fixed + footprint.temporary for footprint in found)  # one operation runs at a time
        fixed.append(own + most * max(footprint.messages for footprint in found))
    return Memory(
        tuple(capacity),
        tuple(fixed),
        tuple(max(footprint.after_forward for footprint in found) for found in by_stage),
        tuple(max(footprint.after_backward for footprint in found) for found in by_stage),
        tuple(max(footprint.checkpoint for footprint in found) for found in by_stage) if recompute else None,
    )


def _allowed(footprint: Footprint, sharing: int, limit: MemoryLimit) -> float:
    """Bytes of tensors that a worker may hold."""
    if limit == "auto":
        limit = _AUTO
    if isinstance(limit, int):
        return limit
    return max(0.0, limit * footprint.capacity / sharing - footprint.overhead)
