"""The layers of a worker's stage: built, run by an executor, measured, and moved.

A layer travels as its module, with parameters and buffers, the optimizers' states of its parameters, and gradients that
count for later steps. The optimizers stay the same objects, so schedulers, hooks and callbacks do not notice; only the
parameters in their groups change, in the order of one device. State that callbacks keep by layer does not travel: where
there is any, layers stay (:func:`why_layers_stay`).
"""

from __future__ import annotations

import math
import statistics
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_recycle.control.client import ControlClient
from lightning_recycle.control.protocol.messages import Cuts, LayerFacts, Measured
from lightning_recycle.devices import await_stream, tensor_bytes
from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError
from lightning_recycle.model.layers import has_recipes
from lightning_recycle.model.parts import ModelParts
from lightning_recycle.planning.grid import Grid, Worker
from lightning_recycle.planning.layer_cuts import (
    are_bounds,
    are_whole,
    bounds_of,
    has_ties,
    held_ranges,
    rounded,
    shared_layers,
)
from lightning_recycle.randomness import derive_seed, seeded_everything
from lightning_recycle.runtime.commit_reports import ExecutorCallbacks
from lightning_recycle.runtime.communicator import Communicator
from lightning_recycle.runtime.executor import Executor
from lightning_recycle.runtime.gradients import GradientBuffers
from lightning_recycle.runtime.manual_step_runner import ManualStepRunner
from lightning_recycle.runtime.nccl.nccl_transport import transport_for
from lightning_recycle.runtime.stage import Stage
from lightning_recycle.runtime.stage_bundle import StageBundle, StageTies
from lightning_recycle.runtime.step_measurements import StepMeasurements
from lightning_recycle.runtime.step_runner import StepRunner
from lightning_recycle.session.checkpoint_callbacks import enter_stage
from lightning_recycle.session.configuration import (
    check_graphs,
    check_optimizers,
    check_sharded_layers,
    check_trained,
    several_optimizers_refused,
)
from lightning_recycle.session.gradient_clipping import commit_rules, may_change_gradients, scaler_of
from lightning_recycle.session.lightning_internals import optimizers_to_device
from lightning_recycle.session.manual_steps import ManualSteps, ManualStepState
from lightning_recycle.session.optimizer_states import (
    check_parameters,
    empty_optimizers,
    merged_names,
    parameters_by_name,
    track_steps,
    trained_by_name,
)
from lightning_recycle.session.output_recorder import OutputRecorder
from lightning_recycle.session.worker_context import WorkerContext
from lightning_recycle.tensor_memory import local_part, part_like, put_together, take_apart
from lightning_recycle.torch_internals import buffers_of, parameters_of, replace_tensors


def build_layers(context: WorkerContext, parts: ModelParts) -> None:
    """Builds the layers of this stage, on the device, and their optimizers."""
    trainer, strategy, module = context.trainer, context.trainer.strategy, parts.module
    stage, stages = context.worker.stage, context.grid.stages
    parts.keep(context.run.parts, stage)
    was_built = not has_recipes(module)
    with strategy.precision_plugin.module_init_context():
        parts.build(context.run.parts[stage], context.seed)
    enter_stage(trainer, module, was_built)
    strategy.model = strategy.precision_plugin.convert_module(module)
    _materialize(module, context.device, context.seed, parts.is_elsewhere)
    _check_shapes(module)
    strategy.model_to_device()
    parts.check_parameters(stage, stages)
    if context.fitting:
        check_graphs(module, stages)
        with empty_optimizers(), several_optimizers_refused(module):
            strategy.setup_optimizers(trainer)
        track_steps(strategy.lr_scheduler_configs)
    strategy.setup_precision_plugin()
    if context.fitting:
        check_optimizers(strategy.optimizers, several=parts.optimizes_itself)
        optimizers_to_device(strategy.optimizers, context.device)  # their state may be of an earlier fit
    if context.fitting and stages > 1:
        trains = any(parameter.requires_grad for parameter in module.parameters())
        check_trained(module, context.collectives.decide(trains, all_agree=False) or context.client.is_joining)


def _check_shapes(module: nn.Module) -> None:
    """Refuses a lazy layer that has not seen its input; a move may end its laziness."""
    lazy = [name for name, tensor in [*module.named_parameters(), *module.named_buffers()] if is_lazy(tensor)]
    if lazy:
        raise UnsupportedFeatureError(
            f"{lazy[0]} of {type(module).__name__} gets its shape from the first input, and workers need all shapes"
            " before: give its size, or run a batch through the model before fit()."
        )


class StageBuilder:
    """Makes the parts of a worker that run its stage."""

    def __init__(self, context: WorkerContext, parts: ModelParts, recorder: OutputRecorder) -> None:
        self._context, self._parts, self._recorder = context, parts, recorder
        self._by_itself = context.fitting and parts.optimizes_itself

    def bundle(
        self, cuts: Cuts, ties: StageTies, moved_gradients: Mapping[nn.Parameter, Tensor] = MappingProxyType({})
    ) -> StageBundle:
        """This stage's layers under the layout ``cuts``, with gradients and ties.

        ``moved_gradients``: the gradients that moved layers bring with them.
        """
        context, parts, module = self._context, self._parts, self._parts.module
        stage, last = context.worker.stage, context.grid.stages - 1
        owned = held_ranges(cuts)[stage]
        # Only fit trains them, and only by the schedule has this strategy something to keep for each.
        parameters: list[nn.Parameter] = []
        if context.fitting and not self._by_itself:
            parameters = [*trained_by_name(module, context.trainer.optimizers).values()]
            for optimizer in context.trainer.optimizers if context.grid.stages > 1 else ():
                check_parameters(module, optimizer)
        training_parts = parts.modules("training", owned, self._recorder)
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
            evaluation_layers=parts.modules("evaluation", owned, self._recorder),
            forward_layers=parts.modules("forward", owned, self._recorder),
            loss_name=parts.loss_name,
            loss_backward=parts.loss_backward,
            loss_is_optional=parts.loss_is_optional,
            takes_target=parts.takes_target,
            scale_loss=None if scaler is None else scaler.scale,
            sharing=None if are_whole(cuts) else partial(self._modules_run, cuts, owned),
        )
        several = context.grid.num_workers > 1  # otherwise no peer ever wants them
        lends_copies = several and context.fitting and may_change_gradients(context.trainer, module)
        buckets = context.options.communication.bucket_bytes
        # Of a layer that two stages share neither sums all micro-batches.
        has_room = context.fitting and not self._by_itself and are_whole(cuts)
        statistics = self._recorder.microbatch_changes.statistics if has_room else tuple
        gradients = GradientBuffers(parameters, context.device, buckets, lends_copies, ties.tie_stages, statistics)
        replicated = () if context.mesh is None else tuple(p for p in parameters if not context.mesh.counts(p))
        return StageBundle(runs, parameters, gradients, ties, moved_gradients, replicated)

    def _modules_run(
        self, cuts: Cuts, own_range: range, modules: Sequence[nn.Module], microbatch: int | None
    ) -> tuple[Sequence[nn.Module], int]:
        """The ``modules`` that a micro-batch runs here under the layout ``cuts``."""
        grid, stage = self._context.grid, self._context.worker.stage
        bounds = [math.floor(bound) for bound in cuts]
        if microbatch is not None:
            bounds = [*bounds_of(cuts, microbatch, grid)]
        computed = range(*bounds[stage : stage + 2])
        return self._parts.among(modules, own_range, computed), computed.start

    def layers(
        self, left_gradients: Callable[[], Mapping[nn.Parameter, Tensor]], changed: Callable[[StageBundle], None]
    ) -> StageLayers | None:
        """The layers of this worker if they may move, else None."""
        context = self._context
        if not context.fitting or self._by_itself or context.grid.stages == 1 or context.mesh is not None:
            return None
        return StageLayers(context, self._parts, self.bundle, left_gradients, changed)

    def executor(
        self,
        ties: StageTies,
        callbacks: ExecutorCallbacks,
        layers: StageLayers | None,
        presumes: Callable[[float], bool],
        held_tensors: Callable[[], Iterable[Tensor]],
    ) -> Executor:
        """The executor of a module that trains by the schedule.

        ``presumes``: whether a gradient of that norm is not clipped. ``held_tensors``: returns the tensors that stay
        from step to step.
        """
        context, options = self._context, self._context.options
        module, stages = self._parts.module, context.grid.stages
        rules = commit_rules(context.trainer, module, stages, context.run.staggered, presumes)
        common = self._runner_inputs(self._first_bundle(ties), callbacks)
        measurements = StepMeasurements(
            context.client,
            context.device,
            profiles=context.run.profiles,
            held=held_tensors,
            tries_splitting=context.fitting and options.planning.tries_splitting(stages),
        )
        runner = StepRunner(
            *common,
            rules,
            measurements,
            shadow_on_host=options.recovery.shadow == "host",
            device_name=context.device_name,
            members=context.run.positions.members,
        )
        return Executor(runner, layers)

    def manual_executor(self, ties: StageTies, callbacks: ExecutorCallbacks) -> tuple[Executor, ManualSteps]:
        context = self._context
        if verify := context.options.verification.verify:
            rank_zero_warn(
                f"verify={verify} has no effect: {type(context.trainer.lightning_module).__name__} has"
                " manual optimization, whose steps cannot be computed twice."
            )
        bundle = self._first_bundle(ties)
        state = ManualStepState(context.trainer)
        manual = ManualSteps(context, bundle.stage.layers[0], self._parts, self._recorder, state)
        return Executor(ManualStepRunner(*self._runner_inputs(bundle, callbacks), body=manual.run, state=state)), manual

    def _first_bundle(self, ties: StageTies) -> StageBundle:
        return self.bundle((0, *(part.stop for part in self._context.run.parts)), ties)

    def _runner_inputs(
        self, bundle: StageBundle, callbacks: ExecutorCallbacks
    ) -> tuple[Worker, Grid, ControlClient, Communicator, StageBundle, ExecutorCallbacks]:
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
    """Gives tensors of ``module`` on the meta device memory on ``device``, and values.

    As in Lightning's strategies, the ``reset_parameters()`` of the owning module draws the values; for whole tensors,
    one module after the other, of which each worker keeps its part. So they do not depend on the grid, and no worker
    holds more than its own part and one module. ``is_elsewhere``: whether a parameter or buffer, by its name, belongs
    to another stage.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    meta_ids = {id(tensor) for name, tensor in named if tensor.is_meta and not is_elsewhere(name)}
    owners = {
        name: part
        for name, part in module.named_modules()
        if any(id(t) in meta_ids for t in (*parameters_of(part).values(), *buffers_of(part).values()))
    }
    if not owners:
        return
    replace_tensors(module, lambda t: torch.zeros_like(t, device=device) if id(t) in meta_ids else t)
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
    """Lets ``owner`` draw its own tensors, whole, and keeps this worker's part."""
    reset = getattr(owner, "reset_parameters", None)
    if not callable(reset):
        return False
    tables: list[dict[str, Any]] = [parameters_of(owner), buffers_of(owner)]
    originals = [{name: t for name, t in table.items() if t is not None} for table in tables]
    for table, tensors in zip(tables, originals, strict=True):
        table.update({name: _whole_like(t, device) for name, t in tensors.items()})
    try:
        reset()
        for table, tensors in zip(tables, originals, strict=True):
            for name, tensor in tensors.items():
                local_part(tensor).copy_(local_part(part_like(table[name].detach(), tensor)))
    finally:
        for table, tensors in zip(tables, originals, strict=True):
            table.update(tensors)
    return True


def _whole_like(tensor: Tensor, device: torch.device) -> Tensor:
    values = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


_BY_LAYER = (BaseFinetuning, ModelPruning, StochasticWeightAveraging, WeightAveraging)
_FIRST_MEASURED = 2  # steps: the first ones compile and warm up
_MEASURED_STEPS = 3  # steps
_OPTIMIZER_ATTRIBUTES = ("state", "param_groups", "defaults")


def why_layers_stay(trainer: pl.Trainer, parts: ModelParts, owned: Iterable[int]) -> str:
    """Why the layers ``owned`` of this worker cannot go to another one."""
    if parts.optimizes_itself:
        return "the module optimizes by itself"
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, _BY_LAYER):
            return f"{type(callback).__name__} keeps something for each layer"
    for optimizer in trainer.optimizers:
        if (name := _tensor_attribute(optimizer)) is not None:
            return f"{type(optimizer).__name__} keeps tensors in its attribute {name!r}, not in its state"
    for index in owned:
        try:
            with parts.unwatched(index) as layer:
                take_apart(layer, _is_sent_apart)
        except Exception as error:  # whatever the user's objects raise
            return f"layer {index} cannot be pickled ({type(error).__name__}: {error})"
    return ""


def _tensor_attribute(optimizer: Optimizer) -> str | None:
    """The optimizer's attribute with tensors that are no states of parameters."""
    for name, value in vars(optimizer).items():
        if name not in _OPTIMIZER_ATTRIBUTES and any(isinstance(item, Tensor) for item in _flat(value)):
            return name
    return None


def _is_sent_apart(tensor: Tensor) -> bool:
    """Whether a tensor is sent apart from the pickle of the value around it."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def _flat(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _flat(item)
    else:
        yield value


@dataclass(frozen=True)
class _PackedLayers:
    """Packed layers on their way to another worker.

    ``skeleton``: ``(layers, states, gradients)`` without the tensors: modules by index, states by optimizer, gradients
    by parameter. ``kinds``: whether each tensor is a parameter, requires a gradient, is on the device. ``names``: of
    that stage's parameters, by optimizer and group, several of one that layers share.
    """

    stage: int
    skeleton: bytes
    tensors: list[Tensor]
    kinds: list[tuple[bool, bool, bool]]
    names: list[list[list[str]]]


class _LayerMeter:
    """Measures the forwards of one layer; a device is waited for."""

    def __init__(self) -> None:
        self.output_bytes = 0
        self._handles: list[RemovableHandle] = []
        self._seconds: list[float] = []
        self._start_time = 0.0

    def watch(self, layer: nn.Module) -> None:
        self._handles = [layer.register_forward_pre_hook(self._before), layer.register_forward_hook(self._after)]

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def seconds(self) -> float:
        return float(statistics.median(self._seconds or [0.0]))

    def _before(self, _: nn.Module, inputs: Any) -> None:
        _wait_for(inputs)
        self._start_time = time.perf_counter()

    def _after(self, _: nn.Module, inputs: Any, output: Any) -> None:
        _wait_for(inputs)
        self._seconds.append(time.perf_counter() - self._start_time)
        self.output_bytes = tensor_bytes(output)


def _wait_for(inputs: Any) -> None:
    for device in {item.device for item in _flat(inputs) if isinstance(item, Tensor)}:
        await_stream(device)


class StageLayers:
    """The layers of this worker: packed for other workers, or installed from them.

    ``make_bundle``: runs the parts of this stage under a layout, given the weights that stages share, and the gradients
    that come with moved layers. ``kept_gradients``: of parameters, between steps.
    """

    def __init__(
        self,
        context: WorkerContext,
        parts: ModelParts,
        make_bundle: Callable[[Cuts, StageTies, Mapping[nn.Parameter, Tensor]], StageBundle],
        kept_gradients: Callable[[], Mapping[nn.Parameter, Tensor]],
        on_change: Callable[[StageBundle], None],
    ) -> None:
        self._context, self._trainer, self._parts = context, context.trainer, parts
        self._stage = context.worker.stage
        # Not if nothing asks, nor by a worker that joins, whose peers have done it.
        self._measures = context.options.recovery.rebalance != "never" and not context.client.is_joining
        self._steps = 0
        self._meters: dict[int, _LayerMeter] = {}
        self._make_bundle, self._kept_gradients, self._on_change = make_bundle, kept_gradients, on_change
        self.cuts: Cuts = (0, *(part.stop for part in context.run.parts))

    @property
    def owned(self) -> range:
        return held_ranges(self.cuts)[self._stage]

    def tied_stages(self, cuts: Cuts) -> Collection[tuple[int, ...]]:
        shared = {(stage, stage + 1) for stage, _ in shared_layers(cuts).values()}
        return shared | {tie.stages for tie in self._parts.ties(held_ranges(cuts))}

    def layout_of(self, sizes: Sequence[float]) -> Cuts:
        """Layout with ``sizes`` layers by stage; ConfigurationError if impossible."""
        cuts = (0, *(rounded(bound) for bound in accumulate(sizes)))
        if len(cuts) != len(self.cuts) or not are_bounds(cuts) or cuts[-1] != self.cuts[-1]:
            raise ConfigurationError(
                f"{list(sizes)} is not a layout of {self.cuts[-1]} layers over {len(self.cuts) - 1} stages: give each"
                " stage one number of at least 1; together they are all layers. Where numbers are not whole, as in"
                " [2.5, 3.5], each stage still has a whole layer of its own."
            )
        tied = self._parts.shared_layers()
        if has_ties(tied, cuts) != has_ties(tied, self.cuts):
            raise ConfigurationError(
                f"With {list(sizes)} layers, layers that share a weight would come to lie on one stage, or on several:"
                " the way in which stages step would change. Keep them together, or apart."
            )
        if not are_whole(cuts) and self._parts.whole:
            raise ConfigurationError(
                f"Stages cannot share layers of {type(self._parts.module).__name__}: {self._parts.whole}."
            )
        why = why_layers_stay(self._trainer, self._parts, self.owned)
        if why:
            raise ConfigurationError(f"The layers cannot move: {why}.")
        return cuts

    def _state_bytes(self, parameters: Iterable[nn.Parameter]) -> int:
        optimizers = self._trainer.optimizers
        return tensor_bytes([optimizer.state.get(p) for p in parameters for optimizer in optimizers])

    # ------------------------------------------------------------------ measuring

    def applied(self) -> None:
        """A step was applied: the layers are measured in some of the first."""
        if not self._measures:
            return
        self._steps += 1
        if self._steps == _FIRST_MEASURED:
            self._meters = {index: _LayerMeter() for index in self.owned}
            with self._parts.unwatched(*self.owned) as layers:
                modules = list(layers)
            for meter, layer in zip(self._meters.values(), modules, strict=True):
                meter.watch(layer)
        elif self._steps == _FIRST_MEASURED + _MEASURED_STEPS:
            meters = self._end_measuring()
            if meters.keys() == set(self.owned):
                self._context.client.send(Measured(self._context.place.rank, layers=self._facts(meters)))
            else:  # layers have moved meanwhile
                self._steps = 0

    def _end_measuring(self) -> dict[int, _LayerMeter]:
        meters, self._meters = self._meters, {}
        for meter in meters.values():
            meter.end()
        return meters

    def _facts(self, meters: Mapping[int, _LayerMeter]) -> LayerFacts:
        owned = self.owned
        with self._parts.unwatched(*owned) as modules:
            parameters = [list(module.parameters()) for module in modules]
            buffers = [list(module.buffers()) for module in modules]
        return LayerFacts(
            cuts=self.cuts,
            first=owned.start,
            seconds=tuple(meter.seconds for meter in meters.values()),
            output_bytes=tuple(meter.output_bytes for meter in meters.values()),
            parameter_bytes=tuple(
                tensor_bytes([layer_parameters, [p for p in layer_parameters if p.requires_grad], layer_buffers])
                for layer_parameters, layer_buffers in zip(parameters, buffers, strict=True)
            ),
            optimizer_bytes=tuple(map(self._state_bytes, parameters)),
            trains=tuple(any(p.requires_grad for p in layer_parameters) for layer_parameters in parameters),
            tied=self._parts.shared_layers(),
            fixed=why_layers_stay(self._trainer, self._parts, owned),
            whole=self._parts.whole,
        )

    # ------------------------------------------------------------------ packing

    def pack_layers(self, layers: Iterable[int]) -> _PackedLayers:
        """``layers`` with optimizer states and gradients, for :meth:`install_layers`."""
        layers = tuple(layers)
        self._end_measuring()  # what it does to the layers is not the user's to pickle
        prefixes = tuple(f"{self._parts.path(index)}." for index in layers)
        named = {name: parameter for name, parameter in self._named() if name.startswith(prefixes)}
        states = [
            {name: optimizer.state[p] for name, p in named.items() if p in optimizer.state}
            for optimizer in self._trainer.optimizers
        ]
        kept_gradients = self._kept_gradients()
        moving_gradients = {name: kept_gradients[p] for name, p in named.items() if p in kept_gradients}
        with self._parts.unwatched(*layers) as modules:
            # Whatever was picklable at the start still is, unless the user's code has changed it.
            skeleton, tensors = take_apart(
                (dict(zip(layers, modules, strict=True)), states, moving_gradients), _is_sent_apart
            )
        kinds = [(isinstance(t, nn.Parameter), t.requires_grad, t.device.type != "cpu") for t in tensors]
        return _PackedLayers(self._stage, skeleton, [tensor.detach() for tensor in tensors], kinds, self._names())

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return list(self._parts.module.named_parameters(remove_duplicate=False))

    def _names(self) -> list[list[list[str]]]:
        """All names of this stage's parameters, by optimizer and group."""
        names: dict[int, list[str]] = {}
        for name, parameter in self._named():
            names.setdefault(id(parameter), []).append(name)
        return [
            [[name for p in group["params"] for name in names[id(p)]] for group in optimizer.param_groups]
            for optimizer in self._trainer.optimizers
        ]

    # ------------------------------------------------------------------ installing

    def install_layers(self, cuts: Cuts, received: Sequence[_PackedLayers]) -> StageBundle:
        """Replaces this worker's layers by those of ``cuts``; returns their bundle.

        ``received``: layers of other stages with their optimizer states and gradients, packed by :meth:`pack_layers`.
        Those that this worker had already stay the same objects.
        """
        stages = held_ranges(cuts)
        names = {self._stage: self._names(), **{sent.stage: sent.names for sent in received}}
        layers: dict[int, nn.Module] = {}
        states: list[dict[str, Any]] = [{} for _ in self._trainer.optimizers]
        gradients: dict[str, Tensor] = {}
        for sent in received:
            tensors = [self._whole(tensor, *kind) for tensor, kind in zip(sent.tensors, sent.kinds, strict=True)]
            sent_layers, more_states, grads = put_together(sent.skeleton, tensors)
            layers.update(sent_layers)
            gradients.update(grads)
            for optimizer_state, state in zip(states, more_states, strict=True):
                optimizer_state.update(state)
        self._parts.exchange(stages, self._stage, layers)
        self.cuts = cuts
        by_name = dict(self._named())
        for index, optimizer in enumerate(self._trainer.optimizers):
            groups_by_stage = [names[stage][index] for stage in sorted(names)]
            _regroup(optimizer, merged_names(groups_by_stage, {}), by_name, states[index])
        kept_gradients = self._kept_gradients()
        ties = StageTies(self._parts.ties(stages), self._stage, parameters_by_name(self._parts.module))
        missing = {by_name[name]: grad for name, grad in gradients.items() if by_name[name] not in kept_gradients}
        bundle = self._make_bundle(cuts, ties, missing)
        self._on_change(bundle)
        return bundle

    def _whole(self, tensor: Tensor, is_parameter: bool, requires_grad: bool, on_device: bool) -> Tensor:
        tensor = tensor.to(self._context.device) if on_device else tensor
        return nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def _regroup(
    optimizer: Optimizer,
    names: Sequence[Sequence[str]],
    by_name: Mapping[str, nn.Parameter],
    states: Mapping[str, Any],
) -> None:
    for group, members in zip(optimizer.param_groups, names, strict=True):
        group["params"] = list(dict.fromkeys(by_name[name] for name in members if name in by_name))
    group_parameters = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in [parameter for parameter in optimizer.state if parameter not in group_parameters]:
        del optimizer.state[parameter]
    for name, state in states.items():
        parameter = by_name[name]
        if parameter in group_parameters and parameter not in optimizer.state:
            optimizer.state[parameter] = state
