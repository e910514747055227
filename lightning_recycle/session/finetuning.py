"""Parameters that are not trained, or not yet: frozen ones, stages of nothing else, and ``BaseFinetuning``.

Concept: which parameters require a gradient, and in which group of the optimizer they are, is up to the user's code. It
runs on every worker for the layers of its stage, and may change that between two steps. All stages have the same
groups, if need be empty ones, so that they can be joined to one optimizer's; and a worker that joins gets all that from
its donor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.optim import Optimizer

from lightning_recycle.model.layers import AbsentLayer
from lightning_recycle.session.collectives import Collectives
from lightning_recycle.session.optimizer_states import Copies, group_names, merged_names

__all__ = ["Finetuning", "empty_optimizers", "has_recipes", "load_trained", "trained"]

_METADATA = "internal_optimizer_metadata"
_REPLACED = ("unfreeze_and_add_param_group", "on_save_checkpoint", "load_state_dict")


@contextmanager
def empty_optimizers() -> Iterator[None]:
    """Within the block an optimizer may be made without parameters, as on a frozen stage; torch refuses that."""
    make = Optimizer.__init__

    def make_any(self: Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        make(self, list(params) or [{"params": []}], defaults)

    Optimizer.__init__ = make_any  # type: ignore[method-assign]
    try:
        yield
    finally:
        Optimizer.__init__ = make  # type: ignore[method-assign]


def has_recipes(module: nn.Module) -> bool:
    """Whether some layers of this stage are not built yet."""
    return any(isinstance(layer, AbsentLayer) and not layer.elsewhere for layer in module.modules())


# ---------------------------------------------------------------------- what a worker that joins must know


def trained(module: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Which parameters of ``module`` require a gradient, and those of each group, by name."""
    return {
        "trained": [name for name, parameter in module.named_parameters() if parameter.requires_grad],
        "groups": [group_names(module, optimizer) for optimizer in optimizers],
    }


def load_trained(module: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> None:
    """Makes it as :func:`trained` found it on a worker of this stage; the groups get their options afterwards."""
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        parameter.requires_grad = name in state["trained"]
    found = trained(module, optimizers)["groups"]
    for optimizer, mine, groups in zip(optimizers, found, state["groups"], strict=True):
        if mine != groups:
            optimizer.param_groups = [{"params": [parameters[name] for name in group]} for group in groups]


# ---------------------------------------------------------------------- Lightning's callbacks


class Finetuning:
    """The ``BaseFinetuning`` callbacks of a worker's Trainer."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer

    @property
    def _callbacks(self) -> list[BaseFinetuning]:
        callbacks = self._trainer.callbacks  # type: ignore[attr-defined]
        return [callback for callback in callbacks if isinstance(callback, BaseFinetuning)]

    def freeze(self, module: pl.LightningModule) -> None:
        """Lets the callbacks freeze layers that were recipes when they did so, in ``setup``."""
        for callback in self._callbacks:
            callback.freeze_before_training(module)

    def connect(self, collectives: Collectives, copies: Copies) -> None:
        """Keeps the groups of all stages alike, and the callbacks' states those of the whole model."""
        for callback in self._callbacks:
            replaced: dict[str, Callable[..., Any]] = {
                "unfreeze_and_add_param_group": partial(_unfreeze, callback.unfreeze_and_add_param_group, collectives),
                "on_save_checkpoint": partial(_save_names, callback, collectives, copies),
                "load_state_dict": partial(_load_names, callback, callback.load_state_dict, self._trainer),
            }
            vars(callback).update(replaced)
            callback._internal_optimizer_metadata = _of_stage(callback, self._trainer)  # of an earlier fit
        self._whole = partial(_of_model, collectives=collectives, copies=copies)

    def joined(self) -> None:
        """This worker has its donor's groups already."""
        for callback in self._callbacks:
            callback._restarting = False

    def release(self) -> None:
        """The run is over: the callbacks are Lightning's again, and know the names of the whole model."""
        for callback in self._callbacks:
            for name in _REPLACED:
                vars(callback).pop(name, None)
            callback._internal_optimizer_metadata = self._whole(callback._internal_optimizer_metadata)


def _unfreeze(
    unfreeze: Callable[..., None],
    collectives: Collectives,
    modules: Any,
    optimizer: Optimizer,
    lr: float | None = None,
    initial_denom_lr: float = 10.0,
    train_bn: bool = True,
) -> None:
    """Also adds a group, without parameters, if that of another stage has some."""
    groups = len(optimizer.param_groups)
    initial = float(lr) if lr is not None else optimizer.param_groups[0]["lr"] / initial_denom_lr
    unfreeze(modules, optimizer, lr, initial_denom_lr, train_bn)
    has_added = len(optimizer.param_groups) > groups
    if collectives.decide(has_added, all_agree=False) and not has_added:
        optimizer.add_param_group({"params": [], "lr": initial})


def _save_names(
    callback: BaseFinetuning,
    collectives: Collectives,
    copies: Copies,
    trainer: pl.Trainer,
    module: pl.LightningModule,
    checkpoint: dict[str, Any],
) -> None:
    state = checkpoint["callbacks"][callback.state_key]
    state[_METADATA] = _of_model(state[_METADATA], collectives, copies)


def _of_model(metadata: Mapping[int, Any], collectives: Collectives, copies: Copies) -> dict[int, list[dict[str, Any]]]:
    """The groups of the whole model, in the order of one device, as in the state of its optimizer."""
    parts = collectives.gather_stages("names of parameters", lambda: metadata)
    merged: dict[int, list[dict[str, Any]]] = {}
    for optimizer, groups in parts[0].items():
        names = merged_names([[group["params"] for group in part[optimizer]] for part in parts], copies)
        merged[optimizer] = [{**group, "params": params} for group, params in zip(groups, names, strict=True)]
    return merged


def _load_names(
    callback: BaseFinetuning, load: Callable[[dict[str, Any]], None], trainer: pl.Trainer, state: dict[str, Any]
) -> None:
    load(state)
    callback._internal_optimizer_metadata = _of_stage(callback, trainer)


def _of_stage(callback: BaseFinetuning, trainer: pl.Trainer) -> dict[int, list[dict[str, Any]]]:
    """The groups of the callback without the parameters of other stages."""
    owned = {name for name, _ in trainer.lightning_module.named_parameters()}
    return {
        optimizer: [{**group, "params": [name for name in group["params"] if name in owned]} for group in groups]
        for optimizer, groups in callback._internal_optimizer_metadata.items()
    }
