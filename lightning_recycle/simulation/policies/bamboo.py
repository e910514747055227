"""Bamboo: every worker also runs the forward of its successor's stage, and takes it over when the successor dies.

Source: Thorpe et al., NSDI'23 (arXiv 2204.12013), and the simulator in its public repository (uclasystem/bamboo), the
origin of the constants.

Assumptions:

- Redundant forwards are always computed: each worker's F is its own and that of the next stage (the last stage has the
  first one's). They count as redone.
- A worker holds the state and the activations of two stages. (The paper swaps activations to the host; here they stay
  on the GPU, so the 3.35B and 6.7B models run out of memory as reported.) A model that does not fit does not run.
- After a single loss the predecessor runs both stages; every step takes ``slowdown`` times as long, and nothing is
  lost.
- Reconfiguration at the end of a step when waiting nodes cover the overloaded ones, when twice the overloaded ones
  exceed ``threshold`` of the active ones, or when another pipeline can be formed. It takes ``reconfigure`` and
  leaves as many whole pipelines as there are workers for.
- Fatal: the lost worker or its predecessor is overloaded, or both are lost. Then training restarts from the newest
  checkpoint after ``rendezvous``.
- A node that comes back needs ``node_start`` until it can take part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_recycle.arguments import at_least, fraction
from lightning_recycle.planning import Costs
from lightning_recycle.simulation.policies.common import CommonPolicy, pauses
from lightning_recycle.simulation.policies.policy import (
    Configuration,
    Context,
    Happening,
    Loss,
    Pause,
    Reaction,
    stopped,
)
from lightning_recycle.simulation.policies.workers import (
    Teams,
    assemble_teams,
    crowded,
    crowding,
    live_workers,
    nodes_of,
    whole_pipelines,
)
from lightning_recycle.simulation.training_model import TrainingModel
from lightning_recycle.simulation.units import Duration, as_seconds

__all__ = ["Bamboo"]

_STATE_COPIES = 2  # stages whose state a worker holds


@dataclass(frozen=True, slots=True)
class _Layout:
    """Pipelines, and the positions (pipeline, stage) of lost workers, whose predecessors run both stages."""

    teams: Teams = ()
    lost: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class Bamboo(CommonPolicy):
    """Bamboo. Takes the arguments of ``CommonPolicy``, and:

    Args:
        slowdown: factor on the step time while a worker runs two stages.
        reconfigure: seconds for a planned reconfiguration.
        rendezvous: seconds to restart after a fatal failure.
        node_start: seconds until a node that came back can take part.
        threshold: fraction of the active workers that may be without redundancy.
        activation_copies: number of stages whose activations a worker holds.
    """

    slowdown: float = 1.5
    reconfigure: Duration = 20.0
    rendezvous: Duration = 30.0
    node_start: Duration = 45.0
    threshold: float = 0.05
    activation_copies: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("reconfigure", "rendezvous", "node_start"):
            object.__setattr__(self, name, as_seconds(f"Bamboo({name})", getattr(self, name)))
        at_least("Bamboo", "slowdown", self.slowdown, 1.0)
        at_least("Bamboo", "activation_copies", self.activation_copies, 1.0)
        fraction("Bamboo", "threshold", self.threshold)

    def memory_bytes(self, model: TrainingModel) -> float:
        """What the first stage's GPUs need: redundant state, and S micro-batches in flight, redundantly."""
        part = 1 / model.stages
        in_flight = min(model.stages, model.grid.microbatches) * model.activation_bytes(part)
        return _STATE_COPIES * model.state_bytes(part) + self.activation_copies * in_flight

    def fits(self, model: TrainingModel) -> bool:
        """Whether the model runs under this policy at all."""
        return model.stages > 1 and self.memory_bytes(model) <= model.memory_bytes

    def begin(self, context: Context, live: frozenset[int]) -> Reaction:
        """See :class:`Policy`."""
        if not self.fits(context.model):
            return Reaction(stopped("out of memory", _Layout()))
        return Reaction(self._rebuilt(context, (), live_workers(context, live)))

    def react(self, context: Context, current: Configuration, happening: Happening) -> Reaction | None:
        """See :class:`Policy`."""
        before = current.layout
        assert isinstance(before, _Layout)
        if not self.fits(context.model):
            return None
        workers = live_workers(context, happening.live)
        if not before.teams:
            found = self._rebuilt(context, (), workers)
            return Reaction(found, self._fatal(context)) if found.running else None
        alive = set(workers)
        gone = {
            (p, s) for p, team in enumerate(before.teams) for s, worker in enumerate(team) if worker not in alive
        } - before.lost
        if gone:
            return self._lose(context, before, gone, workers)
        if happening.up:
            return Reaction(current, wake=max(1e-3, float(self.node_start)))
        if happening.woken and self._should_reconfigure(context, before, alive):
            found = self._rebuilt(context, before.teams, workers)
            steps = self.regrouping(len(workers), broken=False, reconfigure=float(self.reconfigure))
            return Reaction(found, steps, at_boundary=True)
        return None

    def _lose(
        self, context: Context, before: _Layout, gone: set[tuple[int, int]], workers: tuple[int, ...]
    ) -> Reaction:
        stages = context.model.stages
        lost = before.lost | gone
        # Fatal: a lost position whose predecessor is lost as well; that covers a predecessor that does both stages.
        if any((p, (s - 1) % stages) in lost for p, s in gone) or any((p, (s + 1) % stages) in lost for p, s in gone):
            found = self._rebuilt(context, before.teams, workers)
            steps = self._fatal(context) if found.running else ()
            return Reaction(found, steps, Loss.CHECKPOINT)
        slow = self._configuration(context, _Layout(before.teams, lost))
        # Asked again at once; that decision takes effect at the end of the step.
        return Reaction(slow, wake=1e-3)

    def _fatal(self, context: Context) -> tuple[Pause, ...]:
        """The pauses of a restart from a checkpoint, with Bamboo's own time for it."""
        return pauses(rendezvous=float(self.rendezvous), load=self.checkpoint_costs(context).loading)

    def reloaded(self, context: Context, reaction: Reaction) -> Reaction:
        """See :class:`Policy`."""
        steps = self._fatal(context) if reaction.configuration.running else ()
        return replace(super().reloaded(context, reaction), pauses=steps)

    def _should_reconfigure(self, context: Context, layout: _Layout, alive: set[int]) -> bool:
        stages = context.model.stages
        overloaded = len(layout.lost)
        places = {(p, s): worker for p, team in enumerate(layout.teams) for s, worker in enumerate(team)}
        waiting = len(alive.difference(worker for place, worker in places.items() if place not in layout.lost))
        active = len(layout.teams) * stages - overloaded
        if overloaded and (waiting >= overloaded or 2 * overloaded / active > self.threshold):
            return True
        return min((active + waiting) // stages, context.model.pipelines) > len(layout.teams)

    def _rebuilt(self, context: Context, before: Teams, workers: tuple[int, ...]) -> Configuration:
        model = context.model
        teams, _ = assemble_teams(before, workers, model.stages, model.pipelines)
        return self._configuration(context, _Layout(teams))

    def _configuration(self, context: Context, layout: _Layout) -> Configuration:
        model = context.model
        usual = whole_pipelines(context, self, layout.teams, "bamboo")
        if not usual.running:
            return replace(usual, layout=_Layout())
        micro = -(-model.grid.global_microbatches // len(layout.teams))
        step = self.pipeline_step(
            model,
            micro,
            _redundant(crowded(model.costs(), crowding(context, layout.teams))),
            self._in_flight_limit(model),
        )
        seconds = step.seconds * (self.slowdown if layout.lost else 1.0)
        redundant = model.global_batch * model.sample_seconds[0] * model.tensor_parallel
        gpus = usual.gpus - len(layout.lost) * model.tensor_parallel
        work = usual.useful_gpu_seconds + usual.repeated_gpu_seconds + redundant
        # With few stages, the factor alone would give the overloaded workers more work than they have time for.
        seconds = max(seconds, work / gpus)
        return replace(
            usual,
            label=f"{usual.label}, {len(layout.lost)} overloaded" if layout.lost else usual.label,
            step_seconds=seconds,
            gpus=gpus,
            repeated_gpu_seconds=usual.repeated_gpu_seconds + redundant,
            layout=layout,
            nodes=nodes_of(
                context,
                (
                    worker
                    for p, team in enumerate(layout.teams)
                    for s, worker in enumerate(team)
                    if (p, s) not in layout.lost
                ),
            ),
            fill_seconds=step.fill,
            lead_seconds=step.lead,
        )

    def _in_flight_limit(self, model: TrainingModel) -> tuple[int, ...]:
        """Micro-batches that fit beside the redundant state, for a schedule that holds more than 1F1B."""
        part = 1 / model.stages
        free = model.memory_bytes - _STATE_COPIES * model.state_bytes(part)
        held = int(free // (self.activation_copies * model.activation_bytes(part)))
        return (max(held, model.stages),) * model.stages


def _redundant(costs: Costs) -> Costs:
    """Each stage also runs the forward of the next one."""
    forward = tuple(mine + costs.forward[(s + 1) % costs.stages] for s, mine in enumerate(costs.forward))
    return replace(costs, forward=forward)
