"""Where workers check each other: in idle times, else at the rate that is allowed."""

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest

from lightning_recycle.planning import Grid, Worker, plan
from lightning_recycle.planning.grid import OpKind, ScheduledOp
from lightning_recycle.planning.problem import Costs, Problem, Technique
from lightning_recycle.planning.program import Programs, WorkerChecks, partners, plan_checks
from lightning_recycle.planning.schedule import Schedule

RUNNING_EXAMPLE = Grid(3, 4, 6)


def schedule(grid: Grid = RUNNING_EXAMPLE, *lost: Worker, **technique: bool) -> Schedule:
    return plan(Problem(grid, Costs.uniform(grid.stages), frozenset(lost), Technique(**technique)))


CASES = [
    schedule(split_backward=split_backward, staggered=staggered)
    for split_backward, staggered in itertools.product((False, True), repeat=2)
] + [schedule(Grid(3, 2, 4), Worker(1, 0)), schedule(Grid(2, 1, 3)), schedule(Grid(4, 3, 2), Worker(0, 2))]


def completed(operations: Sequence[ScheduledOp]) -> list[float]:
    return [one.end for one in operations if one.op.kind in (OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT)]


@pytest.mark.parametrize("whole", CASES)
def test_a_check_comes_when_what_it_needs_is_there_and_before_reduce(whole):
    for stage, checks in plan_checks(whole, 0.01).items():
        workers = [worker for worker in whole.live_workers if worker.stage == stage]
        assert checks.ranks == tuple(whole.grid.rank(worker) for worker in workers)
        done = [completed(whole.workers[worker]) for worker in workers]
        assert {len(row) for row in checks.operations_before.values()} == {len(checks.costs)} == {max(map(len, done))}
        for number in range(len(checks.costs)):
            ready = max(own[number % len(own)] for own in done)
            for worker in workers:
                operations = whole.workers[worker]
                after = operations[checks.operations_before[worker][number]]
                assert operations.index(after) <= [one.op.kind for one in operations].index(OpKind.REDUCE)
                assert after.op.kind is OpKind.REDUCE or after.start >= ready


@pytest.mark.parametrize("whole", CASES)
def test_a_free_check_takes_no_longer_than_the_worker_idles_in_a_period(whole):
    for stage, checks in plan_checks(whole, 0.01).items():
        for worker in (worker for worker in whole.live_workers if worker.stage == stage):
            busy = sum(one.duration for one in whole.workers[worker])
            assert not checks.free or busy + 3 <= whole.period + 1e-9  # F, B and W take a slot each


def test_checks_are_free_where_a_pipeline_has_bubbles():
    drained = plan_checks(schedule(split_backward=False, staggered=True), 0.01)  # 1F1B: 27 slots, 18 of them busy
    # Stage 1 has room for its own, but stage 0 would have to wait for it before its STEP.
    assert [len(checks.free) for _, checks in sorted(drained.items())] == [0, 0, 6, 6]
    assert [checks.costs[0] for _, checks in sorted(drained.items())] == [3, 1, 0, 0]
    barrier = plan_checks(schedule(split_backward=False, staggered=False), 0.01)  # REDUCE after 27, 25, 23 and 21 slots
    assert [len(checks.free) for _, checks in sorted(barrier.items())] == [0, 0, 6, 6]
    # Nobody idles, and the last stage is done 5 slots after the first one has begun its next step.
    assert {(checks.free, checks.every) for checks in plan_checks(schedule(), 0.01).values()} == {((), 27)}
    full = schedule(Grid(2, 1, 3))  # no pipeline, no bubbles: 9 slots of work, 3 of which are checked
    assert [(c.free, c.every) for c in plan_checks(full, 0.01).values()] == [((), 34)]
    assert [(c.free, c.every) for c in plan_checks(full, 0.5).values()] == [((), 1)]


@pytest.mark.parametrize(("free", "every"), [((), 1), ((), 5), ((0, 2), 7), ((0, 1, 2, 3), 1)])
def test_each_micro_batch_has_its_turn_at_no_regular_distance(free, every):
    checks = WorkerChecks((0, 1), every, free, (5, 7, 7, 9))
    drawn = [checks.drawn(step) for step in range(4000 * every)]
    assert every == 1 or set(drawn[1::every]) <= {None, *free}
    whole = drawn[::every]
    for period in (1, 2, 3, 4, 5, 8):  # every n-th step, from any on: also what errs in these alone
        for first in range(period):
            found = Counter(whole[first::period])
            assert set(found) == {0, 1, 2, 3}
            assert min(found.values()) > 0.15 * sum(found.values())


def test_nothing_is_checked_without_peers_or_a_share_of_the_time():
    assert plan_checks(schedule(), 0.0) == {}
    assert plan_checks(schedule(Grid(1, 2, 4)), 1.0) == {}
    assert plan_checks(schedule(Grid(2, 2, 4), Worker(0, 1)), 1.0).keys() == {0}


def test_with_many_pipelines_a_worker_connects_with_a_few_peers():
    whole = schedule(Grid(20, 1, 2))
    programs = Programs(whole, verify=0.5)
    for worker in whole.live_workers:
        program, rank = programs.of(worker), whole.grid.rank(worker)
        partners_of = {other for step in range(80) for other in program.checks.partners(step, rank)}
        assert partners_of == set(program.neighbours)
        assert len(partners_of) == 16


@pytest.mark.parametrize("count", [2, 3, 5])
def test_every_worker_is_checked_by_every_other_in_turn(count):
    ranks = tuple(range(1, 3 * count, 3))
    seen = set()
    for turn in range(count - 1):
        for rank in ranks:
            checked, checker = partners(ranks, rank, turn)
            assert partners(ranks, checked, turn)[1] == rank
            assert partners(ranks, checker, turn)[0] == rank
            seen.add((rank, checked))
    assert seen == set(itertools.permutations(ranks, 2))


def test_a_program_gets_one_check_and_connects_the_workers_of_a_stage():
    whole = schedule(Grid(3, 2, 4))
    programs, plain = Programs(whole, verify=0.01), Programs(whole)
    for worker in whole.live_workers:
        program, without = programs.of(worker), plain.of(worker)
        assert program.tasks == without.tasks
        for place in program.checks.operations_before:
            tasks = program.tasks_with_check(place)
            assert [tasks.index(task) for task in tasks if task.op.kind is OpKind.CHECK] == [place]
            assert tasks[:place] + tasks[place + 1 :] == program.tasks
        peers = {rank for rank in program.checks.ranks if rank != whole.grid.rank(worker)}
        assert set(program.neighbours) == {*without.neighbours, *peers}
        assert (without.checks, len(peers)) == (None, 2)


def test_where_workers_have_unequal_numbers_each_has_a_check_of_each_of_its_own():
    whole = schedule(Grid(3, 1, 3), Worker(1, 0))
    counts = sorted(len(completed(whole.workers[worker])) for worker in whole.live_workers)
    (checks,) = plan_checks(whole, 0.5).values()
    assert (counts, len(checks.costs)) == ([4, 5], 5)
