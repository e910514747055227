"""The state of the whole model from its stages, and back: checkpoints and results.

A checkpoint holds no trace of the grid. One that is asked for within the end of a step is written at the next boundary
(:mod:`~lightning_recycle.session.worker_snapshot`), except for a user's own ``trainer.save_checkpoint``, which returns
with the file.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.optim import Optimizer
from typing_extensions import override

from lightning_recycle import tensor_memory
from lightning_recycle.control.protocol.messages import SaveFailure
from lightning_recycle.control.protocol.state import RESULT
from lightning_recycle.devices import free_bytes, release_cache, reset_peak, storage_bytes
from lightning_recycle.errors import CheckpointError, UnsupportedFeatureError
from lightning_recycle.files import link, remove
from lightning_recycle.model.layers import own_parts
from lightning_recycle.model.parts import ModelParts
from lightning_recycle.runtime.executor import Executor
from lightning_recycle.session.checkpoint_files import (
    WholeCheckpointIO,
    attempt,
    check_content,
    check_exists,
    is_sharded,
    load_sharded,
    local_path,
    megabytes,
    save_sharded,
)
from lightning_recycle.session.concurrent_checkpoints import (
    Action,
    CheckpointBatch,
    CheckpointBatches,
    SaveRequest,
    StateCopies,
    settle_files,
)
from lightning_recycle.session.gradient_clipping import may_write_after_saves
from lightning_recycle.session.lightning_internals import plain_optimizer, set_checkpoint_path
from lightning_recycle.session.object_graph import ObjectPack
from lightning_recycle.session.optimizer_states import (
    Copies,
    StageStates,
    complete_state,
    group_names,
    merge_optimizer_states,
    own_entries,
    parameters_by_name,
    sharded_optimizer_state,
    stage_optimizer_state,
)
from lightning_recycle.session.worker_context import WorkerContext
from lightning_recycle.session.worker_snapshot import (
    COMPLETION,
    StateMarks,
    StepBoundary,
    WorkerState,
    add_parts,
    as_tensors,
    boundary_of,
    checkpoint_reader,
    mark_of,
    update_from_completion,
)
from lightning_recycle.tensor_memory import on_device, part_like, to_cpu
from lightning_recycle.torch_internals import tree_leaves

log = logging.getLogger(__name__)

# Keys of values by parameter besides ``state_dict``, which has the average with WeightAveraging.
_EXTRA_WEIGHT_KEYS = ("current_model_state",)

_WEIGHTS = ("state_dict", *_EXTRA_WEIGHT_KEYS)


def users_save_hook(trainer: pl.Trainer) -> str | None:
    """The name of the user's hook that sees checkpoints, if there is one."""
    for owner in (trainer.lightning_module, *trainer.callbacks):  # type: ignore[attr-defined]
        hook = owner.on_save_checkpoint
        package = str(getattr(hook, "func", hook).__module__).partition(".")[0]  # this package has made it a partial
        if package not in ("lightning", "pytorch_lightning", __name__.partition(".")[0]):
            return f"{type(owner).__name__}.on_save_checkpoint()"
    return None


def _saves_in_background(context: WorkerContext) -> bool:
    """Whether this run saves in the background; otherwise all wait for checkpoints."""
    options, collectives = context.options.checkpoints, context.collectives
    by_stage = options.save_distributed_checkpoint or collectives.grid.stages == 1
    if not context.fitting or not options.background or context.mesh is not None:
        return False
    hook = users_save_hook(context.trainer) if options.background == "auto" and not by_stage else None
    if hook and collectives.is_leader:
        log.info(
            "The training waits for checkpoints, so that %s sees the whole model. With"
            " CheckpointOptions(background=True) it does not wait, and the hook sees the part of one stage.",
            hook,
        )
    return not hook


@dataclass(frozen=True)
class _StagePart:
    """One stage's part of a checkpoint.

    ``is_whole``: whether weights and states are those of the whole model, which each worker has. ``weights``: the state
    dict and other values by parameter, by their names in the checkpoint. ``names``: of each optimizer's parameters.
    ``copies``: by stage and name of a tied copy, the owner's name, when the part was taken.
    """

    is_whole: bool
    weights: dict[str, dict[str, Any]]
    states: list[dict[str, Any]]
    names: list[list[list[str]]]
    copies: Copies
    completion: dict[str, Any] | None = None


@dataclass(frozen=True)
class _SaveCall:
    """A checkpoint that was asked for, and is written at the next boundary.

    ``content``: Lightning's checkpoint at that time, without the values in ``part``. ``marks``: of state that may
    change until the boundary; None if no run can resume from the checkpoint. ``part``: this stage's part, if this
    worker may have to write it. ``is_new``: whether it is known that the file replaces none.
    """

    path: Any
    storage_options: Any | None
    content: Callable[[], dict[str, Any]]
    marks: StateMarks | None
    part: _StagePart | None
    is_new: bool


def _with_completion(content: Callable[[], dict[str, Any]], common: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A checkpoint's content, with its completion."""
    return {**content(), COMPLETION: common()}


class Checkpoints(StageStates):
    """A worker's part in saving and loading the state of the whole model.

    Subclasses know the callbacks that save: their actions and records. ``at_fault_point``: called with "checkpoint"
    and the step right before one is written.

    Attributes:
        completion: completes the loaded checkpoint, until the training begins.
        restored_objects: if the run begins again, the users' objects, from the loaded checkpoint.
        restored_steps: the steps of the loaded checkpoint; randomness is numbered by the step.
        stall_seconds: how long checkpoints have held up this worker so far, apart from collecting the state.
    """

    def __init__(
        self,
        context: WorkerContext,
        parts: ModelParts,
        executor: Executor,
        copies: Copies,
        at_fault_point: Callable[[str, int], None],
        worker_state: WorkerState,
    ) -> None:
        super().__init__(context, parts, copies)
        self.executor, self.at_fault_point, self.worker_state = executor, at_fault_point, worker_state
        self.ends_run_on_failure = context.options.checkpoints.on_checkpoint_error == "raise"
        self.completion: dict[str, Any] | None = None
        self.restored_objects: ObjectPack | None = None
        self.restored_steps = 0
        self.is_training = False
        self.stall_seconds = 0.0
        self._raises_all_failures = False
        self._before_hooks: dict[str, tuple[Any, Any]] | None = None
        self._calls: list[_SaveCall] = []
        self._boundary: StepBoundary | None = None
        self._file_actions: dict[str, Callable[..., None]] = {"link": link, "remove": self._delete}
        actions = {
            "link": lambda failure, *paths: None if failure else self.link(*paths),
            "remove": lambda failure, path: None if failure else self.remove(path),
            **self.actions_of_callbacks(),
        }
        self.saves = CheckpointBatches(
            context, actions, self._file_actions, lambda: self.stall_seconds, self._report_failure, self._discard
        )
        context.client.complete_saves = self.saves.await_thread
        self._may_save_in_background = _saves_in_background(context)

    # ------------------------------------------------------------------ for callbacks that save

    def actions_of_callbacks(self) -> dict[str, Callable[..., None]]:
        """Consequences of checkpoints, without links and deletions."""
        return {}

    def ask_again(self) -> None:
        """Asks again for checkpoints that were given up because a worker was lost."""

    def records(self) -> dict[str, Any]:
        """The records of the callbacks that save, with the checkpoints asked for."""
        return {}

    def join_states(self, states: dict[str, Any]) -> None:
        """Makes ``states`` of callbacks those of the whole model, on all workers."""

    # ------------------------------------------------------------------ state

    @property
    def in_background(self) -> bool:
        """Whether training goes on while checkpoints that are asked for now are written."""
        return self._may_save_in_background and self.is_training

    @property
    def _is_joining(self) -> bool:
        """Whether this worker is alone, at places where the others have saved already."""
        return self.collectives.client.is_joining

    @property
    @override
    def by_stage(self) -> bool:
        return self.sharded or self.in_background or self._is_joining

    def state(self) -> dict[str, Any]:
        """The state dict for a checkpoint: of the whole model, or of the stage."""
        self.collectives.confirm_step()
        state = self.module.state_dict()
        if self.by_stage:
            return state
        whole_state = self.joined("model state", state)
        # On one device hooks that write into the state dict write into the weights.
        whole_state |= {name: value for name, value in state.items() if not tensor_memory.is_sharded(value)}
        if self.collectives.grid.stages > 1:
            self._before_hooks = {name: (value, mark_of(value)) for name, value in whole_state.items()}
        return whole_state

    def _after_hooks(self, weights: Mapping[str, Any], before: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
        """The state dict of the whole model from the ``weights`` that hooks left here.

        They changed the state dict ``before``, elsewhere perhaps to other weights: each sees the values of one stage,
        such as averages. So the hooks on its stage decide about a name, or where they changed nothing at all, those on
        the leader. Raises UnsupportedFeatureError if only the leader's hooks have taken out a value of another stage.
        """
        own_names = set(self.module.state_dict())
        changed: dict[str, tuple[Any, ...]] = {name: () for name in before if name not in weights}
        changed |= {name: (v,) for name, v in weights.items() if name not in before or mark_of(v) != before[name][1]}

        def changes(includes: Callable[[str], bool]) -> dict[str, tuple[Any, ...]]:
            return to_cpu({name: value for name, value in changed.items() if includes(name)})  # type: ignore[no-any-return]

        reports = self.collectives.gather_stages(
            "state dict after hooks",
            lambda: (own_names, bool(changed), changes(lambda n: n in own_names or n not in before)),
        )
        decided = {name: found for names, has_changed, found in reports if has_changed for name in names}
        added = {name: found for _, _, found in reports for name in found if name not in before}
        leader_report = self.collectives.by_leader(
            "state dict after hooks of the leader", lambda: (own_names, changes(lambda name: name not in decided))
        )
        if lost := [name for name, found in leader_report[1].items() if not found and name not in leader_report[0]]:
            raise UnsupportedFeatureError(
                f"{users_save_hook(self.module.trainer) or 'A hook'} takes {lost[0]} and {len(lost) - 1} others out of"
                " checkpoint['state_dict'] on one worker only, which has another stage of the model: whether they are"
                " to be left out of the checkpoint is unknown. Let it run on all workers, without is_global_zero and"
                " rank_zero_only; each decides about the layers that it has."
            )
        merged = {}
        for name in dict.fromkeys([*before, *leader_report[1], *added]):
            found = decided.get(name, leader_report[1] if name in leader_report[1] else added.get(name, {}))
            if value := found.get(name, before.get(name, ())[:1]):
                merged[name] = value[0]
        return to_cpu(merged, copies=False)  # type: ignore[no-any-return]

    # ------------------------------------------------------------------ loading

    def load(self, path: Any, weights_only: bool | None) -> dict[str, Any]:
        self.complete()
        if weights_only is None:
            weights_only = self.context.run.weights_only  # False for a file that this run wrote itself
        path, checkpoint_io = self._agree_on_path(path), self.module.trainer.strategy.checkpoint_io
        check_exists(path, checkpoint_io)  # no launching process has looked for the file on this machine
        if is_sharded(path):
            checkpoint = self._load_sharded(path)
        else:
            release_cache(self.context.device)
            checkpoint = checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        check_content(path, checkpoint)
        self.restored_steps = int(checkpoint.get("global_step", 0))
        self.completion = None
        completion = checkpoint.pop(COMPLETION, None)
        if completion is not None and self.context.fitting:
            update_from_completion(checkpoint, completion, _EXTRA_WEIGHT_KEYS)
            self.completion = completion
            if "objects" in completion and self.context.run.restarts:  # another run may have other stages
                data, *tensors = completion["objects"][self.collectives.positions.column(self.collectives.rank)]
                self.restored_objects = ObjectPack(data.numpy().tobytes(), tensors)
        return checkpoint

    @property
    def resumes_mid_epoch(self) -> bool:
        """Whether the run goes on from a checkpoint in an epoch that is not over."""
        if self.completion is None or self.collectives.client.is_joining:
            return False
        return boundary_of(self.completion) in (StepBoundary.BATCH, StepBoundary.VALIDATION)

    def resume(self) -> Mapping[str, Any] | None:
        """Restores, at the beginning of training, the state that Lightning has not.

        Returns the completion of the checkpoint, if it has one.
        """
        completion, self.completion = self.completion, None
        if completion is None or self.collectives.client.is_joining:
            return None
        self.worker_state.resume(completion, boundary_of(completion), self.context.run.restarts)
        parameters, gradients = parameters_by_name(self.module), completion["gradients"]
        for name, owned in self.owned_names(parameters).items():
            if owned in gradients:
                parameter = parameters[name]
                parameter.grad = part_like(gradients[owned], parameter).to(parameter.device)
        return completion

    def finish_boundary(self, completion: Mapping[str, Any]) -> None:
        """After a restart, writes checkpoints asked for behind the loaded one.

        At the same boundary, with the actions that were to follow: all workers were lost before.
        """
        if not self.context.run.restarts:
            return
        trainer = self.module.trainer
        requests, path = completion["asked"], str(trainer.ckpt_path)
        set_checkpoint_path(trainer, completion["resumed_from"])  # ModelCheckpoint would not delete that of the restart
        loaded_index = next((n for n, (other, _) in enumerate(requests) if other == path), len(requests))
        boundary = boundary_of(completion)
        if boundary is not None:
            with self.at_boundary(boundary):
                for other, weights_only in requests[loaded_index + 1 :]:
                    trainer.save_checkpoint(other, weights_only)
        if self.collectives.is_leader:
            follows = (Action(name, tuple(paths), tuple(a)) for name, paths, a in completion["follows"])
            settle_files([action for action in follows if all(map(os.path.exists, action.paths))], self._file_actions)

    def _agree_on_path(self, path: Any) -> Any:
        """The leader's path; workers started by hand may each find another checkpoint."""
        if self.collectives.client.is_joining:
            return path  # it is alone until it enters, and then has its donor's state
        agreed = self.collectives.broadcast(os.fspath(path))
        if agreed != os.fspath(path):
            set_checkpoint_path(self.module.trainer, agreed)
        return agreed

    def load_model_state(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads this stage's part of a checkpoint of the whole model."""
        stage_state = self.own_part(checkpoint["state_dict"])
        if self.restored_objects is not None:
            self.worker_state.load_objects(self.restored_objects, stage_state)
        try:
            self.module.load_state_dict(own_parts(self.module, stage_state), strict=strict)
        except RuntimeError as error:
            raise RuntimeError(f"ckpt_path={str(self.module.trainer.ckpt_path)!r}: {error}") from None

    def load_optimizer_state(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads this stage's part of the whole model's optimizer state.

        Not in a joining worker: the others train and cannot exchange parts with it; its donor has a newer one.
        """
        if self.collectives.client.is_joining:
            return
        pairs = zip(self.module.trainer.optimizers, checkpoint["optimizer_states"], strict=True)
        for index, (optimizer, whole) in enumerate(pairs):
            state, names = self.own_optimizer_state(whole, optimizer)
            changed = self.completion["optimizers"][index] if self.completion is not None else {}
            owned = self.owned_names(name for group in names for name in group)
            state["state"] |= {n: changed[name] for n, name in enumerate(owned.values()) if name in changed}
            optimizer.load_state_dict(sharded_optimizer_state(state, optimizer))

    def _load_sharded(self, path: Any) -> dict[str, Any]:
        """This worker's part of a sharded checkpoint; of sharded tensors its shards."""
        entries = {f"{kind}.{name}": value for kind in _WEIGHTS for name, value in self.module.state_dict().items()}
        optimizers = [] if self.collectives.client.is_joining else self.module.trainer.optimizers
        for index, optimizer in enumerate(optimizers):
            kinds = ("param_groups", "others", *own_entries(complete_state(plain_optimizer(optimizer))))
            entries |= {f"optimizer_{index}.{kind}": None for kind in kinds}
            parameters = parameters_by_name(self.module)
            for name, owned in self.owned_names(parameters).items():
                entries[f"optimizer_{index}.state.{owned}"] = parameters[name]
        return load_sharded(path, entries)

    # ------------------------------------------------------------------ saving

    def save(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """The leader writes, or one worker of each stage.

        If the file system refuses: raises CheckpointError on all workers with ``on_checkpoint_error="raise"`` or inside
        :meth:`raising_failures`; else the leader warns. In the background the error comes with the outcome. Raises
        UnsupportedFeatureError for a folder elsewhere than on this machine.
        """
        if self._is_joining:
            return
        if self.sharded and local_path(path) is None:
            raise UnsupportedFeatureError(
                "CheckpointOptions(save_distributed_checkpoint=True) writes folders on file systems of this machine,"
                f" and {path} is in none: mount it, or leave the option out."
            )
        if self._before_hooks is not None:
            before, self._before_hooks = self._before_hooks, None
            checkpoint["state_dict"] = self._after_hooks(checkpoint["state_dict"], before)
        is_new = self._is_new(path)
        self._note_existence(path)
        with self._stalling():
            if (batch := self._begin_batch()) is not None:
                part = self._take_part(checkpoint, batch) if batch.waits or batch.group.is_column_leader else None
                marks = None
                if "optimizer_states" in checkpoint:  # values are only compared where they are written
                    by_value = part is not None and may_write_after_saves(self.context.trainer, self.module)
                    marks = StateMarks(self.module, self._optimizers, by_value)
                is_later = self.saves.is_deferring and (batch.waits or batch.group.is_leader)
                content = checkpoint_reader(checkpoint) if is_later else partial(dict, checkpoint)
                self.saves.asked(os.fspath(path))
                self._calls.append(_SaveCall(path, storage_options, content, marks, part, is_new))
        if not self.saves.is_deferring:
            self.complete()  # the user's code may read it next

    @property
    def _optimizers(self) -> list[Optimizer]:
        return [plain_optimizer(optimizer) for optimizer in self.module.trainer.optimizers]

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Within the block checkpoints are only asked for.

        They are written, and their consequences taken up, at the next boundary, or right after the block where none
        comes.
        """
        with self.saves.deferring():
            yield
        if not self.is_training:
            self.complete()

    @contextmanager
    def at_boundary(self, boundary: StepBoundary) -> Iterator[None]:
        """Checkpoints asked for by the end of the block are completed and written."""
        self._boundary = boundary
        yield
        self._write(boundary)
        self._boundary = None

    def _write(self, boundary: StepBoundary | None) -> None:
        """Writes checkpoints asked for; ``boundary``: where the training is, if at one."""
        calls, self._calls = self._calls, []
        with self._stalling():
            if calls:
                common: Callable[[], dict[str, Any]] = dict
                batch = self.saves.batch
                assert batch is not None
                if any(call.marks is not None for call in calls):
                    state = self._common_state(calls, boundary)  # on all workers, as it may wait for them
                    if batch.waits or batch.group.is_leader:
                        common = checkpoint_reader(state)
                self._request(batch, calls, common)
            self.saves.seal(mid_step=boundary is None)
            self.saves.await_originals()

    def _common_state(self, calls: Sequence[_SaveCall], boundary: StepBoundary | None) -> dict[str, Any]:
        """The part of a checkpoint's completion that all workers have in common."""
        state = self.worker_state.common_state()
        self.join_states(state["callbacks"])
        follows = [
            [action.name, list(action.paths), list(map(os.fspath, action.arguments))]
            for action in self.saves.noted
            if action.name in self._file_actions
        ]
        return {
            "boundary": boundary and boundary.value,
            "run": self.context.run.name,
            "step": self.executor.version,
            "asked": [[os.fspath(call.path), call.marks is None] for call in calls],
            "resumed_from": self.module.trainer.ckpt_path and os.fspath(self.module.trainer.ckpt_path),
            "saves": self.records(),
            "follows": follows,
            **state,
        }

    def _completion(self, marks: StateMarks | None) -> dict[str, Any] | None:
        """This stage's part of a checkpoint's completion; no copy."""
        if marks is None:
            return None
        changes, gradients = marks.changes(), self.worker_state.left_gradients()
        parameters = parameters_by_name(self.module)
        owned = self.owned_names(name for name, parameter in parameters.items() if parameter in gradients)
        return {**changes, "gradients": {owner_name: gradients[parameters[name]] for name, owner_name in owned.items()}}

    def is_asked(self, path: Any) -> bool:
        """Whether a checkpoint at ``path`` is asked for and not written yet."""
        return any(os.fspath(call.path) == os.fspath(path) for call in self._calls)

    def has(self, path: Any, list_folder: Callable[[str], Iterable[str]]) -> bool:
        """Whether there is something at ``path``, the same on all workers.

        Where no worker waits for others, they know it from the names that the leader has once seen in its folder, and
        from later saves and removals.
        """
        folder, name = os.path.split(path)
        if folder not in self.saves.names:
            found = [os.path.basename(path) for path in list_folder(folder)]
            self.saves.names[folder] = set(self.collectives.broadcast(found))
        return name in self.saves.names[folder]

    def _is_new(self, path: Any) -> bool:
        """Whether it is known that there is nothing at ``path``."""
        folder, name = os.path.split(path)
        return name not in self.saves.names.get(folder, {name})

    def _note_existence(self, path: Any, exists: bool = True) -> None:
        """Updates the known names of the folder of ``path``, if they are known."""
        folder, name = os.path.split(path)
        if (names := self.saves.names.get(folder)) is not None:
            (names.add if exists else names.discard)(name)

    def link(self, target: str, path: str) -> None:
        if self._is_joining or os.path.abspath(target) == os.path.abspath(path):
            return
        self._note_existence(path)
        if self.saves.is_deferring:
            self.saves.asked(target)
            self.saves.call_when_known("link", target, path)
            return
        make_link = partial(attempt, partial(link, target, path), path, None)
        if (failure := self.collectives.by_leader("checkpoint", make_link)) is not None:
            self._report_failure(failure)

    def remove(self, path: Any) -> None:
        """The leader deletes a checkpoint that is not wanted any more."""
        self._note_existence(path, exists=False)
        if self.saves.is_deferring:
            self.saves.call_when_known("remove", os.fspath(path))
            return
        if not self.collectives.is_leader:
            return
        try:
            self._delete(path)
        except OSError as error:
            if self.ends_run_on_failure:
                raise CheckpointError(f"The old checkpoint {path} could not be deleted: {error}.") from error
            log.warning("The old checkpoint %s could not be deleted and stays: %s.", path, error)

    def _discard(self, path: str) -> None:
        """Deletes a new checkpoint that was given up, if it got its name.

        A CheckpointIO of the user's, and other file systems, give names without asking first.
        """
        try:
            if get_filesystem(path).exists(path):
                self._delete(path)
        except OSError as error:
            log.warning("The checkpoint %s was given up, could not be deleted and stays: %s.", path, error)

    def _delete(self, path: Any) -> None:
        if self.sharded:
            remove(path)
        else:
            self.module.trainer.strategy.checkpoint_io.remove_checkpoint(path)

    def raising_failures(self) -> AbstractContextManager[Any]:
        """Failed checkpoints in the block raise :class:`CheckpointError` on all workers."""
        return patch.object(self, "_raises_all_failures", True)

    def _save_file(self, checkpoint: dict[str, Any], call: _SaveCall, batch: CheckpointBatch) -> None:
        group, plugin = batch.group, self.module.trainer.strategy.checkpoint_io
        self.at_fault_point("checkpoint", batch.version)
        group.await_permission()
        if isinstance(plugin, AsyncCheckpointIO):  # this thread knows when it is complete
            assert plugin.checkpoint_io is not None
            plugin = plugin.checkpoint_io
        if isinstance(plugin, WholeCheckpointIO):
            pace = None if batch.copies.are_originals else group.pace
            plugin.save_checkpoint(checkpoint, call.path, call.storage_options, group.await_permission, pace)
        else:
            plugin.save_checkpoint(checkpoint, call.path, storage_options=call.storage_options)

    def _shard(self, weights: Mapping[str, Any], optimizers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        parts = [{"state": part["state"]} if self.stage > 0 else part for part in optimizers]  # the rest is the same
        return {**weights, **{f"optimizer_{index}": part for index, part in enumerate(parts)}}

    # ------------------------------------------------------------------ saving while the training goes on

    def begin_batch(self) -> bool:
        """Begins a batch at this boundary; False if this worker leaves the save out."""
        if self._is_joining:
            return False
        with self._stalling():
            return self._begin_batch() is not None

    def _begin_batch(self) -> CheckpointBatch | None:
        version = self.executor.version
        batch = self.saves.begin(version, waits=not self.in_background)
        if batch is None:
            busy = f"A checkpoint after {version} steps is left out: the one before is still being written."
            self._report_failure(SaveFailure(busy))
        return batch

    def apply_outcome(self) -> None:
        """Carries out what depends on a batch, after the step that came with its outcome."""
        with self._stalling():
            self.saves.apply_outcome()

    def complete(self) -> None:
        """Writes checkpoints that were asked for, waits for them, and runs their actions."""
        self._write(self._boundary)
        with self._stalling():
            self.saves.complete()

    @contextmanager
    def in_foreground(self) -> Iterator[None]:
        """Within the block all wait until the checkpoints asked for are written."""
        self.complete()
        with patch.object(self, "is_training", False):
            yield
            self.complete()

    @contextmanager
    def saving_at_end(self) -> Iterator[None]:
        """Writes checkpoints lost with workers, then those asked for in the block."""
        with self.at_boundary(StepBoundary.EPOCH):
            with self.in_foreground():
                self.ask_again()
            yield

    @contextmanager
    def _stalling(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.stall_seconds += time.perf_counter() - began

    def end_training(self) -> None:
        """The training is over: nothing is written in the background any more."""
        with self.at_boundary(StepBoundary.EPOCH), self.in_foreground():
            self.ask_again()
        self.is_training = False

    def _request(self, batch: CheckpointBatch, calls: list[_SaveCall], common: Callable[[], dict[str, Any]]) -> None:
        """Has this worker's thread write its part of ``calls``, if it has one."""
        objects: list[Any] | None = None
        for call in calls:
            write = None
            if (part := call.part) is not None:
                completion = batch.copies.take(self._completion(call.marks), ("completion",))
                if completion is not None:
                    completion = to_cpu(completion, copies=False)
                    if self.context.run.may_restart:
                        if objects is None:
                            data, *tensors = as_tensors(self.worker_state.pack_objects())
                            objects = [data, *batch.copies.take(tensors)]
                        completion["objects"] = objects
                    call = replace(call, content=partial(_with_completion, call.content, common))
                write_part = self._write_stage_part if self.sharded else self._write_through_leader
                write = partial(write_part, batch, call, replace(part, completion=completion))
            batch.requests.append(SaveRequest(os.fspath(call.path), write, call.marks is None, call.is_new))

    def _limit_copies(self, copies: StateCopies, state: Any) -> None:
        """Has ``copies`` of ``state`` made only if there is memory for them."""
        trainer = self.module.trainer
        num_copies = min(self.collectives.grid.stages, trainer.num_devices)
        needed, free = storage_bytes(tree_leaves(state)), free_bytes(trainer.num_devices) / num_copies
        if not copies.limit(needed, free):
            log.warning(
                "Worker %s: the training waits for a checkpoint, as there is no memory for a copy of the state: %s, and"
                " %s free for each of %d copies.",
                *(self.collectives.worker, megabytes(needed), megabytes(max(free, 0)), num_copies),
            )

    def _take_part(self, checkpoint: dict[str, Any], batch: CheckpointBatch) -> _StagePart:
        """This stage's part, taken out of ``checkpoint``; copied unless all wait."""
        kinds, copies = [kind for kind in _WEIGHTS if kind in checkpoint], batch.copies
        weights = {kind: checkpoint[kind] for kind in kinds}
        if self.sharded:
            weights = {kind: {n: v for n, v in part.items() if self.parts.writes(n)} for kind, part in weights.items()}
        states, only_step = checkpoint.get("optimizer_states", []), self.module.automatic_optimization
        checkpoint.update({name: None for name in (*kinds, "optimizer_states") if name in checkpoint})
        if not batch.waits:
            self._limit_copies(copies, (weights, states))
        return _StagePart(
            not self.by_stage,
            copies.take(weights, ("weights",)),
            [copies.take(state, ("optimizer", index), only_step) for index, state in enumerate(states)],
            [group_names(self.module, optimizer) for optimizer in self._optimizers[: len(states)]],
            dict(self.copies),
        )

    def _write_through_leader(self, batch: CheckpointBatch, call: _SaveCall, part: _StagePart) -> SaveFailure | None:
        """Sends ``part`` to the leader, which joins all parts and writes one file.

        Returns why there is no checkpoint; None on other workers.
        """
        group = batch.group
        if not group.is_leader:
            group.send(replace(part, weights={}, states=[]) if part.is_whole else part)
            return None
        checkpoint = call.content()
        received: list[Any] = []

        def write() -> None:
            own_rank = self.collectives.rank
            pieces = [part if rank == own_rank else group.receive(rank, call.path) for rank in group.ranks]
            received.extend((piece.weights, piece.states) for piece in pieces)
            for kind in part.weights:
                checkpoint[kind] = {n: v for piece in pieces for n, v in piece.weights.get(kind, {}).items()}
            if "optimizer_states" in checkpoint:
                states = zip(*(piece.states for piece in pieces), strict=True)
                names = zip(*(piece.names for piece in pieces), strict=True)
                checkpoint["optimizer_states"] = (
                    part.states
                    if part.is_whole
                    else [
                        merge_optimizer_states(of_stages, of_names, part.copies)
                        for of_stages, of_names in zip(states, names, strict=True)
                    ]
                )
            add_parts(checkpoint, [piece.completion for piece in pieces], group.positions.members)
            tensors = {kind: checkpoint[kind] for kind in (*part.weights, "optimizer_states") if kind in checkpoint}
            self._save_file({**checkpoint, **on_device(tensors, torch.device("cpu"))}, call, batch)

        failure = attempt(write, call.path, received)
        if failure is not None:
            group.fail(failure.text)
        return failure

    def _write_stage_part(self, batch: CheckpointBatch, call: _SaveCall, part: _StagePart) -> SaveFailure | None:
        """Writes this stage's ``part`` of a folder; the leader also the rest."""
        group, checkpoint = batch.group, call.content()

        def before_naming(temporary: Path) -> None:
            self.at_fault_point("checkpoint", batch.version)
            group.await_permission(temporary)

        completions = group.gather_columns("completion", lambda: part.completion)
        add_parts(checkpoint, completions, group.positions.members)
        names = group.gather_stages("names of parameters", lambda: part.names)
        states = [
            stage_optimizer_state(state, [of_stage[n] for of_stage in names], part.copies, self.stage)
            for n, state in enumerate(part.states)
        ]
        common = {name: value for name, value in checkpoint.items() if name not in (*part.weights, "optimizer_states")}
        local = local_path(call.path)
        assert local is not None, "save() refuses others"
        return save_sharded(local, self._shard(part.weights, states), common, group, before_naming, group.pace)

    # ------------------------------------------------------------------ beginning and end

    def begin_training(self) -> None:
        """The training begins: until its end checkpoints may be written meanwhile."""
        self.is_training = True
        if self._may_save_in_background:
            reset_peak(torch.device("cpu"))  # a checkpoint that was read may have taken more than training does

    def _report_failure(self, failure: SaveFailure) -> None:
        self.saves.names.clear()  # there may be an earlier one of that name
        if self.ends_run_on_failure and failure.is_refusal:
            raise CheckpointError(
                f"{failure.text} {failure.remedy}{' ' if failure.remedy else ''}With"
                " CheckpointOptions(on_checkpoint_error='warn') the training goes on without this one."
            )
        if self.collectives.is_leader:
            goes_on = "What was there before is unchanged, and the training goes on."
            log.warning("%s", " ".join(filter(None, (failure.text, goes_on, failure.remedy))))
        if self._raises_all_failures:
            raise CheckpointError(failure.text)

    def deliver_result(self, stage_result: Callable[[], Any], leader_result: Callable[[], Any]) -> None:
        """Sends this column's result; repeats until every column's has arrived."""
        positions, rank = self.collectives.positions, self.collectives.rank
        while True:
            result = None
            leads = self.collectives.is_leader
            is_in_leader_column = positions.column(rank) == positions.column(self.collectives.leader)
            if leads or (self.collectives.is_column_leader and not is_in_leader_column):
                result = (stage_result(), leader_result() if leads else None)
            delivered = self.collectives.gather_all(RESULT, result)
            if {positions.column(rank) for rank, sent in delivered.items() if sent} == set(range(positions.columns)):
                return
