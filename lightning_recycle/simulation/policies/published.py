"""Bamboo and Varuna, as their publications describe them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from lightning_recycle.arguments import fraction
from lightning_recycle.planning import Costs
from lightning_recycle.planning.layouts.layout_candidates import Judgement
from lightning_recycle.simulation.policies.policy import (
    Configuration,
    Context,
    Downtime,
    Loss,
    Policy,
    Reaction,
    Trigger,
    pauses,
    stopped,
)
from lightning_recycle.simulation.policies.whole_pipelines import Teams, assemble_teams, whole_pipelines
from lightning_recycle.simulation.step_times import DEFAULT_EFFORT, pipeline_step
from lightning_recycle.simulation.training_model import TrainingModel
from lightning_recycle.simulation.units import Duration, keep_seconds

_COPIES = 2  # stages whose state and activations a worker holds
_SLOWDOWN = 1.5  # factor on the step time while a worker runs two stages
_RECONFIGURE, _RENDEZVOUS = 20.0, 30.0  # seconds for a planned reconfiguration, and to restart after a fatal failure


@dataclass(frozen=True, slots=True)
class _Layout:
    """Pipelines, and lost positions (pipeline, stage), which predecessors run too."""

    teams: Teams = ()
    lost: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class Bamboo(Policy):
    """Each worker also runs its successor's forward, and takes it over if that dies.

    Source: Thorpe et al., NSDI'23 (arXiv 2204.12013), and the simulator in its public repository (uclasystem/bamboo),
    the origin of the constants.

    Assumptions:

    - Redundant forwards are always computed: each worker's F is its own and that of the next stage (the last stage has
      the first one's). They count as redone.
    - A worker holds the state and the activations of two stages. (The paper swaps activations to the host; here they
      stay on the GPU, so the 3.35B and 6.7B models run out of memory as reported.) A model that does not fit does not
      run.
    - After a single loss the predecessor runs both stages; every step takes 1.5 times as long, and nothing is
      lost.
    - Reconfiguration at the end of a step when waiting nodes cover the overloaded ones, when twice the overloaded ones
      exceed ``threshold`` of the active ones, or when another pipeline can be formed. It takes 20 s and
      leaves as many whole pipelines as there are workers for.
    - Fatal: the lost worker or its predecessor is overloaded, or both are lost. Then training restarts from the newest
      checkpoint after 30 s.
    - A node that comes back needs ``node_start`` until it can take part.

    Takes the arguments of ``Policy``, and:

    Args:
        node_start: seconds until a node that came back can take part.
        threshold: fraction of the active workers that may be without redundancy.
    """

    node_start: Duration = 45.0
    threshold: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_seconds(self, "node_start")
        fraction("Bamboo", "threshold", self.threshold)

    def memory_bytes(self, model: TrainingModel) -> float:
        """Bytes of the first stage's GPUs: redundant state, and S micro-batches twice."""
        part = 1 / model.stages
        in_flight = min(model.stages, model.grid.microbatches) * model.activation_bytes(part)
        return _COPIES * (model.state_bytes(part) + in_flight)

    def fits(self, model: TrainingModel) -> bool:
        """Whether the model runs under this policy at all."""
        return model.stages > 1 and self.memory_bytes(model) <= model.memory_bytes

    def begin(self, context: Context, live: frozenset[int]) -> Reaction:
        """See :class:`Policy`."""
        if not self.fits(context.model):
            return Reaction(stopped("out of memory", _Layout()))
        return Reaction(self._rebuilt(context, (), context.workers(live)))

    def react(self, context: Context, current: Configuration, trigger: Trigger) -> Reaction | None:
        """See :class:`Policy`."""
        before = current.layout
        assert isinstance(before, _Layout)
        if not self.fits(context.model):
            return None
        workers = context.workers(trigger.live)
        if not before.teams:
            found = self._rebuilt(context, (), workers)
            return Reaction(found, self._fatal(context)) if found.running else None
        alive = set(workers)
        gone = {
            (p, s) for p, team in enumerate(before.teams) for s, worker in enumerate(team) if worker not in alive
        } - before.lost
        if gone:
            return self._lose(context, before, gone, workers)
        if trigger.up:
            return Reaction(current, wake=max(1e-3, float(self.node_start)))
        if trigger.woken and self._should_reconfigure(context, before, alive):
            found = self._rebuilt(context, before.teams, workers)
            steps = self.regrouping(len(workers), broken=False, reconfigure=_RECONFIGURE)
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

    def _fatal(self, context: Context) -> tuple[Downtime, ...]:
        """The pauses of a restart from a checkpoint, with Bamboo's own time for it."""
        return pauses(rendezvous=_RENDEZVOUS, load=self.checkpoint_costs(context).loading)

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
            _redundant(model.costs()),
            self._in_flight_limit(model),
        )
        seconds = step.period * (_SLOWDOWN if layout.lost else 1.0)
        redundant = model.global_batch * model.sample_seconds[0]
        gpus = usual.gpus - len(layout.lost)
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
            fill_seconds=step.fill,
            lead_seconds=step.lead,
        )

    def _in_flight_limit(self, model: TrainingModel) -> tuple[int, ...]:
        """Micro-batches that fit beside the redundant state, for a planned schedule."""
        part = 1 / model.stages
        free = model.memory_bytes - _COPIES * model.state_bytes(part)
        held = int(free // (_COPIES * model.activation_bytes(part)))
        return (max(held, model.stages),) * model.stages


def _redundant(costs: Costs) -> Costs:
    """Each stage also runs the forward of the next one."""
    forward = tuple(mine + costs.forward[(s + 1) % costs.stages] for s, mine in enumerate(costs.forward))
    return replace(costs, forward=forward)


@dataclass(frozen=True)
class Varuna(Policy):
    """Every change of the cluster restarts the job with a new depth.

    Source: Athlur et al., EuroSys'22 (arXiv 2111.04007) and its public repository (microsoft/varuna), which writes a
    checkpoint every 10 min while training stands still; here it has the checkpoints of all policies.

    Assumptions:

    - For each depth P that divides the cut points (the layers), D = floor(G / P) pipelines with the largest micro-batch
      that fits, at most that of the model (durations here are proportional to it, so a larger one only adds bubbles);
      the depth with the shortest simulated step wins.
    - Activations are recomputed: B includes F, which counts as redone.
    - The global batch stays the same.
    - The job is restarted both for failures and for returning nodes; the public scripts take 60 to 120 s, hence
      ``restart``.

    Takes the arguments of ``Policy``, and:

    Args:
        restart: seconds to restart the job.
    """

    restart: Duration = 90.0

    def begin(self, context: Context, live: frozenset[int]) -> Reaction:
        """See :class:`Policy`."""
        return Reaction(self._configuration(context, context.workers(live)))

    def react(self, context: Context, current: Configuration, trigger: Trigger) -> Reaction | None:
        """See :class:`Policy`."""
        used = current.layout
        assert isinstance(used, frozenset)
        workers = context.workers(trigger.live)
        if not used.issubset(workers):
            found = self._configuration(context, workers)
            return self.restarted(context, found, broken=True)
        found = self._configuration(context, workers)
        if not trigger.up or not found.running or found.throughput <= current.throughput:
            return None
        if not current.running:
            return Reaction(found, self.restarting(context, broken=False))
        return self.growing(context, found)

    def _configuration(self, context: Context, workers: tuple[int, ...]) -> Configuration:
        model = context.model
        again = replace(model, recompute=True, throughput=None)
        layout = morph(again, len(workers), self.schedule, self.effort)
        if layout is None:
            return stopped("does not fit", frozenset())
        pipelines, stages, microbatch, step = layout
        used = workers[: pipelines * stages]
        label = f"varuna, {pipelines} x {stages}, micro-batch {microbatch}"
        return replace(
            self.running(context, label, step, pipelines * stages, frozenset(used)),
            repeated_gpu_seconds=model.global_batch * model.sample_seconds[0],
        )


@lru_cache(maxsize=4096)
def morph(
    model: TrainingModel,
    workers: int,
    schedule: str = "1f1b",
    effort: int = DEFAULT_EFFORT,
) -> tuple[int, int, int, Judgement] | None:
    """(D, P, micro-batch, step) of the fastest depth; None when none fits.

    The depth is chosen by 1F1B, as Varuna's own simulator does.
    """
    best: tuple[int, int, int, Judgement] | None = None
    chosen: tuple[TrainingModel, int] | None = None
    layers = model.transformer.layers
    for depth in (depth for depth in range(1, layers + 1) if layers % depth == 0):
        pipelines = min(workers // depth, model.global_batch)
        size = _largest_fitting(model, depth) if pipelines else 0
        if not size:
            continue
        shape = replace(model, pipelines=1, stages=depth, microbatch=size, global_batch=size)
        micro = -(-model.global_batch // (pipelines * size))
        step = pipeline_step("1f1b", shape.costs(pipelines=pipelines), micro)
        if best is None or step < best[3]:
            best, chosen = (pipelines, depth, size, step), (shape, micro)
    if best is None or chosen is None:
        return None
    shape, micro = chosen
    costs = shape.costs(pipelines=best[0])
    # Its own micro-batches at most S deep, as many as 1F1B holds, which is what _largest_fitting has checked.
    limit = (shape.stages,) * shape.stages
    return (*best[:3], pipeline_step(schedule, costs, micro, limit, effort))


def _largest_fitting(model: TrainingModel, depth: int) -> int:
    """Samples of the largest micro-batch of which ``depth`` can be in flight, or 0."""
    free = model.memory_bytes - model.state_bytes(1 / depth)
    shape = model.transformer
    # Inputs of the layers for each micro-batch in flight, and one layer being recomputed.
    held = depth * shape.activation_bytes(recompute=True) / depth + shape.activation_bytes() / shape.layers
    size = model.microbatch
    while size and size * held > free:
        size //= 2
    return size
