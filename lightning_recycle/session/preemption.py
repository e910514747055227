"""What signals to a worker ask of its run: nothing at once, everything at the next step boundary.

Concept: a handler runs between any two bytecodes of the main thread, maybe amid a collective or a recovery, so it can
neither save a checkpoint, as Lightning's handlers for SLURM do, nor wait for others. It leaves a note, which the
heartbeat takes to the coordinator at once; what follows is agreed on with a step
(:mod:`~lightning_recycle.session.interruption`).

=========================  ==========================================  ===========================================
the signal                 in a job that SLURM may run again            elsewhere
=========================  ==========================================  ===========================================
SIGTERM                    this worker leaves; the run ends with a      this worker leaves, unless it is the last
                           checkpoint once all workers are told to      holder of its stage
the one for requeueing     the run ends with a checkpoint, and then     Lightning listens to none
                           the job is requeued
=========================  ==========================================  ===========================================

SIGTERM alone never requeues: it is also what ``scancel`` and the time limit send; who preempts a job by it requeues it,
too. Whether SLURM may run the job again, and which signal it sends before, says Lightning's ``SLURMEnvironment``.
"""

from __future__ import annotations

import logging
import signal
import threading
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from lightning_recycle.control.client import ControlClient

__all__ = ["Preemption"]

log = logging.getLogger(__name__)


class Preemption:
    """The signals of one worker, from the moment on when Lightning listens to any.

    Args:
        trainer: its Trainer.
        client: the connection to the coordinator.
        fitting: whether there are step boundaries. Otherwise SIGTERM is left to Lightning, which ends the run.

    Attributes:
        resumes: whether SLURM may run this job again, so that what is saved will be resumed from.
        requeue_wanted: whether this worker was told to have the job requeued.
    """

    def __init__(self, trainer: pl.Trainer, client: ControlClient, fitting: bool) -> None:
        environment = trainer._accelerator_connector.cluster_environment
        self.resumes = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
        self.requeue_wanted = False
        self._client, self._fitting = client, fitting
        # Lightning registers these when it begins to run, and what was there before when it has ended.
        self._handlers = vars(trainer._signal_connector)
        self._handlers["_slurm_sigusr_handler_fn"] = self._end_run
        if fitting:
            self._handlers["_sigterm_notifier_fn"] = self._leave

    def take_sigterm(self) -> None:
        """From now on SIGTERM means nothing else to this process, whatever else listened to it."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._leave)

    def release(self) -> None:
        """This worker's Trainer is that of the launching process again."""
        for name in ("_slurm_sigusr_handler_fn", "_sigterm_notifier_fn"):
            self._handlers.pop(name, None)

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
