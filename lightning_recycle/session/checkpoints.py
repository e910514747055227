"""The state of the whole model out of that of its stages, and back: checkpoints, and the results of a run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.optim import Optimizer
from typing_extensions import override

from lightning_recycle.control.protocol.messages import Saved
from lightning_recycle.control.protocol.state import RESULT, stage_leads
from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.model.module import PipelineModule
from lightning_recycle.runtime.ties import TieExchange
from lightning_recycle.session.collectives import CollectiveStrategy
from lightning_recycle.session.optimizer_states import (
    merge_optimizer_states,
    parameter_numbers,
    split_optimizer_state,
    stage_optimizer_state,
    to_cpu,
)
from lightning_recycle.session.sharded import is_sharded, load_sharded, save_sharded

__all__ = ["CheckpointingStrategy"]

log = logging.getLogger(__name__)


class CheckpointingStrategy(CollectiveStrategy):
    """A strategy whose checkpoints have no trace of the grid.

    Args:
        save_distributed_checkpoint: write folders, to which each stage writes its own part.
        kwargs: of the parent.
    """

    def __init__(self, save_distributed_checkpoint: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.save_distributed_checkpoint = save_distributed_checkpoint
        self.interrupted = False
        """In the launching process: whether the last run failed, or has not ended."""
        self.weights_only: bool | None = None
        """As given to the entry point of the Trainer that is running."""
        self._absent: frozenset[int] = frozenset()
        self._restored_steps = 0
        self._ties = TieExchange()

    # ------------------------------------------------------------------ state

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state dict of the whole model, on every worker; of the stage where checkpoints are sharded."""
        assert self.lightning_module is not None
        if self.save_distributed_checkpoint or self._context is None:
            return self.lightning_module.state_dict()
        return self.whole_state()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer state of the whole model, parameters numbered in the order of the layers; where checkpoints are
        sharded, of the stage, with the same numbers.
        """
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        if self.save_distributed_checkpoint:
            return stage_optimizer_state(
                optimizer.state_dict(), self._all_parameter_names(optimizer), self._ties.copies, self.worker.stage
            )
        parts = self._gather_stages(
            "optimizer state", lambda: (to_cpu(optimizer.state_dict()), self._parameter_names(optimizer))
        )
        return merge_optimizer_states([part for part, _ in parts], [names for _, names in parts], self._ties.copies)

    def whole_state(self) -> dict[str, Any]:
        """The state dict of the whole model, on every worker."""
        assert self.lightning_module is not None
        module = self.lightning_module
        merged: dict[str, Any] = {}
        for part in self._gather_stages("model state", lambda: to_cpu(module.state_dict())):
            merged.update(part)
        return merged

    def _all_parameter_names(self, optimizer: Optimizer) -> list[list[list[str]]]:
        """As :meth:`_parameter_names`, by stage."""
        return self._gather_stages("names of parameters", lambda: self._parameter_names(optimizer))

    def _parameter_names(self, optimizer: Optimizer) -> list[list[str]]:
        """The names of the optimizer's parameters, by group."""
        assert self.lightning_module is not None
        names = {id(parameter): name for name, parameter in self.lightning_module.named_parameters()}
        return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]

    # ------------------------------------------------------------------ loading

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if weights_only is None:
            weights_only = self.weights_only  # Lightning 2.6 forgets it where checkpoints are restored after setup
        if is_sharded(checkpoint_path):
            checkpoint = self._load_sharded(checkpoint_path)
        else:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._restored_steps = int(checkpoint.get("global_step", 0))  # randomness is numbered by the step
        return checkpoint

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # each worker keeps its stage only

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads this stage's part of a checkpoint of the whole model."""
        module = self.lightning_module
        assert isinstance(module, PipelineModule)
        owned = set(module.state_dict())
        others = {key for key in checkpoint["state_dict"] if key not in owned and _layer_of(key) in self._absent}
        module.load_state_dict(
            {key: value for key, value in checkpoint["state_dict"].items() if key not in others}, strict=strict
        )

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads this stage's part of the optimizer state of a checkpoint of the whole model."""
        for optimizer, whole in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            names = self._all_parameter_names(optimizer)
            optimizer.load_state_dict(split_optimizer_state(whole, names, self._ties.copies, self.worker.stage))

    def _load_sharded(self, path: Any) -> dict[str, Any]:
        """This worker's part of a sharded checkpoint."""
        assert self.lightning_module is not None
        wanted = {f"model.{name}" for name in self.lightning_module.state_dict()}
        wanted |= {f"state_dict.{name}" for name in self.lightning_module.state_dict()}
        states: list[str] = []
        for index, optimizer in enumerate(self.optimizers):
            names = self._all_parameter_names(optimizer)
            mine = parameter_numbers(names, self._ties.copies, self.worker.stage)
            states += [f"optimizer_{index}.param_groups", *(f"optimizer_{index}.state.{number}." for number in mine)]
        return load_sharded(path, lambda key: key in wanted or key.startswith(tuple(states)))

    # ------------------------------------------------------------------ saving

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """The leader writes, or a worker of each stage; if one dies before it is done, a peer does."""
        if self._context is None:
            self._save_in_launching_process(checkpoint, filepath, storage_options)
            return
        if self.save_distributed_checkpoint:
            self._save_sharded(checkpoint, filepath)
            return
        while True:
            wrote = False
            if self.is_global_zero:
                step = self.executor.version if self.executor is not None else 0
                self._reach("checkpoint", step)
                self._context.client.confirm()
                self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
                wrote = True
                self._context.client.send(Saved(self.global_rank, os.fspath(filepath), step))
            if any(self._gather("checkpoint", wrote).values()):
                return

    def _save_in_launching_process(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        if self.interrupted:
            log.warning(
                "%s is not written: the run failed, and its newest weights were those of the workers.", filepath
            )
        elif "optimizer_states" in checkpoint:
            raise UnsupportedFeatureError(
                f"trainer.save_checkpoint({os.fspath(filepath)!r}) was called in the launching process, which has the"
                " weights but not the optimizer's state: that is gone with the workers. Use"
                " trainer.save_checkpoint(..., weights_only=True), or a ModelCheckpoint callback."
            )
        else:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def _save_sharded(self, checkpoint: dict[str, Any], filepath: Any) -> None:
        assert self._context is not None
        client, step = self._context.client, self.executor.version if self.executor is not None else 0
        shard = {"model": checkpoint.pop("state_dict")}
        for index, state in enumerate(checkpoint.pop("optimizer_states", [])):
            shard[f"optimizer_{index}"] = state
        if self.worker.stage > 0:  # the groups are the same for all stages
            shard = {name: {k: v for k, v in part.items() if k != "param_groups"} for name, part in shard.items()}

        def speaks() -> bool:
            return stage_leads(self.grid, self.live_workers)[self.worker.stage] == self.global_rank

        def before_naming() -> None:
            self._reach("checkpoint", step)
            client.confirm()

        named = save_sharded(
            filepath,
            lambda: shard,
            checkpoint,
            self._gather,
            speaks,
            lambda: self.is_global_zero,
            self.grid.stages,
            before_naming,
        )
        if named:
            client.send(Saved(self.global_rank, os.fspath(filepath), step))

    def deliver_result(self, extras: Callable[[], Any]) -> None:
        """Brings this worker's part of the result to the coordinator: (state dict of the stage, ``extras()`` of
        the leader).
        """
        assert self._context is not None
        assert self.lightning_module is not None
        while True:
            roster = self.live_workers
            part = None
            if stage_leads(self.grid, roster)[self.worker.stage] == self.global_rank:
                is_last = self.worker.stage == self.grid.stages - 1
                part = (to_cpu(self.lightning_module.state_dict()), extras() if is_last else None)
            delivered = self._gather(RESULT, part)
            if {self.grid.worker(rank).stage for rank, yes in delivered.items() if yes} == set(range(self.grid.stages)):
                return


def _layer_of(key: str) -> int:
    """The index of the layer that a name in a state dict belongs to; -1 for none."""
    parts = key.split(".", 2)
    return int(parts[1]) if parts[0] == "layers" and len(parts) > 2 and parts[1].isdigit() else -1
