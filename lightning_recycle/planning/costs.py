"""Costs of operations: durations per stage, and time of a message between stages.

Concept: a planner only sees durations. The caller decides where they come from: a profile, a model of the hardware or a
guess. :func:`communication_seconds` turns latency, message size and bandwidth into the one number that is needed.

REDUCE is what a worker waits for the reduction of its stage's gradients after its last backward.

Contract: frozen, hashable, validated on construction; every error names the wrong value and the remedy.

Must not know: workers, failures, schedules, torch.

Units: seconds, or any unit used consistently ("slots").
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_recycle.arguments import at_least
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning.grid import OpKind

__all__ = ["Costs", "communication_seconds", "cost_difference"]

_PER_STAGE = ("forward", "backward_input", "backward_weight", "reduce", "optimizer")


@dataclass(frozen=True, slots=True)
class Costs:
    """Durations per stage, and the time for a message between neighbouring stages.

    Args:
        forward: duration of F of one micro-batch, one value per stage.
        backward_input: duration of B of one micro-batch, one value per stage.
        backward_weight: duration of W of one micro-batch, one value per stage.
        reduce: duration of what is left of the reduction of the stage's gradients after the last W, one value per
            stage.
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
        for name in _PER_STAGE:
            values = getattr(self, name)
            if not isinstance(values, Iterable) or isinstance(values, str):
                raise ConfigurationError(f"Costs({name}={values!r}): give one number per stage, e.g. [1.0, 1.0].")
            object.__setattr__(self, name, tuple(at_least("Costs", name, value) for value in values))
        object.__setattr__(self, "communication", at_least("Costs", "communication", self.communication))
        lengths = {name: len(getattr(self, name)) for name in _PER_STAGE}
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
        return cls(
            forward=(forward,) * stages,
            backward_input=(backward_input,) * stages,
            backward_weight=(backward_weight,) * stages,
            reduce=(reduce,) * stages,
            optimizer=(optimizer,) * stages,
            communication=communication,
        )

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


def communication_seconds(
    message_bytes: float | Iterable[float], *, latency_seconds: float, bandwidth_bytes_per_second: float
) -> float:
    """Seconds for a message between neighbouring stages: latency + bytes / bandwidth.

    Args:
        message_bytes: size of one micro-batch's activations, or one size per boundary between stages, of which the
            largest counts, because ``Costs.communication`` is one number for all.
        latency_seconds: time for an empty message.
        bandwidth_bytes_per_second: bandwidth of the slowest link used.

    Raises:
        ConfigurationError: when a value is negative or not finite, or the bandwidth is 0.
    """
    sizes = tuple(message_bytes) if isinstance(message_bytes, Iterable) else (message_bytes,)
    largest = max((at_least("", "message_bytes", size) for size in sizes), default=0.0)
    bandwidth = at_least("", "bandwidth_bytes_per_second", bandwidth_bytes_per_second)
    if bandwidth == 0.0:
        raise ConfigurationError("bandwidth_bytes_per_second=0: no message would ever arrive; give a positive number.")
    return at_least("", "latency_seconds", latency_seconds) + largest / bandwidth


def cost_difference(one: Costs, other: Costs) -> float:
    """Distance of two costs: the largest difference of a duration, as a fraction of the mean F, B or W.

    The two are first scaled to the same mean, because a common factor changes no plan. Infinite if the numbers of
    stages differ.
    """
    if one.stages != other.stages:
        return math.inf

    def scaled(costs: Costs) -> list[float]:
        work = [*costs.forward, *costs.backward_input, *costs.backward_weight]
        mean = sum(work) / len(work) or 1.0
        return [duration / mean for duration in (*work, *costs.reduce, *costs.optimizer, costs.communication)]

    return max(abs(a - b) for a, b in zip(scaled(one), scaled(other), strict=True))
