"""The state of the whole model from that of its stages, and back: checkpoints, and the results of a run.

A checkpoint holds no trace of the grid.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer

from lightning_recycle.control.protocol.messages import Saved
from lightning_recycle.control.protocol.state import RESULT
from lightning_recycle.errors import CheckpointError
from lightning_recycle.files import link, remove
from lightning_recycle.model.parts import ModelParts
from lightning_recycle.model.weights import own_parts
from lightning_recycle.runtime.executor.executor import Executor
from lightning_recycle.session.checkpoint_files import (
    WholeCheckpointIO,
    WriteFailure,
    attempt,
    is_sharded,
    load_sharded,
    local_path,
    save_sharded,
)
from lightning_recycle.session.collectives import WorkerCollectives
from lightning_recycle.session.lightning_internals import plain_optimizer, set_checkpoint_path
from lightning_recycle.session.object_graph import ObjectPack
from lightning_recycle.session.optimizer_states import (
    Copies,
    group_names,
    merge_optimizer_states,
    parameter_numbers,
    sharded_optimizer_state,
    split_optimizer_state,
    stage_optimizer_state,
)
from lightning_recycle.tensor_memory import to_cpu

__all__ = ["Checkpoints"]

log = logging.getLogger(__name__)

_OBJECTS = "lightning_recycle_objects"

_FURTHER_WEIGHTS = ("current_model_state",)
"""Entries of a checkpoint by parameter, besides ``state_dict``: with WeightAveraging that is the average."""


@dataclass
class Checkpoints:
    """A worker's part in saving and loading the state of the whole model.

    Args:
        parts: this worker's part of the module.
        collectives: used to exchange the parts.
        executor: knows the step.
        copies: for the stage and the name of each tied parameter that another stage owns, the owner's name.
        sharded: whether to write folders, to which each stage writes its own part.
        raises: whether a checkpoint that cannot be written ends the run.
        weights_only: the argument of the Trainer's entry point that is running.
        reach: called with "checkpoint" and the step right before one is written.
        objects: if a checkpoint is to hold what users keep in their objects, so that the run can begin again from it:
            returns what this stage has.
        take_objects: if the run begins again: called with what ``objects`` returned, and the state dict, before that is
            loaded.

    Attributes:
        restored_objects: if the run begins again, what ``objects`` returned, from the checkpoint that was loaded.
        restored_steps: the steps of the checkpoint that was loaded; randomness is numbered by the step.
    """

    parts: ModelParts
    collectives: WorkerCollectives
    executor: Executor
    copies: Copies
    sharded: bool
    raises: bool
    weights_only: bool | None
    reach: Callable[[str, int], None]
    objects: Callable[[], ObjectPack] | None
    take_objects: Callable[[ObjectPack, Mapping[str, Any]], None] | None
    restored_objects: ObjectPack | None = None
    restored_steps: int = 0
    _unwinding: bool = False

    @property
    def module(self) -> pl.LightningModule:
        return self.parts.module

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """The state dict for a checkpoint: of the whole model, or of the stage."""
        self.collectives.settle()
        return self.module.state_dict() if self.sharded else self.whole_state()

    def whole_state(self) -> dict[str, Any]:
        """The state dict of the whole model, on every worker."""
        return self.joined("model state", self.module.state_dict())

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
        the stage's, with the same numbers.
        """
        optimizer = plain_optimizer(optimizer)
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
        if weights_only is None:
            weights_only = self.weights_only  # False for a file that this run wrote itself
        path = self._agreed(path)
        if is_sharded(path):
            checkpoint = self._load_sharded(path)
        else:
            torch.cuda.empty_cache()
            checkpoint = self.module.trainer.strategy.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        self.restored_steps = int(checkpoint.get("global_step", 0))
        by_stage = checkpoint.pop(_OBJECTS, None)
        if by_stage is not None and self.take_objects is not None:  # another run may have other stages
            data, *tensors = by_stage[self._stage]
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
        if self.take_objects is not None and self.restored_objects is not None:
            self.take_objects(self.restored_objects, own)
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
        """This worker's part of a sharded checkpoint."""
        kinds = ("model", "state_dict", *_FURTHER_WEIGHTS)
        wanted = {f"{kind}.{name}" for kind in kinds for name in self.module.state_dict()}
        states: list[str] = []
        optimizers = [] if self.collectives.client.joining else self.module.trainer.optimizers
        for index, optimizer in enumerate(optimizers):
            mine = parameter_numbers(self._all_parameter_names(optimizer), self.copies, self._stage)
            states += [f"optimizer_{index}.param_groups", *(f"optimizer_{index}.state.{number}." for number in mine)]
        return load_sharded(path, lambda key: key in wanted or key.startswith(tuple(states)))

    # ------------------------------------------------------------------ saving

    def save(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """The leader writes, or one worker of each stage; if a writer dies before it is done, a peer takes over.

        Raises:
            CheckpointError: on all workers, if the file system refuses, and a checkpoint that is not written ends the
                run, or is to be :meth:`noticed`. Otherwise the leader warns.
        """
        if self.objects is not None:  # plain tensors, which are safe to load
            objects = self.collectives.gather_stages("objects", self.objects)
            checkpoint[_OBJECTS] = [
                [torch.frombuffer(bytearray(o.data), dtype=torch.uint8), *o.tensors] for o in objects
            ]
        if self.sharded:
            failure = self._save_sharded(checkpoint, path)
        else:
            failure = self._by_the_leader(path, checkpoint, lambda: self._save_file(checkpoint, path, storage_options))
        if failure is not None:
            self._not_written(failure)

    def link(self, target: str, path: str) -> None:
        """Makes the checkpoint ``path`` a link to the one at ``target``; as :meth:`save` if the file system refuses."""
        if os.path.abspath(target) == os.path.abspath(path):
            return
        if (failure := self._by_the_leader(path, None, lambda: link(target, path))) is not None:
            self._not_written(failure)

    def remove(self, path: Any) -> None:
        """The leader deletes a checkpoint that is not wanted any more."""
        if not self.collectives.leads:
            return
        try:
            if self.sharded and (local := local_path(path)) is not None:
                remove(local)
            else:
                self.module.trainer.strategy.checkpoint_io.remove_checkpoint(path)
        except OSError as error:
            if self.raises:
                raise CheckpointError(f"The old checkpoint {path} could not be deleted: {error}.") from error
            log.warning("The old checkpoint %s could not be deleted and stays: %s.", path, error)

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """Within the block a checkpoint that could not be written is a :class:`CheckpointError`, on all workers."""
        before, self._unwinding = self._unwinding, True
        try:
            yield
        finally:
            self._unwinding = before

    def _by_the_leader(self, path: Any, content: Any, action: Callable[[], None]) -> WriteFailure | None:
        """The leader does it, and all learn of the outcome; if it dies before they do, the next leader does it."""
        while True:
            outcome: bool | WriteFailure | None = None
            if self.collectives.leads:
                outcome = attempt(action, path, content) or True
            outcomes = self.collectives.gather_all("checkpoint", outcome).values()
            known = [part for part in outcomes if part is not None]  # of one worker: only one leads
            if known:
                return known[0] if isinstance(known[0], WriteFailure) else None

    def _save_file(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None) -> None:
        self._before_writing()
        io = self.module.trainer.strategy.checkpoint_io
        if isinstance(io, WholeCheckpointIO):
            io.save_checkpoint(checkpoint, path, storage_options, self.collectives.client.confirm)
        else:
            io.save_checkpoint(checkpoint, path, storage_options=storage_options)
        self._announce(path)

    def _before_writing(self) -> None:
        self.reach("checkpoint", self.executor.version)
        self.collectives.client.confirm()

    def _announce(self, path: Any) -> None:
        self.collectives.client.send(Saved(self.collectives.rank, os.fspath(path), self.executor.version))

    def _save_sharded(self, checkpoint: dict[str, Any], path: Any) -> WriteFailure | None:
        shard = {"model": checkpoint.pop("state_dict")}
        shard |= {kind: checkpoint.pop(kind) for kind in _FURTHER_WEIGHTS if kind in checkpoint}
        shard = {kind: {n: v for n, v in part.items() if self.parts.writes(n)} for kind, part in shard.items()}
        for index, state in enumerate(checkpoint.pop("optimizer_states", [])):
            shard[f"optimizer_{index}"] = state
        if self._stage > 0:  # the groups are the same for all stages
            shard = {name: {k: v for k, v in part.items() if k != "param_groups"} for name, part in shard.items()}
        outcome = save_sharded(path, shard, checkpoint, self.collectives, self._before_writing)
        if isinstance(outcome, WriteFailure):
            return outcome
        if outcome:
            self._announce(path)
        return None

    def _not_written(self, failure: WriteFailure) -> None:
        if self.raises:
            raise CheckpointError(
                f"{failure.text} Free some space, or keep fewer checkpoints (save_top_k); with"
                " CheckpointOptions(on_checkpoint_error='warn') the training goes on without this one."
            )
        if self.collectives.leads:
            log.warning(
                "%s What was there before is unchanged, and the training goes on. Free some space, or keep fewer"
                " checkpoints (save_top_k).",
                failure.text,
            )
        if self._unwinding:
            raise CheckpointError(failure.text)

    def deliver_result(self, part: Callable[[], Any], extras: Callable[[], Any]) -> None:
        """Delivers the result: of each stage and member its ``part()``, with the leader's ``extras()``."""
        positions, rank = self.collectives.positions, self.collectives.rank
        while True:
            result = None
            leads = self.collectives.leads
            is_leaders = positions.column(rank) == positions.column(self.collectives.leader)
            if leads or (self.collectives.speaks and not is_leaders):
                result = (part(), extras() if leads else None)
            delivered = self.collectives.gather_all(RESULT, result)
            if {positions.column(rank) for rank, yes in delivered.items() if yes} == set(range(positions.columns)):
                return
