"""A lost worker is replaced while the others train, and neither its loss nor its return shows in the result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support.growth import AwaitReplacement, Marks, Meanwhile, happened, kill, mark_of, rejoined
from support.models import GLOBAL_BATCH, Noisy, Regression, dataset
from support.sampling import sampled
from support.training import committed_steps, difference, failures, fit, plain_loop
from torch import Tensor

from lightning_recycle import StageLostError
from lightning_recycle.callbacks import Fault
from lightning_recycle.planning.profile import Profile, StageProfile, save_profile

TOLERANCE = 1e-10
LENGTH = 16  # steps
DATA = dataset(GLOBAL_BATCH * LENGTH)
# With a limit of micro-batches no other plan is made for all workers when memory has been measured, whenever that is.
ONE_PLAN = {"memory": "2 micro-batches", "split_backward": True}


def grow(
    model: Regression,
    faults: Sequence[Fault],
    pipelines: int = 2,
    stages: int = 2,
    wait_at: Sequence[int] = range(8, LENGTH),
    callbacks: Sequence[L.Callback] = (),
    strategy: dict[str, Any] | None = None,
    **arguments: Any,
) -> L.Trainer:
    """Trains with replacements, and waits for them at the steps ``wait_at``."""
    return fit(
        model,
        pipelines,
        stages,
        faults,
        data=arguments.pop("data", DATA),
        strategy={"max_restarts": 10, **(strategy or {})},
        callbacks=[AwaitReplacement(wait_at), *callbacks],
        **{"max_steps": LENGTH, **arguments},
    )


def check_complete(run: L.Trainer, steps: int = LENGTH) -> None:
    """At the end nobody is missing, the original plan is in force, and every step was committed once."""
    first, last = run.strategy.schedules[0], run.strategy.schedules[-1]
    assert last.failed == frozenset()
    assert all(last.program(worker) == first.program(worker) for worker in first.live_workers)
    assert committed_steps(run) == list(range(steps))


@pytest.mark.parametrize("staggered", sampled([True, False], 1, rest=pytest.mark.long))
def test_a_killed_worker_comes_back_and_the_weights_are_those_of_a_plain_loop(staggered: bool) -> None:
    model = Regression().double()
    run = grow(model, [Fault("kill", 1, 0, step=2)], strategy={"staggered": staggered, **ONE_PLAN})
    assert difference(model.state_dict(), plain_loop(Regression().double(), DATA, LENGTH)) < TOLERANCE
    assert failures(run) == rejoined(run) == [(1, 0)]
    check_complete(run)
    assert float(run.callback_metrics["recycle/rejoined_workers"]) == 1
    assert float(run.callback_metrics["recycle/live_workers"]) == 4


def test_the_survivors_train_while_the_replacement_starts(tmp_path: Path) -> None:
    slow_start = Marks(tmp_path, at="setup", seconds=1.0)
    run = grow(
        Regression().double(),
        [Fault("kill", 0, 1, step=2)],
        wait_at=range(50, 60),
        callbacks=[slow_start],
        max_steps=60,
        data=dataset(GLOBAL_BATCH * 60),
    )
    kinds = [event.kind for event in run.strategy.history]
    start, entry = kinds.index("restarting"), kinds.index("paused")
    assert kinds[start:entry].count("step") >= 3
    # Nothing but the failure's own step is redone: who enters does so between two steps.
    assert [event.step for event in happened(run, "redone")] == [2]


@pytest.mark.long
def test_the_leader_comes_back_and_does_not_take_the_lead_again() -> None:
    model = Regression().double()
    run = grow(model, [Fault("kill", 0, 1, step=2), Fault("kill", 1, 0, step=LENGTH - 1)])
    assert difference(model.state_dict(), plain_loop(Regression().double(), DATA, LENGTH)) < TOLERANCE
    assert rejoined(run)[0] == (0, 1)
    assert "train_loss" in run.callback_metrics


@pytest.mark.long
def test_clipping_dropout_and_augmentation_are_the_same_with_a_replacement() -> None:
    reference, model = (Regression(dropout=0.5, clip_scale=100.0).double() for _ in range(2))
    arguments: dict[str, Any] = {"gradient_clip_val": 0.5, "max_steps": 10}
    fit(reference, 1, 1, data=Noisy(), strategy={"seed": 7}, **arguments)
    run = grow(model, [Fault("kill", 1, 1, step=2)], data=Noisy(), wait_at=[6, 7], strategy={"seed": 7}, **arguments)
    assert rejoined(run) == [(1, 1)]
    assert difference(model.state_dict(), reference.state_dict()) < TOLERANCE


@pytest.mark.parametrize(
    ("pipelines", "stages", "lost"),
    sampled([(3, 2, [(0, 1), (2, 1)]), (2, 2, [(0, 0), (1, 1)]), (2, 2, [(1, 0), (1, 1)])], 1, rest=pytest.mark.long),
    ids=["two-of-a-stage", "two-stages", "whole-pipeline"],
)
def test_several_workers_lost_at_once_all_come_back(pipelines: int, stages: int, lost: list[tuple[int, int]]) -> None:
    model = Regression().double()
    run = grow(model, [Fault("kill", *worker, step=2) for worker in lost], pipelines, stages, strategy=ONE_PLAN)
    assert difference(model.state_dict(), plain_loop(Regression().double(), DATA, LENGTH)) < TOLERANCE
    assert sorted(failures(run)) == sorted(rejoined(run)) == lost
    check_complete(run)


@pytest.mark.parametrize("point", sampled(["setup", "recovery"], 1, rest=pytest.mark.long))
def test_a_replacement_killed_before_it_has_its_state_is_replaced_again(point: str, tmp_path: Path) -> None:
    model = Regression().double()
    with Meanwhile(lambda: mark_of(tmp_path, 2, 1), kill):
        run = grow(model, [Fault("kill", 1, 0, step=2)], callbacks=[Marks(tmp_path, at=point)], strategy=ONE_PLAN)
    assert difference(model.state_dict(), plain_loop(Regression().double(), DATA, LENGTH)) < TOLERANCE
    assert len(happened(run, "restarting")) == 2
    assert rejoined(run) == [(1, 0)]
    assert len(failures(run)) == (1 if point == "setup" else 2)  # who has not entered is no member that can fail
    check_complete(run)


@pytest.mark.long
def test_a_worker_lost_in_the_middle_of_a_recovery_comes_back_like_the_first() -> None:
    model = Regression().double()
    run = grow(model, [Fault("kill", 1, 0, step=2), Fault("kill", 0, 1, at="recovery")], strategy=ONE_PLAN)
    assert difference(model.state_dict(), plain_loop(Regression().double(), DATA, LENGTH)) < TOLERANCE
    assert sorted(failures(run)) == sorted(rejoined(run)) == [(0, 1), (1, 0)]
    check_complete(run)


@pytest.mark.long
def test_a_second_worker_may_die_while_the_first_replacement_enters(tmp_path: Path) -> None:
    def kill_other(_: int) -> None:
        other = mark_of(others, 1, 0)
        assert other is not None
        kill(other)

    entering, others = tmp_path / "entering", tmp_path / "others"
    entering.mkdir(), others.mkdir()
    model = Regression().double()
    marks = [Marks(entering, at="recovery", seconds=0.3), Marks(others)]
    with Meanwhile(lambda: mark_of(entering, 2, 1), kill_other):
        run = grow(model, [Fault("kill", 1, 0, step=2)], callbacks=marks, strategy=ONE_PLAN)
    assert difference(model.state_dict(), plain_loop(Regression().double(), DATA, LENGTH)) < TOLERANCE
    assert failures(run) == [(1, 0), (0, 1)]
    assert sorted(rejoined(run)) == [(0, 1), (1, 0)]
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
@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(9, id="last-step"),
        pytest.param(10, id="first-step", marks=pytest.mark.long),
        pytest.param(11, id="second-step", marks=pytest.mark.exhaustive),
    ],
)
def test_a_replacement_may_enter_around_the_end_of_an_epoch(entry: int) -> None:
    data = dataset(GLOBAL_BATCH * 5)
    arguments: dict[str, Any] = {"max_epochs": 4, "max_steps": -1, "data": data}
    undisturbed, model = PerEpoch().double(), PerEpoch().double()
    expected = fit(undisturbed, 2, 2, **arguments)
    run = grow(model, [Fault("kill", 0, 1, step=2)], wait_at=[entry], **arguments)
    assert difference(model.state_dict(), undisturbed.state_dict()) < TOLERANCE
    assert rejoined(run) == [(0, 1)]
    assert [event.step for event in happened(run, "paused")][-1] <= entry
    assert (run.current_epoch, run.global_step) == (expected.current_epoch, expected.global_step) == (4, 20)
    for name in ("epoch_loss", "step_loss_epoch", "step_loss_step"):
        torch.testing.assert_close(run.callback_metrics[name], expected.callback_metrics[name], rtol=1e-10, atol=1e-10)


@pytest.mark.long
def test_no_more_replacements_come_than_max_restarts() -> None:
    model = Regression().double()
    faults = [Fault("kill", 1, 0, step=2), Fault("kill", 1, 1, step=10)]
    run = grow(model, faults, wait_at=range(5, 9), strategy={"max_restarts": 1})
    assert difference(model.state_dict(), plain_loop(Regression().double(), DATA, LENGTH)) < TOLERANCE
    assert rejoined(run) == [(1, 0)]
    assert len(happened(run, "restarting")) == 1
    assert len(run.strategy.schedules[-1].failed) == 1


def test_the_loss_of_a_stage_before_a_replacement_has_come_is_an_error() -> None:
    with pytest.raises(StageLostError, match="stage 0"):
        fit(
            Regression().double(),
            2,
            2,
            [Fault("kill", 0, 0, step=2), Fault("kill", 1, 0, step=2, at="optimizer")],
            strategy={"max_restarts": 10},
        )


# ---------------------------------------------------------------------- planned departures


@pytest.mark.parametrize(
    "worker", [(1, 0), pytest.param((0, 1), marks=pytest.mark.long)], ids=["a-worker", "the-leader"]
)
def test_a_worker_told_to_end_leaves_between_two_steps_and_nothing_is_redone(worker: tuple[int, int]) -> None:
    model = Regression().double()
    run = fit(model, 2, 2, [Fault("preempt", *worker, 3, "backward_weight", when="after")])
    assert difference(model.state_dict(), plain_loop(Regression().double(), dataset())) < TOLERANCE
    assert [event.worker for event in happened(run, "left")] == [worker]
    assert not happened(run, "redone")
    assert not failures(run)
    assert committed_steps(run) == list(range(10))


def test_a_worker_told_to_end_is_replaced() -> None:
    model = Regression().double()
    run = grow(model, [Fault("preempt", 1, 1, step=2)], strategy=ONE_PLAN)
    assert difference(model.state_dict(), plain_loop(Regression().double(), DATA, LENGTH)) < TOLERANCE
    assert rejoined(run) == [(1, 1)]
    assert not happened(run, "redone")
    check_complete(run)


@pytest.mark.long
def test_the_last_holder_of_a_stage_stays_until_it_is_replaced() -> None:
    model = Regression().double()
    run = grow(model, [Fault("kill", 1, 1, step=2), Fault("preempt", 0, 1, step=3)], strategy=ONE_PLAN)
    assert difference(model.state_dict(), plain_loop(Regression().double(), DATA, LENGTH)) < TOLERANCE
    order = [(event.kind, event.worker) for event in run.strategy.history if event.kind in ("rejoined", "left")]
    # Its departure has to wait for the state of its stage to be in the replacement; then it is replaced itself.
    assert order == [("rejoined", (1, 1)), ("left", (0, 1)), ("rejoined", (0, 1))]
    check_complete(run)


def test_the_last_holder_of_a_stage_does_not_leave() -> None:
    model = Regression().double()
    run = fit(model, 1, 2, [Fault("preempt", 0, 1, step=2)])
    assert difference(model.state_dict(), plain_loop(Regression().double(), dataset())) < TOLERANCE
    assert not happened(run, "left")


# ---------------------------------------------------------------------- moves


def test_a_healthy_worker_moves_where_failures_have_piled_up(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"  # so that the plans, and the decision, do not depend on what is measured
    save_profile(profile, Profile((StageProfile(1.0, 1.0, 1.0),) * 2))
    model = Regression().double()
    faults = [Fault("kill", 1, 0, step=2), Fault("kill", 2, 0, step=4)]
    run = fit(
        model,
        3,
        2,
        faults,
        data=DATA,
        max_steps=LENGTH,
        strategy={"move_workers": True, "profile": profile},
        callbacks=[AwaitMove(10)],
    )
    assert difference(model.state_dict(), plain_loop(Regression().double(), DATA, LENGTH)) < TOLERANCE
    (moved,) = happened(run, "moved")
    assert moved.worker[1] == 1
    assert [moved.details["to"]] == rejoined(run)
    assert moved.details["to"] in failures(run)
    assert sorted(worker.stage for worker in run.strategy.schedules[-1].failed) == [0, 1]  # not two of one stage
    assert committed_steps(run) == list(range(LENGTH))


class AwaitMove(L.Callback):
    """Before ``step``, waits until no stage has lost two workers."""

    def __init__(self, step: int) -> None:
        self._wait = AwaitReplacement([step])

    def on_train_batch_start(self, trainer: L.Trainer, *arguments: Any) -> None:
        lost = set(range(6)) - set(trainer.strategy.live_workers)
        if {rank % 2 for rank in lost} == {0}:
            self._wait.on_train_batch_start(trainer, *arguments)
