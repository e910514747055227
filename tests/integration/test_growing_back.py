"""A lost worker is replaced while the others train, and neither its loss nor its return shows in the result."""

from pathlib import Path
from typing import Any

import lightning as L
from support.growth import AwaitReplacement, happened
from support.models import Regression
from support.training import committed_steps, exact_fit
from support.waiting import wait_for

from lightning_recycle.callbacks import Fault


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
    # With a limit of micro-batches no other plan is made for all workers when memory has been measured.
    strategy = {"max_restarts": 10, "memory": "2 micro-batches", "split_backward": True}
    callbacks = [AwaitReplacement(range(14, 20)), SlowStart(10, tmp_path / "done")]
    faults = [Fault("kill", 0, 1, step=2)]
    run = exact_fit(Regression().double(), 2, 2, faults, max_steps=20, callbacks=callbacks, strategy=strategy)
    kinds = [event.kind for event in run.strategy.history]
    start, entry = kinds.index("restarting"), kinds.index("paused")
    assert kinds[start:entry].count("step") >= 3
    # Nothing but the failure's own step is redone: who enters does so between two steps.
    assert [event.step for event in happened(run, "redone")] == [2]
    assert committed_steps(run) == list(range(20))
    first, last = run.strategy.schedules[0], run.strategy.schedules[-1]
    assert last.failed == frozenset()
    assert all(last.program(worker) == first.program(worker) for worker in first.live_workers)
    metrics = run.callback_metrics
    assert (metrics["recycle/rejoined_workers"], metrics["recycle/live_workers"]) == (1, 4)
