"""All that a manual step may change on a worker, as it was before the step.

A step that steps optimizers itself cannot be redone from its parameters alone, and what the optimizers have done cannot
be computed back. So everything is copied before each step: parameters, buffers, gradients that were left, the
optimizers' states and options, schedulers, Lightning's counters, and what callbacks keep whose hooks run within a step.
Attributes of the module are no part of it: what a step does to them is recorded
(:mod:`~lightning_recycle.session.hook_side_effects`), or stays.

The copies are made in the same memory every time: as much as the parameters and the optimizers' states take.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.progress import _Progress
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_recycle.session.loss_scaling import restore_scale
from lightning_recycle.session.object_graph import ObjectGraph, ObjectPack, callback_graph

__all__ = ["ManualStepState", "OptimizerState"]

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
    def _progress(self) -> _Progress:
        return self._trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress

    @torch.no_grad()
    def keep(self) -> None:
        trainer = self._trainer
        module = trainer.lightning_module
        self._tensors = {t: _copied(t, self._tensors.get(t)) for t in (*module.parameters(), *module.buffers())}
        before = self._gradients
        self._gradients = {
            p: (p.requires_grad, None if p.grad is None else _copied(p.grad, before.get(p, (False, None))[1]))
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


class OptimizerState:
    """The state of one optimizer; the memory of ``old`` is used again.

    Args:
        optimizer: the optimizer.
        old: an earlier state of it that is not needed any more.
        options_only: whether only the options of its groups are kept.
    """

    def __init__(self, optimizer: Optimizer, old: OptimizerState | None, options_only: bool = False) -> None:
        self._optimizer = optimizer
        before: dict[Any, Any] = {} if old is None else old._states
        states = {} if options_only else optimizer.state
        self._states: dict[Any, Any] = {p: _copied(state, before.get(p)) for p, state in states.items()}
        self._groups = [(group, {**group, "params": list(group["params"])}) for group in optimizer.param_groups]
        self._options = [_copied({k: v for k, v in group.items() if k != "params"}) for group, _ in self._groups]

    def tensors(self) -> list[Tensor]:
        """What it keeps copies of."""
        return [leaf for leaf in tree_leaves(list(self._states.values())) if isinstance(leaf, Tensor)]

    def rewind(self) -> None:
        optimizer = self._optimizer
        optimizer.state.clear()
        optimizer.state.update({p: _copied(state) for p, state in self._states.items()})
        self.rewind_options()

    def rewind_options(self) -> None:
        self._optimizer.param_groups[:] = [group for group, _ in self._groups]
        for (group, before), options in zip(self._groups, self._options, strict=True):
            group.clear()
            group.update({**_copied(options), "params": before["params"]})


def _copied(value: Any, old: Any = None) -> Any:
    """A copy of ``value`` and its tensors, in the memory of ``old`` where that fits."""
    if isinstance(value, Tensor):
        fits = isinstance(old, Tensor) and (old.shape, old.dtype, old.device) == (
            value.shape,
            value.dtype,
            value.device,
        )
        return old.copy_(value) if fits else value.detach().clone()
    if isinstance(value, Mapping):
        known = old if isinstance(old, Mapping) else {}
        return {key: _copied(item, known.get(key)) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return deepcopy(value)


def _sees_steps(callback: Callback) -> bool:
    return any(is_overridden(hook, callback, Callback) for hook in _HOOKS_OF_STEPS)
