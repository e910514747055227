"""Where the training is, as the user's code sees it in ``self.global_step`` and ``self.current_epoch``.

A worker that has applied a step may have to compute it once more for others, which have lost a worker. By then its
loops count the next step, perhaps of the next epoch; what the step computes must not depend on that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import lightning.pytorch as pl

__all__ = ["Moment"]


@dataclass(frozen=True)
class Moment:
    """The counters of a step.

    Args:
        steps: optimizer steps before it, over all epochs.
        epoch: its epoch.
        batch: the number of its batch in the epoch, counted from 1.
    """

    steps: int
    epoch: int
    batch: int

    @classmethod
    def of(cls, trainer: pl.Trainer) -> Moment:
        """The moment of the step that the loops of ``trainer`` are in."""
        loop = trainer.fit_loop
        steps = loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
        return cls(steps.completed, loop.epoch_progress.current.completed, loop.epoch_loop.batch_progress.current.ready)

    def restore(self, trainer: pl.Trainer) -> None:
        """Sets the counters of ``trainer``."""
        loop = trainer.fit_loop
        loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = self.steps
        loop.epoch_progress.current.completed = self.epoch
        loop.epoch_loop.batch_progress.current.ready = self.batch

    @contextmanager
    def again(self, trainer: pl.Trainer) -> Iterator[None]:
        """Within the block the counters of ``trainer`` are those of this moment."""
        now = Moment.of(trainer)
        self.restore(trainer)
        try:
            yield
        finally:
            now.restore(trainer)
