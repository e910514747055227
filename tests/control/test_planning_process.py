"""Plans that are made in a process of their own: the coordinator serves on, and the plans are the same."""

import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
from control_plane import GRID, ControlPlane, die, in_thread
from slow_planners import Exiting, Failing, Gated, Heavy, Modules, Unpicklable
from support.process_tree import is_alive
from support.waiting import PATIENCE, wait_for

from lightning_recycle.control.plans import plan_provider
from lightning_recycle.control.plans.plan_provider import PlanProvider, make_plan
from lightning_recycle.errors import PlanningError
from lightning_recycle.planning import Costs, Grid, HeuristicPlanner, Problem, Worker, child_process, solve
from lightning_recycle.planning.child_process import Cancelled, PlanningProcess, ProcessLostError, UnexpectedError
from lightning_recycle.planning.planner import PlanningOptions

LARGE = Problem(Grid(4, 4, 8), Costs.uniform(4), frozenset({Worker(1, 2)}))


@pytest.fixture
def gated(tmp_path, monkeypatch) -> Gated:
    """The planner of runs that make all plans in need in another process, however small."""
    monkeypatch.setattr(plan_provider, "_MIN_OPERATIONS_FOR_PROCESS", 0)
    return Gated(report=tmp_path / "began", gate=tmp_path / "gate", home=os.getpid())


@pytest.fixture
def process() -> Iterator[PlanningProcess]:
    process = PlanningProcess()
    yield process
    process.close()


@pytest.fixture
def plane(gated) -> Iterator[ControlPlane]:
    """A coordinator whose plans in need take as long as the test wants."""
    planner = PlanProvider(GRID, PlanningOptions(planner=gated))
    planner.prepare()
    plane = ControlPlane(planner=planner)
    with plane:
        yield plane


def test_while_a_plan_in_need_is_made_the_coordinator_serves(plane, gated):
    members = plane.members()
    die(plane, members[3])
    assert wait_for(gated.report.exists, PATIENCE)
    recovery = [in_thread(member.regroup) for member in members[:3]]
    spare = plane.client(None)
    assert in_thread(spare.await_assignment).result(PATIENCE).rank == 3
    assert not any(one.done() for one in recovery)
    gated.gate.touch()
    for one in recovery:
        one.result(PATIENCE)
    plane.until(lambda: [event.details["plan"] for event in plane.events("resumed")] == ["ahead", "made"])


def test_a_plan_for_those_who_were_there_a_moment_ago_is_given_up(gated):
    grid = Grid(3, 2, 1)
    planner = PlanProvider(grid, PlanningOptions(planner=gated))
    planner.prepare()
    with ControlPlane(grid, planner) as plane:
        members = plane.members()
        die(plane, members[5])
        assert wait_for(gated.report.exists, PATIENCE)
        gated.report.unlink()
        die(plane, members[4])
        assert wait_for(gated.report.exists, PATIENCE)
        recovery = [in_thread(member.regroup) for member in members[:4]]
        gated.gate.touch()
        for one in recovery:
            one.result(PATIENCE)
        assert plane.coordinator.schedules[-1].failed == {Worker(2, 0), Worker(2, 1)}
        plane.until(lambda: len(plane.events("resumed")) == 2)


def test_if_the_planning_process_dies_the_plan_is_made_here(plane, gated):
    members = plane.members()
    die(plane, members[3])
    assert wait_for(gated.report.exists, PATIENCE)
    recovery = [in_thread(member.regroup) for member in members[:3]]
    os.kill(int(gated.report.read_text()), signal.SIGKILL)
    for one in recovery:
        one.result(PATIENCE)
    assert plane.coordinator.schedules[-1] == solve(plane.coordinator.schedules[-1].problem).schedule


def test_a_run_that_ends_gives_up_the_plan_that_is_waited_for(plane, gated):
    members = plane.members()
    die(plane, members[3])
    assert wait_for(gated.report.exists, PATIENCE)
    for member in members[:3]:
        in_thread(member.regroup)
    plane.close()
    assert not is_alive(int(gated.report.read_text()))
    assert not [each.name for each in threading.enumerate() if each.name.startswith("recycle-plan")]


WANTED = threading.Event()  # never set: the question is wanted
QUICK = partial(make_plan, LARGE, HeuristicPlanner())


def test_a_plan_is_the_same_wherever_it_is_made(process):
    (here, _), (there, _) = QUICK(), process.ask(QUICK, WANTED)
    assert there.schedule == here.schedule
    assert replace(there, seconds=0.0) == replace(here, seconds=0.0)


def test_the_process_imports_no_torch_and_yields_to_others_unless_a_plan_is_urgent(process, tmp_path):
    asks = Modules(report=tmp_path / "modules")
    process.ask(partial(make_plan, LARGE, asks), WANTED)
    priority, *modules = asks.report.read_text().split()
    assert not {"torch", "lightning", "numpy"} & set(modules)
    assert int(priority) == 19
    process.ask(partial(make_plan, LARGE, asks), WANTED, urgent=True)
    assert int(asks.report.read_text().split()[0]) == os.getpriority(os.PRIO_PROCESS, 0)


def test_a_process_that_died_is_started_again(process, gated):
    lost = in_thread(process.ask, partial(make_plan, LARGE, gated), WANTED)
    assert wait_for(gated.report.exists, PATIENCE)
    first = int(gated.report.read_text())
    os.kill(first, signal.SIGKILL)
    with pytest.raises(ProcessLostError, match="signal 9"):
        lost.result(PATIENCE)
    assert process.ask(QUICK, WANTED)[0].schedule == solve(LARGE).schedule
    assert process.pid != first


def test_a_signal_that_is_sent_to_all_processes_is_left_to_the_one_that_asks(process):
    process.ask(QUICK, WANTED)
    first = process.pid
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(first, number)
    process.ask(QUICK, WANTED)
    assert process.pid == first


def test_a_process_that_dies_each_time_is_not_started_for_ever(process, monkeypatch):
    monkeypatch.setattr(child_process, "_MOST_LOSSES", 2)
    for reason in ("exit code 3", "exit code 3", "it has ended 2 times"):
        with pytest.raises(ProcessLostError, match=reason):
            process.ask(partial(make_plan, LARGE, Exiting()), WANTED)


def test_a_process_that_shows_no_life_is_given_up(process, gated, monkeypatch):
    lost = in_thread(process.ask, partial(make_plan, LARGE, gated), WANTED)
    assert wait_for(gated.report.exists, PATIENCE)
    os.kill(int(gated.report.read_text()), signal.SIGSTOP)
    monkeypatch.setattr(child_process, "SILENCE_SECONDS", 0.5)
    with pytest.raises(ProcessLostError, match="no sign of life"):
        lost.result(PATIENCE)
    assert wait_for(lambda: not is_alive(int(gated.report.read_text())), PATIENCE)


def test_another_process_gets_a_question_that_a_stopped_one_does_not_even_read(process, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(child_process, "SILENCE_SECONDS", 1.0)
        process._running()  # its connection waits no longer than that
    process.ask(QUICK, WANTED)
    first = process.pid
    os.kill(first, signal.SIGSTOP)
    with pytest.raises(PlanningError, match="no licence"):
        process.ask(partial(make_plan, LARGE, Heavy()), WANTED)
    assert process.pid != first
    assert not is_alive(first)


def test_a_question_that_is_not_wanted_any_more_ends_its_process(process, gated):
    interrupted = threading.Event()
    given_up = in_thread(process.ask, partial(make_plan, LARGE, gated), interrupted)
    assert wait_for(gated.report.exists, PATIENCE)
    interrupted.set()
    with pytest.raises(Cancelled):
        given_up.result(PATIENCE)
    assert not is_alive(int(gated.report.read_text()))
    assert process.ask(QUICK, WANTED)[0].schedule == solve(LARGE).schedule


def test_a_question_that_cannot_be_sent_is_refused(process):
    with pytest.raises(PlanningError, match="cannot be sent"):
        process.ask(partial(make_plan, LARGE, Unpicklable()), WANTED)
    own = type("OfThisProcess", (Failing,), {"__module__": "__main__"})
    sys.modules["__main__"].OfThisProcess = own
    with pytest.raises(PlanningError, match="cannot be read"):
        process.ask(partial(make_plan, LARGE, own()), WANTED)
    del sys.modules["__main__"].OfThisProcess
    with pytest.raises(PlanningError, match="no licence"):
        process.ask(partial(make_plan, LARGE, Failing()), WANTED)


def test_an_exception_of_a_defect_brings_its_traceback(process):
    with pytest.raises(UnexpectedError, match="TypeError: 'float' object is not iterable") as caught:
        process.ask(partial(max, 0.0), WANTED)
    assert "in _answer" in caught.value.trace
    assert pickle.loads(pickle.dumps(caught.value)).trace == caught.value.trace
