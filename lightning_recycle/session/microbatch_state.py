"""State of a worker before a manual step, and of each of its micro-batches within the step.

A step that steps optimizers itself cannot be redone from its parameters alone, and an optimizer's step cannot be
computed back. So :class:`ManualStepState` copies everything before each step: parameters, buffers, gradients that were
left, the optimizers' states and options, schedulers, Lightning's counters, and the state of callbacks whose hooks run
within a step. Attributes of the module are no part of it: side effects of a step on them are recorded
(:mod:`~lightning_recycle.session.hook_side_effects`), or stay. The copies are made in the same memory every time: as
much as the parameters and the optimizers' states take.

Under DDP the training steps of two micro-batches run in two processes. When one worker has both, they run in turns
(:mod:`~lightning_recycle.runtime.executor.whole_steps`), each in a :class:`MicrobatchState` of its own: gradients,
values of parameters and buffers, attributes of the module, metrics, options of the optimizers, and the generators of
random numbers are those that this micro-batch has left. The states begin alike; an optimizer's step, which is done
together, is done in the first one and copied to the others. So each may clip its gradients, toggle an optimizer, or
average weights in its step, without doing it twice. The price is a copy of parameters, buffers and gradients for each
further micro-batch of a worker.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
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
from lightning_recycle.session.object_attributes import MODULE_TABLES
from lightning_recycle.session.object_graph import ObjectGraph, ObjectPack, callback_graph
from lightning_recycle.session.optimizer_states import OptimizerState, copied
from lightning_recycle.session.outputs import metric_states, set_metric_states

_DEPTH = 4  # of containers in one another that are copied
_COPIED_ELEMENTS = 65536  # of a tensor: larger ones, such as masks, are seldom written in place


@dataclass(frozen=True)
class _ProcessState:
    """A part of the state of the process.

    Args:
        get: returns its value.
        put: makes that the value.
        copy: copies a value for another micro-batch.
        stays: whether the value that the first micro-batch leaves is there after the step.
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
    """The options of the optimizers' groups."""

    def put(values: list[dict[str, Any]]) -> None:
        for group, options in zip(groups, values, strict=True):
            group.update(options)

    def get() -> list[dict[str, Any]]:
        return [{key: value for key, value in group.items() if key != "params"} for group in groups]

    return _ProcessState(get, put, lambda values: [_own(options, _DEPTH, {}) for options in values])


def _metrics(metrics: Callable[[], list[Metric]]) -> _ProcessState:
    """The accumulated states of the metrics that are recorded; trackers add some."""

    def get() -> list[tuple[Metric, dict[str, Any]]]:
        return [(metric, metric_states(metric)) for metric in metrics()]

    def put(values: list[tuple[Metric, dict[str, Any]]]) -> None:
        for metric, states in values:
            set_metric_states(metric, states)

    return _ProcessState(get, put, lambda values: [(m, _own(states, _DEPTH, {})) for m, states in values], stays=False)


def _generators(device: torch.device) -> _ProcessState:
    """The states of Python's, NumPy's and torch's generators."""
    generator = default_generator(device)

    def get() -> Any:
        return generator_states(), generator.get_state()

    def put(value: Any) -> None:
        set_generator_states(value[0])
        generator.set_state(value[1])

    return _ProcessState(get, put, lambda value: value, stays=False)


def _attributes(module: nn.Module) -> _ProcessState:
    """The attributes of the module; those of the first micro-batch stay."""

    def copy(value: dict[str, Any]) -> dict[str, Any]:
        seen: dict[int, Any] = {}
        own = {name: item if name in _REGISTRIES else _own(item, _DEPTH, seen) for name, item in value.items()}
        own["_buffers"] = dict(value["_buffers"])
        return own

    return _ProcessState(lambda: vars(module), lambda value: object.__setattr__(module, "__dict__", value), copy)


_REGISTRIES = (*MODULE_TABLES, "_trainer")


class MicrobatchState:
    """A context in which the process is as one micro-batch has left it.

    Args:
        module: the module in training.
        optimizers: its optimizers.
        device: the device that it computes on.
        metrics: returns the metrics that are recorded.
        first: whether it takes the state over as it is.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        optimizers: Iterable[Optimizer],
        device: torch.device,
        metrics: Callable[[], list[Metric]],
        first: bool,
    ) -> None:
        self._tensors = [*module.parameters(), *module.buffers()]
        self._parts = {
            "tensors": _fields(self._tensors, "data"),  # neither a copy nor a write, which autograd would count
            "gradients": _fields(list(module.parameters()), "requires_grad", "grad"),
            "options": _options([group for optimizer in optimizers for group in optimizer.param_groups]),
            "modes": _fields(list(module.modules()), "training"),
            "metrics": _metrics(metrics),
            "generators": _generators(device),
            "attributes": _attributes(module),
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
        for name, part in self._parts.items():
            self._values[name] = part.get()
            part.put(self._outside[name])
        self._outside = {}

    @torch.no_grad()
    def follow(self, parameters: Iterable[Tensor]) -> None:
        """Takes over ``parameters`` and the options of the optimizers from the state that is entered."""
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


def _own(value: Any, depth: int, seen: dict[int, Any]) -> Any:
    """A copy of ``value`` with its tensors, arrays and plain containers; other objects are not touched."""
    if id(value) in seen:
        return seen[id(value)]
    copy = value
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        if value.numel() <= _COPIED_ELEMENTS and value.grad_fn is None:
            copy = value.detach().clone().requires_grad_(value.requires_grad)
    elif isinstance(value, np.ndarray):
        copy = value.copy()
    elif depth and type(value) is dict:  # pairs of items() would not live on, and others have their ids
        copy = {key: _own(item, depth - 1, seen) for key, item in value.items()}
    elif depth and type(value) in (list, tuple, set):
        copy = type(value)([_own(item, depth - 1, seen) for item in value])
    elif isinstance(value, deque):
        copy = deque((_own(item, depth - 1, seen) for item in value), value.maxlen) if depth else value
    elif isinstance(value, dict) and depth:  # a Counter, a defaultdict
        copy = value.copy()
        for key, item in value.items():
            copy[key] = _own(item, depth - 1, seen)
    seen[id(value)] = copy
    return copy


# ---------------------------------------------------------------------- the whole step

_HOOKS_OF_STEPS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step")
_PLAIN = (bool, int, float, str, type(None))  # attributes that a submodule may count with


class ManualStepState:
    """The state of ``trainer`` and its module before a step."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._tensors: dict[Tensor, Tensor] = {}
        self._gradients: dict[nn.Parameter, tuple[bool, Tensor | None]] = {}
        self._plain: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._optimizers: list[OptimizerState] = []
        self._schedulers: list[dict[str, Any]] = []
        self._others: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        self._callbacks: tuple[ObjectGraph, ObjectPack] | None = None

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
        self._plain = [
            (vars(owner), {name: value for name, value in vars(owner).items() if type(value) in _PLAIN})
            for owner in module.modules()
            if owner is not module
        ]
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
        for attributes, plain in self._plain:
            attributes.update(plain)
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
