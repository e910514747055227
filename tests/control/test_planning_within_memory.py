"""Plans of a run keep to the memory that its workers have measured, and use it."""

import logging
from dataclasses import replace

import pytest
from support.planning_in_background import is_idle
from support.waiting import wait_for

from lightning_recycle import planning
from lightning_recycle.commands.plan import problems_ahead
from lightning_recycle.control.plans import plan_provider
from lightning_recycle.control.plans.plan_provider import PlanAnswer, PlanProvider
from lightning_recycle.control.plans.run_plans import RunPlans
from lightning_recycle.control.protocol.messages import Measured
from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.costs import Footprint
from lightning_recycle.planning.failure_distribution import usual_limit
from lightning_recycle.planning.schedule import proven

GRID = planning.Grid(2, 2, 8)
ALL: frozenset[planning.Worker] = frozenset()
FAILED = frozenset({planning.Worker(1, 0)})


def footprint(**changes: int) -> Footprint:
    sizes = {
        "capacity": 10_000, "overhead": 0, "fixed": 100, "messages": 0, "after_forward": 100, "after_backward": 60,
        "checkpoint": 100,
    }  # fmt: skip
    return Footprint("a", **{**sizes, **changes})


def everywhere(**changes: int) -> dict[planning.Worker, Footprint]:
    return {worker: footprint(**changes) for worker in GRID.workers()}


@pytest.fixture
def planner(open_planner) -> PlanProvider:
    planner = open_planner(GRID, memory=500)
    planner.prepare()
    return planner


@pytest.fixture
def plans(planner) -> RunPlans:
    plans = RunPlans(GRID, planner, None, lambda profile: None, lambda: None)
    plans.plan_generation(ALL, (), 0)
    return plans


def peaks(planner: PlanProvider, failed: frozenset[planning.Worker]) -> tuple[int, int]:
    schedule = planner.plan(failed, {})
    memory = [schedule.peak_memory(worker) for worker in schedule.live_workers] if schedule.problem.memory else [0]
    return max(map(schedule.peak_in_flight, schedule.live_workers)), int(max(memory))


def test_a_survivor_does_not_hold_all_micro_batches(planner):
    """It held 16 of 16 where nothing limited it."""
    assert peaks(planner, FAILED)[0] == 2, "nothing is measured: as in 1F1B"
    planner.assumptions.measured(everywhere())
    in_flight, held = peaks(planner, FAILED)
    assert held <= 500
    assert 2 <= in_flight <= 6


def test_a_plan_made_ahead_that_does_not_fit_any_more_is_not_used(planner):
    planner.assumptions.measured(everywhere())
    planner.plan_ahead(ALL, {})
    assert wait_for(lambda: is_idle(planner.background), 60)
    assert 300 < peaks(planner, FAILED)[1] <= 500
    assert planner.source == "ahead"
    planner.assumptions.measured(everywhere(fixed=300))
    assert peaks(planner, FAILED)[1] <= 500
    assert planner.source == "made"


def test_what_does_not_fit_is_said_once(planner, caplog):
    planner.assumptions.measured(everywhere(after_forward=450))
    with caplog.at_level(logging.WARNING):
        assert peaks(planner, FAILED)[0] == 1
        assert peaks(planner, ALL)[0] == 1
    (record,) = caplog.records
    assert "500 bytes, needs 100 without and 450 more with one micro-batch" in record.getMessage()


def three_steps(planner: PlanProvider, plans: RunPlans) -> None:
    """After which plans are made ahead."""
    for _ in range(3):
        plans.stepped(1.0)
    assert wait_for(lambda: is_idle(planner.background), 60)


def test_a_better_plan_for_the_memory_there_is_replaces_the_first_one(planner, plans):
    seconds = {stage: {"F": 1.0, "B": 1.0, "W": 1.0} for stage in range(2)}
    plans.measurements.operation_seconds = seconds
    for rank in range(4):
        plans.take(GRID.worker(rank), Measured(rank, footprint=footprint(after_forward=50, after_backward=50)))
    three_steps(planner, plans)
    (ready,) = plans.better()
    assert ready.roster == (0, 1, 2, 3)
    assert ready.details["gain"] >= 0.05
    assert ready.details["found_by"] == "heuristic"
    schedule = ready.schedule
    assert schedule.period < plans.schedules[-1].period
    assert max(schedule.peak_memory(worker) for worker in schedule.live_workers) <= 500
    plans.change(schedule, 5)
    three_steps(planner, plans)
    assert plans.better() == []


def test_a_plan_that_does_not_fit_is_replaced_by_a_longer_one(planner, plans):
    for rank in range(4):
        worker, held = GRID.worker(rank), footprint(after_forward=300, after_backward=300, checkpoint=300)
        plans.take(worker, Measured(rank, footprint=held))
    three_steps(planner, plans)
    (ready,) = plans.better()
    assert ready.details["gain"] < 0
    assert max(map(ready.schedule.peak_in_flight, ready.schedule.live_workers)) == 1


def test_a_plan_for_the_memory_there_is_that_is_longer_does_not_replace_the_first_one(planner, plans, monkeypatch):
    """It was kept as the plan for those who train now, although they had refused it."""
    plans.measurements.operation_seconds = {stage: {"F": 1.0, "B": 1.0, "W": 1.0} for stage in range(2)}
    first = plans.schedules[-1].period
    longer = planning.heuristic(planning.Problem(GRID, planning.Costs.uniform(2), in_flight_limit=(1, 1)))

    def long_answer(problem: planning.Problem, *_: object) -> PlanAnswer:
        return proven(longer.under(problem), "heuristic"), None

    monkeypatch.setattr(plan_provider, "make_plan", long_answer)
    for rank in range(4):
        plans.take(GRID.worker(rank), Measured(rank, footprint=footprint(after_forward=50, after_backward=50)))
    three_steps(planner, plans)
    assert plans.better() == []
    assert planner.plan(ALL, plans.operation_seconds).period == first < longer.period
    assert planner.source == "ahead"


def test_a_plan_that_cannot_be_made_is_named_by_what_it_was_for(planner, plans, monkeypatch, caplog):
    def fail(*_: object) -> PlanAnswer:
        raise PlanningError("no room")

    monkeypatch.setattr(plan_provider, "make_plan", fail)
    for rank in range(4):
        plans.take(GRID.worker(rank), Measured(rank, footprint=footprint()))
    three_steps(planner, plans)
    assert sorted(record.getMessage() for record in caplog.records) == [
        f"{planning.HeuristicPlanner()!r} found no plan for the failure of (0, 0): no room",
        f"{planning.HeuristicPlanner()!r} found no plan for the failure of (0, 1): no room",
        f"{planning.HeuristicPlanner()!r} found no plan for what was measured: no room",
    ]


@pytest.mark.parametrize("recompute", [True, False])
def test_forwards_are_computed_again_instead_of_one_at_a_time(open_planner, recompute):
    planner = open_planner(GRID, memory=500, activation_checkpointing="auto" if recompute else "never")
    planner.prepare()
    planner.assumptions.measured(everywhere(after_forward=300, after_backward=300, checkpoint=20))
    for failed in (ALL, FAILED):
        schedule = planner.plan(failed, {})
        assert any(schedule.recomputed(worker) for worker in schedule.live_workers) is recompute
        assert (max(map(schedule.peak_in_flight, schedule.live_workers)) > 1) is recompute
        assert max(schedule.peak_memory(worker) for worker in schedule.live_workers) <= 500


@pytest.mark.parametrize(
    "grid",
    [
        planning.Grid(3, 4, 6),
        *(pytest.param(grid, marks=pytest.mark.long) for grid in (planning.Grid(3, 4, 12), planning.Grid(4, 4, 16))),
    ],
    ids=str,
)
def test_plans_made_offline_are_found_and_are_as_short_as_those_of_a_run_without_a_library(
    open_planner, grid, tmp_path
):
    """They kept to the number of micro-batches of 1F1B, 4 to 18 % longer; those made for bytes were never found."""
    stage = planning.StageProfile(0.01, 0.01, 0.01, activation_bytes=100, waiting_bytes=100)
    planning.save_profile(tmp_path / "profile.json", planning.Profile((stage,) * grid.stages))
    footprints = {worker: replace(footprint(capacity=100_000), place=str(worker)) for worker in grid.workers()}
    costs, lost = planning.Costs.uniform(4, 0.01, 0.01, 0.01), frozenset({planning.Worker(1, 2)})

    def run(library: planning.PlanLibrary | None) -> tuple[list[float], list[str]]:
        """Periods and sources of the plans at the start, and once memory is measured."""
        periods, sources = [], []
        for failed, measured in ((ALL, {}), (lost, footprints), (ALL, footprints)):
            planner = open_planner(grid, costs=costs, library=library)
            planner.assumptions.measured(measured)
            schedule = planner.plan(failed, {})
            assert planner._ready.find(schedule.problem).is_final, "it is not made again"
            periods.append(schedule.period)
            sources.append(planner.source)
        return periods, sources

    alone, _ = run(None)
    assert alone[1] < planning.heuristic(planning.Problem(grid, costs, lost, in_flight_limit=(4, 3, 2, 1))).period
    settings = {
        "grid": {"pipelines": grid.pipelines, "stages": grid.stages, "microbatches": grid.microbatches},
        "failures": [[1, 2]],
        "library_plans": 500,
        "technique": {"split_backward": True, "staggered": True},
        "costs": {"path": str(tmp_path / "profile.json")},
    }
    none = {"in_flight": None, "bytes": None}
    for number, memory in enumerate(({}, {"bytes": 90_000}, {"bytes": 1_200}, {"in_flight": 7}, {"in_flight": 12})):
        library = planning.PlanLibrary(tmp_path / str(number))
        for problem in problems_ahead({**settings, "memory": {**none, **memory}}):
            library.put(planning.solve(problem))
        periods, sources = run(library)
        assert sources == ["library"] * 3, memory
        assert periods == pytest.approx(alone), memory


def test_plans_of_the_library_stay_if_they_fit_and_are_improved(open_planner, tmp_path):
    base = planning.Problem(GRID, planning.Costs.uniform(2))
    limited = [replace(base, failed=failed, in_flight_limit=usual_limit(GRID, failed)) for failed in (ALL, FAILED)]
    planning.PlanLibrary(tmp_path, "heuristic").compute(limited)
    planner = open_planner(GRID, costs=base.costs, library=planning.PlanLibrary(tmp_path), memory=500)
    planner.assumptions.measured(everywhere())
    schedule = planner.plan(FAILED, {})
    assert planner.source == "library"
    assert schedule.period == planning.heuristic(limited[1]).period, "it fits, so nobody waits for a planner"
    planner.plan_ahead(FAILED, {}, schedule)
    assert wait_for(lambda: is_idle(planner.background), 60)
    (better,) = planner.background.take()
    assert better.schedule.period < schedule.period
    assert planner.plan(FAILED, {}) == better.schedule
    assert planner.source == "better"
    assert planning.PlanLibrary(tmp_path, "heuristic").get(better.schedule.problem) == better.schedule, (
        "for the next run"
    )
    planner.assumptions.measured(everywhere(after_forward=300, after_backward=300, checkpoint=300))
    assert peaks(planner, FAILED)[0] == 1
    assert planner.source == "made"
