"""Lightning's callbacks that average weights, on a worker that has one stage of the model.

Concept: an average is elementwise, so each worker lets the callback average the layers of its own stage, and the
callback's own code does it, as on one device. What differs is when the callback copies the model (not before the stage
is built: no worker holds the whole model), and what a checkpoint holds: the averages of all stages, under the names of
one device. A worker that joins a running training gets the averages of its donor.

A custom ``avg_fn`` sees one parameter at a time, as everywhere; a custom ``multi_avg_fn`` sees those of one stage.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer
from torch.optim.swa_utils import SWALR

from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.model.parts import ModelParts
from lightning_recycle.session.checkpoints import Checkpoints

__all__ = ["WeightAverages", "check_weight_averaging", "swap_schedules"]

_Averaging: TypeAlias = WeightAveraging | StochasticWeightAveraging
_REPLACED = ("setup", "on_save_checkpoint", "on_load_checkpoint", "state_dict", "load_state_dict")


def check_weight_averaging(trainer: pl.Trainer, parts: ModelParts) -> None:
    """Raises UnsupportedFeatureError for StochasticWeightAveraging of a model with BatchNorm: it ends with a pass over
    the data that computes running statistics, and those are not the same on all workers.
    """
    if not any(isinstance(callback, StochasticWeightAveraging) for callback in _callbacks(trainer)):
        return
    if StochasticWeightAveraging.pl_module_contains_batch_norm(parts.without_storage()):
        raise UnsupportedFeatureError(
            "strategy='recycle' does not support StochasticWeightAveraging of a model with BatchNorm: its statistics"
            " would have to be computed again, by one pass over all data, and here BatchNorm sees micro-batches. Use"
            " LayerNorm, GroupNorm or RMSNorm, or WeightAveraging or EMAWeightAveraging, which average the statistics."
        )


def swap_schedules(trainer: pl.Trainer, optimizers: Sequence[Optimizer], configs: list[LRSchedulerConfig]) -> None:
    """Makes the schedule of StochasticWeightAveraging, if that has begun, and puts it where the callback would have.

    For the launching process, where the callbacks have the attributes that they had in the workers. The optimizer gets
    options of the schedule, and loads its state afterwards.
    """
    for callback in _callbacks(trainer):
        if isinstance(callback, StochasticWeightAveraging) and callback._initialized:
            (optimizer,) = optimizers  # the callback allows for one
            rates = callback._swa_lrs
            rates = list(rates) if isinstance(rates, list) else [rates] * len(optimizer.param_groups)
            for rate, group in zip(rates, optimizer.param_groups, strict=True):
                group["initial_lr"] = rate
            assert trainer.max_epochs is not None
            schedule = SWALR(
                optimizer,
                swa_lr=rates,  # type: ignore[arg-type]  # torch's annotation is too narrow
                anneal_epochs=callback._annealing_epochs,
                anneal_strategy=callback._annealing_strategy,
                last_epoch=trainer.max_epochs if callback._annealing_strategy == "cos" else -1,
            )
            configs[:1] = [LRSchedulerConfig(schedule)]


class WeightAverages:
    """The averaging callbacks of a worker's Trainer."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer

    def await_stage(self) -> None:
        """Before Lightning calls ``setup``: the callbacks wait for :meth:`copy_stage`."""
        self.release()  # of an earlier run in this process
        for callback in _callbacks(self._trainer):
            callback.setup = _do_nothing  # type: ignore[method-assign]

    def copy_stage(self, module: pl.LightningModule) -> None:
        """Lets the callbacks copy what they average: the layers of this stage, with their initial weights."""
        assert self._trainer.state.fn is not None
        for callback in _callbacks(self._trainer):
            del callback.setup
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*doesn't support sharding model layers.*")  # here it does
                callback.setup(self._trainer, module, self._trainer.state.fn)

    def connect(self, checkpoints: Checkpoints) -> None:
        """Lets the callbacks write to checkpoints, and read, what one device would."""
        for callback in _callbacks(self._trainer):
            if isinstance(callback, WeightAveraging):
                replaced: dict[str, Callable[..., Any]] = {
                    "on_save_checkpoint": partial(_save_averages, callback, callback.on_save_checkpoint, checkpoints),
                    "on_load_checkpoint": partial(_load_averages, callback.on_load_checkpoint, checkpoints),
                }
            else:
                load = partial(_load_swa_state, callback.load_state_dict, checkpoints)
                replaced = {
                    "on_save_checkpoint": partial(_save_swa_average, callback, checkpoints),
                    "state_dict": partial(_swa_state, callback, callback.state_dict),
                    "load_state_dict": load,
                }
            vars(callback).update(replaced)

    def release(self) -> None:
        """The run is over: the callbacks are Lightning's again, and forget the stage."""
        for callback in _callbacks(self._trainer):
            for name in _REPLACED:
                vars(callback).pop(name, None)
            callback._average_model = None

    # ------------------------------------------------------------------ for a worker that joins

    def state(self) -> list[dict[str, Any]]:
        """What a worker of the same stage must know besides the states of the callbacks; tensors are not copied."""
        return [_state(callback) for callback in _callbacks(self._trainer)]

    def load(self, states: list[dict[str, Any]]) -> None:
        """Loads the :meth:`state` of another worker of this stage.

        The loops must know the epoch. Optimizers and schedulers are restored afterwards: a callback may have brought a
        scheduler of its own.
        """
        for callback, state in zip(_callbacks(self._trainer), states, strict=True):
            if isinstance(callback, WeightAveraging):
                assert callback._average_model is not None
                callback._average_model.load_state_dict(state["average_model"])
                callback._latest_update_epoch = state["latest_update_epoch"]
            else:
                _restore_swa(callback, self._trainer, state)


def _callbacks(trainer: pl.Trainer) -> list[_Averaging]:
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, _Averaging)]


def _do_nothing(*_: Any, **__: Any) -> None:
    pass


def _state(callback: _Averaging) -> dict[str, Any]:
    if isinstance(callback, WeightAveraging):
        assert callback._average_model is not None
        return {
            "average_model": callback._average_model.state_dict(),
            "latest_update_epoch": callback._latest_update_epoch,
        }
    return {"initialized": callback._initialized, **callback.state_dict()}


# ---------------------------------------------------------------------- WeightAveraging, EMAWeightAveraging


def _save_averages(
    callback: WeightAveraging,
    save: Callable[..., None],
    checkpoints: Checkpoints,
    trainer: pl.Trainer,
    module: pl.LightningModule,
    checkpoint: dict[str, Any],
) -> None:
    save(trainer, module, checkpoint)
    if callback._average_model is not None and not checkpoints.sharded:
        mine = checkpoint["state_dict"]  # what the callback replaced is whole already
        checkpoint["state_dict"] = checkpoints.joined("averaged weights", mine)


def _load_averages(
    load: Callable[..., None],
    checkpoints: Checkpoints,
    trainer: pl.Trainer,
    module: pl.LightningModule,
    checkpoint: dict[str, Any],
) -> None:
    whole = {name: checkpoint[name] for name in ("state_dict", "current_model_state") if name in checkpoint}
    load(trainer, module, {**checkpoint, **{name: checkpoints.own_part(state) for name, state in whole.items()}})


# ---------------------------------------------------------------------- StochasticWeightAveraging


def _save_swa_average(
    callback: StochasticWeightAveraging,
    checkpoints: Checkpoints,
    trainer: pl.Trainer,
    module: pl.LightningModule,
    checkpoint: dict[str, Any],
) -> None:
    """Its average is part of its state, which lies in one piece even in a sharded checkpoint."""
    state = checkpoint["callbacks"][callback.state_key]
    state["average_model_state"] = checkpoints.joined("averaged weights", state["average_model_state"])


def _swa_state(callback: StochasticWeightAveraging, state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Its state; until the epoch that begins the averaging (again), what was read from a checkpoint is its state."""
    state = state_dict()
    if not callback._initialized:
        state |= {"n_averaged": callback._init_n_averaged, "scheduler_state": callback._scheduler_state}
    return state


def _load_swa_state(load: Callable[[dict[str, Any]], None], checkpoints: Checkpoints, state: dict[str, Any]) -> None:
    load({**state, "average_model_state": checkpoints.own_part(state["average_model_state"])})


def _restore_swa(callback: StochasticWeightAveraging, trainer: pl.Trainer, state: Mapping[str, Any]) -> None:
    callback.load_state_dict({name: value for name, value in state.items() if name != "initialized"})
    if not state["initialized"]:
        return
    if not callback._initialized:  # as at the beginning of an epoch, without an update of the averages
        callback._latest_update_epoch = trainer.current_epoch
        callback.on_train_epoch_start(trainer, trainer.lightning_module)
    callback._latest_update_epoch = state["latest_update_epoch"]
    callback.n_averaged = torch.tensor(state["n_averaged"], dtype=torch.long, device=trainer.lightning_module.device)
