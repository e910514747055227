"""Early ends of a run: signals, ``trainer.should_stop``, the last checkpoint.

Signals: a handler runs between any two bytecodes of the main thread, maybe amid a collective or a recovery, so it can
neither save a checkpoint, as Lightning's handlers for SLURM do, nor wait for others. It leaves a note, which the
heartbeat takes to the coordinator at once; what follows is agreed on with a step.

=========================  ==========================================  ===========================================
the signal                 in a job that SLURM may run again            elsewhere
=========================  ==========================================  ===========================================
SIGTERM                    this worker leaves; the run ends with a      this worker leaves, unless it is the last
                           checkpoint once all workers got the signal   holder of its stage
the one for requeueing     the run ends with a checkpoint, and then     Lightning listens to none
                           the job is requeued
=========================  ==========================================  ===========================================

SIGTERM alone never requeues: it is also what ``scancel`` and the time limit send; who preempts a job by it requeues it,
too. Whether SLURM may run the job again, and which signal it sends before, is in Lightning's ``SLURMEnvironment``.

The last step: the answer to its losses (``StepResult.after_step``) announces it to all workers. Once Lightning has
logged the step, they save together, and the run ends (:class:`SaveAndEnd`). If the job is to run again, one worker
requeues it before: the checkpoint is complete. Lightning's callbacks that save on exceptions are called there. In the
launching process, where Lightning calls ``on_exception``, there is nothing to save.

``trainer.should_stop``: a callback may set it on all workers at the same place, or on one alone, say by its own clock.
Where all set it, they stop there, as on one device; else after one of the next steps
(:mod:`~lightning_recycle.control.protocol.control_collectives`). A worker's own wish is taken back until then.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_recycle.control.protocol.control_collectives import StopPlace, stop_point
from lightning_recycle.control.protocol.messages import AfterStep
from lightning_recycle.control.protocol.state import ENDED
from lightning_recycle.engines.slurm import requeue
from lightning_recycle.session.collectives import WorkerContext
from lightning_recycle.session.lightning_internals import (
    SignalHandlers,
    cluster_environment_of,
    mark_saved,
    path_of_ended_run,
)

if TYPE_CHECKING:
    from lightning_recycle.session.training_steps import TrainingSteps


def saves_on_exception(callback: Callback) -> bool:
    """Whether ``callback``, of Lightning's, writes a checkpoint in ``on_exception``."""
    return isinstance(callback, OnExceptionCheckpoint) or (
        isinstance(callback, ModelCheckpoint) and callback.save_on_exception
    )


def saved_already(trainer: pl.Trainer) -> None:
    """Marks the last step as saved for ``ModelCheckpoint(save_on_exception=True)``."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            mark_saved(callback, trainer.global_step)


class SaveAndEnd:
    """Saves at the end of the last step of a run that a signal ends, and ends the run."""

    def __init__(self, context: WorkerContext, steps: TrainingSteps, preemption: Preemption) -> None:
        self._context, self._steps, self._preemption = context, steps, preemption
        self._collectives, self._options = context.collectives, context.options.checkpoints

    def end(self, trainer: pl.Trainer) -> None:
        """Ends this worker, with all others, if the run is to end after this step."""
        if not self._steps.ends_after_batch():
            return
        self._save(trainer)
        for logger in trainer.loggers:
            logger.finalize("failed")  # as Lightning does when a run is interrupted: it writes what it holds
        if self._collectives.decide(self._preemption.requeue_wanted, all_agree=False):
            self._collectives.by_leader("requeue", self._requeue)
        self._collectives.gather(ENDED, None)  # the coordinator ends all workers instead of answering

    def _save(self, trainer: pl.Trainer) -> None:
        # There is no later step after which a checkpoint that is lost could be asked for again.
        with self._steps.checkpoints.waited_for():
            self._steps.checkpoints.ask_again()
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if saves_on_exception(callback):
                    callback.on_exception(trainer, trainer.lightning_module, SIGTERMException())
            # A number in it is found by looking into the folder.
            path = self._collectives.broadcast(self._path(trainer))
            if path is not None:
                trainer.save_checkpoint(path)

    def _requeue(self) -> None:
        with self._context.client.busy("requeue"):
            requeue(self._options.signal_timeout)

    def _path(self, trainer: pl.Trainer) -> str | None:
        """The path of the checkpoint that this worker would choose."""
        wanted = self._options.save_on_signal
        if not isinstance(wanted, bool):
            return os.fspath(wanted)
        if not wanted and not self._preemption.resumes:
            return None
        return path_of_ended_run(trainer)


# ---------------------------------------------------------------------- signals

log = logging.getLogger(__name__)


class Preemption:
    """The signals of one worker, from the moment on when Lightning listens to any.

    Attributes:
        resumes: whether SLURM may run this job again, so that what is saved will be resumed from.
    """

    def __init__(self, context: WorkerContext) -> None:
        environment = cluster_environment_of(context.trainer)
        self.resumes = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
        self.requeue_wanted = False
        self._client, self._fitting = context.client, context.fitting
        self._handlers = SignalHandlers(context.trainer)
        self._handlers.replace(self._end_run, self._leave if self._fitting else None)

    def take_sigterm(self) -> None:
        """Claims SIGTERM for this process, whatever else listened to it."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._leave)

    def release(self) -> None:
        """This worker's Trainer is that of the launching process again."""
        self._handlers.release()

    def _leave(self, *_: Any) -> None:
        self._client.request_leave(with_run=self.resumes)

    def _end_run(self, signum: int, _: Any) -> None:
        if not self._fitting:
            log.warning(
                "%s: nothing is saved and the job is not requeued, as it does not train.", signal.Signals(signum).name
            )
            return
        self.requeue_wanted = True
        self._client.request_end()


# ---------------------------------------------------------------------- trainer.should_stop


class StopRequests:
    """This worker's part in stopping early.

    Attributes:
        agreed: whether all have agreed to stop. Lightning may still have to go on, to ``min_steps`` or ``min_epochs``.
    """

    def __init__(self, context: WorkerContext, steps: TrainingSteps) -> None:
        self.agreed = False
        self._trainer, self._client, self._steps = context.trainer, context.client, steps
        self._is_told_to_wait = False

    def agree(self, place: StopPlace) -> None:
        """Sets ``trainer.should_stop`` here as on all other workers."""
        trainer, client = self._trainer, self._client
        if self.agreed or client.joining:
            return
        if self._steps.after_step is AfterStep.STOP:
            self.agreed = trainer.should_stop = True
            return
        point = stop_point(self._steps.executor.version, place)
        if trainer.should_stop and not self._is_told_to_wait:
            self.agreed = client.request_stop(point)
            if self.agreed:
                return
            self._is_told_to_wait = True
        trainer.should_stop = False
        client.go_on(point)
