"""Plans that are looked for in the background: at the lowest priority, one at a time, without leaving anything."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from slow_planners import Reporting, Sleeping, Unpicklable
from support.process_tree import is_alive
from support.waiting import wait_for

from lightning_recycle.control.plans.background import BackgroundPlanning
from lightning_recycle.control.plans.drift import Estimate, Proposal, Question
from lightning_recycle.planning import Costs, Grid, Problem, Worker, heuristic

PATIENCE = 30.0  # seconds
PROBLEM = Problem(Grid(3, 2, 4), Costs.uniform(2))
SLOW = Estimate(PROBLEM.costs, ((Worker(0, 0), 2.0),))
QUESTION = Question(heuristic(PROBLEM), SLOW, 15.0, 0.05)


class Asking:
    """Background planning, and the wish to be woken."""

    def __init__(self) -> None:
        self.woken = threading.Event()
        self.plannings: list[BackgroundPlanning] = []

    def by(self, planner: object) -> BackgroundPlanning:
        self.plannings.append(BackgroundPlanning(planner, self.woken.set))
        self.plannings[-1].ask(QUESTION)
        return self.plannings[-1]

    def answer(self, planner: object) -> tuple[Question, Proposal | None]:
        planning = self.by(planner)
        assert self.woken.wait(PATIENCE)
        self.woken.clear()
        (answer,) = planning.take_answers()
        assert planning.take_answers() == []
        return answer


@pytest.fixture
def asking() -> Iterator[Asking]:
    asking = Asking()
    yield asking
    for planning in asking.plannings:
        planning.close()


def test_the_answer_is_the_planner_s_and_says_how_long_it_took(asking: Asking) -> None:
    question, proposal = asking.answer("heuristic")
    assert question is QUESTION
    assert proposal is not None
    assert proposal.schedule == heuristic(SLOW.of(PROBLEM))
    assert proposal.before == 24
    assert 0 < proposal.seconds < PATIENCE


def test_it_works_in_another_process_of_the_lowest_priority(asking: Asking, tmp_path: Path) -> None:
    _, proposal = asking.answer(Reporting(tmp_path / "report"))
    assert proposal is not None
    assert proposal.schedule is not None
    pid, nice = map(int, (tmp_path / "report").read_text().split())
    assert pid != os.getpid()
    assert nice == 19
    assert os.getpriority(os.PRIO_PROCESS, 0) < 19


def test_a_planner_that_cannot_be_sent_is_replaced_by_the_heuristic(asking: Asking) -> None:
    _, proposal = asking.answer(Unpicklable())
    assert proposal is not None
    assert proposal.schedule == heuristic(SLOW.of(PROBLEM))


def test_a_planner_that_fails_is_no_answer(asking: Asking) -> None:
    assert asking.answer("no such planner") == (QUESTION, None)


@pytest.mark.parametrize("how", ["close", "another question"])
def test_who_is_not_wanted_any_more_is_stopped(asking: Asking, tmp_path: Path, how: str) -> None:
    report = tmp_path / "report"
    planning = asking.by(Sleeping(report))
    assert wait_for(lambda: report.exists() and report.read_text(), PATIENCE)
    pid = int(report.read_text())
    assert is_alive(pid)
    if how == "close":
        planning.close()
    else:
        planning.ask(QUESTION)
    assert wait_for(lambda: not is_alive(pid), PATIENCE)
    assert planning.take_answers() == []
