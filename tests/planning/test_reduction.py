"""A reduction in buckets: REDUCE is what the last W has not hidden of it, for planners, validation and pictures."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as draw

from lightning_recycle import planning as p
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning.costs import bucket_times, remaining
from lightning_recycle.planning.grid import OpKind
from lightning_recycle.planning.plan_files import read_schedule
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.planning.timing import retime
from lightning_recycle.planning.validation import InvalidScheduleError, validate
from lightning_recycle.visualize import gantt_svg

GRID = p.Grid(3, 4, 6)
SECONDS = draw.floats(0.0, 10.0)


def problem(buckets: int, reduce: float = 1.5, staggered: bool = True) -> p.Problem:
    costs = p.Costs.uniform(4, reduce=reduce, optimizer=0.25, buckets=buckets)
    return p.Problem(GRID, costs, frozenset({p.Worker(1, 2)}), p.Technique(staggered=staggered))


@given(SECONDS, SECONDS, draw.integers(1, 30))
def test_what_remains_is_the_end_of_the_last_bucket(reduction: float, weight: float, buckets: int) -> None:
    times = bucket_times(reduction, weight, buckets)
    assert times[-1][1] == pytest.approx(remaining(reduction, weight, buckets))
    for index, (start, end) in enumerate(times):
        assert start >= -weight * (1 - (index + 1) / buckets) - 1e-9, "summed before it was complete"
        assert end - start == pytest.approx(reduction / buckets)
    assert all(after[0] >= before[1] for before, after in pairwise(times))
    assert remaining(reduction, weight, buckets) >= remaining(reduction, weight, buckets + 1) - 1e-12


@pytest.mark.parametrize(("buckets", "left"), [(1, 1.5), (2, 1.0), (3, 5 / 6), (6, 2 / 3)])
@pytest.mark.parametrize("staggered", [True, False])
def test_the_period_has_what_remains(buckets: int, left: float, staggered: bool) -> None:
    """27 slots staggered and 29 otherwise, in the running example without REDUCE and STEP."""
    schedule = p.plan(problem(buckets, staggered=staggered))
    validate(schedule)
    assert schedule.period == pytest.approx((27 if staggered else 29) + left + 0.25)
    again = retime(p.plan(problem(1, staggered=staggered)), problem(buckets).costs)
    assert again.period == pytest.approx(schedule.period)


def shortened(schedule: Schedule, by: float) -> Schedule:
    """With a REDUCE in stage 1 that ends earlier."""
    workers = {
        worker: tuple(
            replace(op, end=op.end - by) if op.op.kind is OpKind.REDUCE and worker.stage == 1 else op for op in ops
        )
        for worker, ops in schedule.workers.items()
    }
    return replace(schedule, workers=workers)


def test_a_reduce_that_ends_before_its_last_bucket_is_refused() -> None:
    with pytest.raises(InvalidScheduleError, match=r"REDUCE@1 on \(0, 1\) takes 0\.5 instead of 0\.6"):
        validate(shortened(p.plan(problem(6)), 2 / 3 - 0.5))


def test_plan_files_tell_the_number_of_buckets_where_there_are_several() -> None:
    schedule = p.plan(problem(4))
    assert p.plan_to_json(schedule)["costs"]["buckets"] == [4] * 4
    read = read_schedule(p.plan_to_json(schedule))
    validate(read)
    assert read == schedule
    assert "buckets" not in p.plan_to_json(p.plan(problem(1)))["costs"]
    assert p.Costs.uniform(2, buckets=1) == p.Costs.uniform(2)


@pytest.mark.parametrize(("buckets", "match"), [((0, 1), "buckets=0"), ((2, 2, 2), "'buckets': 3"), ((2.5, 1), "2.5")])
def test_impossible_numbers_of_buckets_are_refused(buckets: tuple[int, ...], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        p.Costs((1.0,) * 2, (1.0,) * 2, (1.0,) * 2, (1.0,) * 2, (0.0,) * 2, buckets=buckets)


def test_the_picture_shows_each_bucket() -> None:
    assert gantt_svg(p.plan(problem(4))).count("<title>bucket") == 11 * 4
    assert "<title>bucket" not in gantt_svg(p.plan(problem(1)))
