"""The list-scheduling heuristic: a good plan for any failures, at once.

Concept: play the iteration forward in time under a rule of priorities (see ``list_scheduling``), search for the rule
with the best result (see ``rule_search``). Pipelines that are all alike, as without failures, are planned once and
copied.

Contract: deterministic; respects the in-flight limit; the plain rule alone with ``effort=0``.

Must not know: the validator (which is written from the definition, independently), exact solvers.

Source: ReCycle (arXiv 2405.14009), sections 3 and 4, for the three techniques.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning.bounds import makespan_lower_bound
from lightning_recycle.planning.collector import collector_paused
from lightning_recycle.planning.grid import Grid
from lightning_recycle.planning.one_f_one_b import one_f_one_b
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.routing import reroute
from lightning_recycle.planning.rule_search import Solution, search
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.planning.timing import Codes, assemble, best_timing
from lightning_recycle.planning.zero_bubble import zero_bubble

__all__ = ["DEFAULT_EFFORT", "HeuristicPlanner", "heuristic"]

DEFAULT_EFFORT = 800_000
"""Operations to play in search of a better schedule: at most about 1 s, and 0.1 s for small grids. Grids with more of
them get a few rules only."""


@dataclass(frozen=True, slots=True)
class HeuristicPlanner:
    """The planner "heuristic"; see :func:`heuristic` for ``effort``."""

    effort: int = DEFAULT_EFFORT

    def __post_init__(self) -> None:
        if not isinstance(self.effort, int) or self.effort < 0:
            raise ConfigurationError(
                f"HeuristicPlanner(effort={self.effort!r}): give a number of operations, at least 0."
            )

    def plan(self, problem: Problem) -> Schedule:
        """See :func:`heuristic`."""
        return heuristic(problem, self.effort)


def heuristic(problem: Problem, effort: int = DEFAULT_EFFORT) -> Schedule:
    """A schedule for ``problem``: 1F1B where it applies (no failure, slow worker or decoupling), else a list schedule.

    Of those found it is the one with the smallest period (with the staggered optimizer, else makespan), then the
    smallest makespan, then the fewest micro-batches in flight.

    Args:
        problem: what to plan.
        effort: number of operations to play in total; 0 for the plain rule alone, "backward, then forward, then weight
            gradient, oldest first", with which the techniques of the paper can be compared.
    """
    if not problem.failed and not problem.worker_factors and not problem.technique.decoupled:
        return one_f_one_b(problem)
    with collector_paused():
        return _list_schedule(problem, effort)


def _list_schedule(problem: Problem, effort: int) -> Schedule:
    codes = _codes(problem)
    if problem.failed or problem.worker_factors:
        solution = _best(codes, effort)
        return assemble(codes, solution.sequence, solution.timing)
    # All pipelines are alike: plan one.
    grid = problem.grid
    solution = _best(_codes(replace(problem, grid=Grid(1, grid.stages, grid.microbatches))), effort)
    sequence: list[int] = []
    for code in solution.sequence:
        key, number = divmod(code, grid.microbatches)
        sequence += range(key * codes.n + number, (key + 1) * codes.n, grid.microbatches)
    return assemble(codes, sequence, best_timing(codes, sequence))


def _best(codes: Codes, effort: int) -> Solution:
    problem = codes.problem
    alike = not problem.failed and not problem.worker_factors
    solution = search(codes, effort, _zero_bubble_starts(codes) if alike and not codes.fused else ())
    if problem.technique.staggered and effort and solution.score[0] > makespan_lower_bound(problem) * (1 + 1e-9):
        # The search without the staggered optimizer might have been luckier; its order is as good with it.
        barrier = replace(problem, technique=replace(problem.technique, staggered=False))
        again = _best(_codes(barrier), effort)
        timing = best_timing(codes, again.sequence)
        if round(timing.period, 9) < solution.score[0]:
            return replace(again, timing=timing)
    return solution


def _codes(problem: Problem) -> Codes:
    routes = reroute(problem.grid, problem.failed, dict(problem.worker_factors))
    return Codes(problem, routes, fused=not problem.technique.decoupled)


def _zero_bubble_starts(codes: Codes) -> Iterator[list[int]]:
    """ZB-H1 and relatives with a longer warm-up, as memory allows."""
    stages, microbatches = codes.stages, codes.problem.grid.microbatches
    limit = codes.problem.in_flight_limit or (microbatches,) * stages
    for slope, less in ((1.0, 0), (2.0, 1), (1.5, 0), (2.0, 0), (2.5, 0)):
        warmup = [max(1, int(slope * (stages - stage)) - less) for stage in range(stages)]
        yield zero_bubble(codes, warmup, limit)
        yield zero_bubble(codes, warmup, [min(w, n) for w, n in zip(warmup, limit, strict=True)])
