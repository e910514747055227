"""A worker's state at a step boundary, for replacements and checkpoints.

A donor takes a :class:`WorkerSnapshot` while it waits at the beginning of a step, after its first hooks. The joining
worker restores it twice: it rewinds to right before that batch and begins it itself, and at the point where the donor
waits it takes over the donor's whole state, so nothing that those hooks logged or changed counts twice.

Lightning saves amid the end of a step: its checkpoint lacks later hooks, schedulers that follow a metric, sums of means
over the epoch, and the callbacks' records of this save. So a checkpoint is asked for there, and *completed* at the next
:class:`StepBoundary` with the rest of the state under one key, as plain data, of which only objects and values by layer
depend on the grid. Lightning's keys stay those of one device.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from lightning_recycle.control.protocol.messages import Differs
from lightning_recycle.data.map_style import MicrobatchLoader
from lightning_recycle.model.layers import take_pruned_form, weights_of
from lightning_recycle.randomness import generator_states, set_generator_states
from lightning_recycle.runtime.executor import Executor
from lightning_recycle.session.concurrent_checkpoints import CommonState
from lightning_recycle.session.lightning_internals import TrainerState, read_loaders, states_for_checkpoint
from lightning_recycle.session.microbatch_changes import MicrobatchChangesState
from lightning_recycle.session.object_attributes import is_bound_to_process
from lightning_recycle.session.object_graph import (
    LargeData,
    ObjectPack,
    TrainingParts,
    user_graph,
    weights_by_name,
    weights_for,
)
from lightning_recycle.session.optimizer_states import group_names, trained_by_name, unoptimized_parameters
from lightning_recycle.session.output_recorder import OutputRecorder, metric_states, set_metric_states
from lightning_recycle.session.step_loaders import addressed_loaders
from lightning_recycle.session.worker_context import StopRequests, WorkerContext
from lightning_recycle.tensor_memory import checksum, local_part, memory_address, merge_shards, sharded_like
from lightning_recycle.torch_internals import tree_leaves, version_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSnapshot:
    """The state of one stage, and the state common to all workers.

    ``objects``: the module, callbacks, data module, DataLoaders, optimizers and schedulers, with their contents.
    ``orders``: of each loader of training and validation, the orders of its samples and the state of its sampler.
    ``hook_count``: how often the donor has run collectives of its position in hooks. ``gradients``: by name, if
    anything may see them; of sharded ones the parts. ``generators``: those from which hooks draw. ``values``: recognise
    a copy, by name.
    """

    objects: ObjectPack
    weights: tuple[str, ...]
    precision: dict[str, Any]
    trainer: TrainerState
    orders: tuple[tuple[dict[str, Any], ...], ...]
    stop_agreed: bool
    next_collective: int
    hook_count: int
    saves: CommonState
    microbatch_changes: MicrobatchChangesState
    gradients: dict[str, Tensor]
    generators: tuple[Any, ...]
    values: dict[str, Any]


class WorkerState:
    """Takes and restores a worker's state, for peers and for checkpoints.

    For peers: a donor calls :meth:`snapshot`; the joining worker :meth:`restore`, and :meth:`finish_joining` where the
    donor was.

    Args:
        left_gradients: returns gradients that count for later steps, or that hooks may see.
        describe: returns the values, by name, by which a copy of this worker is recognised.
    """

    def __init__(
        self,
        context: WorkerContext,
        module: pl.LightningModule,
        recorder: OutputRecorder,
        executor: Executor,
        stop_requests: StopRequests,
        left_gradients: Callable[[], Mapping[nn.Parameter, Tensor]],
        describe: Callable[[], dict[str, Any]],
    ) -> None:
        self._context, self._trainer, self._module = context, context.trainer, module
        self._recorder, self._microbatch_changes = recorder, recorder.microbatch_changes
        self._executor, self._stop_requests = executor, stop_requests
        self.left_gradients, self._describe = left_gradients, describe
        self._large_data = LargeData({})
        self._large_when_joining: Mapping[str, Any] = {}  # the large data of this worker when it began to join
        self._donor_snapshot: WorkerSnapshot | None = None

    def begin_training(self, restored: ObjectPack | None) -> None:
        if restored is not None:
            self.load_objects(restored, {})
        if self._context.grid.lanes > 1 or self._context.run.may_restart:
            self._note_objects()

    def _note_objects(self) -> None:
        """Notes the present large data; warns of objects that a replacement makes itself."""
        self._large_data = LargeData(user_graph(self._trainer).large)
        graph = user_graph(self._trainer, TrainingParts(self._trainer))
        if self._context.collectives.is_leader and (stays := graph.unpicklable()):
            log.warning(
                "A worker that replaces a lost one makes these attributes itself, as they cannot be pickled: %s.",
                ", ".join(f"{path} ({kind.__name__})" for path, kind in stays.items()),
            )

    # ------------------------------------------------------------------ checkpoints

    def common_state(self) -> dict[str, Any]:
        """The state that completes a checkpoint on any grid."""
        trainer = self._trainer
        options = [
            [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
            for optimizer in trainer.optimizers
        ]
        states = states_for_checkpoint(trainer)
        return {
            **states,
            "trainer": TrainerState.of(trainer, lambda _: False).as_data(),
            "param_groups": options,
            "metrics": {path: metric_states(metric) for path, metric in self._recorder.metrics_by_path().items()},
            "generators": generators_as_data(),
        }

    def resume(self, state: Mapping[str, Any], boundary: StepBoundary | None, same_run: bool) -> None:
        """Restores from a completion the state that Lightning has not."""
        trainer = self._trainer
        metrics = self._recorder.metrics_by_path()
        for path, states in state["metrics"].items():
            if path in metrics:
                set_metric_states(metrics[path], states)
        restored = TrainerState.of_data(state["trainer"], same_run)
        restored.load(trainer)
        if boundary is not None:
            restored.load_progress(trainer)
            loop: Any = trainer.fit_loop  # of this package, which runs the steps that use this module
            loop.resume_after(boundary, partial(set_generators, state["generators"]))

    def pack_objects(self) -> ObjectPack:
        """The users' objects, for a checkpoint from which the run can begin again."""
        weights = {id(tensor): name for name, tensor in weights_by_name(self._module).items()}
        return user_graph(self._trainer).pack({**self._large_data.unchanged(), **weights}).on_cpu()

    def load_objects(self, objects: ObjectPack, state: Mapping[str, Tensor]) -> None:
        graph, device = user_graph(self._trainer), self._context.device
        tensors = {name: tensor.to(device) for name, tensor in state.items()}
        graph.update(objects, device, {**graph.large, **weights_for(self._module, tensors)})
        self._recorder.find_again()

    # ------------------------------------------------------------------ peers

    def snapshot(self, saves: CommonState) -> WorkerSnapshot:
        """The state of this worker at the beginning of a step; tensors are not copied."""
        trainer, module = self._trainer, self._module
        # Nothing zeroes the gradients of parameters that no optimizer has.
        unoptimized = {p: p.grad for p in unoptimized_parameters(module, trainer.optimizers) if p.grad is not None}
        gradients = {**unoptimized, **self.left_gradients()}
        return WorkerSnapshot(
            objects=user_graph(trainer, TrainingParts(trainer)).pack(self._large_data.unchanged()),
            weights=tuple(weights_of(module)),
            precision=trainer.precision_plugin.state_dict(),
            trainer=TrainerState.of(trainer, is_bound_to_process),
            orders=tuple(tuple(source.joining_state() for source in sources) for sources in self._addressed_loaders()),
            stop_agreed=self._stop_requests.agreed,
            next_collective=self._context.client.member.next_collective,
            hook_count=self._context.client.member.hook_count,
            saves=saves,
            microbatch_changes=self._microbatch_changes.state(),
            gradients={name: local_part(gradients[p]) for name, p in self._trained().items() if p in gradients},
            generators=generator_states(),
            values=self._describe(),
        )

    def _trained(self) -> dict[str, nn.Parameter]:
        return trained_by_name(self._module, self._trainer.optimizers)

    def restore(self, snapshot: WorkerSnapshot) -> None:
        """Rewinds this worker to the beginning of the batch of the donor's step."""
        trainer, member = self._trainer, self._context.client.member
        # Loaders and the hooks of this batch ask all workers something; the others are past that, and this one answers
        # itself until it has come to the step.
        member.is_joining = True
        self._large_when_joining = user_graph(trainer).large
        known_paths = self._large_when_joining.keys()
        if any(path.startswith("val loader ") and path not in known_paths for path in snapshot.objects.unchanged_paths):
            read_loaders(trainer, "val", None)  # the donor has had their data since its sanity check
            self._large_when_joining = user_graph(trainer).large
        training = self._restore_objects(snapshot)
        self._restore_trainer(snapshot)
        training.read_loaders(trainer)
        if training.streams:
            self._restore_objects(snapshot)  # as they were before the user was asked for streams
        self._restore_trainer(snapshot)
        loop: Any = trainer.fit_loop
        loop.enter_mid_epoch(snapshot.trainer.loops["state_dict"])
        for sources, orders in zip(self._addressed_loaders(), snapshot.orders, strict=True):
            for source, order in zip(sources, orders, strict=False):
                source.take_over(order)
        member.next_collective, member.hook_count = snapshot.next_collective, snapshot.hook_count
        self._stop_requests.agreed = snapshot.stop_agreed
        self._microbatch_changes.load_state(snapshot.microbatch_changes)
        self._donor_snapshot = snapshot

    def finish_joining(self) -> CommonState | None:
        """Takes over the donor's state at the point where it took the snapshot.

        Does not return if this worker is still no copy: the others go on without it.
        """
        snapshot, self._donor_snapshot = self._donor_snapshot, None
        if snapshot is None:
            return None
        self._restore_objects(snapshot)
        self._restore_trainer(snapshot)
        self._microbatch_changes.load_state(snapshot.microbatch_changes)
        client, own_values = self._context.client, self._describe()
        if names := [name for name, value in snapshot.values.items() if repr(own_values.get(name)) != repr(value)]:
            cause = f"it does not hold what its peer gave it: {', '.join(names)}"
            client.send(Differs(client.rank, self._executor.version - 1, cause))
            client.resign(cause)
        client.member.is_joining = False
        return snapshot.saves

    def _restore_objects(self, snapshot: WorkerSnapshot) -> TrainingParts:
        trainer, module = self._trainer, self._module
        take_pruned_form(module, snapshot.weights)
        training = TrainingParts(trainer)
        user_graph(trainer, training).update(snapshot.objects, self._context.device, self._large_when_joining)
        training.install_in(trainer)
        self._recorder.find_again()
        return training

    def _restore_trainer(self, snapshot: WorkerSnapshot) -> None:
        """Restores the rest of the donor's state, except for places in streams."""
        trainer = self._trainer
        for name, parameter in self._trained().items():
            grad = snapshot.gradients.get(name)
            parameter.grad = None if grad is None else sharded_like(parameter, grad.clone().to(parameter.device))
        snapshot.trainer.load_progress(trainer)
        trainer.precision_plugin.load_state_dict(snapshot.precision)
        snapshot.trainer.load(trainer)
        set_generator_states(snapshot.generators)

    def _addressed_loaders(self) -> tuple[list[MicrobatchLoader], ...]:
        """The loaders of training, and those of validation, whose samples have addresses."""
        loops = (self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop.val_loop)
        return tuple(addressed_loaders(loop) for loop in loops)


COMPLETION = "lightning_recycle"
"""The key of a checkpoint under which the completion is."""

_BY_NAME = ("weights", "gradients")


class StepBoundary(Enum):
    """Moments of a training at which a step is over."""

    BATCH = "batch"
    """All hooks of the batch have run, and Lightning has logged it."""
    VALIDATION = "validation"
    """So is a validation that was due after the batch, and schedulers that follow a metric of the step."""
    EPOCH = "epoch"
    """So is the epoch, if the batch was its last."""


class StateMarks:
    """Marks of a stage's weights and optimizer states, by which changes are found."""

    def __init__(self, module: pl.LightningModule, optimizers: Sequence[Optimizer], by_value: bool) -> None:
        # By checksums, too, where code of the user's may write through tensor.data, which has no version.
        self._module, self._optimizers, self._by_value = module, optimizers, by_value
        self._weights = self._marks(module.state_dict())
        self._states = [self._marks(state) for state in self._by_name()]

    def changes(self) -> dict[str, Any]:
        """Weights and optimizer states, by name, that have changed since the marks."""
        return {
            "weights": self._changed(self._module.state_dict(), self._weights),
            "optimizers": list(map(self._changed, self._by_name(), self._states)),
        }

    def _changed(self, values: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
        now = self._marks(values)
        changed = {name: value for name, value in values.items() if now[name] != before.get(name)}
        if self._by_value:
            for tensor in tree_leaves(changed):
                if isinstance(tensor, Tensor) and not tensor.is_inference():
                    increment_version(local_part(tensor))  # so that a copy of the old values is not taken for one
        return changed

    def _marks(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: self._marks(value) if isinstance(value, Mapping) else mark_of(value, self._by_value)
            for name, value in values.items()
        }

    def _by_name(self) -> list[dict[str, dict[str, Any]]]:
        found = []
        for optimizer in self._optimizers:
            names = [name for group in group_names(self._module, optimizer) for name in group]
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            pairs = zip(names, parameters, strict=True)
            found.append({name: dict(optimizer.state.get(parameter, {})) for name, parameter in pairs})
        return found


def mark_of(value: Any, by_value: bool = False) -> Any:
    """Address, number of writes, perhaps checksum of ``value``; differ if it changed."""
    if not isinstance(value, Tensor):
        return repr(value)
    part = local_part(value)
    version = None if part.is_inference() else version_of(part)
    return memory_address(part), part.storage_offset(), version, checksum([part]) if by_value else b""


def checkpoint_reader(checkpoint: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
    """A function that returns ``checkpoint`` as it is now, as if read from a file."""
    file = io.BytesIO()
    torch.save(dict(checkpoint), file)

    def load() -> dict[str, Any]:
        file.seek(0)
        content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False)
        return content

    return load


def as_tensors(pack: ObjectPack) -> list[Tensor]:
    """The tensors of ``pack``, behind its pickle: safe to load."""
    return [torch.frombuffer(bytearray(pack.data), dtype=torch.uint8), *pack.tensors]


def add_parts(checkpoint: Mapping[str, Any], columns: Sequence[Mapping[str, Any] | None], members: int) -> None:
    """Adds all columns' parts, ``members`` per stage, to a checkpoint's completion."""
    present = [column for column in columns if column is not None]
    if not present:
        return
    objects = [column["objects"] for column in present if "objects" in column]
    states = [{kind: state for kind, state in column.items() if kind != "objects"} for column in present]
    stages = [merge_shards(states[first : first + members]) for first in range(0, len(states), members)]
    merged: dict[str, Any] = {kind: {n: v for stage in stages for n, v in stage[kind].items()} for kind in _BY_NAME}
    by_optimizer = zip(*(stage["optimizers"] for stage in stages), strict=True)
    merged["optimizers"] = [{n: v for part in states for n, v in part.items()} for states in by_optimizer]
    if objects:
        merged["objects"] = objects
    checkpoint[COMPLETION].update(merged)


def boundary_of(completion: Mapping[str, Any]) -> StepBoundary | None:
    """Where a checkpoint was completed; None if it was in the middle of a step."""
    return completion["boundary"] and StepBoundary(completion["boundary"])


def update_from_completion(
    checkpoint: MutableMapping[str, Any], completion: Mapping[str, Any], further: Iterable[str]
) -> None:
    """Replaces Lightning's values in a checkpoint by newer ones of ``completion``.

    ``further``: the entries with the weights if ``state_dict`` has others.
    """
    checkpoint["loops"]["fit_loop"] = completion["trainer"]["loops"]
    checkpoint["lr_schedulers"], checkpoint["callbacks"] = completion["lr_schedulers"], completion["callbacks"]
    states = checkpoint["optimizer_states"]
    options_of_groups = completion["param_groups"] if states else ()  # a worker that joins reads none of a folder
    for state, groups in zip(states, options_of_groups, strict=True):
        for group, options in zip(state["param_groups"], groups, strict=True):
            group.update(options)
    weights = next((checkpoint[kind] for kind in further if kind in checkpoint), checkpoint["state_dict"])
    weights.update({name: value for name, value in completion["weights"].items() if name in weights})


def generators_as_data() -> tuple[Any, ...]:
    """The states of the generators from which hooks draw, as plain data."""
    python_state, (kind, words, *rest), torch_state = generator_states()
    return python_state, (kind, torch.from_numpy(words.astype(np.int64)), *rest), torch_state


def set_generators(states: tuple[Any, ...]) -> None:
    """Restores what :func:`generators_as_data` returned."""
    python_state, (kind, words, *rest), torch_state = states
    set_generator_states((python_state, (kind, words.numpy().astype(np.uint32), *rest), torch_state))
