"""plan.json and profile.json: what is written is what is read, and nothing wrong is read."""

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lightning_recycle import files as files_module
from lightning_recycle import planning
from lightning_recycle.errors import ConfigurationError, PlanningError
from lightning_recycle.planning.schedule import SolverUse

PROBLEM = planning.Problem(planning.Grid(3, 4, 6), planning.Costs.uniform(4), frozenset({planning.Worker(1, 2)}))
solved = functools.cache(planning.solve)


def test_a_plan_comes_back_as_it_was(tmp_path):
    path = tmp_path / "new" / "plan.json"
    result = solved(PROBLEM)
    planning.save_plan(path, result)
    loaded = planning.load_plan(path)
    assert loaded.schedule == result.schedule
    assert (loaded.backend, loaded.status, loaded.lower_bound) == ("heuristic", "optimal", 27.0)
    assert [file.name for file in path.parent.iterdir()] == ["plan.json"]
    planning.save_plan(path, planning.heuristic(PROBLEM))
    assert planning.load_plan(path).schedule == result.schedule


def test_who_found_a_plan_and_what_the_solver_did_come_back(tmp_path):
    path = tmp_path / "plan.json"
    kept = planning.solve(PROBLEM, "highs")
    planning.save_plan(path, kept)
    loaded = planning.load_plan(path)
    assert (loaded.backend, loaded.found_by, loaded.solver) == ("highs", "heuristic", kept.solver)
    assert (loaded.solver.calls, loaded.solver.reason) == (0, "the plan meets the lower bound")
    planning.save_plan(path, replace(kept, found_by="highs", solver=SolverUse(3, 1.5)))
    loaded = planning.load_plan(path)
    assert (loaded.found_by, loaded.solver) == ("highs", SolverUse(3, 1.5))


def changed(**values: object) -> Callable[[dict[str, Any]], None]:
    return lambda data: data.update(values)


def column(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["workers"][0]["ops"].update({name: value})


def problem(**values: object) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["problem"].update(values)


def overlap(data: dict[str, Any]) -> None:
    data["workers"][0]["ops"]["start"][1] = data["workers"][0]["ops"]["start"][0]


@pytest.mark.parametrize(("change", "message"), [
    (changed(schema=2), "has schema 2, this version reads 1.*update"),
    (changed(schema=[1]), "has schema"),
    (overlap, r"breaks \d+ rule\(s\), the first: .*Compute it again"),
    (changed(lower_bound="low"), "lower_bound"),
    (changed(lower_bound=28.0), "below its lower_bound 28"),
    (changed(lower_bound=float("nan")), "below its lower_bound"),
    (changed(backend=None), "backend"),
    (changed(found_by=7), "found_by"),
    (changed(solver={"calls": "some"}), "calls"),
    (changed(solver=[]), "solver"),
    (changed(workers=[]), "rule"),
    (changed(workers=None), "damaged"),
    (problem(grid={"pipelines": 3}), "damaged"),
    (problem(grid={"pipelines": 3, "stages": 0, "microbatches": 6}), "stages=0"),
    (problem(failed=[{"pipeline": 9, "stage": 9}]), "outside the grid"),
    (column("op", "X"), "damaged"),
    (column("start", None), "damaged"),
    (lambda data: data.pop("period"), "damaged"),
    (lambda data: data.pop("found_by"), "found_by"),
    (lambda data: data.pop("solver"), "solver"),
])  # fmt: skip
def test_a_wrong_plan_is_refused_in_one_line(tmp_path, change, message):
    path = tmp_path / "plan.json"
    planning.save_plan(path, solved(PROBLEM))
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(PlanningError, match=message) as caught:
        planning.load_plan(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("content", "message"), [
    (None, "No such file"),
    (b"", "not JSON"),
    (b"{", "not JSON"),
    (b"\xff\xfe", "not JSON"),
    (b"[]", "schema None"),
    (b"{}", "schema None"),
    (b"[" * 100_000, "not JSON"),
])  # fmt: skip
def test_what_is_no_plan_is_refused(tmp_path, content, message):
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PlanningError, match=message):
        planning.load_plan(path)


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files_module.os, "fsync", fail)
    with pytest.raises(PlanningError, match="No space left"):
        planning.save_plan(path, solved(PROBLEM))
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


PROFILE = planning.Profile(
    stages=(
        planning.StageProfile(0.010, 0.011, 0.009, 0.002, 0.001, activation_bytes=1000, output_bytes=500),
        planning.StageProfile(0.012, 0.013, 0.010, 0.003, 0.002, activation_bytes=400, output_bytes=9000),
    ),
    latency=0.001,
    bandwidth=1e6,
    steps=20,
)


def test_a_profile_comes_back_and_becomes_costs(tmp_path):
    path = tmp_path / "profile.json"
    planning.save_profile(path, PROFILE)
    assert planning.load_profile(path) == PROFILE
    # Only messages between stages count: the last stage sends nothing on.
    assert PROFILE.costs() == planning.Costs(
        (0.010, 0.012), (0.011, 0.013), (0.009, 0.010), (0.002, 0.003), (0.001, 0.002), 0.001 + 500 / 1e6
    )
    assert planning.Profile(PROFILE.stages[:1], latency=0.001).costs().communication == 0.0


def test_memory_of_a_profile():
    # What W needs is not known: as much as is held before B.
    assert PROFILE.memory(4500) == planning.Memory((4500,) * 2, (0,) * 2, (1000, 400), (1000, 400))
    known = replace(PROFILE.stages[1], waiting_bytes=0)
    assert planning.Profile((PROFILE.stages[0], known)).memory(4500).after_backward == (1000, 0)
    with pytest.raises(PlanningError, match=r"worker of stage 0 has 999 bytes.*1,000 more with one micro-batch"):
        planning.Problem(planning.Grid(2, 2, 2), PROFILE.costs(), memory=PROFILE.memory(999))


@pytest.mark.parametrize(("change", "message"), [
    (changed(schema=2), "schema 2.*reads 1"),
    (changed(stages=[]), "at least one stage"),
    (changed(stages=[{"forward": 1.0}]), "damaged"),
    (changed(stages=[{"forward": -1.0, "backward_input": 1.0, "backward_weight": 1.0}]), r"forward=-1\.0"),
    (changed(stages=3), "damaged"),
    (changed(latency=None), "damaged"),
    (changed(steps="many"), "steps"),
    (lambda data: data.pop("stages"), "damaged"),
])  # fmt: skip
def test_a_wrong_profile_is_refused(tmp_path, change, message):
    path = tmp_path / "profile.json"
    planning.save_profile(path, PROFILE)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigurationError, match=message):
        planning.load_profile(path)


def test_a_profile_that_cannot_be_read_or_written(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot read the profile"):
        planning.load_profile(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigurationError, match="not JSON"):
        planning.load_profile(tmp_path / "bad.json")
    with pytest.raises(ConfigurationError, match="cannot write the profile"):
        planning.save_profile(tmp_path / "bad.json" / "profile.json", PROFILE)
