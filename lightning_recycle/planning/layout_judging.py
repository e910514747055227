"""How long a step takes under a layout: by its schedule, or, where listing all operations takes too long, by that of a
pipeline that stands for all.

Concept: grids up to ``CODED_FROM`` operations are planned as they are. Larger ones are planned by lanes where that is
near the lower bound. Where stages have very different numbers of workers, a lane per worker of the barest stage wastes
the others, so they are judged by one pipeline whose stages have the *rate* of their workers: with n workers at most in
a stage and n[s] in stage s, each operation takes n / n[s] times as long, for ceil(D M / n) micro-batches. That is a
prediction, not a plan; the plan of the layout that is chosen is made when it is needed.

Contract: pure, deterministic. The newest judgements are kept.

Must not know: layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

from lightning_recycle.planning.bounds import lower_bound
from lightning_recycle.planning.coded import CodedSchedule
from lightning_recycle.planning.grid import Grid
from lightning_recycle.planning.heuristic import DEFAULT_EFFORT, heuristic, heuristic_in_turns
from lightning_recycle.planning.lane_planning import CODED_FROM, worth_coding
from lightning_recycle.planning.lanes import lane_problem
from lightning_recycle.planning.memory import Memory
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.planning.turns import Turns

__all__ = ["Judge", "Judgement", "in_turns", "judged", "rate_problem"]

_EFFORT = DEFAULT_EFFORT // 4
_LARGE_EFFORT = 120_000  # of a pipeline that stands for a large grid, whose plan is made again once it is chosen
_GOOD = 1.01  # of the lower bound, as in lane planning


@dataclass(frozen=True)
class Judgement:
    """What a step takes.

    Args:
        period: seconds between two steps.
        fill: extra seconds of the first step, which begins with empty pipelines.
        lead: how long before the end of a step the first worker begins the next one.
        schedule: the plan, if it was made.
    """

    period: float
    fill: float = 0.0
    lead: float = 0.0
    schedule: Schedule | None = None


Judge: TypeAlias = Callable[[Problem, Turns | None], Judgement]


def judged(problem: Problem, turns: Turns | None = None) -> Judgement:
    """A step of ``problem``.

    Args:
        problem: with the mean costs of micro-batches.
        turns: how these differ, where stages share layers. A plan that does not list all operations is made by the
            mean.

    Raises:
        PlanningError: when there is no plan.
    """
    return _judged(problem, turns, _EFFORT)


@lru_cache(maxsize=256)
def _judged(problem: Problem, turns: Turns | None, effort: int) -> Judgement:
    if not worth_coding(problem, CODED_FROM):
        return in_turns(_of(heuristic(problem, effort)), turns, effort)
    lane, bound = lane_problem(problem), lower_bound(problem)
    if lower_bound(lane) <= _GOOD * bound:
        return replace(_of(heuristic(lane, _LARGE_EFFORT)), schedule=None)
    rate = _of(heuristic(rate_problem(problem), _LARGE_EFFORT))
    return Judgement(max(rate.period, bound), rate.fill, rate.lead)


def in_turns(judgement: Judgement, turns: Turns | None, effort: int) -> Judgement:
    """What a step takes if micro-batches differ.

    Args:
        judgement: for the mean micro-batch. Without a plan, or with one by lanes, it stands for each.
        turns: how they differ; None if they do not.
        effort: of the planner.
    """
    schedule = judgement.schedule
    if turns is None or schedule is None or isinstance(schedule, CodedSchedule):
        return judgement
    schedule, timing = heuristic_in_turns(schedule, turns, effort)
    staggered = schedule.problem.technique.staggered
    period = timing.period if staggered else timing.makespan
    lead = max(timing.stage_end) - min(timing.stage_end) if staggered else 0.0
    return Judgement(period, timing.makespan - period, lead, schedule)


def _of(schedule: Schedule) -> Judgement:
    lane = schedule.lane.schedule() if isinstance(schedule, CodedSchedule) else schedule  # lanes are alike
    ends = [operations[-1].end for operations in lane.workers.values() if operations]
    lead = max(ends) - min(ends) if schedule.problem.technique.staggered else 0.0
    return Judgement(schedule.period, max(0.0, schedule.makespan - schedule.period), lead, schedule)


def rate_problem(problem: Problem) -> Problem:
    """One pipeline without failures whose stages are as fast as all live workers of ``problem`` together."""
    live = problem.live_counts()
    most = max(live)
    slower = [most / count for count in live]
    costs, memory, limit = problem.costs, problem.memory, problem.in_flight_limit

    def each(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(value * factor for value, factor in zip(values, slower, strict=True))

    return replace(
        problem,
        grid=Grid(1, problem.grid.stages, -(-problem.grid.global_microbatches // most)),
        costs=replace(
            costs,
            forward=each(costs.forward),
            backward_input=each(costs.backward_input),
            backward_weight=each(costs.backward_weight),
        ),
        failed=frozenset(),
        in_flight_limit=None
        if limit is None
        else tuple(max(1, int(n / f)) for n, f in zip(limit, slower, strict=True)),
        memory=None if memory is None else _shared(memory, slower),
    )


def _shared(memory: Memory, slower: list[float]) -> Memory:
    """Room for as many micro-batches as the workers of a stage have for each pipeline, at least for one."""
    room = [max(memory.room(stage) / factor, memory.after_forward[stage]) for stage, factor in enumerate(slower)]
    return replace(memory, capacity=tuple(map(sum, zip(memory.fixed, room, strict=True))))
