"""The plan of a run, kept up to date: switched on by a callback."""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_recycle.arguments import is_integer, is_number
from lightning_recycle.control.plans.drift import DriftOptions
from lightning_recycle.errors import ConfigurationError

__all__ = ["PlanMonitor"]


class PlanMonitor(pl.Callback):
    """Compares what operations take with what the plan assumes, and changes the plan where another one is worth it.

    A worker that has become slow gets fewer micro-batches, its peers more; where the times of whole stages have
    changed, the order of operations may. The better plan is looked for in a process of the lowest priority, and all
    workers go over to it at the same step boundary, without stopping. What is trained stays the same. Noise, and
    batches that take all workers longer, change nothing. docs/drift.md tells more.

    Without this callback the plan changes only with the workers. Each change is an event "replanned" in
    ``strategy.history``; ``recycle/replans``, their number, is logged.

    Args:
        threshold: the part of a step's time that another plan must save, e.g. 0.05.
        window: steps that are measured before anything is concluded; at least 3.
        horizon_steps: steps in which a change must have paid for itself. Also: the number of steps after which a worker
            that was so slow that it got nothing to do is tried again.

    Raises:
        ConfigurationError: for values that cannot work.
    """

    def __init__(self, threshold: float = 0.05, window: int = 20, horizon_steps: int = 1000) -> None:
        if not is_number(threshold, 0, above=True) or threshold >= 1:
            raise ConfigurationError(
                f"PlanMonitor(threshold={threshold!r}): give the part of a step that a change must save, e.g. 0.05."
            )
        for name, value, least in (("window", window, 3), ("horizon_steps", horizon_steps, 1)):
            if not is_integer(value, least):
                raise ConfigurationError(f"PlanMonitor({name}={value!r}): give a number of steps, at least {least}.")
        self.threshold = threshold
        self.window = window
        self.horizon_steps = horizon_steps

    @property
    def options(self) -> DriftOptions:
        """As the coordinator takes them."""
        return DriftOptions(self.threshold, self.window, self.horizon_steps)
