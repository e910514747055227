"""Lightning's callbacks and loggers that report on the run or save it.

Concept: Lightning's callbacks run in the workers, where they find one stage of the model and a batch that all workers
share. Where that would make them report something else than on one device, they are given what they expect. When a
worker becomes the leader, callbacks that only the leader shows go on where the old leader's were.

ModelCheckpoint records a new checkpoint as the best or the last one before it is written, and then deletes the one that
it replaces. Here it asks for the checkpoint, and the record and what it deletes follow when that is complete; if it
could not be written, nothing follows. All workers do the same, because all know of the outcome. A link to the last
checkpoint is replaced in one step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial, wraps
from types import FunctionType
from typing import Any
from weakref import proxy

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    ModelCheckpoint,
    ModelSummary,
    RichProgressBar,
    ThroughputMonitor,
)
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from rich.console import Console

from lightning_recycle.errors import CheckpointError
from lightning_recycle.model.parts import ModelParts
from lightning_recycle.session.background_saves import Consequences
from lightning_recycle.session.checkpoint_files import WriteFailure
from lightning_recycle.session.checkpoints import Checkpoints
from lightning_recycle.session.collectives import WorkerCollectives
from lightning_recycle.session.loops import ends_step

_EVALUATIONS = {  # stage -> its name in hooks
    RunningStage.SANITY_CHECKING: "validation",
    RunningStage.VALIDATING: "validation",
    RunningStage.TESTING: "test",
    RunningStage.PREDICTING: "predict",
}


def show_whole_run(trainer: pl.Trainer, parts: ModelParts, collectives: WorkerCollectives) -> None:
    """Prepares the callbacks and loggers of a worker."""
    grid = collectives.grid
    if grid.stages > 1 and trainer.enable_autolog_hparams:
        _draw_whole_graph(trainer, parts)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelSummary) and trainer.state.fn == TrainerFn.FITTING:
            _summarize_whole_model(callback, trainer, parts)
        elif isinstance(callback, ThroughputMonitor):
            _measure_grid_as_one_device(callback, grid.num_workers)
        elif isinstance(callback, BasePredictionWriter):
            for name in ("write_on_batch_end", "write_on_epoch_end"):
                setattr(callback, name, _by_the_leader(collectives, getattr(callback, name)))


def keep_reports_apart(trainer: pl.Trainer) -> None:
    """Makes the profiler name its report after this worker's device."""
    profiler = trainer.profiler  # type: ignore[attr-defined]
    profiler.setup = partial(_set_up_profiler, type(profiler).setup.__get__(profiler), trainer.local_rank)


def _set_up_profiler(setup: Callable[..., None], rank: int, stage: Any, local_rank: Any, log_dir: Any) -> None:
    setup(stage=stage, local_rank=rank, log_dir=log_dir)


def _summarize_whole_model(callback: ModelSummary, trainer: pl.Trainer, parts: ModelParts) -> None:
    callback.__dict__.pop("_summary", None)  # of the previous run
    whole = parts.without_storage()
    try:
        summary = callback._summary(trainer, whole)
    except Exception as error:  # the user's forward() on example_input_array may read values, and there are none
        if whole is parts.module:  # there are: it raises on one device, too
            raise
        rank_zero_warn(
            f"The model summary shows no input and output sizes: {type(parts.module).__name__} cannot run its"
            f" example_input_array without storage ({type(error).__name__}: {error})."
        )
        whole.example_input_array = None
        summary = callback._summary(trainer, whole)
    taken = _TakenSummary(summary)
    callback._summary = lambda *_: taken  # type: ignore[method-assign, assignment]


class _TakenSummary:
    """The contents of a summary now: when Lightning shows it, layers may be gone."""

    def __init__(self, summary: Any) -> None:
        rows = summary._get_summary_data()
        self._get_summary_data = lambda: rows
        for name in ("total_parameters", "trainable_parameters", "model_size", "total_training_modes", "total_flops"):
            setattr(self, name, getattr(summary, name))


def _draw_whole_graph(trainer: pl.Trainer, parts: ModelParts) -> None:
    """Gives loggers the graph of the model while all layers are there."""
    for logger in trainer.loggers:
        if not is_overridden("log_graph", logger, Logger) or not getattr(logger, "_log_graph", True):  # TensorBoard's
            continue
        whole = parts.without_storage()
        try:
            type(logger).log_graph(logger, whole)
        except Exception as error:  # the user's forward() may read values, and there are none
            if whole is parts.module:  # there are: it raises on one device, too
                raise
            rank_zero_warn(
                f"{type(logger).__name__} gets no graph: {type(parts.module).__name__} cannot run its"
                f" example_input_array without storage ({type(error).__name__}: {error})."
            )
        logger.log_graph = _is_drawn  # type: ignore[method-assign]


def _is_drawn(*_: Any, **__: Any) -> None:
    """In place of a logger's ``log_graph``: it has the graph."""


def _measure_grid_as_one_device(monitor: ThroughputMonitor, num_workers: int) -> None:
    """Makes rates those of all devices together: a step's batch is the global one."""
    for throughput in monitor._throughputs.values():
        throughput.world_size = 1
        if throughput.available_flops is not None:
            throughput.available_flops *= num_workers


def _by_the_leader(collectives: WorkerCollectives, write: Callable[..., None]) -> Callable[..., None]:
    """Every worker has all predictions: one writes them."""
    write = getattr(write, "prepared", write)  # in the previous run

    @wraps(write)
    def write_once(*args: Any, **kwargs: Any) -> None:
        collectives.by_leader("predictions", partial(write, *args, **kwargs))

    write_once.prepared = write  # type: ignore[attr-defined]
    return write_once


def keep_monitors_going(trainer: pl.Trainer, first_batch: int) -> None:
    """Starts the throughput monitors of a new leader with the old one's counts."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, ThroughputMonitor):
            continue
        counted: dict[Any, int] = {}
        for stage in callback._throughputs:
            if stage not in callback._t0s:
                counted[stage] = _batches_so_far(trainer, stage, first_batch)
                callback._t0s[stage] = time.perf_counter()
                callback._batches[stage] = counted[stage]
                callback._samples[stage] = callback._lengths[stage] = 0
        callback._update = partial(_update_after_others, callback, counted)  # type: ignore[method-assign]


def _batches_so_far(trainer: pl.Trainer, stage: RunningStage, first_batch: int) -> int:
    """The batches that are over in what is under way in ``stage``; none if nothing is."""
    if stage == RunningStage.TRAINING:
        return trainer.fit_loop.epoch_loop.batch_progress.total.completed - first_batch
    if stage != trainer.state.stage:
        return 0
    loop = trainer.predict_loop if stage == RunningStage.PREDICTING else trainer._evaluation_loop
    return loop.batch_progress.current.completed


@torch.inference_mode()
def _update_after_others(
    monitor: ThroughputMonitor,
    counted: dict[Any, int],
    trainer: pl.Trainer,
    module: pl.LightningModule,
    batch: Any,
    *args: Any,
) -> None:
    """Adds the batches that the old leader counted, all sized like the first."""
    stage = trainer.state.stage
    batches = counted.pop(stage, 0)
    if batches:
        monitor._samples[stage] += batches * monitor.batch_size_fn(batch)  # type: ignore[index]
        if monitor.length_fn is not None:
            monitor._lengths[stage] += batches * monitor.length_fn(batch)  # type: ignore[index]
    type(monitor)._update(monitor, trainer, module, batch, *args)


def show_cursor(trainer: pl.Trainer) -> None:
    """Shows the cursor that a ``RichProgressBar`` of a killed worker has hidden."""
    if isinstance(trainer.progress_bar_callback, RichProgressBar):
        Console().show_cursor()


def show_progress_bar(trainer: pl.Trainer, dataloader_idx: int = 0) -> None:
    """Continues the progress bar of the old leader on a new one.

    The bar of a worker that is not the leader is disabled: it has seen all hooks and shown nothing. The hooks that
    begin what is under way are called again.
    """
    bar, module = trainer.progress_bar_callback, trainer.lightning_module
    if bar is None:
        return
    bar.enable()
    if bar._trainer is None or trainer.state.stage is None:
        return  # nothing has begun yet, or everything is over
    fitting = trainer.state.fn == TrainerFn.FITTING
    if trainer.sanity_checking:
        bar.on_sanity_check_start(trainer, module)
    elif fitting and trainer.fit_loop.epoch_progress.current.ready:
        bar.on_train_start(trainer, module)
        bar.on_train_epoch_start(trainer, module)
    phase = _EVALUATIONS.get(trainer.state.stage)
    if phase is not None:
        bar.reset_dataloader_idx_tracker()
        getattr(bar, f"on_{phase}_start")(trainer, module)
        getattr(bar, f"on_{phase}_batch_start")(trainer, module, None, 0, dataloader_idx)


_SAVES = ("_save_topk_checkpoint", "_save_last_checkpoint", "on_exception")


_LINK, _WRITE, _EXISTS, _STATE = "_link_checkpoint", "_save_checkpoint", "file_exists", "state_dict"


_RECORD = (  # what ModelCheckpoint changes while it saves
    "best_k_models",
    "best_model_path",
    "best_model_score",
    "current_score",
    "kth_best_model_path",
    "kth_value",
    "last_model_path",
    "_last_checkpoint_saved",
    "_last_global_step_saved",
)


_OF_ITS_STEP = ("_last_checkpoint_saved", "_last_global_step_saved")
"""Of these what it has asked for counts at once: it is not to ask for the same again."""


def undo_failed_saves(trainer: pl.Trainer, checkpoints: Checkpoints) -> None:
    """Makes ModelCheckpoint callbacks count checkpoints only once they are complete."""

    def link(_: pl.Trainer, target: str, path: str) -> None:
        checkpoints.link(target, path)

    leave_saves_alone(trainer)  # of an earlier run of this process
    callbacks = _model_checkpoints(trainer)
    for number, callback in enumerate(callbacks):
        for name in _SAVES:
            save = getattr(callback, name)
            setattr(callback, name, partial(_save_or_undo, callback, (number, name), checkpoints, save))
        setattr(callback, _LINK, link)
        setattr(callback, _STATE, partial(_state, callback, number, checkpoints))
        if not _writes_itself(callback):
            setattr(callback, _WRITE, partial(_ask, callback, number, checkpoints))
            setattr(callback, _EXISTS, partial(_exists, callback, checkpoints))
    checkpoints.save_every = partial(_save_every, callbacks)
    checkpoints.records = partial(_records, callbacks, checkpoints)
    saves = checkpoints.background or Consequences()  # where all wait, no loss of a worker costs a checkpoint
    checkpoints.ask_again = partial(_ask_again, trainer, callbacks, saves)
    checkpoints.actions["record"] = partial(_take_up, callbacks, saves)
    checkpoints.actions["notify"] = partial(_notify, trainer, callbacks)


def remember_saves(trainer: pl.Trainer, records: Mapping[str, Mapping[str, Any]]) -> None:
    """Restores the records of callbacks that still save in the same folder."""
    for callback in _model_checkpoints(trainer):
        record = records.get(callback.state_key, {})
        if record.get("dirpath") == callback.dirpath:
            vars(callback).update(record)


def leave_saves_alone(trainer: pl.Trainer) -> None:
    """Takes back :func:`undo_failed_saves`."""
    for callback in _model_checkpoints(trainer):
        for name in (*_SAVES, _LINK, _WRITE, _EXISTS, _STATE):
            vars(callback).pop(name, None)


def _save_or_undo(
    callback: ModelCheckpoint,
    saves: tuple[int, str],
    checkpoints: Checkpoints,
    save: Callable[..., None],
    *arguments: Any,
) -> None:
    if _writes_itself(callback):
        with checkpoints.waited_for():
            record = _record(callback)
            try:
                with checkpoints.noticed():
                    save(*arguments)
            except CheckpointError:
                if checkpoints.raises:
                    raise
                vars(callback).update(record)
        return
    trainer = arguments[0]
    if trainer.training and callback._every_n_train_steps and saves[1] != "on_exception" and not ends_step(trainer):
        return  # its step was saved and given up: it is asked for again where a step of the optimizer ends
    if not checkpoints.begin_batch():  # before the callback compares with what it remembers
        return
    record = _record(callback)
    with checkpoints.deferring() as consequences:
        save(*arguments)
        _put_off(callback, (*saves, arguments[-1]), consequences, record)


def _writes_itself(callback: ModelCheckpoint) -> bool:
    """Whether the user overrides methods, which may expect a checkpoint at once."""
    kinds = type(callback).__mro__
    own = [vars(kind).values() for kind in kinds[: kinds.index(ModelCheckpoint)]]
    return any(isinstance(value, FunctionType) and value.__name__ != "__init__" for part in own for value in part)


def _record(callback: ModelCheckpoint) -> dict[str, Any]:
    record = {name: getattr(callback, name) for name in _RECORD}
    return {**record, "best_k_models": dict(record["best_k_models"])}  # the callback changes it in place


def _put_off(
    callback: ModelCheckpoint, call: tuple[Any, ...], consequences: Consequences, before: dict[str, Any]
) -> None:
    """The callback remembers what it did before it saved, until that is complete."""
    after = _record(callback)
    changed = {name: value for name, value in after.items() if not _is_same(value, before[name])}
    consequences.follow_first("record", call, {name: before[name] for name in changed}, changed)
    for name, value in before.items():
        if name not in _OF_ITS_STEP:
            setattr(callback, name, value)


def _is_same(value: Any, before: Any) -> bool:
    if isinstance(value, dict):
        return value.keys() == before.keys() and all(score is before[path] for path, score in value.items())
    return value is before


def _ask(callback: ModelCheckpoint, number: int, checkpoints: Checkpoints, trainer: pl.Trainer, path: str) -> None:
    """Asks for a checkpoint."""
    consequences = checkpoints.saves
    if not consequences.is_deferring:
        ModelCheckpoint._save_checkpoint(callback, trainer, path)
        return
    trainer.save_checkpoint(path, callback.save_weights_only)
    callback._last_global_step_saved, callback._last_checkpoint_saved = trainer.global_step, path
    consequences.follow_first("notify", number)


def _state(callback: ModelCheckpoint, number: int, checkpoints: Checkpoints) -> dict[str, Any]:
    """The callback's state, as if this step's earlier checkpoints were written."""
    now = _record(callback)
    vars(callback).update(_asked_for(number, checkpoints))
    try:
        return type(callback).state_dict(callback)
    finally:
        vars(callback).update(now)


def _asked_for(number: int, checkpoints: Checkpoints) -> dict[str, Any]:
    """A callback's changes by checkpoints whose outcome is not known."""
    changed: dict[str, Any] = {}
    for action in checkpoints.noted:
        if action.name == "record" and action.arguments[0][0] == number:
            changed |= action.arguments[2]
    return changed


def _records(callbacks: list[ModelCheckpoint], checkpoints: Checkpoints) -> dict[str, dict[str, Any]]:
    """The callbacks' records, as if pending checkpoints were written."""
    kept = ("dirpath", "_defer_save_until_validation")
    return {
        callback.state_key: {
            **{name: getattr(callback, name) for name in kept},
            **_record(callback),
            **_asked_for(number, checkpoints),
        }
        for number, callback in enumerate(callbacks)
    }


def _exists(callback: ModelCheckpoint, checkpoints: Checkpoints, path: str, trainer: pl.Trainer) -> bool:
    if checkpoints.in_background is None:
        return ModelCheckpoint.file_exists(callback, path, trainer) or checkpoints.is_asked(path)
    files = callback._fs
    return checkpoints.has(path, lambda folder: files.ls(folder, detail=False) if files.isdir(folder) else ())


def _save_every(callbacks: list[ModelCheckpoint], steps: int) -> bool:
    changed = False
    for callback in callbacks:
        now = callback._every_n_train_steps
        if now and not 0.8 < steps / now < 1.25:  # less is noise of the measurement
            callback._every_n_train_steps, changed = steps, True
    return changed


def _take_up(
    callbacks: list[ModelCheckpoint],
    saves: Consequences,
    failure: WriteFailure | None,
    call: tuple[Any, ...],
    before: dict[str, Any],
    after: dict[str, Any],
) -> None:
    callback = callbacks[call[0]]
    for name, value in (before if failure else after).items():
        if name not in _OF_ITS_STEP or getattr(callback, name) == after[name]:
            setattr(callback, name, value)
    if failure is not None and not failure.is_refusal and call[1] != "on_exception":
        saves.given_up += (call,)


def _ask_again(trainer: pl.Trainer, callbacks: list[ModelCheckpoint], saves: Consequences) -> None:
    """Saves again checkpoints that were given up because a worker was lost."""
    given_up, saves.given_up = saves.given_up, ()
    calls = [call for call in given_up if callbacks[call[0]]._last_global_step_saved != trainer.global_step]
    for number, name, metrics in calls:
        now = callbacks[number]._monitor_candidates(trainer)
        getattr(callbacks[number], name)(trainer, {**metrics, "epoch": now["epoch"], "step": now["step"]})


def _notify(trainer: pl.Trainer, callbacks: list[ModelCheckpoint], failure: WriteFailure | None, number: int) -> None:
    if failure is None and trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.after_save_checkpoint(proxy(callbacks[number]))


def _model_checkpoints(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
