"""Restarts from a checkpoint after the loss of a stage: whether there is another one, and on which grid. Pure.

The processes that happen to be alive say nothing about the next grid: a new process starts on every device that the
engine still has. A loss that comes back before the run has written a newer checkpoint would come back forever, so the
number of such restarts is bounded.
"""

from __future__ import annotations

from lightning_recycle.planning.grid import Grid

__all__ = ["RestartPolicy"]


class RestartPolicy:
    """Decides about the restarts of one run.

    Args:
        grid: the grid that the run began with; no restart has a larger one.
        max_restarts: how many restarts there may be without a newer checkpoint in between.
    """

    def __init__(self, grid: Grid, max_restarts: int) -> None:
        self._grid, self._max_restarts = grid, max_restarts
        self._newest = -1
        self._without_progress = 0

    def next_grid(self, saved_step: int | None, devices: int) -> Grid | str:
        """Returns the grid of the next start, or why there is none.

        Args:
            saved_step: the step of the newest checkpoint that the run has written; None if no checkpoint can be read.
            devices: the number of devices that workers can be started on.
        """
        if saved_step is None:
            return (
                "on_stage_lost='restart' needs a checkpoint of this run that is whole, and there is none:"
                " ModelCheckpoint(every_n_train_steps=...) writes them more often"
            )
        if saved_step > self._newest:
            self._newest, self._without_progress = saved_step, 0
        if self._without_progress >= self._max_restarts:
            return (
                f"it has been restarted {self._without_progress} times from the checkpoint of step {saved_step} without"
                " reaching a newer one (max_restarts), so whatever ends the workers comes back. Find its cause, or save"
                " more often"
            )
        grid = _largest_grid(self._grid, devices)
        if grid is None:
            return (
                f"{devices} of the {self._grid.num_workers} devices are left, too few for {self._grid.stages} stages"
                " with the same global batch"
            )
        self._without_progress += 1
        return grid


def _largest_grid(grid: Grid, devices: int) -> Grid | None:
    """The grid with as many pipelines as ``devices`` allow that computes the same global micro-batches, if any."""
    most = min(devices // grid.stages, grid.pipelines)
    for pipelines in range(most, 0, -1):
        if grid.global_microbatches % pipelines == 0:
            return Grid(pipelines, grid.stages, grid.global_microbatches // pipelines)
    return None
