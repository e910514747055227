"""What a run leaves in the launching process: weights and metrics, or the error that ended it."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer import call

from lightning_recycle.control.history import Event
from lightning_recycle.control.payload import unpack
from lightning_recycle.control.protocol import state as outcomes
from lightning_recycle.control.protocol.messages import Crash
from lightning_recycle.errors import ReCycleError, StageLostError, WorkerStartError
from lightning_recycle.launch.worker_process import Extras
from lightning_recycle.model.parts import parts_of
from lightning_recycle.planning.grid import Grid, Worker
from lightning_recycle.session.snapshot import load_progress

__all__ = ["error_of", "take_results"]

log = logging.getLogger(__name__)


def take_results(trainer: pl.Trainer, results: Mapping[int, Any]) -> Any:
    """Puts what the workers delivered, by rank, into ``trainer`` and its module; returns what they returned."""
    module = trainer.lightning_module
    state: dict[str, torch.Tensor] = {}
    extras: Extras | None = None
    for part, found in (unpack(payload) for _, payload in sorted(results.items())):
        state.update(part)
        extras = found or extras
    assert extras is not None
    parts_of(module).build()
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name in state and tensor.dtype != state[name].dtype:  # trained in another precision than it came in
            tensor.data = tensor.data.to(state[name].dtype)
    module.load_state_dict(state)
    trainer.state = extras.trainer_state
    trainer.should_stop = extras.should_stop
    for name, metrics in extras.metrics.items():
        getattr(trainer, name).update(metrics)
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):  # it takes results only from its own directory
            found = extras.callbacks.get(callback.state_key, {})
            callback.dirpath = found.get("dirpath", callback.dirpath)
            callback.current_score = found.get("current_score")  # part of its state, but not restored from it
    call._call_callbacks_load_state_dict(trainer, {"callbacks": extras.callbacks})
    load_progress(trainer.fit_loop, extras.fit_loop)
    return extras.returned


def error_of(outcome: Any, grid: Grid, history: Sequence[Event]) -> BaseException:
    """The exception that reports ``outcome``."""
    if isinstance(outcome, outcomes.StageLost):
        causes = "; ".join(f"worker {grid.worker(rank)}: {cause}" for rank, cause in sorted(outcome.causes.items()))
        if not any(event.kind in ("step", "resumed") for event in history):
            return WorkerStartError(
                f"The workers of stage {outcome.stage} ended before training began ({causes}). See their output above;"
                " a script that comes to trainer.fit() outside of its `if __name__ == '__main__':` when workers"
                " import it is a common reason."
            )
        return StageLostError(
            f"All {grid.pipelines} replicas of stage {outcome.stage} are lost ({causes}); its parameters exist"
            " nowhere else. Start again from the newest checkpoint, or let"
            " ReCycleStrategy(on_stage_lost='restart') do so, and use more pipelines (more devices, or a smaller"
            " pipeline_parallel_size) to survive more failures."
        )
    if isinstance(outcome, outcomes.Crashed):
        return _exception_from(outcome.crash, grid)
    if isinstance(outcome, outcomes.Failed):
        return ReCycleError(outcome.reason)
    return ReCycleError(f"The run ended in an unknown way: {outcome!r}.")


class WorkerTraceback(Exception):
    """The traceback of an exception in a worker, shown as the cause of the same exception raised here."""

    __module__ = "builtins"  # so Python shows its name without that of a module

    def __init__(self, worker: Worker, text: str) -> None:
        self.text = f"In worker {worker}:\n\n{text}"

    def __str__(self) -> str:
        return self.text


def _exception_from(crash: Crash, grid: Grid) -> BaseException:
    error: BaseException | None = None
    if crash.exception is not None:
        try:
            error = pickle.loads(crash.exception)
        except Exception as reason:  # a class whose pickle does not load: only its text is left
            log.debug("The worker's exception could not be loaded: %s", reason)
    if isinstance(error, SystemExit):
        worker = grid.worker(crash.rank)
        if not error.code:  # this process would report success, without a result
            error = ReCycleError(
                f"Worker {worker} called sys.exit({'' if error.code is None else error.code}) before the run was over,"
                " so there is no result. To end training early, set trainer.should_stop = True."
            )
        else:  # it ends this process with that status, as it would on one device, and shows no traceback
            log.error("Worker %s called sys.exit(%r):\n%s", worker, error.code, crash.traceback)
    if error is None:
        error = ReCycleError(crash.summary)
    error.__cause__ = WorkerTraceback(grid.worker(crash.rank), crash.traceback)
    return error
