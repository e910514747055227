"""One worker's part of a schedule, and whom it must reach for it."""

from itertools import combinations

import pytest

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning import Costs, Problem, Worker, heuristic, program
from lightning_recycle.planning.grid import Grid
from lightning_recycle.planning.program import Programs, links

GRID = Grid(3, 3, 3)


@pytest.fixture
def many_pipelines(monkeypatch) -> None:
    """A few count as many."""
    monkeypatch.setattr(program, "_FEW_PIPELINES", 0)


def schedule_without(*lost: Worker, grid: Grid = GRID):
    return heuristic(Problem(grid, Costs.uniform(grid.stages), frozenset(lost)))


LOSSES = [(), *[(w,) for w in GRID.workers()], *[p for p in combinations(GRID.workers(), 2) if p[0] != p[1]][::5]]


@pytest.mark.parametrize("few", [0, 16], ids=["many", "few"])
@pytest.mark.parametrize("lost", LOSSES, ids=str)
def test_every_message_of_a_program_is_for_a_neighbour_which_expects_it(lost, few, monkeypatch):
    monkeypatch.setattr(program, "_FEW_PIPELINES", few)
    programs = Programs(schedule_without(*lost))
    live = [worker for worker in GRID.workers() if worker not in lost]
    found = {GRID.rank(worker): programs.of(worker) for worker in live}
    sent = {(r, t.destination, t.index) for r, p in found.items() for t in p.tasks if t.destination is not None}
    awaited = {(t.source, r, t.index) for r, p in found.items() for t in p.tasks if t.source is not None}
    assert sent == awaited
    assert all(receiver in found[sender].neighbours for sender, receiver, _ in sent)
    assert all(rank in found[other].neighbours for rank, program in found.items() for other in program.neighbours)


def test_without_failures_a_worker_has_two_neighbours_however_many_there_are():
    grid = Grid(20, 3, 1)
    programs = Programs(schedule_without(grid=grid))
    assert programs.of(Worker(7, 1)).neighbours == (grid.rank(Worker(7, 0)), grid.rank(Worker(7, 2)))


def test_with_few_pipelines_a_worker_reaches_all_of_the_stages_before_and_after():
    found = links(schedule_without(Worker(1, 2)))
    assert found[Worker(0, 1)] == {*(Worker(d, 0) for d in range(3)), Worker(0, 2), Worker(2, 2)}
    assert found[Worker(0, 0)] == {Worker(d, 1) for d in range(3)}


@pytest.mark.usefixtures("many_pipelines")
def test_where_a_worker_is_lost_its_neighbours_reach_all_its_peers():
    """So another plan that deals its micro-batches to others needs no other connections."""
    found = links(schedule_without(Worker(1, 1)))
    assert found[Worker(1, 0)] >= {Worker(0, 1), Worker(2, 1)}
    assert found[Worker(1, 2)] >= {Worker(0, 1), Worker(2, 1)}


@pytest.mark.usefixtures("many_pipelines")
def test_the_first_workers_of_the_stages_reach_each_other():
    """They run ``self(x)`` together."""
    found = links(schedule_without(Worker(0, 1), Worker(1, 1), Worker(0, 2)))
    assert Worker(2, 1) in found[Worker(0, 0)]
    assert Worker(1, 2) in found[Worker(2, 1)]


def test_who_is_not_part_of_the_schedule_has_no_program():
    with pytest.raises(PlanningError, match=r"worker \(1, 1\) has failed"):
        Programs(schedule_without(Worker(1, 1))).of(Worker(1, 1))
