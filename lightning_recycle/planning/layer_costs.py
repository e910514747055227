"""Costs of single layers, of any cut of a model into stages, and of moving layers.

A stage takes the sum of its layers' seconds, per micro-batch (F, B, W, BW) or per step (REDUCE, STEP). Where a bound
lies within a layer, each holder takes its part in the mean (:mod:`~lightning_recycle.planning.cuts`).

Workers copy further layers from live holders at the same time. Each link sends and receives at once, so the busiest
direction of a link decides. Owners of a layer take turns, the one with the least to send so far first.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lightning_recycle.arguments import at_least
from lightning_recycle.errors import ConfigurationError, PlanningError
from lightning_recycle.planning.costs import Costs, Memory, communication_seconds
from lightning_recycle.planning.cuts import (
    Bounds,
    bounds_of,
    check_cuts,
    held_ranges,
    parts_of,
    shared_layers,
)
from lightning_recycle.planning.grid import Grid, OpKind, Worker
from lightning_recycle.planning.timing import MicrobatchVariation, SharedLayer

_SECONDS = ("forward", "backward_input", "backward_weight", "backward", "reduce", "optimizer")
_BYTES = ("output_bytes", "held_bytes", "waiting_bytes", "parameter_bytes", "optimizer_bytes")


@dataclass(frozen=True)
class LayerCosts:
    """Costs of each layer and of links; tuples have one value per layer.

    Args:
        forward: seconds of F of one micro-batch.
        backward_input: seconds of B, where the backward is split.
        backward_weight: seconds of W.
        backward: seconds of BW, the fused backward; empty: B + W.
        reduce: seconds of a step that its stage waits for the reduction of the layer's gradients; empty: 0.
        optimizer: seconds of STEP; empty: 0.
        output_bytes: activations of one micro-batch at its output, sent to the next stage where a cut is behind it;
            empty: 0.
        held_bytes: what one micro-batch holds from F to B; empty: ``output_bytes``.
        waiting_bytes: what one micro-batch holds from B to W; empty: ``held_bytes``.
        parameter_bytes: parameters, gradients and buffers; empty: 0.
        optimizer_bytes: state of the optimizer, and copies of the version before; empty: 0.
        memory_limit: bytes of a worker for all of this; None for no limit.
        bandwidth: bytes/s of the link of a worker, in each direction; 0 if unknown: then only the latency counts.
        latency: seconds for an empty message.

    Raises:
        ConfigurationError: when a value is negative, not finite or missing.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    backward: tuple[float, ...] = ()
    reduce: tuple[float, ...] = ()
    optimizer: tuple[float, ...] = ()
    output_bytes: tuple[float, ...] = ()
    held_bytes: tuple[float, ...] = ()
    waiting_bytes: tuple[float, ...] = ()
    parameter_bytes: tuple[float, ...] = ()
    optimizer_bytes: tuple[float, ...] = ()
    memory_limit: float | None = None
    bandwidth: float = 0.0
    latency: float = 0.0

    def __post_init__(self) -> None:
        count = len(tuple(self.forward))
        if not count:
            raise ConfigurationError("LayerCosts(forward=()): give the seconds of at least one layer.")
        for name in (*_SECONDS, *_BYTES):
            values = tuple(at_least("LayerCosts", name, value) for value in getattr(self, name))
            if not values:
                values = self._default(name, count)
            if len(values) != count:
                raise ConfigurationError(
                    f"LayerCosts({name}) has {len(values)} values for {count} layers: give one per layer."
                )
            object.__setattr__(self, name, values)
        for name in ("bandwidth", "latency"):
            object.__setattr__(self, name, at_least("LayerCosts", name, getattr(self, name)))
        if self.memory_limit is not None:
            at_least("LayerCosts", "memory_limit", self.memory_limit)

    def _default(self, name: str, count: int) -> tuple[float, ...]:
        if name == "backward":
            return tuple(map(sum, zip(self.backward_input, self.backward_weight, strict=True)))
        if name == "held_bytes":
            return self.output_bytes
        return self.held_bytes if name == "waiting_bytes" else (0.0,) * count

    @classmethod
    def from_stages(
        cls,
        costs: Costs,
        cuts: Sequence[float],
        weights: Sequence[float],
        *,
        backward: Sequence[float] = (),
        held_bytes: Sequence[float] = (),
        waiting_bytes: Sequence[float] = (),
        **known: Any,
    ) -> LayerCosts:
        """Layers of stages that were measured as a whole: each gets its weight's part.

        Args:
            costs: seconds by stage under the cuts.
            cuts: the bounds of the stages.
            weights: each layer's part, relative to others of its stage, e.g. its seconds or its parameters.
            backward: seconds of BW by stage, where it was measured.
            held_bytes, waiting_bytes: of one micro-batch, by stage.
            known: what else is known, by layer, as in the class; the latency is by default the costs' communication.
        """
        bounds = check_cuts(cuts)
        if costs.stages != len(bounds) - 1:
            raise ConfigurationError(
                f"costs are given for {costs.stages} stages, cuts={bounds!r} for {len(bounds) - 1}: "
                "give the cuts under which they were measured."
            )
        count = int(bounds[-1])
        by_layer = [at_least("", "weights", weight) for weight in weights]
        if len(by_layer) != count:
            raise ConfigurationError(f"weights has {len(by_layer)} values for {count} layers: give one per layer.")

        def spread(values: Sequence[float], held: bool = False) -> tuple[float, ...]:
            """Values by layer from values by stage, over micro-batches or ``held`` layers."""
            found: list[list[float]] = [[] for _ in range(count)]
            for parts, value in zip(parts_of(bounds), values, strict=True):
                own = {layer: by_layer[layer] * (1.0 if held else part) for layer, part in parts.items()}
                total = sum(own.values())
                for layer, weight in own.items():
                    found[layer].append(value * (weight / total if total else 1 / len(own)))
            return tuple(sum(each) / (len(each) if held else 1) for each in found)

        return cls(
            forward=spread(costs.forward),
            backward_input=spread(costs.backward_input),
            backward_weight=spread(costs.backward_weight),
            backward=spread(backward) if backward else (),
            reduce=spread([costs.of(OpKind.REDUCE, stage) for stage in range(costs.stages)], held=True),
            optimizer=spread(costs.optimizer, held=True),
            held_bytes=spread(held_bytes) if held_bytes else (),
            waiting_bytes=spread(waiting_bytes) if waiting_bytes else (),
            **{"latency": costs.communication, **known},
        )

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.forward)

    @cached_property
    def state_bytes(self) -> tuple[float, ...]:
        """Bytes of each layer's state: parameters and optimizer."""
        return tuple(map(sum, zip(self.parameter_bytes, self.optimizer_bytes, strict=True)))

    def work(self, *, split_backward: bool) -> tuple[float, ...]:
        """Seconds of each layer for forward and backward of one micro-batch."""
        if not split_backward:
            return tuple(map(sum, zip(self.forward, self.backward, strict=True)))
        return tuple(map(sum, zip(self.forward, self.backward_input, self.backward_weight, strict=True)))

    def costs(self, cuts: Sequence[float], *, split_backward: bool = True) -> Costs:
        """The planner's costs of the stages between ``cuts``, for the mean micro-batch.

        With ``split_backward=False`` they are those of fused backwards: B and W together take what BW takes. A layer
        that stages share is counted twice in REDUCE: its gradients are summed within each stage, then exchanged.

        Raises:
            ConfigurationError: when the cuts are none of these layers.
        """
        bounds = check_cuts(cuts, self.layers)
        forward, inputs, weights = (
            self._stages(values, bounds) for values in (self.forward, self.backward_input, self.backward_weight)
        )
        if not split_backward:
            fused = self._stages(self.backward, bounds)
            inputs, weights = fused, tuple(0.0 for _ in fused)
        return Costs(
            forward=forward,
            backward_input=inputs,
            backward_weight=weights,
            reduce=self._held(self.reduce, bounds),
            optimizer=self._held(self.optimizer, bounds),
            communication=self._communication(bounds),
        )

    def memory(self, cuts: Sequence[float]) -> Memory | None:
        """The memory of a worker of each stage between ``cuts``; None without a limit.

        Micro-batches count as the mean of all, with room for one more run of a shared layer.
        """
        if self.memory_limit is None:
            return None
        bounds = check_cuts(cuts, self.layers)
        return Memory(
            capacity=(self.memory_limit,) * (len(bounds) - 1),
            fixed=tuple(map(sum, zip(self._held(self.state_bytes, bounds), self._reserved(bounds), strict=True))),
            after_forward=self._stages(self.held_bytes, bounds),
            after_backward=self._stages(self.waiting_bytes, bounds),
        )

    def variation(
        self, cuts: Sequence[float], grid: Grid, *, split_backward: bool = True
    ) -> MicrobatchVariation | None:
        """Differences between micro-batches; None if no layer is shared."""
        cuts = check_cuts(cuts, self.layers)
        shared = shared_layers(cuts)
        if not shared:
            return None
        indices = [each.index * grid.pipelines + each.pipeline for each in grid.all_microbatches()]
        bounds = [bounds_of(cuts, index, grid) for index in indices]
        backward = self.backward_input if split_backward else self.backward
        layers = []
        for layer, (stage, _) in shared.items():
            earlier = tuple(number for number, own in enumerate(bounds) if own[stage + 1] > layer)
            later = tuple(number for number, own in enumerate(bounds) if own[stage + 1] <= layer)
            whole = self._held(self.reduce, cuts)[stage]
            layers.append(SharedLayer(stage, self.reduce[layer] / whole if whole else 0.0, earlier, later))

        def relative(values: Sequence[float]) -> tuple[tuple[float, ...], ...]:
            mean = self._stages(values, cuts)
            known = {
                own: tuple(
                    mine / usual if usual else 1.0 for mine, usual in zip(self._stages(values, own), mean, strict=True)
                )
                for own in set(bounds)
            }
            return tuple(known[own] for own in bounds)

        return MicrobatchVariation(
            relative(self.forward),
            relative(backward),
            relative(self.backward_weight),
            relative(self.held_bytes),
            relative(self.waiting_bytes),
            tuple(layers),
            self._reserved(cuts),
        )

    def _reserved(self, cuts: Sequence[float]) -> tuple[float, ...]:
        """Bytes by stage for running a shared layer once more than the mean."""
        return tuple(
            sum(self.held_bytes[layer] for layer, part in parts.items() if part < 1) for parts in parts_of(cuts)
        )

    def _communication(self, bounds: Bounds) -> float:
        sizes = [
            self.output_bytes[layer - 1] for bound in bounds[1:-1] for layer in {math.floor(bound), math.ceil(bound)}
        ]
        if not sizes:
            return 0.0
        if not self.bandwidth:
            return self.latency
        return communication_seconds(sizes, latency_seconds=self.latency, bandwidth_bytes_per_second=self.bandwidth)

    @staticmethod
    def _stages(values: Sequence[float], bounds: Bounds) -> tuple[float, ...]:
        return tuple(sum(values[layer] * part for layer, part in parts.items()) for parts in parts_of(bounds))

    @staticmethod
    def _held(values: Sequence[float], bounds: Bounds) -> tuple[float, ...]:
        return tuple(sum(values[held.start : held.stop]) for held in held_ranges(bounds))


@dataclass(frozen=True, order=True, slots=True)
class LayerMove:
    """A layer that a worker gets.

    Args:
        layer: its index.
        source: the worker that sends it, by its position before the change.
        receiver: the worker that gets it, by its position before the change.
    """

    layer: int
    source: Worker
    receiver: Worker


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of several moves: of all, the most on a link, and the number of moves."""

    total: float = 0.0
    busiest: float = 0.0
    copied: int = 0

    def seconds(self, bandwidth: float, latency: float) -> float:
        """Seconds until the last copy has arrived; by latency alone if 0 bandwidth."""
        if not self.copied:
            return 0.0
        return latency + (self.busiest / bandwidth if bandwidth else 0.0)


def layer_moves(
    grid: Grid,
    failed: Collection[Worker],
    before: Sequence[float],
    after: Sequence[float],
    roles: Mapping[Worker, Worker] | None = None,
    state_bytes: Sequence[float] | None = None,
) -> tuple[LayerMove, ...]:
    """The copies that take all live workers from one cut to another.

    Args:
        failed: vacant positions before the change.
        before, after: bounds of the stages, as in :mod:`~lightning_recycle.planning.layer_costs`.
        roles: the new position of each live worker; by default all stay.
        state_bytes: bytes of each layer, by which owners share the sends; by default all are equal.

    Raises:
        PlanningError: when a layer has no live owner.
    """
    gone = set(failed)
    owners: list[list[Worker]] = [[] for _ in range(grid.stages)]
    for worker in grid.workers():
        if worker not in gone:
            owners[worker.stage].append(worker)
    had, gets = held_ranges(before), held_ranges(after)
    sent: defaultdict[Worker, float] = defaultdict(float)
    found = []
    for stage in range(grid.stages):
        for worker in owners[stage]:
            target = (roles or {}).get(worker, worker).stage
            for layer in gets[target]:
                if layer in had[stage]:
                    continue
                stages = [other for other in range(grid.stages) if layer in had[other]]
                holders = [holder for other in stages for holder in owners[other]]
                if not holders:
                    raise PlanningError(
                        f"layer {layer} has no live owner: all {grid.lanes} replicas of stage "
                        f"{' and '.join(map(str, stages))} have failed. Restart from a checkpoint."
                    )
                source = min(holders, key=lambda holder: (sent[holder], holder))
                sent[source] += 1 if state_bytes is None else state_bytes[layer]
                found.append(LayerMove(layer, source, worker))
    return tuple(found)


def traffic(moves: Collection[LayerMove], state_bytes: Sequence[float]) -> Traffic:
    """The bytes of ``moves``, given those of each layer."""
    sent: defaultdict[Worker, float] = defaultdict(float)
    received: defaultdict[Worker, float] = defaultdict(float)
    for move in moves:
        sent[move.source] += state_bytes[move.layer]
        received[move.receiver] += state_bytes[move.layer]
    return Traffic(sum(received.values()), max([0.0, *received.values(), *sent.values()]), len(moves))
