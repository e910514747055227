"""Planning problems with a judge that shares no code with the planners: random ones, and hard ones.

The judge is a constraint model written from the definition of a schedule. One interval for each F, B, W (or BW) of each
micro-batch, one optional copy of it for each worker that may run it, and the rules of ``docs/planner.md`` as they stand
there: nothing is merged, no symmetry is broken, no bound is used. It takes only plain numbers, and is slow: it is meant
for grids of up to about 60 micro-batch stages.

A micro-batch runs at home where its home is alive, else on any live peer of the stage, F, B and W on the same one.

Needs OR-tools.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from random import Random
from typing import Any

from lightning_recycle.planning import Costs, Grid, Problem, Technique, Worker
from lightning_recycle.planning.child_process import run_in_child


@dataclass(frozen=True)
class Instance:
    """A planning problem in plain numbers; durations per stage, as decimals."""

    pipelines: int
    stages: int
    microbatches: int
    forward: Sequence[float]
    backward: Sequence[float]
    weight: Sequence[float]
    reduce: Sequence[float]
    step: Sequence[float]
    communication: float
    failed: Collection[tuple[int, int]]
    limit: Sequence[int] | None
    split_backward: bool
    staggered: bool


def optimal_period(
    instance: Instance, seconds: float, threads: int = 1, hint: float | None = None
) -> tuple[float, float]:
    """The best period found and the best proven lower bound; equal if ``seconds`` suffice.

    Args:
        instance: the problem.
        seconds: time limit.
        threads: of the solver.
        hint: a period that is known to be possible, from which the search starts.
    """
    from ortools.sat.python import cp_model

    stages, n = range(instance.stages), instance.microbatches
    numbers = [
        *instance.forward, *instance.backward, *instance.weight, *instance.reduce, *instance.step,
        instance.communication,
    ]  # fmt: skip
    denominator = math.lcm(*(Fraction(repr(float(number))).denominator for number in numbers))
    # Iterations are repeated at a distance that is a mean over at most S stages, so fractions down to 1/S occur.
    denominator *= math.lcm(*range(1, instance.stages + 1)) if instance.staggered else 1

    def whole(number: float) -> int:
        return int(Fraction(repr(float(number))) * denominator)

    forward, weight = [whole(x) for x in instance.forward], [whole(x) for x in instance.weight]
    backward = [whole(x) for x in instance.backward]
    closing = [whole(a) + whole(b) for a, b in zip(instance.reduce, instance.step, strict=True)]
    communication = whole(instance.communication)
    one_by_one = instance.pipelines * n * (sum(forward) + sum(backward) + sum(weight))
    horizon = one_by_one + 2 * instance.stages * communication * instance.pipelines * n + sum(closing)
    if hint is not None:
        horizon = min(horizon, 2 * instance.stages * (whole(hint) + 1))

    model = cp_model.CpModel()
    period = model.new_int_var(0, horizon if hint is None else whole(hint) + 1, "period")
    live = {s: [d for d in range(instance.pipelines) if (d, s) not in instance.failed] for s in stages}
    busy: dict[tuple[int, int], list[object]] = {(d, s): [] for s in stages for d in live[s]}
    held: dict[tuple[int, int], list[object]] = {(d, s): [] for s in stages for d in live[s]}
    begin = {s: model.new_int_var(0, horizon, f"begin{s}") for s in stages}
    if not instance.staggered:
        for s in stages:
            model.add(begin[s] == 0)
    for home, index in product(range(instance.pipelines), range(n)):
        f = {s: model.new_int_var(0, horizon, f"f{home}{index}{s}") for s in stages}
        b = {s: model.new_int_var(0, horizon, f"b{home}{index}{s}") for s in stages}
        w = {s: model.new_int_var(0, horizon, f"w{home}{index}{s}") for s in stages}
        for s in stages:
            if s:
                model.add(f[s] >= f[s - 1] + forward[s - 1] + communication)
            length = backward[s]
            if not instance.split_backward:
                length += weight[s]
            if s + 1 < instance.stages:
                behind = backward[s + 1] + (0 if instance.split_backward else weight[s + 1])
                model.add(b[s] >= b[s + 1] + behind + communication)
            else:
                model.add(b[s] >= f[s] + forward[s])
            if instance.split_backward:
                model.add(w[s] >= b[s] + length)
                end = w[s] + weight[s]
            else:
                end = b[s] + length
            model.add(begin[s] <= f[s])
            model.add(period >= end + closing[s] - begin[s])
            workers = [home] if home in live[s] else live[s]
            chosen = {d: model.new_bool_var(f"on{home}{index}{s}{d}") for d in workers}
            model.add_exactly_one(chosen.values())
            size = model.new_int_var(0, 2 * horizon, "")
            model.add(size == end - f[s])
            for d in workers:
                runs = [(f[s], forward[s]), (b[s], length)]
                if instance.split_backward:
                    runs.append((w[s], weight[s]))
                for start, duration in runs:
                    busy[d, s].append(model.new_optional_fixed_size_interval_var(start, duration, chosen[d], ""))
                held[d, s].append(model.new_optional_interval_var(f[s], size, end, chosen[d], ""))
    for d, s in busy:
        model.add_no_overlap(busy[d, s])
        if instance.limit is not None:
            model.add_cumulative(held[d, s], [1] * len(held[d, s]), instance.limit[s])
    model.minimize(period)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = threads
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return math.inf, solver.best_objective_bound / denominator
    return solver.objective_value / denominator, solver.best_objective_bound / denominator


def report_optimum(task: tuple[Instance, float, float | None], report: Callable[[str, object], None]) -> None:
    """:func:`optimal_period` for a process of its own: ("optimum", (period, bound)). Importing OR-tools makes highspy
    fail to load in the same process."""
    instance, seconds, hint = task
    report("optimum", optimal_period(instance, seconds, hint=hint))


def judged(problem: Problem, seconds: float, known: float | None = None) -> tuple[float, float]:
    """The best period and the best bound of the independent judge, in a process of its own.

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
        split_backward=technique.split_backward,
        staggered=technique.staggered,
    )
    answers: list[Any] = []
    failure = run_in_child(
        "planning_judge:report_optimum",
        (instance, seconds, known),
        lambda _, answer: answers.append(answer),
        10 * seconds + 60,
    )
    if not answers:
        raise RuntimeError(f"the judge did not answer: {failure}")
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
"""Problems with plans above the lower bound, for which solvers are asked."""


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
    technique = Technique(split_backward=draw.random() < 0.75, staggered=draw.random() < 0.6)
    return Problem(grid, costs, frozenset(failed), technique, limit)
