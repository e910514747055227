"""A lost worker is replaced while the others train, and neither its loss nor its return shows in the result."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support.growth import AwaitReplacement, Marks, Meanwhile, happened, kill, mark_of, rejoined
from support.models import GLOBAL_BATCH, Noisy, Regression, dataset
from support.sampling import sampled
from support.training import TOLERANCE, committed_steps, difference, exact_fit, failures, fit
from support.waiting import wait_for
from torch import Tensor

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


@pytest.mark.long
def test_the_leader_comes_back_and_does_not_take_the_lead_again():
    run = grow([Fault("kill", 0, 1, step=2), Fault("kill", 1, 0, step=LENGTH - 1)])
    assert rejoined(run)[0] == (0, 1)
    assert "train_loss" in run.callback_metrics


@pytest.mark.long
def test_clipping_dropout_and_augmentation_are_the_same_with_a_replacement():
    reference, model = (Regression(dropout=0.5, clip_scale=100.0).double() for _ in range(2))
    arguments: dict[str, Any] = {"gradient_clip_val": 0.5, "data": Noisy()}
    fit(reference, 1, 1, strategy={"seed": 7}, **arguments)
    strategy, callbacks = {"seed": 7, "max_restarts": 10}, [AwaitReplacement([6, 7])]
    run = fit(model, 2, 2, [Fault("kill", 1, 1, step=2)], callbacks=callbacks, strategy=strategy, **arguments)
    assert rejoined(run) == [(1, 1)]
    assert difference(model.state_dict(), reference.state_dict()) < TOLERANCE


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


@pytest.mark.long
@pytest.mark.parametrize("point", sampled(["setup", "recovery"], 1, rest=pytest.mark.long))
def test_a_replacement_killed_before_it_has_its_state_is_replaced_again(point, tmp_path):
    with Meanwhile(lambda: mark_of(tmp_path, 2, 1), kill):
        run = grow([Fault("kill", 1, 0, step=2)], callbacks=[Marks(tmp_path, at=point)], strategy=ONE_PLAN)
    assert len(happened(run, "restarting")) == 2
    assert rejoined(run) == [(1, 0)]
    assert len(failures(run)) == (1 if point == "setup" else 2)  # who has not entered is not a member that can fail
    check_complete(run)


class PerEpoch(Regression):
    """Logs per epoch, with a learning rate that falls every epoch."""

    def on_training_loss(self, loss: Tensor) -> None:
        self.log("epoch_loss", loss, on_step=False, on_epoch=True)
        self.log("step_loss", loss, on_step=True, on_epoch=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


@pytest.mark.long
@pytest.mark.parametrize("entry", [
    pytest.param(9, id="last-step"),
    pytest.param(10, id="first-step", marks=pytest.mark.long),
    pytest.param(11, id="second-step", marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_a_replacement_may_enter_around_the_end_of_an_epoch(entry):
    data = dataset(GLOBAL_BATCH * 5)
    arguments: dict[str, Any] = {"max_epochs": 4, "max_steps": -1, "data": data}
    undisturbed, model = PerEpoch().double(), PerEpoch().double()
    expected = fit(undisturbed, 2, 2, **arguments)
    callbacks, strategy = [AwaitReplacement([entry])], {"max_restarts": 10}
    run = fit(model, 2, 2, [Fault("kill", 0, 1, step=2)], callbacks=callbacks, strategy=strategy, **arguments)
    assert difference(model.state_dict(), undisturbed.state_dict()) < TOLERANCE
    assert rejoined(run) == [(0, 1)]
    assert [event.step for event in happened(run, "paused")][-1] <= entry
    assert (run.current_epoch, run.global_step) == (expected.current_epoch, expected.global_step) == (4, 20)
    for name in ("epoch_loss", "step_loss_epoch", "step_loss_step"):
        torch.testing.assert_close(run.callback_metrics[name], expected.callback_metrics[name], rtol=1e-10, atol=1e-10)


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


@pytest.mark.long
def test_a_worker_told_to_end_is_replaced():
    run = grow([Fault("preempt", 1, 1, step=2)], strategy=ONE_PLAN)
    assert rejoined(run) == [(1, 1)]
    assert not happened(run, "redone")
    check_complete(run)
