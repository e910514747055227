"""What holds for every grid, cost, limit and set of failures."""

import json
import pickle
from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_recycle.planning import (
    Costs,
    Grid,
    Problem,
    Schedule,
    Technique,
    Worker,
    heuristic,
    lower_bound,
    makespan_lower_bound,
    one_f_one_b,
    reroute,
    validate,
)

CLOSE = 1e-6
EFFORT = 10_000  # enough for the search to try everything that it has
SLOTS = st.sampled_from([0.0, 0.1, 0.3, 0.9, 1.0, 1.1, 2.0, 3.7])


@st.composite
def problems(draw: st.DrawFn, *, with_failures: bool = True) -> Problem:
    grid = Grid(draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 6)))

    def per_stage() -> tuple[float, ...]:
        return tuple(draw(st.lists(SLOTS, min_size=grid.stages, max_size=grid.stages)))

    costs = Costs(per_stage(), per_stage(), per_stage(), per_stage(), per_stage(), draw(SLOTS))
    failed: set[Worker] = set()
    if with_failures:
        for stage in range(grid.stages):
            pipelines = st.sets(st.integers(0, grid.pipelines - 1), max_size=grid.pipelines - 1)
            failed |= {Worker(pipeline, stage) for pipeline in draw(pipelines)}
    limits = st.lists(st.integers(1, 8), min_size=grid.stages, max_size=grid.stages).map(tuple)
    technique = Technique(draw(st.booleans()), draw(st.booleans()))
    slow = st.dictionaries(st.sampled_from(grid.workers()), st.sampled_from([0.5, 1.0, 1.2, 3.0]), max_size=3)
    factors = draw(st.just({}) | slow)
    return Problem(grid, costs, frozenset(failed), technique, draw(st.none() | limits), factors)  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(problems())
def test_every_plan_is_valid_and_respects_its_bounds(problem: Problem) -> None:
    schedule = heuristic(problem, EFFORT)
    validate(schedule)
    assert schedule.period >= lower_bound(schedule.problem) - CLOSE
    assert schedule.makespan >= makespan_lower_bound(schedule.problem) - CLOSE
    assert schedule.period <= schedule.makespan + CLOSE


@settings(max_examples=100, deadline=None)
@given(problems(with_failures=False))
def test_1f1b_is_valid_for_any_costs_and_limits(problem: Problem) -> None:
    schedule = one_f_one_b(problem)
    validate(schedule)
    for worker in schedule.live_workers:
        assert schedule.peak_in_flight(worker) <= problem.grid.stages - worker.stage


@settings(max_examples=25, deadline=None)
@given(problems())
def test_planning_twice_gives_the_same_schedule(problem: Problem) -> None:
    assert heuristic(problem, EFFORT) == heuristic(pickle.loads(pickle.dumps(problem)), EFFORT)


@settings(max_examples=50, deadline=None)
@given(problems())
def test_a_plan_survives_json_and_pickle(problem: Problem) -> None:
    schedule = heuristic(problem, EFFORT)
    assert Schedule.from_plan(json.loads(json.dumps(schedule.to_plan()))) == schedule
    assert pickle.loads(pickle.dumps(schedule)) == schedule


@settings(max_examples=100, deadline=None)
@given(problems())
def test_orphans_are_dealt_evenly_and_nothing_else_moves_at_equal_speeds(problem: Problem) -> None:
    grid = problem.grid
    for stage, route in enumerate(reroute(grid, problem.failed)):
        assert list(route) == list(grid.all_microbatches())
        for microbatch, worker in route.items():
            home = Worker(microbatch.pipeline, stage)
            assert worker.stage == stage
            assert worker not in problem.failed
            assert worker == home or home in problem.failed
        loads = Counter(route.values())
        assert len(loads) == len(problem.live_workers(stage))
        assert max(loads.values()) - min(loads.values()) <= 1


@settings(max_examples=50, deadline=None)
@given(problems())
def test_the_staggered_optimizer_never_slows_down(problem: Problem) -> None:
    staggered = replace(problem, technique=replace(problem.technique, staggered=True))
    barrier = replace(problem, technique=replace(problem.technique, staggered=False))
    assert heuristic(staggered, EFFORT).period <= heuristic(barrier, EFFORT).period + CLOSE


def test_the_staggered_period_is_what_an_executor_reaches_that_runs_as_early_as_possible() -> None:
    """Play 30 iterations of the programs without the planned times; the last ones follow each other by the period."""
    costs = Costs((1.0, 1.3, 0.9, 1.1), (1.0, 1.2, 1.1, 0.7), (0.9, 1.0, 0.8, 1.0), (0.4,) * 4, (0.2,) * 4, 0.2)
    failed = frozenset({Worker(0, 1), Worker(2, 3)})
    schedule = heuristic(Problem(Grid(3, 4, 6), costs, failed, Technique(), (5, 5, 4, 4)))
    iterations = 30
    steps = _play(schedule, iterations)
    pace = (steps[-1] - steps[iterations // 2 - 1]) / (iterations // 2)
    assert abs(pace - schedule.period) < 0.02 * schedule.period


def _play(schedule: Schedule, iterations: int) -> list[float]:
    """End of stage 0's STEP in each iteration, when every operation starts as soon as it can."""
    free = dict.fromkeys(schedule.live_workers, 0.0)
    costs, ended = schedule.problem.costs, []
    for _ in range(iterations):
        done: dict[tuple[str, int, object], float] = {}
        queue = {worker: list(schedule.program(worker)) for worker in schedule.live_workers}
        while any(queue.values()):
            for worker, ops in queue.items():
                while ops:
                    op = ops[0]
                    kind, stage = op.kind.value, op.stage
                    needed: list[tuple[str, int, object]] = []
                    if kind == "F" and stage > 0:
                        needed = [("F", stage - 1, op.microbatch)]
                    elif kind in ("B", "BW") and stage < schedule.grid.stages - 1:
                        needed = [(kind, stage + 1, op.microbatch)]
                    elif kind == "REDUCE":
                        needed = [("ready", stage, peer) for peer in schedule.live_workers if peer.stage == stage]
                        done["ready", stage, worker] = free[worker]
                    if any(name not in done for name in needed):
                        break
                    delay = 0.0 if kind == "REDUCE" else costs.communication
                    start = max([free[worker], *(done[name] + delay for name in needed)])
                    free[worker] = done[kind, stage, op.microbatch] = start + costs.of(op.kind, stage)
                    ops.pop(0)
        ended.append(done["STEP", 0, None])
    return ended
