"""What is saved of a run that a signal ends: at one step boundary, by all workers together.

A handler cannot save, as a checkpoint is a collective of all workers. So the launching process, or a worker that SLURM
started (:mod:`~lightning_recycle.session.preemption`), asks the coordinator, and the answer to a step's losses tells
all workers that this is the last one (``StepResult.after_step``). At its end, where ``ModelCheckpoint`` saves too, each
of them saves (:meth:`SaveAndEnd.on_train_batch_end`); once Lightning has logged the step, it ends
(:meth:`SaveAndEnd.end`). If the job is to run again, one worker says so to SLURM before: the checkpoint is complete.

Lightning's callbacks that save on exceptions are called there. In the launching process, where Lightning calls
``on_exception``, there is nothing to save.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_recycle.control.protocol.state import ENDED
from lightning_recycle.session.collectives import Collectives
from lightning_recycle.session.preemption import Preemption

__all__ = ["SaveAndEnd", "saved_already", "saves_on_exception"]


def saves_on_exception(callback: Callback) -> bool:
    """Whether ``callback`` is one of Lightning's that write a checkpoint in ``on_exception``."""
    return isinstance(callback, OnExceptionCheckpoint) or (
        isinstance(callback, ModelCheckpoint) and callback.save_on_exception
    )


def saved_already(trainer: pl.Trainer) -> None:
    """Lets ``ModelCheckpoint(save_on_exception=True)`` know in the launching process that there is nothing to save."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            callback._last_global_step_saved = trainer.global_step


class SaveAndEnd(Callback):
    """Saves at the end of the last step of a run that was told to end, and ends the run. Lives in the workers, behind
    all other callbacks.

    Args:
        save_on_signal: the option of the strategy.
        collectives: this worker's collectives.
        ends: whether the run ends after this batch.
        preemption: what signals to this worker ask for.
        requeue: has the job run again; called on one worker, again on another one if that dies.
    """

    def __init__(
        self,
        save_on_signal: bool | str | os.PathLike[str],
        collectives: Collectives,
        ends: Callable[[], bool],
        preemption: Preemption,
        requeue: Callable[[], None],
    ) -> None:
        self._save_on_signal = save_on_signal
        self._collectives = collectives
        self._ends = ends
        self._preemption = preemption
        self._requeue = requeue

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if not self._ends():
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if saves_on_exception(callback):
                callback.on_exception(trainer, pl_module, SIGTERMException())
        path = self._collectives.broadcast(self._path(trainer))  # a number in it is found by looking into the folder
        if path is not None:
            trainer.save_checkpoint(path)

    def end(self, trainer: pl.Trainer) -> None:
        """Ends this worker, with all others, if the run is to end after this step."""
        if not self._ends():
            return
        for logger in trainer.loggers:
            logger.finalize("failed")  # as Lightning does when a run is interrupted: it writes what it holds
        wanted = self._collectives.decide(self._preemption.requeue_wanted, all_agree=False)
        while wanted:
            leads = self._collectives.leads
            if leads:
                self._requeue()
            wanted = not self._collectives.decide(leads, all_agree=False)
        self._collectives.gather(ENDED, None)  # the coordinator ends all workers instead of answering

    def _path(self, trainer: pl.Trainer) -> str | None:
        """Where the checkpoint is to be, in the opinion of this worker; None if none is wanted."""
        if not isinstance(self._save_on_signal, bool):
            return os.fspath(self._save_on_signal)
        if not self._save_on_signal and not self._preemption.resumes:
            return None
        return str(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))
