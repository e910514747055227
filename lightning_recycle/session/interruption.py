"""Early ends of a run: signals and ``trainer.should_stop``.

A signal handler runs amid a collective or a recovery, so it can neither save nor wait. It leaves a note for the
heartbeat; the run ends after a step whose answer says so.

=========================  ==========================================  ===========================================
the signal                 in a job that SLURM may run again            elsewhere
=========================  ==========================================  ===========================================
SIGTERM                    this worker leaves; the run ends with a      this worker leaves, unless it is the last
                           checkpoint once all workers got the signal   holder of its stage
the one for requeueing     the run ends with a checkpoint, and then     Lightning listens to none
                           the job is requeued
=========================  ==========================================  ===========================================

SIGTERM alone never requeues: ``scancel`` and the time limit send it, too. Workers that all set ``trainer.should_stop``
at one place stop there; if only some do, all stop after one of the next steps
(:mod:`~lightning_recycle.control.protocol.control_collectives`).
"""

from __future__ import annotations

import logging
import signal
import threading
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from lightning_recycle.control.protocol.control_collectives import StopPlace, stop_point
from lightning_recycle.control.protocol.messages import AfterStep
from lightning_recycle.session.collectives import WorkerContext
from lightning_recycle.session.lightning_internals import (
    SignalHandlers,
    cluster_environment_of,
)

# ---------------------------------------------------------------------- signals

log = logging.getLogger(__name__)


class Preemption:
    """Signals of one worker, from the moment on when Lightning listens to any.

    ``resumes``: whether SLURM may run this job again, resuming from its checkpoint.
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
        """Releases the signals: this worker's Trainer is the launching process's again."""
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

    ``agreed``: all have agreed to stop; Lightning may still go on, to ``min_steps`` or ``min_epochs``.
    """

    def __init__(self, context: WorkerContext) -> None:
        self.agreed = False
        self._trainer, self._client = context.trainer, context.client
        self._is_told_to_wait = False

    def agree(self, place: StopPlace, step: int, after_step: AfterStep) -> None:
        """Sets ``trainer.should_stop`` here as on all other workers."""
        trainer, client = self._trainer, self._client
        if self.agreed or client.joining:
            return
        if after_step is AfterStep.STOP:
            self.agreed = trainer.should_stop = True
            return
        point = stop_point(step, place)
        if trainer.should_stop and not self._is_told_to_wait:
            self.agreed = client.request_stop(point)
            if self.agreed:
                return
            self._is_told_to_wait = True
        trainer.should_stop = False
        client.go_on(point)
