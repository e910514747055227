"""Models on a grid of GPUs: durations and memory, a catalogue, and clusters.

Operations and bytes follow from layers, width, heads and sequence length, per sample and whole model unless a name says
otherwise; the reached fraction of the GPU's peak is chosen so that fault-free 1F1B has the measured throughput. Layers
can be cut into equal *units*, so that the fault-free split is even; the output layer's work is spread over all units.

The catalogue has the paper's fault-free throughput of three models on 32 A100 (arXiv 2405.14009), and for Megatron-LM's
four the sustained teraFLOP/s of a GPU in table 1 of Narayanan et al. (SC'21, arXiv 2104.04473). Choices where the
papers give nothing: micro-batch 1 without recomputation (with 2, the 6.7B model does not fit into 80 GB); M = 4 S
micro-batches per pipeline (with many more, the 6.7B model would have no idle time to hide a failure in, and lose more
than the reported 9 % at a failure every 2 h); 28 layers of width 3072 for 3.35B; up to 64 stages without tensor
parallelism, 64 x 24 for the largest.

Operations are from Narayanan et al., section 5.1, split into F, B and W: a linear layer costs the same in each, the
attention products have no weights and cost twice as much in B as in F. Activation bytes are from Korthikanti et al.
(arXiv 2205.05198), equation 2: s b h (34 + 5 a s / h) per layer without recomputation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

from lightning_recycle.arguments import at_least, whole
from lightning_recycle.errors import ConfigurationError, counted, unknown
from lightning_recycle.planning import Costs, Grid, Problem, Technique, one_f_one_b

_STATE_BYTES_PER_PARAMETER = 16.0
"""Mixed precision with Adam (ZeRO, arXiv 1910.02054, section 3.1).

Half-precision weight and gradient (2 + 2), single-precision weight and two moments (4 + 4 + 4).
"""

_USABLE_MEMORY = 0.9  # of a GPU; the rest is lost to the framework and fragmentation


@dataclass(frozen=True, slots=True)
class Gpu:
    """A type of GPU: peak half-precision operations/s, bytes, and bytes/s of memory."""

    name: str
    peak_flops: float
    memory_bytes: float
    memory_bandwidth: float


GPUS = {
    gpu.name: gpu
    for gpu in (  # manufacturer's data sheets, dense
        Gpu("V100-16GB", 125e12, 16e9, 0.9e12),
        Gpu("A100-40GB", 312e12, 40e9, 1.555e12),
        Gpu("A100-80GB", 312e12, 80e9, 2.0e12),
        Gpu("H100-80GB", 989e12, 80e9, 3.35e12),
        Gpu("H200-141GB", 989e12, 141e9, 4.8e12),
    )
}


@dataclass(frozen=True, slots=True)
class Transformer:
    """A GPT-style decoder.

    Args:
        layers: transformer layers.
        width: hidden size h.
        heads: attention heads a.
        sequence: tokens per sample s.
        vocabulary: entries of the embedding, which is shared with the output layer.
    """

    layers: int
    width: int
    heads: int
    sequence: int = 2048
    vocabulary: int = 51200

    def __post_init__(self) -> None:
        for item in fields(self):
            whole("Transformer", item.name, getattr(self, item.name), 1)
        if self.width % self.heads:
            raise ConfigurationError(f"Transformer(width={self.width}, heads={self.heads}): heads must divide width.")

    @property
    def parameters(self) -> int:
        """12 l h^2 + 13 l h + (V + s) h."""
        h = self.width
        return self.layers * (12 * h * h + 13 * h) + (self.vocabulary + self.sequence) * h

    @property
    def linear_flops(self) -> float:
        """Operations of all linear layers for one sample, the same in F, B and W."""
        return float(self.sequence) * (24 * self.layers * self.width**2 + 2 * self.width * self.vocabulary)

    @property
    def attention_flops(self) -> float:
        """Operations of attention in F for one sample; twice as many in B, none in W."""
        return 4.0 * self.layers * self.sequence**2 * self.width

    def flops(self, *, recompute: bool = False) -> tuple[float, float, float]:
        """Operations of (F, B, W) for one sample; with ``recompute`` B runs F again first."""
        forward = self.linear_flops + self.attention_flops
        backward = self.linear_flops + 2 * self.attention_flops + (forward if recompute else 0.0)
        return forward, backward, self.linear_flops

    def activation_bytes(self, *, recompute: bool = False) -> float:
        """Bytes of one sample from F to W; with ``recompute``, each layer's input."""
        per_token = 2.0 if recompute else 34.0 + 5.0 * self.heads * self.sequence / self.width
        return self.layers * self.sequence * self.width * per_token

    def boundary_bytes(self) -> float:
        """Bytes between two stages for one sample, in half precision."""
        return 2.0 * self.sequence * self.width

    def state_bytes(self) -> float:
        """Bytes of weights, gradients and optimizer state."""
        return self.parameters * _STATE_BYTES_PER_PARAMETER


@dataclass(frozen=True, slots=True)
class TrainingModel:
    """The model to train, its grid and its fault-free speed.

    Args:
        name: name in reports.
        transformer: dimensions of the model.
        pipelines: pipelines of the fault-free grid, D.
        stages: stages of the fault-free grid, S.
        global_batch: samples per optimizer step.
        microbatch: samples per micro-batch; D * microbatch must divide the global batch.
        throughput: fault-free samples/s under 1F1B, the calibration; None if ``efficiency`` is given instead.
        efficiency: fraction of the GPU's peak that is reached; ignored with ``throughput``.
        gpu: name of a GPU type, or a Gpu.
        recompute: whether activations are computed again in the backward.
        network_bandwidth: bytes/s from one worker to another (100 Gb/s by default).
        network_latency: seconds for an empty message.

    Raises:
        ConfigurationError: when a value is impossible, or the throughput is beyond the GPU's peak.
    """

    name: str
    transformer: Transformer
    pipelines: int
    stages: int
    global_batch: int
    microbatch: int = 1
    throughput: float | None = None
    efficiency: float = 0.4
    gpu: str | Gpu = "A100-80GB"
    recompute: bool = False
    network_bandwidth: float = 12.5e9
    network_latency: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("pipelines", "stages", "global_batch", "microbatch"):
            whole("TrainingModel", name, getattr(self, name), 1)
        if isinstance(self.gpu, str):
            if self.gpu not in GPUS:
                remedy = f"choose one of {', '.join(GPUS)}, or give a Gpu(...)"
                raise ConfigurationError.for_option("TrainingModel", "gpu", self.gpu, remedy, GPUS)
            object.__setattr__(self, "gpu", GPUS[self.gpu])
        at_least("TrainingModel", "network_bandwidth", self.network_bandwidth, above=True)
        at_least("TrainingModel", "network_latency", self.network_latency)
        if self.global_batch % (self.pipelines * self.microbatch):
            raise ConfigurationError.for_option(
                "TrainingModel",
                "global_batch",
                self.global_batch,
                f"{counted(self.pipelines, 'pipeline')} with micro-batches of {self.microbatch} need a multiple of"
                f" {self.pipelines * self.microbatch}",
            )
        if self.throughput is None:
            at_least("TrainingModel", "efficiency", self.efficiency, above=True)
        else:
            at_least("TrainingModel", "throughput", self.throughput, above=True)
            object.__setattr__(self, "efficiency", _calibrated(self, self.throughput))

    @property
    def grid(self) -> Grid:
        """The fault-free grid."""
        return Grid(self.pipelines, self.stages, self.global_batch // (self.pipelines * self.microbatch))

    @property
    def gpus(self) -> int:
        """GPUs of the fault-free grid."""
        return self.pipelines * self.stages

    @property
    def device(self) -> Gpu:
        """The GPU type."""
        assert isinstance(self.gpu, Gpu)
        return self.gpu

    @property
    def units(self) -> int:
        """Equal parts between which the model can be cut: lcm(layers, stages)."""
        return math.lcm(self.transformer.layers, self.stages)

    @property
    def sample_seconds(self) -> tuple[float, float, float]:
        """(F, B, W) of one sample through the whole model, as if one worker had it all."""
        rate = self.device.peak_flops * self.efficiency
        forward, backward, weight = (flops / rate for flops in self.transformer.flops(recompute=self.recompute))
        return forward, backward, weight

    @property
    def useful_gpu_seconds(self) -> float:
        """GPU-seconds of F, B and W of one global batch: the least a step needs."""
        return self.global_batch * sum(self.sample_seconds) - self.recomputed_gpu_seconds

    @property
    def recomputed_gpu_seconds(self) -> float:
        """GPU-seconds of forwards recomputed for the backward, one global batch."""
        return self.global_batch * self.sample_seconds[0] if self.recompute else 0.0

    def state_bytes(self, part: float) -> float:
        """Weights, gradients and optimizer state of ``part`` of the model on one GPU."""
        return part * self.transformer.state_bytes()

    def activation_bytes(self, part: float) -> float:
        """Bytes of one micro-batch from F to W on one GPU, for ``part`` of the model."""
        kept = self.transformer.activation_bytes(recompute=self.recompute)
        return part * self.microbatch * kept

    @property
    def memory_bytes(self) -> float:
        """Usable memory of one GPU."""
        return self.device.memory_bytes * _USABLE_MEMORY

    def transfer_seconds(self, part: float) -> float:
        """Time to copy the state of ``part`` of the model to one worker's GPUs."""
        return self.network_latency + self.state_bytes(part) / self.network_bandwidth if part else 0.0

    def even(self) -> tuple[int, ...]:
        """Units of each stage of the fault-free grid."""
        return (self.units // self.stages,) * self.stages

    def costs(self, units: Sequence[int] | None = None, pipelines: int | None = None) -> Costs:
        """Seconds of stages of that many units (by default the fault-free split).

        REDUCE is a ring all-reduce of half-precision gradients among ``pipelines`` replicas, STEP reads and writes the
        optimizer's state once.
        """
        parts = [count / self.units for count in (self.even() if units is None else units)]
        replicas = self.pipelines if pipelines is None else pipelines
        forward, backward, weight = (seconds * self.microbatch for seconds in self.sample_seconds)
        gradients = 2.0 * self.transformer.parameters
        ring = 2.0 * (replicas - 1) / replicas / self.network_bandwidth
        message = self.microbatch * self.transformer.boundary_bytes() / self.network_bandwidth
        return Costs(
            forward=tuple(forward * part for part in parts),
            backward_input=tuple(backward * part for part in parts),
            backward_weight=tuple(weight * part for part in parts),
            reduce=tuple(gradients * part * ring for part in parts),
            optimizer=tuple(2.0 * self.state_bytes(part) / self.device.memory_bandwidth for part in parts),
            communication=self.network_latency + message if len(parts) > 1 else 0.0,
        )

    def in_flight_limit(self, units: Sequence[int] | None = None) -> tuple[int, ...]:
        """Micro-batches that fit into a worker of each stage; 0 if the state does not."""
        limits = []
        for count in self.even() if units is None else units:
            free = self.memory_bytes - self.state_bytes(count / self.units)
            held = self.activation_bytes(count / self.units)
            limits.append(max(0, min(self.grid.global_microbatches, int(free // held))))
        return tuple(limits)

    def fault_free_seconds(self) -> float:
        """Duration of one step of the fault-free 1F1B schedule."""
        return one_f_one_b_seconds(self.costs(), self.grid.microbatches)


@lru_cache(maxsize=4096)
def one_f_one_b_seconds(costs: Costs, microbatches: int) -> float:
    """One step of 1F1B of one pipeline, with REDUCE and a common end."""
    problem = Problem(Grid(1, costs.stages, microbatches), costs, technique=Technique(False, False))
    return one_f_one_b(problem).makespan


def _calibrated(model: TrainingModel, throughput: float) -> float:
    """The efficiency at which fault-free 1F1B has that throughput."""
    goal = model.global_batch / throughput
    object.__setattr__(model, "efficiency", 1.0)
    if model.fault_free_seconds() > goal:
        raise ConfigurationError.for_option(
            "TrainingModel",
            "throughput",
            throughput,
            f"{model.name} on {model.gpus} {model.device.name} cannot be "
            f"faster than {model.global_batch / model.fault_free_seconds():.3g} samples/s: give less",
        )
    # Secant method: the step is nearly a straight line over 1 / efficiency.
    x0, y0, x1 = 1.0, model.fault_free_seconds(), goal / model.fault_free_seconds()
    for _ in range(50):
        object.__setattr__(model, "efficiency", 1.0 / x1)
        y1 = model.fault_free_seconds()
        if abs(y1 - goal) <= 1e-9 * goal or x0 == x1:
            break
        x0, y0, x1 = x1, y1, x1 + (goal - y1) * (x1 - x0) / (y1 - y0)
    return 1.0 / x1


@dataclass(frozen=True)
class MeasuredModel(TrainingModel):
    """A training model with known durations.

    Takes the arguments of ``TrainingModel`` except a calibration, and:

    Args:
        stage_costs: costs of the fault-free stages, in seconds, e.g. ``load_profile("profile.json").costs()``.

    Raises:
        ConfigurationError: as for ``TrainingModel``, and when the costs are not those of its stages, or all zero.
    """

    stage_costs: Costs = field(kw_only=True)

    def __post_init__(self) -> None:
        if self.throughput is not None:
            raise ConfigurationError(
                f"MeasuredModel(throughput={self.throughput!r}): measured stages need no calibration; leave it out."
            )
        super().__post_init__()
        if self.stage_costs.stages != self.stages:
            raise ConfigurationError(
                f"MeasuredModel(stage_costs): {self.name} has {counted(self.stages, 'stage')}, the costs have "
                f"{self.stage_costs.stages}."
            )
        if sum(self.sample_seconds) <= 0:
            raise ConfigurationError("MeasuredModel(stage_costs): F, B and W take no time at all; give seconds.")

    @property
    def sample_seconds(self) -> tuple[float, float, float]:
        """(F, B, W) of one sample through all stages."""
        costs = self.stage_costs
        forward, backward, weight = (
            sum(part) / self.microbatch for part in (costs.forward, costs.backward_input, costs.backward_weight)
        )
        return forward, backward, weight

    def costs(self, units: Sequence[int] | None = None, pipelines: int | None = None) -> Costs:
        """The measured durations, for any number of ``pipelines``.

        Raises:
            ConfigurationError: for ``units`` other than those of the fault-free split.
        """
        if units is not None and tuple(units) != self.even():
            raise ConfigurationError(
                f"{self.name}: the measured stages say nothing about stages of {tuple(units)} "
                "units: use a policy that leaves the layers where they are, such as Recycle."
            )
        return self.stage_costs


def _settings(shape: Transformer, pipelines: int, stages: int, batch: int, **more: Any) -> dict[str, Any]:
    return {"transformer": shape, "pipelines": pipelines, "stages": stages, "global_batch": batch, **more}


def _megatron(shape: Transformer, pipelines: int, stages: int, batch: int, teraflops: float) -> dict[str, Any]:
    # Megatron counts the recomputed forward: 96 B s l h^2 (1 + s / 6h + V / 16 l h).
    throughput = pipelines * stages * teraflops * 1e12 / sum(shape.flops(recompute=True))
    bandwidth = 25e9  # one 200 Gb/s adapter per GPU
    known = {"throughput": throughput, "recompute": True, "network_bandwidth": bandwidth}
    return _settings(shape, pipelines, stages, batch, **known)


_SETTINGS = {
    "gpt3_medium": _settings(Transformer(24, 1024, 16), 16, 2, 128, throughput=27.58),
    "gpt3_3_35b": _settings(Transformer(28, 3072, 32), 8, 4, 128, throughput=14.87),
    "gpt3_6_7b": _settings(Transformer(32, 4096, 32), 4, 8, 128, throughput=5.33),
    "megatron_18_4b": _megatron(Transformer(40, 6144, 48), 16, 16, 1024, 135),
    "megatron_39_1b": _megatron(Transformer(48, 8192, 64), 16, 32, 1536, 138),
    "megatron_76_1b": _megatron(Transformer(60, 10240, 80), 16, 64, 1792, 140),
    "megatron_145_6b": _megatron(Transformer(80, 12288, 96), 24, 64, 2304, 148),
}


def available_models() -> tuple[str, ...]:
    """The names that :func:`get_model` knows, by size."""
    return tuple(_SETTINGS)


def get_model(name: str, **changes: object) -> TrainingModel:
    """The model of that name, optionally with settings changed.

    For example ``get_model("gpt3_6_7b", global_batch=1024)``.

    Raises:
        ConfigurationError: when the name is unknown, or a changed setting is impossible.
    """
    if name not in _SETTINGS:
        raise ConfigurationError(unknown("model", name, _SETTINGS))
    return TrainingModel(name=name, **{**_SETTINGS[name], **changes})


@dataclass(frozen=True, slots=True)
class Cluster:
    """``nodes`` nodes of ``gpus_per_node`` GPUs, with a link for each worker.

    When one GPU fails, its node is taken out until it is repaired, as schedulers do. Use ``gpus_per_node=1`` where
    single GPUs fail. ``price`` is that of a GPU and hour, in any currency; a node is paid for while it is up.
    """

    nodes: int
    gpus_per_node: int = 1
    price: float = 0.0

    def __post_init__(self) -> None:
        whole("Cluster", "nodes", self.nodes, 1)
        whole("Cluster", "gpus_per_node", self.gpus_per_node, 1)
        at_least("Cluster", "price", self.price)

    @classmethod
    def of(cls, model: TrainingModel, *, gpus_per_node: int = 1, extra_nodes: int = 0, price: float = 0.0) -> Cluster:
        """The nodes that the model's fault-free grid needs, plus ``extra_nodes``.

        Raises:
            ConfigurationError: when the grid does not fill whole nodes.
        """
        if model.gpus % whole("Cluster", "gpus_per_node", gpus_per_node, 1):
            raise ConfigurationError.for_option(
                "Cluster",
                "gpus_per_node",
                gpus_per_node,
                f"{model.name} needs {model.gpus} GPUs, not a whole number of nodes",
            )
        return cls(model.gpus // gpus_per_node + whole("Cluster", "extra_nodes", extra_nodes), gpus_per_node, price)

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.nodes * self.gpus_per_node
