"""``split_backward="auto"``: fused until splitting was tried, then what is better by the trial, whoever has failed."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.planning_in_background import is_idle
from support.waiting import wait_for

from lightning_recycle.control.plans.plan_provider import PlanProvider
from lightning_recycle.control.plans.run_plans import RunPlans
from lightning_recycle.control.protocol.messages import Applied, Measured
from lightning_recycle.planning import Grid, Schedule, Worker
from lightning_recycle.planning.child_process import PlanningProcess
from lightning_recycle.planning.costs import Footprint
from lightning_recycle.planning.grid import OpKind
from lightning_recycle.planning.split_backward import SplitTrial

GRID = Grid(3, 4, 6)
ALL: frozenset[Worker] = frozenset()
DEAD = frozenset({Worker(1, 2)})
FUSED = {stage: {"F": 0.02, "BW": 0.04, "REDUCE": 0.0, "STEP": 0.0} for stage in range(4)}
CHEAP = SplitTrial((0.02, 0.04), (0.02, 0.021, 0.021), 0.0, 0.0, "a", 2.0)
"""Splitting costs 5 % of BW, and nobody computes: operations sleep."""
CROWDED = replace(CHEAP, busy_fused=0.06, busy_split=0.063)
"""12 workers that compute share 2 cores: no slot is idle."""
DEAR = replace(CHEAP, split=(0.02, 0.04, 0.04))


class Run:
    """A run without workers."""

    def __init__(self, planner: PlanProvider) -> None:
        self.planner = planner
        planner.prepare()
        self.plans = RunPlans(GRID, planner, None, lambda profile: None, lambda: None)
        self.begin(ALL)

    def begin(self, failed: frozenset[Worker]) -> Schedule:
        return self.plans.plan_generation(failed, (), 0)

    def steps(self, count: int = 3) -> None:
        for _ in range(count):
            for stage, seconds in FUSED.items():
                self.plans.applied(Worker(0, stage), Applied(stage, 0, seconds, {}), is_stage_leader=True)
            self.plans.stepped(1.0)
        self.settle()

    def tried(self, trial: SplitTrial) -> None:
        for worker in GRID.workers():
            self.plans.take(worker, Measured(GRID.rank(worker), trial=trial))
        self.settle()

    def settle(self) -> None:
        assert wait_for(lambda: is_idle(self.planner.background), 120)


@pytest.fixture
def open_run(open_planner, monkeypatch) -> Callable[..., Run]:
    monkeypatch.setattr(PlanningProcess, "ask", lambda _, question, *__, **___: question())
    return lambda *planner, **options: Run(open_planner(GRID, *planner, **{"split_backward": "auto", **options}))


def splits(schedule: Schedule) -> bool:
    operations = (each.op.kind for worker in schedule.live_workers for each in schedule.workers[worker])
    return any(kind is OpKind.BACKWARD_WEIGHT for kind in operations)


def test_nothing_is_split_before_it_was_tried(open_run):
    run = open_run()
    assert not splits(run.plans.schedules[-1])
    run.steps()
    assert not splits(run.begin(DEAD))
    assert run.plans.better() == []
    assert run.plans.take_notes() == []


def test_backwards_are_split_where_the_plan_saves_more_than_that_costs(open_run):
    run = open_run()
    run.steps()
    run.tried(CHEAP)
    (ready,) = run.plans.better()
    assert splits(ready.schedule)
    ((kind, facts),) = run.plans.take_notes()
    assert kind == "chosen"
    assert facts["split"] is True
    assert facts["cost"] == pytest.approx(0.002 / 0.06)
    assert ready.details["gain"] == pytest.approx(facts["wins"])
    assert facts["wins"] > 0.05
    assert ready.details["backward"] == facts
    run.plans.change(ready.schedule, 6)
    run.steps()
    assert run.plans.better() == [], "it is settled"


@pytest.mark.parametrize("trial", [CROWDED, DEAR])
def test_backwards_stay_fused_where_there_is_nothing_to_win(open_run, trial):
    run = open_run()
    run.steps()
    run.tried(trial)
    assert run.plans.better() == []
    ((kind, facts),) = run.plans.take_notes()
    assert kind == "chosen"
    assert facts["split"] is False
    assert facts["wins"] <= 0.0
    assert not splits(run.begin(DEAD)), "planned ahead alike"
    assert run.plans.origin()["plan"] == "ahead"
    assert run.plans.origin()["backward"]["split"] is False


def test_a_plan_for_a_failure_is_chosen_for_itself(open_run):
    """Fused backwards keep the cores busy for 28 slots, and a step takes 27: only a failure leaves some idle."""
    run = open_run()
    run.steps()
    run.tried(replace(CHEAP, busy_fused=0.01556, busy_split=0.01633))
    chosen = {failed: splits(run.begin(failed)) for failed in (ALL, DEAD)}
    assert chosen == {ALL: False, DEAD: True}
    assert run.plans.origin()["plan"] == "ahead"


def test_a_plan_in_need_is_chosen_too(open_run):
    run = open_run()
    run.steps(1)
    run.tried(CHEAP)
    three = frozenset({Worker(0, 0), Worker(1, 1), Worker(2, 2)})
    assert splits(run.begin(three))
    assert run.plans.origin()["plan"] == "made"
    assert run.plans.origin()["backward"]["split"] is True


def test_one_worker_of_each_stage_that_works_is_waited_for(open_run):
    run = open_run()
    run.steps()
    for worker in GRID.workers():
        assert run.planner.assumptions.splitting is None
        run.plans.take(worker, Measured(GRID.rank(worker), trial=CHEAP))
    assert run.planner.assumptions.splitting is not None


def test_what_operations_take_is_what_the_fused_plan_runs(open_run):
    """Times of B and W that are left of an earlier plan are not taken for those of BW."""
    run = open_run()
    stale = {"F": 0.02, "B": 1.0, "W": 1.0, "BW": 0.04}
    for stage in range(4):
        run.plans.applied(Worker(0, stage), Applied(stage, 0, stale, {}), is_stage_leader=True)
    run.plans.stepped(1.0)
    assert run.plans.timed().period == pytest.approx(27 * 0.02), "1F1B of the running example"
    useful, _ = run.plans.computing_seconds or (0.0, 0.0)
    assert useful == pytest.approx(72 * 0.06)
    run.settle()


def test_memory_for_what_waits_between_b_and_w_is_no_reason_to_fail(open_run):
    run = open_run(memory=1_000)
    footprint = Footprint("a", 10_000, 0, 100, 0, 400, 1_000, 400)
    run.planner.assumptions.measured(dict.fromkeys(GRID.workers(), footprint))
    run.steps()
    run.tried(CHEAP)
    schedule = run.begin(DEAD)
    assert max(schedule.peak_memory(worker) for worker in schedule.live_workers) <= 1_000


def test_with_one_stage_nothing_is_split(open_planner):
    planner = open_planner(Grid(2, 1, 4), split_backward="auto")
    assert not splits(planner.plan(ALL, {}))


def test_without_the_choice_nothing_changes(open_run):
    run = open_run(split_backward=True)
    assert splits(run.plans.schedules[-1])
    run.steps()
    run.tried(CROWDED)
    assert run.plans.take_notes() == []
    assert splits(run.begin(DEAD))
    assert run.plans.origin() == {"plan": "ahead"}
