"""A lost worker is replaced while the others train, and neither its loss nor its return shows in the result."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from support.growth import AwaitReplacement, happened, rejoined
from support.models import Regression
from support.sampling import sampled
from support.training import committed_steps, exact_fit, failures
from support.waiting import wait_for

from lightning_recycle.callbacks import Fault

LENGTH = 16  # steps
# With a limit of micro-batches no other plan is made for all workers when memory has been measured, whenever that is.
ONE_PLAN = {"memory": "2 micro-batches", "split_backward": True}


def grow(
    faults: Sequence[Fault],
    grid: tuple[int, int] = (2, 2),
    wait_at: Sequence[int] = range(8, LENGTH),
    callbacks: Sequence[L.Callback] = (),
    strategy: dict[str, Any] | None = None,
    **arguments: Any,
) -> L.Trainer:
    """Trains exactly, with replacements, and waits for them at the steps ``wait_at``."""
    options = {"max_steps": LENGTH, "strategy": {"max_restarts": 10, **(strategy or {})}, **arguments}
    return exact_fit(Regression().double(), *grid, faults, callbacks=[AwaitReplacement(wait_at), *callbacks], **options)


def check_complete(run: L.Trainer, steps: int = LENGTH) -> None:
    """At the end nobody is missing, the original plan is in force, and every step was committed once."""
    first, last = run.strategy.schedules[0], run.strategy.schedules[-1]
    assert last.failed == frozenset()
    assert all(last.program(worker) == first.program(worker) for worker in first.live_workers)
    assert committed_steps(run) == list(range(steps))


class SlowStart(L.Callback):
    """A replacement is not set up before the others have trained ``steps`` steps."""

    def __init__(self, steps: int, done: Path) -> None:
        self._steps, self._done = steps, done

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if trainer.strategy.incarnation == 1:
            trainer.strategy.at_point.append(lambda point, _: point == "setup" and wait_for(self._done.exists))

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self._steps:
            self._done.touch()


def test_the_survivors_train_while_the_replacement_starts(tmp_path):
    slow_start = SlowStart(10, tmp_path / "done")
    run = grow([Fault("kill", 0, 1, step=2)], wait_at=range(14, 20), callbacks=[slow_start], max_steps=20)
    kinds = [event.kind for event in run.strategy.history]
    start, entry = kinds.index("restarting"), kinds.index("paused")
    assert kinds[start:entry].count("step") >= 3
    # Nothing but the failure's own step is redone: who enters does so between two steps.
    assert [event.step for event in happened(run, "redone")] == [2]


@pytest.mark.parametrize(
    ("grid", "lost"),
    sampled(
        [((3, 2), [(0, 1), (2, 1)]), ((2, 2), [(0, 0), (1, 1)]), ((2, 2), [(1, 0), (1, 1)])], 1, rest=pytest.mark.long
    ),
    ids=["two-of-a-stage", "two-stages", "whole-pipeline"],
)
def test_several_workers_lost_at_once_all_come_back(grid, lost):
    run = grow([Fault("kill", *worker, step=2) for worker in lost], grid, strategy=ONE_PLAN)
    assert sorted(failures(run)) == sorted(rejoined(run)) == lost
    check_complete(run)
    assert float(run.callback_metrics["recycle/rejoined_workers"]) == len(lost)
    assert float(run.callback_metrics["recycle/live_workers"]) == grid[0] * grid[1]


# ---------------------------------------------------------------------- planned departures


@pytest.mark.parametrize(
    "worker", [(1, 0), pytest.param((0, 1), marks=pytest.mark.long)], ids=["a-worker", "the-leader"]
)
def test_a_worker_told_to_end_leaves_between_two_steps_and_nothing_is_redone(worker):
    run = exact_fit(Regression().double(), 2, 2, [Fault("preempt", *worker, 3, "backward_weight", when="after")])
    assert [event.worker for event in happened(run, "left")] == [worker]
    assert not happened(run, "redone")
    assert not failures(run)
    assert committed_steps(run) == list(range(10))
