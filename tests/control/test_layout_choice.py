"""The layout after a failure. Where layers cannot move, re-routing goes on, and one line of the record says why."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from support.waiting import wait_for

from lightning_recycle.control.plans.run_plans import Rebalance, RunPlans
from lightning_recycle.control.protocol.messages import Applied, LayerFacts, Measured
from lightning_recycle.control.protocol.state import LayoutReady
from lightning_recycle.planning import Grid, Worker
from lightning_recycle.planning.child_process import PlanningProcess, Question, UnexpectedError
from lightning_recycle.planning.costs import Footprint
from lightning_recycle.planning.layouts import plan_layout
from lightning_recycle.planning.validation import validate

GRID = Grid(3, 2, 6)
DEAD = frozenset({Worker(1, 0)})
OpenPlans = Callable[[Rebalance, int | str], RunPlans]


@pytest.fixture
def open_plans(open_planner, monkeypatch) -> OpenPlans:
    """Begins a run that moves layers, with a limit of memory."""
    monkeypatch.setattr(PlanningProcess, "ask", lambda _, question, *__, **___: question())

    def begin(rebalance: Rebalance, memory: int | str) -> RunPlans:
        planner = open_planner(GRID, split_backward=False, memory=memory)
        planner.prepare()
        found = RunPlans(GRID, planner, None, lambda profile: None, lambda: None, rebalance)
        found.plan_generation(frozenset(), (), 0)
        return found

    return begin


@pytest.mark.parametrize(("seconds", "state", "fixed", "reason"), [
    ((1.0,) * 2, 0, "", "2 layers on as many stages: there is one cut only"),
    ((1.0, 1e-4, 1e-4, 1e-4), 0, "", "no cut is faster: at least"),
    ((1.0,) * 8, 500, "", "no faster cut leaves room for one micro-batch on a worker of every stage"),
    ((1.0,) * 8, 0, "layer 3 cannot be pickled (TypeError: a lambda)", "layers do not move: layer 3 cannot be"),
], ids=["as many layers as stages", "one huge layer", "memory", "unpicklable"])  # fmt: skip
def test_re_routing_goes_on(open_plans, seconds, state, fixed, reason):
    plans = open_plans("auto", 5_500)
    half = len(seconds) // 2
    cuts = (0, half, len(seconds))
    for stage, (begin, end) in enumerate(pairwise(cuts)):
        own = seconds[begin:end]
        sizes, none = (state,) * half, (0,) * half
        facts = LayerFacts(cuts, begin, own, none, sizes, sizes, (True,) * half, fixed=fixed)
        plans.take(Worker(0, stage), Measured(stage, layers=facts))
    if state:  # 4 layers of 1,000 bytes, and room for 1.5 micro-batches
        for rank in range(GRID.num_workers):
            footprint = Footprint("a", 10_000, 0, 2 * state * half, 0, 1_000, 1_000, 1_000)
            plans.take(GRID.worker(rank), Measured(rank, footprint=footprint))
    for _ in range(10):
        for stage, (begin, end) in enumerate(pairwise(cuts)):
            took = sum(seconds[begin:end])
            plans.applied(Worker(0, stage), Applied(stage, 0, {"F": took, "BW": 2 * took}, {}), is_stage_leader=True)
        plans.stepped(1.0)
    validate(plans.plan_generation(DEAD, (), 10))
    lines: list[str] = []

    def told() -> bool:
        assert plans.better() == []
        for kind, details in plans.take_notes():
            if kind == "layout":
                lines.extend(details["why"])
        return any(line.startswith("layers: ") for line in lines)

    assert wait_for(told, 60)
    (line,) = [line for line in lines if line.startswith("layers: ")]
    assert line.startswith(f"layers: {reason}")
    assert any(line.startswith("reroute") for line in lines)


def measure(plans: RunPlans) -> None:
    """Ten steps of two stages with eight equal layers each."""
    sizes = (10**6,) * 8
    for stage in range(2):
        facts = LayerFacts((0, 8, 16), 8 * stage, (1.0,) * 8, sizes, sizes, sizes, (True,) * 8)
        plans.take(Worker(0, stage), Measured(stage, layers=facts))
    for _ in range(10):
        for stage in range(2):
            plans.applied(Worker(0, stage), Applied(stage, 0, {"F": 0.08, "BW": 0.16}, {}), is_stage_leader=True)
        plans.stepped(1.0)


def test_a_defect_of_the_search_is_logged_with_its_traceback_and_re_routing_goes_on(open_plans, monkeypatch, caplog):
    def ask(_: PlanningProcess, question: Question, *__: object, **___: object) -> Any:
        if getattr(question, "func", None) is plan_layout:
            raise UnexpectedError("TypeError: bad", "Traceback: line 1")
        return question()

    plans = open_plans("always", "16 micro-batches")
    monkeypatch.setattr(PlanningProcess, "ask", ask)
    measure(plans)
    assert plans.plan_generation(DEAD, (), 10).failed == DEAD
    assert wait_for(lambda: "defect of lightning_recycle" in caplog.text, 60)
    assert "TypeError: bad" in caplog.text
    assert "Traceback: line 1" in caplog.text


@pytest.mark.parametrize("dead", [Worker(0, 0), Worker(2, 1)])
def test_layers_move_away_from_the_stage_that_has_lost_a_worker(open_plans, dead):
    plans = open_plans("always", "16 micro-batches")
    measure(plans)
    plans.plan_generation(frozenset({dead}), (), 10)
    found: list[LayoutReady] = []
    assert wait_for(lambda: found.extend(e for e in plans.better() if isinstance(e, LayoutReady)) or found, 60)
    (ready,) = found
    assert [end - begin for begin, end in pairwise(ready.cuts)][dead.stage] < 8
    assert GRID.rank(dead) not in ready.roster
    chosen = plans.layouts.choice_of(ready.cuts)
    assert chosen.judgement.schedule.failed == {dead}
    validate(chosen.judgement.schedule)
