"""The plan library: the right plan at once, or none; damaged and foreign files are reported and replaced."""

import functools
import gzip
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from lightning_recycle import planning
from lightning_recycle.errors import ConfigurationError, PlanningError

GRID = planning.Grid(3, 4, 6)
PROBLEM = planning.Problem(GRID, planning.Costs.uniform(4), frozenset({planning.Worker(1, 2)}))
solved = functools.cache(planning.solve)


@dataclass(frozen=True)
class FailsOnTwo:
    """A planner of the user's own, with an opinion."""

    def plan(self, problem: planning.Problem) -> planning.Schedule:
        if len(problem.failed) == 2:
            raise PlanningError("two are too many")
        return planning.heuristic(problem, 0)


def only_file(path: Path) -> Path:
    (file,) = path.iterdir()
    return file


def test_a_stored_plan_is_there_in_milliseconds(tmp_path):
    result = solved(PROBLEM)
    planning.PlanLibrary(tmp_path / "plans").put(result)
    library = planning.PlanLibrary(tmp_path / "plans")
    began = time.perf_counter()
    assert library.get(PROBLEM) == result.schedule
    first = time.perf_counter() - began
    found = library.lookup(PROBLEM)
    assert (found.status, found.backend, found.lower_bound) == ("optimal", "heuristic", 27.0)
    assert first < 0.1  # 5 ms on an idle machine


@pytest.mark.parametrize(("other", "reason"), [
    (replace(PROBLEM, grid=planning.Grid(4, 4, 6)), "the grid 4 x 4 x 6"),
    (replace(PROBLEM, costs=planning.Costs.uniform(4, 1.0, 1.0, 2.0)), "costs differ by 50 %"),
    (replace(PROBLEM, failed=frozenset({planning.Worker(1, 1)})), "no plan for these failures"),
    (replace(PROBLEM, failed=frozenset({planning.Worker(0, 2), planning.Worker(1, 2)})), "no plan for these failures"),
    (replace(PROBLEM, technique=planning.Technique(False, False)), "Technique(split_backward=False, staggered=False)"),
    (replace(PROBLEM, in_flight_limit=(3, 3, 3, 3)), "workers would hold more than they may"),
    (replace(PROBLEM, worker_factors=((planning.Worker(0, 0), 2.0),)), "no plan for these failures"),
])  # fmt: skip
def test_the_plan_of_another_problem_is_not_taken_and_the_miss_has_a_reason(tmp_path, other, reason):
    library = planning.PlanLibrary(tmp_path)
    assert library.miss(PROBLEM) == f"{tmp_path} holds no plans"
    library.put(solved(PROBLEM))
    assert library.get(other) is None
    assert reason in library.miss(other)
    assert "planner" in planning.PlanLibrary(tmp_path, "highs").miss(PROBLEM)
    library.put(planning.solve(other))
    assert library.get(other) == planning.heuristic(other)
    assert planning.PlanLibrary(tmp_path).get(other) == planning.heuristic(other)
    assert len(list(tmp_path.iterdir())) == 2


def test_plans_of_another_planner_or_version_are_not_taken(tmp_path, monkeypatch):
    planning.PlanLibrary(tmp_path).put(solved(PROBLEM))
    for planner in (
        "highs",
        planning.HeuristicPlanner(effort=7),
        planning.ExactPlanner("highs", time_limit=1.0),
        FailsOnTwo(),
    ):
        assert planning.PlanLibrary(tmp_path, planner).get(PROBLEM) is None
    assert planning.PlanLibrary(tmp_path, planning.HeuristicPlanner()).get(PROBLEM) is not None
    monkeypatch.setattr("lightning_recycle.planning.plan_library.__version__", "999")
    assert planning.PlanLibrary(tmp_path).get(PROBLEM) is None


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        plan = json.loads(gzip.decompress(file.read_bytes()))
        change(plan)
        file.write_bytes(gzip.compress(json.dumps(plan).encode()))

    return damage


def other_workers(plan: dict[str, Any]) -> None:
    plan["workers"] = planning.plan_to_json(planning.heuristic(replace(PROBLEM, failed=frozenset())))["workers"]


@pytest.mark.parametrize(("damage", "reason"), [
    (cut, "end-of-stream"),
    (lambda file: file.write_bytes(b""), "Expecting value"),
    (lambda file: file.write_bytes(b"\x80"), "gzipped"),
    (lambda file: file.write_bytes(gzip.compress(b"[]")), "schema None"),
    (lambda file: file.write_bytes(gzip.compress(b'{"plan": {}}')), "schema None"),
    (lambda file: file.write_bytes(file.read_bytes()[:-1] + b"\x01"), "length"),
    (edited(other_workers), "breaks"),
    (edited(lambda plan: plan["problem"].update(in_flight_limit=[9, 9, 9, 9])), "not the plan that its name says"),
])  # fmt: skip
def test_a_damaged_file_is_reported_once_and_replaced(tmp_path, damage, reason, caplog):
    planning.PlanLibrary(tmp_path).put(solved(PROBLEM))
    damage(only_file(tmp_path))
    library = planning.PlanLibrary(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert library.get(PROBLEM) is None
        assert library.get(PROBLEM) is None
    (record,) = caplog.records
    assert str(only_file(tmp_path)) in record.getMessage()
    assert "computed again" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert reason in record.getMessage()
    (computed,) = library.compute([PROBLEM], processes=1)
    assert computed.schedule == solved(PROBLEM).schedule == planning.PlanLibrary(tmp_path).get(PROBLEM)


def test_a_plan_serves_every_set_of_failed_workers_with_its_distribution(tmp_path):
    planning.PlanLibrary(tmp_path).put(solved(PROBLEM))
    library = planning.PlanLibrary(tmp_path)
    for pipeline in range(3):
        problem = replace(PROBLEM, failed=frozenset({planning.Worker(pipeline, 2)}))
        found = library.lookup(problem)
        assert (found.schedule.problem, found.status, found.schedule.period) == (problem, "optimal", 27.0)
        planning.validate(found.schedule)
    assert library.compute([problem])[0].schedule == library.get(problem)
    library.put(planning.solve(problem))
    assert len(list(tmp_path.iterdir())) == 1, "the same plan under other names"


def test_a_plan_for_similar_costs_is_timed_again_and_the_nearest_is_taken(tmp_path):
    library = planning.PlanLibrary(tmp_path)
    for weight in (1.2, 1.6):
        library.put(planning.solve(replace(PROBLEM, costs=planning.Costs.uniform(4, 1.0, 1.0, weight))))
    seconds = replace(PROBLEM, costs=planning.Costs.uniform(4, 0.010, 0.010, 0.0125))
    found = library.lookup(seconds)
    planning.validate(found.schedule)
    nearest = planning.heuristic(replace(PROBLEM, costs=planning.Costs.uniform(4, 1.0, 1.0, 1.2)))
    assert found.schedule == planning.retime(nearest, seconds.costs)
    assert found.schedule.problem == seconds
    assert found.lower_bound <= found.schedule.period < 0.4
    # What is asked for ahead is made for its own costs.
    (exact,) = library.compute([seconds])
    assert exact.schedule == planning.heuristic(seconds) == library.get(seconds)


def test_a_plan_for_other_limits_serves_if_no_worker_holds_more_than_it_may(tmp_path):
    library = planning.PlanLibrary(tmp_path)
    library.put(planning.solve(replace(PROBLEM, in_flight_limit=(6, 6, 6, 6))))
    roomy = replace(PROBLEM, in_flight_limit=(9, 8, 7, 6))
    in_bytes = replace(PROBLEM, memory=planning.Memory((70,) * 4, (5,) * 4, (10,) * 4, (8,) * 4, (1,) * 4))
    for problem in (roomy, PROBLEM, in_bytes):
        found = library.get(problem)
        assert (found.problem, found.period) == (problem, 27.0)
    assert library.get(replace(PROBLEM, in_flight_limit=(4, 4, 4, 4))) is None, "it holds more"
    assert not library.has(roomy)
    assert library.has(replace(PROBLEM, failed=frozenset({planning.Worker(0, 2)}), in_flight_limit=(6, 6, 6, 6)))


def test_of_the_plans_that_fit_the_shortest_is_taken(tmp_path):
    library = planning.PlanLibrary(tmp_path)
    made = {limit: planning.solve(replace(PROBLEM, in_flight_limit=(limit,) * 4)) for limit in (2, 4, 6)}
    for result in made.values():
        library.put(result)
    for asked, limit in ((None, 6), (7, 6), (5, 4), (3, 2)):
        found = library.get(replace(PROBLEM, in_flight_limit=None if asked is None else (asked,) * 4))
        assert found.period == made[limit].schedule.period
    assert made[6].schedule.period < made[4].schedule.period < made[2].schedule.period


def test_plans_are_computed_ahead_in_parallel_and_only_once(tmp_path):
    problems = [replace(PROBLEM, failed=frozenset({worker})) for worker in GRID.workers()[:3]]
    library = planning.PlanLibrary(tmp_path)
    library.put(planning.solve(problems[1]))
    stored = only_file(tmp_path)
    before = stored.stat().st_mtime_ns
    results = library.compute([*problems, problems[0]], processes=2, progress=True)
    assert [result.schedule.problem for result in results] == [*problems, problems[0]]
    for result in results:
        planning.validate(result.schedule)
        assert result.schedule == planning.heuristic(result.schedule.problem)
    assert len(list(tmp_path.iterdir())) == 3
    assert stored.stat().st_mtime_ns == before


def test_a_problem_without_a_plan_is_an_error_after_the_others_are_stored(tmp_path):
    impossible = replace(PROBLEM, failed=frozenset({planning.Worker(0, 0), planning.Worker(0, 1)}))
    library = planning.PlanLibrary(tmp_path, FailsOnTwo())
    with pytest.raises(PlanningError, match="two are too many"):
        library.compute([impossible, PROBLEM], processes=1)
    assert library.get(PROBLEM) == planning.heuristic(PROBLEM, 0)
    assert library.get(impossible) is None


def test_a_planner_that_cannot_travel_to_another_process_plans_here(tmp_path):
    class Local:
        def plan(self, problem: planning.Problem) -> planning.Schedule:
            return planning.heuristic(problem, 0)

    (result,) = planning.PlanLibrary(tmp_path, Local()).compute([PROBLEM])
    assert result.schedule == planning.heuristic(PROBLEM, 0)


def test_wrong_plans_and_paths_are_refused(tmp_path):
    schedule = solved(PROBLEM).schedule
    with pytest.raises(planning.InvalidScheduleError):
        planning.PlanLibrary(tmp_path).put(replace(schedule, period=1.0))
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanningError, match="cannot store a plan"):
        planning.PlanLibrary(tmp_path / "file").put(schedule)
    assert planning.PlanLibrary(tmp_path / "none").get(PROBLEM) is None
    with pytest.raises(ConfigurationError, match="planner='magic'"):
        planning.PlanLibrary(tmp_path, "magic")


def test_whole_numbers_of_bytes_find_their_plan(tmp_path):
    memory = planning.Memory((10,) * 4, (1,) * 4, (1,) * 4, (1,) * 4)
    problem = replace(PROBLEM, memory=memory)
    library = planning.PlanLibrary(tmp_path)
    library.put(planning.solve(problem))
    assert library.get(problem) is not None
