"""The state of the whole model from that of its stages, and back: checkpoints, and the results of a run.

A checkpoint holds no trace of the grid.
"""

from __future__ import annotations

import io
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.optim import Optimizer

from lightning_recycle.control.protocol.messages import Saved, SavePhase
from lightning_recycle.control.protocol.state import RESULT
from lightning_recycle.errors import CheckpointError
from lightning_recycle.files import link, remove
from lightning_recycle.model.parts import ModelParts
from lightning_recycle.model.weights import own_parts
from lightning_recycle.runtime.executor.device_memory import free_bytes, reset_peak, storage_bytes
from lightning_recycle.runtime.executor.executor import Executor
from lightning_recycle.session.background_saves import BackgroundSaves, Batch, SaveRequest, StateCopies
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
    group_names,
    merge_optimizer_states,
    parameters_by_name,
    sharded_optimizer_state,
    split_optimizer_state,
    stage_optimizer_state,
)
from lightning_recycle.session.save_interval import SaveFacts, SaveInterval, steps_between_saves
from lightning_recycle.tensor_memory import to_cpu
from lightning_recycle.torch_internals import tree_leaves

if TYPE_CHECKING:
    from lightning_recycle.session.snapshot import StateTransfer

__all__ = ["Checkpoints", "users_save_hook"]

log = logging.getLogger(__name__)

_OBJECTS = "lightning_recycle_objects"

_FURTHER_WEIGHTS = ("current_model_state",)
"""Entries of a checkpoint by parameter, besides ``state_dict``: with WeightAveraging that is the average."""


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
        objects: what users keep in their objects, if it is wanted.
        copies: as in :class:`Checkpoints`, when it was copied.
    """

    weights: dict[str, dict[str, Any]]
    states: list[dict[str, Any]]
    names: list[list[list[str]]]
    objects: list[Any] | None
    copies: Copies


def _freeze(checkpoint: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
    """Returns what returns ``checkpoint``, as it would be read from a file that was written now."""
    file = io.BytesIO()
    torch.save(dict(checkpoint), file)
    file.seek(0)
    return partial(torch.load, file, map_location="cpu", weights_only=False)


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
        restored_objects: if the run begins again, the users' objects, from the checkpoint that was loaded.
        restored_steps: the steps of the checkpoint that was loaded; randomness is numbered by the step.
        ask_again: asks for checkpoints once more that were given up because a worker was lost.
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
    restored_objects: ObjectPack | None = None
    restored_steps: int = 0
    ask_again: Callable[[], None] = lambda: None
    save_every: Callable[[int], bool] = lambda steps: False
    is_training: bool = False
    stall_seconds: float = 0.0
    _unwinding: bool = False
    _counted_stall: float = 0.0
    _weights_only: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        context, wanted = self.context, self.context.options.checkpoints
        self.collectives, self.sharded = context.collectives, wanted.save_distributed_checkpoint
        self.raises = wanted.on_checkpoint_error == "raise"
        self.interval: SaveInterval | None = None
        if wanted.every_n_train_steps is not None:
            self.interval = SaveInterval(lambda: context.client.member.counters.get("failures", 0.0))
        if self.background is not None:
            self.background.on_failures = self._not_completed
            if self.interval is not None:
                self.background.measure, self.background.on_facts = self._measured, self._follow
            self.background.actions["link"] = lambda failure, *paths: None if failure else self.link(*paths)
            self.background.actions["remove"] = lambda failure, path: None if failure else self.remove(path)
            self.background.by_writer.update(link=link, remove=self._delete)

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
        return state if self.by_stage else self.joined("model state", state)

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
            return optimizer.state_dict()
        if self.sharded:
            return stage_optimizer_state(
                optimizer.state_dict(), self._all_parameter_names(optimizer), self.copies, self._stage
            )
        parts = self.collectives.gather_stages(
            "optimizer state", lambda: (to_cpu(optimizer.state_dict()), group_names(self.module, optimizer))
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
            torch.cuda.empty_cache()
            checkpoint = self.module.trainer.strategy.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        self.restored_steps = int(checkpoint.get("global_step", 0))
        by_column = checkpoint.pop(_OBJECTS, None)
        if by_column is not None and self.context.run.restarts:  # another run may have other stages
            data, *tensors = by_column[self.collectives.positions.column(self.collectives.rank)]
            self.restored_objects = ObjectPack(data.numpy().tobytes(), tensors)
        return checkpoint

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
        for optimizer, whole in zip(self.module.trainer.optimizers, checkpoint["optimizer_states"], strict=True):
            names = self._all_parameter_names(optimizer)
            state = split_optimizer_state(whole, names, self.copies, self._stage)
            optimizer.load_state_dict(sharded_optimizer_state(state, optimizer))

    def _load_sharded(self, path: Any) -> dict[str, Any]:
        """This worker's part of a sharded checkpoint; of sharded tensors its shards."""
        kinds = ("state_dict", *_FURTHER_WEIGHTS)
        wanted = {f"{kind}.{name}": value for kind in kinds for name, value in self.module.state_dict().items()}
        optimizers = [] if self.collectives.client.joining else self.module.trainer.optimizers
        for index in range(len(optimizers)):
            wanted[f"optimizer_{index}.param_groups"] = None
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
        self._exists(path)
        self._weights_only.discard(os.fspath(path))
        if "optimizer_states" not in checkpoint:
            self._weights_only.add(os.fspath(path))
        with self._stalling():
            if (background := self.in_background) is not None:
                self._ask(background, checkpoint, path, storage_options)
            else:
                self._save_together(checkpoint, path, storage_options)
        if background is not None and not background.is_deferring:
            self.complete()  # the user's code may read it next
        if background is None and self.interval is not None and not self.collectives.client.joining:
            self._follow(list(self.collectives.gather_all("interval", self._measured(0.0)).values()))

    def _save_together(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None) -> None:
        if self.context.run.may_restart and "optimizer_states" in checkpoint:  # plain tensors, which are safe to load
            objects = self.collectives.gather_columns("objects", self.transfer.pack_objects)
            checkpoint[_OBJECTS] = [
                [torch.frombuffer(bytearray(o.data), dtype=torch.uint8), *o.tensors] for o in objects
            ]
        if self.sharded:
            failure = self._save_sharded(checkpoint, path)
        else:
            write = partial(self._save_file, checkpoint, path, storage_options)
            failure = self.collectives.by_leader("checkpoint", partial(attempt, write, path, checkpoint))
        if failure is not None:
            self._not_written(failure)

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

    def _exists(self, path: Any, exists: bool = True) -> None:
        folder, name = os.path.split(path)
        if self.background is not None and (names := self.background.names.get(folder)) is not None:
            (names.add if exists else names.discard)(name)

    def link(self, target: str, path: str) -> None:
        """Makes the checkpoint ``path`` a link to the one at ``target``; as :meth:`save` if the file system refuses."""
        if os.path.abspath(target) == os.path.abspath(path):
            return
        self._exists(path)
        if self.background is not None and self.background.is_deferring:
            self.background.asked(target)
            self.background.follow("link", target, path)
            return
        make_link = partial(attempt, partial(link, target, path), path, None)
        if (failure := self.collectives.by_leader("checkpoint", make_link)) is not None:
            self._not_written(failure)

    def remove(self, path: Any) -> None:
        """The leader deletes a checkpoint that is not wanted any more."""
        self._exists(path, exists=False)
        if self.background is not None and self.background.is_deferring:
            self.background.follow("remove", os.fspath(path))
            return
        if not self.collectives.is_leader:
            return
        try:
            self._delete(path)
        except OSError as error:
            if self.raises:
                raise CheckpointError(f"The old checkpoint {path} could not be deleted: {error}.") from error
            log.warning("The old checkpoint %s could not be deleted and stays: %s.", path, error)

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
        self._announce(path, version)

    def _announce(self, path: Any, version: int, phase: SavePhase = SavePhase.COMPLETE, why: str = "") -> None:
        facts = (phase, why, self.stall_seconds, os.fspath(path) in self._weights_only)
        saved = Saved(self.collectives.rank, os.fspath(path), version, *facts)
        self.collectives.client.send(saved)

    def _save_sharded(self, checkpoint: dict[str, Any], path: Any) -> WriteFailure | None:
        weights = {kind: checkpoint.pop(kind) for kind in ("state_dict", *_FURTHER_WEIGHTS) if kind in checkpoint}
        shard = self._shard(self._own_weights(weights), checkpoint.pop("optimizer_states", []))
        return self._save_folder(path, shard, checkpoint, self.collectives, self.executor.version)

    def _save_folder(
        self, path: Any, shard: dict[str, Any], rest: dict[str, Any], writers: Writers, version: int
    ) -> WriteFailure | None:
        def before_naming() -> None:
            self.reach("checkpoint", version)
            writers.confirm()

        outcome = save_sharded(path, shard, rest, writers, before_naming)
        if outcome is True:
            self._announce(path, version)
        return outcome if isinstance(outcome, WriteFailure) else None

    def _own_weights(self, weights: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Of ``weights``, by kind, those that this stage writes."""
        return {kind: {n: v for n, v in part.items() if self.parts.writes(n)} for kind, part in weights.items()}

    def _shard(self, weights: Mapping[str, Any], optimizers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """This stage's part of a folder."""
        shard = {**weights, **{f"optimizer_{index}": state for index, state in enumerate(optimizers)}}
        if self._stage > 0:  # the groups are the same for all stages
            shard = {name: {k: v for k, v in part.items() if k != "param_groups"} for name, part in shard.items()}
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
        if (background := self.in_background) is not None:
            with self._stalling():
                background.complete()
            with self._waiting():
                self.ask_again()

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """All wait for the checkpoints that are asked for within the block."""
        self.complete()
        with self._waiting():
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
        self.complete()
        self.is_training = False

    def _ask(self, background: BackgroundSaves, checkpoint: dict[str, Any], path: Any, storage_options: Any) -> None:
        batch = self._begun(background)
        if batch is None:
            return
        group = batch.group
        write = None
        if group.is_column_leader:
            part = self._part(batch.copies, checkpoint)
            rest = _freeze(checkpoint) if group.is_leader else dict
            of_stages = self._written_by_stage if self.sharded else self._written_by_leader
            write = partial(of_stages, batch, part, rest, path, storage_options)
        background.asked(os.fspath(path))
        batch.add(SaveRequest(os.fspath(path), write))
        if write is not None:
            background.await_originals()

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
        goes_on = "optimizer_states" in checkpoint
        states, only_step = checkpoint.get("optimizer_states", []), self.module.automatic_optimization
        checkpoint.update({name: None for name in (*kinds, "optimizer_states") if name in checkpoint})
        optimizers = [plain_optimizer(optimizer) for optimizer in self.module.trainer.optimizers][: len(states)]
        self._limit(copies, (weights, states))
        objects = None
        if self.context.run.may_restart and goes_on:
            pack = self.transfer.pack_objects()
            objects = [torch.frombuffer(bytearray(pack.data), dtype=torch.uint8), *copies.take(list(pack.tensors))]
        return _StagePart(
            copies.take(weights, ("weights",)),
            [copies.take(state, ("optimizer", index), only_step) for index, state in enumerate(states)],
            [group_names(self.module, optimizer) for optimizer in optimizers],
            objects,
            dict(self.copies),
        )

    def _written_by_leader(
        self, batch: Batch, part: _StagePart, frozen: Callable[[], dict[str, Any]], path: Any, storage_options: Any
    ) -> WriteFailure | None:
        group, rest = batch.group, frozen()
        if not group.is_leader:
            group.send(part)
            return None
        content: list[Any] = []

        def write() -> None:
            self._announce(path, batch.version, SavePhase.BEGUN)
            own = self.collectives.rank
            parts = [part if rank == own else group.receive(rank, path) for rank in group.ranks]
            content.extend((one.weights, one.states) for one in parts)
            for kind in part.weights:
                rest[kind] = {name: value for one in parts for name, value in one.weights[kind].items()}
            if "optimizer_states" in rest:
                states = zip(*(one.states for one in parts), strict=True)
                names = zip(*(one.names for one in parts), strict=True)
                rest["optimizer_states"] = [
                    merge_optimizer_states(of_stages, of_names, part.copies)
                    for of_stages, of_names in zip(states, names, strict=True)
                ]
            if part.objects is not None:
                rest[_OBJECTS] = [one.objects for one in parts]
            self._save_file(rest, path, storage_options, batch)

        failure = attempt(write, path, content)
        if failure is not None:
            group.fail(failure.text)
        return failure

    def _written_by_stage(
        self, batch: Batch, part: _StagePart, frozen: Callable[[], dict[str, Any]], path: Any, storage_options: Any
    ) -> WriteFailure | None:
        group, rest = batch.group, frozen()
        if group.is_leader:
            self._announce(path, batch.version, SavePhase.BEGUN)
        told = group.gather_all("names and objects", (part.names, part.objects))
        names, objects = zip(*(told[rank] for rank in group.ranks), strict=True)
        states = [
            stage_optimizer_state(state, [of_stage[n] for of_stage in names], part.copies, self._stage)
            for n, state in enumerate(part.states)
        ]
        kept = {name: value for name, value in rest.items() if name not in (*part.weights, "optimizer_states")}
        if part.objects is not None:
            kept[_OBJECTS] = list(objects)
        return self._save_folder(path, self._shard(part.weights, states), kept, group, batch.version)

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

    def _not_completed(self, version: int, failures: Mapping[str, WriteFailure]) -> None:
        """All know that checkpoints of the background were not written."""
        if self.collectives.is_leader:
            for path, failure in failures.items():
                self._announce(path, version, SavePhase.GIVEN_UP, failure.text)
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
