"""Plans that are made in a process of their own: the coordinator serves on, and the plans are the same."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from control_plane import GRID, PATIENCE, ControlPlane, die, in_thread
from slow_planners import Gated, Modules, Unpicklable
from support.process_tree import is_alive
from support.waiting import wait_for

from lightning_recycle.control.plans.planning_process import PlanningProcess, ProcessLostError
from lightning_recycle.control.plans.run_planner import RunPlanner
from lightning_recycle.errors import PlanningError
from lightning_recycle.planning import Costs, Grid, HeuristicPlanner, Problem, Technique, Worker, solve
from lightning_recycle.planning.cancellation import Cancelled, cancelled_by

pytestmark = pytest.mark.timeout(60)

LARGE = Problem(Grid(4, 4, 8), Costs.uniform(4), frozenset({Worker(1, 2)}))


@pytest.fixture
def gated(tmp_path: Path) -> Gated:
    return Gated(report=tmp_path / "began", gate=tmp_path / "gate", home=os.getpid())


@pytest.fixture
def process() -> Iterator[PlanningProcess]:
    process = PlanningProcess()
    yield process
    process.close()


@pytest.fixture
def plane(gated: Gated) -> Iterator[ControlPlane]:
    """A coordinator whose plans in need take as long as the test wants."""
    planner = RunPlanner(GRID, gated, Technique(), apart_from=0)
    planner.prepare()
    plane = ControlPlane(planner=planner)
    with plane:
        yield plane


def test_while_a_plan_in_need_is_made_the_coordinator_serves(plane: ControlPlane, gated: Gated) -> None:
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


def test_a_plan_for_those_who_were_there_a_moment_ago_is_given_up(gated: Gated) -> None:
    grid = Grid(3, 2, 1)
    planner = RunPlanner(grid, gated, Technique(), apart_from=0)
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


def test_if_the_planning_process_dies_the_plan_is_made_here(plane: ControlPlane, gated: Gated) -> None:
    members = plane.members()
    die(plane, members[3])
    assert wait_for(gated.report.exists, PATIENCE)
    recovery = [in_thread(member.regroup) for member in members[:3]]
    os.kill(int(gated.report.read_text()), signal.SIGKILL)
    for one in recovery:
        one.result(PATIENCE)
    assert plane.coordinator.schedules[-1] == solve(plane.coordinator.schedules[-1].problem).schedule


def test_a_run_that_ends_gives_up_the_plan_that_is_waited_for(plane: ControlPlane, gated: Gated) -> None:
    members = plane.members()
    die(plane, members[3])
    assert wait_for(gated.report.exists, PATIENCE)
    for member in members[:3]:
        in_thread(member.regroup)
    plane.close()
    assert not is_alive(int(gated.report.read_text()))
    assert not {"recycle-plan-in-need", "recycle-planning-process"} & {each.name for each in threading.enumerate()}


def test_a_plan_is_the_same_wherever_it_is_made(process: PlanningProcess) -> None:
    here, there = solve(LARGE), process.solve(LARGE, HeuristicPlanner())
    assert there.schedule == here.schedule
    assert (there.lower_bound, there.status, there.backend) == (here.lower_bound, here.status, here.backend)


def test_the_process_imports_no_torch_and_yields_to_others_unless_a_plan_is_urgent(
    process: PlanningProcess, tmp_path: Path
) -> None:
    asks = Modules(report=tmp_path / "modules")
    process.solve(LARGE, asks)
    priority, *modules = asks.report.read_text().split()
    assert not {"torch", "lightning", "numpy"} & set(modules)
    assert int(priority) == 19
    process.solve(LARGE, asks, urgent=True)
    assert int(asks.report.read_text().split()[0]) == os.getpriority(os.PRIO_PROCESS, 0)


def test_a_process_that_died_is_started_again(process: PlanningProcess, gated: Gated) -> None:
    lost = in_thread(process.solve, LARGE, gated)
    assert wait_for(gated.report.exists, PATIENCE)
    first = int(gated.report.read_text())
    os.kill(first, signal.SIGKILL)
    with pytest.raises(ProcessLostError, match="signal 9"):
        lost.result(PATIENCE)
    assert process.solve(LARGE, HeuristicPlanner()).schedule == solve(LARGE).schedule
    assert process.pid != first


def test_a_process_that_shows_no_life_is_given_up(
    process: PlanningProcess, gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = in_thread(process.solve, LARGE, gated)
    assert wait_for(gated.report.exists, PATIENCE)
    os.kill(int(gated.report.read_text()), signal.SIGSTOP)
    monkeypatch.setattr("lightning_recycle.control.plans.planning_process.SILENCE_SECONDS", 0.5)
    with pytest.raises(ProcessLostError, match="no sign of life"):
        lost.result(PATIENCE)
    assert wait_for(lambda: not is_alive(int(gated.report.read_text())), PATIENCE)


def test_a_plan_that_is_not_wanted_any_more_leaves_the_process_for_the_next(
    process: PlanningProcess, gated: Gated
) -> None:
    unwanted = threading.Event()

    def ask() -> None:
        with cancelled_by(unwanted):
            process.solve(LARGE, gated)

    given_up = in_thread(ask)
    assert wait_for(gated.report.exists, PATIENCE)
    unwanted.set()
    with pytest.raises(Cancelled):
        given_up.result(PATIENCE)
    process.solve(LARGE, HeuristicPlanner())
    assert process.pid == int(gated.report.read_text())


def test_what_cannot_be_planned_there_is_told(process: PlanningProcess) -> None:
    with pytest.raises(ProcessLostError, match="cannot be sent"):
        process.solve(LARGE, Unpicklable())
    everybody = frozenset(LARGE.grid.worker(rank) for rank in range(16) if rank % 4 == 0)
    with pytest.raises(PlanningError):
        process.solve(Problem(LARGE.grid, LARGE.costs, everybody), HeuristicPlanner())


def test_it_ends_with_the_process_that_asks() -> None:
    code = (
        "import os, time\n"
        "from lightning_recycle.control.plans.planning_process import PlanningProcess\n"
        "from lightning_recycle.planning import Costs, Grid, HeuristicPlanner, Problem\n"
        "process = PlanningProcess()\n"
        "process.solve(Problem(Grid(2, 2, 2), Costs.uniform(2)), HeuristicPlanner())\n"
        "print(process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        pid = int(asking.stdout.readline())
        asking.kill()
        asking.wait()
        assert wait_for(lambda: not is_alive(pid), PATIENCE)
