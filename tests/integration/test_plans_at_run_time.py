"""Profiles, plan libraries and planners as the strategy uses them."""

import gzip
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from support.models import GLOBAL_BATCH, Regression, dataset
from support.sampling import sampled
from support.training import committed_steps, exact_fit, failures, fit

from lightning_recycle import ConfigurationError, planning
from lightning_recycle.callbacks import Fault
from lightning_recycle.control.plans import plan_provider
from lightning_recycle.planning.costs import load_profile
from lightning_recycle.planning.plan_library import read_plan
from lightning_recycle.planning.routing import CompactSchedule, Lane, compact, lane_problem

pytestmark = pytest.mark.long


def test_the_first_steps_measure_a_profile_that_plans_later_runs(tmp_path):
    exact_fit(Regression().double(), 2, 2, default_root_dir=tmp_path, strategy={"profile": "auto"})
    path = tmp_path / "profile.json"
    profile = load_profile(path)
    assert len(profile.stages) == 2
    assert all(
        s.forward > 0 and s.backward_input > 0 and s.backward_weight > 0 and s.optimizer > 0 for s in profile.stages
    )
    # Stage 0 ends in a layer of width 16: 2 samples of float64.
    assert profile.stages[0].output_bytes == 2 * 16 * 8
    assert profile.stages[0].activation_bytes >= 2 * (8 + 16) * 8  # the inputs of its two linear layers
    # Measured with the memory: each W needs at least the input of its layer.
    assert all(s.waiting_bytes is not None and s.waiting_bytes > 0 for s in profile.stages)
    assert 0 < profile.latency < 0.1
    assert profile.bandwidth > 1e6
    run = fit(Regression().double(), 2, 2, strategy={"profile": path})
    assert run.strategy.schedules[0].problem.costs.communication > 0
    with pytest.raises(ConfigurationError, match=r"2 stages, the grid 3: .*pipeline_parallel_size=2"):
        fit(Regression().double(), 2, 3, strategy={"profile": path})


def test_plans_are_taken_from_the_library_and_added_to_it(tmp_path):
    library = tmp_path / "plans"
    fit(Regression().double(), 2, 2, data=dataset(24 * 60), max_steps=60, strategy={"plan_library": library})
    stored = sorted(library.glob("*.plan.gz"))
    plans = [read_plan(json.loads(gzip.decompress(path.read_bytes()))).schedule.problem for path in stored]
    assert {len(problem.failed) for problem in plans} == {0, 1}, "fault-free, one lost in either stage"
    assert {problem.memory is None for problem in plans} == {True, False}, "also those for the memory that was measured"
    times = [path.stat().st_mtime_ns for path in stored]
    run = exact_fit(Regression().double(), 2, 2, [Fault("kill", 1, 0, step=5)], strategy={"plan_library": library})
    assert failures(run) == [(1, 0)]
    assert [path.stat().st_mtime_ns for path in stored] == times


@pytest.mark.parametrize(
    ("option", "path", "reason"),
    [
        ("plan_library", "file", "file is a file, not a folder: give another path"),
        ("plan_library", "file/plans", "file is a file, not a folder: give another path"),
        ("plan_library", "none/plans", "there is no folder .*none: give another path, or make it"),
        ("profile", "none/profile.json", "there is no folder .*none: give"),
        ("plan_library", "/proc/plans", "written in /proc .No such file or directory.: give"),
        ("profile", "", "give a file, not a folder"),
        ("profile", "file/profile.json", "file is a file, not a folder: give another path"),
    ],
)
def test_a_folder_that_cannot_be_written_is_refused_before_the_start(
    option: str, path: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    given = tmp_path / path
    with pytest.raises(ConfigurationError, match=rf"^PlanningOptions\({option}='{given}'\): .*{reason}"):
        fit(Regression().double(), 2, 2, strategy={option: given})


def test_a_run_too_short_for_a_profile_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(Regression().double(), 2, 2, max_steps=3, strategy={"profile": tmp_path / "profile.json"})
    assert "profile.json: the run ended before its ninth step" in caplog.text


def sources(run: L.Trainer) -> list[str]:
    """Where the plan of each generation is from."""
    return [event.details["plan"] for event in run.strategy.history if event.kind == "resumed"]


PAIRS = list(combinations(planning.Grid(3, 2, 4).workers(), 2))


@pytest.fixture(scope="module")
def offline(tmp_path_factory) -> dict[str, Any]:
    """The strategy's options for a profile, and for a library that ``recycle-plan`` has filled for two failures."""
    folder = tmp_path_factory.mktemp("offline")
    forward, backward, weight, reduce, step = 0.002, 0.002, 0.001, 0.0005, 0.001
    first = planning.StageProfile(forward, backward, weight, reduce, step, activation_bytes=1000, output_bytes=256)
    stages = (first, replace(first, forward=0.001, backward_weight=0.002))
    planning.save_profile(folder / "profile.json", planning.Profile(stages, latency=1e-4, bandwidth=1e9, steps=20))
    grid = ["grid.pipelines=3", "grid.stages=2", "grid.microbatches=4"]
    costs = ["costs=profile", "costs.path=profile.json"]
    command = [sys.executable, "-m", "lightning_recycle.commands.plan", *grid, *costs]
    subprocess.run(
        [*command, "library=plans", "failures=2", "output=null"], cwd=folder, check=True, capture_output=True
    )
    assert len(list((folder / "plans").iterdir())) == 2 * (1 + 2 + 3), "before and after memory is measured"
    return {"profile": folder / "profile.json", "plan_library": folder / "plans"}


@pytest.mark.parametrize(("one", "other"), sampled(PAIRS, 2), ids=str)
def test_no_plan_is_made_while_any_two_workers_are_lost(offline, one, other):
    faults = [Fault("kill", one.pipeline, one.stage, step=1), Fault("kill", other.pipeline, other.stage, step=3)]
    before = {path: path.stat().st_mtime_ns for path in offline["plan_library"].iterdir()}
    run = exact_fit(Regression().double(), 3, 2, faults, strategy=offline)
    assert failures(run) == [(worker.pipeline, worker.stage) for worker in (one, other)]
    assert sources(run) == ["library"] * 3
    after = {path: path.stat().st_mtime_ns for path in offline["plan_library"].iterdir()}
    assert after.items() >= before.items(), "what was there is used; plans for a third failure may have been added"


class OneAtATime(planning.HeuristicPlanner):
    """The planner at once, so bad that every other one finds better plans."""

    def plan(self, problem: planning.Problem) -> planning.Schedule:
        alone = planning.heuristic(replace(problem, in_flight_limit=(1,) * problem.grid.stages), effort=0)
        return replace(alone, problem=problem)


@dataclass(frozen=True)
class Patient:
    """A user's planner, which in another process than ``home`` plans from the moment that ``gate`` exists."""

    gate: Path
    home: int

    def plan(self, problem: planning.Problem) -> planning.Schedule:
        while os.getpid() != self.home and not self.gate.exists():
            time.sleep(0.01)
        return planning.heuristic(problem)


class AwaitBetter(L.Callback):
    """Waits before a step after the failure until the change of plan is announced, however slow the machine is."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        client = trainer.strategy.session.client
        if trainer.global_step == 8:
            self.gate.touch()
        deadline = time.monotonic() + 60.0
        while (
            trainer.global_step == 8
            and not (client.member.is_paused or client.member.plans)
            and time.monotonic() < deadline
        ):
            time.sleep(0.002)


@pytest.mark.parametrize("fault", sampled([Fault("kill", 1, 0, step=2), Fault("kill", 0, 1, step=2)], 1), ids=str)
def test_after_a_failure_a_users_planner_improves_the_plan_that_was_made_in_need(fault, offline, tmp_path, monkeypatch):
    """The weights are exact across the change, and nobody regroups for it. A profile makes the gain always the same."""
    monkeypatch.setattr(plan_provider, "HeuristicPlanner", OneAtATime)
    gate = tmp_path / "gate"
    data = dataset(GLOBAL_BATCH * 12)
    strategy = {"planner": Patient(gate, os.getpid()), "profile": offline["profile"], "split_backward": True}
    callbacks = [AwaitBetter(gate)]
    run = exact_fit(Regression().double(), 2, 2, [fault], data, max_steps=12, callbacks=callbacks, strategy=strategy)
    assert committed_steps(run) == list(range(12))
    (change,) = [event for event in run.strategy.history if event.kind == "replanned"]
    assert change.details["found_by"] == "Patient"
    assert change.details["gain"] > 0.04
    assert change.generation == 1
    first, second, third = run.strategy.schedules
    assert second.failed == third.failed == {planning.Worker(fault.pipeline, fault.stage)}
    peaks = [max(map(schedule.peak_in_flight, schedule.live_workers)) for schedule in (first, second, third)]
    assert peaks[1] == 1 < min(peaks[0], peaks[2]), "before the start the chosen planner is waited for"
    assert len(sources(run)) == 2


@pytest.mark.parametrize(("options", "staggered"), [
    ({}, True),
    ({"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}, True),
    ({"gradient_clip_val": 0.5}, True),
    ({"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}, False),
], ids=["plain", "clipped by value", "clipped by norm", "clipped by norm, accumulated"])  # fmt: skip
def test_the_plan_is_staggered_only_if_the_steps_are(options, staggered):
    run = fit(Regression().double(), 2, 2, max_steps=1, **options)
    assert run.strategy.schedules[0].problem.technique.staggered is staggered


class ByLanes(planning.HeuristicPlanner):
    """Plans as for thousands of workers, however few there are."""

    def plan(self, problem: planning.Problem) -> planning.Schedule:
        return compact(problem, Lane.of(planning.heuristic(lane_problem(problem))))


CODED_KILLS = [
    [Fault("kill", 0, 0, step=3)],
    [Fault("kill", 0, 1, step=3)],
    [Fault("kill", 2, 1, step=3)],
    [Fault("kill", 1, 0, step=2), Fault("kill", 2, 1, step=5, at="reduce")],  # the second one is in no lane
    [Fault("kill", 2, 0, step=2), Fault("kill", 0, 0, step=5)],
]


@pytest.mark.parametrize(
    "faults",
    sampled(CODED_KILLS, 1),
    ids=lambda faults: ", ".join(f"{fault.pipeline}-{fault.stage}" for fault in faults),
)
def test_coded_plans_are_run_and_lose_nothing(faults):
    """Lanes of live workers, and workers in no lane, which only reduce and step."""
    run = exact_fit(Regression().double(), 3, 2, faults, strategy={"planner": ByLanes()})
    schedules = run.strategy.schedules
    assert all(isinstance(schedule, CompactSchedule) for schedule in schedules)
    assert {len(schedule.failed) for schedule in schedules} == set(range(len(faults) + 1))
    assert {len(schedule.idle_workers()) for schedule in schedules if len(schedule.failed) == 1} == {1}
