"""An ordinary LightningModule in several stages, cut between layers of its chain.

The user's step calls the layers. On the *first* stage it runs up to the chain, and its arguments for the layers are
captured. A *middle* stage calls its layers in the same way. On the *last* stage the whole step runs, with received
values for the earlier layers' results; its loss and logging count.

Layers are replaced in place, so the names in a state dict stay. Modules outside the chain (embeddings, heads) are on
the first and the last stage, because the step uses them before the chain, after it, or both; these copies are tied
weights, whose gradients are added. A middle stage has metrics, as every worker, and the own parameters of the modules
around its layers, so that ``configure_optimizers`` finds them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric
from typing_extensions import override

from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError
from lightning_recycle.model import chains
from lightning_recycle.model.chains import Chain, LayerPaths, SideRecorder, SideValue, find_chain
from lightning_recycle.model.layers import Tie, layer_ranges, names_by_parameter, set_weights, share
from lightning_recycle.model.module import PipelineModule
from lightning_recycle.model.parts import LayerParts, ModelParts, Run
from lightning_recycle.model.recorded_module import StepRecorder, WholeStep, redirect_forward, restore_forward
from lightning_recycle.planning.planner import Partition
from lightning_recycle.tensor_memory import put_together, take_apart
from lightning_recycle.torch_internals import modules_of, parameters_of


class ChainParts(ModelParts):
    """One part per layer of the chain, which ``pipeline`` may name.

    Raises ConfigurationError if there is no such chain.
    """

    whole = "its own step calls them"

    def __init__(self, module: pl.LightningModule, num_stages: int, pipeline: LayerPaths = None) -> None:
        super().__init__(module)
        self.chain = find_chain(module, num_stages, pipeline)

    # ------------------------------------------------------------------ before a run

    @override
    def check(self) -> None:
        super().check()
        kind = type(self.module).__name__
        if not self.module.automatic_optimization:
            raise UnsupportedFeatureError(
                f"{kind} has manual optimization, so only its training_step() knows when stages compute and step: use"
                " pipeline_parallel_size=1."
            )
        for name, parameter in self.module.named_parameters():
            if isinstance(parameter, UninitializedParameter):
                raise UnsupportedFeatureError(
                    f"{name} of {kind} gets its shape from the first input, which only one stage sees: give its size,"
                    " or run a batch through the model before fit()."
                )

    @override
    def cut(self, num_stages: int, partition: Partition) -> tuple[range, ...]:
        stages = layer_ranges(len(self.chain.paths), num_stages, partition)
        held = _StageShare(self.module, self.chain, stages)
        for stage, layers in enumerate(stages):
            if not any(held.on(name, stage) for name, _ in self.module.named_parameters()):
                names = ", ".join(self.chain.paths[index] for index in layers)
                raise ConfigurationError(
                    f"Stage {stage} of {num_stages} of {type(self.module).__name__} has no parameters: {names}. Use a"
                    " smaller pipeline_parallel_size, or partition=[...], the number of layers of each stage."
                )
        return stages

    def layers(self) -> list[nn.Module]:
        return [self.module.get_submodule(path) for path in self.chain.paths]

    # ------------------------------------------------------------------ in a worker

    @override
    def keep(self, stages: Sequence[range], stage: int) -> None:
        module, chain, owned = self.module, self.chain, stages[stage]
        self.owned, self.middle = owned, range(stages[0].stop, stages[-1].start)
        self._is_first, self._is_last = stage == 0, stage == len(stages) - 1
        self.takes_target = self._is_last
        known = getattr(self, "_held", None)  # found before the layers of other stages were dropped
        self._stage, self._held = stage, _StageShare(module, chain, stages) if known is None else known.under(stages)
        self._names = frozenset(module.state_dict())
        layers = self.layers()
        self._dropped: list[tuple[nn.Module, str, nn.Module]] = []
        for index, layer in enumerate(layers):
            if index not in owned:
                stub = chains.RemoteLayer(chain.paths[index], layer, index)
                for parent in list(module.modules()):
                    for name in [name for name, child in modules_of(parent).items() if child is layer]:
                        self._drop(parent, name, stub)
        if not self._is_first and not self._is_last:
            for path, outside in self._held.outside:
                parent_path, _, name = path.rpartition(".")
                self._drop(module.get_submodule(parent_path), name, chains.AbsentPart(path, outside))
        remaining = set(module.modules())
        for _, _, original in self._dropped:
            for dropped in set(original.modules()) - remaining:
                _release(dropped)
        self._watched = {index: self._watch(index, layers[index]) for index in owned}
        redirect_forward(module, chain.paths, lambda asked: module.trainer.strategy.forward_whole(asked))  # type: ignore[attr-defined]

    @property
    def stages(self) -> Sequence[range]:
        return self._held.stages

    @override
    def path(self, index: int) -> str:
        return self.chain.paths[index]

    @override
    def shared_layers(self) -> tuple[tuple[int, ...], ...]:
        return self._held.shared_layers()

    @override
    @contextmanager
    def unwatched(self, *layers: int) -> Iterator[Sequence[nn.Module]]:
        modules = [self.module.get_submodule(self.chain.paths[index]) for index in layers]
        for index in layers:
            self._unwatch(index)
        try:
            yield modules
        finally:
            for index, layer in zip(layers, modules, strict=True):
                self._watched[index] = self._watch(index, layer)

    def _watch(self, index: int, layer: nn.Module) -> Sequence[RemovableHandle]:
        paths = self.chain.paths
        return chains.watch(layer, paths[index], index, last=index == len(paths) - 1)

    def _unwatch(self, index: int) -> None:
        for handle in self._watched.pop(index):
            handle.remove()

    @override
    def exchange(self, stages: Sequence[range], stage: int, layers: Mapping[int, nn.Module]) -> None:
        self._put_back()
        for index, layer in layers.items():
            original = self.module.get_submodule(self.chain.paths[index])
            for parent in list(self.module.modules()):
                for name in [name for name, child in modules_of(parent).items() if child is original]:
                    modules_of(parent)[name] = layer
        share(self.module, self._held.names, [f"{self.chain.paths[index]}." for index in layers])
        self.keep(stages, stage)

    def _put_back(self) -> None:
        """Restores the places of other stages' modules, as far as they are here."""
        restore_forward(self.module)
        for index in list(self._watched):
            self._unwatch(index)
        for parent, name, original in self._dropped:
            modules_of(parent)[name] = original

    def _drop(self, parent: nn.Module, name: str, stub: chains.AbsentPart) -> None:
        stub.to(self.module.device)
        self._dropped.append((parent, name, parent.get_submodule(name)))
        modules_of(parent)[name] = stub

    @override
    def is_elsewhere(self, name: str) -> bool:
        return name in self._names and not self._held.on(name, self._stage)

    @override
    def is_of_layer(self, name: str) -> bool:
        return self.chain.holds(name) is not None

    @override
    def writes(self, name: str) -> bool:
        return self._is_last or not self._held.on(name, len(self._held.stages) - 1)

    @override
    def ties(self, stages: Sequence[range]) -> tuple[Tie, ...]:
        if hasattr(self, "_held"):
            return self._held.under(stages).ties()  # found before the layers of other stages were dropped
        return _StageShare(self.module, self.chain, stages).ties()

    @override
    def modules(self, run: Run, owned: range, recorder: StepRecorder) -> Sequence[nn.Module]:
        called = WholeStep(self.module, recorder, self._take)
        (step,) = super().modules(run, owned, recorder) or (called,)
        if not (self._is_first or self._is_last):
            return [_MiddleStage(self)]

        def name() -> str:
            name = called.name if run == "forward" else f"{self._evaluation.kind if run == 'evaluation' else run}_step"
            return f"{type(self.module).__name__}.{name}()"

        return [(_FirstStage if self._is_first else _LastStage)(self, step, name)]

    def around(self) -> Mapping[str, nn.Module]:
        return {path: part for path, part in self.module.named_modules() if self.chain.holds(path) is None}

    @override
    def split(self, batch: Any, index: int) -> tuple[Any, Any]:
        return (batch, index), (batch, index)

    @override
    def begin_evaluation(
        self, kind: str, arguments: tuple[Any, ...]
    ) -> tuple[Callable[[Any], tuple[Any, Any]], Callable[[StepRecorder, Any, Any, int], bytes]]:
        _, record = super().begin_evaluation(kind, arguments)
        return lambda batch: ((batch,), (batch,)), record

    # ------------------------------------------------------------------ after a run

    @override
    def rebuild(self, state: Mapping[str, Any]) -> None:
        self._put_back()
        parameters: dict[str, nn.Parameter] = {}
        places = []
        for path, module in self.module.named_modules():
            for name, parameter in parameters_of(module).items():
                if parameter is not None:
                    same = self._held.same_as[f"{path}.{name}" if path else name]
                    places.append((module, name, same))
                    if same not in parameters or parameters[same].is_meta:
                        parameters[same] = parameter
        for module, name, same in places:
            if parameters[same].is_meta:
                empty = torch.empty_like(parameters[same], device=self.module.device)
                parameters[same] = nn.Parameter(empty, parameters[same].requires_grad)
            parameters_of(module)[name] = parameters[same]
        set_weights(self.module, state, with_dtypes=True)


class _StageShare:
    """The weights of each stage, of the whole ``module``.

    ``outside``: modules missing on a middle stage; ``same_as``: the first name of each parameter.
    """

    def __init__(self, module: nn.Module, chain: Chain, stages: Sequence[range]) -> None:
        self._chain, self.stages = chain, stages
        self.names = names_by_parameter(module.named_parameters(remove_duplicate=False))
        self.same_as = {name: names[0] for names in self.names for name in names}
        self.outside = tuple(_outside(module, "", chain))

    def shared_layers(self) -> tuple[tuple[int, ...], ...]:
        """Groups of layers that share a weight, also through modules outside."""
        last = self.stages[-1].stop - 1
        groups = []
        for names in self.names:
            found = {self._chain.holds(name) for name in names}
            layers = {layer for layer in found if layer is not None}
            if None in found:
                layers |= {0, last}
            if len(layers) > 1:
                groups.append(tuple(sorted(layers)))
        return tuple(groups)

    def under(self, stages: Sequence[range]) -> _StageShare:
        other = copy.copy(self)
        other.stages = stages
        return other

    def on(self, name: str, stage: int) -> bool:
        """Whether ``stage`` holds ``name``, of a state dict of the whole module."""
        layer = self._chain.holds(name)
        if layer is not None:
            return layer in self.stages[stage]
        return stage in (0, len(self.stages) - 1) or not any(name.startswith(f"{path}.") for path, _ in self.outside)

    def ties(self) -> tuple[Tie, ...]:
        ties = []
        for names in self.names:
            mine = {stage: [n for n in names if self.on(n, stage)] for stage in range(len(self.stages))}
            copies = tuple((stage, found[0]) for stage, found in mine.items() if found)
            if len(copies) > 1:
                ties.append(Tie(tuple(names), copies))
        return tuple(ties)


def _outside(module: nn.Module, path: str, chain: Chain) -> Iterator[tuple[str, nn.Module]]:
    """Submodules with weights that hold neither layers of the chain nor metrics."""
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        if isinstance(child, Metric) or inner in chain.paths:
            continue
        leads_on = any(layer.startswith(f"{inner}.") for layer in chain.paths)
        if leads_on or any(isinstance(part, Metric) for part in child.modules()):
            yield from _outside(child, inner, chain)
        elif any(True for kind in (child.parameters(), child.buffers()) for _ in kind):
            yield inner, child


def _release(module: nn.Module) -> None:
    """Frees tensors of ``module`` itself that a state dict can give back."""
    for name, parameter in parameters_of(module).items():
        if parameter is not None:
            parameters_of(module)[name] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)


# ---------------------------------------------------------------------- what a stage runs


class _ChainStage(nn.Module):
    """A stage of ``parts``, which runs the user's ``step``, called ``name``."""

    def __init__(self, parts: ChainParts, step: nn.Module, name: Callable[[], str]) -> None:
        super().__init__()
        self.step = step
        self._parts, self._name = parts, name


class _FirstStage(_ChainStage):
    """The step up to the chain, and the first layers."""

    @override
    def forward(self, *arguments: Any) -> tuple[Tensor, ...]:
        parts = self._parts
        tracer = chains.ChainTracer(parts.chain, self._name(), parts.owned.stop)
        recorder = SideRecorder(parts.around())
        try:
            with recorder.on(), tracer.on():
                self.step(*arguments)
            tracer.finish()  # raises: the end of the chain was not reached
        except chains.ChainEnd:  # what the step recorded so far was taken back, and is recorded on the last stage
            pass
        assert tracer.sent is not None
        calls = {index: tracer.calls[index] for index in parts.middle}
        return _message(tracer, *tracer.sent, calls, recorder.found)


class _MiddleStage(nn.Module):
    """The layers alone."""

    def __init__(self, parts: ChainParts) -> None:
        super().__init__()
        self._parts, self.layers = parts, nn.ModuleList(parts.layers()[index] for index in parts.owned)

    @override
    def forward(self, skeleton: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        chain, owned = self._parts.chain, self._parts.owned
        hidden, shape, calls, side_values = _value(skeleton, *tensors)
        recorder = SideRecorder(self._parts.around())
        with recorder.on():
            for index, layer in zip(owned, self.layers, strict=True):
                args, kwargs = calls.pop(index).with_hidden(hidden)
                hidden, shape = chains.ReturnShape.of(layer(*args, **kwargs), chain.whole[index])
        tracer = chains.ChainTracer(chain, f"layer {chain.paths[owned[-1]]!r}")
        return _message(tracer, hidden, shape, calls, {**side_values, **recorder.found})


class _LastStage(_ChainStage):
    """The whole step, with received values for the results of earlier stages' layers."""

    @override
    def forward(self, message: tuple[Tensor, ...], *arguments: Any) -> Any:
        hidden, shape, _, side_values = _value(*message)
        parts = self._parts
        tracer = chains.ChainTracer(
            parts.chain, self._name(), parts.owned.start, (hidden, shape), parts.module, side_values
        )
        with tracer.on():
            output = self.step(*arguments)
        tracer.finish(output)
        return output


def _message(
    tracer: chains.ChainTracer,
    hidden: Any,
    shape: chains.ReturnShape,
    calls: Mapping[int, chains.Call],
    side_values: Mapping[int, Sequence[SideValue]],
) -> tuple[Tensor, ...]:
    """Message to the next stage: its value, calls of middle layers, side values."""
    try:
        skeleton, tensors = take_apart((hidden, shape, dict(calls), dict(side_values)))
    except Exception as error:  # whatever the user's objects raise
        raise tracer.error(
            f"passes something to a layer on another stage that cannot be sent there ({type(error).__name__}: {error});"
            " pass tensors, numbers, strings, and lists and dicts of them"
        ) from error
    for tensor in tensors:
        if isinstance(tensor, chains.RemoteTensor):
            raise tracer.error(f"gives {tensor.what} to another layer than the next one")
    return (torch.frombuffer(bytearray(skeleton), dtype=torch.uint8), *tensors)


def _value(skeleton: Tensor, *tensors: Tensor) -> Any:
    return put_together(skeleton.cpu().numpy().tobytes(), tensors)


def is_meant_to_be_cut(module: pl.LightningModule, pipeline: LayerPaths = None) -> bool:
    """Whether ``module`` has several stages by default."""
    return isinstance(module, PipelineModule) or pipeline is not None


def parts_of(module: pl.LightningModule, num_stages: int = 1, pipeline: LayerPaths = None) -> ModelParts:
    """The parts of ``module`` for ``num_stages``; ``pipeline``: layers the user names.

    Raises ConfigurationError if it cannot be cut.
    """
    if isinstance(module, PipelineModule):
        if pipeline is not None:
            raise ConfigurationError(
                f"ReCycleStrategy(layers={pipeline!r}) names the layers of an ordinary LightningModule, and"
                f" {type(module).__name__} is a PipelineModule: it returns its layers from configure_pipeline(). Leave"
                " the option out."
            )
        return LayerParts(module)
    return ModelParts(module) if num_stages == 1 else ChainParts(module, num_stages, pipeline)
