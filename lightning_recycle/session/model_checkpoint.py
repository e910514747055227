"""ModelCheckpoint on a worker: checkpoints count once they are complete.

ModelCheckpoint records a new checkpoint before it is written, and then deletes the one that it replaces. Here it asks
for the checkpoint, and record and deletion follow when that is complete, on all workers, which all know the outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from types import FunctionType
from typing import Any, TypeAlias
from weakref import proxy

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from lightning_recycle.control.protocol.messages import SaveFailure
from lightning_recycle.errors import CheckpointError
from lightning_recycle.session.checkpoints import Checkpoints
from lightning_recycle.session.lightning_internals import ends_step

_SAVES = ("_save_topk_checkpoint", "_save_last_checkpoint", "on_exception")
_HELPERS = ("_link_checkpoint", "_save_checkpoint", "file_exists", "state_dict")
_Call: TypeAlias = tuple[int, str, Any]
"""The number of a callback, the method that saves, and the metrics."""
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
_OF_ITS_STEP = ("_last_checkpoint_saved", "_last_global_step_saved")
"""Of these what it has asked for counts at once: it is not to ask for the same again."""


class ModelCheckpointSaves(Checkpoints):
    """:class:`Checkpoints` with the Trainer's ModelCheckpoint callbacks.

    Some methods of these are replaced.
    """

    @cached_property
    def _callbacks(self) -> list[ModelCheckpoint]:
        return _model_checkpoints(self.context.trainer)

    @override
    def actions_of_callbacks(self) -> dict[str, Callable[..., None]]:
        return {"record": self._take_up, "notify": self._notify}

    def replace_methods(self) -> None:
        """Makes the callbacks save through this object."""
        leave_saves_alone(self.context.trainer)  # of an earlier run of this process
        for number, callback in enumerate(self._callbacks):
            vars(callback).update(_Methods(callback, number, self).replacements())

    # ------------------------------------------------------------------ records

    @override
    def records(self) -> dict[str, Any]:
        kept = ("dirpath", "_defer_save_until_validation")
        return {
            callback.state_key: {
                **{name: getattr(callback, name) for name in kept},
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
            if name not in _OF_ITS_STEP or getattr(callback, name) == after[name]:
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
    for callback in _model_checkpoints(trainer):
        record = records.get(callback.state_key, {})
        if record.get("dirpath") == callback.dirpath:
            vars(callback).update(record)


def leave_saves_alone(trainer: pl.Trainer) -> None:
    """Gives ModelCheckpoint callbacks their own methods back."""
    for callback in _model_checkpoints(trainer):
        for name in (*_SAVES, *_HELPERS):
            vars(callback).pop(name, None)


class _Methods:
    """The methods of one callback in a run, as no public hook precedes its files."""

    def __init__(self, callback: ModelCheckpoint, number: int, checkpoints: ModelCheckpointSaves) -> None:
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
        found |= {"_link_checkpoint": self._link, "state_dict": self._state_dict}
        if not self._writes_itself:
            found |= {"_save_checkpoint": self._write, "file_exists": self._exists}
        return found

    def _save(self, name: str, *arguments: Any) -> None:
        callback, checkpoints, trainer = self._callback, self._checkpoints, arguments[0]
        if self._writes_itself:
            with checkpoints.waited_for():
                record = _record(callback)
                try:
                    with checkpoints.noticed():
                        self._saves[name](*arguments)
                except CheckpointError:
                    if checkpoints.raises:
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
        """Until the checkpoint is complete the callback remembers what it did before."""
        changed = {name: v for name, v in _record(self._callback).items() if not _is_same(v, before[name])}
        self._checkpoints.saves.follow_first("record", call, {name: before[name] for name in changed}, changed)
        for name, value in before.items():
            if name not in _OF_ITS_STEP:
                setattr(self._callback, name, value)

    def _write(self, trainer: pl.Trainer, path: str) -> None:
        """Asks for a checkpoint. Loggers, which may want to read it, hear of it later."""
        callback, saves = self._callback, self._checkpoints.saves
        if not saves.is_deferring:
            ModelCheckpoint._save_checkpoint(callback, trainer, path)
            return
        trainer.save_checkpoint(path, callback.save_weights_only)
        callback._last_global_step_saved, callback._last_checkpoint_saved = trainer.global_step, path
        saves.follow_first("notify", self._number)

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


def _model_checkpoints(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
