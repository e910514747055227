"""The state of the whole model from that of its stages, and back: checkpoints, and the results of a run.

A checkpoint holds no trace of the grid. One that is asked for in the middle of the end of a step is written at the next
boundary (:mod:`~lightning_recycle.session.step_completion`); only a user's own ``trainer.save_checkpoint``, which
returns with the file, does not wait for it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.optim import Optimizer

from lightning_recycle import tensor_memory
from lightning_recycle.control.protocol.messages import Saved
from lightning_recycle.control.protocol.state import RESULT
from lightning_recycle.devices import release_cache
from lightning_recycle.errors import CheckpointError, UnsupportedFeatureError
from lightning_recycle.files import link, remove
from lightning_recycle.model.layers import own_parts
from lightning_recycle.model.parts import ModelParts
from lightning_recycle.runtime.executor.device_memory import free_bytes, reset_peak, storage_bytes
from lightning_recycle.runtime.executor.executor import Executor
from lightning_recycle.session.background_saves import (
    Action,
    BackgroundSaves,
    Batch,
    Consequences,
    SaveRequest,
)
from lightning_recycle.session.checkpoint_files import (
    WholeCheckpointIO,
    WriteFailure,
    Writers,
    attempt,
    is_sharded,
    load_sharded,
    local_path,
    megabytes,
    save_sharded,
)
from lightning_recycle.session.collectives import WorkerContext
from lightning_recycle.session.lightning_internals import plain_optimizer, set_checkpoint_path
from lightning_recycle.session.object_graph import ObjectPack
from lightning_recycle.session.optimizer_states import (
    Copies,
    GroupNames,
    complete_state,
    group_names,
    merge_optimizer_states,
    parameters_by_name,
    sharded_optimizer_state,
    split_optimizer_state,
    stage_optimizer_state,
)
from lightning_recycle.session.save_interval import SaveFacts, SaveInterval, steps_between_saves
from lightning_recycle.session.state_copies import StateCopies
from lightning_recycle.session.step_completion import (
    COMPLETION,
    Boundary,
    StateMarks,
    add_parts,
    as_tensors,
    boundary_of,
    complete,
    frozen,
    mark_of,
)
from lightning_recycle.tensor_memory import part_like, to_cpu
from lightning_recycle.torch_internals import tree_leaves

if TYPE_CHECKING:
    from lightning_recycle.session.snapshot import StateTransfer

log = logging.getLogger(__name__)

_FURTHER_WEIGHTS = ("current_model_state",)
"""Entries of a checkpoint by parameter, besides ``state_dict``: with WeightAveraging that is the average."""

_WEIGHTS = ("state_dict", *_FURTHER_WEIGHTS)


def users_save_hook(trainer: pl.Trainer) -> str | None:
    """The name of a hook of the user's that sees checkpoints before they are written, if there is one."""
    for owner in (trainer.lightning_module, *trainer.callbacks):  # type: ignore[attr-defined]
        hook = owner.on_save_checkpoint
        package = str(getattr(hook, "func", hook).__module__).partition(".")[0]  # this package has made it a partial
        if package not in ("lightning", "pytorch_lightning", __name__.partition(".")[0]):
            return f"{type(owner).__name__}.on_save_checkpoint()"
    return None


@dataclass(frozen=True)
class _StagePart:
    """A copy of one stage's part of a checkpoint.

    Args:
        weights: the state dict, and what else has a value by parameter, by their names in the checkpoint.
        states: the state dict of each optimizer.
        names: the names of each optimizer's parameters.
        copies: as in :class:`Checkpoints`, when it was copied.
        completion: the stage's part of what completes the checkpoint, if a run can go on from it.
    """

    weights: dict[str, dict[str, Any]]
    states: list[dict[str, Any]]
    names: list[list[list[str]]]
    copies: Copies
    completion: dict[str, Any] | None = None


@dataclass(frozen=True)
class _Asked:
    """A checkpoint that was asked for, and is written at the next boundary.

    Args:
        path: where it is to be.
        storage_options: for the CheckpointIO.
        content: returns Lightning's content as it was then, without what is in ``part``.
        marks: of what may change until the boundary; None if no run can go on from the checkpoint.
        batch: the batch in which it is written in the background, if it is.
        part: of this stage, if it is written in the background and this worker takes part in that.
        is_new: whether it is known to replace nothing.
    """

    path: Any
    storage_options: Any | None
    content: Callable[[], dict[str, Any]]
    marks: StateMarks | None
    batch: Batch | None = None
    part: _StagePart | None = None
    is_new: bool = False


def _kept(checkpoint: Mapping[str, Any], until_later: bool) -> Callable[[], dict[str, Any]]:
    """Returns what returns ``checkpoint``; ``until_later``: as it is now. Weights and optimizer states are those of all
    stages, which are copies, or are written as they will be.
    """
    if not until_later:
        return partial(dict, checkpoint)
    kinds = (*_WEIGHTS, "optimizer_states")
    large = {kind: checkpoint[kind] for kind in kinds if kind in checkpoint}
    rest = frozen({name: None if name in large else value for name, value in checkpoint.items()})
    return lambda: {**rest(), **large}


def _completed(content: Callable[[], dict[str, Any]], common: Callable[[], dict[str, Any]] | None) -> dict[str, Any]:
    return content() if common is None else {**content(), COMPLETION: common()}


@dataclass
class Checkpoints:
    """A worker's part in saving and loading the state of the whole model.

    Args:
        context: the context of the worker.
        parts: this worker's part of the module.
        executor: knows the step.
        copies: for the stage and the name of each tied parameter that another stage owns, the owner's name.
        reach: called with "checkpoint" and the step right before one is written.
        transfer: has what users keep in their objects, for checkpoints from which the run can begin again.
        background: writes while the training goes on, if that is wanted.

    Attributes:
        collectives: used to exchange the parts.
        sharded: whether to write folders, to which each stage writes its own part.
        raises: whether a checkpoint that cannot be written ends the run.
        interval: decides how often to save, if callbacks do not.
        actions: what may follow from checkpoints, by name; see :class:`Consequences`.
        completion: what completes the checkpoint that was loaded, until the training begins.
        restored_objects: if the run begins again, the users' objects, from the checkpoint that was loaded.
        restored_steps: the steps of the checkpoint that was loaded; randomness is numbered by the step.
        ask_again: asks for checkpoints once more that were given up because a worker was lost.
        records: returns what the callbacks that save remember, with what they have asked for.
        save_every: has callbacks that save by steps do it at another interval; returns whether that changes anything.
        is_training: whether the training has begun and is not over.
        stall_seconds: how long checkpoints have held up this worker so far, apart from collecting the state.
    """

    context: WorkerContext
    parts: ModelParts
    executor: Executor
    copies: Copies
    reach: Callable[[str, int], None]
    transfer: StateTransfer
    background: BackgroundSaves | None
    completion: dict[str, Any] | None = None
    restored_objects: ObjectPack | None = None
    restored_steps: int = 0
    ask_again: Callable[[], None] = lambda: None
    records: Callable[[], dict[str, Any]] = dict
    save_every: Callable[[int], bool] = lambda steps: False
    is_training: bool = False
    stall_seconds: float = 0.0
    _unwinding: bool = False
    _counted_stall: float = 0.0
    _mid_step: set[str] = field(default_factory=set)
    _before_hooks: dict[str, tuple[Any, Any]] | None = None
    _asked: list[_Asked] = field(default_factory=list)
    _boundary: Boundary | None = None

    def __post_init__(self) -> None:
        context, wanted = self.context, self.context.options.checkpoints
        self.collectives, self.sharded = context.collectives, wanted.save_distributed_checkpoint
        self.raises = wanted.on_checkpoint_error == "raise"
        self.interval: SaveInterval | None = None
        if wanted.every_n_train_steps is not None:
            self.interval = SaveInterval(lambda: context.client.member.counters.get("failures", 0.0))
        self._together = Consequences()  # of checkpoints for which all wait
        self._on_files: dict[str, Callable[..., None]] = {"link": link, "remove": self._delete}
        self.actions = self._together.actions
        self.actions["link"] = lambda failure, *paths: None if failure else self.link(*paths)
        self.actions["remove"] = lambda failure, path: None if failure else self.remove(path)
        if self.background is not None:
            self.background.on_failures = self._not_completed
            self.background.discard = self._discard
            self.background.stalled = lambda: self.stall_seconds
            if self.interval is not None:
                self.background.measure = self._measured
                self.background.on_facts = lambda facts: self._follow([facts])
            self.background.actions = self.actions
            self.background.by_writer.update(self._on_files)

    @property
    def module(self) -> pl.LightningModule:
        return self.parts.module

    # ------------------------------------------------------------------ state

    @property
    def in_background(self) -> BackgroundSaves | None:
        """What writes the checkpoints that are asked for now while the training goes on; None if all wait for them."""
        return self.background if self.is_training and not self.collectives.client.joining else None

    @property
    def by_stage(self) -> bool:
        """Whether each worker puts the state of its stage into a checkpoint that is asked for now."""
        return self.sharded or self.in_background is not None

    def state(self) -> dict[str, Any]:
        """The state dict for a checkpoint: of the whole model, or of the stage."""
        self.collectives.settle()
        state = self.module.state_dict()
        if self.by_stage:
            return state
        whole = self.joined("model state", state)
        # On one device hooks that write into the state dict write into the weights.
        whole |= {name: value for name, value in state.items() if not tensor_memory.is_sharded(value)}
        if self.collectives.grid.stages > 1:
            self._before_hooks = {name: (value, mark_of(value)) for name, value in whole.items()}
        return whole

    def _after_hooks(self, weights: Mapping[str, Any], before: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
        """The state dict of the whole model, if hooks have left ``weights`` here, and others elsewhere, of that
        ``before``: each sees what belongs to one stage, such as averages. So the hooks on its stage decide about a
        name, or where they have changed nothing at all, those on the leader.

        Raises:
            UnsupportedFeatureError: if only the leader's hooks have taken out what belongs to another stage.
        """
        own = set(self.module.state_dict())
        changed: dict[str, tuple[Any, ...]] = {name: () for name in before if name not in weights}
        changed |= {name: (v,) for name, v in weights.items() if name not in before or mark_of(v) != before[name][1]}

        def changes(wanted: Callable[[str], bool]) -> dict[str, tuple[Any, ...]]:
            return to_cpu({name: value for name, value in changed.items() if wanted(name)})  # type: ignore[no-any-return]

        parts = self.collectives.gather_stages(
            "state dict after hooks", lambda: (own, bool(changed), changes(lambda n: n in own or n not in before))
        )
        decided = {name: found for names, has_changed, found in parts if has_changed for name in names}
        added = {name: found for _, _, found in parts for name in found if name not in before}
        leaders = self.collectives.by_leader(
            "state dict after hooks of the leader", lambda: (own, changes(lambda name: name not in decided))
        )
        if lost := [name for name, found in leaders[1].items() if not found and name not in leaders[0]]:
            raise UnsupportedFeatureError(
                f"{users_save_hook(self.module.trainer) or 'A hook'} takes {lost[0]} and {len(lost) - 1} others out of"
                " checkpoint['state_dict'] on one worker only, which has another stage of the model: whether they are"
                " to be left out of the checkpoint is unknown. Let it run on all workers, without is_global_zero and"
                " rank_zero_only; each decides about the layers that it has."
            )
        merged = {}
        for name in dict.fromkeys([*before, *leaders[1], *added]):
            found = decided.get(name, leaders[1] if name in leaders[1] else added.get(name, {}))
            if value := found.get(name, before.get(name, ())[:1]):
                merged[name] = value[0]
        return to_cpu(merged, copies=False)  # type: ignore[no-any-return]

    def joined(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """The states of all stages as one, on every worker; each gives its own, named like its parameters."""
        merged: dict[str, Any] = {}
        for part in self.collectives.gather_stages(name, lambda: to_cpu(state)):
            merged.update(part)
        return merged

    def own_part(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """``state`` of the whole model without what belongs to layers of other stages."""
        owned = set(self.module.state_dict())
        return {key: value for key, value in state.items() if key in owned or not self.parts.is_elsewhere(key)}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole model's optimizer state, parameters numbered in the order of the layers; with sharded checkpoints
        the stage's, by name.
        """
        optimizer = plain_optimizer(optimizer)
        if self.in_background is not None:  # its numbers follow when the stages are joined
            return complete_state(optimizer)
        if self.sharded:
            return stage_optimizer_state(
                complete_state(optimizer), self._all_parameter_names(optimizer), self.copies, self._stage
            )
        parts = self.collectives.gather_stages(
            "optimizer state", lambda: (to_cpu(complete_state(optimizer)), group_names(self.module, optimizer))
        )
        return merge_optimizer_states([part for part, _ in parts], [names for _, names in parts], self.copies)

    @property
    def _stage(self) -> int:
        return self.collectives.worker.stage

    def _all_parameter_names(self, optimizer: Optimizer) -> list[list[list[str]]]:
        """The names of the optimizer's parameters, by stage and group."""
        return self.collectives.gather_stages("names of parameters", lambda: group_names(self.module, optimizer))

    # ------------------------------------------------------------------ loading

    def load(self, path: Any, weights_only: bool | None) -> dict[str, Any]:
        self.complete()
        if weights_only is None:
            weights_only = self.context.run.weights_only  # False for a file that this run wrote itself
        path = self._agreed(path)
        if is_sharded(path):
            checkpoint = self._load_sharded(path)
        else:
            release_cache(self.context.device)
            checkpoint = self.module.trainer.strategy.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        self.restored_steps = int(checkpoint.get("global_step", 0))
        self.completion = None
        completion = checkpoint.pop(COMPLETION, None)
        if completion is not None and self.context.fitting:
            complete(checkpoint, completion, _FURTHER_WEIGHTS)
            self.completion = completion
            if "objects" in completion and self.context.run.restarts:  # another run may have other stages
                data, *tensors = completion["objects"][self.collectives.positions.column(self.collectives.rank)]
                self.restored_objects = ObjectPack(data.numpy().tobytes(), tensors)
        return checkpoint

    @property
    def resumes_mid_epoch(self) -> bool:
        """Whether the run goes on from a checkpoint in an epoch that is not over."""
        if self.completion is None or self.collectives.client.joining:
            return False
        return boundary_of(self.completion) in (Boundary.BATCH, Boundary.VALIDATION)

    def resume(self) -> Mapping[str, Any] | None:
        """The training begins: what Lightning has not restored is as it was when the checkpoint was completed. Returns
        what has completed it, if anything.
        """
        completion, self.completion = self.completion, None
        if completion is None or self.collectives.client.joining:
            return None
        self.transfer.resume(completion, boundary_of(completion), self.context.run.restarts)
        found = {self.copies.get((self._stage, n), n): p for n, p in parameters_by_name(self.module).items()}
        for name, parameter in found.items():
            if name in completion["gradients"]:
                parameter.grad = part_like(completion["gradients"][name], parameter).to(parameter.device)
        return completion

    def finish_boundary(self, completion: Mapping[str, Any]) -> None:
        """If the run begins again: writes what was asked for behind its checkpoint, at the same boundary, and does what
        was to follow. All workers were lost before.
        """
        if not self.context.run.restarts:
            return
        trainer = self.module.trainer
        asked, path = completion["asked"], str(trainer.ckpt_path)
        set_checkpoint_path(trainer, completion["resumed_from"])  # ModelCheckpoint would not delete that of the restart
        behind = next((n for n, (other, _) in enumerate(asked) if other == path), len(asked))
        boundary = boundary_of(completion)
        if boundary is not None:
            with self.at_boundary(boundary):
                for other, weights_only in asked[behind + 1 :]:
                    trainer.save_checkpoint(other, weights_only)
        if self.collectives.is_leader:
            self._settle_files(Action(name, tuple(paths), tuple(a)) for name, paths, a in completion["follows"])

    def _settle_files(self, actions: Iterable[Action]) -> None:
        """What was to follow for files when all workers were lost."""
        for action in actions:
            if action.name in self._on_files and all(map(os.path.exists, action.paths)):
                try:
                    self._on_files[action.name](*action.arguments)
                except OSError as error:
                    log.warning("After the checkpoint of the restart a file is not as it should be: %s.", error)

    def _agreed(self, path: Any) -> Any:
        """The leader's path: workers that are started by hand each look for the last checkpoint, and may see others."""
        if self.collectives.client.joining:
            return path  # it is alone until it enters, and then has its donor's state
        agreed = self.collectives.broadcast(os.fspath(path))
        if agreed != os.fspath(path):
            set_checkpoint_path(self.module.trainer, agreed)
        return agreed

    def load_model_state(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads this stage's part of a checkpoint of the whole model."""
        own = self.own_part(checkpoint["state_dict"])
        if self.restored_objects is not None:
            self.transfer.load_objects(self.restored_objects, own)
        self.module.load_state_dict(own_parts(self.module, own), strict=strict)

    def load_optimizer_state(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads this stage's part of the optimizer state of a checkpoint of the whole model.

        Not in a worker that joins: the others train and cannot exchange parts with it; its donor has a newer one.
        """
        if self.collectives.client.joining:
            return
        pairs = zip(self.module.trainer.optimizers, checkpoint["optimizer_states"], strict=True)
        for index, (optimizer, whole) in enumerate(pairs):
            names = self._all_parameter_names(optimizer)
            state = split_optimizer_state(whole, names, self.copies, self._stage)
            self._load_changes(index, state, names[self._stage])
            optimizer.load_state_dict(sharded_optimizer_state(state, optimizer))

    def _load_changes(self, index: int, state: dict[str, Any], names: GroupNames) -> None:
        """The states of optimizer ``index`` that had changed when the checkpoint was completed."""
        changed = self.completion["optimizers"][index] if self.completion is not None else {}
        for number, name in enumerate(name for group in names for name in group):
            owned = self.copies.get((self._stage, name), name)
            if owned in changed:
                state["state"][number] = changed[owned]

    def _load_sharded(self, path: Any) -> dict[str, Any]:
        """This worker's part of a sharded checkpoint; of sharded tensors its shards."""
        wanted = {f"{kind}.{name}": value for kind in _WEIGHTS for name, value in self.module.state_dict().items()}
        optimizers = [] if self.collectives.client.joining else self.module.trainer.optimizers
        for index in range(len(optimizers)):
            wanted |= {f"optimizer_{index}.param_groups": None, f"optimizer_{index}.others": None}
            for name, parameter in parameters_by_name(self.module).items():
                wanted[f"optimizer_{index}.state.{self.copies.get((self._stage, name), name)}"] = parameter
        return load_sharded(path, wanted)

    # ------------------------------------------------------------------ saving

    def save(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """The leader writes, or one worker of each stage; if a writer dies before it is done, a peer takes over.

        Raises:
            CheckpointError: on all workers, if the file system refuses, and a checkpoint that is not written ends the
                run, or is to be :meth:`noticed`. Otherwise the leader warns. In the background that comes later.
        """
        if self._before_hooks is not None:
            before, self._before_hooks = self._before_hooks, None
            checkpoint["state_dict"] = self._after_hooks(checkpoint["state_dict"], before)
        is_new = self._is_new(path)
        self._exists(path)
        marks = StateMarks(self.module, self._optimizers) if "optimizer_states" in checkpoint else None
        with self._stalling():
            if (background := self.in_background) is not None:
                asked = self._copied(background, checkpoint, path, storage_options, marks, is_new)
            else:
                asked = _Asked(path, storage_options, _kept(checkpoint, until_later=self.saves.is_deferring), marks)
        if asked is not None:
            self.saves.asked(os.fspath(path))
            self._asked.append(asked)
        if not self.saves.is_deferring:
            self.complete()  # the user's code may read it next

    @property
    def _optimizers(self) -> list[Optimizer]:
        return [plain_optimizer(optimizer) for optimizer in self.module.trainer.optimizers]

    @property
    def saves(self) -> Consequences:
        """What notes the consequences of checkpoints that are asked for now."""
        return self.in_background or self._together

    @property
    def noted(self) -> list[Action]:
        """What follows from checkpoints that were asked for and are not known to be complete."""
        return [*self._together.noted, *(() if self.background is None else self.background.noted)]

    @contextmanager
    def deferring(self) -> Iterator[Consequences]:
        """Within the block checkpoints are asked for; they are written, and what follows is taken up, at the next
        boundary, or right after the block where none comes.
        """
        with self.saves.deferring():
            yield self.saves
        if not self.is_training:
            self.complete()

    @contextmanager
    def at_boundary(self, boundary: Boundary) -> Iterator[None]:
        """Checkpoints that were asked for, or are within the block, are completed as of ``boundary``, and written."""
        self._boundary = boundary
        yield
        self._write(boundary)
        self._boundary = None

    def _write(self, boundary: Boundary | None) -> None:
        """Writes what was asked for; ``boundary``: where the training is, if it is at one."""
        asked, self._asked = self._asked, []
        with self._stalling():
            if asked or self._together.noted:
                common: Callable[[], dict[str, Any]] = dict
                if any(one.marks is not None for one in asked):
                    state = self._common_state(asked, boundary)  # on all workers, as it may wait for them
                    if any(one.batch is None or one.batch.group.is_leader for one in asked):
                        common = frozen(state)
                for one in asked:
                    (self._mid_step.discard if boundary else self._mid_step.add)(os.fspath(one.path))
                self._write_together([one for one in asked if one.batch is None], common)
                self._write_in_background([one for one in asked if one.batch is not None], common)
            if self.background is not None:
                self.background.seal(mid_step=boundary is None)
                self.background.await_originals()

    def _common_state(self, asked: Sequence[_Asked], boundary: Boundary | None) -> dict[str, Any]:
        """The part of what completes a checkpoint that all workers have in common."""
        follows = [
            [action.name, list(action.paths), list(map(os.fspath, action.arguments))]
            for action in self.noted
            if action.name in self._on_files
        ]
        return {
            "boundary": boundary and boundary.value,
            "run": self.context.run.name,
            "step": self.executor.version,
            "asked": [[os.fspath(one.path), one.marks is None] for one in asked],
            "resumed_from": self.module.trainer.ckpt_path and os.fspath(self.module.trainer.ckpt_path),
            "saves": self.records(),
            "follows": follows,
            **self.transfer.common_state(),
        }

    def _completion(self, marks: StateMarks | None) -> dict[str, Any] | None:
        """This stage's part of what completes a checkpoint; no copy."""
        if marks is None:
            return None
        changes, left = marks.changes(), self.transfer.left_gradients()
        named = parameters_by_name(self.module).items()
        owned = {self.copies.get((self._stage, name), name): left[p] for name, p in named if p in left}
        return {**changes, "gradients": owned}

    def _write_together(self, asked: Sequence[_Asked], common: Callable[[], dict[str, Any]]) -> None:
        """All workers write ``asked``, and take up what follows."""
        failures: dict[str, WriteFailure] = {}
        for one in asked:
            checkpoint = one.content()
            if one.marks is not None:
                part = self._completion(one.marks)
                checkpoint[COMPLETION] = common()
                add_parts(checkpoint, self.collectives.gather_stages("completion", partial(to_cpu, part)))
                if self.context.run.may_restart:
                    packs = self.collectives.gather_columns("objects", self.transfer.pack_objects)
                    checkpoint[COMPLETION]["objects"] = [as_tensors(pack) for pack in packs]
            failure = self._save_together(checkpoint, one.path, one.storage_options)
            if failure is not None:
                failures[os.fspath(one.path)] = failure
        self._together.settle(failures)
        for failure in failures.values():
            self._not_written(failure)
        if asked and self.interval is not None and not self.collectives.client.joining:
            self._follow(list(self.collectives.gather_all("interval", self._measured(0.0)).values()))

    def _save_together(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None) -> WriteFailure | None:
        if self.sharded:
            return self._save_sharded(checkpoint, path)

        def write() -> None:
            weights = {kind: checkpoint[kind] for kind in _WEIGHTS if kind in checkpoint}  # this stage's on its device
            self._save_file({**checkpoint, **to_cpu(weights, copies=False)}, path, storage_options)

        return self.collectives.by_leader("checkpoint", partial(attempt, write, path, checkpoint))  # type: ignore[no-any-return]

    def is_asked(self, path: Any) -> bool:
        """Whether a checkpoint at ``path`` is asked for and not written yet."""
        return any(os.fspath(one.path) == os.fspath(path) for one in self._asked)

    def has(self, path: Any, list_folder: Callable[[str], Iterable[str]]) -> bool:
        """Whether there is something at ``path``, the same on all workers. Where no worker waits for others, they know
        it from the names that the leader has seen in its folder once, and from what was saved and removed since then.
        """
        assert self.background is not None
        folder, name = os.path.split(path)
        if folder not in self.background.names:
            found = [os.path.basename(path) for path in list_folder(folder)]
            self.background.names[folder] = set(self.collectives.broadcast(found))
        return name in self.background.names[folder]

    def _is_new(self, path: Any) -> bool:
        """Whether it is known that there is nothing at ``path``."""
        folder, name = os.path.split(path)
        return self.background is not None and name not in self.background.names.get(folder, {name})

    def _exists(self, path: Any, exists: bool = True) -> None:
        folder, name = os.path.split(path)
        if self.background is not None and (names := self.background.names.get(folder)) is not None:
            (names.add if exists else names.discard)(name)

    def link(self, target: str, path: str) -> None:
        """Makes the checkpoint ``path`` a link to the one at ``target``; as :meth:`save` if the file system refuses."""
        if os.path.abspath(target) == os.path.abspath(path):
            return
        self._exists(path)
        if self.saves.is_deferring:
            self.saves.asked(target)
            self.saves.follow("link", target, path)
            return
        make_link = partial(attempt, partial(link, target, path), path, None)
        if (failure := self.collectives.by_leader("checkpoint", make_link)) is not None:
            self._not_written(failure)

    def remove(self, path: Any) -> None:
        """The leader deletes a checkpoint that is not wanted any more."""
        self._exists(path, exists=False)
        if self.saves.is_deferring:
            self.saves.follow("remove", os.fspath(path))
            return
        if not self.collectives.is_leader:
            return
        try:
            self._delete(path)
        except OSError as error:
            if self.raises:
                raise CheckpointError(f"The old checkpoint {path} could not be deleted: {error}.") from error
            log.warning("The old checkpoint %s could not be deleted and stays: %s.", path, error)

    def _discard(self, path: str) -> None:
        """Deletes a new checkpoint that was given up, if its writer came to give it its name where nothing asks first:
        on other file systems than this machine's, and by a CheckpointIO of the user's.
        """
        try:
            if get_filesystem(path).exists(path):
                self._delete(path)
        except OSError as error:
            log.warning("The checkpoint %s was given up, could not be deleted and stays: %s.", path, error)

    def _delete(self, path: Any) -> None:
        if self.sharded and (local := local_path(path)) is not None:
            remove(local)
        else:
            self.module.trainer.strategy.checkpoint_io.remove_checkpoint(path)

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """Within the block a checkpoint that could not be written is a :class:`CheckpointError`, on all workers."""
        before, self._unwinding = self._unwinding, True
        try:
            yield
        finally:
            self._unwinding = before

    def _save_file(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None, batch: Batch | None = None
    ) -> None:
        """Writes a file of the whole model; in the background if it is of a ``batch``."""
        version = self.executor.version if batch is None else batch.version
        confirm = self.collectives.confirm if batch is None else batch.group.confirm
        self.reach("checkpoint", version)
        confirm()
        plugin = self.module.trainer.strategy.checkpoint_io
        if batch is not None and isinstance(plugin, AsyncCheckpointIO):  # this thread knows when it is complete
            assert plugin.checkpoint_io is not None
            plugin = plugin.checkpoint_io
        if isinstance(plugin, WholeCheckpointIO):
            pace = None if batch is None or batch.copies.are_originals else batch.group.pace
            plugin.save_checkpoint(checkpoint, path, storage_options, confirm, pace)
        else:
            plugin.save_checkpoint(checkpoint, path, storage_options=storage_options)
        if batch is None:
            self._saved(path, "optimizer_states" not in checkpoint)

    def _saved(self, path: Any, weights_only: bool) -> None:
        """This worker has given a checkpoint its name for which all wait."""
        name = os.fspath(path)
        facts = (self.executor.version, self.stall_seconds, weights_only, name in self._mid_step)
        self.collectives.client.send(Saved(self.collectives.rank, name, *facts))

    def _save_sharded(self, checkpoint: dict[str, Any], path: Any) -> WriteFailure | None:
        weights = {kind: checkpoint.pop(kind) for kind in ("state_dict", *_FURTHER_WEIGHTS) if kind in checkpoint}
        weights_only = "optimizer_states" not in checkpoint
        shard = self._shard(self._own_weights(weights), checkpoint.pop("optimizer_states", []))
        outcome = self._save_folder(path, shard, checkpoint, self.collectives, self.executor.version)
        if outcome is True:
            self._saved(path, weights_only)
        return outcome if isinstance(outcome, WriteFailure) else None

    def _save_folder(
        self, path: Any, shard: dict[str, Any], rest: dict[str, Any], writers: Writers, version: int
    ) -> bool | WriteFailure:
        def before_naming(temporary: Path | None) -> None:
            self.reach("checkpoint", version)
            writers.confirm(temporary)

        return save_sharded(path, shard, rest, writers, before_naming)

    def _own_weights(self, weights: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Of ``weights``, by kind, those that this stage writes."""
        return {kind: {n: v for n, v in part.items() if self.parts.writes(n)} for kind, part in weights.items()}

    def _shard(self, weights: Mapping[str, Any], optimizers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """This stage's part of a folder."""
        shard = {**weights, **{f"optimizer_{index}": state for index, state in enumerate(optimizers)}}
        if self._stage > 0:  # these are the same for all stages
            same = ("param_groups", "others")
            shard = {name: {k: v for k, v in part.items() if k not in same} for name, part in shard.items()}
        return shard

    # ------------------------------------------------------------------ saving while the training goes on

    def begin_batch(self) -> bool:
        """Takes up what follows from the checkpoints before; whether one may be asked for now. All workers call it."""
        background = self.in_background
        if background is None:
            return True
        with self._stalling():
            return self._begun(background) is not None

    def _begun(self, background: BackgroundSaves) -> Batch | None:
        version = self.executor.version
        batch = background.begin(version)
        if batch is None:
            busy = f"A checkpoint after {version} steps is left out: the one before is still being written."
            self._not_written(WriteFailure(busy, is_refusal=False))
        return batch

    def take_up(self) -> None:
        """Called after a step; see :meth:`BackgroundSaves.take_up`."""
        if (background := self.in_background) is not None:
            with self._stalling():
                background.take_up()

    def complete(self) -> None:
        """Waits for checkpoints that were asked for, and takes up what follows from them; all workers call it."""
        self._write(self._boundary)
        if (background := self.in_background) is not None:
            with self._stalling():
                background.complete()

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """All wait for the checkpoints that are asked for within the block."""
        self.complete()
        with self._waiting():
            yield
            self.complete()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """The last epoch is over: checkpoints that were lost are saved. The block has the hooks that follow."""
        with self.at_boundary(Boundary.EPOCH):
            with self.waited_for():
                self.ask_again()
            yield

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        before, self.is_training = self.is_training, False
        try:
            yield
        finally:
            self.is_training = before

    @contextmanager
    def _stalling(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.stall_seconds += time.perf_counter() - began

    def end_training(self) -> None:
        """The training is over: nothing is written in the background any more."""
        with self.at_boundary(Boundary.EPOCH), self.waited_for():
            self.ask_again()
        self.is_training = False

    def _copied(
        self,
        background: BackgroundSaves,
        checkpoint: dict[str, Any],
        path: Any,
        storage_options: Any | None,
        marks: StateMarks | None,
        is_new: bool,
    ) -> _Asked | None:
        """A checkpoint with a copy of this stage's part, if this worker holds one; None if it is left out."""
        batch = self._begun(background)
        if batch is None:
            return None
        if not batch.group.is_column_leader:
            return _Asked(path, storage_options, dict, marks, batch, is_new=is_new)
        part = self._part(batch.copies, checkpoint)
        content = frozen(checkpoint) if batch.group.is_leader else dict
        return _Asked(path, storage_options, content, marks, batch, part, is_new)

    def _write_in_background(self, asked: Sequence[_Asked], common: Callable[[], dict[str, Any]]) -> None:
        """Has this worker's thread write its part of ``asked``."""
        objects: list[Any] | None = None
        for one in asked:
            batch, write = one.batch, None
            assert batch is not None
            if one.part is not None:
                completion = batch.copies.take(self._completion(one.marks), ("completion",))
                if completion is not None and self.context.run.may_restart:
                    if objects is None:
                        data, *tensors = as_tensors(self.transfer.pack_objects())
                        objects = [data, *batch.copies.take(tensors)]
                    completion["objects"] = objects
                part = replace(one.part, completion=completion)
                content = partial(_completed, one.content, None if completion is None else common)
                of_stages = self._written_by_stage if self.sharded else self._written_by_leader
                write = partial(of_stages, batch, part, content, one.path, one.storage_options)
            batch.requests.append(SaveRequest(os.fspath(one.path), write, one.marks is None, one.is_new))

    def _limit(self, copies: StateCopies, state: Any) -> None:
        """Has ``copies`` of ``state`` made only if there is memory for them."""
        trainer = self.module.trainer
        holders = min(self.collectives.grid.stages, trainer.num_devices)
        needed, free = storage_bytes(tree_leaves(state)), free_bytes(trainer.num_devices) / holders
        if not copies.limit(needed, free):
            log.warning(
                "Worker %s: the training waits for a checkpoint, as there is no memory for a copy of the state: %s, and"
                " %s free for each of %d copies.",
                *(self.collectives.worker, megabytes(needed), megabytes(max(free, 0)), holders),
            )

    def _part(self, copies: StateCopies, checkpoint: dict[str, Any]) -> _StagePart:
        """A copy of this stage's part, which is taken out of ``checkpoint``."""
        kinds = [kind for kind in ("state_dict", *_FURTHER_WEIGHTS) if kind in checkpoint]
        weights = {kind: checkpoint[kind] for kind in kinds}
        if self.sharded:
            weights = self._own_weights(weights)
        states, only_step = checkpoint.get("optimizer_states", []), self.module.automatic_optimization
        checkpoint.update({name: None for name in (*kinds, "optimizer_states") if name in checkpoint})
        self._limit(copies, (weights, states))
        return _StagePart(
            copies.take(weights, ("weights",)),
            [copies.take(state, ("optimizer", index), only_step) for index, state in enumerate(states)],
            [group_names(self.module, optimizer) for optimizer in self._optimizers[: len(states)]],
            dict(self.copies),
        )

    def _written_by_leader(
        self, batch: Batch, part: _StagePart, content: Callable[[], dict[str, Any]], path: Any, storage_options: Any
    ) -> WriteFailure | None:
        group, rest = batch.group, content()
        if not group.is_leader:
            group.send(part)
            return None
        received: list[Any] = []

        def write() -> None:
            own = self.collectives.rank
            parts = [part if rank == own else group.receive(rank, path) for rank in group.ranks]
            received.extend((one.weights, one.states) for one in parts)
            for kind in part.weights:
                rest[kind] = {name: value for one in parts for name, value in one.weights[kind].items()}
            if "optimizer_states" in rest:
                states = zip(*(one.states for one in parts), strict=True)
                names = zip(*(one.names for one in parts), strict=True)
                rest["optimizer_states"] = [
                    merge_optimizer_states(of_stages, of_names, part.copies)
                    for of_stages, of_names in zip(states, names, strict=True)
                ]
            add_parts(rest, [one.completion for one in parts])
            self._save_file(rest, path, storage_options, batch)

        failure = attempt(write, path, received)
        if failure is not None:
            group.fail(failure.text)
        return failure

    def _written_by_stage(
        self, batch: Batch, part: _StagePart, content: Callable[[], dict[str, Any]], path: Any, storage_options: Any
    ) -> WriteFailure | None:
        group, rest = batch.group, content()
        told = group.gather_all("names and completions", (part.names, part.completion))
        names, completions = zip(*(told[rank] for rank in group.ranks), strict=True)
        states = [
            stage_optimizer_state(state, [of_stage[n] for of_stage in names], part.copies, self._stage)
            for n, state in enumerate(part.states)
        ]
        kept = {name: value for name, value in rest.items() if name not in (*part.weights, "optimizer_states")}
        add_parts(kept, completions)
        outcome = self._save_folder(path, self._shard(part.weights, states), kept, group, batch.version)
        return outcome if isinstance(outcome, WriteFailure) else None

    # ------------------------------------------------------------------ how often

    def begin_training(self) -> None:
        """The training begins; until it ends, checkpoints may be written while it goes on."""
        self.is_training = True
        if self.background is not None:
            reset_peak(torch.device("cpu"))  # a checkpoint that was read may have taken more than training does
        if self.interval is not None:
            self.interval.begin(self.module.trainer.global_step)

    def load_interval(self, state: Mapping[str, float] | None) -> None:
        """Takes over what decides how often to save, from a checkpoint or a peer."""
        if self.interval is not None and state is not None:
            self.interval.load(state, of_peer=self.collectives.client.joining)
            if self.interval.steps:
                self.save_every(self.interval.steps)

    def _measured(self, writing: float) -> SaveFacts:
        assert self.interval is not None
        return self.interval.facts(self.stall_seconds - self._counted_stall, writing, self.module.trainer.global_step)

    def _follow(self, facts: list[SaveFacts]) -> None:
        assert self.interval is not None
        self._counted_stall = self.stall_seconds
        steps, why = steps_between_saves(facts, self.collectives.positions.num_workers)
        if self.save_every(steps):
            self.interval.steps = steps
            if self.collectives.is_leader:
                log.info("From now on a checkpoint is saved every %d steps: %s.", steps, why)

    def _not_completed(self, failures: Mapping[str, WriteFailure]) -> None:
        """All know that checkpoints of the background were not written."""
        for failure in failures.values():
            self._not_written(failure)

    def _not_written(self, failure: WriteFailure) -> None:
        if self.background is not None:
            self.background.names.clear()  # there may be an earlier one of that name
        if self.raises and failure.is_refusal:
            raise CheckpointError(
                f"{failure.text} {failure.remedy}{' ' if failure.remedy else ''}With"
                " CheckpointOptions(on_checkpoint_error='warn') the training goes on without this one."
            )
        if self.collectives.is_leader:
            goes_on = "What was there before is unchanged, and the training goes on."
            log.warning("%s", " ".join(filter(None, (failure.text, goes_on, failure.remedy))))
        if self._unwinding:
            raise CheckpointError(failure.text)

    def deliver_result(self, part: Callable[[], Any], extras: Callable[[], Any]) -> None:
        """Delivers the result: of each stage and member its ``part()``, with the leader's ``extras()``."""
        positions, rank = self.collectives.positions, self.collectives.rank
        while True:
            result = None
            leads = self.collectives.is_leader
            is_leaders = positions.column(rank) == positions.column(self.collectives.leader)
            if leads or (self.collectives.is_column_leader and not is_leaders):
                result = (part(), extras() if leads else None)
            delivered = self.collectives.gather_all(RESULT, result)
            if {positions.column(rank) for rank, yes in delivered.items() if yes} == set(range(positions.columns)):
                return
