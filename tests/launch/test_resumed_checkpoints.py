"""With which grid and workers a run starts again after the loss of a stage, and when it does not."""

import pytest

from lightning_recycle.control.options import RecoveryOptions
from lightning_recycle.launch.resume_and_restart import RestartPolicy, Start
from lightning_recycle.planning.grid import Grid, Positions

GRID = Grid(4, 2, 3)
POSITIONS = Positions(GRID)
LANES = Positions(Grid(4, 2, 3, lanes=6))
RECOVERY = RecoveryOptions()


@pytest.mark.parametrize(("devices", "workers"), [(9, 4), (8, 4), (7, 3), (6, 3), (5, 2), (2, 1)])
def test_the_run_begins_on_the_same_grid_with_the_workers_that_there_are(devices, workers):
    assert RestartPolicy(POSITIONS, RECOVERY).next_start(4, devices, 9) == Start(GRID, workers, least=workers)


@pytest.mark.parametrize(("devices", "workers", "least"), [(14, 6, 4), (12, 6, 4), (11, 5, 4), (8, 4, 4), (4, 2, 2)])
def test_lanes_beyond_the_pipelines_are_used_if_there_are_devices(devices, workers, least):
    assert RestartPolicy(LANES, RECOVERY).next_start(4, devices, 9) == Start(LANES.grid, workers, least)


@pytest.mark.parametrize(("devices", "least"), [(12, 3), (6, 3), (4, 2)])
def test_no_more_workers_are_waited_for_than_at_the_first_start(devices, least):
    start = RestartPolicy(LANES, RecoveryOptions(min_pipelines=3)).next_start(4, devices, 9)
    assert isinstance(start, Start)
    assert start.least == least


@pytest.mark.parametrize(("devices", "pipelines"), [(16, 4), (15, 3), (9, 2), (5, 1)])
def test_positions_of_several_members_are_all_held_by_a_grid_of_fewer_pipelines(devices, pipelines):
    grid = Grid(pipelines, 2, 12 // pipelines)
    assert RestartPolicy(Positions(GRID, 2), RECOVERY).next_start(4, devices, 9) == Start(grid, pipelines, pipelines)


def test_their_pipelines_divide_the_micro_batches():
    start = RestartPolicy(Positions(Grid(4, 1, 1), 2), RECOVERY).next_start(4, 6, 9)
    assert start == Start(Grid(2, 1, 2), 2, 2)


def test_devices_that_come_back_are_used_again():
    policy = RestartPolicy(POSITIONS, RECOVERY)
    assert policy.next_start(4, 4, 6) == Start(GRID, 2, 2)
    assert policy.next_start(8, 8, 9) == Start(GRID, 4, 4)


@pytest.mark.parametrize(("saved", "devices", "why"), [(None, 8, "needs a checkpoint"), (4, 1, "1 of the 8 devices")])
def test_there_is_no_start_without_a_checkpoint_or_devices(saved, devices, why):
    refused = RestartPolicy(POSITIONS, RECOVERY).next_start(saved, devices, 9)
    assert isinstance(refused, str)
    assert why in refused


@pytest.mark.parametrize(("max_restarts", "most"), [(2, 2), (0, 10)])
def test_restarts_are_counted_until_a_newer_checkpoint_is_there(max_restarts, most):
    policy = RestartPolicy(POSITIONS, RecoveryOptions(max_restarts=max_restarts))
    losses = [(4, 10 * n) for n in range(most)] + [(8, 10 * n) for n in range(most + 1)]
    assert [isinstance(policy.next_start(saved, 8, at), Start) for saved, at in losses] == [True] * 2 * most + [False]


def starts(lost_at: list[int]) -> list[bool]:
    """Whether the run starts again after each of these losses from the same checkpoint."""
    policy = RestartPolicy(POSITIONS, RECOVERY)
    return [isinstance(policy.next_start(4, 8, at), Start) for at in lost_at]


@pytest.mark.parametrize("lost_at", [[6, 6, 6], [9, 6, 6, 6], [6, 5, 6], [5, 6, 6], [-1, -1, -1]])
def test_a_run_that_is_lost_in_the_same_place_again_and_again_ends(lost_at):
    assert starts(lost_at) == [True] * (len(lost_at) - 1) + [False]


@pytest.mark.parametrize("lost_at", [[6, 6, 9, 9, 6, 6], [6, 8, 10, 12], [12, 9, 6]])
def test_losses_in_other_places_are_no_repetition(lost_at):
    assert all(starts(lost_at))


def test_a_run_that_gets_a_step_further_with_each_restart_goes_on():
    policy = RestartPolicy(POSITIONS, RECOVERY)
    assert all(isinstance(policy.next_start(saved, 8, saved), Start) for saved in range(4, 9))
