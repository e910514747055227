"""One queue of questions: the most urgent first, the newest of its kind, and nothing is left at the end."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from slow_planners import Endless, Failing, Unpicklable
from support.planning_in_background import is_idle
from support.waiting import PATIENCE, wait_for

from lightning_recycle import planning
from lightning_recycle.control.plans.drift import DriftQuestion, Estimate
from lightning_recycle.control.plans.plan_provider import InThread, Job, PlanningQueue, PlanProvider, Urgency, make_plan
from lightning_recycle.control.plans.run_plans import RunPlans
from lightning_recycle.errors import ConfigurationError, PlanningError
from lightning_recycle.planning.child_process import Cancelled, UnexpectedError, cancelled_by, check_cancelled
from lightning_recycle.planning.planner import PlanningOptions

PROBLEM = planning.Problem(planning.Grid(3, 2, 4), planning.Costs.uniform(2))
SLOW = Estimate(PROBLEM.costs, ((planning.Worker(0, 0), 2.0),))


@dataclass(frozen=True)
class Value:
    """A question whose answer is in it."""

    value: Any

    def __call__(self) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


@dataclass
class Waiting:
    """A question that is answered when the test wants; asked in this process only."""

    def __post_init__(self) -> None:
        self.asked, self.go_on = threading.Semaphore(0), threading.Event()
        self.given_up = 0

    def __call__(self) -> str:
        self.asked.release()
        while not self.go_on.wait(0.01):
            try:
                check_cancelled()
            except Cancelled:
                self.given_up += 1
                raise
        return "waited"


@pytest.fixture
def planner() -> Iterator[PlanningQueue]:
    planner = PlanningQueue()
    yield planner
    planner.close()
    assert not threads()


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("recycle-plan")]


def publishing(planner: PlanningQueue, *questions: Any) -> Job:
    """Publishes the answers to all questions."""
    for question in questions:
        try:
            found = yield question
        except PlanningError as error:
            found = error
        if question is not None:
            planner.publish(found)


def found(planner: PlanningQueue, count: int) -> list[Any]:
    answers: list[Any] = []

    def all_there() -> bool:
        answers.extend(planner.take())
        return len(answers) >= count

    assert wait_for(all_there, PATIENCE), answers
    return answers


def test_answers_are_published_wherever_they_were_found(planner):
    woken = threading.Semaphore(0)
    planner.wake = woken.release
    planner.begin(
        Urgency.AHEAD,
        publishing(planner, InThread(Value(1)), None, partial(make_plan, PROBLEM, planning.HeuristicPlanner())),
    )
    assert woken.acquire(timeout=PATIENCE)
    assert woken.acquire(timeout=PATIENCE)
    one, (made, _) = planner.take()
    assert (one, made.schedule) == (1, planning.heuristic(PROBLEM))
    assert wait_for(lambda: is_idle(planner), PATIENCE)
    assert planner.take() == []


def test_a_job_gets_the_reason_where_there_is_no_answer_and_goes_on(planner):
    questions = [
        InThread(Value(PlanningError("no room"))),
        InThread(Value(ValueError("a bug of a user's planner"))),
        partial(make_plan, PROBLEM, Failing()),
        Value(threading.Lock()),
        InThread(Value(5)),
    ]
    planner.begin(Urgency.AHEAD, publishing(planner, *questions))
    *reasons, last = found(planner, 5)
    assert [str(reason) for reason in reasons[:2]] == ["no room", "a bug of a user's planner"]
    assert [type(reason) for reason in reasons] == [PlanningError, UnexpectedError, PlanningError, PlanningError]
    assert last == 5


def test_a_job_with_a_bug_ends_alone(planner, caplog):
    def wrong() -> Job:
        yield None
        raise ValueError("a bug")

    planner.begin(Urgency.NEEDED, wrong())
    planner.begin(Urgency.AHEAD, publishing(planner, InThread(Value(1))))
    assert found(planner, 1) == [1]
    assert "a bug" in caplog.text


def test_the_most_urgent_question_comes_first_and_the_others_are_asked_again(planner):
    slow = Waiting()
    planner.begin(Urgency.AHEAD, publishing(planner, InThread(slow)))
    assert slow.asked.acquire(timeout=PATIENCE)
    planner.begin(Urgency.DRIFT, publishing(planner, InThread(Value("drift"))))
    planner.begin(Urgency.LAYOUT, publishing(planner, InThread(Value("layout"))))
    planner.begin(Urgency.NEEDED, publishing(planner, InThread(Value("needed"))))
    assert found(planner, 1) == ["needed"]
    assert slow.asked.acquire(timeout=PATIENCE), "again"
    assert wait_for(lambda: slow.given_up == 1, PATIENCE)
    slow.go_on.set()
    assert found(planner, 3) == ["waited", "layout", "drift"]


def test_a_less_urgent_question_waits(planner):
    slow = Waiting()
    planner.begin(Urgency.LAYOUT, publishing(planner, InThread(slow)))
    assert slow.asked.acquire(timeout=PATIENCE)
    planner.begin(Urgency.DRIFT, publishing(planner, InThread(Value("drift"))))
    time.sleep(0.2)
    assert planner.take() == []
    slow.go_on.set()
    assert found(planner, 2) == ["waited", "drift"]
    assert slow.given_up == 0


@pytest.mark.parametrize("how", ["replaced", "dropped"])
def test_what_is_not_wanted_any_more_is_given_up(planner, how):
    slow = Waiting()
    planner.begin(Urgency.LAYOUT, publishing(planner, InThread(slow), InThread(Value("the next of an old job"))))
    assert slow.asked.acquire(timeout=PATIENCE)
    if how == "dropped":
        planner.drop(Urgency.LAYOUT)
        planner.drop(Urgency.LAYOUT)  # there is none any more
    planner.begin(Urgency.LAYOUT if how == "replaced" else Urgency.DRIFT, publishing(planner, InThread(Value("new"))))
    assert found(planner, 1) == ["new"]
    assert wait_for(lambda: slow.given_up == 1, PATIENCE)
    assert planner.take() == []


def test_a_question_that_takes_too_long_has_no_answer(planner, monkeypatch):
    monkeypatch.setattr(planning.child_process, "_TIME_LIMIT", 0.2)
    planner.begin(Urgency.AHEAD, publishing(planner, Endless(), InThread(Value("next"))))
    reason, last = found(planner, 2)
    assert "past its time limit" in str(reason)
    assert last == "next"


def test_a_closed_planner_begins_nothing(planner):
    planner.begin(Urgency.AHEAD, publishing(planner, InThread(Waiting())))
    planner.close()
    planner.begin(Urgency.AHEAD, publishing(planner, InThread(Value(1))))
    assert is_idle(planner)
    assert planner.take() == []


def test_many_jobs_begun_by_many_threads_all_end(planner):
    """Whatever is replaced, dropped and interrupted: the newest job of each urgency is done."""
    ends: dict[Urgency, int] = {}

    def job(urgency: Urgency, number: int) -> Job:
        for _ in range(3):
            assert (yield InThread(Value(number))) == number
            yield None
        ends[urgency] = number

    def begin(urgency: Urgency) -> None:
        for number in range(50):
            planner.begin(urgency, job(urgency, number))
            if number % 7 == 3:
                planner.drop(urgency)

    beginning = [threading.Thread(target=begin, args=(urgency,)) for urgency in Urgency]
    for thread in beginning:
        thread.start()
    for thread in beginning:
        thread.join(PATIENCE)
    assert wait_for(lambda: is_idle(planner), PATIENCE)
    assert ends == dict.fromkeys(Urgency, 49)


# ---------------------------------------------------------------------- the end of a run


def plan_again_and_again(problem: planning.Problem, planner: str) -> None:
    while True:
        planning.plan(problem, planner)


@pytest.mark.parametrize(
    ("grid", "planner"), [(planning.Grid(8, 8, 32), "heuristic"), (planning.Grid(3, 4, 6), "highs")]
)
def test_a_plan_that_is_not_wanted_is_given_up_wherever_it_is_made(grid, planner):
    unwanted = threading.Event()
    threading.Timer(0.2, unwanted.set).start()
    with cancelled_by(unwanted), pytest.raises(Cancelled):
        plan_again_and_again(planning.Problem(grid, planning.Costs.uniform(grid.stages)), planner)


# ---------------------------------------------------------------------- plans for other times


@pytest.fixture
def look_for(open_planner) -> Callable[[Any], RunPlans]:
    """Begins to look for a better plan by a planner."""

    def begin(planner: Any) -> RunPlans:
        plans = RunPlans(PROBLEM.grid, open_planner(PROBLEM.grid), None, lambda profile: None, lambda: None)
        question = DriftQuestion(planning.heuristic(PROBLEM), SLOW, 15.0, 0.05, planner)
        plans._background.begin(Urgency.DRIFT, plans._look_for_better(question))
        return plans

    return begin


def answer(plans: RunPlans) -> Any:
    ((question, proposal),) = found(plans._background, 1)
    assert question.schedule == planning.heuristic(PROBLEM)
    return proposal


def test_the_answer_is_the_planners_with_the_time_that_it_took(look_for):
    proposal = answer(look_for(planning.HeuristicPlanner()))
    assert proposal.schedule == planning.heuristic(SLOW.of(PROBLEM))
    assert proposal.before == 24
    assert 0 < proposal.seconds < PATIENCE


@pytest.mark.parametrize("planner", [Failing(), Unpicklable()])
def test_a_planner_that_fails_is_no_answer(look_for, planner):
    assert answer(look_for(planner)) is None


def test_a_planner_that_cannot_be_sent_is_refused_before_the_run():
    own = type("OfThisProcess", (Failing,), {"__module__": "__main__"})
    for planner, why in ((Unpicklable(), "lock"), (own(), "its class is in the script")):
        with pytest.raises(ConfigurationError, match=f"cannot be sent there: .*{why}.*Define its class in a module"):
            PlanProvider(PROBLEM.grid, PlanningOptions(planner=planner))
