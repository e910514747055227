"""Policies: this package's re-routing, and what is common practice.

Re-routing: peers of a dead worker run its micro-batches. Physical workers are moved to other positions of the grid with
as little copying as possible. Common practice keeps whole pipelines: merge, spares, restart,
drop replica; and the fault-free run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from lightning_recycle.arguments import choice, whole
from lightning_recycle.errors import ConfigurationError, counted
from lightning_recycle.planning import Grid, Problem, Technique, Worker, normalized_failures, roles
from lightning_recycle.planning.layouts import Judgement
from lightning_recycle.simulation.failures import Duration, keep_seconds
from lightning_recycle.simulation.policy import (
    SCHEDULES,
    Configuration,
    Context,
    Loss,
    Policy,
    Reaction,
    ScheduleName,
    Trigger,
    distribution,
    pauses,
    pipeline_step,
    planned_step,
    stopped,
)
from lightning_recycle.simulation.training_model import one_f_one_b_seconds


@dataclass(frozen=True, slots=True)
class WorkerPlacement:
    """Position of each physical worker that has one, as sorted pairs.

    ``copies``: the most states that a worker must send; different senders copy in parallel.
    """

    positions: tuple[tuple[int, Worker], ...]
    copies: int = 0

    def failures(self, grid: Grid) -> tuple[int, ...]:
        """Vacant positions of each stage."""
        held = Counter(position.stage for _, position in self.positions)
        return tuple(grid.lanes - held[stage] for stage in range(grid.stages))


def fresh(grid: Grid, workers: Collection[int], distribution: tuple[int, ...]) -> WorkerPlacement:
    """A fresh placement: every worker loads its state from a checkpoint."""
    gone = normalized_failures(grid, distribution)
    positions = [position for position in grid.workers() if position not in gone]
    return WorkerPlacement(tuple(zip(sorted(workers), positions, strict=False)))


def keep(grid: Grid, before: WorkerPlacement, workers: Collection[int]) -> tuple[dict[int, Worker], list[Worker]]:
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
    grid: Grid, before: WorkerPlacement, workers: Collection[int], distribution: tuple[int, ...] | None = None
) -> WorkerPlacement:
    """The new placement of ``workers``, at least one for each stage.

    ``distribution``: failures of each stage after normalization; None leaves the failures where they are.
    """
    held, vacant = keep(grid, before, workers)
    known = {worker for worker, _ in before.positions}
    after = dict(held)
    if distribution is not None:
        taken = roles(grid, vacant, distribution)
        after = {worker: taken[position] for worker, position in held.items()}
    senders: Counter[Worker] = Counter()
    for worker, position in after.items():
        if worker not in known or position.stage != held[worker].stage:
            peers = [place for other, place in held.items() if place.stage == position.stage and other in known]
            senders[min(peers, key=lambda peer: (senders[peer], peer))] += 1
    return WorkerPlacement(tuple(sorted(after.items())), max(senders.values(), default=0))


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
        choice("planned", "1f1b").checked("Recycle", "fault_free", self.fault_free)
        if not self.adaptive and (self.technique.split_backward or self.technique.staggered):
            raise ConfigurationError.for_option(
                "Recycle",
                "adaptive",
                False,
                "the other techniques fill the bubbles with re-routed micro-batches; "
                "switch split_backward and staggered off as well",
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
        assert isinstance(before, WorkerPlacement)
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

    def configuration(self, context: Context, placement: WorkerPlacement) -> Configuration:
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
        problem = self._problem(context, failures).without_vacant_lanes()
        if not problem.stays_home:
            return planned_step(problem, self.effort)
        usual = Judgement(one_f_one_b_seconds(problem.costs, problem.grid.microbatches))
        if self.fault_free == "1f1b" or self.technique == Technique(False, False):
            return usual
        return min(usual, planned_step(problem, self.effort))

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
            return stopped("too few workers for all stages", WorkerPlacement(()))
        goal = self._distribution(context, grid.num_workers - len(workers))
        return self.configuration(context, fresh(grid, workers, goal))


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
            raise ConfigurationError.for_option(
                "Elastic", "adaptive", False, "workers share micro-batches: leave it out"
            )

    def grid(self, context: Context) -> Grid:
        grid = context.model.grid
        most = min(self.max_pipelines or 2 * grid.pipelines, grid.global_microbatches)
        return replace(grid, lanes=max(most, grid.pipelines))

    def label(self, context: Context, vacant: int) -> str:
        return f"{self.grid(context).num_workers - vacant} workers"

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


Teams = tuple[tuple[int, ...], ...]
"""Pipelines as tuples of physical workers, by stage."""


def assemble_teams(
    before: Teams, workers: Collection[int], stages: int, most: int, *, repair: bool = True
) -> tuple[Teams, int]:
    """Whole pipelines of live workers, and the number of workers that need a state.

    With ``repair``, gaps of broken pipelines are filled, first by idle workers, then by workers of the most broken one,
    which need no copy for the same stage. Otherwise broken pipelines are dissolved, and only enough idle workers form a
    new one. At most ``most`` pipelines of ``stages`` workers.
    """
    live = set(workers)
    whole = [team for team in before if live.issuperset(team)]
    broken = sorted(
        ([worker if worker in live else None for worker in team] for team in before if not live.issuperset(team)),
        key=lambda team: team.count(None),
    )
    idle = sorted(live.difference(worker for team in before for worker in team))
    free: dict[int, int] = {}  # workers of dissolved pipelines, with the stage whose newest state they have
    copied = 0
    while broken and repair:
        team = broken.pop(0)
        gaps = [stage for stage, worker in enumerate(team) if worker is None]
        while broken and len(idle) + len(free) < len(gaps):
            free |= {worker: stage for stage, worker in enumerate(broken.pop()) if worker is not None}
        if len(idle) + len(free) < len(gaps):
            idle += [worker for worker in team if worker is not None]
            break
        for stage in gaps:
            same = sorted(worker for worker, had in free.items() if had == stage)
            if same:
                team[stage] = same[0]
                del free[same[0]]
        for stage in (stage for stage in gaps if team[stage] is None):
            team[stage] = idle.pop(0) if idle else min(free)
            free.pop(team[stage] or 0, None)
            copied += 1
        whole.append(tuple(worker for worker in team if worker is not None))
    idle += [*free, *(worker for team in broken for worker in team if worker is not None)]
    idle.sort()
    while len(whole) < most and len(idle) >= stages:
        whole.append(tuple(idle[:stages]))
        copied += stages
        idle = idle[stages:]
    return tuple(sorted(whole[:most])), copied


def whole_pipelines(
    context: Context, policy: Policy, teams: Teams, label: str, *, keep_batch: bool = True
) -> Configuration:
    """Whole pipelines (``teams`` of workers) with the policy's schedule.

    With ``keep_batch`` they share the whole global batch, in shares that differ by at most one micro-batch (the largest
    decides the step); otherwise each keeps its own part.
    """
    model, count = context.model, len(teams)
    if not count:
        return stopped("too few workers for a pipeline", teams)
    grid = model.grid
    micro = -(-grid.global_microbatches // count) if keep_batch else grid.microbatches
    step = policy.pipeline_step(model, micro)
    part = 1.0 if keep_batch else count / grid.pipelines
    label += "" if count == grid.pipelines else f", {count} of {grid.pipelines} pipelines"
    return policy.running(context, label, step, count * grid.stages, teams, part=part)


@dataclass(frozen=True)
class FaultFree(Policy):
    """Nodes never fail, and no checkpoints are written: the upper bound.

    Args:
        schedule: "1f1b" (the paper's baseline, which also calibrates the models), "planned" as for all policies, or
            "zero_bubble": split backward, at most S micro-batches in flight, one optimizer step for all stages.
    """

    schedules: ClassVar[tuple[str, ...]] = (*SCHEDULES, "zero_bubble")
    ignores_failures: ClassVar[bool] = True
    schedule: Literal["1f1b", "planned", "zero_bubble"] = "1f1b"  # type: ignore[assignment] # one more

    def begin(self, context: Context, live: frozenset[int]) -> Reaction:
        model, grid = context.model, context.model.grid
        kind = "planned" if self.schedule == "planned" else "1f1b"
        step = pipeline_step(kind, model.costs(), grid.microbatches, model.in_flight_limit())
        if self.schedule == "zero_bubble":
            limit = tuple(min(grid.stages, most) for most in model.in_flight_limit())
            one = Grid(1, grid.stages, grid.microbatches)
            problem = Problem(one, model.costs(), technique=Technique(True, False), in_flight_limit=limit)
            step = min(step, Judgement(planned_step(problem).period))
        found = self.running(context, self.schedule, step, grid.num_workers, None)
        return Reaction(replace(found, checkpoint_every=None, checkpoint_seconds=0.0, checkpoint_writing=0.0))

    def react(self, context: Context, current: Configuration, trigger: Trigger) -> Reaction | None:
        return None


@dataclass(frozen=True)
class WholePipelines(Policy):
    """Base of policies whose layout is the workers of each whole pipeline."""

    keep_batch: ClassVar[bool] = True
    """Whether pipelines share the whole global batch, or each keeps its part."""

    def begin(self, context: Context, live: frozenset[int]) -> Reaction:
        return Reaction(self._configuration(context, self._teams(context, (), live)))

    def _teams(self, context: Context, before: Teams, live: frozenset[int]) -> Teams:
        model = context.model
        return assemble_teams(before, context.workers(live), model.stages, model.pipelines)[0]

    def _configuration(self, context: Context, teams: Teams) -> Configuration:
        label = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(self).__name__).lower()  # DropReplica: drop replica
        return whole_pipelines(context, self, teams, label, keep_batch=self.keep_batch)


@dataclass(frozen=True)
class Merge(WholePipelines):
    """Broken pipelines are merged into whole ones, which share the global batch.

    k dead workers leave D S - k live ones, enough for D - ceil(k / S) whole pipelines, as much capacity as re-routing
    has with failures spread evenly over the stages. Source: common practice; the obvious rival of re-routing, since it
    changes neither the batch nor the schedule.

    Assumptions:

    - Live workers of the pipelines that lost most fill the gaps of the others, first workers of the same stage, which
      have its state; another one copies it from a peer, all in parallel. The rest waits.
    - The micro-batches of the global batch are dealt out evenly to the whole pipelines; where they do not divide, some
      have one more, and the step takes accordingly longer.
    - A failure loses the step in progress. Returned nodes wait, or fill a gap at the end of the step.
    - When all replicas of a stage fail at once, training restarts from the newest checkpoint.
    """

    def react(self, context: Context, current: Configuration, trigger: Trigger) -> Reaction | None:
        before = current.layout
        assert isinstance(before, tuple)
        model = context.model
        alive = set(context.workers(trigger.live))
        teams, copied = assemble_teams(before, alive, model.stages, model.pipelines)
        if teams == before:
            return None
        found = self._configuration(context, teams)
        broken = not all(alive.issuperset(team) for team in before)
        if any(all(team[stage] not in alive for team in before) for stage in range(model.stages)):
            return self.restarted(context, found, broken=broken, trained=bool(before))
        transfer = model.transfer_seconds(1 / model.stages) if copied else 0.0
        return self.regrouped(found, len(alive), broken=broken, transfer=transfer)


@dataclass(frozen=True)
class Spares(Merge):
    """Hot spares: extra nodes replace failed ones and copy their state from a peer.

    Source: common practice (e.g. Llama 3's and MegaScale's backup machines).

    Assumptions:

    - A spare is warm: process started, libraries loaded. It copies parameters and optimizer state from a peer.
    - When no spare is left, broken pipelines are merged as in the ``merge`` policy.
    - Repaired nodes become spares, or fill the gap of a broken pipeline at the end of the step.

    Takes the arguments of ``Policy``, and:

    Args:
        spares: nodes beyond the fault-free grid; the cluster must have them (``Cluster.of(model, extra_nodes=n)``).
    """

    spares: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("Spares", "spares", self.spares)

    def begin(self, context: Context, live: frozenset[int]) -> Reaction:
        have = context.cluster.nodes - context.model.gpus // context.cluster.gpus_per_node
        if have < self.spares:
            raise ConfigurationError.for_option(
                "Spares",
                "spares",
                self.spares,
                f"the cluster has {counted(have, 'node')} more than {context.model.name} needs; give it"
                f" extra_nodes={self.spares}",
            )
        return super().begin(context, live)


@dataclass(frozen=True)
class Restart(WholePipelines):
    """Every failure ends the job, which restarts from the newest checkpoint.

    Source: common practice; NVIDIA's resiliency extension shortens the start of the processes, but not the load and the
    lost work.

    Assumptions:

    - After a restart the grid has as many whole pipelines as there are workers for; they share the global batch.
    - When returned nodes complete another pipeline, the job writes a checkpoint and restarts with that pipeline.
    """

    def react(self, context: Context, current: Configuration, trigger: Trigger) -> Reaction | None:
        before = current.layout
        assert isinstance(before, tuple)
        alive = set(context.workers(trigger.live))
        teams = self._teams(context, before, trigger.live)
        found = self._configuration(context, teams)
        if not all(alive.issuperset(team) for team in before):
            return self.restarted(context, found, broken=True)
        if len(teams) <= len(before):
            return None
        return self.growing(context, found) if before else Reaction(found, self.restarting(context, broken=False))


_RELAUNCH = 60.0  # seconds to start a replica group on free workers, while the others train


@dataclass(frozen=True)
class DropReplica(WholePipelines):
    """A failure takes its whole pipeline out, and the batch shrinks.

    Source: torchft (per-step fault tolerance of replica groups). Its recovery from a SIGKILL was measured at 5.0 s with
    the default settings and 1.05 s with a heartbeat timeout of 1 s (two CPU replicas over Gloo); here it has the
    recovery of all policies, with communicators for GPUs.

    Assumptions:

    - The survivors' step is not committed, so it is lost.
    - The samples of the missing pipeline are not trained: the step has fewer samples and takes as long. Every sample of
      the smaller batches counts in full.
    - A scheduler starts a new replica group on any S free workers in a minute, which joins at the end of a step and
      copies its state from a peer while the others wait.
    - When all replica groups are lost, no worker is left to copy from: training restarts from the newest checkpoint.
    """

    keep_batch: ClassVar[bool] = False

    def react(self, context: Context, current: Configuration, trigger: Trigger) -> Reaction | None:
        before = current.layout
        assert isinstance(before, tuple)
        workers = context.workers(trigger.live)
        alive = set(workers)
        whole = tuple(team for team in before if alive.issuperset(team))
        more = assemble_teams(whole, workers, context.model.stages, context.model.pipelines, repair=False)[0]
        grows = len(more) > len(whole)
        wait = (_RELAUNCH if whole else 1e-3) if grows else None  # a restart of the whole job has its own time
        taking_part = len(whole) * context.model.stages
        if len(whole) < len(before):
            found = self._configuration(context, whole)
            steps = self.regrouping(taking_part, broken=True) if whole else ()
            return Reaction(found, steps, Loss.STEP if whole else Loss.CHECKPOINT, wake=wait)
        if not grows:
            return None
        if trigger.woken:
            found = self._configuration(context, more)
            if not whole:
                return Reaction(found, self.restarting(context, broken=False))
            transfer = context.model.transfer_seconds(1 / context.model.stages)
            return self.regrouped(found, len(more) * context.model.stages, broken=False, transfer=transfer)
        return Reaction(current, wake=wait)
