"""ModelCheckpoint on a worker: checkpoints count once they are complete.

ModelCheckpoint records a new checkpoint before it is written, and then deletes the one that it replaces. Here it asks
for the checkpoint, and record and deletion follow when that is complete, on all workers, which all know the outcome.

The interval by steps is Young's formula: saving every sqrt(2 cost mtbf) seconds loses the least time, ``mtbf`` being
the mean time between failures, and the cost the time for which a checkpoint holds up training. Each start from a
checkpoint counts as a failure, too.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, TypeAlias
from weakref import proxy

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from lightning_recycle.control.protocol.messages import SaveFailure
from lightning_recycle.errors import CheckpointError
from lightning_recycle.model.parts import ModelParts
from lightning_recycle.runtime.executor.executor import Executor
from lightning_recycle.session.checkpoints import Checkpoints
from lightning_recycle.session.lightning_internals import ends_step
from lightning_recycle.session.optimizer_states import Copies
from lightning_recycle.session.worker_context import WorkerContext
from lightning_recycle.session.worker_snapshot import StateTransfer

log = logging.getLogger(__name__)

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

    Some methods of these are replaced. ``interval``: decides how often to save, if callbacks do not.
    """

    def __init__(
        self,
        context: WorkerContext,
        parts: ModelParts,
        executor: Executor,
        copies: Copies,
        reach: Callable[[str, int], None],
        transfer: StateTransfer,
    ) -> None:
        actions: dict[str, Callable[..., None]] = {"record": self._take_up, "notify": self._notify}
        super().__init__(context, parts, executor, copies, reach, transfer, actions)
        self.interval: SaveInterval | None = None
        if self.context.options.checkpoints.every_n_train_steps is not None:
            self.interval = SaveInterval(lambda: self.context.client.member.counters.get("failures", 0.0))
        self._counted_stall = 0.0
        leave_saves_alone(self.context.trainer)  # of an earlier run of this process
        self._callbacks = _model_checkpoints(self.context.trainer)
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

    # ------------------------------------------------------------------ how often

    @override
    def begin_training(self) -> None:
        super().begin_training()
        if self.interval is not None:
            self.interval.begin(self.context.trainer.global_step)

    @override
    def interval_state(self) -> dict[str, float] | None:
        return None if self.interval is None else self.interval.state()

    @override
    def load_interval(self, state: Mapping[str, float] | None) -> None:
        if self.interval is not None and state is not None:
            self.interval.load(state, of_peer=self.collectives.client.joining)
            if self.interval.steps:
                self._save_every(self.interval.steps)

    @override
    def measured(self, stalled: float, writing: float) -> SaveFacts | None:
        if self.interval is None:
            return None
        stalled += self.stall_seconds - self._counted_stall
        return self.interval.facts(stalled, writing, self.context.trainer.global_step)

    @override
    def follow(self, facts: SaveFacts | None) -> None:
        if self.interval is None or facts is None:
            return
        self._counted_stall = self.stall_seconds
        steps, why = steps_between_saves(facts, self.collectives.positions.num_workers)
        if self._save_every(steps):
            self.interval.steps = steps
            if self.collectives.is_leader:
                log.info("From now on a checkpoint is saved every %d steps: %s.", steps, why)

    def _save_every(self, steps: int) -> bool:
        """Changes the interval of callbacks that save by steps; returns whether it did."""
        changed = False
        for callback in self._callbacks:
            now = callback._every_n_train_steps
            if now and not 0.8 < steps / now < 1.25:  # less is noise of the measurement
                callback._every_n_train_steps, changed = steps, True
        return changed


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


_WORKER_HOURS_PER_FAILURE = 50_700.0
"""Before the first failure: 419 unplanned interruptions in 54 days of 16,384 GPUs (Llama 3, arXiv 2407.21783)."""


@dataclass(frozen=True)
class SaveFacts:
    """A worker's measurements, in seconds.

    ``stalled``: of training, by the checkpoint. ``writing``: in the meantime. ``step``: from one step to the next, with
    all between. ``trained``: of training, in earlier runs, too.
    """

    stalled: float
    writing: float
    step: float
    failures: int
    trained: float


def steps_between_saves(facts: SaveFacts, workers: int) -> tuple[int, str]:
    """The best number of steps between checkpoints, and the reason in words."""
    expected = 3600 * _WORKER_HOURS_PER_FAILURE / workers
    mtbf = facts.trained / facts.failures if facts.failures else max(expected, facts.trained)
    seconds = max(math.sqrt(2 * facts.stalled * mtbf), 2 * facts.writing)
    why = (
        f"it holds up training for {facts.stalled:.3g} s and is written in {facts.writing:.3g} s, a step takes"
        f" {facts.step:.3g} s, and there is a failure every {mtbf / 3600:.3g} hours ({facts.failures} so far)"
    )
    return max(1, round(seconds / facts.step)), why


class SaveInterval:
    """A worker's view of the interval between the run's checkpoints.

    ``steps``: the interval; 0 if it is that of the callbacks.
    """

    def __init__(self, count: Callable[[], float]) -> None:
        self.steps = 0
        self._count = count
        self._began, self._first_step = time.monotonic(), 0
        self._failures, self._trained = 0.0, 0.0  # before this worker began, less what ``count`` was then

    def begin(self, step: int) -> None:
        self._began, self._first_step = time.monotonic(), step

    def state(self) -> dict[str, float]:
        """Interval, failures and seconds of training, for a checkpoint or a replacement."""
        trained, counted = self._trained + time.monotonic() - self._began, self._count()
        failures = self._failures + counted
        return {"steps": self.steps, "failures": failures, "trained": trained, "counted": counted}

    def load(self, state: Mapping[str, float], of_peer: bool) -> None:
        """Takes over the state of a peer, or of an earlier run, which has ended."""
        self.steps, self._trained = int(state["steps"]), state["trained"]
        self._failures = state["failures"] + (-state["counted"] if of_peer else 1)

    def facts(self, stalled: float, writing: float, step: int) -> SaveFacts:
        """This worker's measurements after ``step`` steps."""
        seconds, state = time.monotonic() - self._began, self.state()
        per_step = seconds / max(1, step - self._first_step)
        return SaveFacts(stalled, writing, per_step, round(state["failures"]), state["trained"])
