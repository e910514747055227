"""The plan library: the right plan at once, or none; damaged and foreign files are reported and replaced."""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from lightning_recycle import planning as p
from lightning_recycle.errors import ConfigurationError, PlanningError
from lightning_recycle.planning.library import _digest

GRID = p.Grid(3, 4, 6)
PROBLEM = p.Problem(GRID, p.Costs.uniform(4), frozenset({p.Worker(1, 2)}))


@dataclass(frozen=True)
class FailsOnTwo:
    """A planner of the user's own, with an opinion."""

    def plan(self, problem: p.Problem) -> p.Schedule:
        if len(problem.failed) == 2:
            raise PlanningError("two are too many")
        return p.heuristic(problem, 0)


def single_failures() -> list[p.Problem]:
    return [replace(PROBLEM, failed=frozenset({worker})) for worker in GRID.workers()[:3]]


def only_file(path: Path) -> Path:
    (file,) = path.iterdir()
    return file


def test_a_stored_plan_is_there_in_milliseconds(tmp_path: Path) -> None:
    result = p.solve(PROBLEM)
    p.PlanLibrary(tmp_path / "plans").put(result)
    library = p.PlanLibrary(tmp_path / "plans")
    began = time.perf_counter()
    assert library.get(PROBLEM) == result.schedule
    first = time.perf_counter() - began
    began = time.perf_counter()
    found = library.lookup(PROBLEM)
    again = time.perf_counter() - began
    assert found is not None
    assert (found.status, found.backend, found.lower_bound) == ("optimal", "heuristic", 27.0)
    assert first < 0.1  # 5 ms on an idle machine
    assert again < 0.01


@pytest.mark.parametrize(
    "other",
    [
        replace(PROBLEM, grid=p.Grid(4, 4, 6)),
        replace(PROBLEM, costs=p.Costs.uniform(4, 1.0, 1.0, 1.1)),
        replace(PROBLEM, failed=frozenset({p.Worker(0, 2)})),
        replace(PROBLEM, technique=p.Technique(staggered=False)),
        replace(PROBLEM, in_flight_limit=(9, 9, 9, 9)),
        replace(PROBLEM, worker_factors=((p.Worker(0, 0), 2.0),)),
    ],
)
def test_the_plan_of_another_problem_is_not_taken(tmp_path: Path, other: p.Problem) -> None:
    library = p.PlanLibrary(tmp_path)
    library.put(p.solve(PROBLEM))
    assert library.get(other) is None
    library.put(p.solve(other))
    assert library.get(other) == p.heuristic(other)
    assert p.PlanLibrary(tmp_path).get(other) == p.heuristic(other)
    assert len(list(tmp_path.iterdir())) == 2


def test_plans_of_another_planner_or_version_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    p.PlanLibrary(tmp_path).put(p.solve(PROBLEM))
    for planner in ("highs", p.HeuristicPlanner(effort=7), p.ExactPlanner("highs", time_limit=1.0), FailsOnTwo()):
        assert p.PlanLibrary(tmp_path, planner).get(PROBLEM) is None
    assert p.PlanLibrary(tmp_path, p.HeuristicPlanner()).get(PROBLEM) is not None
    monkeypatch.setattr("lightning_recycle.__version__", "999")
    assert p.PlanLibrary(tmp_path).get(PROBLEM) is None


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def edited(change: Callable[[dict[str, Any]], None], *, right_checksum: bool) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        entry = json.loads(file.read_text())
        change(entry)
        if right_checksum:
            entry["checksum"] = _digest(entry["plan"])
        file.write_text(json.dumps(entry))

    return damage


def shift(entry: dict[str, Any]) -> None:
    entry["plan"]["workers"][0]["ops"][1]["start"] -= 0.5


def other_problem(entry: dict[str, Any]) -> None:
    entry["plan"] = json.loads(json.dumps(p.solve(replace(PROBLEM, failed=frozenset())).schedule.to_plan()))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut, "Expecting|Unterminated|delimiter"),
        (lambda file: file.write_bytes(b""), "Expecting value"),
        (lambda file: file.write_bytes(b"\x80"), "decode"),
        (lambda file: file.write_text("[]"), "not an entry of a plan library"),
        (lambda file: file.write_text(json.dumps(p.solve(PROBLEM).schedule.to_plan())), "not an entry"),
        (edited(lambda entry: entry.pop("checksum"), right_checksum=False), "checksum"),
        (edited(shift, right_checksum=False), "checksum"),
        (edited(shift, right_checksum=True), "breaks"),
        (edited(other_problem, right_checksum=True), "breaks"),
        (edited(lambda entry: entry["question"].update(package="0"), right_checksum=True), "another problem"),
        (edited(lambda entry: entry["plan"].update(schema=2), right_checksum=True), "schema 2"),
    ],
)
def test_a_damaged_or_foreign_file_is_reported_once_and_replaced(
    tmp_path: Path, damage: Callable[[Path], object], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    p.PlanLibrary(tmp_path).put(p.solve(PROBLEM))
    damage(only_file(tmp_path))
    library = p.PlanLibrary(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert library.get(PROBLEM) is None
        assert library.get(PROBLEM) is None
    (record,) = caplog.records
    assert str(only_file(tmp_path)) in record.getMessage()
    assert "computed again" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert any(part in record.getMessage() for part in reason.split("|"))
    (computed,) = library.compute([PROBLEM], processes=1)
    assert computed.schedule == p.heuristic(PROBLEM) == p.PlanLibrary(tmp_path).get(PROBLEM)


def test_plans_are_computed_ahead_in_parallel_and_only_once(tmp_path: Path) -> None:
    problems = single_failures()
    library = p.PlanLibrary(tmp_path)
    library.put(p.solve(problems[1]))
    stored = only_file(tmp_path)
    before = stored.stat().st_mtime_ns
    results = library.compute([*problems, problems[0]], processes=2, progress=True)
    assert [result.schedule.problem for result in results] == [*problems, problems[0]]
    for result in results:
        p.validate(result.schedule)
        assert result.schedule == p.heuristic(result.schedule.problem)
    assert len(list(tmp_path.iterdir())) == 3
    assert stored.stat().st_mtime_ns == before


def test_a_problem_without_a_plan_is_an_error_after_the_others_are_stored(tmp_path: Path) -> None:
    impossible = replace(PROBLEM, failed=frozenset({p.Worker(0, 0), p.Worker(0, 1)}))
    library = p.PlanLibrary(tmp_path, FailsOnTwo())
    with pytest.raises(PlanningError, match="two are too many"):
        library.compute([impossible, PROBLEM], processes=1)
    assert library.get(PROBLEM) == p.heuristic(PROBLEM, 0)
    assert library.get(impossible) is None


def test_a_planner_that_cannot_travel_to_another_process_plans_here(tmp_path: Path) -> None:
    class Local:
        def plan(self, problem: p.Problem) -> p.Schedule:
            return p.heuristic(problem, 0)

    (result,) = p.PlanLibrary(tmp_path, Local()).compute([PROBLEM])
    assert result.schedule == p.heuristic(PROBLEM, 0)


def test_wrong_plans_and_paths_are_refused(tmp_path: Path) -> None:
    schedule = p.heuristic(PROBLEM)
    with pytest.raises(p.InvalidScheduleError):
        p.PlanLibrary(tmp_path).put(replace(schedule, period=1.0))
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanningError, match="cannot store a plan"):
        p.PlanLibrary(tmp_path / "file").put(schedule)
    assert p.PlanLibrary(tmp_path / "none").get(PROBLEM) is None
    with pytest.raises(ConfigurationError, match="unknown planner 'magic'"):
        p.PlanLibrary(tmp_path, "magic")
