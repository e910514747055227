"""Lightning's callbacks that change weights: averages and finetuning.

Averages are elementwise, so each worker averages its stage; a checkpoint gets those of all stages, under the names of
one device. A custom ``multi_avg_fn`` sees the parameters of one stage. Finetuning runs on every worker for its stage;
all stages have the same groups, empty ones if need be.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning, WeightAveraging
from torch import nn
from torch.optim import Optimizer

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.model.layers import AbsentLayer
from lightning_recycle.session.optimizer_states import StageStates, group_names, merged_names, parameters_by_name

_Callback = TypeVar("_Callback", bound=pl.Callback)

_METADATA = "internal_optimizer_metadata"
_REPLACED = ("setup", "on_save_checkpoint", "on_load_checkpoint", "load_state_dict", "unfreeze_and_add_param_group")
"""Methods of the callbacks that others stand for in a run."""


def _callbacks_of(trainer: pl.Trainer, kind: type[_Callback]) -> list[_Callback]:
    return [callback for callback in trainer.callbacks if isinstance(callback, kind)]  # type: ignore[attr-defined]


def await_stage(trainer: pl.Trainer) -> None:
    """Postpones the ``setup`` of averages by Lightning to :func:`enter_stage`."""
    for callback in _callbacks_of(trainer, WeightAveraging):
        callback.setup = _do_nothing  # type: ignore[method-assign]


def enter_stage(trainer: pl.Trainer, module: pl.LightningModule, was_built: bool) -> None:
    """Sets up averages when the layers of this stage have their first values.

    ``was_built``: whether these layers were there when ``setup`` froze some.
    """
    assert trainer.state.fn is not None
    for finetuning in _callbacks_of(trainer, BaseFinetuning) if not was_built else ():
        finetuning.freeze_before_training(module)
    for callback in _callbacks_of(trainer, WeightAveraging):
        del callback.setup
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*doesn't support sharding model layers.*")  # here it does
            callback.setup(trainer, module, trainer.state.fn)


class WeightCallbacks:
    """A worker's callbacks that change weights, with states of the whole model."""

    def __init__(self, trainer: pl.Trainer, checkpoints: StageStates) -> None:
        self._trainer, self._checkpoints = trainer, checkpoints
        for average in _callbacks_of(trainer, WeightAveraging):
            vars(average)["on_load_checkpoint"] = partial(self._load_average, average.on_load_checkpoint)
        for callback in _callbacks_of(trainer, BaseFinetuning):
            vars(callback).update(
                unfreeze_and_add_param_group=partial(self._unfreeze, callback.unfreeze_and_add_param_group),
                on_save_checkpoint=partial(self._save_names, callback),
                load_state_dict=partial(self._load_names, callback, callback.load_state_dict),
            )
            self._keep_names_of_stage(callback)  # of an earlier fit

    def release(self) -> None:
        """The run is over: the callbacks are Lightning's again."""
        averages = _callbacks_of(self._trainer, WeightAveraging)
        finetunings = _callbacks_of(self._trainer, BaseFinetuning)
        for callback in (*averages, *finetunings):
            for name in _REPLACED:
                vars(callback).pop(name, None)
        for averaging in averages:
            averaging._average_model = None
        for finetuning in finetunings:
            finetuning._internal_optimizer_metadata = self._names_of_model(finetuning._internal_optimizer_metadata)

    # ------------------------------------------------------------------ averages

    def join_states(self, states: dict[str, Any]) -> None:
        """Makes ``states`` of callbacks those of the whole model, on all workers."""
        for finetuning in _callbacks_of(self._trainer, BaseFinetuning):
            self._save_names(finetuning, self._trainer, self._trainer.lightning_module, {"callbacks": states})

    def _load_average(self, load: Callable[..., None], trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        kinds = [name for name in ("state_dict", "current_model_state") if name in checkpoint]
        load(trainer, module, checkpoint | {name: self._checkpoints.own_part(checkpoint[name]) for name in kinds})

    # ------------------------------------------------------------------ finetuning

    def _unfreeze(
        self,
        unfreeze: Callable[..., None],
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
        if self._checkpoints.collectives.decide(has_added, all_agree=False) and not has_added:
            optimizer.add_param_group({"params": [], "lr": initial})

    def _save_names(self, callback: BaseFinetuning, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["callbacks"][callback.state_key]
        state[_METADATA] = self._names_of_model(state[_METADATA])

    def _names_of_model(self, metadata: Mapping[int, Any]) -> dict[int, list[dict[str, Any]]]:
        """The groups of the whole model, in the order of one device."""
        parts = self._checkpoints.collectives.gather_stages("names of parameters", lambda: metadata)
        merged: dict[int, list[dict[str, Any]]] = {}
        for optimizer, groups in parts[0].items():
            of_stages = [[group["params"] for group in part[optimizer]] for part in parts]
            names = merged_names(of_stages, self._checkpoints.copies)
            merged[optimizer] = [{**group, "params": params} for group, params in zip(groups, names, strict=True)]
        return merged

    def _load_names(
        self, callback: BaseFinetuning, load: Callable[[dict[str, Any]], None], state: dict[str, Any]
    ) -> None:
        load(state)
        self._keep_names_of_stage(callback)

    def _keep_names_of_stage(self, callback: BaseFinetuning) -> None:
        """Leaves the parameters of other stages out of the callback's groups."""
        owned = {name for name, _ in self._trainer.lightning_module.named_parameters()}
        callback._internal_optimizer_metadata = {
            optimizer: [{**group, "params": [name for name in group["params"] if name in owned]} for group in groups]
            for optimizer, groups in callback._internal_optimizer_metadata.items()
        }


def _do_nothing(*_: Any, **__: Any) -> None:
    pass


# ---------------------------------------------------------------------- groups of parameters


@contextmanager
def empty_optimizers() -> Iterator[None]:
    """Allows optimizers without parameters in the block, as on a frozen stage."""
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


def load_parameter_groups(
    module: nn.Module, optimizers: Sequence[Optimizer], groups: Sequence[Sequence[Sequence[str]]]
) -> None:
    """Makes groups of these parameters, as callbacks may have changed them.

    Raises ConfigurationError if ``module`` lacks one of them.
    """
    parameters = parameters_by_name(module)
    if missing := [name for of_one in groups for group in of_one for name in group if name not in parameters]:
        raise ConfigurationError(
            f"the optimizers have parameters that the {type(module).__name__} lacks: {', '.join(missing)}. Assign them"
            " to attributes of the module"
        )
    for optimizer, wanted in zip(optimizers, groups, strict=True):
        if group_names(module, optimizer) != wanted:
            of_groups = ([parameters[name] for name in group] for group in wanted)
            optimizer.param_groups = [{**optimizer.defaults, "params": params} for params in of_groups]
