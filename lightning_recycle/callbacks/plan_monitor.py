"""Keeps the plan of a run up to date."""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_recycle.arguments import is_integer, is_number
from lightning_recycle.control.plans.drift import DriftOptions
from lightning_recycle.errors import ConfigurationError

__all__ = ["PlanMonitor"]


class PlanMonitor(pl.Callback):
    """Compares measured operation times with those the plan assumes, and changes the plan when that pays.

    A worker that has become slow gets fewer micro-batches, its peers more; if the times of whole stages have changed,
    the order of operations may change. A process of the lowest priority searches for a better plan, and all workers
    switch to it at the same step boundary, without stopping. The training result stays the same. Noise, and batches
    that take all workers longer, change nothing. See docs/drift.md.

    Without this callback the plan does not follow such changes. Each change is an event "replanned" in
    ``strategy.history``; with ``ReCycleStrategy(run_metrics=True)`` their number is logged as ``recycle/replans``.

    Args:
        threshold: fraction of the step time that another plan must save, e.g. 0.05.
        window: number of steps measured before drawing conclusions; at least 3.
        horizon_steps: number of steps within which a change must pay for itself, and after which a worker so slow that
            it got nothing to do is tried again.

    Raises:
        ConfigurationError: for values that cannot work.
    """

    def __init__(self, threshold: float = 0.05, window: int = 20, horizon_steps: int = 1000) -> None:
        if not is_number(threshold, 0, above=True) or threshold >= 1:
            raise ConfigurationError(
                f"PlanMonitor(threshold={threshold!r}): give the fraction of a step that a change must save, e.g. 0.05."
            )
        for name, value, least in (("window", window, 3), ("horizon_steps", horizon_steps, 1)):
            if not is_integer(value, least):
                raise ConfigurationError(f"PlanMonitor({name}={value!r}): give a number of steps, at least {least}.")
        self.threshold = threshold
        self.window = window
        self.horizon_steps = horizon_steps

    @property
    def options(self) -> DriftOptions:
        """The options for the coordinator."""
        return DriftOptions(self.threshold, self.window, self.horizon_steps)

    @staticmethod
    def options_of(trainer: pl.Trainer) -> DriftOptions | None:
        """The options of the first of them among the callbacks of ``trainer``; None without one."""
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        return next((callback.options for callback in callbacks if isinstance(callback, PlanMonitor)), None)
