"""Which layers a stage gets: a cut of the model into contiguous parts.

Concept: every layer has a load (1, its parameters, or seconds), a stage has the sum of its layers' loads, and the
pipeline is as fast as its most loaded stage. :func:`cut` is the exact optimum and a pure function of the loads;
:func:`stage_layers` finds the loads of a module.

Must not know: processes, schedules.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_recycle.arguments import is_integer
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.model.layers import AbsentLayer, count_parameters
from lightning_recycle.planning.planning_options import Partition

if TYPE_CHECKING:
    from lightning_recycle.model.module import PipelineModule

__all__ = ["cut", "cut_layers", "even_parts", "measure_layer_seconds", "parameter_counts", "stage_layers"]


def cut(loads: Sequence[float], num_stages: int) -> tuple[range, ...]:
    """Cuts layers into ``num_stages`` contiguous parts, none empty, such that the largest load of a part is minimal.

    Among the cuts with that maximum, it is the one with the least sum of squared loads, the most even one; among
    those, the first stage takes the fewest layers, then the second, and so on, because early stages hold the
    activations of more micro-batches. Exact: loads are compared as rational numbers, without rounding.

    Args:
        loads: load of each layer, all in the same unit; finite and at least 0.
        num_stages: number of stages, at least 1.

    Returns:
        The layer indices of each stage.

    Raises:
        ConfigurationError: if there are fewer layers than stages, or a load is negative, infinite or NaN.
    """
    if num_stages < 1:
        raise ConfigurationError(f"num_stages={num_stages}: a model has at least one stage.")
    _check_enough_layers(len(loads), num_stages)
    for index, load in enumerate(loads):
        if not math.isfinite(load) or load < 0:
            raise ConfigurationError(f"The load of layer {index} is {load!r}; give a finite number of at least 0.")
    fractions = [Fraction(load if isinstance(load, int) else float(load)) for load in loads]
    scale = math.lcm(*(f.denominator for f in fractions))
    before = [0, *accumulate(int(f * scale) for f in fractions)]  # before[i]: exact load of the layers before i
    bounds = _most_even(before, num_stages, _least_maximum(before, num_stages))
    return tuple(range(bounds[stage], bounds[stage + 1]) for stage in range(num_stages))


def _least_maximum(before: Sequence[int], num_stages: int) -> int:
    """The smallest load that bounds every stage of some cut (bisection; a greedy pass decides each candidate)."""
    loads = [b - a for a, b in pairwise(before)]

    def stages_needed(limit: int) -> int:
        stages, load = 1, 0
        for item in loads:
            if load + item > limit:
                stages, load = stages + 1, 0
            load += item
        return stages

    low, high = max(*loads, -(-before[-1] // num_stages)), before[-1]
    while low < high:
        middle = (low + high) // 2
        if stages_needed(middle) <= num_stages:
            high = middle
        else:
            low = middle + 1
    return low


def _most_even(before: Sequence[int], num_stages: int, limit: int) -> list[int]:
    """Bounds of the cut with no stage above ``limit`` and the least sum of squares; on a tie, the earliest bounds.

    Dynamic programming from the last stage to the first: ``best[i]`` is the least sum for layers i, i + 1, ... on the
    stages from the current one on.
    """
    num_layers = len(before) - 1
    best: dict[int, int] = {num_layers: 0}
    choices: list[dict[int, int]] = []
    for stage in reversed(range(num_stages)):
        current: dict[int, int] = {}
        choice: dict[int, int] = {}
        for start in range(stage, num_layers):
            for end in range(start + 1, num_layers + 1):
                load = before[end] - before[start]
                if load > limit:
                    break
                if end in best and (start not in current or load * load + best[end] < current[start]):
                    current[start], choice[start] = load * load + best[end], end
        best = current
        choices.append(choice)
    bounds = [0]
    for choice in reversed(choices):
        bounds.append(choice[bounds[-1]])
    return bounds


def even_parts(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """Cuts ``num_layers`` layers into ``num_stages`` contiguous parts whose sizes differ by at most one.

    Later stages get the larger parts: the first holds more micro-batches in flight.

    Raises:
        ConfigurationError: if there are fewer layers than stages.
    """
    _check_enough_layers(num_layers, num_stages)
    size, larger = divmod(num_layers, num_stages)
    bounds = [0, *accumulate(size + (stage >= num_stages - larger) for stage in range(num_stages))]
    return tuple(range(bounds[stage], bounds[stage + 1]) for stage in range(num_stages))


def stage_layers(
    module: PipelineModule,
    num_stages: int,
    partition: Partition = "count",
) -> tuple[range, ...]:
    """The layers of each stage of ``module``; builds none of them.

    Args:
        module: the module whose layers are distributed.
        num_stages: number of stages, S.
        partition: ``"count"``, numbers of layers that differ by at most one; ``"parameters"``, the largest number of
            parameters of a stage is minimal (a tied parameter counts in each of its layers); the number of layers of
            each stage, as integers such as ``[3, 5, 4]``; or the seconds of each layer for forward and backward of one
            micro-batch, as floats, e.g. from :func:`measure_layer_seconds`: the largest sum of a stage is minimal.

    Raises:
        ConfigurationError: if there are fewer layers than stages, or the partition does not fit the model.
    """
    return cut_layers(module.layers, num_stages, partition)


def cut_layers(
    layers: Sequence[nn.Module] | nn.ModuleList,
    num_stages: int,
    partition: Partition = "count",
) -> tuple[range, ...]:
    """As :func:`stage_layers`, for the layers themselves."""
    num_layers = len(layers)
    _check_enough_layers(num_layers, num_stages)
    if partition == "count":
        return even_parts(num_layers, num_stages)
    if partition == "parameters":
        return cut(_parameter_counts(layers), num_stages)
    if isinstance(partition, str) or not isinstance(partition, Sequence):
        raise ConfigurationError(
            f"partition={partition!r}: use 'count', 'parameters', the number of layers of each stage as integers, as in"
            " [3, 5, 4], or the seconds of each layer as floats, as measure_layer_seconds(module, batch) finds them."
        )
    if any(isinstance(load, float) for load in partition):
        if len(partition) != num_layers:
            raise ConfigurationError(
                f"partition={partition!r} has the seconds of {len(partition)} layers; the model has {num_layers}. For"
                " the number of layers of each stage, give integers."
            )
        return cut([float(load) for load in partition], num_stages)
    return _by_hand(partition, num_layers, num_stages)


def _by_hand(partition: Sequence[Any], num_layers: int, num_stages: int) -> tuple[range, ...]:
    if not all(is_integer(size, 1) for size in partition):
        raise ConfigurationError(
            f"partition={partition!r}: give the number of layers of each stage, whole numbers of at least 1."
        )
    if len(partition) != num_stages:
        raise ConfigurationError(
            f"partition={partition!r} describes {len(partition)} stages; pipeline_parallel_size is {num_stages}."
        )
    if sum(partition) != num_layers:
        raise ConfigurationError(
            f"partition={partition!r} distributes {sum(partition)} layers; the model has {num_layers}."
        )
    bounds = [0, *accumulate(partition)]
    return tuple(range(bounds[stage], bounds[stage + 1]) for stage in range(num_stages))


def _check_enough_layers(num_layers: int, num_stages: int) -> None:
    if num_layers < num_stages:
        raise ConfigurationError(
            f"The model has {num_layers} layers, fewer than pipeline_parallel_size={num_stages} stages."
            f" Use pipeline_parallel_size={num_layers} or less, or split the model into more layers in"
            " configure_pipeline()."
        )


# ---------------------------------------------------------------------- loads of a module's layers


def parameter_counts(module: PipelineModule) -> tuple[int, ...]:
    """The number of parameters (elements) of each layer; a :class:`LayerSpec` is built on the meta device.

    Raises:
        ConfigurationError: if a layer cannot be built, or its parameters have no shapes yet.
    """
    return _parameter_counts(module.layers)


def _parameter_counts(layers: Iterable[nn.Module]) -> tuple[int, ...]:
    counts = []
    for index, layer in enumerate(layers):
        if isinstance(layer, AbsentLayer) and layer.spec is not None:
            counts.append(layer.spec.count_parameters(index))
        else:
            counts.append(count_parameters(layer, index))
    return tuple(counts)


def measure_layer_seconds(module: PipelineModule, batch: Any, repeats: int = 3) -> tuple[float, ...]:
    """Measures forward and backward of each layer on one micro-batch, in this process.

    A :class:`LayerSpec` is built for its measurement and dropped, so the whole model is never held. Gradients,
    the state of torch's generator and running statistics (buffers) of concrete layers are unchanged afterwards.

    Args:
        module: the module whose layers are measured, in training mode.
        batch: a micro-batch as the DataLoader collates it, on the device of the layers.
        repeats: number of measurements per layer, after a warm-up; the median counts.

    Returns:
        Seconds of each layer.
    """
    value, _ = module.split_batch(batch)
    seconds = []
    with torch.random.fork_rng():
        for index, layer in enumerate(module.layers):
            if isinstance(layer, AbsentLayer) and layer.spec is not None:
                layer = layer.build(index, seed=0)
            with _training_without_traces(layer):
                seconds.append(statistics.median([_time(layer, value) for _ in range(repeats + 1)][1:]))
                with torch.no_grad():
                    value = _run(layer, _entering(value, gradient=False))
    return tuple(seconds)


@contextmanager
def _training_without_traces(layer: nn.Module) -> Iterator[None]:
    """Puts ``layer`` in training mode; restores modes and buffers afterwards."""
    modes = [(module, module.training, dict(module._buffers)) for module in layer.modules()]
    values = {id(buffer): buffer.clone() for buffer in layer.buffers()}
    layer.train()
    try:
        yield
    finally:
        for module, mode, buffers in modes:
            module.training = mode
            for name, buffer in buffers.items():
                module._buffers[name] = None if buffer is None else buffer.copy_(values[id(buffer)])


def _time(layer: nn.Module, value: Any) -> float:
    """Seconds of one forward and backward of ``layer``."""
    entered = _entering(value, gradient=True)
    _synchronize(entered)
    started = time.perf_counter()
    output = _run(layer, entered)
    ends = [t for t in _tensors(output) if t.requires_grad]
    starts = [t for t in (*layer.parameters(), *_tensors(entered)) if t.requires_grad]
    if ends:
        torch.autograd.grad(ends, starts, [torch.ones_like(t) for t in ends], allow_unused=True)
    _synchronize(output)
    return time.perf_counter() - started


def _run(layer: nn.Module, value: Any) -> Any:
    return layer(*value) if isinstance(value, tuple) else layer(value)


def _entering(value: Any, gradient: bool) -> Any:
    """A copy of ``value``; its floating-point tensors optionally require a gradient."""
    if isinstance(value, tuple):
        return tuple(_entering(item, gradient) for item in value)
    if not isinstance(value, Tensor):
        return value
    differentiable = gradient and (value.is_floating_point() or value.is_complex())
    return value.detach().requires_grad_(differentiable).clone()  # not a leaf, which in-place layers would refuse


def _tensors(value: Any) -> list[Tensor]:
    items = value if isinstance(value, tuple) else (value,)
    return [item for item in items if isinstance(item, Tensor)]


def _synchronize(value: Any) -> None:
    if any(t.is_cuda for t in _tensors(value)):
        torch.cuda.synchronize()
