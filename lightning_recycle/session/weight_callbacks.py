"""Lightning's callbacks that change weights: averages, finetuning, pruning.

Averages are elementwise, so each worker averages its stage; a checkpoint gets those of all stages, under the names of
one device. A custom ``multi_avg_fn`` sees the parameters of one stage. Finetuning runs on every worker for its stage;
all stages have the same groups, empty ones if need be. Pruning needs the whole model, so one stage; a process that did
not see it done takes the form of a state dict before it loads that.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn
from torch.nn.utils import prune
from torch.optim import Optimizer
from torch.optim.swa_utils import SWALR

from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError
from lightning_recycle.model.layers import AbsentLayer
from lightning_recycle.model.parts import ModelParts
from lightning_recycle.randomness import derive_seed, layer_randomness, seeded_everything
from lightning_recycle.session.optimizer_states import StageStates, group_names, merged_names, parameters_by_name
from lightning_recycle.torch_internals import parameters_of

_Callback = TypeVar("_Callback", bound=pl.Callback)

_METADATA = "internal_optimizer_metadata"
_REPLACED = (
    "setup",
    "on_save_checkpoint",
    "on_load_checkpoint",
    "state_dict",
    "load_state_dict",
    "unfreeze_and_add_param_group",
    "_run_pruning",
)
"""Methods of the callbacks that others stand for in a run."""

_PURPOSE = 7_308_893_256_327_950_949  # sets the draws of pruning apart from others with the same seed and step


def _callbacks_of(trainer: pl.Trainer, kind: type[_Callback]) -> list[_Callback]:
    return [callback for callback in trainer.callbacks if isinstance(callback, kind)]  # type: ignore[attr-defined]


def _averaging(trainer: pl.Trainer) -> list[WeightAveraging | StochasticWeightAveraging]:
    return [*_callbacks_of(trainer, WeightAveraging), *_callbacks_of(trainer, StochasticWeightAveraging)]


def await_stage(trainer: pl.Trainer) -> None:
    """Postpones the ``setup`` of averages by Lightning to :func:`enter_stage`."""
    for callback in _averaging(trainer):
        callback.setup = _do_nothing  # type: ignore[method-assign]


def enter_stage(trainer: pl.Trainer, module: pl.LightningModule, was_built: bool) -> None:
    """Sets up averages when the layers of this stage have their first values.

    ``was_built``: whether these layers were there when ``setup`` froze some.
    """
    assert trainer.state.fn is not None
    for finetuning in _callbacks_of(trainer, BaseFinetuning) if not was_built else ():
        finetuning.freeze_before_training(module)
    for callback in _averaging(trainer):
        del callback.setup
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*doesn't support sharding model layers.*")  # here it does
            callback.setup(trainer, module, trainer.state.fn)


class WeightCallbacks:
    """A worker's callbacks that change weights, with states of the whole model.

    The groups of all stages stay alike, and pruning draws from (``seed``, step).
    """

    def __init__(self, trainer: pl.Trainer, checkpoints: StageStates, seed: int) -> None:
        self._trainer, self._checkpoints = trainer, checkpoints
        for average in _averaging(trainer):
            if isinstance(average, WeightAveraging):
                vars(average)["on_load_checkpoint"] = partial(self._load_average, average.on_load_checkpoint)
            else:
                vars(average)["on_save_checkpoint"] = partial(self._save_swa, average, average.on_save_checkpoint)
                vars(average)["state_dict"] = partial(_swa_state, average, average.state_dict)
                vars(average)["load_state_dict"] = partial(self._load_swa_state, average.load_state_dict)
        for callback in _callbacks_of(trainer, BaseFinetuning):
            vars(callback).update(
                unfreeze_and_add_param_group=partial(self._unfreeze, callback.unfreeze_and_add_param_group),
                on_save_checkpoint=partial(self._save_names, callback),
                load_state_dict=partial(self._load_names, callback, callback.load_state_dict),
            )
            self._keep_names_of_stage(callback)  # of an earlier fit
        self.prune_by(seed)

    def prune_by(self, seed: int) -> None:
        for callback in _callbacks_of(self._trainer, ModelPruning):
            run = partial(type(callback)._run_pruning, callback)
            vars(callback)["_run_pruning"] = partial(_seeded, run, self._trainer, seed)

    def release(self) -> None:
        """The run is over: the callbacks are Lightning's again."""
        averages, finetunings = _averaging(self._trainer), _callbacks_of(self._trainer, BaseFinetuning)
        for callback in (*averages, *finetunings, *_callbacks_of(self._trainer, ModelPruning)):
            for name in _REPLACED:
                vars(callback).pop(name, None)
        for averaging in averages:
            averaging._average_model = None
        for finetuning in finetunings:
            finetuning._internal_optimizer_metadata = self._names_of_model(finetuning._internal_optimizer_metadata)

    # ------------------------------------------------------------------ averages

    def _save_swa(
        self,
        callback: StochasticWeightAveraging,
        save: Callable[..., None],
        trainer: Any,
        module: Any,
        checkpoint: dict[str, Any],
    ) -> None:
        save(trainer, module, checkpoint)
        self._join_average(callback, checkpoint["callbacks"])

    def _join_average(self, callback: StochasticWeightAveraging, states: dict[str, Any]) -> None:
        """Joins ``callback``'s average among ``states``, in one piece even in a folder."""
        state = states[callback.state_key]
        state["average_model_state"] = self._checkpoints.joined("averaged weights", state["average_model_state"])

    def join_states(self, states: dict[str, Any]) -> None:
        """Makes ``states`` of callbacks those of the whole model, on all workers."""
        for average in _callbacks_of(self._trainer, StochasticWeightAveraging):
            self._join_average(average, states)
        for finetuning in _callbacks_of(self._trainer, BaseFinetuning):
            self._save_names(finetuning, self._trainer, self._trainer.lightning_module, {"callbacks": states})

    def _load_average(self, load: Callable[..., None], trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        kinds = [name for name in ("state_dict", "current_model_state") if name in checkpoint]
        load(trainer, module, checkpoint | {name: self._checkpoints.own_part(checkpoint[name]) for name in kinds})

    def _load_swa_state(self, load: Callable[[dict[str, Any]], None], state: dict[str, Any]) -> None:
        load({**state, "average_model_state": self._checkpoints.own_part(state["average_model_state"])})

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


# ---------------------------------------------------------------------- averages


def check_weight_averaging(trainer: pl.Trainer, parts: ModelParts) -> None:
    """Refuses StochasticWeightAveraging of a model with BatchNorm.

    It ends with a pass over the data that computes running statistics, which are not the same on all workers.
    """
    if not _callbacks_of(trainer, StochasticWeightAveraging):
        return
    if StochasticWeightAveraging.pl_module_contains_batch_norm(parts.without_storage()):
        raise UnsupportedFeatureError(
            "strategy='recycle' does not support StochasticWeightAveraging of a model with BatchNorm: its statistics"
            " would have to be computed again, by one pass over all data, and here BatchNorm sees micro-batches. Use"
            " LayerNorm, GroupNorm or RMSNorm, or WeightAveraging or EMAWeightAveraging, which average the statistics."
        )


def swap_schedules(trainer: pl.Trainer, optimizers: Sequence[Optimizer], configs: list[LRSchedulerConfig]) -> None:
    """Makes the schedule of StochasticWeightAveraging, if that has begun.

    For the launching process, where callbacks have their attributes from the workers. The optimizer gets options of the
    schedule, and loads its state afterwards.
    """
    for callback in _callbacks_of(trainer, StochasticWeightAveraging):
        if callback._initialized:
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


def _swa_state(callback: StochasticWeightAveraging, state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Its state; until the epoch that begins averaging (again), the checkpoint's."""
    state = state_dict()
    if not callback._initialized:
        state |= {"n_averaged": callback._init_n_averaged, "scheduler_state": callback._scheduler_state}
    return state


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


# ---------------------------------------------------------------------- pruning

_ORIGINAL, _MASK = "_orig", "_mask"


def check_pruning(trainer: pl.Trainer, stages: int) -> None:
    """Refuses a callback that would prune a stage as if it were the model."""
    if stages > 1 and _callbacks_of(trainer, ModelPruning):
        raise UnsupportedFeatureError(
            "strategy='recycle' supports the callback ModelPruning with one stage only: it needs the whole"
            " model. Use pipeline_parallel_size=1, or prune the model before fit, or after it."
        )


def take_pruned_form(module: nn.Module, names: Collection[str]) -> None:
    """Masks the parameters that are masked in a state dict with ``names``, only them."""
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        for name in [name for name, value in parameters_of(part).items() if value is not None]:
            plain = name.removesuffix(_ORIGINAL)
            if name == plain and f"{prefix}{name}{_ORIGINAL}" in names and f"{prefix}{name}{_MASK}" in names:
                prune.identity(part, name)
            elif name != plain and hasattr(part, plain + _MASK) and f"{prefix}{plain}" in names:
                prune.remove(part, plain)


def _seeded(run: Callable[[int], Any], trainer: pl.Trainer, seed: int, current_epoch: int) -> None:
    drawn = derive_seed(seed, trainer.global_step, _PURPOSE)
    with seeded_everything() as reseed, layer_randomness(trainer.strategy.root_device) as generator:
        reseed(drawn)
        generator.manual_seed(drawn)
        run(current_epoch)
