"""From what workers measured to the memory of a plan."""

import pytest

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning import Grid, Worker
from lightning_recycle.planning.costs import Footprint, is_memory_limit, memory_of
from lightning_recycle.planning.planner import PlanningOptions

GRID = Grid(2, 2, 3)


def footprint(place: str = "a", **changes: int) -> Footprint:
    sizes = {
        "capacity": 1000, "overhead": 10, "fixed": 100, "messages": 5, "after_forward": 20, "after_backward": 30,
        "checkpoint": 4,
    }  # fmt: skip
    return Footprint(place, **{**sizes, **changes})


def everywhere(**changes: int) -> dict[Worker, Footprint]:
    return {worker: footprint(**changes) for worker in GRID.workers()}


@pytest.mark.parametrize(
    ("limit", "capacity"), [("auto", 0.9 * 250 - 10), (0.5, 0.5 * 250 - 10), (777, 777), (1.0, 240)]
)
def test_workers_of_one_place_share_it(limit, capacity):
    memory = memory_of(GRID, (), everywhere(), limit)
    assert memory.capacity == (capacity, capacity)
    assert memory.fixed == (100 + 3 * 5,) * 2
    assert (memory.after_forward, memory.after_backward) == ((20, 20), (30, 30))


def test_each_accelerator_is_a_place_of_its_own():
    footprints = {worker: footprint(f"gpu{GRID.rank(worker)}") for worker in GRID.workers()}
    assert memory_of(GRID, (), footprints, 1.0).capacity == (990, 990)


def test_the_largest_of_a_stage_and_the_smallest_device_count():
    footprints = everywhere() | {Worker(1, 1): footprint("b", capacity=60, after_forward=21, fixed=101)}
    memory = memory_of(GRID, (), footprints, 1.0)
    assert memory.capacity == pytest.approx((1000 / 3 - 10, 50))
    assert memory.fixed == (115, 116)
    assert memory.after_forward == (20, 21)


def test_survivors_have_buffers_for_the_messages_of_the_dead():
    assert memory_of(GRID, {Worker(0, 1)}, everywhere(), "auto").fixed == (115, 130)


def test_there_is_room_for_what_one_operation_takes_while_it_runs():
    footprints = everywhere() | {Worker(1, 0): footprint(fixed=90, temporary=40)}
    assert memory_of(GRID, (), footprints, "auto").fixed == (145, 115)


def test_what_the_process_needs_may_be_more_than_its_share():
    assert memory_of(GRID, (), everywhere(overhead=5000), "auto").capacity == (0, 0)


@pytest.mark.parametrize("limit", [0, -1, 0.0, 1.5, True, "all", None, float("nan")])
def test_what_is_no_limit_is_refused(limit):
    assert not is_memory_limit(limit)
    with pytest.raises(ConfigurationError, match=r"PlanningOptions\(memory=.*: give 'auto', the bytes of a worker"):
        PlanningOptions(memory=limit)


@pytest.mark.parametrize("limit", ["auto", 1, 8_000_000_000, 0.1, 1.0])
def test_limits(limit):
    assert is_memory_limit(limit)
    assert (PlanningOptions(memory=limit).memory_limit, PlanningOptions(memory=limit).in_flight_limit) == (limit, None)


@pytest.mark.parametrize(("limit", "number"), [("1 micro-batch", 1), ("4 micro-batches", 4), ("12 microbatches", 12)])
def test_a_limit_in_micro_batches_replaces_one_in_bytes(limit, number):
    assert PlanningOptions(memory=limit).in_flight_limit == number
    assert PlanningOptions(memory=limit).memory_limit == "auto"


@pytest.mark.parametrize("limit", ["0 micro-batches", "micro-batches", "-1 micro-batches", "4", "4 batches"])
def test_what_is_no_number_of_micro_batches_is_refused(limit):
    with pytest.raises(ConfigurationError, match="such as '4 micro-batches'"):
        PlanningOptions(memory=limit)
