"""Grids, costs and problems, plans, files, the registry and errors: what other parts and users touch."""

import json

import pytest

from lightning_recycle import planning as p
from lightning_recycle.errors import ConfigurationError, PlanningError
from lightning_recycle.planning.schedule import proven

GRID = p.Grid(3, 4, 6)
UNIT = p.Costs.uniform(4)
GIB = 1024.0**3


def slow(factors: dict[p.Worker, float], **changes: object) -> p.Problem:
    return p.Problem(GRID, UNIT, worker_factors=factors, **changes)


def memory(**changes: object) -> p.Memory:
    values: dict[str, object] = {"capacity": (8.0,), "fixed": (1.0,), "after_forward": (1.0,), "after_backward": (1.0,)}
    return p.Memory(**{**values, **changes})


def test_the_in_flight_limit_is_what_fits_after_forward_and_after_backward():
    memory = p.Memory(
        capacity=(16 * GIB,) * 3,
        fixed=(4 * GIB, 4 * GIB, 0.0),
        after_forward=(2 * GIB, 1 * GIB, 0.0),
        after_backward=(1 * GIB, 5 * GIB, 0.0),
    )
    assert memory.in_flight_limit(most=18) == (6, 2, 18)
    assert memory.in_flight_limit(most=5) == (5, 2, 5)


def test_a_slow_worker_gets_less_and_the_plan_says_so():
    problem = slow({p.Worker(1, 2): 2.0, p.Worker(0, 0): 1.0})
    assert problem.worker_factors == ((p.Worker(1, 2), 2.0),)
    assert problem == slow({p.Worker(1, 2): 2.0})
    assert (problem.factor(p.Worker(1, 2)), problem.factor(p.Worker(0, 0))) == (2.0, 1.0)
    assert problem.duration(p.OpKind.FORWARD, p.Worker(1, 2)) == 2.0
    schedule = p.heuristic(problem)
    p.validate(schedule)
    assert sum(op.kind is p.OpKind.FORWARD for op in schedule.program(p.Worker(1, 2))) == 4
    assert schedule.period == 24  # 4 x 3 x 2 slots; without giving up any it would be 36


def test_the_step_of_a_stage_waits_for_its_slowest_worker_and_reduce_is_common():
    costs = p.Costs.uniform(1, reduce=1.0, optimizer=0.5)
    problem = p.Problem(p.Grid(2, 1, 2), costs, worker_factors={p.Worker(1, 0): 3.0})
    assert problem.duration(p.OpKind.REDUCE, p.Worker(1, 0)) == 1.0
    assert problem.duration(p.OpKind.STEP, p.Worker(1, 0)) == 1.5
    schedule = p.heuristic(problem)
    p.validate(schedule)
    assert schedule.period == 9.0 + 1.0 + 1.5  # shares 3 and 1


def test_routes_and_programs():
    schedule = p.plan(p.Problem(GRID, UNIT, frozenset({p.Worker(1, 2)})))
    assert schedule.live_workers == tuple(worker for worker in GRID.workers() if worker != p.Worker(1, 2))
    assert schedule.route(1, p.Microbatch(1, 0)) == p.Worker(1, 1)
    assert schedule.route(2, p.Microbatch(1, 0)) == p.Worker(0, 2)
    program = schedule.program(p.Worker(0, 2))
    assert [op.kind for op in program[-2:]] == [p.OpKind.REDUCE, p.OpKind.STEP]
    assert sum(op.kind is p.OpKind.FORWARD for op in program) == 9
    with pytest.raises(PlanningError, match=r"\(1, 2\) has failed"):
        schedule.program(p.Worker(1, 2))
    with pytest.raises(PlanningError, match=r"no forward of micro-batch \(0, 6\)"):
        schedule.route(0, p.Microbatch(0, 6))


def test_plan_file_has_the_documented_schema():
    problem = p.Problem(GRID, UNIT, frozenset({p.Worker(1, 2)}), in_flight_limit=(9, 9, 9, 9))
    data = json.loads(json.dumps(p.plan_to_json(p.plan(problem))))
    workers = data.pop("workers")
    ones, zeros = [1.0] * 4, [0.0] * 4
    costs = {"forward": ones, "backward_input": ones, "backward_weight": ones, "reduce": zeros, "optimizer": zeros}
    assert data == {
        "schema": 1,
        "problem": {
            "grid": {"pipelines": 3, "stages": 4, "microbatches": 6, "lanes": 3},
            "costs": {**costs, "communication": 0.0},
            "failed": [{"pipeline": 1, "stage": 2}], "technique": {"split_backward": True, "staggered": True},
            "in_flight_limit": [9, 9, 9, 9], "worker_factors": [], "memory": None,
        },
        "backend": "heuristic", "status": "optimal", "lower_bound": 27.0, "gap": 0.0, "found_by": "heuristic",
        "solver": {"calls": 0, "seconds": 0.0, "reason": ""}, "period": 27.0, "makespan": 29.0, "lane": [],
    }  # fmt: skip
    assert [(entry["pipeline"], entry["stage"]) for entry in workers[:7]] == [
        (0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 3),
    ]  # fmt: skip
    columns = workers[0]["ops"]
    columns["op"] = columns["op"].split()
    names = ("op", "pipeline", "microbatch", "start", "end")
    assert sorted(columns) == sorted(names)
    assert [columns[name][0] for name in names] == ["F", 0, 0, 0.0, 1.0]
    assert [columns[name][-1] for name in names[:3]] == ["STEP", -1, -1]


def test_a_gap_to_the_bound_is_feasible_not_optimal():
    technique = p.Technique(split_backward=False, staggered=False)
    data = p.plan_to_json(proven(p.plan(p.Problem(GRID, UNIT, frozenset({p.Worker(1, 0)}), technique)), "mine"))
    assert (data["backend"], data["status"], data["lower_bound"], data["period"]) == ("mine", "feasible", 28.0, 29.0)


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: p.Grid(0, 4, 6), ConfigurationError, r"pipelines=0.*at least 1"),
    (lambda: p.Grid(3, 4, 1.5), ConfigurationError, r"microbatches=1\.5"),
    (lambda: GRID.worker(12), ConfigurationError, r"rank 12 .* 0\.\.11"),
    (lambda: p.Costs.uniform(4, forward=-1.0), ConfigurationError, r"forward.*-1\.0"),
    (lambda: p.Costs.uniform(4, communication=float("nan")), ConfigurationError, "communication"),
    (lambda: p.Costs.uniform(4, reduce="1"), ConfigurationError, "reduce.*'1'"),
    (lambda: p.Costs(1.0, (1.0,), (1.0,), (0.0,), (0.0,)), ConfigurationError, "per stage"),
    (lambda: p.Costs((1.0,), (1.0, 1.0), (1.0,), (0.0,), (0.0,)), ConfigurationError, "'backward_input': 2"),
    (lambda: p.Problem(GRID, p.Costs.uniform(3)), ConfigurationError, r"3 stages.*has 4"),
    (lambda: p.Problem(GRID, UNIT, frozenset({p.Worker(3, 0)})), ConfigurationError, r"\(3, 0\).*0\.\.2"),
    (lambda: p.Problem(GRID, UNIT, frozenset(GRID.workers()[2::4])), PlanningError, "all 3 replicas of stage 2"),
    (lambda: p.Problem(GRID, UNIT, in_flight_limit=(4, 4)), ConfigurationError, r"\(4, 4\).*4 integers"),
    (lambda: p.Problem(GRID, UNIT, in_flight_limit=(4, 4, 4, 0)), ConfigurationError, "at least 1"),
    (lambda: p.plan(p.Problem(GRID, UNIT), planner="magic"), ConfigurationError, r"^planner='magic': .*heuristic"),
    (lambda: p.plan(p.Problem(GRID, UNIT), planner=7), ConfigurationError, "^planner=7: give a name"),
    (lambda: p.HeuristicPlanner(compact_from=-1), ConfigurationError, r"compact_from=-1.*at least 0"),
    (lambda: p.HeuristicPlanner(effort=-1), ConfigurationError, r"effort=-1.*at least 0"),
    (lambda: p.one_f_one_b(p.Problem(GRID, UNIT, frozenset({p.Worker(1, 2)}))), PlanningError, r"\(1, 2\) failed"),
    (lambda: p.reroute(p.Grid(1, 1, 1), {p.Worker(0, 0)}), PlanningError, "stage 0 has no live worker"),
    (lambda: slow({p.Worker(3, 0): 2.0}), ConfigurationError, r"worker_factors.*\(3, 0\).*0\.\.2"),
    (lambda: slow({p.Worker(0, 0): 0.0}), ConfigurationError, r"worker_factors\[\(0, 0\)\]=0\.0.*above 0"),
    (lambda: slow({p.Worker(0, 0): float("inf")}), ConfigurationError, "finite"),
    (lambda: memory(fixed=(1.0, 2.0)), ConfigurationError, "fixed.*2 numbers.*1"),
    (lambda: memory(after_forward=(-1.0,)), ConfigurationError, "after_forward"),
    (lambda: memory(after_forward=1.0), ConfigurationError, "per stage"),
    (lambda: memory(fixed=(9.0,)).in_flight_limit(4), PlanningError, "stage 0 has 8 bytes, needs 9"),
    (lambda: memory(after_backward=(8.0,)).in_flight_limit(4), PlanningError, "8 more with one micro-batch"),
])  # fmt: skip
def test_bad_input_names_the_value_and_the_remedy(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_planner_object_is_used_and_its_mistakes_are_caught():
    class Broken:
        def plan(self, problem: p.Problem) -> p.Schedule:
            return p.Schedule(problem, {}, 0.0)

    assert isinstance(p.get_planner("heuristic"), p.HeuristicPlanner)
    assert p.plan(p.Problem(GRID, UNIT), planner=p.HeuristicPlanner(effort=0)).period == 19
    with pytest.raises(p.InvalidScheduleError):
        p.plan(p.Problem(GRID, UNIT), planner=Broken())
