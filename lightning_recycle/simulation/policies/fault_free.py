"""No failures: the upper bound, on the whole grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning import Grid, Problem, Technique
from lightning_recycle.simulation.planned_steps import PlannedStep, planned_seconds
from lightning_recycle.simulation.policies.policy import Configuration, Context, Happening, Reaction
from lightning_recycle.simulation.schedules import pipeline_step

__all__ = ["FaultFree"]


@dataclass(frozen=True)
class FaultFree:
    """Nodes never fail.

    Args:
        schedule: "1f1b" (the paper's baseline, which also calibrates the models), "planned" as for all policies, or
            "zero_bubble": decoupled backward, at most S micro-batches in flight, one optimizer step for all stages.
    """

    schedule: Literal["1f1b", "planned", "zero_bubble"] = "1f1b"

    def __post_init__(self) -> None:
        if self.schedule not in ("1f1b", "planned", "zero_bubble"):
            raise ConfigurationError(f"FaultFree(schedule={self.schedule!r}): give '1f1b', 'planned' or 'zero_bubble'.")

    @property
    def ignores_failures(self) -> bool:
        """Yes."""
        return True

    def begin(self, context: Context, live: frozenset[int]) -> Reaction:
        """See :class:`Policy`."""
        model, grid = context.model, context.model.grid
        kind = "planned" if self.schedule == "planned" else "1f1b"
        step = pipeline_step(kind, model.costs(), grid.microbatches, model.in_flight_limit())
        if self.schedule == "zero_bubble":
            limit = tuple(min(grid.stages, most) for most in model.in_flight_limit())
            one = Grid(1, grid.stages, grid.microbatches)
            problem = Problem(one, model.costs(), technique=Technique(True, False), in_flight_limit=limit)
            step = min(step, PlannedStep(planned_seconds(problem)))
        return Reaction(
            Configuration(
                self.schedule,
                step.seconds,
                model.global_batch,
                model.gpus,
                model.useful_gpu_seconds,
                model.recomputed_gpu_seconds,
                fill_seconds=step.fill,
                lead_seconds=step.lead,
            )
        )

    def react(self, context: Context, current: Configuration, happening: Happening) -> Reaction | None:
        """Nothing to do: nodes never fail."""
        return None
