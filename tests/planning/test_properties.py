"""What holds for every grid, cost, limit and set of failures."""

import json
import pickle
from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_recycle import planning

CLOSE = 1e-6
EFFORT = 10_000  # enough for the search to try everything that it has
SLOTS = st.sampled_from([0.0, 0.1, 0.3, 0.9, 1.0, 1.1, 2.0, 3.7])


@st.composite
def problems(draw: st.DrawFn, *, with_failures: bool = True) -> planning.Problem:
    grid = planning.Grid(draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 6)))

    def per_stage() -> tuple[float, ...]:
        return tuple(draw(st.lists(SLOTS, min_size=grid.stages, max_size=grid.stages)))

    costs = planning.Costs(per_stage(), per_stage(), per_stage(), per_stage(), per_stage(), draw(SLOTS))
    failed: set[planning.Worker] = set()
    if with_failures:
        for stage in range(grid.stages):
            pipelines = st.sets(st.integers(0, grid.pipelines - 1), max_size=grid.pipelines - 1)
            failed |= {planning.Worker(pipeline, stage) for pipeline in draw(pipelines)}
    limits = st.lists(st.integers(1, 8), min_size=grid.stages, max_size=grid.stages).map(tuple)
    technique = planning.Technique(draw(st.booleans()), draw(st.booleans()))
    slow = st.dictionaries(st.sampled_from(grid.workers()), st.sampled_from([0.5, 1.0, 1.2, 3.0]), max_size=3)
    factors = draw(st.just({}) | slow)
    limit, memory = draw(st.none() | limits), draw(st.none() | memories(grid.stages))
    return planning.Problem(grid, costs, frozenset(failed), technique, limit, factors, memory)


@st.composite
def memories(draw: st.DrawFn, stages: int) -> planning.Memory:
    """Room for one to six micro-batches after F; a split backward takes nothing, less, as much, or up to twice that."""

    def per_stage(values: list[float]) -> tuple[float, ...]:
        return tuple(draw(st.lists(st.sampled_from(values), min_size=stages, max_size=stages)))

    fixed, held = per_stage([0.0, 0.7, 100.0]), per_stage([0.3, 1.0, 10.0])
    waiting = tuple(size * share for size, share in zip(held, per_stage([0.0, 0.4, 1.0, 1.5, 2.0]), strict=True))
    rooms = zip(fixed, held, per_stage([1.0, 1.5, 2.0, 3.0, 6.0]), strict=True)
    return planning.Memory(tuple(base + size * most for base, size, most in rooms), fixed, held, waiting)


@settings(max_examples=100, deadline=None)
@given(problems())
def test_every_plan_is_valid_and_respects_its_bounds(problem):
    schedule = planning.heuristic(problem, EFFORT)
    planning.validate(schedule)
    if problem.memory is not None:
        for worker in schedule.live_workers:
            assert schedule.peak_memory(worker) <= problem.memory.capacity[worker.stage] + CLOSE
    assert schedule.period >= planning.lower_bound(schedule.problem) - CLOSE
    assert schedule.makespan >= planning.makespan_lower_bound(schedule.problem) - CLOSE
    assert schedule.period <= schedule.makespan + CLOSE


@settings(max_examples=50, deadline=None)
@given(problems(with_failures=False))
def test_1f1b_is_valid_for_any_costs_and_limits(problem):
    schedule = planning.one_f_one_b(problem)
    planning.validate(schedule)
    for worker in schedule.live_workers:
        assert schedule.peak_in_flight(worker) <= problem.grid.stages - worker.stage


@settings(max_examples=25, deadline=None)
@given(problems())
def test_planning_twice_gives_the_same_schedule(problem):
    assert planning.heuristic(problem, EFFORT) == planning.heuristic(pickle.loads(pickle.dumps(problem)), EFFORT)


@settings(max_examples=50, deadline=None)
@given(problems())
def test_a_plan_survives_json_and_pickle(problem):
    schedule = planning.heuristic(problem, EFFORT)
    assert planning.read_plan(json.loads(json.dumps(planning.plan_to_json(schedule)))).schedule == schedule
    assert pickle.loads(pickle.dumps(schedule)) == schedule


@settings(max_examples=50, deadline=None)
@given(problems())
def test_orphans_are_dealt_evenly_and_nothing_else_moves_at_equal_speeds(problem):
    grid = problem.grid
    for stage, route in enumerate(planning.reroute(grid, problem.failed)):
        assert list(route) == list(grid.all_microbatches())
        for microbatch, worker in route.items():
            home = planning.Worker(microbatch.pipeline, stage)
            assert worker.stage == stage
            assert worker not in problem.failed
            assert worker == home or home in problem.failed
        loads = Counter(route.values())
        assert len(loads) == len(problem.live_workers(stage))
        assert max(loads.values()) - min(loads.values()) <= 1


@settings(max_examples=50, deadline=None)
@given(problems())
def test_the_staggered_optimizer_never_slows_down(problem):
    staggered = replace(problem, technique=replace(problem.technique, staggered=True))
    barrier = replace(problem, technique=replace(problem.technique, staggered=False))
    assert planning.heuristic(staggered, EFFORT).period <= planning.heuristic(barrier, EFFORT).period + CLOSE


def test_the_staggered_period_is_what_an_executor_reaches_that_runs_as_early_as_possible():
    """Play 30 iterations of the programs without the planned times; the last ones follow each other by the period."""
    costs = planning.Costs(
        (1.0, 1.3, 0.9, 1.1), (1.0, 1.2, 1.1, 0.7), (0.9, 1.0, 0.8, 1.0), (0.4,) * 4, (0.2,) * 4, 0.2
    )
    failed = frozenset({planning.Worker(0, 1), planning.Worker(2, 3)})
    schedule = planning.heuristic(
        planning.Problem(planning.Grid(3, 4, 6), costs, failed, planning.Technique(), (5, 5, 4, 4))
    )
    iterations = 30
    steps = _play(schedule, iterations)
    pace = (steps[-1] - steps[iterations // 2 - 1]) / (iterations // 2)
    assert abs(pace - schedule.period) < 0.02 * schedule.period


def _play(schedule: planning.Schedule, iterations: int) -> list[float]:
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
                        needed = [("gradient", stage + 1, op.microbatch)]
                    elif kind == "REDUCE":
                        needed = [("ready", stage, peer) for peer in schedule.live_workers if peer.stage == stage]
                        done["ready", stage, worker] = free[worker]
                    if any(name not in done for name in needed):
                        break
                    delay = 0.0 if kind == "REDUCE" else costs.communication
                    start = max([free[worker], *(done[name] + delay for name in needed)])
                    result = "gradient" if kind in ("B", "BW") else kind
                    free[worker] = done[result, stage, op.microbatch] = start + costs.of(op.kind, stage)
                    ops.pop(0)
        ended.append(done["STEP", 0, None])
    return ended
