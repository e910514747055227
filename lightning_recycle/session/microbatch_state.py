"""State of a worker before a manual step, and of each micro-batch within it.

A step that steps optimizers itself cannot be redone from its parameters, nor computed back. So :class:`ManualStepState`
copies all before each step, into the same memory: parameters, buffers, remaining gradients, optimizers, schedulers,
Lightning's counters, callbacks with hooks in a step, and the module's tree
(:mod:`~lightning_recycle.session.slot_values`).

Micro-batches that would have two processes under DDP run in turns on one worker
(:mod:`~lightning_recycle.runtime.executor.whole_steps`), each in its :class:`MicrobatchState`: gradients, values in the
tree, metrics, optimizer options and generators. States begin alike; an optimizer's step is done in the first one and
copied to the others. So each may clip its gradients, toggle an optimizer or average weights, at the price of a copy of
parameters, buffers and gradients for each further micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_recycle.devices import default_generator
from lightning_recycle.randomness import generator_states, set_generator_states
from lightning_recycle.session.commit_requirements import restore_scale
from lightning_recycle.session.lightning_internals import count_manual_steps
from lightning_recycle.session.object_attributes import INTERNAL_ATTRIBUTES, MODULE_TABLES
from lightning_recycle.session.object_graph import ObjectGraph, ObjectPack, callback_graph
from lightning_recycle.session.optimizer_states import OptimizerState, copied
from lightning_recycle.session.outputs import metric_states, set_metric_states
from lightning_recycle.session.slot_values import ValueTree
from lightning_recycle.torch_internals import tree_map_only

_COPIED_BYTES = 256 * 1024  # of a tensor that is no weight: larger ones, such as masks, are seldom written in place


@dataclass(frozen=True)
class _ProcessState:
    """A part of the state of the process.

    ``put``: makes a value the current one. ``copy``: for another micro-batch. ``stays``: whether the first
    micro-batch's value is there after the step.
    """

    get: Callable[[], Any]
    put: Callable[[Any], None]
    copy: Callable[[Any], Any]
    stays: bool = True


def _fields(owners: Sequence[Any], *names: str) -> _ProcessState:
    """Attributes of tensors or modules."""

    def put(values: list[list[Any]]) -> None:
        for owner, own in zip(owners, values, strict=True):
            for name, value in zip(names, own, strict=True):
                setattr(owner, name, value)

    def copy(values: list[list[Any]]) -> list[list[Any]]:
        return [[value.clone() if isinstance(value, Tensor) else value for value in own] for own in values]

    return _ProcessState(lambda: [[getattr(owner, name) for name in names] for owner in owners], put, copy)


def _options(groups: Sequence[dict[str, Any]]) -> _ProcessState:
    def put(values: list[dict[str, Any]]) -> None:
        for group, options in zip(groups, values, strict=True):
            group.update(options)

    def get() -> list[dict[str, Any]]:
        return [{key: value for key, value in group.items() if key != "params"} for group in groups]

    return _ProcessState(get, put, _cloned)


def _metrics(metrics: Callable[[], list[Metric]]) -> _ProcessState:
    """The accumulated states of the metrics that are recorded; trackers add some."""

    def get() -> list[tuple[Metric, dict[str, Any]]]:
        return [(metric, metric_states(metric)) for metric in metrics()]

    def put(values: list[tuple[Metric, dict[str, Any]]]) -> None:
        for metric, states in values:
            set_metric_states(metric, states)

    return _ProcessState(get, put, _cloned, stays=False)


def _generators(device: torch.device) -> _ProcessState:
    """The states of Python's, NumPy's and torch's generators."""
    generator = default_generator(device)

    def get() -> Any:
        return generator_states(), generator.get_state()

    def put(value: Any) -> None:
        set_generator_states(value[0])
        generator.set_state(value[1])

    return _ProcessState(get, put, lambda value: value, stays=False)


def _values(tree: ValueTree) -> _ProcessState:
    """Mutable values in the module's tree; of tensors their identity, not content."""
    return _ProcessState(tree.contents, tree.restore, lambda value: value)


def _internals(module: pl.LightningModule) -> _ProcessState:
    """Attributes of the module that are not the user's, such as recorded values."""

    def put(value: dict[str, Any]) -> None:
        for name in _INTERNALS - value.keys():
            vars(module).pop(name, None)
        vars(module).update(value)

    def own(value: dict[str, Any]) -> dict[str, Any]:
        return {name: copy(item) if isinstance(item, dict) else item for name, item in value.items()}

    return _ProcessState(lambda: {n: v for n, v in vars(module).items() if n in _INTERNALS}, put, own)


_INTERNALS = INTERNAL_ATTRIBUTES - {*MODULE_TABLES, "_trainer", "training"}


class MicrobatchState:
    """A context in which the process is as one micro-batch has left it.

    ``tree``: the values of ``module``. ``metrics``: returns the recorded metrics. ``first``: whether it takes the state
    over unchanged.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        tree: ValueTree,
        optimizers: Iterable[Optimizer],
        device: torch.device,
        metrics: Callable[[], list[Metric]],
        first: bool,
    ) -> None:
        weights = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        others = {id(tensor): tensor for tensor in tree.tensors() if tensor.nbytes <= _COPIED_BYTES}
        self._tensors = [*{**weights, **others}.values()]
        self._parts = {
            "tensors": _fields(self._tensors, "data"),  # neither a copy nor a write, which autograd would count
            "gradients": _fields(list(module.parameters()), "requires_grad", "grad"),
            "options": _options([group for optimizer in optimizers for group in optimizer.param_groups]),
            "modes": _fields(list(module.modules()), "training"),
            "metrics": _metrics(metrics),
            "generators": _generators(device),
            "internals": _internals(module),
            "values": _values(tree),
        }
        values = {name: part.get() for name, part in self._parts.items()}
        self._values = {
            name: values[name] if first and part.stays else part.copy(values[name])
            for name, part in self._parts.items()
        }
        self._outside: dict[str, Any] = {}

    def __enter__(self) -> None:
        self._outside = {name: part.get() for name, part in self._parts.items()}
        for name, part in self._parts.items():
            part.put(self._values[name])

    def __exit__(self, *_: object) -> None:
        self._values = {name: part.get() for name, part in self._parts.items()}
        for name, part in self._parts.items():
            part.put(self._outside[name])
        self._outside = {}

    @torch.no_grad()
    def follow(self, parameters: Iterable[Tensor]) -> None:
        """Takes ``parameters`` and optimizer options from the state that is entered."""
        wanted = set(map(id, parameters))
        for tensor, (data,) in zip(self._tensors, self._values["tensors"], strict=True):
            if id(tensor) in wanted:
                data.copy_(tensor)
        options = self._parts["options"]
        self._values["options"] = options.copy(options.get())

    def remain(self) -> None:
        """Makes the process as this micro-batch has left it, except for recorded parts."""
        for name, part in self._parts.items():
            if part.stays:
                part.put(self._values[name])


def _cloned(value: Any) -> Any:
    return tree_map_only(Tensor, Tensor.clone, value)


# ---------------------------------------------------------------------- the whole step

_HOOKS_OF_STEPS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step")


class ManualStepState:
    """The state of ``trainer`` and its module, with values ``tree``, before a step."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._tensors: dict[Tensor, Tensor] = {}
        self._gradients: dict[nn.Parameter, tuple[bool, Tensor | None]] = {}
        self.forget_values()
        self._optimizers: list[OptimizerState] = []
        self._schedulers: list[dict[str, Any]] = []
        self._others: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        self._callbacks: tuple[ObjectGraph, ObjectPack] | None = None

    def forget_values(self) -> None:
        """Keeps no values of the module, nor weak references to weights, until a step."""
        self.tree = ValueTree(self._trainer.lightning_module)
        self._values: list[tuple[Any, Any]] = []

    @property
    def _progress(self) -> Any:
        return count_manual_steps(self._trainer)

    @torch.no_grad()
    def keep(self) -> None:
        trainer = self._trainer
        module = trainer.lightning_module
        self._tensors = {t: copied(t, self._tensors.get(t)) for t in (*module.parameters(), *module.buffers())}
        before = self._gradients
        self._gradients = {
            p: (p.requires_grad, None if p.grad is None else copied(p.grad, before.get(p, (False, None))[1]))
            for p in module.parameters()
        }
        self._values = self.tree.contents()
        old = self._optimizers[: len(trainer.optimizers)]
        self._optimizers = [OptimizerState(*pair) for pair in itertools.zip_longest(trainer.optimizers, old)]
        self._schedulers = [deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs]
        self._others = deepcopy((self._progress.state_dict(), trainer.precision_plugin.state_dict()))
        watching = [c for c in trainer.callbacks if _sees_steps(c)]  # type: ignore[attr-defined]
        self._callbacks = None
        if watching:
            graph = callback_graph(trainer, watching)
            packed = graph.pack()
            self._callbacks = graph, ObjectPack(packed.data, [tensor.clone() for tensor in packed.tensors])

    @torch.no_grad()
    def rewind(self) -> None:
        trainer = self._trainer
        for tensor, kept in self._tensors.items():
            if tensor.shape == kept.shape:
                tensor.data.copy_(kept)
            else:
                tensor.data = kept.clone()
        for parameter, (requires_grad, grad) in self._gradients.items():
            parameter.requires_grad = requires_grad
            parameter.grad = None if grad is None else grad.clone()
        self.tree.restore(self._values)
        for state in self._optimizers:
            state.rewind()
        for config, scheduler in zip(trainer.lr_scheduler_configs, self._schedulers, strict=True):
            config.scheduler.load_state_dict(deepcopy(scheduler))
        progress, precision = deepcopy(self._others)
        self._progress.load_state_dict(progress)
        restore_scale(trainer, precision)
        if self._callbacks is not None:
            graph, packed = self._callbacks
            graph.update(packed, trainer.strategy.root_device)


def _sees_steps(callback: Callback) -> bool:
    return any(is_overridden(hook, callback, Callback) for hook in _HOOKS_OF_STEPS)
