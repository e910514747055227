"""The layout after a failure is there when it happens: it was asked for ahead."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from support.waiting import wait_for

from lightning_recycle.control.plans import layout_question
from lightning_recycle.control.plans.layout_question import CHANGING, ForeseenLayouts, LayoutQuestion
from lightning_recycle.control.plans.planning_process import PlanningProcess
from lightning_recycle.control.plans.run_planner import RunPlanner
from lightning_recycle.control.plans.run_plans import RunPlans
from lightning_recycle.control.protocol.messages import Applied, LayerFacts
from lightning_recycle.control.protocol.state import LayoutReady
from lightning_recycle.errors import PlanningError
from lightning_recycle.planning import Grid, LayerCosts, Problem, Technique, Worker, even_cuts, plan_layout
from lightning_recycle.planning.heuristic.heuristic_planner import heuristic
from lightning_recycle.planning.layouts.layout_candidates import Judgement, in_turns
from lightning_recycle.planning.layouts.layout_search import next_losses
from lightning_recycle.planning.timing import Turns
from lightning_recycle.planning.validation import validate

GRID = Grid(3, 2, 6)
ALL: frozenset[Worker] = frozenset()
CUTS = even_cuts(16, 2)
SECONDS = {"F": 0.08, "BW": 0.16, "REDUCE": 0.0, "STEP": 0.0}
HELD = 10**6  # bytes of a layer


def by_rule(problem: Problem, turns: Turns | None) -> Judgement:
    """By a plan that nobody has searched for a better one."""
    schedule = heuristic(problem, 0)
    return in_turns(Judgement(schedule.period, schedule=schedule), turns, 0)


quick = partial(plan_layout, judge=by_rule, changing=CHANGING, ways=("layers",))


class Run:
    """A run without workers."""

    def __init__(self) -> None:
        self.planner = RunPlanner(GRID, "heuristic", Technique(decoupled=False), in_flight_limit=16)
        self.planner.prepare()
        self.plans = RunPlans(GRID, self.planner, None, lambda profile: None, lambda: None, "always")
        self.plans.begin_generation(ALL, (), 0)
        for stage in range(GRID.stages):
            sizes = (HELD,) * 8
            facts = LayerFacts(stage, CUTS, 8 * stage, (1.0,) * 8, sizes, sizes, sizes, (True,) * 8)
            self.plans.layers(facts)

    def steps(self, count: int, slower: float = 1.0) -> None:
        for _ in range(count):
            for stage in range(GRID.stages):
                seconds = {name: slower * value if stage == 0 else value for name, value in SECONDS.items()}
                self.plans.applied(Worker(0, stage), Applied(stage, 0, seconds, {}), leads=True)
            self.plans.stepped(1.0)

    def relaid(self) -> LayoutReady | None:
        """The change of the layout, once the newest question is answered."""
        found: list[LayoutReady] = []

        def answered() -> bool:
            found.extend(each for each in self.plans.better() if isinstance(each, LayoutReady))
            return not self.plans._layouts._asked

        assert wait_for(answered, 60)
        return found[0] if found else None

    def foreseen(self) -> int:
        return len(self.plans._layouts._foreseen._plans)

    def prepared(self) -> None:
        self.steps(10)
        assert self.relaid() is None, "nobody has failed"
        self.steps(10)
        assert wait_for(lambda: self.foreseen() == GRID.stages, 60)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setattr(PlanningProcess, "ask", lambda _, question, *__, **___: question.answer())
    monkeypatch.setattr(layout_question, "plan_layout", quick)
    found = Run()
    yield found
    found.plans.close()


@pytest.mark.parametrize("dead", [Worker(0, 0), Worker(2, 1)])
def test_layers_move_at_once_when_a_worker_fails(run: Run, monkeypatch: pytest.MonkeyPatch, dead: Worker) -> None:
    run.prepared()
    monkeypatch.setattr(layout_question, "plan_layout", None)  # nothing is asked any more
    run.plans.begin_generation(frozenset({dead}), (), 21)
    ready = run.relaid()
    assert ready is not None, run.plans.take_notes()
    assert [end - begin for begin, end in pairwise(ready.cuts)][dead.stage] < 8
    assert GRID.rank(dead) not in ready.roster
    chosen = run.plans._layouts.choice_of(ready.cuts)
    assert chosen is not None
    assert chosen.judgement is not None
    schedule = chosen.judgement.schedule
    assert schedule is not None
    assert schedule.failed == {dead}
    validate(schedule)


def test_layers_that_take_other_times_now_are_asked_about_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.prepared()
    asked: list[LayoutQuestion] = []

    def ask(_: object, question: LayoutQuestion, *__: object, **___: object) -> None:
        asked.append(question)
        raise PlanningError("no answer")

    monkeypatch.setattr(PlanningProcess, "ask", ask)
    run.steps(3, slower=1.5)
    run.plans.begin_generation(frozenset({Worker(2, 1)}), (), 24)
    assert wait_for(lambda: bool(asked), 60)
    assert asked[0].problem.failed == {Worker(2, 1)}


def test_those_who_train_are_asked_for_once(run: Run) -> None:
    run.prepared()
    before = run.plans._layouts._foreseen._plans
    run.steps(5)
    assert run.plans._layouts._foreseen._plans is before


def question(failed: frozenset[Worker], **changes: object) -> LayoutQuestion:
    layers = LayerCosts((0.01,) * 16, (0.01,) * 16, (0.01,) * 16, parameter_bytes=(1e6,) * 16, bandwidth=1e9)
    problem = Problem(GRID, layers.costs(CUTS), failed)
    return replace(LayoutQuestion(problem, layers, CUTS, 1e6), **changes)  # type: ignore[arg-type]


def test_an_answer_serves_whoever_of_a_stage_fails_and_nobody_else() -> None:
    known = ForeseenLayouts()
    ahead = [question(frozenset({worker})) for worker in next_losses(question(ALL).problem)]
    known._questions = tuple(ahead)
    known._plans = {1: quick(ahead[1].problem, ahead[1].layers, CUTS, next_change=1e6)}
    asked = question(frozenset({Worker(2, 1)}))
    found = known.plan(asked)
    assert found is not None
    assert found.chosen.failed == {Worker(2, 1)}
    assert known.plan(question(frozenset({Worker(2, 0)}))) is None, "not found yet"
    assert known.plan(question(frozenset({Worker(2, 1), Worker(1, 1)}))) is None
    other = asked.layers
    for changes in (
        {"cuts": (0, 7, 16)},
        {"fixed": "layer 3 has no LayerSpec"},
        {"layers": replace(other, memory_limit=1e9)},
        {"layers": replace(other, forward=(0.02, *other.forward[1:]))},
        {"layers": replace(other, parameter_bytes=(2e6,) * 16)},
        {"problem": replace(asked.problem, technique=Technique(False, False))},
        {"problem": replace(asked.problem, worker_factors=((Worker(0, 0), 2.0),))},
    ):
        assert known.plan(replace(asked, **changes)) is None, changes
    assert known.plan(replace(asked, layers=replace(other, forward=(0.0101, *other.forward[1:])))) is not None


def test_what_is_left_until_the_next_failure_is_weighed_again() -> None:
    known, asked = ForeseenLayouts(), question(frozenset({Worker(0, 1)}))
    known._questions = (asked,)
    known._plans = {0: quick(asked.problem, asked.layers, CUTS, next_change=1e6)}
    for seconds in (1e-3, 1.0, 1e3):
        found = known.plan(replace(asked, next_change=seconds))
        fresh = quick(asked.problem, asked.layers, CUTS, next_change=seconds)
        assert found is not None
        assert found.chosen.way == fresh.chosen.way
        assert found.why() == fresh.why()
    assert fresh.chosen.way == "layers"
