"""Re-routing: peers of a dead worker run its micro-batches; then layers may move.

Physical workers are moved to other positions of the grid with as little copying as possible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from lightning_recycle.arguments import at_least, whole
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning import Grid, Problem, Technique, Worker, layer_moves, normalized_failures, roles
from lightning_recycle.planning.layout_candidates import Judgement
from lightning_recycle.simulation.failures import Duration, keep_seconds
from lightning_recycle.simulation.policy import (
    Configuration,
    Context,
    Policy,
    Reaction,
    Trigger,
    pauses,
    stopped,
)
from lightning_recycle.simulation.step_times import ScheduleName, distribution, planned_step
from lightning_recycle.simulation.training_model import TrainingModel, one_f_one_b_seconds


@dataclass(frozen=True, slots=True)
class Placement:
    """Position of each physical worker that has one, as sorted pairs.

    ``copies``: the most states that a worker must send; different senders copy in parallel.
    """

    positions: tuple[tuple[int, Worker], ...]
    copies: int = 0

    def failures(self, grid: Grid) -> tuple[int, ...]:
        """Vacant positions of each stage."""
        held = Counter(position.stage for _, position in self.positions)
        return tuple(grid.lanes - held[stage] for stage in range(grid.stages))


def fresh(grid: Grid, workers: Collection[int], distribution: tuple[int, ...]) -> Placement:
    """A fresh placement: every worker loads its state from a checkpoint."""
    gone = normalized_failures(grid, distribution)
    positions = [position for position in grid.workers() if position not in gone]
    return Placement(tuple(zip(sorted(workers), positions, strict=False)))


def keep(grid: Grid, before: Placement, workers: Collection[int]) -> tuple[dict[int, Worker], list[Worker]]:
    """Workers that keep their positions, and the vacant positions.

    Idle workers first fill the barest stages.
    """
    live = set(workers)
    held = {worker: position for worker, position in before.positions if worker in live}
    idle = sorted(live.difference(held))
    vacant = sorted(set(grid.workers()).difference(held.values()))
    lost = Counter(position.stage for position in vacant)
    if any(count == grid.lanes for count in lost.values()):
        return held, vacant
    for worker in idle[: len(vacant)]:
        position = max(vacant, key=lambda place: (lost[place.stage], -place.pipeline, -place.stage))
        vacant.remove(position)
        lost[position.stage] -= 1
        held[worker] = position
    return held, vacant


def place(
    grid: Grid, before: Placement, workers: Collection[int], distribution: tuple[int, ...] | None = None
) -> Placement:
    """The new placement of ``workers``, at least one for each stage.

    ``distribution``: failures of each stage after normalization; None leaves the failures where they are.
    """
    held, vacant = keep(grid, before, workers)
    known = {worker for worker, _ in before.positions}
    senders: Counter[Worker] = Counter()
    for worker, position in held.items():
        if worker not in known:
            peers = [place for other, place in held.items() if place.stage == position.stage and other in known]
            senders[min(peers, key=lambda peer: (senders[peer], peer))] += 1
    if distribution is not None:
        taken = roles(grid, vacant, distribution)
        stages = range(grid.stages + 1)  # each is moved as a whole
        senders.update(move.source for move in layer_moves(grid, vacant, stages, stages, taken))
        held = {worker: taken[position] for worker, position in held.items()}
    return Placement(tuple(sorted(held.items())), max(senders.values(), default=0))


@dataclass(frozen=True)
class Recycle(Policy):
    """ReCycle: peers of a dead worker run its micro-batches, in bubbles.

    Source: Gandhi et al., SOSP'24 (arXiv 2405.14009), and this package, whose planner provides the step times.

    Assumptions:

    - A failure loses the step in progress; every worker begins it again under the new plan.
    - Every stop empties the pipelines: with the staggered optimizer, where steps overlap, the first step afterwards
      takes the makespan of its plan instead of the period ("fill").
    - Failure normalization: the failures are moved to the stages where they cost least; a worker that changes its stage
      copies parameters and optimizer state from a peer there, over its own network link, different senders in parallel.
    - Plans are ready when needed (the plan library), so planning takes no time.
    - A node that comes back waits for the end of the newest step any worker has begun (workers done with a step begin
      the next one), then copies its state while the others wait.
    - When all replicas of a stage fail at once, training restarts from the newest checkpoint.
    - With ``schedule="1f1b"`` dead workers' micro-batches are re-routed within a 1F1B schedule: fused backward, one
      optimizer step for all stages. The gain over other policies *with the same schedule* is re-routing's own merit.

    Takes the arguments of ``Policy``, and:

    Args:
        schedule: "planned": the techniques that are switched on, also without failures; "1f1b": none of the two that
            make the schedule, from the first step on.
        split_backward: split the backward into B and W, if planned.
        staggered: each stage steps its optimizer on its own, if planned.
        adaptive: peers take over single micro-batches. Without it (and hence the other two), a dead worker costs its
            whole pipeline, whose batch the other pipelines share; survivors fill one another's gaps.
        normalization: move failures to the stages where they cost least.
        fault_free: schedule without failures: "planned" with the enabled techniques, as in this package, or "1f1b", as
            in the paper, whose system switches to planned schedules after a failure.
        rejoin: seconds all wait for a returning node, besides copying its state; None: as for a failure.
    """

    schedule: ScheduleName = "planned"
    split_backward: bool = True
    staggered: bool = True
    adaptive: bool = True
    normalization: bool = True
    fault_free: Literal["planned", "1f1b"] = "planned"
    rejoin: Duration | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_seconds(self, "rejoin")
        if self.fault_free not in ("planned", "1f1b"):
            raise ConfigurationError(f"Recycle(fault_free={self.fault_free!r}): give 'planned' or '1f1b'.")
        if not self.adaptive and (self.technique.split_backward or self.technique.staggered):
            raise ConfigurationError(
                "Recycle(adaptive=False): the other techniques fill the bubbles with re-routed micro-batches; "
                "switch split_backward and staggered off as well."
            )

    @property
    def technique(self) -> Technique:
        """The techniques the planner may use."""
        planned = self.schedule == "planned"
        return Technique(planned and self.split_backward, planned and self.staggered)

    def begin(self, context: Context, live: frozenset[int]) -> Reaction:
        return Reaction(self._from_checkpoint(context, live))

    def react(self, context: Context, current: Configuration, trigger: Trigger) -> Reaction | None:
        before = current.layout
        assert isinstance(before, Placement)
        workers = context.workers(trigger.live)
        grid = self.grid(context)
        held, vacant = keep(grid, before, workers)
        if before.positions and held == dict(before.positions):
            return None  # idle nodes only
        broken = not {worker for worker, _ in before.positions}.issubset(workers)
        if not before.positions or len({position.stage for position in held.values()}) < grid.stages:
            found = self._from_checkpoint(context, trigger.live)
            return self.restarted(context, found, broken=broken, trained=bool(before.positions))
        goal = self._distribution(context, len(vacant)) if self.normalization else None
        after = place(grid, before, workers, goal)
        found = self.configuration(context, after)
        transfer = after.copies * context.model.transfer_seconds(1 / grid.stages)
        if broken or self.rejoin is None:
            return self.regrouped(found, len(workers), broken=broken, transfer=transfer)
        return Reaction(found, pauses(rejoin=float(self.rejoin), transfer=transfer), at_boundary=True)

    def configuration(self, context: Context, placement: Placement) -> Configuration:
        """Training with this placement."""
        model = context.model
        failures = placement.failures(self.grid(context))
        count = sum(failures)
        used = len(placement.positions)
        if not self.adaptive:
            count = model.pipelines - used // model.stages
            used = used // model.stages * model.stages
            if not used:
                return self.running(context, "too few workers", Judgement(1.0), 0, placement)
            micro = -(-model.grid.global_microbatches // (model.pipelines - count))
            step = Judgement(one_f_one_b_seconds(model.costs(), micro))
        else:
            step = self.step(context, failures)
        return self.running(context, self.label(context, count), step, used, placement)

    def step(self, context: Context, failures: tuple[int, ...]) -> Judgement:
        """One step with that many failures in each stage."""
        model = context.model
        if not any(failures):
            usual = Judgement(one_f_one_b_seconds(model.costs(), model.grid.microbatches))
            if self.fault_free == "1f1b" or not (self.technique.split_backward or self.technique.staggered):
                return usual
            return min(usual, planned_step(self._problem(context, failures), self.effort))
        return planned_step(self._problem(context, failures), self.effort)

    def grid(self, context: Context) -> Grid:
        """The positions that workers may have."""
        return context.model.grid

    def label(self, context: Context, vacant: int) -> str:
        """Label of training with so many ``vacant`` positions."""
        return f"{vacant} failed" if vacant else "all work"

    def _problem(self, context: Context, failures: tuple[int, ...]) -> Problem:
        model, grid = context.model, self.grid(context)
        gone = normalized_failures(grid, failures)
        return Problem(grid, model.costs(), gone, self.technique, _limit(model.in_flight_limit()))

    def _distribution(self, context: Context, failures: int) -> tuple[int, ...]:
        return distribution(self._problem(context, (0,) * context.model.stages), failures, self.effort)

    def _from_checkpoint(self, context: Context, live: frozenset[int]) -> Configuration:
        grid = self.grid(context)
        workers = context.workers(live)[: grid.num_workers]
        if len(workers) < grid.stages:
            return stopped("too few workers for all stages", Placement(()))
        goal = self._distribution(context, grid.num_workers - len(workers))
        return self.configuration(context, fresh(grid, workers, goal))


_SWITCH = 2.0  # seconds that all wait when layers have moved
_LEAST_GAIN = 0.01  # of the step time that a move must save


@dataclass(frozen=True)
class Elastic(Recycle):
    """A batch of constant size is shared by all workers, however many there are.

    There may be more workers than the batch has pipelines. Source: this package (``RecoveryOptions(min_pipelines=...,
    max_pipelines=...)``).

    Assumptions: as for ReCycle, and

    - Training begins with the nodes that there are, and a node that comes takes part from the next step boundary on.
    - REDUCE takes as long as among the D workers of the fault-free grid.

    Takes the arguments of ``Recycle``, and:

    Args:
        max_pipelines: the most workers of a stage; 0 for twice as many as the batch has pipelines. Never more than it
            has micro-batches.
    """

    max_pipelines: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("Elastic", "max_pipelines", self.max_pipelines)
        if not self.adaptive:
            raise ConfigurationError("Elastic(adaptive=False): workers share micro-batches: leave it out.")

    def grid(self, context: Context) -> Grid:
        grid = context.model.grid
        most = min(self.max_pipelines or 2 * grid.pipelines, grid.global_microbatches)
        return replace(grid, lanes=max(most, grid.pipelines))

    def label(self, context: Context, vacant: int) -> str:
        return f"{self.grid(context).num_workers - vacant} workers"

    def step(self, context: Context, failures: tuple[int, ...]) -> Judgement:
        problem = self._problem(context, failures).without_vacant_lanes()
        planned = planned_step(problem, self.effort)
        if not problem.stays_home:
            return planned
        return min(Judgement(one_f_one_b_seconds(problem.costs, problem.grid.microbatches)), planned)

    def _distribution(self, context: Context, failures: int) -> tuple[int, ...]:
        """See :class:`Recycle`; over at most as many lanes as the live workers fill."""
        problem, stages = self._problem(context, (0,) * context.model.stages), context.model.stages
        all_lanes, workers = problem.grid.lanes, problem.grid.num_workers - failures
        lanes = max(problem.grid.pipelines, -(-workers // stages))
        fewer = replace(problem, grid=replace(problem.grid, lanes=lanes))
        found = distribution(fewer, lanes * stages - workers, self.effort)
        return tuple(all_lanes - lanes + count for count in found)


def _limit(limits: tuple[int, ...]) -> tuple[int, ...]:
    if min(limits) < 1:
        raise ConfigurationError(
            "the model does not fit into the GPUs' memory with a single micro-batch: use more stages, "
            "smaller micro-batches or recompute=True."
        )
    return limits


@dataclass(frozen=True)
class ElasticLayers(Recycle):
    """Re-routing at once, then layers move until all stages are equally loaded.

    Source: the idea of ElasWave (arXiv 2510.00606) and of Odyssey (arXiv 2508.21613), re-routing and moving layers to
    rebalance the stages; the systems themselves are not modelled. The first reaction and all its constants are those of
    the ReCycle policy.

    Assumptions:

    - After a failure the layers are redistributed in whole units of a layer (``TrainingModel.units``) so that the
      slowest stage, the one with the most layers per live worker, is as fast as memory allows. Each stage keeps its
      workers.
    - The layers are copied in the background, with parameters and optimizer state, at ``share`` of a worker's network
      link, while training continues as under ReCycle; every worker of a stage receives its stage's new layers.
    - Then all switch at the end of a step, which takes two seconds.
    - A new failure before that aborts the move, which then starts again from the current state.
    - Failures are normalized first, as in ReCycle.

    Takes the arguments of ``Recycle``, and:

    Args:
        share: fraction of a link's bandwidth that background copies may use.
    """

    share: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("ElasticLayers", "share", self.share, above=True)

    def begin(self, context: Context, live: frozenset[int]) -> Reaction:
        """See :class:`Policy`. Nodes missing from the start need no move."""
        first = super().begin(context, live)
        better, _ = self._balanced(context, first.configuration)
        return Reaction(first.configuration if better is None else better)

    def react(self, context: Context, current: Configuration, trigger: Trigger) -> Reaction | None:
        reaction = super().react(context, current, trigger)
        if reaction is None:
            better, _ = self._balanced(context, current) if trigger.woken else (None, 0.0)
            if better is None:
                return None
            return Reaction(better, pauses(change=_SWITCH), at_boundary=True)
        better, seconds = self._balanced(context, reaction.configuration)
        if better is None:
            return reaction
        before = sum(pause.seconds for pause in reaction.pauses) + reaction.configuration.fill_seconds
        return replace(reaction, wake=before + seconds)

    def _balanced(self, context: Context, found: Configuration) -> tuple[Configuration | None, float]:
        """The configuration with moved layers, if worth it, and the seconds of the move."""
        layout = found.layout
        assert isinstance(layout, Placement)
        failures = layout.failures(context.model.grid)
        if not found.running or not self.adaptive or not any(failures):
            return None, 0.0
        units, step = _best_split(context.model, failures, self.technique, self.effort)
        if not step.period < found.step_seconds * (1 - _LEAST_GAIN):
            return None, 0.0
        moved = _moved(context.model, units) / context.model.units
        copying = context.model.transfer_seconds(moved) / self.share
        label = f"{found.label}, layers moved"
        better = replace(found, label=label, step_seconds=step.period, fill_seconds=step.fill, lead_seconds=step.lead)
        return better, copying


@lru_cache(maxsize=4096)
def _best_split(
    model: TrainingModel, failures: tuple[int, ...], technique: Technique, effort: int
) -> tuple[tuple[int, ...], Judgement]:
    """Units of each stage in proportion to its live workers, and the planned step."""
    live = [model.pipelines - count for count in failures]
    units = [0] * model.stages
    open_stages = list(range(model.stages))
    for _ in range(model.units):  # the next unit goes where the stage stays fastest, memory permitting
        open_stages = [s for s in open_stages if _fits(model, units[s] + 1)]
        if not open_stages:
            return model.even(), Judgement(float("inf"))
        stage = min(open_stages, key=lambda s: ((units[s] + 1) / live[s], s))
        units[stage] += 1
    parts = tuple(units)
    if min(parts) == 0 or min(model.in_flight_limit(parts)) < 1:
        return model.even(), Judgement(float("inf"))
    gone = normalized_failures(model.grid, failures)
    problem = Problem(model.grid, model.costs(parts), gone, technique, model.in_flight_limit(parts))
    return parts, planned_step(problem, effort)


def _fits(model: TrainingModel, units: int) -> bool:
    """Whether a worker with that many units has memory for S micro-batches."""
    part = units / model.units
    return model.state_bytes(part) + model.stages * model.activation_bytes(part) <= model.memory_bytes


def _moved(model: TrainingModel, units: tuple[int, ...]) -> int:
    """The most units that a stage receives on the way from the even split."""
    even = model.even()
    most, begin_old, begin_new = 0, 0, 0
    for old, new in zip(even, units, strict=True):
        common = max(0, min(begin_old + old, begin_new + new) - max(begin_old, begin_new))
        most = max(most, new - common)
        begin_old, begin_new = begin_old + old, begin_new + new
    return most
