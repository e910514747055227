"""Policies on whole pipelines: fault-free, merge, spares, restart, drop replica."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from lightning_recycle.arguments import whole
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning import Grid, Problem, Technique
from lightning_recycle.planning.layout_candidates import Judgement
from lightning_recycle.simulation.policy import (
    Configuration,
    Context,
    Loss,
    Policy,
    Reaction,
    Trigger,
    stopped,
)
from lightning_recycle.simulation.step_times import SCHEDULES, pipeline_step, planned_step

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
            raise ConfigurationError(
                f"Spares(spares={self.spares}): the cluster has {have} nodes more than {context.model.name} needs; "
                f"use Cluster.of(model, extra_nodes={self.spares})."
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
