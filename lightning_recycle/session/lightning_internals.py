"""Private parts of Lightning's Trainer that a worker reads or sets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy, deepcopy
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from enum import Enum
from operator import attrgetter
from types import FunctionType, NoneType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.load import _METADATA_FILENAME
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer, _init_optimizers_and_lr_schedulers
from lightning.pytorch.loops.fit_loop import RestartStage
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _ProcessedTracker, _Progress
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.strategies.launchers.multiprocessing import _GlobalStateSnapshot
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from lightning.pytorch.utilities import GradClipAlgorithmType, grad_norm
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict as unflatten_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.optim import Optimizer
from typing_extensions import override

METADATA_FILENAME = _METADATA_FILENAME
DataLoaderSource = _DataLoaderSource
GlobalStateSnapshot = _GlobalStateSnapshot
WrappingCheckpointIO = _WrappingCheckpointIO
init_optimizers = _init_optimizers_and_lr_schedulers
load_distributed_checkpoint = _load_state_dict
optimizers_to_device = _optimizers_to_device

_SETTINGS = (bool, int, float, str, timedelta, NoneType)
_VALIDATION = "fit_loop.epoch_loop.val_loop"
_RESULTS = ("fit_loop.epoch_loop", _VALIDATION)
_PRIVATE: dict[str, tuple[str, ...]] = {  # attributes of the Trainer's parts that decide, but are in no state dict
    "": (),
    "_logger_connector": (
        "_progress_bar_metrics",
        "_logged_metrics",
        "_callback_metrics",
        "_first_loop_iter",
        "_current_fx",
    ),
    "fit_loop": ("_last_train_dl_reload_epoch",),
    "fit_loop.epoch_loop": ("_skip_next_val",),
    "fit_loop.epoch_loop.automatic_optimization": ("_skip_backward",),
    _VALIDATION: ("_last_val_dl_reload_epoch", "_has_run"),
}
_OF_LOADERS = {_VALIDATION: ("_max_batches", "_seen_batches_per_dataloader")}  # set anew where loaders are read

# Settings of the Trainer that callbacks change.
_RUN_SETTINGS = ("should_stop", "gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches")

LOOPS = ("fit_loop", "fit_loop.epoch_loop.val_loop", "validate_loop", "test_loop", "predict_loop")
"""The loops of a Trainer that have DataLoaders, by path."""

_FINAL = {  # of the Trainer's parts, by path: what a run changes besides settings, and is in no state dict
    "": ("state",),
    "_checkpoint_connector": ("_ckpt_path",),
    "_logger_connector": ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics"),
    "fit_loop": ("_last_train_dl_reload_epoch",),
    "fit_loop.epoch_loop": ("_skip_next_val",),
    "fit_loop.epoch_loop.val_loop": ("_max_batches", "_has_run", "_last_val_dl_reload_epoch"),
    "validate_loop": ("_max_batches", "_has_run"),
    "test_loop": ("_max_batches", "_has_run"),
    "predict_loop": ("max_batches", "_return_predictions", "current_batch_indices", "epoch_batch_indices"),
}


# ---------------------------------------------------------------------- the state of a Trainer in fit


@dataclass(frozen=True)
class TrainerState:
    """A Trainer's state in ``fit`` outside of users' objects and optimizers.

    ``results``: values logged in this epoch and in the newest validation. ``settings``: of the Trainer's parts, by
    path: public ones, such as ``gradient_clip_val``, which callbacks may change, and attributes in no state dict.
    ``callbacks``: state dicts of those whose attributes belong to their process.
    """

    loops: dict[str, Any]
    results: tuple[dict[str, _ResultMetric], ...]
    settings: dict[str, dict[str, Any]]
    callbacks: dict[str, Any]

    @classmethod
    def of(cls, trainer: pl.Trainer, is_wanted: Callable[[Any], bool]) -> TrainerState:
        keys = {c.state_key for c in trainer.callbacks if is_wanted(c)}  # type: ignore[attr-defined]
        states = call._call_callbacks_state_dict(trainer) if keys else {}
        return cls(
            loops=trainer.fit_loop.state_dict(),
            results=tuple(
                {key: _copied(value, None, None) for key, value in attrgetter(path)(trainer)._results.items()}
                for path in _RESULTS
            ),
            settings={
                path: settings_of(_resolve(trainer, path), (*names, *_OF_LOADERS.get(path, ())))
                for path, names in _PRIVATE.items()
            },
            callbacks={key: state for key, state in states.items() if key in keys},
        )

    def as_data(self) -> dict[str, Any]:
        """This state as plain data for a checkpoint, without states of callbacks."""
        settings = {
            path: {
                name: found[name].value if isinstance(found[name], Enum) else found[name]
                for name in (*names, *_RUN_SETTINGS)
                if name in found
            }
            for path, names in _PRIVATE.items()
            for found in (self.settings[path],)
        }
        results = [{key: _as_data(value) for key, value in logged.items()} for logged in self.results]
        return {"loops": self.loops, "results": results, "settings": settings}

    @classmethod
    def of_data(cls, data: Mapping[str, Any], same_run: bool) -> TrainerState:
        """Inverse of :meth:`as_data`; without settings of a run unless ``same_run``."""
        results = tuple({key: _of_data(value) for key, value in logged.items()} for logged in data["results"])
        settings = {
            path: {
                name: GradClipAlgorithmType(value) if value and name == "gradient_clip_algorithm" else value
                for name, value in found.items()
                if same_run or name not in _RUN_SETTINGS
            }
            for path, found in data["settings"].items()
        }
        return cls(data["loops"], results, settings, {})

    def load_progress(self, trainer: pl.Trainer) -> None:
        """Restores the counters of the loops, but not the place in a stream of data."""
        load_progress(trainer.fit_loop, self.loops)
        trainer.fit_loop._combined_loader_states_to_load = []

    def load(self, trainer: pl.Trainer) -> None:
        reduce, module, device = trainer.strategy.reduce, trainer.lightning_module, trainer.strategy.root_device
        for path, logged in zip(_RESULTS, self.results, strict=True):
            results = attrgetter(path)(trainer)._results
            results.clear()
            results.update({key: _copied(value, reduce, module).to(device) for key, value in logged.items()})
        for path, settings in self.settings.items():
            for name, value in settings.items():
                setattr(_resolve(trainer, path), name, copy(value))
        call._call_callbacks_load_state_dict(trainer, {"callbacks": deepcopy(self.callbacks)})


def _resolve(trainer: pl.Trainer, path: str) -> Any:
    return attrgetter(path)(trainer) if path else trainer


def settings_of(owner: Any, private: Collection[str] = ()) -> dict[str, Any]:
    """Public settings of a part of the Trainer, and some private attributes."""
    settings = {n for n, v in vars(owner).items() if not n.startswith("_") and isinstance(v, _SETTINGS)}
    return {name: vars(owner)[name] for name in {*settings, *private} if name in vars(owner)}


def load_progress(loop: _Loop, state: dict[str, Any], prefix: str = "") -> None:
    """Sets the counters of ``loop`` and its children without marking a restart."""
    loop._load_from_state_dict(dict(state), prefix)
    for name, child in vars(loop).items():
        if isinstance(child, _Loop):
            load_progress(child, state, f"{prefix}{name}.")


def batches_so_far(trainer: pl.Trainer) -> _ProcessedTracker:
    """The counters of the batches of training, over all epochs."""
    counts = trainer.fit_loop.epoch_loop.batch_progress.total
    assert isinstance(counts, _ProcessedTracker)
    return counts


def ends_step(trainer: pl.Trainer) -> bool:
    """Whether the optimizer steps after the current or newest batch."""
    return not trainer.fit_loop._should_accumulate()


def states_for_checkpoint(trainer: pl.Trainer) -> dict[str, Any]:
    """The states of callbacks and schedulers as Lightning saves them.

    Those of data module and precision plugin do not change between its call of ModelCheckpoint and the end of the step.
    """
    return {
        "callbacks": call._call_callbacks_state_dict(trainer),
        "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
    }


def resume_at_counters(trainer: pl.Trainer, mid_epoch: bool) -> None:
    """Makes the loops continue at their counters, not at those that Lightning infers."""
    loop = trainer.fit_loop
    _Loop.restarting.fset(loop, False)  # type: ignore[attr-defined]
    for each in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
        each._restart_stage = RestartStage.NONE
    if mid_epoch:
        loop._restart_stage = RestartStage.RESTARTED_MID_EPOCH
    val = loop.epoch_loop.val_loop
    if loop._should_reload_train_dl:  # they were asked for when this run began
        loop._last_train_dl_reload_epoch = trainer.current_epoch
    if val._should_reload_val_dl:
        val._last_val_dl_reload_epoch = trainer.current_epoch


def epochs_so_far(trainer: pl.Trainer) -> int:
    """The number of processed epochs, which Lightning gives samplers as the epoch."""
    counts = trainer.fit_loop.epoch_progress.current
    assert isinstance(counts, _ProcessedTracker)
    return counts.processed


def rewind_to_batch(trainer: pl.Trainer) -> None:
    """Lets a batch that has begun begin once more, in an epoch that has begun."""
    loop, connector = trainer.fit_loop, trainer._logger_connector
    batches = loop.epoch_loop.batch_progress
    for counts in (batches.total, batches.current):
        assert isinstance(counts, _ProcessedTracker)
        counts.ready = counts.started = counts.processed = counts.completed
    batches.is_last_batch = False
    connector._first_loop_iter = None if connector._first_loop_iter else False
    loop._restart_stage = RestartStage.RESTARTED_MID_EPOCH


# ---------------------------------------------------------------------- the state of a Trainer after a run


def final_settings(trainer: pl.Trainer) -> dict[str, dict[str, Any]]:
    """Settings that a run leaves in the parts of ``trainer``, by path."""
    return {path: settings_of(_resolve(trainer, path), names) for path, names in _FINAL.items()}


def restore_settings(trainer: pl.Trainer, settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Sets what :func:`final_settings` returned in the worker."""
    for path, attributes in settings.items():
        vars(_resolve(trainer, path)).update(attributes)


def set_predictions(trainer: pl.Trainer, predictions: list[Any]) -> None:
    """Sets what ``predict`` returns."""
    trainer.predict_loop._predictions = predictions


def loop_states(trainer: pl.Trainer) -> dict[str, Any]:
    """The state dicts of the loops of ``trainer``, by name."""
    return {name: getattr(trainer, name).state_dict() for name in LOOPS if "." not in name}


def loader_states(trainer: pl.Trainer) -> dict[str, list[dict[str, Any]]]:
    """The states of the loaders that were read, by the path of their loop."""
    loaders = {path: attrgetter(path)(trainer)._combined_loader for path in LOOPS}
    return {path: loader._state_dicts() for path, loader in loaders.items() if loader is not None}


def restore_loaders(trainer: pl.Trainer, states: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Makes the loops show the user's loaders with their states in the workers."""
    trainer.fit_loop._combined_loader_states_to_load = []  # nothing is being resumed
    for path, found in states.items():
        loop = attrgetter(path)(trainer)
        mode = "max_size_cycle" if path == "fit_loop" else "sequential"
        loop._combined_loader = returned_loaders(loop._data_source, found, mode)


class ReturnedLoaders(CombinedLoader):
    """Loaders of a loop after a run: the user's, with their states in the workers."""

    def __init__(self, iterables: Any, mode: Any, states: Sequence[dict[str, Any]]) -> None:
        super().__init__(iterables, mode)
        self._states = list(states)

    @override
    def _state_dicts(self) -> list[dict[str, Any]]:
        return self._states


class _Requested:
    """The loaders of a hook, called on use: its needs may exist in workers only.

    Without Lightning's ``_request_dataloader``, which patches DataLoader, for good if the hook raises.
    """

    def __init__(self, source: DataLoaderSource) -> None:
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        return iter(self._source.dataloader())

    def __len__(self) -> int:
        return len(self._source.dataloader())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_source", "state_dict", "load_state_dict"):
            raise AttributeError(name)  # the states are those of the workers
        return getattr(self._source.dataloader(), name)


def returned_loaders(source: DataLoaderSource, states: Sequence[dict[str, Any]], mode: str) -> CombinedLoader:
    """The loaders of a loop that has read ``source``."""
    iterables: Any = _Requested(source) if source.is_module() else source.instance
    if isinstance(iterables, CombinedLoader):
        iterables, mode = iterables.iterables, iterables._mode
    return ReturnedLoaders(iterables, mode, states)


# ---------------------------------------------------------------------- values of self.log


def _copied(
    logged: _ResultMetric, reduce: Callable[..., Any] | None, module: pl.LightningModule | None
) -> _ResultMetric:
    """A copy of a logged value, detached from this process or attached to one."""
    copied = copy(logged)
    copied.meta = copy(logged.meta)
    copied.meta.sync = replace(logged.meta.sync, fn=reduce)
    if not copied.is_tensor:  # the value is the module's own metric
        path = copied.meta.metric_attribute
        copied.value = None if module is None or path is None else attrgetter(path)(module)
    return copied


_REDUCTIONS = {
    **{f"torch.{name}": getattr(torch, name) for name in ("mean", "sum", "max", "min")},
    **{function.__name__: function for function in (sum, max, min)},
}
_VALUES = ("value", "cumulated_batch_size", "_forward_cache", "_computed", "_update_count", "has_reset")


def _as_data(logged: _ResultMetric) -> dict[str, Any]:
    meta = {field.name: getattr(logged.meta, field.name) for field in fields(_Metadata)}
    sync = meta.pop("_sync")
    meta["reduce_fx"] = next(name for name, function in _REDUCTIONS.items() if function is meta["reduce_fx"])
    values = {name: vars(logged)[name] for name in _VALUES if name in vars(logged)}
    return {
        "is_tensor": logged.is_tensor,
        "meta": meta,
        "sync": {"_should": sync.should, "rank_zero_only": sync.rank_zero_only, "_op": sync.op},
        "values": values if logged.is_tensor else {**values, "value": None},
    }


def _of_data(data: Mapping[str, Any]) -> _ResultMetric:
    meta = _Metadata(**{**data["meta"], "reduce_fx": _REDUCTIONS[data["meta"]["reduce_fx"]]})
    meta.sync = _Sync(**data["sync"])
    logged = _ResultMetric(meta, data["is_tensor"])
    vars(logged).update(data["values"])
    return logged


_move = _ResultMetric.to


def skip_needless_moves() -> None:
    """Patches Lightning: no ``.to()`` for a logged metric on its device already.

    Lightning moves each to the device of each value, tensor by tensor, also when it is there: two thirds of the time of
    ``self.log``, and a part of every step.
    """
    _ResultMetric.to = _move_elsewhere  # type: ignore[assignment, method-assign]


def _move_elsewhere(metric: _ResultMetric, *args: Any, **kwargs: Any) -> _ResultMetric:
    value = getattr(metric, "value", None)  # of a torchmetrics object it is set later
    if isinstance(value, Tensor) and args == (value.device,) and not kwargs:
        return metric
    return _move(metric, *args, **kwargs)


stage_grad_norm = FunctionType(grad_norm.__code__, grad_norm.__globals__, "grad_norm", grad_norm.__defaults__)
"""Lightning's ``grad_norm``, of the gradients that this process holds."""


def replace_grad_norm(function: Callable[..., Any] | None) -> None:
    """Replaces the code of ``grad_norm``, held by users' modules; None restores it."""
    grad_norm.__code__ = (function or stage_grad_norm).__code__


# ---------------------------------------------------------------------- data and optimizers


def loaders_of(loop: Any) -> list[Any]:
    """The loaders of a fit loop or an evaluation loop, once they were asked for."""
    combined = vars(loop).get("_combined_loader")
    return list(combined.flattened) if isinstance(combined, CombinedLoader) else []


def fit_loops(trainer: pl.Trainer) -> dict[str, Any]:
    """The loops of ``fit`` that read data, by name."""
    return {"train": trainer.fit_loop, "val": trainer.fit_loop.epoch_loop.val_loop}


def combined_loaders(loop: Any) -> tuple[Any, Any]:
    """A loop's loaders in the user's structure, and how they are combined."""
    return loop._combined_loader.iterables, loop._combined_loader._mode


def read_loaders(trainer: pl.Trainer, name: str, loaders: tuple[Any, Any] | None) -> None:
    """Makes a loop of :func:`fit_loops` read ``loaders`` instead of its own.

    Without any the user is asked, as in the epoch in which the loop has asked last.
    """
    loop = fit_loops(trainer)[name]
    source, epoch = loop._data_source, getattr(loop, f"_last_{name}_dl_reload_epoch")
    trainer.fit_loop.epoch_progress.current.completed = max(0, epoch)
    loop._combined_loader = None
    if loaders is not None:
        loop._data_source = DataLoaderSource(CombinedLoader(*loaders), source.name)
    setattr(trainer, "validating" if name == "val" else "training", True)
    try:
        loop.setup_data()
    finally:
        trainer.training, loop._data_source = True, source


def mode_of(loader: CombinedLoader) -> str:
    """How ``loader`` combines its loaders."""
    return loader._mode


def transfer_batch(module: pl.LightningModule, batch: Any, device: Any, dataloader_idx: int) -> Any:
    """``batch`` on ``device``, moved by the user's hooks."""
    batch = pl.LightningModule._on_before_batch_transfer(module, batch, dataloader_idx)
    return module._apply_batch_transfer_handler(batch, device, dataloader_idx)


def lower_on(plugin: Precision, device: torch.device) -> None:
    """Has mixed precision lower operations on ``device``, and scale its loss.

    For some kinds of device Lightning assumes another, where a scaler does nothing.
    """
    if isinstance(plugin, MixedPrecision) and plugin.device != device.type:
        plugin.device = device.type
        if plugin.scaler is not None and not plugin.scaler.is_enabled():
            plugin.scaler = GradScaler(device.type)


def set_device_mesh(module: pl.LightningModule, mesh: Any) -> None:
    """Sets what ``module.device_mesh`` returns."""
    module._device_mesh = mesh


def lightning_optimizers(trainer: pl.Trainer) -> list[LightningOptimizer]:
    """Lightning's wrappers of the optimizers, in their order."""
    return trainer.strategy._lightning_optimizers


def plain_optimizer(optimizer: Optimizer | LightningOptimizer) -> Optimizer:
    """The optimizer itself, which Lightning may have wrapped."""
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def count_manual_steps(trainer: pl.Trainer) -> _Progress:
    """The counters of the steps of optimizers in manual optimization."""
    return trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress


# ---------------------------------------------------------------------- checkpoints and signals


AFTER_SAVING = "Trainer.save_checkpoint"
"""The name of the barrier at which the Trainer waits for a checkpoint."""


def set_checkpoint_path(trainer: pl.Trainer, path: Any) -> None:
    """Sets the path of the checkpoint that Lightning reports as resumed."""
    trainer._checkpoint_connector._ckpt_path = path


def path_of_ended_run(trainer: pl.Trainer) -> str:
    """The path of the checkpoint that Lightning resumes a job of SLURM from."""
    return str(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))


def saves_on_exception(callback: pl.Callback) -> bool:
    """Whether ``callback``, of Lightning's, writes a checkpoint in ``on_exception``."""
    return isinstance(callback, OnExceptionCheckpoint) or (
        isinstance(callback, ModelCheckpoint) and callback.save_on_exception
    )


def mark_saved(trainer: pl.Trainer) -> None:
    """Leaves ``ModelCheckpoint(save_on_exception=True)`` nothing to save."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            callback._last_global_step_saved = trainer.global_step


def sets_checkpoint_path(trainer: pl.Trainer) -> bool:
    """Whether the user has set ``trainer.ckpt_path``."""
    return trainer._checkpoint_connector._user_managed


def select_checkpoint_path(trainer: pl.Trainer, ckpt_path: Any, *, has_model: bool) -> Any:
    """The checkpoint that Lightning would load for ``ckpt_path``, or None."""
    assert trainer.state.fn is not None
    return trainer._checkpoint_connector._select_ckpt_path(
        trainer.state.fn, ckpt_path, model_provided=has_model, model_connected=trainer.lightning_module is not None
    )


def checkpoint_folder(callback: ModelCheckpoint, trainer: pl.Trainer) -> Any:
    """The folder in which ``callback`` writes."""
    return callback._ModelCheckpoint__resolve_ckpt_dir(trainer)  # type: ignore[attr-defined]


def last_checkpoints(callback: ModelCheckpoint, trainer: pl.Trainer) -> set[str]:
    """The checkpoints that ``callback`` counts as last ones."""
    return callback._find_last_checkpoints(trainer)


def requeues(trainer: pl.Trainer) -> bool:
    """Whether SLURM may run this job again, resuming from its checkpoint."""
    environment = trainer._accelerator_connector.cluster_environment
    return isinstance(environment, SLURMEnvironment) and environment.auto_requeue


class SignalHandlers:
    """Handlers that Lightning registers when it begins to run."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._handlers = vars(trainer._signal_connector)

    def replace(self, requeue: Callable[..., None], terminate: Callable[..., None] | None) -> None:
        """Replaces the handler of the signal for requeueing, and of SIGTERM."""
        self._handlers["_slurm_sigusr_handler_fn"] = requeue
        if terminate is not None:
            self._handlers["_sigterm_notifier_fn"] = terminate

    def release(self) -> None:
        for name in ("_slurm_sigusr_handler_fn", "_sigterm_notifier_fn"):
            self._handlers.pop(name, None)


def attach_data(trainer: pl.Trainer, data: dict[str, Any]) -> None:
    """Links ``trainer``'s module with loaders or a data module, by name."""
    trainer._data_connector.attach_data(trainer.lightning_module, **data)


def prepare_data_within(trainer: pl.Trainer, block: Callable[[], AbstractContextManager[None]]) -> None:
    """Wraps ``trainer``'s next preparation of data in ``block``."""
    connector = trainer._data_connector

    def prepare_data() -> None:
        del connector.prepare_data
        with block():
            type(connector).prepare_data(connector)

    connector.prepare_data = prepare_data  # type: ignore[method-assign]


def call_setup_hooks(trainer: pl.Trainer) -> None:
    """Calls ``prepare_data`` and ``setup`` of data module and module, in that order."""
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    if datamodule is not None:
        call._call_lightning_datamodule_hook(trainer, "prepare_data")
    call._call_lightning_module_hook(trainer, "prepare_data")
    if datamodule is not None:
        call._call_lightning_datamodule_hook(trainer, "setup", stage=trainer.state.fn)
    call._call_lightning_module_hook(trainer, "setup", stage=trainer.state.fn)


def synchronises_batchnorm(trainer: pl.Trainer) -> bool:
    """Whether the Trainer has ``sync_batchnorm=True``."""
    return getattr(trainer.strategy, "_layer_sync", None) is not None


def default_profiler_schedule() -> Any:
    """``PyTorchProfiler``'s default schedule factory, always the same object."""
    return PyTorchProfiler._default_schedule
