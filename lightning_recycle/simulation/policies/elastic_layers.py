"""Elastic layers: re-route at once as ReCycle does, then move layers between stages until all are equally loaded.

Source: the idea of ElasWave (arXiv 2510.00606) and of Odyssey (arXiv 2508.21613), re-routing and moving layers to
rebalance the stages; the systems themselves are not modelled. The first reaction and all its constants are those of the
ReCycle policy.

Assumptions:

- After a failure the layers are redistributed in whole units of a layer (``TrainingModel.units``) so that the slowest
  stage, the one with the most layers per live worker, is as fast as memory allows. Each stage keeps its workers.
- The layers are copied in the background, with parameters and optimizer state, at ``share`` of a worker's network
  link, while training continues as under ReCycle; every worker of a stage receives its stage's new layers.
- Then all switch at the end of a step, which takes ``change`` seconds.
- A new failure before that aborts the move, which then starts again from the current state.
- Failures are normalized first, as in ReCycle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from lightning_recycle.arguments import at_least
from lightning_recycle.planning import Problem, Technique, normalized_failures
from lightning_recycle.simulation.planned_steps import PlannedStep, planned_step
from lightning_recycle.simulation.policies.common import pauses
from lightning_recycle.simulation.policies.policy import Configuration, Context, Happening, Reaction
from lightning_recycle.simulation.policies.recycle import Recycle
from lightning_recycle.simulation.policies.workers import Placement, crowded, shared_transfer
from lightning_recycle.simulation.training_model import TrainingModel
from lightning_recycle.simulation.units import Duration, as_seconds

__all__ = ["ElasticLayers"]


@dataclass(frozen=True)
class ElasticLayers(Recycle):
    """Re-routing, then moving layers. Takes the arguments of ``Recycle``, and:

    Args:
        share: fraction of a link's bandwidth that background copies may use.
        change: seconds all wait for the switch.
        gain: smallest fraction of the step time that a move must save.
    """

    share: float = 0.5
    change: Duration = 2.0
    gain: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "change", as_seconds("ElasticLayers(change)", self.change))
        at_least("ElasticLayers", "share", self.share, above=True)
        at_least("ElasticLayers", "gain", self.gain)

    def begin(self, context: Context, live: frozenset[int]) -> Reaction:
        """See :class:`Policy`. Nodes missing from the start need no move."""
        first = super().begin(context, live)
        better, _ = self._balanced(context, first.configuration)
        return Reaction(first.configuration if better is None else better)

    def react(self, context: Context, current: Configuration, happening: Happening) -> Reaction | None:
        """See :class:`Policy`."""
        reaction = super().react(context, current, happening)
        if reaction is None:
            better, _ = self._balanced(context, current) if happening.woken else (None, 0.0)
            if better is None:
                return None
            return Reaction(better, pauses(change=float(self.change)), at_boundary=True)
        better, seconds = self._balanced(context, reaction.configuration)
        if better is None:
            return reaction
        before = sum(pause.seconds for pause in reaction.pauses) + reaction.configuration.fill_seconds
        return replace(reaction, wake=before + seconds)

    def _balanced(self, context: Context, found: Configuration) -> tuple[Configuration | None, float]:
        """The configuration with moved layers, if it is worth it, and the seconds of the move."""
        layout = found.layout
        assert isinstance(layout, Placement)
        failures = layout.failures(context.model.grid)
        if not found.running or not self.adaptive or not any(failures):
            return None, 0.0
        factor = self._crowding(context, layout)
        units, step = _best_split(context.model, failures, self.technique, self.effort, factor)
        if not step.seconds < found.step_seconds * (1 - self.gain):
            return None, 0.0
        moved = _moved(context.model, units) / context.model.units
        everyone = dict.fromkeys((worker for worker, _ in layout.positions), moved)
        copying = shared_transfer(context, everyone, context.model.transfer_seconds(moved)) / self.share
        label = f"{found.label}, layers moved"
        better = replace(found, label=label, step_seconds=step.seconds, fill_seconds=step.fill, lead_seconds=step.lead)
        return better, copying


@lru_cache(maxsize=4096)
def _best_split(
    model: TrainingModel, failures: tuple[int, ...], technique: Technique, effort: int, factor: float
) -> tuple[tuple[int, ...], PlannedStep]:
    """Units of each stage in proportion to its live workers, and the planned step."""
    live = [model.pipelines - count for count in failures]
    units = [0] * model.stages
    open_stages = list(range(model.stages))
    for _ in range(model.units):  # the next unit goes where the stage stays fastest, memory permitting
        open_stages = [s for s in open_stages if _fits(model, units[s] + 1)]
        if not open_stages:
            return model.even(), PlannedStep(float("inf"))
        stage = min(open_stages, key=lambda s: ((units[s] + 1) / live[s], s))
        units[stage] += 1
    parts = tuple(units)
    if min(parts) == 0 or min(model.in_flight_limit(parts)) < 1:
        return model.even(), PlannedStep(float("inf"))
    gone = normalized_failures(model.grid, failures)
    problem = Problem(model.grid, crowded(model.costs(parts), factor), gone, technique, model.in_flight_limit(parts))
    return parts, planned_step(problem, effort)


def _fits(model: TrainingModel, units: int) -> bool:
    """Whether a worker with that many units can hold as many micro-batches as there are stages."""
    part = units / model.units
    return model.state_bytes(part) + model.stages * model.activation_bytes(part) <= model.memory_bytes


def _moved(model: TrainingModel, units: tuple[int, ...]) -> int:
    """The most units a stage receives when the even split becomes ``units``, with layers kept in order."""
    even = model.even()
    most, begin_old, begin_new = 0, 0, 0
    for old, new in zip(even, units, strict=True):
        common = max(0, min(begin_old + old, begin_new + new) - max(begin_old, begin_new))
        most = max(most, new - common)
        begin_old, begin_new = begin_old + old, begin_new + new
    return most
