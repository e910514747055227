"""Options, place and connections of one worker, which all parts of its session use."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn

from lightning_recycle.control.client import ControlClient
from lightning_recycle.model.module import global_seed
from lightning_recycle.planning.grid import Grid, Worker
from lightning_recycle.session.collectives import Collectives
from lightning_recycle.session.configuration import Options, Place, RunSetup

__all__ = ["WorkerContext"]


@dataclass(frozen=True)
class WorkerContext:
    """The context of one worker.

    Args:
        options: the user's options.
        run: the settings that all workers have in common.
        place: this worker's place.
        client: its connection to the coordinator.
        trainer: the Trainer of this process.
        collectives: this worker's collectives.
        fitting: whether the Trainer's function is ``fit``.
    """

    options: Options
    run: RunSetup
    place: Place
    client: ControlClient
    trainer: pl.Trainer
    collectives: Collectives
    fitting: bool

    @classmethod
    def of(
        cls, options: Options, run: RunSetup, place: Place, client: ControlClient, trainer: pl.Trainer
    ) -> WorkerContext:
        """The context of a worker whose Trainer is about to run."""
        fitting = trainer.state.fn == TrainerFn.FITTING
        return cls(options, run, place, client, trainer, Collectives(run.grid, client), fitting)

    @property
    def grid(self) -> Grid:
        """The grid of the run."""
        return self.run.grid

    @property
    def worker(self) -> Worker:
        """This worker's position in the grid."""
        return self.collectives.worker

    @property
    def device(self) -> torch.device:
        """The device that this worker computes on."""
        return self.trainer.strategy.root_device

    @property
    def device_name(self) -> str:
        """The name of the device by which its machine knows it."""
        return f"{self.device.type}:{self.place.device}"

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return global_seed() if self.options.seed is None else self.options.seed

    def forward_context(self) -> AbstractContextManager[Any]:
        """The context of the precision plugin around each forward."""
        return self.trainer.strategy.precision_plugin.train_step_context() or nullcontext()
