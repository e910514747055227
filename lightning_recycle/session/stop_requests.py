"""``trainer.should_stop``, agreed with all other workers wherever Lightning looks at it.

A callback may set it on all workers at the same place, or on one alone, say by its own clock. Where all set it, they
stop there, as on one device; else after one of the next steps
(:mod:`~lightning_recycle.control.protocol.control_collectives`). What a worker wants on its own is taken back until
then.
"""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl

from lightning_recycle.control.client import ControlClient
from lightning_recycle.control.protocol.control_collectives import StopPlace, stop_point
from lightning_recycle.control.protocol.messages import AfterStep

__all__ = ["StopRequests"]


class StopRequests:
    """This worker's part in stopping early.

    Args:
        trainer: its Trainer.
        client: the connection to the coordinator.
        steps: the number of steps that it has applied.
        after_step: what all do after the newest step.

    Attributes:
        agreed: whether all have agreed to stop. Lightning may still have to go on, to ``min_steps`` or ``min_epochs``.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        client: ControlClient,
        steps: Callable[[], int],
        after_step: Callable[[], AfterStep],
    ) -> None:
        self.agreed = False
        self._trainer, self._client = trainer, client
        self._steps, self._after_step = steps, after_step
        self._is_told_to_wait = False

    def agree(self, place: StopPlace) -> None:
        """Sets ``trainer.should_stop`` here as on all other workers; Lightning is about to look at it."""
        trainer, client = self._trainer, self._client
        if self.agreed or client.joining:
            return
        if self._after_step() is AfterStep.STOP:
            self.agreed = trainer.should_stop = True
            return
        point = stop_point(self._steps(), place)
        if trainer.should_stop and not self._is_told_to_wait:
            self.agreed = client.request_stop(point)
            if self.agreed:
                return
            self._is_told_to_wait = True
        trainer.should_stop = False
        client.go_on(point)
