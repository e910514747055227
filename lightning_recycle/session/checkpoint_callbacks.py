"""Lightning's callbacks that save: ModelCheckpoint, averages, finetuning, pruning.

**ModelCheckpoint** records a new checkpoint before it is written, and then deletes the one that it replaces. Here it
asks for the checkpoint, and record and deletion follow when that is complete, on all workers, which all know the
outcome.

**Averages** are elementwise, so each worker averages its stage; a checkpoint gets those of all stages, under the names
of one device. A custom ``multi_avg_fn`` sees the parameters of one stage. **Finetuning** runs on every worker for its
stage; all stages have the same groups, empty ones if need be. **Pruning** needs the whole model, so one stage; a
process that did not see it done takes the form of a state dict before it loads that.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from types import FunctionType
from typing import Any, TypeAlias, TypeVar
from weakref import proxy

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch.optim import Optimizer
from typing_extensions import override

from lightning_recycle.control.protocol.messages import SaveFailure
from lightning_recycle.errors import CheckpointError, UnsupportedFeatureError
from lightning_recycle.model.parts import ModelParts
from lightning_recycle.randomness import derive_seed, layer_randomness, seeded_everything
from lightning_recycle.session.checkpoints import Checkpoints
from lightning_recycle.session.lightning_internals import ends_step, saves_on_exception
from lightning_recycle.session.optimizer_states import merged_names

_Callback = TypeVar("_Callback", bound=pl.Callback)

_SAVES = ("_save_topk_checkpoint", "_save_last_checkpoint", "on_exception")
_HELPERS = ("_link_checkpoint", "_save_checkpoint", "file_exists", "state_dict")
# The number of a callback, the method that saves, and the metrics.
_Call: TypeAlias = tuple[int, str, Any]
_RECORD = (  # what ModelCheckpoint changes while it saves
    "best_k_models",
    "best_model_path",
    "best_model_score",
    "current_score",
    "kth_best_model_path",
    "kth_value",
    "last_model_path",
    "_last_checkpoint_saved",
    "_last_global_step_saved",
)
# Of these what it has asked for counts at once: it is not to ask for the same again.
_STEP_RECORDS = ("_last_checkpoint_saved", "_last_global_step_saved")


def _callbacks_of(trainer: pl.Trainer, kind: type[_Callback]) -> list[_Callback]:
    return [callback for callback in trainer.callbacks if isinstance(callback, kind)]  # type: ignore[attr-defined]


class CallbackCheckpoints(Checkpoints):
    """:class:`Checkpoints` that replaces some methods of the Trainer's callbacks.

    Attributes:
        weights: the callbacks that change weights.
    """

    @override
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.weights = WeightCallbacks(self.context.trainer, self, self.context.seed)
        self._replace_methods()

    @cached_property
    def _callbacks(self) -> list[ModelCheckpoint]:
        return _callbacks_of(self.context.trainer, ModelCheckpoint)

    @override
    def actions_of_callbacks(self) -> dict[str, Callable[..., None]]:
        return {"record": self._take_up, "notify": self._notify}

    def _replace_methods(self) -> None:
        """Makes the callbacks save through this object."""
        leave_saves_alone(self.context.trainer)  # of an earlier run of this process
        for number, callback in enumerate(self._callbacks):
            vars(callback).update(_Methods(callback, number, self).replacements())

    @override
    def join_states(self, states: dict[str, Any]) -> None:
        self.weights.join_states(states)

    # ------------------------------------------------------------------ records

    @override
    def records(self) -> dict[str, Any]:
        attributes = ("dirpath", "_defer_save_until_validation")
        return {
            callback.state_key: {
                **{name: getattr(callback, name) for name in attributes},
                **_record(callback),
                **self.changed_record(number),
            }
            for number, callback in enumerate(self._callbacks)
        }

    def changed_record(self, number: int) -> dict[str, Any]:
        """A callback's changes by checkpoints whose outcome is not known."""
        changed: dict[str, Any] = {}
        for action in self.saves.noted:
            if action.name == "record" and action.arguments[0][0] == number:
                changed |= action.arguments[2]
        return changed

    def _take_up(self, failure: SaveFailure | None, call: _Call, before: dict[str, Any], after: dict[str, Any]) -> None:
        callback = self._callbacks[call[0]]
        for name, value in (before if failure else after).items():
            if name not in _STEP_RECORDS or getattr(callback, name) == after[name]:
                setattr(callback, name, value)
        if failure and not failure.is_refusal and call[1] != "on_exception":
            self.saves.given_up += (call,)

    def _notify(self, failure: SaveFailure | None, number: int) -> None:
        if failure is None and self.collectives.is_leader:
            for logger in self.context.trainer.loggers:
                logger.after_save_checkpoint(proxy(self._callbacks[number]))

    @override
    def ask_again(self) -> None:
        """Saves again what was given up, except for callbacks that have saved since."""
        trainer = self.context.trainer
        given_up, self.saves.given_up = self.saves.given_up, ()
        calls = [call for call in given_up if self._callbacks[call[0]]._last_global_step_saved != trainer.global_step]
        for number, name, metrics in calls:  # of one callback all, or none
            now = self._callbacks[number]._monitor_candidates(trainer)
            getattr(self._callbacks[number], name)(trainer, {**metrics, "epoch": now["epoch"], "step": now["step"]})


def remember_saves(trainer: pl.Trainer, records: Mapping[str, Mapping[str, Any]]) -> None:
    """Restores the records of callbacks that still save in the same folder."""
    for callback in _callbacks_of(trainer, ModelCheckpoint):
        record = records.get(callback.state_key, {})
        if record.get("dirpath") == callback.dirpath:
            vars(callback).update(record)


def leave_saves_alone(trainer: pl.Trainer) -> None:
    """Gives ModelCheckpoint callbacks their own methods back."""
    for callback in _callbacks_of(trainer, ModelCheckpoint):
        for name in (*_SAVES, *_HELPERS):
            vars(callback).pop(name, None)


class _Methods:
    """The methods of one callback in a run, as no public hook precedes its files."""

    def __init__(self, callback: ModelCheckpoint, number: int, checkpoints: CallbackCheckpoints) -> None:
        self._callback, self._number, self._checkpoints = callback, number, checkpoints
        self._saves = {name: getattr(callback, name) for name in _SAVES}
        # Methods of the user's may expect a checkpoint to be there when it has been asked for.
        kinds = type(callback).__mro__
        own = [vars(kind).values() for kind in kinds[: kinds.index(ModelCheckpoint)]]
        self._writes_itself = any(
            isinstance(value, FunctionType) and value.__name__ != "__init__" for part in own for value in part
        )

    def replacements(self) -> dict[str, Callable[..., Any]]:
        found: dict[str, Callable[..., Any]] = {name: partial(self._save, name) for name in _SAVES}
        if not (self._writes_itself or saves_on_exception(self._callback)):
            del found["on_exception"]  # saves nothing, and a worker that fails alone must not wait for the others
        found |= {"_link_checkpoint": self._link, "state_dict": self._state_dict}
        if not self._writes_itself:
            found |= {"_save_checkpoint": self._write, "file_exists": self._exists}
        return found

    def _save(self, name: str, *arguments: Any) -> None:
        callback, checkpoints, trainer = self._callback, self._checkpoints, arguments[0]
        if self._writes_itself:
            with checkpoints.in_foreground():
                record = _record(callback)
                try:
                    with checkpoints.raising_failures():
                        self._saves[name](*arguments)
                except CheckpointError:
                    if checkpoints.ends_run_on_failure:
                        raise
                    vars(callback).update(record)
            return
        if trainer.training and callback._every_n_train_steps and name != "on_exception" and not ends_step(trainer):
            return  # its step was saved and given up: it is asked for again where a step of the optimizer ends
        if not checkpoints.begin_batch():  # before the callback compares with what it remembers
            return
        before = _record(callback)
        with checkpoints.deferring():
            self._saves[name](*arguments)
            self._put_off((self._number, name, arguments[-1]), before)

    def _put_off(self, call: _Call, before: dict[str, Any]) -> None:
        """Resets the callback's record to ``before`` until the checkpoint is complete."""
        changed = {name: v for name, v in _record(self._callback).items() if not _is_same(v, before[name])}
        self._checkpoints.saves.call_first_when_known("record", call, {name: before[name] for name in changed}, changed)
        for name, value in before.items():
            if name not in _STEP_RECORDS:
                setattr(self._callback, name, value)

    def _write(self, trainer: pl.Trainer, path: str) -> None:
        """Asks for a checkpoint. Loggers, which may want to read it, hear of it later."""
        callback, saves = self._callback, self._checkpoints.saves
        if not saves.is_deferring:
            ModelCheckpoint._save_checkpoint(callback, trainer, path)
            return
        trainer.save_checkpoint(path, callback.save_weights_only)
        callback._last_global_step_saved, callback._last_checkpoint_saved = trainer.global_step, path
        saves.call_first_when_known("notify", self._number)

    def _link(self, _: pl.Trainer, target: str, path: str) -> None:
        self._checkpoints.link(target, path)

    def _exists(self, path: str, trainer: pl.Trainer) -> bool:
        if not self._checkpoints.in_background:
            return ModelCheckpoint.file_exists(self._callback, path, trainer) or self._checkpoints.is_asked(path)
        files = self._callback._fs
        return self._checkpoints.has(path, lambda folder: files.ls(folder, detail=False) if files.isdir(folder) else ())

    def _state_dict(self) -> dict[str, Any]:
        """The callback's state, as if this step's earlier checkpoints were written."""
        callback, now = self._callback, _record(self._callback)
        vars(callback).update(self._checkpoints.changed_record(self._number))
        try:
            return type(callback).state_dict(callback)
        finally:
            vars(callback).update(now)


def _record(callback: ModelCheckpoint) -> dict[str, Any]:
    record = {name: getattr(callback, name) for name in _RECORD}
    return {**record, "best_k_models": dict(record["best_k_models"])}  # the callback changes it in place


def _is_same(value: Any, before: Any) -> bool:
    if isinstance(value, dict):
        return value.keys() == before.keys() and all(score is before[path] for path, score in value.items())
    return value is before


# ---------------------------------------------------------------------- averages and finetuning

_METADATA = "internal_optimizer_metadata"
# Methods of the callbacks that others stand for in a run.
_REPLACED = (
    "setup",
    "on_save_checkpoint",
    "on_load_checkpoint",
    "state_dict",
    "load_state_dict",
    "unfreeze_and_add_param_group",
    "_run_pruning",
)

_PURPOSE = 7_308_893_256_327_950_949  # sets the draws of pruning apart from others with the same seed and step


def _averaging(trainer: pl.Trainer) -> list[WeightAveraging | StochasticWeightAveraging]:
    return [*_callbacks_of(trainer, WeightAveraging), *_callbacks_of(trainer, StochasticWeightAveraging)]


def await_stage(trainer: pl.Trainer) -> None:
    """Postpones the ``setup`` of averages by Lightning to :func:`enter_stage`."""
    for callback in _averaging(trainer):
        callback.setup = lambda *_, **__: None  # type: ignore[method-assign]


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

    def __init__(self, trainer: pl.Trainer, checkpoints: Checkpoints, seed: int) -> None:
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


def _swa_state(callback: StochasticWeightAveraging, state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Its state; until the epoch that begins averaging (again), the checkpoint's."""
    state = state_dict()
    if not callback._initialized:
        state |= {"n_averaged": callback._init_n_averaged, "scheduler_state": callback._scheduler_state}
    return state


# ---------------------------------------------------------------------- pruning


def check_pruning(trainer: pl.Trainer, stages: int) -> None:
    """Refuses a callback that would prune a stage as if it were the model."""
    if stages > 1 and _callbacks_of(trainer, ModelPruning):
        raise UnsupportedFeatureError(
            "strategy='recycle' supports the callback ModelPruning with one stage only: it needs the whole"
            " model. Use pipeline_parallel_size=1, or prune the model before fit, or after it."
        )


def _seeded(run: Callable[[int], Any], trainer: pl.Trainer, seed: int, current_epoch: int) -> None:
    drawn = derive_seed(seed, trainer.global_step, _PURPOSE)
    with seeded_everything() as reseed, layer_randomness(trainer.strategy.root_device) as generator:
        reseed(drawn)
        generator.manual_seed(drawn)
        run(current_epoch)
