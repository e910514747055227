"""Auto: at every change the deployment that trains most until the next one.

The deployments come from re-routing, moving workers (the effect of merging pipelines), moving layers, and both, from
the planner that a run asks (:func:`~lightning_recycle.planning.layouts.plan_layout`). The training of each until the
next change is

    (seconds until the next change - seconds of stop, copies and filling the pipelines) / seconds of a step

The next change is expected from the prior and the failures so far
(:class:`~lightning_recycle.planning.layouts.FailureRecord`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning import (
    FailureRecord,
    Problem,
    Technique,
    even_cuts,
    normalized_failures,
    plan_layout,
)
from lightning_recycle.planning.layer_cuts import Bounds, held_ranges
from lightning_recycle.planning.layouts import Judgement
from lightning_recycle.simulation.policy import (
    Configuration,
    Context,
    Policy,
    Reaction,
    ScheduleName,
    Trigger,
    is_covered,
    layer_costs,
    step_judgement,
    stopped,
    unmovable,
)
from lightning_recycle.simulation.training_model import TrainingModel

Range = tuple[int, int]  # first layer, last + 1


@dataclass(frozen=True)
class _Deployment:
    """A candidate: layers of each slot, workers of each stage, and its judged step."""

    choice: str
    slots: tuple[Range, ...]
    step: Judgement
    cuts: Bounds
    counts: tuple[int, ...]


@dataclass(frozen=True)
class _PolicyState:
    """Memory of the policy: deployment in force, slots of workers, failures so far."""

    deployment: _Deployment | None
    held: tuple[tuple[int, int], ...]
    record: FailureRecord
    time: float

    def ranges(self) -> dict[int, Range]:
        return {} if self.deployment is None else {worker: self.deployment.slots[slot] for worker, slot in self.held}


@dataclass(frozen=True)
class Auto(Policy):
    """The best deployment at each change: re-routing, moved workers, layers, or both.

    Assumptions:

    - Detection, agreement and communicators as for all policies; each worker copies the state that it lacks in the same
      stop, over its own link.
    - Copies go to the workers that lack least of them.
    - A failure loses the step in progress. A node that comes back is taken in at the end of a step, if that pays.
    - With all workers there, the grid is the fault-free one, with each worker in its first place.
    - When no live worker holds some layer, training restarts from the newest checkpoint.

    Takes the arguments of ``Policy``, and:

    Args:
        schedule: "planned": split backwards and the staggered optimizer; "1f1b": neither.
    """

    schedule: ScheduleName = "planned"

    @property
    def technique(self) -> Technique:
        """Technique that plans may use."""
        return Technique(self.schedule == "planned", self.schedule == "planned")

    def begin(self, context: Context, live: frozenset[int]) -> Reaction:
        state = _PolicyState(None, (), FailureRecord(), 0.0)
        return Reaction(self._restart_configuration(context, state, self._workers(context, state, live)))

    def react(self, context: Context, current: Configuration, trigger: Trigger) -> Reaction | None:
        before = current.layout
        assert isinstance(before, _PolicyState)
        workers = self._workers(context, before, trigger.live)
        held = before.ranges()
        alive = {worker: layers for worker, layers in held.items() if worker in set(workers)}
        broken = len(alive) < len(held)
        if not broken and len(alive) == len(workers):
            return None
        record = before.record.after(len(held), max(0.0, trigger.time - before.time), len(alive) < len(held))
        state = _PolicyState(before.deployment, before.held, record, trigger.time)
        if not held or not is_covered(alive.values(), layer_costs(context.model).layers):
            found = self._restart_configuration(context, state, workers)
            if not found.running and not held:
                return None
            return self.restarted(context, found, broken=broken, trained=bool(held))
        pauses = self.regrouping(len(workers), broken=broken)
        stop_seconds = sum(pause.seconds for pause in pauses)
        seconds_to_next_change = record.next_change(len(workers))
        best: tuple[float, _Deployment | None, dict[int, int], float] = (-math.inf, None, {}, 0.0)
        if not broken and before.deployment is not None:
            best = (seconds_to_next_change / before.deployment.step.period, None, {}, 0.0)  # the others wait
        for deployment in self._deployments(context, state, alive, workers):
            assigned, copying = _assign_slots(context.model, alive, deployment, workers)
            trained = (seconds_to_next_change - stop_seconds - copying - deployment.step.fill) / deployment.step.period
            if trained > best[0]:
                best = (trained, deployment, assigned, copying)
        _, chosen, assigned, copying = best
        if chosen is None:
            return None
        found = self._configuration(
            context, _PolicyState(chosen, tuple(sorted(assigned.items())), record, trigger.time)
        )
        return self.regrouped(found, len(workers), broken=broken, transfer=copying)

    # -- deployments -------------------------------------------------------------------------------------------------

    def _deployments(
        self,
        context: Context,
        state: _PolicyState,
        alive: Mapping[int, Range],
        workers: Sequence[int],
    ) -> Iterator[_Deployment]:
        model, deployment = context.model, state.deployment
        full = model.pipelines * model.stages
        free = len(workers) - len(alive)
        cuts = _fault_free_cuts(model) if deployment is None else deployment.cuts
        counts = even = _fill_stages((0,) * model.stages, len(workers), model.pipelines)
        if deployment is not None:
            left = Counter(alive.values())
            held = [(part.start, part.stop) for part in held_ranges(cuts)]
            filled = _fill_stages(tuple(left[layers] for layers in held), free, model.pipelines)
            counts = even if min(filled) < 1 else filled
        if min(counts) < 1:
            return
        planner, usual_cuts = (model, self.technique, self.effort), _fault_free_cuts(model)
        # Costs of a change hardly depend on the current cuts, so layouts are those from the fault-free ones.
        for found in _planned_deployments(*planner, usual_cuts, even, unmovable(model)):
            moved = ("layers", "reroute") if found.counts == counts else ("both", "workers")
            stays = found.cuts == cuts or (found.cuts == usual_cuts and len(workers) == full)
            yield replace(found, choice=moved[stays])
        # Re-routing alone: where layers move, workers that move alone bring nothing.
        yield from _planned_deployments(*planner, cuts, counts, "layers stay")

    def _restart_configuration(self, context: Context, state: _PolicyState, workers: Sequence[int]) -> Configuration:
        """The deployment with the shortest step, everything loaded."""
        empty = _PolicyState(None, (), state.record, state.time)
        deployments = list(self._deployments(context, empty, {}, workers)) if workers else []
        if not deployments:
            return stopped("too few workers", empty)
        deployment = min(deployments, key=lambda each: each.step.period)
        held = tuple(zip(sorted(workers), range(len(deployment.slots)), strict=False))
        return self._configuration(context, _PolicyState(deployment, held, state.record, state.time))

    # -- workers and configurations -------------------------------------------------------------------------------

    def _workers(self, context: Context, state: _PolicyState, live: Collection[int]) -> tuple[int, ...]:
        """The workers that take part, by number; those with layers are preferred."""
        model = context.model
        held = {worker for worker, _ in state.held}
        found = context.workers(live)
        chosen = sorted(found, key=lambda worker: (worker not in held, worker))[: model.pipelines * model.stages]
        return tuple(sorted(chosen))

    def _configuration(self, context: Context, state: _PolicyState) -> Configuration:
        model, deployment = context.model, state.deployment
        assert deployment is not None
        num_missing = model.pipelines * model.stages - len(state.held)
        label = f"{deployment.choice}, {num_missing} failed" if num_missing else "all work"
        return replace(self.running(context, label, deployment.step, len(state.held), state), choice=deployment.choice)


def _fault_free_cuts(model: TrainingModel) -> tuple[int, ...]:
    return even_cuts(layer_costs(model).layers, model.stages)


def _fill_stages(counts: tuple[int, ...], free: int, most: int) -> tuple[int, ...]:
    """Workers of each stage when idle ones join the barest stages."""
    found = list(counts)
    for _ in range(free):
        barest = min(range(len(found)), key=lambda stage: (found[stage], stage))
        if found[barest] < most:
            found[barest] += 1
    return tuple(found)


def _problem(model: TrainingModel, technique: Technique, cuts: Bounds, counts: tuple[int, ...]) -> Problem:
    """Problem with so many workers in each stage, without a limit on memory."""
    lost = normalized_failures(model.grid, tuple(model.pipelines - count for count in counts))
    return Problem(model.grid, layer_costs(model).costs(cuts, split_backward=technique.split_backward), lost, technique)


@lru_cache(maxsize=20480)
def _planned_deployments(
    model: TrainingModel, technique: Technique, effort: int, cuts: Bounds, counts: tuple[int, ...], fixed: str
) -> tuple[_Deployment, ...]:
    """Deployments that the planner of a run finds, whether or not they pay.

    ``fixed``: why layers cannot move; empty if they can.
    """
    costs = layer_costs(model)
    try:
        plan = plan_layout(
            _problem(model, technique, cuts, counts),
            costs,
            cuts,
            next_change=1e12,
            fixed=fixed,
            judge=lambda other, variation: step_judgement(other, variation, effort),
        )
    except PlanningError:
        return ()
    found = []
    for candidate in (plan.reroute, plan.layers):
        if candidate.judgement is not None:
            held = [(part.start, part.stop) for part in held_ranges(candidate.cuts)]
            stages = list(zip(held, counts, strict=True))
            # As ranks are numbered, so that the workers of a node belong to different stages.
            slots = tuple(held for d in range(model.pipelines) for held, count in stages if d < count)
            found.append(_Deployment(candidate.way, slots, candidate.judgement, candidate.cuts, counts))
    return tuple(found)


# -- who gets what --------------------------------------------------------------------------------------------------


def _assign_slots(
    model: TrainingModel, held: Mapping[int, Range], deployment: _Deployment, workers: Sequence[int]
) -> tuple[dict[int, int], float]:
    """A slot for each worker, and the seconds of the copies."""
    state = tuple(map(round, layer_costs(model).state_bytes))
    bytes_before = tuple(accumulate(state, initial=0))  # of the layers before each one
    full = model.pipelines * model.stages
    if len(workers) == full and deployment.cuts == _fault_free_cuts(model):
        assigned = _home_slots(workers, full)
    else:
        assigned = _nearest_slots(bytes_before, held, deployment.slots, workers)
    most = 0
    lacking: Counter[int] = Counter()  # copies of each layer
    for worker, slot in assigned.items():
        layers, own = deployment.slots[slot], held.get(worker, (0, 0))
        most = max(most, _missing_bytes(bytes_before, own, layers))
        lacking.update(layer for layer in range(*layers) if not own[0] <= layer < own[1])
    if not most:
        return assigned, 0.0
    owners = Counter(layer for layers in held.values() for layer in range(*layers))
    sent = {layer: copies / owners[layer] for layer, copies in lacking.items()}
    sends = max(sum(state[n] * sent.get(n, 0.0) for n in range(*layers)) for layers in set(held.values()))
    return assigned, model.transfer_seconds(max(float(most), sends) / bytes_before[-1])


def _home_slots(workers: Sequence[int], full: int) -> dict[int, int]:
    """Every worker back in its first slot; newcomers fill the rest.

    Otherwise a correlated failure, from which workers often come back together, could empty a stage.
    """
    home = [worker for worker in workers if worker < full]
    others = [worker for worker in workers if worker >= full]
    vacant = sorted(set(range(full)).difference(home))
    return {worker: worker for worker in home} | dict(zip(others, vacant, strict=True))


def _nearest_slots(
    bytes_before: Sequence[int], held: Mapping[int, Range], slots: Sequence[Range], workers: Sequence[int]
) -> dict[int, int]:
    """Slots with little to copy: workers choose in the order of their lacks."""
    free: dict[Range, list[int]] = {}
    for number, layers in enumerate(slots):
        free.setdefault(layers, []).append(number)
    pairs = sorted((_missing_bytes(bytes_before, held.get(w), layers), w, layers) for w in workers for layers in free)
    assigned: dict[int, int] = {}
    for _, worker, layers in pairs:
        if worker not in assigned and free[layers]:
            assigned[worker] = free[layers].pop(0)
    return assigned


def _missing_bytes(bytes_before: Sequence[int], held: Range | None, wanted: Range) -> int:
    """Bytes of the layers ``wanted`` that are not ``held``."""
    lacked = bytes_before[wanted[1]] - bytes_before[wanted[0]]
    if held is not None:
        begin, end = max(wanted[0], held[0]), min(wanted[1], held[1])
        lacked -= bytes_before[end] - bytes_before[begin] if begin < end else 0
    return lacked
