"""Results of a simulated run: throughput, GPU time by cause, and the timeline.

GPU time is counted in whole GPU-nanoseconds, so the parts of :class:`Accounting` add up exactly. Useful and repeated
time of each span are rounded down; the rest of the participants' time is bubble.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from lightning_recycle.errors import PlanningError
from lightning_recycle.simulation.failures import TICKS_PER_SECOND, as_ticks
from lightning_recycle.simulation.policy import Configuration


class Cause(str, Enum):
    """Cause of a GPU-second's use."""

    USEFUL = "useful"
    """F, B and W of samples that counted, each once."""
    BUBBLE = "bubble"
    """Taking part in a step without computing: bubbles, communication, REDUCE, STEP."""
    IDLE = "idle"
    """Alive but not taking part: spares, left-over nodes, training that cannot run."""
    REDONE = "redone"
    """Lost steps, and computation that a policy does twice (redundant or recomputed)."""
    RECONFIGURING = "reconfiguring"
    """Pauses: detection, regrouping, transfer, restart, writing checkpoints."""
    FAILED = "failed"
    """Down."""


class State(str, Enum):
    """The state of training in an interval."""

    TRAINING = "training"
    LOST = "lost"
    """Trained, but undone by a later failure."""
    PAUSED = "paused"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Interval:
    """Seconds without a change; ``throughput`` leaves out samples that are lost later."""

    begin: float
    end: float
    state: State
    label: str
    gpus: int
    """Number of GPUs that take part."""
    live_gpus: int
    throughput: float
    choice: str = ""
    """Choice of a policy with several ways: "reroute", "layers", ..."""


@dataclass(frozen=True, slots=True)
class SimulatedEvent:
    """An event at ``time`` seconds with the nodes concerned.

    "failure", "repair", or "alarm" (of the policy).
    """

    time: float
    kind: str
    nodes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Accounting:
    """GPU-nanoseconds by cause."""

    useful: int = 0
    bubble: int = 0
    idle: int = 0
    redone: int = 0
    reconfiguring: int = 0
    failed: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts, in GPU-nanoseconds."""
        return sum(getattr(self, cause.value) for cause in Cause)

    def seconds(self, cause: Cause | str) -> float:
        """GPU-seconds of a cause."""
        return float(getattr(self, Cause(cause).value)) / TICKS_PER_SECOND

    def fractions(self) -> dict[str, float]:
        """Fraction of all GPU time, by cause."""
        return {cause.value: getattr(self, cause.value) / self.total if self.total else 0.0 for cause in Cause}


FIGURES = ("throughput", "ratio", "ratio_per_gpu", "fraction_of_ideal", "goodput", "ettr", "mfu", "cost")
"""The properties of a result that are numbers."""


@dataclass(frozen=True)
class SimulationResult:
    """One simulated run.

    Args:
        model: name of the model.
        policy: class name of the policy.
        duration: simulated time in seconds.
        gpus: GPUs of the cluster.
        samples: samples trained and kept; an unfinished last step counts for the part that is done.
        fault_free_throughput: samples/s of the model's grid under 1F1B without failures.
        fault_free_gpus: GPUs of that grid.
        accounting: where the GPU time went.
        intervals: the timeline.
        events: failures and repairs.
        flops_per_sample: floating-point operations of a sample, without those that are done again.
        peak_flops: of one GPU, per second.
        price: of a GPU and hour.
    """

    model: str
    policy: str
    duration: float
    gpus: int
    samples: float
    fault_free_throughput: float
    fault_free_gpus: int
    accounting: Accounting
    intervals: tuple[Interval, ...]
    events: tuple[SimulatedEvent, ...]
    flops_per_sample: float = 0.0
    peak_flops: float = 1.0
    price: float = 0.0

    @property
    def throughput(self) -> float:
        """Samples/s over the whole duration."""
        return self.samples / self.duration

    @property
    def ratio(self) -> float:
        """Throughput relative to fault-free 1F1B."""
        return self.throughput / self.fault_free_throughput

    @property
    def ratio_per_gpu(self) -> float:
        """The same per GPU of the cluster, idle spares included."""
        return self.ratio * self.fault_free_gpus / self.gpus

    @property
    def fraction_of_ideal(self) -> float:
        """Throughput relative to live GPUs without bubbles, pauses and repetition."""
        live = self.accounting.total - self.accounting.failed
        return self.accounting.useful / live if live else 0.0

    @property
    def goodput(self) -> float:
        """Fraction of the GPU time, failed GPUs included, spent on samples that count."""
        return self.accounting.fractions()["useful"]

    @property
    def ettr(self) -> float:
        """Effective training time ratio: fraction of the duration with steps that count."""
        trained = (each.end - each.begin for each in self.intervals if each.state is State.TRAINING)
        return sum(trained) / self.duration

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: operations of the samples over the GPUs' peak."""
        return self.throughput * self.flops_per_sample / (self.peak_flops * self.gpus)

    @property
    def cost(self) -> float:
        """Of all GPUs while their nodes are up, whatever they do."""
        up = self.accounting.total - self.accounting.failed
        return self.price * up / TICKS_PER_SECOND / 3600

    @property
    def failures(self) -> int:
        """Number of node failures; a node may fail more than once."""
        return sum(len(event.nodes) for event in self.events if event.kind == "failure")

    def losses(self) -> dict[str, float]:
        """Samples/s lost by cause, against fault-free 1F1B on all GPUs; they add up.

        A GPU-second that is idle, redone, reconfiguring or failed loses what a GPU achieves in a second without
        failures; "slower steps" is the rest: the difference in bubbles, negative where a schedule is faster than 1F1B.
        """
        per_gpu_second = self.fault_free_throughput / self.fault_free_gpus
        lost = {
            cause.value: self.accounting.seconds(cause) * per_gpu_second / self.duration
            for cause in (Cause.FAILED, Cause.RECONFIGURING, Cause.REDONE, Cause.IDLE)
        }
        missing = per_gpu_second * self.gpus - self.throughput
        return {**lost, "slower steps": missing - sum(lost.values())}


@dataclass(frozen=True, slots=True)
class Span:
    """Ticks without a change; ``configuration`` is in force, or follows the pause."""

    begin: int
    end: int
    state: State
    label: str
    configuration: Configuration
    live_gpus: int

    @property
    def gpus(self) -> int:
        return min(self.configuration.gpus, self.live_gpus)

    def part(self, begin: int, end: int, state: State) -> Span:
        """The same configuration from ``begin`` to ``end``, in another state."""
        return replace(self, begin=begin, end=end, state=state)


def account(spans: Sequence[Span], gpus: int) -> Accounting:
    """GPU time of the cluster's ``gpus`` GPUs by cause.

    Raises PlanningError when a configuration claims more work than its GPUs have time, or more GPUs than are live.
    """
    useful = bubble = idle = redone = reconfiguring = failed = 0
    for span in spans:
        ticks, taking_part = span.end - span.begin, span.gpus
        failed += (gpus - span.live_gpus) * ticks
        idle += (span.live_gpus - taking_part) * ticks
        if span.state is State.TRAINING:
            work, again = _training(span, ticks)
            useful += work
            redone += again
            bubble += taking_part * ticks - work - again
        elif span.state is State.LOST:
            redone += taking_part * ticks
        else:  # nothing takes part while training is stopped
            reconfiguring += taking_part * ticks
    return Accounting(useful, bubble, idle, redone, reconfiguring, failed)


def _training(span: Span, ticks: int) -> tuple[int, int]:
    configuration = span.configuration
    step = max(1, as_ticks(configuration.step_seconds))
    work, again = as_ticks(configuration.useful_gpu_seconds), as_ticks(configuration.repeated_gpu_seconds)
    if configuration.gpus > span.live_gpus or work + again > configuration.gpus * step * (1 + 1e-6):
        raise PlanningError(
            f"the policy's configuration {configuration.label!r} is impossible: {configuration.gpus} GPUs of "
            f"{span.live_gpus} live ones do {(work + again) / 1e9:g} GPU-seconds of work in {step / 1e9:g} s."
        )
    useful = work * ticks // step
    return useful, min(again * ticks // step, configuration.gpus * ticks - useful)


def samples_of(spans: Sequence[Span]) -> float:
    """Samples that were trained and never undone."""
    return sum(
        span.configuration.samples * (span.end - span.begin) / max(1, as_ticks(span.configuration.step_seconds))
        for span in spans
        if span.state is State.TRAINING
    )
