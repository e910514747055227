"""What a policy is: a pure answer to "these nodes have failed, what now?".

Concept: the engine plays time; a policy says how training runs between two events (:class:`Configuration`) and what
happens at an event (:class:`Reaction`): which pauses, what is lost, how it goes on. Everything that a policy remembers
is in the configuration's ``layout``, so policies are frozen and answers depend on their arguments only.

Contract: ``begin`` and ``react`` are pure. ``react`` may be called again before its last answer has taken effect; it is
then given the configuration that is in force, or, in a pause, the one that is to follow.

Must not know: how time is played, how GPU-seconds are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

from lightning_recycle.simulation.cluster import Cluster
from lightning_recycle.simulation.training_model import TrainingModel

__all__ = ["Configuration", "Context", "Happening", "Loss", "Pause", "Policy", "Reaction", "stopped"]


class Loss(Enum):
    """What an event undoes; samples that are undone are trained again and counted once."""

    NOTHING = "nothing"
    STEP = "step"
    """The step in progress."""
    CHECKPOINT = "checkpoint"
    """Everything since the newest checkpoint."""


@dataclass(frozen=True, slots=True)
class Context:
    """What is trained, and on which machines."""

    model: TrainingModel
    cluster: Cluster


@dataclass(frozen=True)
class Configuration:
    """How training runs until the next event.

    Args:
        label: in a few words, for the timeline.
        step_seconds: duration of one step in steady state.
        samples: per step.
        gpus: that take part; the other live ones are idle. 0: training stands still.
        useful_gpu_seconds: F, B and W of the samples of one step, each counted once.
        repeated_gpu_seconds: computation of one step that is done twice: redundant, or recomputed.
        checkpoint_every: seconds between two checkpoints, taken at the next end of a step; None for none.
        checkpoint_seconds: how long training stands still for one.
        layout: the policy's own.
        fill_seconds: how much longer the first step after a stop takes, because steps overlap otherwise (staggered
            optimizer). For the policy, which adds it to its pauses.
        lead_seconds: how long before the end of a step somebody begins the next one. Who wants to stop all at the end
            of a step later than that has to wait for the end of the next one.
    """

    label: str
    step_seconds: float
    samples: int
    gpus: int
    useful_gpu_seconds: float
    repeated_gpu_seconds: float = 0.0
    checkpoint_every: float | None = None
    checkpoint_seconds: float = 0.0
    layout: object = None
    fill_seconds: float = 0.0
    lead_seconds: float = 0.0

    @property
    def running(self) -> bool:
        """Whether steps are made at all."""
        return self.gpus > 0

    @property
    def throughput(self) -> float:
        """Samples/s while nothing happens, without checkpoints."""
        return self.samples / self.step_seconds if self.running else 0.0


def stopped(label: str, layout: object = None) -> Configuration:
    """A configuration that makes no steps."""
    return Configuration(label, 1.0, 0, 0, 0.0, layout=layout)


@dataclass(frozen=True, slots=True)
class Pause:
    """Training stands still for ``seconds``, because of ``label``."""

    label: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Happening:
    """What a policy reacts to. While an answer waits for the end of a step, a new happening includes what it was to.

    Args:
        time: in seconds.
        live: all nodes that work now.
        down: nodes that have failed just now.
        up: nodes that have come back just now.
        woken: whether it is the alarm that the policy's last reaction has set.
    """

    time: float
    live: frozenset[int]
    down: tuple[int, ...] = ()
    up: tuple[int, ...] = ()
    woken: bool = False


@dataclass(frozen=True)
class Reaction:
    """What a policy decides.

    Args:
        configuration: how it goes on after the pauses.
        pauses: one after the other. A pause interrupts the step in progress, which is then undone unless
            ``at_boundary``.
        lost: what is undone.
        at_boundary: wait for the end of the newest step that somebody has begun; nothing is lost then.
        wake: seconds from now after which the policy wants to be asked again; a new reaction clears the alarm.
    """

    configuration: Configuration
    pauses: tuple[Pause, ...] = ()
    lost: Loss = Loss.NOTHING
    at_boundary: bool = False
    wake: float | None = None


@runtime_checkable
class Policy(Protocol):
    """What to do about failures."""

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
