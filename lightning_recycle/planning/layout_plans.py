"""Ways to go on after a failure: what each of them is in numbers, and which of them pays.

Concept: of each way, its layout with the predicted step, what has to be sent for it, and how long training stands
still. A layout is worth a change if the seconds that it saves until the next change exceed the seconds that training
stands still for it:

    (1 - period / period of reroute) x seconds until the next change  >  stall + risk

where the risk is the chance that the next failure takes a whole stage, times what a restart costs, as far as it is
higher than with re-routing.

Contract: frozen; pure. Of what is compared, re-routing is the first.

Must not know: how layouts are found.

Units: seconds, bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, TypeAlias

from lightning_recycle.arguments import at_least
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning.change_rate import FailureRecord
from lightning_recycle.planning.fractional_cuts import Bounds, held_ranges, rounded, shared_layers
from lightning_recycle.planning.grid import Worker
from lightning_recycle.planning.layer_costs import check_cuts
from lightning_recycle.planning.layout_judging import Judgement
from lightning_recycle.planning.problem import Problem

__all__ = ["Candidate", "Changing", "Layout", "LayoutPlan", "Way", "chosen_of", "is_better", "shown", "weighed"]

Way: TypeAlias = Literal["reroute", "workers", "layers", "both"]

_LEAST_GAIN = 0.005  # of a period: less is within the error of what was measured


@dataclass(frozen=True, slots=True)
class Layout:
    """Which layers each stage holds, in all pipelines alike, and how many live workers serve it.

    Args:
        cuts: bounds of the stages: stage s holds the layers ``cuts[s]`` to ``cuts[s + 1] - 1``, at least one. Bounds
            within a layer: see :mod:`~lightning_recycle.planning.fractional_cuts`.
        workers: live workers of each stage, at least one.

    Raises:
        ConfigurationError: when a stage has no layer, or no worker.
    """

    cuts: Bounds
    workers: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "cuts", check_cuts(self.cuts))
        object.__setattr__(self, "workers", tuple(self.workers))
        if len(self.workers) != len(self.cuts) - 1 or min(self.workers) < 1:
            raise ConfigurationError(
                f"Layout(workers={self.workers!r}): give the live workers of each of the {len(self.cuts) - 1} stages, "
                "at least one."
            )

    @property
    def sizes(self) -> tuple[float, ...]:
        """Layers of each stage; of one that it shares its part."""
        return tuple(rounded(end - begin) for begin, end in pairwise(self.cuts))

    def stages_of(self, layer: int) -> tuple[int, ...]:
        """The stages that hold ``layer``: one, or two that share it."""
        return tuple(stage for stage, held in enumerate(held_ranges(self.cuts)) if layer in held)

    def __str__(self) -> str:
        sizes = "/".join(map(str, self.sizes))
        return f"{sizes} layers on {'/'.join(map(str, self.workers))} workers"


@dataclass(frozen=True, slots=True)
class Changing:
    """What a change of the layout costs besides the bytes on the links.

    Args:
        switch: seconds that all stand still at a change, without copies: agreement, new communicators, optimizers that
            are built again.
        stopped: whether training stands still anyhow at that moment, as in a recovery: then neither the switch nor the
            pipelines that are filled again cost anything more.
        least_gain: the smallest part of a period that a layout must save.
        loss: seconds that the loss of all workers of a stage costs: the restart, and steps since the checkpoint.
        record: how likely that is; None: it is not considered.
    """

    switch: float = 0.0
    stopped: bool = False
    least_gain: float = _LEAST_GAIN
    loss: float = 0.0
    record: FailureRecord | None = None

    def __post_init__(self) -> None:
        for name in ("switch", "least_gain", "loss"):
            at_least("Changing", name, getattr(self, name))

    def risk(self, owners: Sequence[int]) -> float:
        """Seconds that the next failure costs by the chance that it takes all of the owners of a part of the model."""
        return self.loss * self.record.loss_chance(owners, sum(owners)) if self.record is not None else 0.0


@dataclass(frozen=True)
class Candidate:
    """One way to go on, in numbers.

    Args:
        way: which one.
        layout: cuts and workers by stage; of a way that is refused, those of now.
        failed: vacant positions under it.
        roles: new positions of the workers that change theirs, as sorted pairs (before, after).
        period: predicted seconds of a step.
        bound: a proven lower bound of it.
        bytes: to be sent in all.
        busiest: the most bytes that one worker sends or receives.
        stall: seconds that training stands still for the change: the switch, the copies, and filling the pipelines
            again.
        risk: seconds that the next change costs by the chance that a stage is lost, more than with re-routing.
        saved: seconds of training that it saves until the next change, stall and risk taken off; 0 for re-routing.
        refused: why this way is not gone; empty otherwise.
        judgement: the plan, if it was made, and how the period was found.
        problem: what is to be planned for it; None for a way that could not be gone.
    """

    way: Way
    layout: Layout
    failed: frozenset[Worker]
    period: float
    bound: float = 0.0
    roles: tuple[tuple[Worker, Worker], ...] = ()
    bytes: float = 0.0
    busiest: float = 0.0
    stall: float = 0.0
    risk: float = 0.0
    saved: float = 0.0
    refused: str = ""
    judgement: Judgement | None = field(default=None, compare=False, repr=False)
    problem: Problem | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        if self.refused:
            return f"{self.way}: {self.refused}"
        text = f"{self.way}: {self.layout}, a step of {shown(self.period)}"
        if self.way == "reroute":
            return text
        return (
            f"{text}; {self.bytes / 1e6:.4g} MB to send, a stall of {shown(self.stall)}, "
            f"saves {shown(self.saved)} until the next change"
        )


@dataclass(frozen=True)
class LayoutPlan:
    """What was chosen among which candidates.

    Args:
        chosen: the candidate with the most seconds saved.
        candidates: one for each way, re-routing first.
        next_change: seconds expected until the next change.
    """

    chosen: Candidate
    candidates: tuple[Candidate, ...]
    next_change: float

    @property
    def reroute(self) -> Candidate:
        """The candidate that moves nothing."""
        return self.candidates[0]

    @property
    def gain(self) -> float:
        """By how much steps are faster than with re-routing alone, as a fraction of a period; 0 where nothing moves."""
        return 1.0 - self.chosen.period / self.reroute.period if self.reroute.period else 0.0

    def without_schedules(self) -> LayoutPlan:
        """The figures alone, small enough for messages and history."""
        bare = tuple(replace(candidate, judgement=None, problem=None) for candidate in self.candidates)
        chosen = next(each for each, full in zip(bare, self.candidates, strict=True) if full is self.chosen)
        return LayoutPlan(chosen, bare, self.next_change)

    def expecting(self, next_change: float, changing: Changing | None = None) -> LayoutPlan:
        """The choice among the same candidates if the next change is expected in that many seconds.

        Args:
            next_change: seconds expected until the next change.
            changing: as it was planned with.
        """
        least = (changing or Changing()).least_gain
        first = self.reroute
        found = [
            weighed(each, first, next_change, least) if each.problem is not None and each is not first else each
            for each in self.candidates
        ]
        return LayoutPlan(chosen_of(found), tuple(found), next_change)

    def why(self) -> tuple[str, ...]:
        """The reasons in numbers: the choice first, then a line for each candidate."""
        moved = f" ({100 * self.gain:.1f} % faster steps)" if self.gain else ""
        until = f"{shown(self.next_change)} until the next change"
        return (f"{self.chosen.way}{moved}; expected: {until}", *map(str, self.candidates))


def chosen_of(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate that saves most; of those that save as much the first, which needs least."""
    best = max((each for each in candidates if not each.refused), key=lambda each: each.saved)
    return best if best.saved > 0 else candidates[0]


def is_better(one: Candidate, other: Candidate, sharing_gain: float) -> bool:
    """Whether ``one`` saves more; not if it shares more layers and is faster by less than ``sharing_gain``."""
    shared = [len(shared_layers(each.layout.cuts)) for each in (one, other)]
    if shared[0] != shared[1]:
        least = sharing_gain * (1 if shared[0] > shared[1] else -1)
        return one.period < other.period * (1 - least)
    return (one.saved, -one.bytes) > (other.saved, -other.bytes)


def weighed(candidate: Candidate, first: Candidate, next_change: float, least_gain: float) -> Candidate:
    """The candidate with what it saves compared with ``first``; refused if that is nothing."""
    gain = 1.0 - candidate.period / first.period
    saved = gain * next_change - candidate.stall - candidate.risk
    reason = ""
    if gain < least_gain:
        reason = f"its step of {shown(candidate.period)} is not shorter than {shown(first.period)}"
    elif saved <= 0:
        danger = f" and a risk of {shown(candidate.risk)}" if candidate.risk else ""
        reason = (
            f"a step is {100 * gain:.1f} % shorter, which in {shown(next_change)} does not pay for a stall "
            f"of {shown(candidate.stall)}{danger}"
        )
    return replace(candidate, saved=saved, refused=reason)


def shown(seconds: float) -> str:
    """A time as candidates tell it."""
    return f"{seconds:.4g} s"
