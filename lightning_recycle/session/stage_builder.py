"""Construction of the stage of one worker: layers, optimizers, stage bundle and executor."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_recycle.control.client import ControlClient
from lightning_recycle.control.protocol.messages import Cuts
from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.model.parts import ModelParts
from lightning_recycle.planning.cuts import are_whole, bounds_of, held_ranges
from lightning_recycle.planning.grid import Grid, Worker
from lightning_recycle.randomness import derive_seed, seeded_everything
from lightning_recycle.runtime.comm.communicator import Communicator
from lightning_recycle.runtime.executor.executor import Executor
from lightning_recycle.runtime.executor.executor_callbacks import ExecutorCallbacks
from lightning_recycle.runtime.executor.speculative_commit import CommitRules
from lightning_recycle.runtime.executor.step_measurements import StepMeasurements
from lightning_recycle.runtime.executor.step_runner import StepRunner
from lightning_recycle.runtime.executor.whole_steps import WholeStepRunner
from lightning_recycle.runtime.nccl.nccl_transport import transport_for
from lightning_recycle.runtime.stage.gradients import GradientBuffers
from lightning_recycle.runtime.stage.stage import Stage
from lightning_recycle.runtime.stage.stage_bundle import StageBundle, StageTies
from lightning_recycle.session.collectives import WorkerContext
from lightning_recycle.session.commit_requirements import commit_requirements, may_change_gradients, scaler_of
from lightning_recycle.session.manual_steps import ManualSteps
from lightning_recycle.session.microbatch_state import ManualStepState
from lightning_recycle.session.optimizer_states import check_parameters, trained_by_name
from lightning_recycle.session.outputs import OutputRecorder
from lightning_recycle.session.requirements import (
    check_graphs,
    check_optimizers,
    check_sharded_layers,
    check_trained,
    several_optimizers_refused,
)
from lightning_recycle.session.stage_layers import StageLayers
from lightning_recycle.session.training_steps import TrainingSteps
from lightning_recycle.session.weight_callbacks import WeightCallbacks, empty_optimizers, has_recipes
from lightning_recycle.tensor_memory import local_part, part_like
from lightning_recycle.torch_internals import buffers_of, parameters_of, replace_tensors


def build_layers(context: WorkerContext, parts: ModelParts, weights: WeightCallbacks) -> None:
    """Builds the layers of this stage, on the device, and their optimizers."""
    trainer, strategy, module = context.trainer, context.trainer.strategy, parts.module
    stage, stages = context.worker.stage, context.grid.stages
    parts.keep(context.run.parts, stage)
    was_built = not has_recipes(module)
    with strategy.precision_plugin.module_init_context():
        parts.build(context.run.parts[stage], context.seed)
    weights.enter_stage(module, was_built)
    strategy.model = strategy.precision_plugin.convert_module(module)
    _materialize(module, context.device, context.seed, parts.is_elsewhere)
    _check_shapes(module)
    strategy.model_to_device()
    parts.check_parameters(stage, stages)
    if context.fitting:
        check_graphs(module, stages)
        with empty_optimizers(), several_optimizers_refused(module):
            strategy.setup_optimizers(trainer)
    strategy.setup_precision_plugin()
    if context.fitting:
        check_optimizers(strategy.optimizers, several=parts.optimizes_itself)
    if context.fitting and stages > 1:
        trains = any(parameter.requires_grad for parameter in module.parameters())
        check_trained(module, context.collectives.decide(trains, all_agree=False) or context.client.joining)


def _check_shapes(module: nn.Module) -> None:
    """Raises UnsupportedFeatureError for a lazy layer that has not seen its input; a move may end its laziness."""
    lazy = [name for name, tensor in [*module.named_parameters(), *module.named_buffers()] if is_lazy(tensor)]
    if lazy:
        raise UnsupportedFeatureError(
            f"{lazy[0]} of {type(module).__name__} gets its shape from the first input, and workers need all shapes"
            " before: give its size, or run a batch through the model before fit()."
        )


class StageBuilder:
    """Makes the parts of a worker that run its stage.

    Args:
        context: the context of the worker.
        parts: the module, whose layers of this stage are there.
        recorder: records the user's hooks that see outputs.
    """

    def __init__(self, context: WorkerContext, parts: ModelParts, recorder: OutputRecorder) -> None:
        self._context, self._parts, self._recorder = context, parts, recorder
        self._by_itself = context.fitting and parts.optimizes_itself

    def bundle(
        self, cuts: Cuts, ties: StageTies, left: Mapping[nn.Parameter, Tensor] = MappingProxyType({})
    ) -> StageBundle:
        """The bundle of the parts of this worker under the layout ``cuts``, which are there."""
        context, parts, module = self._context, self._parts, self._parts.module
        stage, last = context.worker.stage, context.grid.stages - 1
        owned = held_ranges(cuts)[stage]
        # Only fit trains them, and only by the schedule has this strategy something to keep for each.
        parameters: list[nn.Parameter] = []
        if context.fitting and not self._by_itself:
            parameters = [*trained_by_name(module, context.trainer.optimizers).values()]
            for optimizer in context.trainer.optimizers if context.grid.stages > 1 else ():
                check_parameters(module, optimizer)
        training_parts = parts.training_parts(owned, self._recorder)
        if context.mesh is not None and context.fitting:
            check_sharded_layers(module, parts.is_elsewhere, context.run.mesh_sizes[0])
        scaler = scaler_of(context.trainer)
        runs = Stage(
            training_parts,
            owned.start,
            context.seed,
            context.device,
            loss=parts.loss if stage == last else None,
            forward_context=context.forward_context,
            evaluation_layers=parts.evaluation_parts(owned, self._recorder),
            forward_layers=parts.forward_parts(owned, self._recorder),
            loss_name=parts.loss_name,
            loss_backward=parts.loss_backward,
            loss_is_optional=parts.loss_is_optional,
            takes_target=parts.takes_target,
            scale_loss=None if scaler is None else scaler.scale,
            sharing=None if are_whole(cuts) else partial(self._among, cuts, owned),
        )
        several = context.grid.num_workers > 1  # otherwise no peer ever wants them
        lends_copies = several and context.fitting and may_change_gradients(context.trainer, module)
        buckets = context.options.communication.bucket_bytes
        # Of a layer that two stages share neither sums all micro-batches.
        has_room = context.fitting and not self._by_itself and are_whole(cuts)
        statistics = self._recorder.side_effects.statistics if has_room else tuple
        gradients = GradientBuffers(parameters, context.device, buckets, lends_copies, ties.holders, statistics)
        replicated = () if context.mesh is None else tuple(p for p in parameters if not context.mesh.counts(p))
        return StageBundle(runs, parameters, gradients, ties, left, replicated)

    def _among(
        self, cuts: Cuts, held: range, modules: Sequence[nn.Module], microbatch: int | None
    ) -> tuple[Sequence[nn.Module], int]:
        """Of ``modules``, which run the parts ``held``, those of a micro-batch under the layout ``cuts``."""
        grid, stage = self._context.grid, self._context.worker.stage
        bounds = [math.floor(bound) for bound in cuts]
        if microbatch is not None:
            bounds = [*bounds_of(cuts, microbatch, grid)]
        own = range(*bounds[stage : stage + 2])
        return self._parts.among(modules, held, own), own.start

    def layers(
        self, left: Callable[[], Mapping[nn.Parameter, Tensor]], changed: Callable[[StageBundle], None]
    ) -> StageLayers | None:
        """The layers of this worker, if they may move.

        Args:
            left: returns the gradients that count for later steps.
            changed: called with the new bundle when they have moved.
        """
        context = self._context
        if not context.fitting or self._by_itself or context.grid.stages == 1 or context.mesh is not None:
            return None
        return StageLayers(context, self._parts, self.bundle, left, changed)

    def executor(self, ties: StageTies, steps: TrainingSteps) -> Executor:
        """The executor of this worker, for modules that train by the schedule.

        Args:
            ties: the parameters that stages share.
            steps: the training steps of this worker.
        """
        context, options = self._context, self._context.options
        needs = commit_requirements(context.trainer, self._parts.module, context.grid.stages)
        bundle = self._first_bundle(ties)
        common = self._common(bundle, steps)
        rules = CommitRules(
            norm=needs.norm,
            overflow=needs.overflow,
            staggered=context.run.staggered,
            presumes=steps.leaves_gradients_alone if needs.afterwards else None,
        )
        measurements = StepMeasurements(
            context.client,
            context.device,
            profiles=context.run.profiles,
            held=steps.held_tensors,
            tries_splitting=context.fitting and options.planning.tries_splitting(context.grid.stages),
        )
        runner = StepRunner(
            *common,
            rules,
            measurements,
            shadow_on_host=options.recovery.shadow == "host",
            device_name=context.device_name,
            members=context.run.positions.members,
        )
        return Executor(runner, steps.layers)

    def manual_executor(self, ties: StageTies, steps: TrainingSteps) -> tuple[Executor, ManualSteps]:
        """The executor of this worker, for modules that optimize by themselves, and the steps that it runs."""
        context = self._context
        if verify := context.options.verification.verify:
            rank_zero_warn(
                f"verify={verify} has no effect: {type(context.trainer.lightning_module).__name__} has"
                " manual optimization, whose steps cannot be computed twice."
            )
        bundle = self._first_bundle(ties)
        state = ManualStepState(context.trainer)
        manual = ManualSteps(context, bundle.stage.layers[0], steps, lambda: self._recorder.metrics, state)
        return Executor(WholeStepRunner(*self._common(bundle, steps), body=manual.run, state=state)), manual

    def _first_bundle(self, ties: StageTies) -> StageBundle:
        return self.bundle((0, *(part.stop for part in self._context.run.parts)), ties)

    def _common(
        self, bundle: StageBundle, callbacks: ExecutorCallbacks
    ) -> tuple[Worker, Grid, ControlClient, Communicator, StageBundle, ExecutorCallbacks]:
        """The arguments that both executors have."""
        context, rank = self._context, self._context.place.rank
        communicator = Communicator(
            rank,
            context.place.host,
            context.device,
            context.client,
            context.client.key_for("connections"),
            transport=transport_for(context.options.communication, rank, context.device),
            mesh=context.mesh,
        )
        return context.worker, context.grid, context.client, communicator, bundle, callbacks


# ---------------------------------------------------------------------- layers on the meta device


def _materialize(module: nn.Module, device: torch.device, seed: int, is_elsewhere: Callable[[str], bool]) -> None:
    """Gives the parameters and buffers of ``module`` that are on the meta device memory on ``device``, and values.

    As in Lightning's strategies, the ``reset_parameters()`` of the module that has them draws the values; for whole
    tensors, one module after the other, of which each worker keeps its part. So they do not depend on the grid, and no
    worker ever holds more of the weights than its own part and one module.

    Args:
        module: the user's module.
        device: the device of this worker.
        seed: the seed of the run.
        is_elsewhere: whether a parameter or buffer, by its name, belongs to another stage.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    wanted = {id(tensor) for name, tensor in named if tensor.is_meta and not is_elsewhere(name)}
    owners = {
        name: part
        for name, part in module.named_modules()
        if any(id(t) in wanted for t in (*parameters_of(part).values(), *buffers_of(part).values()))
    }
    if not owners:
        return
    replace_tensors(module, lambda t: torch.zeros_like(t, device=device) if id(t) in wanted else t)
    without = []
    with seeded_everything() as reseed:
        for name, owner in owners.items():
            reseed(derive_seed(seed, zlib.crc32(name.encode())))
            if not _reset(owner, device):
                without.append(f"{name} ({type(owner).__name__})")
    if without:
        rank_zero_warn(
            f"These modules were made on the meta device and have no reset_parameters(), so their values are 0:"
            f" {', '.join(without[:5])}. Define it, or give them values in on_fit_start()."
        )


@torch.no_grad()
def _reset(owner: nn.Module, device: torch.device) -> bool:
    """Lets ``owner`` draw its own tensors, whole, and keeps this worker's part; whether it can."""
    reset = getattr(owner, "reset_parameters", None)
    if not callable(reset):
        return False
    tables: list[dict[str, Any]] = [parameters_of(owner), buffers_of(owner)]
    kept = [{name: t for name, t in table.items() if t is not None} for table in tables]
    for table, tensors in zip(tables, kept, strict=True):
        table.update({name: _whole_like(t, device) for name, t in tensors.items()})
    try:
        reset()
        for table, tensors in zip(tables, kept, strict=True):
            for name, tensor in tensors.items():
                local_part(tensor).copy_(local_part(part_like(table[name].detach(), tensor)))
    finally:
        for table, tensors in zip(tables, kept, strict=True):
            table.update(tensors)
    return True


def _whole_like(tensor: Tensor, device: torch.device) -> Tensor:
    values = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
