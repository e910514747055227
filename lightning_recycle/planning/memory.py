"""Memory: from bytes to the number of micro-batches that a worker may hold.

Concept: a worker's memory holds parameters, gradients, optimizer state and buffers, whatever the schedule; the rest is
for micro-batches. Each keeps its activations from F on, and after B, with a decoupled backward, what its W still
needs. A planner counts micro-batches, so the larger of the two sizes decides how many fit.

Contract: frozen, validated; never promises more than fits.

Must not know: schedules, torch.

Units: bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_recycle.arguments import is_number
from lightning_recycle.errors import ConfigurationError, PlanningError

__all__ = ["Memory"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one worker of each stage; all in bytes, one number per stage.

    Args:
        capacity: the memory of a worker.
        fixed: memory used without any micro-batch: parameters, gradients, optimizer state, the shadow of the
            last step, buffers.
        after_forward: memory held for one micro-batch between the start of F and the end of B.
        after_backward: memory held for one micro-batch between B and the end of W (0 for a fused backward).

    Raises:
        ConfigurationError: when a number is negative or missing.
    """

    capacity: tuple[float, ...]
    fixed: tuple[float, ...]
    after_forward: tuple[float, ...]
    after_backward: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("capacity", "fixed", "after_forward", "after_backward"):
            values = getattr(self, name)
            if not isinstance(values, Iterable) or isinstance(values, str):
                raise ConfigurationError(f"Memory({name}={values!r}): give one number of bytes per stage.")
            values = tuple(values)
            if len(values) != len(self.capacity) or not values:
                raise ConfigurationError(
                    f"Memory({name}) has {len(values)} numbers, capacity has {len(self.capacity)}: give one per stage."
                )
            if not all(is_number(value, 0) for value in values):
                raise ConfigurationError(f"Memory({name}={values!r}): give finite numbers of bytes, at least 0.")
            object.__setattr__(self, name, values)

    def in_flight_limit(self, most: int) -> tuple[int, ...]:
        """The number of micro-batches a worker of each stage may hold, for ``Problem.in_flight_limit``.

        Args:
            most: the limit where micro-batches need no memory, e.g. D * M.

        Raises:
            PlanningError: when a stage has no room for one micro-batch.
        """
        limits = []
        for stage, (capacity, fixed) in enumerate(zip(self.capacity, self.fixed, strict=True)):
            each = max(self.after_forward[stage], self.after_backward[stage])
            limit = min(most, int((capacity - fixed) // each)) if each and capacity >= fixed else most
            if capacity < fixed or limit < 1:
                raise PlanningError(
                    f"a worker of stage {stage} has {capacity:,.0f} bytes, needs {fixed:,.0f} without and {each:,.0f} "
                    "more with one micro-batch: use smaller micro-batches, more stages or more memory."
                )
            limits.append(limit)
        return tuple(limits)
