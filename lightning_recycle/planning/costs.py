"""Costs of operations in seconds and bytes by stage, given or measured.

*Seconds* (or any unit used consistently): REDUCE is the time that a worker waits for the reduction of its stage's
gradients after its last backward.

*Memory*: F takes the memory that the micro-batch's backward needs (``after_forward``). B replaces it by the needs of
its W (``after_backward``, which may be more: a linear layer keeps its input *and* the gradient of its output), W and BW
free everything. Where a forward is computed again, F keeps less at its end (``checkpoint``) and R takes the rest. An
operation takes memory at its start and frees it at its end.

*Measured*: a :class:`Profile` is of one model on one kind of machine with one number of stages, whatever the number of
pipelines and micro-batches; docs/planner.md has the format of ``profile.json``. A :class:`Footprint` is the memory of
one worker. Peers are alike, so the largest footprint of a stage counts, and the smallest share of a device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from os import PathLike
from typing import Literal, TypeAlias, TypeGuard

from lightning_recycle.arguments import at_least, is_integer, is_number, whole
from lightning_recycle.errors import ConfigurationError, PlanningError
from lightning_recycle.files import read_json, refusing, typed_content, write_json
from lightning_recycle.planning.grid import Grid, OpKind, Worker

PER_STAGE = ("forward", "backward_input", "backward_weight", "reduce", "optimizer")
"""The costs of a stage."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Durations per stage, and the time for a message between neighbouring stages.

    Args:
        forward: duration of F of one micro-batch, one value per stage.
        backward_input: duration of B of one micro-batch, one value per stage.
        backward_weight: duration of W of one micro-batch, one value per stage.
        reduce: the rest of the reduction of the stage's gradients after the last W, one value per stage.
        optimizer: duration of STEP, one value per stage.
        communication: time from the end of an operation until its result reaches the next or previous stage.

    Raises:
        ConfigurationError: when a value is negative, not finite or missing.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    reduce: tuple[float, ...]
    optimizer: tuple[float, ...]
    communication: float = 0.0

    def __post_init__(self) -> None:
        for name in PER_STAGE:
            values = getattr(self, name)
            if not isinstance(values, Iterable) or isinstance(values, str):
                raise ConfigurationError(f"Costs({name}={values!r}): give one number per stage, e.g. [1.0, 1.0].")
            object.__setattr__(self, name, tuple(at_least("Costs", name, value) for value in values))
        object.__setattr__(self, "communication", at_least("Costs", "communication", self.communication))
        lengths = {name: len(getattr(self, name)) for name in PER_STAGE}
        if len(set(lengths.values())) > 1 or self.stages == 0:
            raise ConfigurationError(f"Costs have different numbers of stages, {lengths}: one value per stage each.")

    @classmethod
    def uniform(
        cls,
        stages: int,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        reduce: float = 0.0,
        optimizer: float = 0.0,
        communication: float = 0.0,
    ) -> Costs:
        """The same costs for each of ``stages`` stages."""
        of_a_stage = forward, backward_input, backward_weight, reduce, optimizer
        by_stage = {name: (seconds,) * stages for name, seconds in zip(PER_STAGE, of_a_stage, strict=True)}
        return cls(**by_stage, communication=communication)

    @property
    def stages(self) -> int:
        """Number of stages that have costs."""
        return len(self.forward)

    def of(self, kind: OpKind, stage: int) -> float:
        """Duration of an operation of ``kind`` at ``stage``."""
        if kind is OpKind.FORWARD or kind is OpKind.RECOMPUTE:
            return self.forward[stage]
        if kind is OpKind.BACKWARD_INPUT:
            return self.backward_input[stage]
        if kind is OpKind.BACKWARD_WEIGHT:
            return self.backward_weight[stage]
        if kind is OpKind.BACKWARD:
            return self.backward_input[stage] + self.backward_weight[stage]
        if kind is OpKind.REDUCE:
            return self.reduce[stage]
        return self.optimizer[stage]


def cost_difference(one: Costs, other: Costs) -> float:
    """Largest difference of a duration, as a fraction of the mean F, B or W.

    Both are first scaled to the same mean, because a common factor changes no plan. Infinite for different numbers of
    stages.
    """
    if one.stages != other.stages:
        return math.inf

    def scaled(costs: Costs) -> list[float]:
        work = [*costs.forward, *costs.backward_input, *costs.backward_weight]
        mean = sum(work) / len(work) or 1.0
        return [duration / mean for duration in (*work, *costs.reduce, *costs.optimizer, costs.communication)]

    return max(abs(a - b) for a, b in zip(scaled(one), scaled(other), strict=True))


_ROUNDING = 1e-9  # of the capacity; sums of bytes that are not whole numbers are not exact


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one worker of each stage; all in bytes, one number per stage.

    Args:
        capacity: the memory of a worker.
        fixed: memory used without any micro-batch: parameters, gradients, optimizer state, the shadow of the
            last step, buffers.
        after_forward: memory held for one micro-batch between the start of F and the end of B or BW.
        after_backward: memory held for one micro-batch between B and the end of W (0 for a fused backward).
        checkpoint: memory held for one micro-batch between the end of F and R, where its forward is computed again;
            None if none may be.

    Raises:
        ConfigurationError: when a number is negative or missing.
    """

    capacity: tuple[float, ...]
    fixed: tuple[float, ...]
    after_forward: tuple[float, ...]
    after_backward: tuple[float, ...]
    checkpoint: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("capacity", "fixed", "after_forward", "after_backward", "checkpoint"):
            values = getattr(self, name)
            if values is None and name == "checkpoint":
                continue
            if not isinstance(values, Iterable) or isinstance(values, str):
                raise ConfigurationError(f"Memory({name}={values!r}): give one number of bytes per stage.")
            values = tuple(values)
            if len(values) != len(self.capacity) or not values:
                raise ConfigurationError(
                    f"Memory({name}) has {len(values)} numbers, capacity has {len(self.capacity)}: give one per stage."
                )
            if not all(is_number(value, 0) for value in values):
                raise ConfigurationError(f"Memory({name}={values!r}): give finite numbers of bytes, at least 0.")
            object.__setattr__(self, name, tuple(map(float, values)))  # as a plan file has them, by which it is found

    @classmethod
    def counting(cls, limits: Sequence[int]) -> Memory:
        """Memory that counts micro-batches: ``limits[s]`` for a worker of stage s."""
        ones = (1,) * len(limits)
        return cls(tuple(limits), (0,) * len(limits), ones, ones)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.capacity)

    def room(self, stage: int) -> float:
        """Bytes of a worker that are free for micro-batches, rounding allowed for."""
        return self.capacity[stage] - self.fixed[stage] + _ROUNDING * self.capacity[stage]

    def delta(self, kind: OpKind, stage: int, recomputed: bool = False) -> float:
        """Change of a worker's bytes by an operation; ``recomputed``: there is an R."""
        activations = self.after_forward[stage]
        stored = activations if self.checkpoint is None else self.checkpoint[stage]
        if kind is OpKind.FORWARD and recomputed:
            return stored
        if kind is OpKind.RECOMPUTE:
            return activations - stored
        return sum(self.parts(kind, stage))

    def parts(self, kind: OpKind, stage: int) -> tuple[float, float]:
        """:meth:`delta` of a micro-batch without R: held from F to B, and from B to W."""
        held, waiting = self.after_forward[stage], self.after_backward[stage]
        if kind is OpKind.FORWARD:
            return held, 0.0
        if kind is OpKind.BACKWARD_INPUT:
            return -held, waiting
        if kind is OpKind.BACKWARD_WEIGHT:
            return 0.0, -waiting
        return (-held if kind is OpKind.BACKWARD else 0.0), 0.0

    def needed(self, kind: OpKind, stage: int) -> float:
        """Bytes that a worker needs during an operation beyond those before it."""
        if kind is OpKind.FORWARD:
            return max(self.after_forward[stage], self.delta(kind, stage, recomputed=True))
        return max(0.0, self.delta(kind, stage))

    def least(self, stage: int) -> float:
        """The fewest bytes that one micro-batch may hold after F, with or without R."""
        held = self.after_forward[stage]
        return held if self.checkpoint is None else min(held, self.checkpoint[stage])

    def most(self, stage: int, each: float) -> float:
        """Number of micro-batches of ``each`` bytes that fit into a worker."""
        return self.room(stage) // each if each else float("inf")

    def check(self) -> None:
        """Raises PlanningError when a stage has no room for one micro-batch."""
        for stage in range(self.stages):
            self._check(stage, self.after_forward[stage])

    def in_flight_limit(self, most: int) -> tuple[int, ...]:
        """Micro-batches that fit into a worker of each stage in any order of operations.

        Args:
            most: the limit where micro-batches need no memory, e.g. D * M.

        Raises:
            PlanningError: when a stage has no room for one micro-batch.
        """
        limits = []
        for stage in range(self.stages):
            needed = max(self.after_forward[stage], self.after_backward[stage])
            self._check(stage, needed)
            limits.append(int(min(most, self.most(stage, needed))))
        return tuple(limits)

    def _check(self, stage: int, each: float) -> None:
        if self.room(stage) < each:
            raise PlanningError(
                f"a worker of stage {stage} has {self.capacity[stage]:,.0f} bytes, needs {self.fixed[stage]:,.0f} "
                f"without and {each:,.0f} more with one micro-batch: use smaller micro-batches, more stages or more "
                "memory."
            )


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
        by_stage = {name: tuple(getattr(stage, name) for stage in self.stages) for name in PER_STAGE}
        return Costs(**by_stage, communication=self.latency + transfer if len(self.stages) > 1 else 0.0)

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
    with refusing(f"write the profile to {path}"):
        write_json(path, {"schema": PROFILE_SCHEMA, **asdict(profile)})


def load_profile(path: str | PathLike[str]) -> Profile:
    """Read ``profile.json``.

    Raises:
        ConfigurationError: when it cannot be read, is damaged, or of another schema.
    """
    data = read_json(path, "the profile", "measure again")
    return typed_content(data, Profile, PROFILE_SCHEMA, f"the profile {path}", "measure again")


MemoryLimit: TypeAlias = float | int | Literal["auto"]
"""Bytes of a worker as an integer; a fraction of its share of the device; "auto"."""

_AUTO = 0.9
"""Part of a share of a device that plans may use.

The rest is for unmeasured memory: temporary tensors of an operation, messages under way, fragmentation.
"""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory in bytes that one worker measured.

    Args:
        place: the device or machine; workers with the same place share its memory.
        capacity: the memory of the place.
        overhead: use by the worker's process besides tensors: libraries, a CUDA context.
        fixed: tensors between two steps: parameters, buffers, gradients, optimizer state, the previous version.
        messages: buffers for the messages of one micro-batch, kept from step to step.
        after_forward: held by one micro-batch from F to B.
        after_backward: held by one micro-batch from B to W.
        checkpoint: held by one micro-batch from F to R, if its forward is computed again.
        temporary: most that an operation takes while it runs; 0 if unknown.
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

    ``footprints`` has at least one worker of each stage; peers run the micro-batches of the dead and hold their
    messages. ``limit``: the part of a device that may be used. ``recompute``: forwards may be computed again.
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

    def largest(name: str) -> tuple[float, ...]:
        return tuple(max(getattr(footprint, name) for footprint in found) for found in by_stage)

    sizes = largest("after_forward"), largest("after_backward")
    return Memory(tuple(capacity), tuple(fixed), *sizes, largest("checkpoint") if recompute else None)


def _allowed(footprint: Footprint, sharing: int, limit: MemoryLimit) -> float:
    """Bytes of tensors that a worker may hold."""
    if limit == "auto":
        limit = _AUTO
    if isinstance(limit, int):
        return limit
    return max(0.0, limit * footprint.capacity / sharing - footprint.overhead)
