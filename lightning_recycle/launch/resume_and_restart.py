"""Checkpoint from which a run starts, and restarts after the loss of a stage.

The checkpoint is chosen and checked once, so that all workers read the same file. "last" and "hpc" mean the newest
undamaged one, "last" also of those that a signal asked for; if the user named it, or it is the best one, damage is an
error. Outside this machine's file systems, it must exist; files of the user's own CheckpointIO are taken unchecked.

A restart starts a process on every device that the engine has. Where devices are missing, positions are vacant, or with
several members per position the grid has fewer pipelines.
Restarts without a newer checkpoint in between are bounded, the more so if they all end in the same step.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info

from lightning_recycle.control.monitoring.history import Event
from lightning_recycle.control.options import RecoveryOptions
from lightning_recycle.control.protocol.messages import SavePhase
from lightning_recycle.errors import CheckpointError, counted
from lightning_recycle.files import put_in_place_if_left, restored, waiting_aside
from lightning_recycle.launch.run_preparation import TrainerCall
from lightning_recycle.planning.grid import Grid, Positions
from lightning_recycle.session import lightning_internals as internals
from lightning_recycle.session.checkpoint_files import (
    JOB_CHECKPOINT,
    check_content,
    check_exists,
    checkpoints_beside,
    damage,
    is_sharded,
    local_path,
    newest_first,
)
from lightning_recycle.session.worker_snapshot import COMPLETION

log = logging.getLogger(__name__)

_ANY_NAME = f"any{ModelCheckpoint.FILE_EXTENSION}"


def settle_checkpoint(call: TrainerCall) -> TrainerCall:
    """The call with a ``ckpt_path`` that needs no search any more.

    Raises CheckpointError if the checkpoint does not exist, or is damaged; for "last" and "hpc", if all older ones are
    damaged too.
    """
    trainer, given = call.trainer, call.arguments
    wanted = given.get("ckpt_path")
    if isinstance(wanted, str) and wanted.startswith("registry"):
        return call  # the workers download it
    by_user = internals.sets_checkpoint_path(trainer) and wanted is None  # trainer.ckpt_path = ...
    settled = _newest_last(trainer) if wanted == "last" else None
    if settled is None and wanted == "last" and _is_first_start(trainer):
        return call.from_checkpoint(None)
    if settled is None:
        path = internals.select_checkpoint_path(trainer, wanted, has_model=given.get("model") is not None)
        if path is None:
            return call if wanted is None else call.from_checkpoint(None)
        older = JOB_CHECKPOINT.fullmatch(os.path.basename(path)) if wanted in (None, "hpc") and not by_user else None
        settled = _check_or_replace(path, trainer.strategy.checkpoint_io, take_older=older is not None)
    _check_content(settled, trainer.strategy.checkpoint_io)
    if by_user:
        internals.set_checkpoint_path(trainer, settled)
        return call
    return call.from_checkpoint(settled)


def choose_last(call: TrainerCall) -> TrainerCall:
    """The call of an outside worker with the path of "last", which is not read here."""
    if call.arguments.get("ckpt_path") != "last":
        return call
    there = (path for path in map(restored, newest_first(_lasts(call.trainer))) if path is not None and path.exists())
    newest = next(there, None)
    return call if newest is None and not _is_first_start(call.trainer) else call.from_checkpoint(newest)


# A save that was begun may have been completed without a report of it.
_SAVED = (SavePhase.COMPLETE.value, SavePhase.BEGUN.value)


def newest_saved(
    history: Sequence[Event], checkpoint_io: CheckpointIO, run: str = "", folders: Iterable[Path] = ()
) -> str | None:
    """The newest undamaged checkpoint of this run, of a whole step if there is one.

    If it is unknown which workers held wrong bits in the end, it precedes the steps that may have been wrong. A
    checkpoint completed after the coordinator's stop, which no event names, is known by the name of the ``run`` in it,
    in one of ``folders`` or beside named ones.
    """
    differed = next((e for e in reversed(history) if e.kind == "corruption" and e.worker is None), None)
    saved = [
        event
        for event in reversed(history)
        if event.kind in _SAVED and (differed is None or event.step <= differed.details["since"] + 1)
        if not event.details.get("weights_only")
    ]
    for event in saved:
        if "temporary" in event.details:  # its writer and the leader after it are lost
            try:
                put_in_place_if_left(event.details["temporary"], event.details["path"])
            except OSError as error:
                log.warning("The checkpoint %s is whole, but its name is refused: %s.", event.details["path"], error)
    newest = {str(event.details["path"]): event for event in reversed(saved)}  # a path may have been written again
    for mid_step in (False, True):
        for event in saved:
            path = str(event.details["path"])
            if bool(newest[path].details.get("mid_step")) is not mid_step:
                continue
            is_complete = event.kind == SavePhase.COMPLETE.value
            undamaged = _path_if_undamaged(path, checkpoint_io)
            if undamaged is not None and (is_complete or _is_of_step(undamaged, event.step, checkpoint_io)):
                if mid_step:
                    log.warning(_MID_STEP, undamaged)
                all_folders = {local.parent for path in newest if (local := local_path(path)) is not None}
                newer = [] if differed or mid_step else _newer_saves(undamaged, all_folders.union(folders), run)
                return str(newer[0]) if newer else undamaged
    return None


_MID_STEP = (
    "The run starts again from %s, which trainer.save_checkpoint() wrote before its step was over: hooks and learning"
    " rate schedulers that came later in that step are missing. ModelCheckpoint(every_n_train_steps=...) saves whole"
    " steps."
)


def _is_of_step(path: str, step: int, checkpoint_io: CheckpointIO) -> bool:
    """Whether the checkpoint at ``path`` was begun after ``step`` steps."""
    local = local_path(path)
    if local is None or not (isinstance(checkpoint_io, TorchCheckpointIO) or is_sharded(path)):
        return True
    return bool(_completion_of(local).get("step", step) == step)


def _newer_saves(path: str, folders: Iterable[Path], run: str) -> list[Path]:
    """Whole steps of ``run`` in ``folders``, newer than ``path``, newest first."""
    local = local_path(path)
    if local is None:
        return []
    since = local.stat().st_mtime_ns
    files = {file for folder in folders if folder.is_dir() for file in folder.glob(f"*{local.suffix}")}
    newer = [file for file in files if not file.is_symlink() and file.stat().st_mtime_ns > since]
    completions = {file: _completion_of(file) for file in newer if damage(file) is None}
    of_run = (file for file, saved in completions.items() if saved.get("run") == run and saved["boundary"])
    return newest_first(of_run)


def _completion_of(path: Path) -> dict[str, Any]:
    found = _content_of(path)
    return found.get(COMPLETION, {}) if isinstance(found, dict) else {}


def _content_of(path: Path) -> Any:
    """The content of a checkpoint, mapped into memory; None if unknown."""
    content = path / internals.METADATA_FILENAME if path.is_dir() else path
    try:
        return torch.load(content, map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError):  # a user's objects are in it, or it has torch's old format
        return None


def _path_if_undamaged(path: str, checkpoint_io: CheckpointIO) -> str | None:
    """``path``, or where an interrupted write left it; None if damaged or missing."""
    local = local_path(path)
    if local is None:
        return path if get_filesystem(path).exists(path) else None
    undamaged = _first_undamaged([local], checkpoint_io)
    return None if undamaged is None else str(undamaged)


def folders_of_saves(trainer: pl.Trainer) -> set[Path]:
    """The local folders in which callbacks of ``trainer`` save."""
    found = [local_path(internals.checkpoint_folder(callback, trainer)) for callback in _savers(trainer)]
    return {folder for folder in found if folder is not None}


def _newest_last(trainer: pl.Trainer) -> Path | None:
    """The newest whole checkpoint among Lightning's last ones, or else beside them.

    None if there is none, or outside this machine's file systems. Raises CheckpointError if all are damaged.
    """
    lasts = _lasts(trainer)
    if not lasts:
        return None
    checkpoint_io = trainer.strategy.checkpoint_io
    folders = {path.parent for path in lasts if not JOB_CHECKPOINT.fullmatch(path.name)}
    others = {path for folder in folders for path in checkpoints_beside(folder / _ANY_NAME)} - lasts
    newest = _first_undamaged([*newest_first(lasts), *newest_first(others)], checkpoint_io)
    if newest is None:
        where = ", ".join(sorted({str(path.parent) for path in lasts}))
        raise CheckpointError(
            f"ckpt_path='last': every checkpoint in {where} is damaged, as the warnings say. Delete them to start"
            " from the beginning."
        )
    return newest


def _lasts(trainer: pl.Trainer) -> set[Path]:
    """Lightning's last checkpoints, and those of runs that a signal has ended.

    Empty if a callback writes outside of this machine's file systems.
    """
    lasts = _signal_checkpoints(trainer)
    for callback in _savers(trainer):
        folder = local_path(internals.checkpoint_folder(callback, trainer))
        if folder is None:
            return set()
        if folder.is_dir():
            renamed = [path for path in waiting_aside(folder) if path.suffix == callback.FILE_EXTENSION]
            lasts |= {path for path in renamed if path.name.startswith(callback.CHECKPOINT_NAME_LAST)}
            lasts |= {Path(path) for path in internals.last_checkpoints(callback, trainer)}
    return lasts


def _signal_checkpoints(trainer: pl.Trainer) -> set[Path]:
    """What runs with the options of ``trainer`` have saved at a signal."""
    setting = trainer.strategy.options.checkpoints.save_on_signal  # type: ignore[attr-defined]
    if not isinstance(setting, bool):
        return {path for path in [local_path(setting)] if path is not None and path.exists()}
    root = local_path(trainer.default_root_dir)
    if not (setting or internals.requeues(trainer)) or root is None or not root.is_dir():
        return set()
    named = {callback.dirpath for callback in _savers(trainer) if callback.dirpath is not None}
    return {path for path in root.iterdir() if JOB_CHECKPOINT.fullmatch(path.name) and _is_of(path, named)}


def _is_of(path: Path, folders: Set[Any]) -> bool:
    """Whether a run that saves in one of ``folders`` may have written ``path``."""
    try:
        content = _content_of(path)
    except Exception:  # it is damaged, which is found when it is the newest
        return True
    states = content.get("callbacks", {}).values() if isinstance(content, dict) else ()
    used = {str(state["dirpath"]) for state in states if isinstance(state, dict) and state.get("dirpath")}
    if not folders or not used or not used.isdisjoint(map(str, folders)):
        return True
    log.warning(
        "ckpt_path='last' leaves %s out: the run that wrote it saves checkpoints in %s, this one in %s. Give each run a"
        " default_root_dir of its own.", path, *(", ".join(sorted(map(str, names))) for names in (used, folders))
    )  # fmt: skip
    return False


def _is_first_start(trainer: pl.Trainer) -> bool:
    """Whether there is no last checkpoint yet, if none was found; says so.

    Otherwise Lightning looks for one on other file systems, or explains why there is none.
    """
    savers = _savers(trainer)
    is_local = all(local_path(internals.checkpoint_folder(callback, trainer)) is not None for callback in savers)
    if not is_local or not any(callback.save_last for callback in savers):
        return False
    rank_zero_info("ckpt_path='last': there is no checkpoint yet, so the run begins from the start.")
    return True


def _savers(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def _check_or_replace(path: Any, checkpoint_io: CheckpointIO, take_older: bool) -> Any:
    """``path`` if whole, with ``take_older`` the newest whole one; or CheckpointError."""
    local = local_path(path)
    existing = None if local is None else restored(local)
    if existing is None or not take_older:
        check_exists(existing or path, checkpoint_io)
    if local is None or existing is None:
        return path
    reason = _damage(existing, checkpoint_io)
    if reason is None:
        return path if existing == local else existing
    others = newest_first(other for other in checkpoints_beside(local) if other != local)
    if take_older:
        _warn(path, reason)
    sound = _first_undamaged(others, checkpoint_io, warn=take_older)
    if take_older and sound is not None:
        return sound
    remedy = "there is no other whole one beside it" if sound is None else f"the newest whole one beside it is {sound}"
    raise CheckpointError(f"The checkpoint {path} is damaged: {reason}; {remedy}.")


def _check_content(path: Any, checkpoint_io: CheckpointIO) -> None:
    """Raises CheckpointError if no Trainer wrote ``path``, where that is known."""
    local = local_path(path)
    reads = type(checkpoint_io).load_checkpoint is TorchCheckpointIO.load_checkpoint  # a user's own may translate
    if local is not None and (reads or is_sharded(path)) and (content := _content_of(local)) is not None:
        check_content(path, content)


def _first_undamaged(paths: Iterable[Path], checkpoint_io: CheckpointIO, warn: bool = True) -> Path | None:
    for path in paths:
        local = restored(path)
        if local is None:
            continue  # the callback that wrote it has deleted it since
        reason = _damage(local, checkpoint_io)
        if reason is None:
            return local
        if warn:
            _warn(path, reason)
    return None


def _warn(path: Any, reason: str) -> None:
    log.warning("The checkpoint %s is damaged: %s. The one before it is used, if there is one.", path, reason)


def _damage(path: Path, checkpoint_io: CheckpointIO) -> str | None:
    if isinstance(checkpoint_io, TorchCheckpointIO) or is_sharded(path) or not path.exists():
        return damage(path)
    return None  # only the user's own CheckpointIO knows what its files look like


# ---------------------------------------------------------------------- restarts

_MOST_AT_SAME_STEP = 2  # restarts in a row that end where the run had ended before: that is not a coincidence
_SAME_STEP = 1  # steps between two losses by one cause, as the newest step may have been reported before or not


@dataclass(frozen=True)
class Start:
    """A start of a run: grid, workers of each stage, and the least number to begin."""

    grid: Grid
    workers: int
    least: int


class RestartPolicy:
    """Decides whether, and how, a run restarts after the loss of a stage."""

    def __init__(self, positions: Positions, recovery: RecoveryOptions) -> None:
        self._positions, self._recovery = positions, recovery
        self._newest = self._lost_at = -1
        self._num_without_progress = self._num_at_same_step = 0

    def next_start(self, saved_step: int | None, devices: int, lost_at: int) -> Start | str:
        """The next start, or why there is none.

        ``saved_step``: the step of the run's newest checkpoint, None without a readable one; ``devices``: number of
        usable devices; ``lost_at``: the newest step before the loss.
        """
        if saved_step is None:
            return (
                "a restart needs a checkpoint of this run that is whole, and there is none:"
                " ModelCheckpoint(every_n_train_steps=...) writes them more often"
            )
        is_repeated = saved_step <= self._newest and abs(lost_at - self._lost_at) <= _SAME_STEP
        self._lost_at, self._num_at_same_step = lost_at, self._num_at_same_step + 1 if is_repeated else 0
        if saved_step > self._newest:
            self._newest, self._num_without_progress = saved_step, 0
        if self._num_without_progress >= self._recovery.most_starts:
            return (
                f"it has been restarted {counted(self._num_without_progress, 'time')} from the checkpoint of step"
                f" {saved_step} without reaching a newer one (max_restarts), so whatever ends the workers comes back."
                " Find its cause, or save more often"
            )
        if self._num_at_same_step >= _MOST_AT_SAME_STEP:
            return (
                f"it was lost in the same place after {_MOST_AT_SAME_STEP} restarts in a row (the newest step before it"
                f" is {lost_at}), so what the run does there ends the workers. Find the cause, and fit again from the"
                " newest checkpoint"
            )
        grid, workers = self._positions.grid, devices // self._positions.columns
        if not workers:
            return (
                f"{devices} of the {self._positions.num_workers} devices are left, too few for the"
                f" {self._positions.columns} workers of a pipeline"
            )
        self._num_without_progress += 1
        if self._positions.members > 1 and workers < grid.pipelines:  # none of their positions is vacant at the start
            workers = max(n for n in range(1, workers + 1) if grid.global_microbatches % n == 0)
            grid = Grid(workers, grid.stages, grid.global_microbatches // workers)
        workers = min(workers, grid.lanes)
        return Start(grid, workers, min(workers, self._recovery.least(grid.pipelines)))
