"""Bamboo, Varuna and Oobleck, as their publications describe them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import accumulate, pairwise

from lightning_recycle.arguments import at_least, fraction
from lightning_recycle.planning import Costs
from lightning_recycle.planning.layouts import Judgement
from lightning_recycle.simulation.failures import Duration, keep_seconds
from lightning_recycle.simulation.policy import (
    DEFAULT_EFFORT,
    Configuration,
    Context,
    Downtime,
    Loss,
    Policy,
    Reaction,
    Trigger,
    is_covered,
    pauses,
    pipeline_step,
    stopped,
)
from lightning_recycle.simulation.recycle_and_common_policies import Teams, assemble_teams, whole_pipelines
from lightning_recycle.simulation.training_model import TrainingModel

_PARAMETER_BYTES = 4.0


def iteration_estimate(stages: Sequence[float]) -> float:
    """Oobleck's estimate T of an iteration with 4 S micro-batches: T1 + T2 + T3.

    With k the slowest stage (from 0): T1 is the first micro-batch's way through all stages; T2 = (2 S + k + 1) slots of
    stage k; T3 the way back, the sum over the stages from k on.
    """
    slowest = max(range(len(stages)), key=lambda stage: (stages[stage], -stage))
    return sum(stages) + (2 * len(stages) + slowest + 1) * stages[slowest] + sum(stages[slowest:])


@cache
def cut(units: int, stages: int) -> tuple[int, ...]:
    """Units of each stage, by divide and conquer: halve the stages, try every split.

    All units cost the same, so a subproblem is determined by its size. Raises ValueError for fewer units than stages.
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
    """First and last + 1 unit of each stage, or of the workers of each pipeline."""
    return tuple(pairwise(accumulate(parts, initial=0)))


def share_batch(total: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """``total`` micro-batches over pipelines, with nearly equal times.

    Proportional to speed (micro-batches per second), rounded by giving the next micro-batch to the pipeline that
    finishes it first; each gets at least one.
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

    Each stage needs ``memory_factor`` times the bytes of its parameters, and the activations in flight at that depth.
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

    Pipeline templates are planned once for every number of nodes from n0 on. Any number of nodes N >= f n0 is a sum of
    such numbers (the Frobenius problem has no gaps when the sizes are consecutive and reach 2 n0 - 1), so no node needs
    to be idle. Source: Jang et al., SOSP'23 (arXiv 2309.08125), sections 4 and 5, and the simulator in its public
    repository (SymbioticLab/Oobleck).

    Assumptions:

    - Training starts on the fault-free grid, D pipelines of S workers, like the systems it is compared with.
    - A failure loses the step in progress. The pipeline that lost n workers becomes one of the template with n fewer;
      below n0 it borrows workers from the longest pipeline that can spare them; if none can, it merges with the
      shortest one.
    - All pipelines wait for the reconfiguration (the public simulator has 3 s for GPT-3 Medium, 6 s for 2.7B, 10 s for
      6.7B; here it is the recovery of all policies, some 10 s), and for the copies of missing layers with their
      optimizer state, each over the worker's own link, all in parallel.
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
        return Reaction(self._configuration(context, self._anew(context, context.workers(live))))

    def react(self, context: Context, current: Configuration, trigger: Trigger) -> Reaction | None:
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
        return tuple(used[begin:end] for begin, end in stage_ranges(sizes))

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
    - After a single loss the predecessor runs both stages; every step takes 1.5 times as long, and nothing is lost.
    - Reconfiguration at the end of a step when waiting nodes cover the overloaded ones, when twice the overloaded ones
      exceed ``threshold`` of the active ones, or when another pipeline can be formed. It takes 20 s and leaves as many
      whole pipelines as there are workers for.
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
        if not self.fits(context.model):
            return Reaction(stopped("out of memory", _Layout()))
        return Reaction(self._rebuilt(context, (), context.workers(live)))

    def react(self, context: Context, current: Configuration, trigger: Trigger) -> Reaction | None:
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
        return Reaction(self._configuration(context, context.workers(live)))

    def react(self, context: Context, current: Configuration, trigger: Trigger) -> Reaction | None:
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
