"""A worker's state at a step boundary, taken and restored.

A donor takes the snapshot while it waits at the beginning of a step; Lightning's counters then show that the batch of
that step has begun, and its first hooks have run. The worker that joins restores it twice. First it rewinds to right
before that batch and begins it itself, so that hooks find what they expect; when it reaches the point where the donor
waits, it takes over the donor's whole state, so that nothing that those hooks logged or changed counts twice.
What users keep in their objects is carried as one graph
(:mod:`~lightning_recycle.session.object_graph`). Hooks such as ``on_train_epoch_start`` are not called again, as
when Lightning resumes in the middle of an epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn

from lightning_recycle.control.protocol.messages import Differs
from lightning_recycle.data.map_style import MicrobatchLoader
from lightning_recycle.model.weights import weights_of
from lightning_recycle.randomness import generator_states, set_generator_states
from lightning_recycle.runtime.executor.executor import Executor
from lightning_recycle.session.background_saves import CommonState
from lightning_recycle.session.collectives import WorkerContext
from lightning_recycle.session.hook_side_effects import SideEffectState
from lightning_recycle.session.interruption import StopRequests
from lightning_recycle.session.lightning_internals import TrainerState, read_loaders, states_for_checkpoint
from lightning_recycle.session.object_attributes import is_bound_to_process
from lightning_recycle.session.object_graph import (
    LargeData,
    ObjectPack,
    TrainingParts,
    user_graph,
    weights_by_name,
    weights_for,
)
from lightning_recycle.session.optimizer_states import not_optimized, trained_by_name
from lightning_recycle.session.outputs import OutputRecorder, metric_states, set_metric_states
from lightning_recycle.session.step_completion import Boundary, generators_as_data, set_generators
from lightning_recycle.session.step_loaders import addressed_loaders
from lightning_recycle.session.weight_callbacks import take_pruned_form
from lightning_recycle.tensor_memory import local_part, sharded_like

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSnapshot:
    """The state of one stage, and the state common to all workers.

    Args:
        objects: the module of the stage, callbacks, data module, DataLoaders, optimizers and schedulers, with all that
            they hold.
        orders: of each loader of training and validation, the orders of its samples and the state of its sampler.
        hooks: how often the donor has run collectives of its position in hooks.
        gradients: those that parameters hold, by name, if anything may see them; the parts of sharded ones.
        generators: the states of the generators from which hooks draw.
        values: the values by which a copy is recognised, by name.
    """

    objects: ObjectPack
    weights: tuple[str, ...]
    precision: dict[str, Any]
    trainer: TrainerState
    orders: tuple[tuple[dict[str, Any], ...], ...]
    stop_agreed: bool
    next_collective: int
    hooks: int
    saves: CommonState | None
    side_effects: SideEffectState
    gradients: dict[str, Tensor]
    generators: tuple[Any, ...]
    values: dict[str, Any]


class StateTransfer:
    """Transfer of a worker's state to and from peers, and of objects to checkpoints.

    Args:
        left_gradients: returns gradients that count for later steps, or that hooks may see.
        describe: returns the values by which a copy of this worker is recognised, by name.
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
        self._recorder, self._side_effects = recorder, recorder.side_effects
        self._executor, self._stop_requests = executor, stop_requests
        self.left_gradients, self._describe = left_gradients, describe
        self._large_data = LargeData({})
        self._large: Mapping[str, Any] = {}  # the large data of this worker when it began to join
        self._joined_with: WorkerSnapshot | None = None

    def begin_training(self, restored: ObjectPack | None) -> None:
        """Before the first step."""
        if restored is not None:
            self.load_objects(restored, {})
        if self._context.grid.lanes > 1 or self._context.run.may_restart:
            self._note_objects()

    def _note_objects(self) -> None:
        """Notes large data as it is now, and warns of objects that cannot be carried."""
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

    def resume(self, state: Mapping[str, Any], boundary: Boundary | None, same_run: bool) -> None:
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
            loop.go_on(boundary, partial(set_generators, state["generators"]))

    def pack_objects(self) -> ObjectPack:
        """The users' objects, for a checkpoint from which the run can begin again."""
        weights = {id(tensor): name for name, tensor in weights_by_name(self._module).items()}
        return user_graph(self._trainer).pack({**self._large_data.unchanged(), **weights}).on_cpu()

    def load_objects(self, objects: ObjectPack, state: Mapping[str, Tensor]) -> None:
        """The user's objects become what they were."""
        graph, device = user_graph(self._trainer), self._context.device
        given = {name: tensor.to(device) for name, tensor in state.items()}
        graph.update(objects, device, {**graph.large, **weights_for(self._module, given)})
        self._recorder.find_again()

    # ------------------------------------------------------------------ peers

    def take(self, saves: CommonState | None) -> WorkerSnapshot:
        """The state of this worker at the beginning of a step; tensors are not copied."""
        trainer, module = self._trainer, self._module
        # Nothing zeroes the gradients of parameters that no optimizer has.
        beside = {p: p.grad for p in not_optimized(module, trainer.optimizers) if p.grad is not None}
        left = {**beside, **self.left_gradients()}
        return WorkerSnapshot(
            objects=user_graph(trainer, TrainingParts(trainer)).pack(self._large_data.unchanged()),
            weights=tuple(weights_of(module)),
            precision=trainer.precision_plugin.state_dict(),
            trainer=TrainerState.of(trainer, is_bound_to_process),
            orders=tuple(tuple(source.order() for source in sources) for sources in self._addressed()),
            stop_agreed=self._stop_requests.agreed,
            next_collective=self._context.client.member.next_collective,
            hooks=self._context.client.member.hooks,
            saves=saves,
            side_effects=self._side_effects.state(),
            gradients={name: local_part(left[p]) for name, p in self._trained().items() if p in left},
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
        member.joining = True
        self._large = user_graph(trainer).large
        if any(path.startswith("val loader ") and path not in self._large for path in snapshot.objects.same):
            read_loaders(trainer, "val", None)  # the donor has had their data since its sanity check
            self._large = user_graph(trainer).large
        training = self._restore_objects(snapshot)
        self._restore_trainer(snapshot)
        training.read_loaders(trainer)
        if training.streams:
            self._restore_objects(snapshot)  # as they were before the user was asked for streams
        self._restore_trainer(snapshot)
        loop: Any = trainer.fit_loop
        loop.enter_mid_epoch(snapshot.trainer.loops["state_dict"])
        for sources, orders in zip(self._addressed(), snapshot.orders, strict=True):
            for source, order in zip(sources, orders, strict=False):
                source.take_over(order)
        member.next_collective, member.hooks = snapshot.next_collective, snapshot.hooks
        self._stop_requests.agreed = snapshot.stop_agreed
        self._side_effects.load_state(snapshot.side_effects)
        self._joined_with = snapshot

    def complete(self) -> CommonState | None:
        """Takes over the donor's state at the point where it took the snapshot.

        Does not return if this worker is no copy of its donor all the same: then the others go on without it.
        """
        snapshot, self._joined_with = self._joined_with, None
        if snapshot is None:
            return None
        self._restore_objects(snapshot)
        self._restore_trainer(snapshot)
        self._side_effects.load_state(snapshot.side_effects)
        client, mine = self._context.client, self._describe()
        if names := [name for name, value in snapshot.values.items() if repr(mine.get(name)) != repr(value)]:
            cause = f"it does not hold what its peer gave it: {', '.join(names)}"
            client.send(Differs(client.rank, self._executor.version - 1, cause))
            client.resign(cause)
        client.member.joining = False
        return snapshot.saves

    def _restore_objects(self, snapshot: WorkerSnapshot) -> TrainingParts:
        """Restores the donor's objects as they were when it took the snapshot."""
        trainer, module = self._trainer, self._module
        take_pruned_form(module, snapshot.weights)
        training = TrainingParts(trainer)
        user_graph(trainer, training).update(snapshot.objects, self._context.device, self._large)
        training.take_up(trainer)
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

    def _addressed(self) -> tuple[list[MicrobatchLoader], ...]:
        """The loaders of training and validation whose samples have addresses."""
        loops = (self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop.val_loop)
        return tuple(addressed_loaders(loop) for loop in loops)
