"""Planning problems to judge planners by: random ones, of which the small have a proven optimum, and hard ones."""

from __future__ import annotations

from random import Random
from typing import Any

from optimum import Instance

from lightning_recycle.planning import Costs, Grid, Memory, Problem, Technique, Worker
from lightning_recycle.planning.child_process import run_in_child

__all__ = ["HARD", "judged", "planning_problem", "random_problem"]


def judged(problem: Problem, seconds: float, known: float | None = None) -> tuple[float, float]:
    """The best period and the best bound of the independent judge (:mod:`optimum`), in a process of its own.

    Args:
        problem: without slow workers.
        seconds: time limit.
        known: a period that is known to be possible.
    """
    grid, costs, technique = problem.grid, problem.costs, problem.technique
    instance = Instance(
        pipelines=grid.pipelines,
        stages=grid.stages,
        microbatches=grid.microbatches,
        forward=costs.forward,
        backward=costs.backward_input,
        weight=costs.backward_weight,
        reduce=costs.reduce,
        step=costs.optimizer,
        communication=costs.communication,
        failed=[(worker.pipeline, worker.stage) for worker in problem.failed],
        limit=problem.in_flight_limit,
        decoupled=technique.decoupled,
        staggered=technique.staggered,
    )
    answers: list[Any] = []
    end = run_in_child(
        "optimum:report_optimum",
        (instance, seconds, known),
        lambda _, answer: answers.append(answer),
        10 * seconds + 60,
    )
    if not answers:
        raise RuntimeError(f"the judge did not answer: {end.failure}")
    return tuple(answers[0])


HARD = {
    "two failures, tight memory": Problem(
        Grid(4, 5, 6),
        Costs.uniform(5),
        frozenset({Worker(2, 2), Worker(3, 1)}),
        in_flight_limit=(7, 6, 5, 4, 3),
    ),
    "unequal stages, two failures, tight memory": Problem(
        Grid(4, 6, 6),
        Costs(
            (1.0, 0.9, 0.9, 1.2, 1.0, 0.9),
            (1.2, 1.2, 1.0, 1.0, 1.3, 1.0),
            (1.0, 0.9, 0.8, 1.0, 1.0, 0.8),
            (0.0,) * 6,
            (0.0,) * 6,
        ),
        frozenset({Worker(0, 0), Worker(3, 3)}),
        in_flight_limit=(8, 7, 6, 5, 4, 3),
    ),
}
"""Problems where a solver finds a shorter period than the heuristic within a minute."""


def random_problem(seed: int) -> Problem:
    """A grid up to 3 x 4 x 4 with one or two dead workers; unequal costs in half of the cases, a tight memory limit in
    three quarters."""
    draw = Random(seed)
    grid = Grid(draw.randint(2, 3), draw.randint(2, 4), draw.randint(2, 4))
    stages = range(grid.stages)

    def per_stage(*values: float) -> tuple[float, ...]:
        return tuple(draw.choice(values) for _ in stages)

    costs = Costs.uniform(grid.stages)
    if draw.random() < 0.5:
        none = (0.0,) * grid.stages
        costs = Costs(
            per_stage(1.0, 1.5, 2.0), per_stage(1.0, 1.5, 2.0), per_stage(0.5, 1.0, 1.5), none, none,
            draw.choice((0.0, 0.5)),
        )  # fmt: skip
    failed: set[Worker] = set()
    for _ in range(draw.choice((1, 1, 2))):
        worker = Worker(draw.randrange(grid.pipelines), draw.randrange(grid.stages))
        peers = {Worker(d, worker.stage) for d in range(grid.pipelines)}
        if peers - failed - {worker}:
            failed.add(worker)
    limit = None
    if draw.random() < 0.75:
        limit = tuple(
            draw.randint(max(1, min(grid.microbatches, grid.stages - s) - 1), grid.stages + 1) for s in stages
        )
    technique = Technique(decoupled=draw.random() < 0.75, staggered=draw.random() < 0.6)
    return Problem(grid, costs, frozenset(failed), technique, limit)


def planning_problem(seed: int, *, slow: bool = False) -> Problem:
    """A grid up to 4 x 6 x 10 with up to three dead workers; equal, nearly equal and unequal costs; for most, memory is
    short, in micro-batches or in bytes, and in some of these forwards may be computed again.

    Args:
        seed: of the random numbers.
        slow: whether one worker takes 1.3 to 2 times as long.
    """
    draw = Random(seed)
    grid = Grid(draw.randint(2, 4), draw.randint(3, 6), draw.randint(3, 10))
    stages, count = range(grid.stages), grid.stages
    none, kind = (0.0,) * count, draw.random()
    if kind < 0.4:
        costs = Costs.uniform(count)
    elif kind < 0.6:
        costs = Costs.uniform(count, 1.0, 1.1, 0.9, communication=0.1)
    else:
        forward = tuple(round(draw.uniform(0.8, 1.2), 3) for _ in stages)
        backward, weight = (tuple(round(share * each, 3) for each in forward) for share in (1.1, 0.9))
        costs = Costs(forward, backward, weight, none, none, draw.choice((0.0, 0.1)))
    failed: set[Worker] = set()
    for _ in range(draw.choice((0, 1, 1, 2, 3))):
        worker = Worker(draw.randrange(grid.pipelines), draw.randrange(count))
        if {Worker(d, worker.stage) for d in range(grid.pipelines)} - failed - {worker}:
            failed.add(worker)
    limit, memory, kind = None, None, draw.random()
    if kind < 0.4:
        extra = draw.choice((0, 0, 1))
        limit = tuple(count - stage + extra for stage in stages)
    elif kind < 0.85:
        waiting, room = 10 * draw.choice((0.3, 1.0, 1.5)), 10 * count * draw.choice((0.7, 1.0, 1.3))
        fixed = tuple(round(draw.uniform(80, 100), 1) for _ in stages)
        checkpoint = (1.0,) * count if draw.random() < 0.4 else None
        memory = Memory((100.0 + room,) * count, fixed, (10.0,) * count, (waiting,) * count, checkpoint)
    factors: dict[Worker, float] = {}
    if slow:
        live = [worker for worker in grid.workers() if worker not in failed]
        factors[draw.choice(live)] = draw.choice((1.3, 1.5, 2.0))
    technique = Technique(decoupled=draw.random() < 0.75, staggered=draw.random() < 0.7)
    return Problem(grid, costs, frozenset(failed), technique, limit, tuple(factors.items()), memory)
