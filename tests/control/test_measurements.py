"""Layers of a run in which nobody is lost move by measured times alone: noise is not taken for unequal stages."""

import math
import random
from typing import Any

import pytest

from lightning_recycle.control.plans.assumptions import StageLevels
from lightning_recycle.control.plans.run_plans import RunPlans
from lightning_recycle.control.protocol.messages import Applied
from lightning_recycle.control.protocol.state import LayoutReady
from lightning_recycle.planning import Grid, Schedule, Worker
from lightning_recycle.planning.layouts import Candidate, LayoutPlan

GRID = Grid(2, 2, 4)
STEPS = 10
GAIN = 0.15


def seconds(rng: random.Random, noise: float, usual: float = 0.01) -> dict[str, float]:
    """What operations take in a step, in a stage where each takes ``usual`` seconds."""
    return {kind: usual * math.exp(rng.gauss(0.0, noise)) for kind in ("F", "BW")}


@pytest.mark.parametrize("noise", [0.02, 0.2, 1.0])
def test_equal_stages_differ_by_less_than_what_is_doubted(noise):
    rng, seemed = random.Random(1), []
    for _ in range(200):
        levels = StageLevels()
        for stage in range(2):
            for _ in range(STEPS * GRID.pipelines):
                levels.observe(stage, seconds(rng, noise))
        first, second = (sum(levels.of(stage).values()) for stage in range(2))
        seemed.append(abs(math.log(first / second)))
        assert seemed[-1] < levels.doubt(2)
    assert noise < 0.2 or max(seemed) > 0.05, "without the doubt layers would move"


def test_unequal_stages_are_told_apart():
    rng, levels = random.Random(1), StageLevels()
    for stage in range(2):
        for _ in range(STEPS * GRID.pipelines):
            levels.observe(stage, seconds(rng, 0.05, 0.01 * (1 + stage)))
    assert levels.of(1)["F"] / levels.of(0)["F"] == pytest.approx(2.0, rel=0.1)
    assert levels.doubt(2) < 0.1


def test_a_stage_that_has_not_been_measured_is_doubted():
    levels = StageLevels()
    for _ in range(STEPS):
        levels.observe(0, {"F": 1.0, "B": 1.0, "W": 1.0})
        levels.observe(1, {"F": 1.0})  # its backwards are elsewhere
    assert levels.doubt(1) == 0.0
    assert levels.doubt(2) == math.inf
    levels.forget()
    assert levels.doubt(1) == math.inf
    assert levels.of(0) == {}


@pytest.fixture
def plans(open_planner) -> RunPlans:
    planner = open_planner(GRID)
    planner.prepare()
    return RunPlans(GRID, planner, None, lambda profile: None, lambda: None, "auto")


class FoundLayouts:
    """What looks for layouts and has found one each time it was asked."""

    def __init__(self, plans: RunPlans, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        self.plans = plans
        plans.layouts.cuts = 0, 3, 6
        monkeypatch.setattr(plans.layouts, "_ask", self._ask)
        monkeypatch.setattr(plans._background, "take", self._take)
        monkeypatch.setattr(plans.layouts, "_objection", lambda cuts: "")
        self._found: list[Any] = []

    def _ask(self, schedule: Schedule) -> None:
        self.asked += 1
        reroute = Candidate("reroute", self.plans.layouts.cuts, schedule.problem, 1.0)
        moved = Candidate("layers", (0, 4, 6), schedule.problem, 1.0 - GAIN, stall=0.5)
        self._found = [LayoutPlan(reroute, moved, 1e9)]

    def _take(self) -> list[Any]:
        taken, self._found = self._found, []
        return taken


def run(plans: RunPlans, noise: float, steps: int, rng: random.Random) -> list[LayoutReady]:
    """The layouts that are wanted in so many steps."""
    wanted = []
    for step in range(steps):
        for worker in plans.schedules[-1].live_workers:
            measured = seconds(rng, noise)
            plans.applied(
                worker, Applied(GRID.rank(worker), step, measured, measured), is_stage_leader=worker.pipeline == 0
            )
        plans.stepped(0.1)
        wanted += [found for found in plans.better() if isinstance(found, LayoutReady)]
    return wanted


def test_layers_stay_as_long_as_noise_explains_the_gain(plans, monkeypatch):
    plans.plan_generation(frozenset(), (), 0)
    found, rng = FoundLayouts(plans, monkeypatch), random.Random(1)
    assert run(plans, 0.5, 2 * STEPS, rng) == []
    assert found.asked == 2
    (note, *_) = [details for kind, details in plans.take_notes() if kind == "layout"]
    assert "no worker is lost, and the times of the stages are known to" in note["why"][-1]
    (wanted,) = run(plans, 0.01, 20 * STEPS, rng)
    assert wanted.cuts == (0, 4, 6)


def test_layers_move_at_once_where_they_are_known_or_somebody_is_lost(plans, monkeypatch):
    plans.plan_generation(frozenset(), (), 0)
    FoundLayouts(plans, monkeypatch)
    rng = random.Random(1)
    assert len(run(plans, 0.02, STEPS, rng)) == 1
    plans.plan_generation(frozenset({Worker(1, 0)}), (), STEPS)
    assert len(run(plans, 0.5, 1, rng)) == 1
