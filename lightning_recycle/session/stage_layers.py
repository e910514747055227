"""The layers of a worker's stage as they come and go during a run.

Concept: a layer travels as the module that it is, with its parameters and buffers, and with what its parameters have
elsewhere: the states of the optimizers, and gradients that count for later steps. The optimizers stay the objects that
they are, so schedulers, hooks and callbacks that know them do not notice; what changes is which parameters their groups
hold. The group of a parameter, and its place there, are those of the worker that gave it: the order is that of one
device (:mod:`~lightning_recycle.session.optimizer_states`), so checkpoints number it as before.

What callbacks keep by layer does not travel. Where there is any, layers stay (:func:`why_layers_stay`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning, StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_recycle.control.protocol.layout_change import has_ties, is_layout, ranges
from lightning_recycle.control.protocol.messages import Cuts, LayerFacts, Measured
from lightning_recycle.devices import await_stream
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.model.parts import ModelParts
from lightning_recycle.planning.layouts.cuts import are_whole, rounded, shared_layers
from lightning_recycle.runtime.executor.device_memory import tensor_bytes
from lightning_recycle.runtime.stage.stage_bundle import StageBundle, StageTies
from lightning_recycle.session.collectives import WorkerContext
from lightning_recycle.session.optimizer_states import merged_names, parameters_by_name
from lightning_recycle.tensor_memory import put_together, take_apart

_BY_LAYER = (BaseFinetuning, ModelPruning, StochasticWeightAveraging, WeightAveraging)
_FIRST_MEASURED = 2  # steps: the first ones compile and warm up
_MEASURED = 3  # steps
_OF_OPTIMIZERS = ("state", "param_groups", "defaults")


def why_layers_stay(trainer: pl.Trainer, parts: ModelParts, owned: Iterable[int]) -> str:
    """Why the layers ``owned`` of this worker cannot go to another one."""
    if parts.optimizes_itself:
        return "the module optimizes by itself"
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, _BY_LAYER):
            return f"{type(callback).__name__} keeps something for each layer"
    for optimizer in trainer.optimizers:
        if (name := _kept_besides(optimizer)) is not None:
            return f"{type(optimizer).__name__} keeps tensors in its attribute {name!r}, not in its state"
    for index in owned:
        try:
            with parts.handed_out(index) as layer:
                take_apart(layer, _travels)
        except Exception as error:  # whatever the user's objects raise
            return f"layer {index} cannot be pickled ({type(error).__name__}: {error})"
    return ""


def _kept_besides(optimizer: Optimizer) -> str | None:
    """The optimizer's attribute with tensors that are no states of parameters."""
    for name, value in vars(optimizer).items():
        if name not in _OF_OPTIMIZERS and any(isinstance(item, Tensor) for item in _flat(value)):
            return name
    return None


def _travels(tensor: Tensor) -> bool:
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
class _Given:
    """Layers on their way to another worker.

    Args:
        skeleton: ``(layers, states, gradients)`` without the tensors: the modules by index, the states of each
            optimizer, and gradients by name of the parameter.
        kinds: of each whether it is a parameter, whether it requires a gradient, and whether it is on the device.
        names: the names of the parameters of that stage, by optimizer and group. A parameter that several layers share
            has several.
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
        self._started = 0.0

    def watch(self, layer: nn.Module) -> None:
        """Begins to measure."""
        self._handles = [layer.register_forward_pre_hook(self._before), layer.register_forward_hook(self._after)]

    def end(self) -> None:
        """The layer is as it was."""
        for handle in self._handles:
            handle.remove()

    @property
    def seconds(self) -> float:
        """Of a forward, the median."""
        return float(statistics.median(self._seconds or [0.0]))

    def _before(self, _: nn.Module, inputs: Any) -> None:
        _wait_for(inputs)
        self._started = time.perf_counter()

    def _after(self, _: nn.Module, inputs: Any, output: Any) -> None:
        _wait_for(inputs)
        self._seconds.append(time.perf_counter() - self._started)
        self.output_bytes = tensor_bytes(output)


def _wait_for(inputs: Any) -> None:
    for device in {item.device for item in _flat(inputs) if isinstance(item, Tensor)}:
        await_stream(device)


class StageLayers:
    """The layers that this worker has.

    Args:
        hold: what runs the parts of this stage under a layout, given the weights that stages share, and the
            gradients that come with layers of others.
    """

    def __init__(
        self,
        context: WorkerContext,
        parts: ModelParts,
        hold: Callable[[Cuts, StageTies, Mapping[nn.Parameter, Tensor]], StageBundle],
        left: Callable[[], Mapping[nn.Parameter, Tensor]],
        changed: Callable[[StageBundle], None],
    ) -> None:
        self._context, self._trainer, self._parts = context, context.trainer, parts
        self._stage = context.worker.stage
        # Not if nothing asks, nor by a worker that joins, whose peers have done it.
        self._measures = context.options.recovery.rebalance != "never" and not context.client.joining
        self._steps = 0
        self._meters: dict[int, _LayerMeter] = {}
        self._hold, self._left, self._changed = hold, left, changed
        self.cuts: Cuts = (0, *(part.stop for part in context.run.parts))

    @property
    def owned(self) -> range:
        """The parts that this worker has."""
        return ranges(self.cuts)[self._stage]

    def tied_stages(self, cuts: Cuts) -> Collection[tuple[int, ...]]:
        shared = {(stage, stage + 1) for stage, _ in shared_layers(cuts).values()}
        return shared | {tie.stages for tie in self._parts.ties(ranges(cuts))}

    def layout_of(self, sizes: Sequence[float]) -> Cuts:
        """The layout in which the stages have that many layers.

        Raises:
            ConfigurationError: if there is none, or layers cannot move.
        """
        cuts = (0, *(rounded(bound) for bound in accumulate(sizes)))
        if not is_layout(cuts, len(self.cuts) - 1) or cuts[-1] != self.cuts[-1]:
            raise ConfigurationError(
                f"{list(sizes)} is no layout of {self.cuts[-1]} layers over {len(self.cuts) - 1} stages: give each"
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
        """Of the optimizers' states of ``parameters``."""
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
            with self._parts.handed_out(*self.owned) as layers:
                modules = list(layers)
            for meter, layer in zip(self._meters.values(), modules, strict=True):
                meter.watch(layer)
        elif self._steps == _FIRST_MEASURED + _MEASURED:
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
        with self._parts.handed_out(*owned) as modules:
            parameters = [list(module.parameters()) for module in modules]
            buffers = [list(module.buffers()) for module in modules]
        return LayerFacts(
            cuts=self.cuts,
            first=owned.start,
            seconds=tuple(meter.seconds for meter in meters.values()),
            output_bytes=tuple(meter.output_bytes for meter in meters.values()),
            parameter_bytes=tuple(
                tensor_bytes([own, [p for p in own if p.requires_grad], more])
                for own, more in zip(parameters, buffers, strict=True)
            ),
            optimizer_bytes=tuple(map(self._state_bytes, parameters)),
            trains=tuple(any(p.requires_grad for p in own) for own in parameters),
            tied=self._parts.shared_layers(),
            fixed=why_layers_stay(self._trainer, self._parts, owned),
            whole=self._parts.whole,
        )

    # ------------------------------------------------------------------ giving

    def give(self, layers: Iterable[int]) -> _Given:
        layers = tuple(layers)
        self._end_measuring()  # what it does to the layers is not the user's to pickle
        prefixes = tuple(f"{self._parts.path(index)}." for index in layers)
        named = {name: parameter for name, parameter in self._named() if name.startswith(prefixes)}
        states = [
            {name: optimizer.state[p] for name, p in named.items() if p in optimizer.state}
            for optimizer in self._trainer.optimizers
        ]
        held = self._left()
        left = {name: held[p] for name, p in named.items() if p in held}
        with self._parts.handed_out(*layers) as modules:
            # Whatever was picklable at the start still is, unless the user's code has changed it.
            skeleton, tensors = take_apart((dict(zip(layers, modules, strict=True)), states, left), _travels)
        kinds = [(isinstance(t, nn.Parameter), t.requires_grad, t.device.type != "cpu") for t in tensors]
        return _Given(self._stage, skeleton, [tensor.detach() for tensor in tensors], kinds, self._names())

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

    # ------------------------------------------------------------------ taking up

    def take_up(self, cuts: Cuts, given: Sequence[_Given]) -> StageBundle:
        stages = ranges(cuts)
        names = {self._stage: self._names(), **{one.stage: one.names for one in given}}
        layers: dict[int, nn.Module] = {}
        states: list[dict[str, Any]] = [{} for _ in self._trainer.optimizers]
        left: dict[str, Tensor] = {}
        for one in given:
            tensors = [self._whole(tensor, *kind) for tensor, kind in zip(one.tensors, one.kinds, strict=True)]
            found, more, grads = put_together(one.skeleton, tensors)
            layers.update(found)
            left.update(grads)
            for known, state in zip(states, more, strict=True):
                known.update(state)
        self._parts.exchange(stages, self._stage, layers)
        self.cuts = cuts
        by_name = dict(self._named())
        for index, optimizer in enumerate(self._trainer.optimizers):
            parts = [names[stage][index] for stage in sorted(names)]
            _regroup(optimizer, merged_names(parts, {}), by_name, states[index])
        held = self._left()
        ties = StageTies(self._parts.ties(stages), self._stage, parameters_by_name(self._parts.module))
        missing = {by_name[name]: grad for name, grad in left.items() if by_name[name] not in held}
        bundle = self._hold(cuts, ties, missing)
        self._changed(bundle)
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
    """Sets the parameters in the groups of ``optimizer``, in the order of ``names``."""
    for group, members in zip(optimizer.param_groups, names, strict=True):
        group["params"] = list(dict.fromkeys(by_name[name] for name in members if name in by_name))
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in [parameter for parameter in optimizer.state if parameter not in held]:
        del optimizer.state[parameter]
    for name, state in states.items():
        parameter = by_name[name]
        if parameter in held and parameter not in optimizer.state:
            optimizer.state[parameter] = state
