"""Graphs of the objects in which users keep state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor
from torch.nn.parameter import is_lazy
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import MetricTracker

from lightning_recycle.data.batching import is_stream, yields_batches
from lightning_recycle.data.steps import StepLoader
from lightning_recycle.model.weights import weights_of
from lightning_recycle.session.lightning_internals import (
    combined_loaders,
    fit_loops,
    lightning_optimizers,
    loaders_of,
    read_loaders,
)
from lightning_recycle.session.object_attributes import is_bound_to_process
from lightning_recycle.session.object_graph import ObjectGraph, Path
from lightning_recycle.torch_internals import tree_map


def weights_by_name(module: pl.LightningModule) -> dict[Path, Tensor]:
    """Tensors in the state dict of ``module``, which travel outside of packs."""
    weights = weights_of(module)
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {f"weight {name}": tensor for name, tensor in tensors if name in weights}


def weights_for(module: pl.LightningModule, state: Mapping[str, Tensor]) -> dict[Path, Tensor]:
    """The substitutes for weights that were left out of a pack: those of ``module``.

    Where it has none of that name and shape, those of ``state``.
    """
    given = {f"weight {name}": tensor for name, tensor in state.items()}
    own = [(name, tensor) for name, tensor in weights_by_name(module).items() if not is_lazy(tensor)]
    return {**given, **{name: t for name, t in own if name not in given or given[name].shape == t.shape}}


def user_graph(trainer: pl.Trainer, training: TrainingParts | None = None) -> ObjectGraph:
    """The graph of module, callbacks, data module, DataLoaders and hooks.

    Args:
        training: for peers, which have the same layers: what takes optimizers and schedulers with it.
    """
    loops = fit_loops(trainer)
    loaders = {f"{name} loader {i}": value for name in loops for i, value in _numbered(loops[name]).items()}
    streams = streams_among(loaders)
    roots = {
        **_objects(trainer, schedules=training is not None),
        **{name: loader for name, loader in loaders.items() if name not in streams},
        **_optimizers(trainer),
        "callbacks": CallbackList(trainer.callbacks),  # type: ignore[attr-defined]
        "training": training,
    }
    anchors = {**process_anchors(trainer, optimizers=training is None), **_callbacks(trainer), **streams}
    return ObjectGraph(roots, anchors, optimizers=training is not None)


class TrainingParts:
    """The parts of a Trainer that hooks may replace, as one object.

    Attributes:
        loaders: of training and validation, once they were read, the user's loaders as they were given, and how they
            are combined.
        streams: which of the two read streams.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self.optimizers = trainer.strategy.optimizers
        self.schedulers = trainer.strategy.lr_scheduler_configs
        found = {name: loop for name, loop in fit_loops(trainer).items() if loaders_of(loop)}
        self.loaders = {name: _as_given(*combined_loaders(loop)) for name, loop in found.items()}
        self.streams = frozenset(name for name, loop in found.items() if streams_among(_numbered(loop)))

    def take_up(self, trainer: pl.Trainer) -> None:
        """Makes optimizers and schedulers those of ``trainer``."""
        strategy = trainer.strategy
        if [wrapper.optimizer for wrapper in lightning_optimizers(trainer)] != self.optimizers:
            strategy.optimizers = self.optimizers
        strategy.lr_scheduler_configs = self.schedulers

    def read_loaders(self, trainer: pl.Trainer) -> None:
        """Lets the loops of ``trainer`` read the loaders."""
        for name, given in self.loaders.items():
            read_loaders(trainer, name, None if name in self.streams else given)


def _as_given(loaders: Any, mode: Any) -> tuple[Any, Any]:
    return tree_map(lambda loader: loader.dataloader if isinstance(loader, StepLoader) else loader, loaders), mode


def _numbered(loop: Any) -> dict[str, Any]:
    """The user's loaders in a loop."""
    return {str(i): loader.dataloader for i, loader in enumerate(loaders_of(loop)) if isinstance(loader, StepLoader)}


class CallbackList:
    """The callbacks of a Trainer, as an object that has them."""

    def __init__(self, callbacks: list[Any]) -> None:
        self.callbacks = callbacks


def callback_graph(trainer: pl.Trainer, callbacks: Sequence[Any]) -> ObjectGraph:
    """The graph of ``callbacks`` alone, with neither the module nor its parts."""
    module, wanted = trainer.lightning_module, {id(callback) for callback in callbacks}
    anchors = {
        **process_anchors(trainer),
        **{f"module {name}": part for name, part in module.named_modules()},
        **{f"weight {name}": tensor for name, tensor in [*module.named_parameters(), *module.named_buffers()]},
        "datamodule": getattr(trainer, "datamodule", None),
        **_callbacks(trainer),
    }
    roots = {name: callback for name, callback in _callbacks(trainer).items() if id(callback) in wanted}
    return ObjectGraph(roots, anchors)


def metric_parts(trainer: pl.Trainer) -> dict[Path, Metric | MetricCollection | MetricTracker]:
    """The torchmetrics objects reachable from module, callbacks and data module."""
    graph = ObjectGraph(_objects(trainer), {**process_anchors(trainer), **_callbacks(trainer)})
    return graph.nodes_of(Metric, MetricCollection, MetricTracker)


def streams_among(loaders: Mapping[str, Any]) -> dict[str, Any]:
    """Streams among ``loaders``, by name, and their datasets."""
    streams = {name: loader for name, loader in loaders.items() if yields_batches(loader) or is_stream(loader)}
    return {**streams, **{f"{name}.dataset": getattr(loader, "dataset", None) for name, loader in streams.items()}}


def _objects(trainer: pl.Trainer, schedules: bool = False) -> dict[str, Any]:
    """Module, data module, and callbacks that do not belong to their process."""
    others = () if schedules else (StochasticWeightAveraging,)
    callbacks = {
        name: value
        for name, value in _callbacks(trainer).items()
        if not (is_bound_to_process(value) or isinstance(value, others))
    }
    return {"module": trainer.lightning_module, **callbacks, "datamodule": getattr(trainer, "datamodule", None)}


def _callbacks(trainer: pl.Trainer) -> dict[str, Any]:
    """The callbacks that all workers had when they began."""
    session: Any = trainer.strategy.session  # type: ignore[attr-defined]
    return {f"callback {i}": callback for i, callback in enumerate(session.callbacks)}


def _optimizers(trainer: pl.Trainer) -> dict[str, Any]:
    return {f"optimizer {i}": optimizer for i, optimizer in enumerate(trainer.optimizers)}


def process_anchors(trainer: pl.Trainer, optimizers: bool = True) -> dict[str, Any]:
    """Objects that belong to the Trainer of a process."""
    own = (type(trainer.lightning_module), pl.LightningDataModule)
    parts = {name: value for name, value in vars(trainer).items() if hasattr(value, "__dict__")}
    schedulers = {f"scheduler {i}": config.scheduler for i, config in enumerate(trainer.lr_scheduler_configs)}
    return {
        "trainer": trainer,
        **{f"trainer.{name}": value for name, value in parts.items() if not isinstance(value, own)},
        "strategy": trainer.strategy,
        "precision": trainer.precision_plugin,
        **{f"logger {i}": logger for i, logger in enumerate(trainer.loggers)},
        **{f"optimizer of Lightning {i}": optimizer for i, optimizer in enumerate(lightning_optimizers(trainer))},
        **(_optimizers(trainer) if optimizers else {}),
        **(schedulers if optimizers else {}),
    }
