"""Oobleck's pipeline templates: how a model is cut for n nodes, which n are possible, and how batches are shared.

Concept: templates are planned once for every number of nodes from n0 on. Any number of nodes N >= f n0 is a sum of
such numbers (the Frobenius problem has no gaps when the sizes are consecutive and reach 2 n0 - 1), so no node
needs to be idle. Contract: pure functions, cached.

Source: Jang et al., SOSP'23 (arXiv 2309.08125), sections 4 and 5, and its public repository (SymbioticLab/Oobleck).
Internal to ``policies``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import pairwise

from lightning_recycle.simulation.planned_steps import DEFAULT_EFFORT, PlannedStep
from lightning_recycle.simulation.schedules import pipeline_step
from lightning_recycle.simulation.training_model import TrainingModel

__all__ = ["cut", "iteration_estimate", "least_nodes", "pipelines_step", "share_batch", "stage_ranges"]


def iteration_estimate(stages: Sequence[float]) -> float:
    """Oobleck's estimate T of an iteration with 4 S micro-batches: T1 + T2 + T3.

    Args:
        stages: F + B of one micro-batch, by stage.

    With k the slowest stage (from 0): T1 is the first micro-batch's way through all stages; T2 = (2 S + k + 1)
    slots of stage k; T3 the way back, the sum over the stages from k on.
    """
    slowest = max(range(len(stages)), key=lambda stage: (stages[stage], -stage))
    return sum(stages) + (2 * len(stages) + slowest + 1) * stages[slowest] + sum(stages[slowest:])


@cache
def cut(units: int, stages: int) -> tuple[int, ...]:
    """Units of each of ``stages`` stages, by divide and conquer: halve the stages, try every split of the units.

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
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + part)
    return tuple(pairwise(ends))


@lru_cache(maxsize=1024)
def least_nodes(model: TrainingModel, memory_factor: float, parameter_bytes: float) -> int | None:
    """n0: the fewest workers whose memory holds the model; None if not even one unit per stage fits.

    Each stage needs ``memory_factor`` times the bytes of its parameters, and the activations of as many micro-batches
    as a pipeline of that depth has in flight.
    """
    state = memory_factor * parameter_bytes * model.transformer.parameters / model.tensor_parallel
    for stages in range(1, model.units + 1):
        part = max(cut(model.units, stages)) / model.units
        if part * state + stages * model.activation_bytes(part) <= model.memory_bytes:
            return stages
    return None


def share_batch(total: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """``total`` micro-batches over pipelines so that the least-squares difference of their times is smallest.

    Args:
        total: micro-batches in a step.
        speeds: micro-batches per second of each pipeline in steady state.

    Without rounding the solution is proportional to speed (all times equal). It is rounded to whole
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


@lru_cache(maxsize=16384)
def pipelines_step(
    model: TrainingModel,
    sizes: tuple[int, ...],
    schedule: str = "1f1b",
    effort: int = DEFAULT_EFFORT,
    paces: tuple[float, ...] = (),
    crowding: float = 1.0,
) -> PlannedStep:
    """One step on pipelines of these sizes: that of the slowest with its share of the batch.

    Pipelines are filled again together, and all have finished a step before the slowest begins the next but one.

    Args:
        model: the model.
        sizes: workers of each pipeline.
        schedule: schedule of the pipelines.
        effort: effort of the planner.
        paces: speed of the slowest worker of each pipeline, as a part of the usual one; () where none is slow.
        crowding: factor by which messages take longer.
    """
    paces = paces or (1.0,) * len(sizes)
    units = [cut(model.units, size) for size in sizes]
    costs = [model.costs(parts, pipelines=len(sizes)) for parts in units]
    costs = [replace(each, communication=each.communication * crowding) for each in costs]
    slowest = [max(map(sum, zip(c.forward, c.backward_input, c.backward_weight, strict=True))) for c in costs]
    speeds = [pace / seconds for pace, seconds in zip(paces, slowest, strict=True)]
    shares = share_batch(model.grid.global_microbatches, speeds)
    steps = [
        pipeline_step(schedule, cost, share, model.in_flight_limit(parts), effort).longer(share * each * (1 / pace - 1))
        for cost, share, parts, pace, each in set(zip(costs, shares, units, paces, slowest, strict=True))
    ]
    seconds = max(step.seconds for step in steps)
    fill = max(step.seconds + step.fill for step in steps) - seconds
    return PlannedStep(seconds, fill, max(step.lead for step in steps))
