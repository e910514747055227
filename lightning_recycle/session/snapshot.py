"""All that a worker must know to take part in a running training: the state of one step boundary.

A donor takes the snapshot while it waits at the beginning of a step; Lightning's counters then say that the batch of
that step has begun, and are set back by it in the worker that joins, which begins that batch itself. Callbacks are
asked for their state as for a checkpoint. Hooks such as ``on_train_epoch_start`` are not called again, as when
Lightning resumes in the middle of an epoch.

Private Lightning API used here, and nowhere else: ``_ResultCollection`` as the epoch loop's ``_results`` and what is in
it (``_ResultMetric``, ``_Metadata``, ``_Sync``), the metrics of the ``_LoggerConnector``,
``call._call_callbacks_state_dict`` and its counterpart, ``_load_from_state_dict`` of the loops, ``RestartStage``, and
the progress trackers' fields.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.fit_loop import RestartStage
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _ProcessedTracker
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torchmetrics import Metric

from lightning_recycle.session.loops import PipelineEpochLoop, PipelineFitLoop

__all__ = ["WorkerSnapshot", "load_progress", "restore_snapshot", "take_snapshot"]

_CONNECTOR_METRICS = ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics")


@dataclass(frozen=True)
class _Logged:
    """One value that was logged in this epoch: its key, what ``self.log`` was told, and what has been accumulated."""

    key: str
    meta: dict[str, Any]
    sync: dict[str, Any]
    is_tensor: bool
    attributes: dict[str, Any]


@dataclass(frozen=True)
class WorkerSnapshot:
    """The state of one stage, and what is the same on all workers.

    Args:
        module: the state dict of the stage.
        metrics: states of the torchmetrics objects of the module, by name.
        optimizers: state dicts, of the stage.
        schedulers: state dicts.
        precision: state dict of the precision plugin.
        loops: of the fit loop, with the place in a stream of data.
        results: what was logged in this epoch.
        connector: the metrics that callbacks and loggers see.
        callbacks: their states.
        should_stop: whether somebody asked to stop.
        next_collective: number of the next control collective.
    """

    module: dict[str, Any]
    metrics: dict[str, dict[str, Any]]
    optimizers: list[dict[str, Any]]
    schedulers: list[dict[str, Any]]
    precision: dict[str, Any]
    loops: dict[str, Any]
    results: tuple[_Logged, ...]
    connector: dict[str, Any]
    callbacks: dict[str, Any]
    should_stop: bool
    next_collective: int


def take_snapshot(trainer: pl.Trainer, next_collective: int) -> WorkerSnapshot:
    """The state of this worker, at the beginning of a step; tensors are not copied."""
    module = trainer.lightning_module
    return WorkerSnapshot(
        module=module.state_dict(),
        metrics={
            name: {state: getattr(metric, state) for state in (*metric._defaults, "_update_count")}
            for name, metric in module.named_modules()
            if isinstance(metric, Metric)
        },
        optimizers=[optimizer.state_dict() for optimizer in trainer.optimizers],
        schedulers=[config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        precision=trainer.precision_plugin.state_dict(),
        loops=trainer.fit_loop.state_dict(),
        results=_logged(trainer.fit_loop.epoch_loop._results),
        connector={name: getattr(trainer._logger_connector, name) for name in _CONNECTOR_METRICS},
        callbacks=call._call_callbacks_state_dict(trainer),
        should_stop=trainer.should_stop,
        next_collective=next_collective,
    )


def restore_snapshot(trainer: pl.Trainer, snapshot: WorkerSnapshot) -> None:
    """Makes this worker's Trainer as if it had been there: its fit loop goes on with the batch of that step."""
    module = trainer.lightning_module
    module.load_state_dict(snapshot.module)
    for name, metric in module.named_modules():
        for attribute, value in snapshot.metrics.get(name, {}).items():
            setattr(metric, attribute, value)
    for optimizer, state in zip(trainer.optimizers, snapshot.optimizers, strict=True):
        optimizer.load_state_dict(state)
    for config, state in zip(trainer.lr_scheduler_configs, snapshot.schedulers, strict=True):
        config.scheduler.load_state_dict(state)
    trainer.precision_plugin.load_state_dict(snapshot.precision)
    call._call_callbacks_load_state_dict(trainer, {"callbacks": snapshot.callbacks})
    trainer.should_stop = snapshot.should_stop
    for name, value in snapshot.connector.items():
        setattr(trainer._logger_connector, name, value)
    _restore_loops(trainer, snapshot)


def _restore_loops(trainer: pl.Trainer, snapshot: WorkerSnapshot) -> None:
    loop = trainer.fit_loop
    assert isinstance(loop, PipelineFitLoop)
    load_progress(loop, snapshot.loops)
    loop.find_places()
    epoch = loop.epoch_loop
    epoch._results.clear()
    for logged in snapshot.results:
        epoch._results[logged.key] = _result_metric(trainer, logged)
    # The batch of this step is about to begin here; in the donor it has.
    batches = epoch.batch_progress
    for counts in (batches.total, batches.current):
        assert isinstance(counts, _ProcessedTracker)
        counts.ready = counts.started = counts.processed = counts.completed
    for zeroed in (
        epoch.automatic_optimization.optim_progress.optimizer.zero_grad.total,
        epoch.automatic_optimization.optim_progress.optimizer.zero_grad.current,
    ):
        zeroed.ready = zeroed.completed = max(0, zeroed.completed - 1)
    epoch.batch_progress.is_last_batch = False
    loop._restart_stage = RestartStage.RESTARTED_MID_EPOCH  # the epoch has begun
    assert isinstance(epoch, PipelineEpochLoop)
    epoch.enters_mid_epoch = True


def _logged(results: _ResultCollection) -> tuple[_Logged, ...]:
    found = []
    for key, metric in results.items():
        meta = {f.name: getattr(metric.meta, f.name) for f in fields(_Metadata) if f.name != "_sync"}
        sync = {f.name: getattr(metric.meta.sync, f.name) for f in fields(_Sync) if f.name != "fn"}
        names = ["_forward_cache", "_computed", "_update_count", "has_reset"]
        if metric.is_tensor:  # else the value is the module's own metric
            names += metric._defaults
        attributes = {name: getattr(metric, name) for name in names}
        found.append(_Logged(key, meta, sync, metric.is_tensor, attributes))
    return tuple(found)


def _result_metric(trainer: pl.Trainer, logged: _Logged) -> _ResultMetric:
    meta = _Metadata(**logged.meta)
    meta.sync = _Sync(fn=trainer.strategy.reduce, **logged.sync)
    metric = _ResultMetric(meta, logged.is_tensor)
    for name, value in logged.attributes.items():
        setattr(metric, name, value)
    if not logged.is_tensor:
        assert meta.metric_attribute is not None
        metric.value = attrgetter(meta.metric_attribute)(trainer.lightning_module)
    return metric.to(trainer.strategy.root_device)


def load_progress(loop: _Loop, state: dict[str, Any], prefix: str = "") -> None:
    """Sets the counters of ``loop`` and its children without marking it as restarting, as ``load_state_dict`` would."""
    loop._load_from_state_dict(dict(state), prefix)
    for name, child in vars(loop).items():
        if isinstance(child, _Loop):
            load_progress(child, state, f"{prefix}{name}.")
