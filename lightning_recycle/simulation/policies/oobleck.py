"""Oobleck: pipeline templates for every number of nodes, and its policy.

Templates are planned once for every number of nodes from n0 on. Any number of nodes N >= f n0 is a sum of such numbers
(the Frobenius problem has no gaps when the sizes are consecutive and reach 2 n0 - 1), so no node needs to be idle.

Source: Jang et al., SOSP'23 (arXiv 2309.08125), sections 4 and 5, and its public repository with a simulator
(SymbioticLab/Oobleck).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, pairwise

from lightning_recycle.arguments import at_least
from lightning_recycle.planning.layouts.layout_candidates import Judgement
from lightning_recycle.simulation.policies.policy import (
    Configuration,
    Context,
    Policy,
    Reaction,
    Trigger,
    is_covered,
    stopped,
)
from lightning_recycle.simulation.policies.whole_pipelines import Teams, assemble_teams
from lightning_recycle.simulation.step_times import DEFAULT_EFFORT, pipeline_step
from lightning_recycle.simulation.training_model import TrainingModel

_PARAMETER_BYTES = 4.0


def iteration_estimate(stages: Sequence[float]) -> float:
    """Oobleck's estimate T of an iteration with 4 S micro-batches: T1 + T2 + T3.

    With k the slowest stage (from 0): T1 is the first micro-batch's way through all stages; T2 = (2 S + k + 1)
    slots of stage k; T3 the way back, the sum over the stages from k on.
    """
    slowest = max(range(len(stages)), key=lambda stage: (stages[stage], -stage))
    return sum(stages) + (2 * len(stages) + slowest + 1) * stages[slowest] + sum(stages[slowest:])


@cache
def cut(units: int, stages: int) -> tuple[int, ...]:
    """Units of each stage, by divide and conquer: halve the stages, try every split.

    All units cost the same, so a subproblem is determined by its size alone.

    Raises:
        ValueError: when there are fewer units than stages.
    """
    if not 1 <= stages <= units:
        raise ValueError(f"{units} units cannot make {stages} stages")
    if stages == 1:
        return (units,)
    left = (stages + 1) // 2
    middle = units * left // stages
    # A split further from proportional than one unit per stage makes one half slower than any good cut.
    tries = range(max(left, middle - stages), min(units - (stages - left), middle + stages) + 1)
    found = (cut(count, left) + cut(units - count, stages - left) for count in tries)
    return min(found, key=lambda parts: (iteration_estimate(parts), parts))


def stage_ranges(parts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """First and last + 1 unit of each stage."""
    return tuple(pairwise(accumulate(parts, initial=0)))


def share_batch(total: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """``total`` micro-batches over pipelines, with nearly equal times.

    Without rounding the solution is proportional to speed, micro-batches per second. It is rounded to whole
    micro-batches by giving the next one to the pipeline that finishes it first; each gets at least one.
    """
    shares = [max(1, math.floor(total * speed / sum(speeds))) for speed in speeds]
    while sum(shares) > total:
        slowest = max(range(len(shares)), key=lambda i: (shares[i] > 1, shares[i] / speeds[i]))
        shares[slowest] -= 1
    while sum(shares) < total:
        next_one = min(range(len(shares)), key=lambda i: ((shares[i] + 1) / speeds[i], i))
        shares[next_one] += 1
    return tuple(shares)


@lru_cache(maxsize=1024)
def least_nodes(model: TrainingModel, memory_factor: float) -> int | None:
    """n0: the fewest workers whose memory holds the model; None if none do.

    Each stage needs ``memory_factor`` times the bytes of its parameters, and the activations of as many micro-batches
    as a pipeline of that depth has in flight.
    """
    state = memory_factor * _PARAMETER_BYTES * model.transformer.parameters
    for stages in range(1, model.units + 1):
        part = max(cut(model.units, stages)) / model.units
        if part * state + stages * model.activation_bytes(part) <= model.memory_bytes:
            return stages
    return None


@lru_cache(maxsize=16384)
def pipelines_step(
    model: TrainingModel,
    sizes: tuple[int, ...],
    schedule: str = "1f1b",
    effort: int = DEFAULT_EFFORT,
) -> Judgement:
    """One step on pipelines of these sizes: the slowest with its share of the batch.

    Pipelines are filled again together, and all have finished a step before the slowest begins the next but one.
    """
    units = [cut(model.units, size) for size in sizes]
    costs = [model.costs(parts, pipelines=len(sizes)) for parts in units]
    slowest = [max(map(sum, zip(c.forward, c.backward_input, c.backward_weight, strict=True))) for c in costs]
    shares = share_batch(model.grid.global_microbatches, [1 / seconds for seconds in slowest])
    steps = [
        pipeline_step(schedule, cost, share, model.in_flight_limit(parts), effort)
        for cost, share, parts in set(zip(costs, shares, units, strict=True))
    ]
    seconds = max(step.period for step in steps)
    fill = max(step.period + step.fill for step in steps) - seconds
    return Judgement(seconds, fill, max(step.lead for step in steps))


@dataclass(frozen=True)
class Oobleck(Policy):
    """A pipeline that loses a node continues as a smaller one, planned in advance.

    Assumptions:

    - Training starts on the fault-free grid, D pipelines of S workers, like the systems it is compared with.
    - A failure loses the step in progress. The pipeline that lost n workers becomes one of the template with n fewer;
      below n0 it borrows workers from the longest pipeline that can spare them; if none can, it merges with the
      shortest one.
    - All pipelines wait for the reconfiguration (the public simulator has 3 s for GPT-3 Medium, 6 s for 2.7B, 10 s for
      6.7B; here it is the recovery of all policies, some 10 s), and for the copies of missing layers with their
      optimizer state: each worker copies only what it lacks, over its own link, all in parallel.
    - At the start and after a restart, the fastest of a few instantiations is used instead of the best of all, whose
      number explodes with the nodes.
    - The global batch stays the same; it is shared so that the pipelines' times differ least.
    - A worker that comes back joins the shortest pipeline, at the end of a step; with all back, the first grid is
      restored.

    Takes the arguments of ``Policy``, and:

    Args:
        memory_factor: bytes of a stage's state per byte of its parameters.
    """

    memory_factor: float = 6.0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("Oobleck", "memory_factor", self.memory_factor, above=True)

    def least_nodes(self, context: Context) -> int:
        """n0, at most the stages of the fault-free grid, which is known to fit."""
        found = least_nodes(context.model, self.memory_factor)
        return context.model.stages if found is None else min(found, context.model.stages)

    def begin(self, context: Context, live: frozenset[int]) -> Reaction:
        """See :class:`Policy`."""
        return Reaction(self._configuration(context, self._anew(context, context.workers(live))))

    def react(self, context: Context, current: Configuration, trigger: Trigger) -> Reaction | None:
        """See :class:`Policy`."""
        before = current.layout
        assert isinstance(before, tuple)
        model = context.model
        workers = context.workers(trigger.live)
        alive = set(workers)
        used = {worker for team in before for worker in team}
        held = _held(model.units, before)
        if not before or not is_covered((held[worker] for worker in used & alive), model.units):
            found = self._configuration(context, self._anew(context, workers))
            if not found.running and not before:
                return None
            return self.restarted(context, found, broken=bool(trigger.down))
        broken = not used.issubset(alive)
        if not broken and not trigger.up:
            return None
        after = self._shrunk(context, before, alive) if broken else before
        after = self._grown(context, after, workers)
        if after == before:
            return None
        found = self._configuration(context, after)
        missing = _missing(model.units, before, after)
        transfer = model.transfer_seconds(max(missing.values(), default=0.0))
        return self.regrouped(found, len(workers), broken=broken, transfer=transfer)

    def _anew(self, context: Context, workers: tuple[int, ...]) -> Teams:
        """The fastest of a few instantiations: even pipelines, or that depth and a rest."""
        model, least = context.model, self.least_nodes(context)
        used = workers[: model.pipelines * model.stages]
        if len(used) < least:
            return ()
        near = round(len(used) / model.stages)
        found: list[tuple[int, ...]] = []
        for count in range(max(1, near - 1), min(near + 1, len(used) // least, model.pipelines) + 1):
            size, larger = divmod(len(used), count)
            found.append((size + 1,) * larger + (size,) * (count - larger))
        full, rest = divmod(len(used), model.stages)
        if full and rest >= least:
            found.append((*(model.stages,) * full, rest))
        sizes = min(
            (sizes for sizes in found or [(len(used),)] if max(sizes) <= model.units),
            key=lambda sizes: pipelines_step(model, sizes),
        )
        ends = list(accumulate(sizes, initial=0))
        return tuple(used[begin:end] for begin, end in pairwise(ends))

    def _shrunk(self, context: Context, before: Teams, alive: set[int]) -> Teams:
        least = self.least_nodes(context)
        teams = [[worker for worker in team if worker in alive] for team in before]
        teams = [team for team in teams if team]
        while len(teams) > 1 and min(map(len, teams)) < least:
            small = min(teams, key=len)
            others = [team for team in teams if team is not small]
            lender = max(others, key=len)
            if len(lender) > least:
                small.append(lender.pop())
            else:
                teams.remove(small)
                min(others, key=len).extend(small)
        return tuple(map(tuple, teams))

    def _grown(self, context: Context, teams: Teams, workers: tuple[int, ...]) -> Teams:
        """Idle workers join the shortest pipelines, as far as there are layers."""
        model = context.model
        if len(workers) >= model.pipelines * model.stages and any(len(team) != model.stages for team in teams):
            return assemble_teams((), workers, model.stages, model.pipelines)[0]
        grown = [list(team) for team in teams]
        idle = sorted(set(workers).difference(worker for team in teams for worker in team))
        if len(teams) == model.pipelines and all(len(team) == model.stages for team in teams):
            return teams  # the grid is complete; the others are spares
        for worker in idle[: model.pipelines * model.stages - sum(map(len, grown))]:
            shortest = min(grown, key=len)
            if len(shortest) < model.units:
                shortest.append(worker)
        return tuple(map(tuple, grown))

    def _configuration(self, context: Context, teams: Teams) -> Configuration:
        model = context.model
        if not teams or min(map(len, teams)) < self.least_nodes(context):
            return stopped("too few workers", ())
        sizes = tuple(sorted(map(len, teams), reverse=True))
        shape = ", ".join(f"{sizes.count(size)} x {size}" for size in sorted(set(sizes), reverse=True))
        step = pipelines_step(model, sizes, self.schedule, self.effort)
        return self.running(context, f"oobleck, {shape}", step, sum(sizes), teams)


def _held(units: int, teams: Teams) -> dict[int, tuple[int, int]]:
    """The units that each worker holds."""
    return {
        worker: held for team in teams for worker, held in zip(team, stage_ranges(cut(units, len(team))), strict=True)
    }


def _missing(units: int, before: Teams, after: Teams) -> dict[int, float]:
    """The part of the model that each worker has to copy."""
    had, has = _held(units, before), _held(units, after)
    found = {}
    for worker, (begin, end) in has.items():
        first, last = had.get(worker, (0, 0))
        found[worker] = (end - begin - max(0, min(end, last) - max(begin, first))) / units
    return found
