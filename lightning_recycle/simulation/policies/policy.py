"""The interface of policies: a pure answer to "these nodes have failed, what now?".

Concept: the engine plays time; a policy says how training runs between two events (:class:`Configuration`) and what
happens at an event (:class:`Reaction`): which pauses, what is lost, how it goes on. All that a policy remembers is in
the configuration's ``layout``, so policies are frozen and answers depend only on their arguments.

Training is synchronous, so a slow worker makes all wait. Where its work is not dealt out anew, its computation takes
1 / speed as long, and nothing else does: the step is longer by (1 / speed - 1) times what a worker computes in it. For
1F1B with equal stages that is exact for the last stage and an upper bound for the others, whose idle time hides some.

Contract: ``begin`` and ``react`` are pure. ``react`` may be called again before its last answer has taken effect; it is
then given the configuration in force or, in a pause, the one to follow.

Must not know: how time advances, how GPU-seconds are counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol, runtime_checkable

from lightning_recycle.simulation.cluster import Cluster
from lightning_recycle.simulation.training_model import TrainingModel

__all__ = [
    "Configuration",
    "Context",
    "Happening",
    "Loss",
    "Pause",
    "Policy",
    "Reaction",
    "Watch",
    "WatchfulPolicy",
    "checked",
    "prolonged",
    "stopped",
    "waiting",
]


class Loss(Enum):
    """What an event undoes; undone samples are trained again and counted once."""

    NOTHING = "nothing"
    STEP = "step"
    """The step in progress."""
    CHECKPOINT = "checkpoint"
    """Everything since the newest checkpoint."""


@dataclass(frozen=True, slots=True)
class Context:
    """What is trained, on what.

    Args:
        model: the model.
        cluster: the machines.
        mtbf: seconds between two failures of the cluster on average, for checkpoint intervals; None when none happens.
    """

    model: TrainingModel
    cluster: Cluster
    mtbf: float | None = None


@dataclass(frozen=True)
class Configuration:
    """How training runs until the next event.

    Args:
        label: a few words for the timeline.
        step_seconds: duration of one step in steady state.
        samples: samples per step.
        gpus: GPUs that take part; other live ones are idle. 0 if training stands still.
        useful_gpu_seconds: F, B and W of the samples of one step, each counted once.
        repeated_gpu_seconds: computation of one step done twice: redundant or recomputed.
        slow_gpu_seconds: GPU time by which slow nodes prolong one step; the engine's.
        checkpoint_every: seconds between checkpoints, taken at the next end of a step; None for none.
        checkpoint_seconds: how long training stands still for a checkpoint.
        checkpoint_writing: how long it then takes, while training goes on, until the checkpoint can be loaded.
        layout: the policy's own data.
        fill_seconds: extra time of the first step after a stop, because later steps overlap (staggered optimizer).
            The engine adds it after every stop.
        lead_seconds: how long before the end of a step the first worker begins the next one. After that moment, all can
            only be stopped at the end of the next step.
        choice: what a policy that chooses among several ways has chosen, e.g. "layers"; empty for other policies.
        nodes: those that take part, so that a slow or wrong one matters; None for all.
    """

    label: str
    step_seconds: float
    samples: int
    gpus: int
    useful_gpu_seconds: float
    repeated_gpu_seconds: float = 0.0
    checkpoint_every: float | None = None
    checkpoint_seconds: float = 0.0
    checkpoint_writing: float = 0.0
    layout: object = None
    fill_seconds: float = 0.0
    lead_seconds: float = 0.0
    choice: str = ""
    slow_gpu_seconds: float = 0.0
    nodes: frozenset[int] | None = None

    @property
    def running(self) -> bool:
        """Whether any steps are trained."""
        return self.gpus > 0

    @property
    def throughput(self) -> float:
        """Samples/s between events, not counting checkpoints."""
        return self.samples / self.step_seconds if self.running else 0.0


def stopped(label: str, layout: object = None) -> Configuration:
    """A configuration that trains no steps."""
    return Configuration(label, 1.0, 0, 0, 0.0, layout=layout)


@dataclass(frozen=True, slots=True)
class Pause:
    """Training stands still for ``seconds``, because of ``label``."""

    label: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Happening:
    """What a policy reacts to. It includes earlier events whose reaction still waits for the end of a step.

    Args:
        time: time in seconds.
        live: all nodes that now work.
        down: nodes that have failed just now.
        up: nodes that have come back just now.
        woken: whether the alarm set by the policy's last reaction went off.
    """

    time: float
    live: frozenset[int]
    down: tuple[int, ...] = ()
    up: tuple[int, ...] = ()
    woken: bool = False


@dataclass(frozen=True)
class Reaction:
    """A policy's decision.

    Args:
        configuration: the configuration after the pauses.
        pauses: pauses in order. A pause interrupts the step in progress, which is then undone unless ``at_boundary``.
        lost: what is undone.
        at_boundary: whether to wait for the end of the newest step any worker has begun; nothing is lost then.
        saved: whether the pauses write a checkpoint, which can be loaded when they are over.
        wake: seconds until the policy wants to be asked again; a new reaction clears this alarm.
    """

    configuration: Configuration
    pauses: tuple[Pause, ...] = ()
    lost: Loss = Loss.NOTHING
    at_boundary: bool = False
    saved: bool = False
    wake: float | None = None


@dataclass(frozen=True, slots=True)
class Watch:
    """How closely a policy looks at nodes that do not fail.

    Args:
        slow_after: seconds until a slow node is known to be slow; None: nothing is done about slow nodes.
        check_every: seconds between two checks of all results, which find wrong ones before the step counts; 0: every
            step is checked; None: no checks.
        check_cost: part of a step's duration that checking adds to each step.
    """

    slow_after: float | None = None
    check_every: float | None = None
    check_cost: float = 0.0


@runtime_checkable
class Policy(Protocol):
    """A way to handle failures."""

    @property
    def ignores_failures(self) -> bool:
        """Whether nodes never fail under this policy (the upper bound)."""
        ...

    def begin(self, context: Context, live: frozenset[int]) -> Reaction:
        """How training starts on the live nodes."""
        ...

    def react(self, context: Context, current: Configuration, happening: Happening) -> Reaction | None:
        """What to do; None: nothing changes."""
        ...


@runtime_checkable
class WatchfulPolicy(Policy, Protocol):
    """A policy that has answers to slow and wrong nodes; under any other, all wait for slow ones forever."""

    @property
    def watch(self) -> Watch:
        """How slow and wrong nodes are found."""
        ...

    def slowed(self, context: Context, current: Configuration, speeds: Mapping[int, float]) -> Configuration:
        """``current`` when all know that these nodes are slow, with the work dealt out for that if the policy can."""
        ...

    def reloaded(self, context: Context, reaction: Reaction) -> Reaction:
        """``reaction``, except that all load an older checkpoint, because newer ones are wrong."""
        ...


def waiting(found: Configuration, speeds: Mapping[int, float]) -> Configuration:
    """All wait for the slowest of these nodes."""
    computing = (found.useful_gpu_seconds + found.repeated_gpu_seconds) / found.gpus
    return prolonged(found, found.step_seconds + (1 / min(speeds.values()) - 1) * computing)


def prolonged(found: Configuration, seconds: float) -> Configuration:
    """A step takes ``seconds`` because of slow nodes, at least as long as without."""
    longer = max(0.0, seconds - found.step_seconds)
    return replace(
        found, step_seconds=found.step_seconds + longer, slow_gpu_seconds=found.slow_gpu_seconds + longer * found.gpus
    )


def checked(found: Configuration, cost: float) -> Configuration:
    """Checking the results takes ``cost`` times a step, all of it computation done twice."""
    extra = cost * found.step_seconds
    repeated = found.repeated_gpu_seconds + extra * found.gpus
    return replace(found, step_seconds=found.step_seconds + extra, repeated_gpu_seconds=repeated)
