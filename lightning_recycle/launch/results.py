"""What a run leaves in the launching process: weights and metrics, or the error that ended it."""

from __future__ import annotations

import logging
import os
import pickle
import tempfile
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Protocol, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer

from lightning_recycle.control.monitoring.history import Event
from lightning_recycle.control.payload import unpack
from lightning_recycle.control.protocol import state as outcomes
from lightning_recycle.control.protocol.messages import Crash
from lightning_recycle.errors import ConfigurationError, ReCycleError, StageLostError, WorkerStartError
from lightning_recycle.launch.delivery import Call, Extras, FiledPart, StagePart, UserObjects, data_given
from lightning_recycle.launch.exceptions import restore_chain
from lightning_recycle.launch.missing_weights import WEIGHTS_STAY
from lightning_recycle.launch.returned_optimizers import STAY_IN_THE_WORKERS, StageOptimizers, make_optimizers
from lightning_recycle.launch.shown_loaders import show_loaders
from lightning_recycle.model.cutting import parts_of
from lightning_recycle.model.weights import set_weights, weights_of
from lightning_recycle.planning.grid import Grid, Worker
from lightning_recycle.session.snapshot import load_progress
from lightning_recycle.session.weight_callbacks import take_pruned_form

__all__ = ["attach_data", "error_of", "take_results"]

log = logging.getLogger(__name__)


class _Strategy(Protocol):
    """What this module needs from the strategy."""

    optimizers: list[Optimizer]
    lr_scheduler_configs: list[LRSchedulerConfig]
    missing_optimizers: str | None
    missing_weights: str | None


def take_results(call_: Call, results: MutableMapping[int, Any]) -> Any:
    """Puts what the workers delivered, by rank, into the Trainer of ``call_`` and its module, and empties ``results``:
    model and optimizers may be large. Returns what the workers returned.
    """
    trainer = call_[0]
    state: dict[str, torch.Tensor] = {}
    parts: list[StagePart] = []
    extras: Extras | None = None
    for rank in sorted(results):
        part, found = unpack(results.pop(rank))
        parts.append(part.read() if isinstance(part, FiledPart) else part)
        extras = found or extras
    assert extras is not None
    parts.sort(key=lambda part: part.stage)
    here = all(part.state is not None for part in parts)
    attach_data(call_)
    user = UserObjects(call_)
    if here:
        for part in parts:
            state.update(part.state or {})
        trained = {name: flag for part in parts for name, flag in part.objects.trained.items()}
        reshape = partial(user.take, extras.objects) if extras.objects.whole else partial(_add, trainer, trained)
        _take_weights(trainer, state, reshape)
    _restore_trainer(trainer, extras)
    _restore_states(trainer, extras)
    for part in parts if here else []:
        user.take(part.objects, state)
    user.take(extras.objects, state)
    if trainer.state.fn == TrainerFn.FITTING:
        cast(_Strategy, trainer.strategy).missing_weights = None if here else WEIGHTS_STAY
        _restore_optimizers(trainer, [part.optimizers for part in parts], extras)
    if trainer.state.fn == TrainerFn.PREDICTING and extras.returned is not None:
        several = trainer.predict_loop.num_dataloaders > 1  # what is returned of one is not in a list of loaders
        trainer.predict_loop._predictions = extras.returned if several else [extras.returned]
    return extras.returned


def _take_weights(
    trainer: pl.Trainer, state: Mapping[str, torch.Tensor], reshape: Callable[[Mapping[str, torch.Tensor]], None]
) -> None:
    """Makes the module of ``trainer`` the trained one; ``reshape`` makes it one that has these weights.

    Raises:
        ReCycleError: if its weights do not fit into it; they are in a file then.
    """
    module = trainer.lightning_module
    try:
        parts_of(module).build()
        take_pruned_form(module, state)
        if is_overridden("configure_model", module) and weights_of(module).keys() != state.keys():
            module.configure_model()  # has run in the workers only
            take_pruned_form(module, state)
        if _forms(weights_of(module)) != _forms(state):  # made or changed by hooks
            reshape(state)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in state and tensor.dtype != state[name].dtype:  # trained in another precision than it came in
                tensor.data = tensor.data.to(state[name].dtype)
        set_weights(module, state)
    except Exception as error:
        raise ReCycleError(
            f"The trained weights do not fit into the {type(module).__name__} of this process: {error} They are in"
            f" {_kept(trainer, state)}: load that with torch.load() and put them into a module that is built as in the"
            " workers. Make modules and buffers in __init__() or configure_model() instead of other hooks, to get them"
            " back in the module."
        ) from error


def _add(trainer: pl.Trainer, trained: Mapping[str, bool], state: Mapping[str, torch.Tensor]) -> None:
    """Adds the weights that hooks have given to modules which this process has; for other modules, loading fails.

    ``trained``: whether each parameter requires a gradient, by name.
    """
    module = trainer.lightning_module
    modules, here = dict(module.named_modules()), _forms(weights_of(module))
    for name, tensor in state.items():
        owner, _, attribute = name.rpartition(".")
        if here.get(name) == tensor.shape or owner not in modules:
            continue
        if name in trained:
            modules[owner].register_parameter(attribute, torch.nn.Parameter(tensor.clone(), trained[name]))
        else:
            modules[owner].register_buffer(attribute, tensor.clone())


def _forms(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in weights.items()}


def _kept(trainer: pl.Trainer, state: Mapping[str, torch.Tensor]) -> str:
    """The file that has the weights from now on; one of TMPDIR if nothing can be written in the Trainer's folder."""
    for folder in (trainer.default_root_dir, tempfile.gettempdir()):
        try:
            descriptor, path = tempfile.mkstemp(prefix="trained_weights_", suffix=".pt", dir=folder)
            with os.fdopen(descriptor, "wb") as file:
                torch.save(dict(state), file)
            return path
        except (OSError, RuntimeError) as error:  # RuntimeError: what torch makes of a full disk
            log.warning("The trained weights could not be written in %s: %s", folder, error)
    return "no file, as none could be written"


def attach_data(call_: Call) -> None:
    """Links module, data and Trainer, as the function of the Trainer did in the workers."""
    trainer = call_[0]
    given = data_given(call_)
    evaluated = {
        TrainerFn.VALIDATING: "val_dataloaders",
        TrainerFn.TESTING: "test_dataloaders",
        TrainerFn.PREDICTING: "predict_dataloaders",
    }
    assert trainer.state.fn is not None
    names = {"dataloaders": evaluated.get(trainer.state.fn, "")}
    data = {names.get(name, name): value for name, value in given.items()}
    trainer._data_connector.attach_data(trainer.lightning_module, **data)


def _restore_trainer(trainer: pl.Trainer, extras: Extras) -> None:
    """Progress, metrics, and what is known of the data."""
    for path, attributes in extras.trainer.items():
        vars(attrgetter(path)(trainer) if path else trainer).update(attributes)
    for name, loop_state in extras.loops.items():
        load_progress(getattr(trainer, name), loop_state)
    trainer.fit_loop._combined_loader_states_to_load = []  # nothing is being resumed
    for path, states in extras.loaders.items():
        loop = attrgetter(path)(trainer)
        loop._combined_loader = show_loaders(
            loop._data_source, states, "max_size_cycle" if path == "fit_loop" else "sequential"
        )


def _restore_optimizers(trainer: pl.Trainer, stages: Sequence[StageOptimizers | None], extras: Extras) -> None:
    strategy = cast(_Strategy, trainer.strategy)
    known = [stage for stage in stages if stage is not None]
    strategy.missing_optimizers = STAY_IN_THE_WORKERS if len(known) < len(stages) else None
    if strategy.missing_optimizers is None:
        try:
            strategy.optimizers, strategy.lr_scheduler_configs = make_optimizers(
                trainer.lightning_module, known, extras.copies, extras.schedulers
            )
        except ConfigurationError as error:  # most scripts do not need them here; who does is told
            strategy.missing_optimizers = str(error)
            log.info("The launching process has no optimizers: %s", error)


def _restore_states(trainer: pl.Trainer, extras: Extras) -> None:
    """What callbacks, the data module and the precision plugin have in state dicts."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):  # it takes results only from its own directory
            found = extras.callbacks.get(callback.state_key, {})
            callback.dirpath = found.get("dirpath", callback.dirpath)
    call._call_callbacks_load_state_dict(trainer, {"callbacks": extras.callbacks})
    trainer.precision_plugin.load_state_dict(extras.precision)
    if extras.data:
        trainer.datamodule.load_state_dict(extras.data)  # type: ignore[attr-defined]


def error_of(outcome: Any, grid: Grid, history: Sequence[Event], then: str | None = None) -> BaseException:
    """The exception that reports ``outcome``. After the loss of a stage it says what happens ``then``; by default, what
    the user can do.
    """
    if isinstance(outcome, outcomes.StageLost):
        causes = "; ".join(f"worker {grid.worker(rank)}: {cause}" for rank, cause in sorted(outcome.causes.items()))
        if not any(event.kind in ("step", "resumed") for event in history):
            return WorkerStartError(
                f"The workers of stage {outcome.stage} ended before training began ({causes}). See their output above;"
                " a script that comes to trainer.fit() outside of its `if __name__ == '__main__':` when workers"
                " import it is a common reason."
            )
        if then is None:
            then = (
                "Start again from the newest checkpoint, or let ReCycleStrategy(on_stage_lost='restart') do so, and use"
                " more pipelines (more devices, or a smaller pipeline_parallel_size) to survive more failures"
            )
        return StageLostError(
            f"All {grid.pipelines} replicas of stage {outcome.stage} are lost ({causes}); its parameters exist"
            f" nowhere else. {then[0].upper()}{then[1:]}."
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
    restore_chain(error)
    return error
