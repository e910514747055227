"""Which grid a run starts again on after the loss of a stage, and when it does not."""

import pytest

from lightning_recycle.control.protocol.positions import Positions
from lightning_recycle.launch.resume import RestartPolicy
from lightning_recycle.planning.grid import Grid

GRID = Grid(4, 2, 3)
POSITIONS = Positions(GRID)


@pytest.mark.parametrize(("devices", "pipelines"), [(9, 4), (8, 4), (7, 3), (6, 3), (5, 2), (2, 1)])
def test_the_grid_has_the_pipelines_that_the_devices_allow(devices: int, pipelines: int) -> None:
    grid = RestartPolicy(POSITIONS, 10).next_grid(4, devices)
    assert grid == Grid(pipelines, 2, 12 // pipelines)


def test_pipelines_divide_the_micro_batches() -> None:
    assert RestartPolicy(Positions(Grid(4, 1, 1)), 10).next_grid(4, 3) == Grid(2, 1, 2)


@pytest.mark.parametrize(("devices", "pipelines"), [(16, 4), (15, 3), (9, 2), (5, 1)])
def test_a_position_takes_as_many_devices_as_it_has_members(devices: int, pipelines: int) -> None:
    assert RestartPolicy(Positions(GRID, 2), 10).next_grid(4, devices) == Grid(pipelines, 2, 12 // pipelines)


def test_devices_that_come_back_are_used_again() -> None:
    policy = RestartPolicy(POSITIONS, 10)
    assert policy.next_grid(4, 4) == Grid(2, 2, 6)
    assert policy.next_grid(8, 8) == GRID


@pytest.mark.parametrize(("saved", "devices", "why"), [(None, 8, "needs a checkpoint"), (4, 1, "1 of the 8 devices")])
def test_there_is_no_start_without_a_checkpoint_or_devices(saved: int | None, devices: int, why: str) -> None:
    refused = RestartPolicy(POSITIONS, 10).next_grid(saved, devices)
    assert isinstance(refused, str)
    assert why in refused


def test_restarts_are_counted_until_a_newer_checkpoint_is_there() -> None:
    policy = RestartPolicy(POSITIONS, 2)
    steps = [4, 4, 8, 8, 8]
    assert [isinstance(policy.next_grid(step, 8), Grid) for step in steps] == [True, True, True, True, False]
    assert isinstance(RestartPolicy(POSITIONS, 0).next_grid(4, 8), str)
