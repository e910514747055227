"""The launching process: a supervisor, not a rank.

It starts the workers, hosts the coordinator, waits, and takes the results. After the loss of a whole stage it can
restart from the newest checkpoint. A process with ``RECYCLE_COORDINATOR`` in its environment becomes a worker of that
run.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pickle
import shutil
import signal
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info

from lightning_recycle.arguments import unknown_variables
from lightning_recycle.control.monitoring.history import Event, summary
from lightning_recycle.control.monitoring.logs import (
    install_if_wanted,
)
from lightning_recycle.control.protocol import state as outcomes
from lightning_recycle.control.protocol.messages import Crash
from lightning_recycle.control.protocol.state import Ended, Finished, Outcome, StageLost
from lightning_recycle.engines.worker_environment import check_copies, check_workers_environment, discover
from lightning_recycle.errors import (
    ConfigurationError,
    ReCycleError,
    StageLostError,
    UnsupportedFeatureError,
    WorkerStartError,
)
from lightning_recycle.launch.resume_and_restart import RestartPolicy, folders_of_saves, newest_saved, settle_checkpoint
from lightning_recycle.launch.run_attempt import EndSignals, RunAttempt, devices_left
from lightning_recycle.launch.run_preparation import ConfiguredStrategy, PreparedRun, TrainerCall, prepare
from lightning_recycle.launch.run_results import WHY_NO_WEIGHTS, MissingWeights, take_results
from lightning_recycle.launch.worker_payload import ignore_deprecations_of_lightning, is_internal
from lightning_recycle.launch.worker_process import run_outside
from lightning_recycle.pickling import exit_if_importing
from lightning_recycle.planning.grid import Positions
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.processes import name_process
from lightning_recycle.session.lightning_internals import (
    mark_saved,
    saves_on_exception,
)
from lightning_recycle.session.reporting import show_cursor

log = logging.getLogger(__name__)


class SupervisorLauncher:
    """Runs a Trainer function in worker processes and takes its results.

    ``history`` and ``schedules`` (by generation) are those of the newest ``fit``; before the first, of the newest run.
    """

    def __init__(self, strategy: ConfiguredStrategy) -> None:
        self.history: list[Event] = []
        self.schedules: list[Schedule] = []
        self._strategy = strategy
        self._interrupted = False
        self._said_how_it_ended = False
        self._has_run = False
        self._has_fitted = False
        self._untrained: MissingWeights | None = None

    @property
    def is_interactive_compatible(self) -> bool:
        return True  # workers are no forks of this process, and get what the notebook defines by value

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Runs ``function``, a bound method of ``trainer``, in every worker.

        Raises:
            StageLostError: when all replicas of a stage died.
            ConfigurationError: for errors that show before anything starts.
            CheckpointError: if the checkpoint to resume from is damaged.
            Exception: the user's own exception from a worker, with that worker's traceback.
        """
        assert trainer is not None
        install_if_wanted()
        ignore_deprecations_of_lightning()
        exit_if_importing()
        outside = discover()
        if outside is None:
            check_copies()
            check_workers_environment()
            for warning in [] if self._has_run else unknown_variables():
                log.warning("%s", warning)
        else:
            name_process("recycle worker")  # for a recycle-run, too: it takes Ctrl-C from now on
        self._interrupted, self._said_how_it_ended = True, False
        call = TrainerCall(trainer, function, args, kwargs)
        if self._untrained is not None:
            self._untrained.check(trainer.lightning_module, call.arguments.get("ckpt_path"))
        run = prepare(call, self._strategy, outside, self._has_run)
        if outside is None:
            return self._supervise(run)
        returned = run_outside(outside, run)
        self._interrupted = False
        self._note_missing_weights(trainer, is_one_stage=True)
        return returned

    def _supervise(self, run: PreparedRun) -> Any:
        """Runs the function in workers that this process starts; returns its result.

        Keeps the records of the newest ``fit`` over other runs. After an error nothing is saved here: the state was in
        workers.
        """
        run = replace(run, call=settle_checkpoint(run.call))
        trainer, fits = run.call.trainer, run.call.fits
        self._has_fitted |= fits
        fit_records = self.history, self.schedules
        self.history, self.schedules = [], []
        savers = fits and any(map(saves_on_exception, trainer.checkpoint_callbacks))
        if fits:
            self._strategy.optimizers, self._strategy.lr_scheduler_configs = [], []  # of an earlier fit
        saves = savers or (fits and bool(run.options.checkpoints.save_on_signal))
        try:
            with EndSignals(gracefully=saves) as signals, _folder_for_results() as folder:
                setup = replace(run.setup, gathering=replace(run.setup.gathering, folder=folder))
                return self._launch(replace(run, setup=setup), signals)
        except BaseException:
            show_cursor(trainer)
            if savers and signals.received is None:
                log.warning(
                    "No checkpoint is written for this error: the state was in the workers, and they have"
                    " ended. ModelCheckpoint(every_n_train_steps=...) writes while they live."
                )
            mark_saved(trainer)
            raise
        finally:
            if self._has_fitted and not fits:
                self.history, self.schedules = fit_records

    def _launch(self, run: PreparedRun, signals: EndSignals) -> Any:
        policy, restarts = RestartPolicy(run.setup.positions, run.options.recovery), run.setup.may_restart
        if restarts and run.options.recovery.on_stage_lost == "auto":
            rank_zero_info(
                "Should all workers of a stage be lost, the run starts again from its newest checkpoint;"
                " RecoveryOptions(on_stage_lost='raise') ends it instead."
            )
        for number in itertools.count():
            outcome = self._attempt(run, number, signals)
            if isinstance(outcome, Finished):
                return self._take_results(run, outcome, signals)
            if signals.received is not None and (outcome is None or isinstance(outcome, Ended)):
                log.warning("%s: %s", signals.received.name, self._how_it_ended(outcome))
                self._said_how_it_ended = True
                raise signals.error()
            if not isinstance(outcome, StageLost) or not restarts or signals.received is not None:
                raise error_of(outcome, run.setup.positions, self.history)
            run = self._restarted(run, policy, outcome)

    def _attempt(self, run: PreparedRun, number: int, signals: EndSignals) -> Outcome | None:
        attempt = RunAttempt(run, number, signals)
        try:
            outcome = attempt.run()
        finally:
            self.history += attempt.history
            self.schedules += attempt.schedules
        self._has_run = True
        return outcome

    def _take_results(self, run: PreparedRun, outcome: Finished, signals: EndSignals) -> Any:
        self._interrupted = False
        returned = take_results(run.call, outcome.results)
        if run.call.fits:
            self._note_missing_weights(run.call.trainer, is_one_stage=False)
            if run.options.monitoring.run_summary:
                for line in summary(self.history, run.setup.positions):
                    rank_zero_info(line)
        if signals.received is not None:
            log.warning("%s: the run was at its end; its results are here.", signals.received.name)
            raise signals.error()
        return returned

    def _restarted(self, run: PreparedRun, policy: RestartPolicy, outcome: StageLost) -> PreparedRun:
        """The run that restarts from the newest checkpoint; StageLostError without one."""
        positions = run.setup.positions
        trainer = run.call.trainer
        folders = folders_of_saves(trainer)
        checkpoint = newest_saved(self.history, trainer.strategy.checkpoint_io, run.setup.name, folders)
        saved = max((event.step for event in self.history if event.kind == "saved"), default=0)
        lost_at = next((event.step for event in reversed(self.history) if event.kind in ("step", "resumed")), -1)
        start = policy.next_start(None if checkpoint is None else saved, devices_left(run), lost_at)
        if isinstance(start, str):
            raise error_of(outcome, positions, self.history, start)
        again = f"The run starts again from {checkpoint} with {start.workers} workers of each stage"
        log.warning("%s", error_of(outcome, positions, self.history, again))
        # weights_only: this run wrote the file itself.
        setup = replace(run.setup, grid=start.grid, weights_only=False, has_run=True, restarts=True)
        least = None if start.least == start.grid.pipelines else start.least
        recovery = replace(run.options.recovery, min_pipelines=least)
        options = replace(run.options, recovery=recovery)
        return replace(run, call=run.call.from_checkpoint(checkpoint), setup=setup, options=options)

    def _note_missing_weights(self, trainer: pl.Trainer, is_one_stage: bool) -> None:
        """Remembers, and warns, if the trained weights have stayed in the workers."""
        self._untrained = None
        if self._strategy.missing_weights is not None:
            self._untrained = MissingWeights(trainer.lightning_module, is_one_stage)
            log.warning("The model in this process is not the trained one: %s.", self._strategy.missing_weights)

    def _how_it_ended(self, outcome: Outcome | None) -> str:
        saved = [event for event in self.history if event.kind == "saved"]
        newest = next((event.step for event in reversed(self.history) if event.kind == "step"), None)
        if outcome is None:
            seconds = self._strategy.options.checkpoints.signal_timeout
            why = f"ended without a checkpoint, as none was complete within {seconds:g} s (signal_timeout)"
        else:
            why = "ended before its first step" if newest is None else f"ended after step {newest + 1}"
        if not saved:
            return f"the run {why}. There is no checkpoint."
        return f"the run {why}. Its newest checkpoint, of step {saved[-1].step}, is {saved[-1].details['path']}."

    def may_save(self, checkpoint: Mapping[str, Any], path: Any) -> bool:
        """Whether this process has the weights to write ``checkpoint``.

        Raises UnsupportedFeatureError if its weights or its optimizers' states did not come home.
        """
        if self._interrupted:
            if not any(event.kind == "saved" and event.details["path"] == os.fspath(path) for event in self.history):
                log.warning("%s is not written: the run failed, and its newest weights were in the workers.", path)
            return False
        if self._strategy.missing_weights is not None:
            raise UnsupportedFeatureError(
                f"trainer.save_checkpoint({os.fspath(path)!r}) was called after fit in a process without the trained"
                f" weights: {WHY_NO_WEIGHTS}. Let a ModelCheckpoint callback write them in time (save_last=True; with"
                " save_distributed_checkpoint=True no process needs all of them), or use"
                " CheckpointOptions(gather_result=True)."
            )
        if "optimizer_states" in checkpoint and self._strategy.missing_optimizers is not None:
            raise UnsupportedFeatureError(
                f"trainer.save_checkpoint({os.fspath(path)!r}) was called in the launching process, which has the"
                f" weights but not the optimizers: {self._strategy.missing_optimizers}. Use"
                " trainer.save_checkpoint(..., weights_only=True), or a ModelCheckpoint callback."
            )
        return True

    def on_exception(self, exception: BaseException) -> None:
        """Logs the end of the run, if a signal ended this process."""
        terminated = isinstance(exception, SystemExit) and exception.code == 128 + signal.SIGTERM
        if (terminated or isinstance(exception, KeyboardInterrupt)) and not self._said_how_it_ended:
            how = self._how_it_ended(Ended())
            rank_zero_info(how[0].upper() + how[1:])

    def kill(self, signum: Any) -> None:
        """Lightning's SIGTERM handler: workers obey the coordinator, not signals."""


@contextlib.contextmanager
def _folder_for_results() -> Iterator[str | None]:
    """The path of a folder that workers make for large results, or None."""
    try:
        folder = os.path.join(tempfile.gettempdir(), f"recycle-result-{uuid.uuid4().hex}")
    except OSError:  # nothing can be written anywhere: the result comes in messages
        folder = None
    try:
        yield folder
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)  # usually it was not needed


# ---------------------------------------------------------------------- errors


def error_of(outcome: Any, positions: Positions, history: Sequence[Event], remedy: str | None = None) -> BaseException:
    """The exception for ``outcome``, with ``remedy`` for a lost stage."""
    if isinstance(outcome, outcomes.StageLost):
        causes = "; ".join(f"worker {positions.name(rank)}: {cause}" for rank, cause in sorted(outcome.causes.items()))
        if not any(event.kind in ("step", "resumed") for event in history):
            return WorkerStartError(
                f"The workers of stage {outcome.stage} ended before training began ({causes}). See their output above;"
                " a script that comes to trainer.fit() outside of its `if __name__ == '__main__':` when workers"
                " import it is a common reason."
            )
        if remedy is None:
            remedy = (
                "Start again from the newest checkpoint, as a run with a ModelCheckpoint does by itself unless"
                " RecoveryOptions(on_stage_lost='raise'), and use more pipelines (more devices, or a smaller"
                " pipeline_parallel_size) to survive more failures"
            )
        return StageLostError(
            f"All replicas of stage {outcome.stage} are lost ({causes}); its parameters"
            f" exist nowhere else. {remedy[0].upper()}{remedy[1:]}."
        )
    if isinstance(outcome, outcomes.Crashed):
        return _exception_from(outcome.crash, positions)
    if isinstance(outcome, outcomes.Failed):
        return ReCycleError(outcome.reason)
    return ReCycleError(f"The run ended in an unknown way: {outcome!r}.")


class WorkerTraceback(Exception):
    """A worker's traceback, shown as the cause of the same exception raised here."""

    __module__ = "builtins"  # so Python shows its name without that of a module

    def __init__(self, worker: str, text: str) -> None:
        self.text = f"In worker {worker}:\n\n{text}"

    def __str__(self) -> str:
        return self.text


def _exception_from(crash: Crash, positions: Positions) -> BaseException:
    error: BaseException | None = None
    if crash.exception is not None:
        try:
            error = pickle.loads(crash.exception)
        except Exception as reason:  # a class whose pickle does not load: only its text is left
            log.debug("The worker's exception could not be loaded: %s", reason)
    has_remedy = isinstance(error, (ConfigurationError, UnsupportedFeatureError))  # its message is enough
    if isinstance(error, SystemExit):
        worker = positions.name(crash.rank)
        if not error.code:  # this process would report success, without a result
            error = ReCycleError(
                f"Worker {worker} called sys.exit({'' if error.code is None else error.code}) before the run was over,"
                " so there is no result. To end training early, set trainer.should_stop = True."
            )
        else:  # it ends this process with that status, as it would on one device, and shows no traceback
            log.error("Worker %s called sys.exit(%r):\n%s", worker, error.code, crash.traceback)
    if error is None:
        error = ReCycleError(crash.summary)
    if not (has_remedy and is_internal(crash.traceback)):
        error.__cause__ = WorkerTraceback(positions.name(crash.rank), crash.traceback)
    return error
