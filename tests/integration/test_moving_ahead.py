"""Layers are copied to other workers while the training goes on, before they move."""

import time
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from support.models import Regression, Scheduled, dataset
from support.sampling import sampled
from support.training import TOLERANCE, difference, exact_fit, failures, fit
from test_moving_layers import KilledWhileLayersMove, Move, moves

from lightning_recycle.callbacks import Fault

pytestmark = pytest.mark.long


class Slowly(Callback):
    """Lets steps last, so that copies are there before the training ends."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step > 2:
            time.sleep(0.15)


def train(model: Regression, faults: list[Fault], **options: Any) -> L.Trainer:
    """20 steps on 2 x 2 workers; all layers of the first stage but one move after the second step."""
    return exact_fit(
        model.double(),
        2,
        2,
        faults,
        dataset(24 * 20),
        max_steps=20,
        callbacks=[Move({2: (1, 5)}, ahead=True), Slowly()],
        strategy={"adapt": "reroute"},
        **options,
    )


def came_ahead(run: Any) -> list[int]:
    """How many transfers of each move had been copied before."""
    return [event.details["ahead"] for event in run.strategy.history if event.kind == "layers_moved"]


class Adam(Scheduled):
    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.02}], lr=0.05
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5), "interval": "step"},
        }


@pytest.mark.parametrize(("model", "clip"), [(Scheduled(), None), (Adam(), 0.05)], ids=["SGD", "AdamW, clipped"])
def test_what_was_copied_follows_the_steps(model: Regression, clip: float | None) -> None:
    run = train(model, [], gradient_clip_val=clip)
    assert moves(run) == [(0, 1, 6)]
    assert came_ahead(run) == [2]


class Clamped(Adam):
    """Changes parameters between the steps of the optimizer."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.3, 0.3)


def test_what_comes_to_other_bits_is_sent_whole() -> None:
    still, moved = Clamped().double(), Clamped().double()
    data = dataset(24 * 20)
    fit(still, 2, 2, data=data, max_steps=20)
    callbacks = [Move({2: (1, 5)}, ahead=True), Slowly()]
    run = fit(moved, 2, 2, data=data, max_steps=20, callbacks=callbacks, strategy={"adapt": "reroute"})
    assert moves(run) == [(0, 1, 6)]
    assert came_ahead(run) == [0]
    assert difference(still.state_dict(), moved.state_dict()) < TOLERANCE


@pytest.mark.parametrize(("pipeline", "stage"), sampled([(d, s) for d in range(2) for s in range(2)], 2))
def test_a_worker_may_die_while_layers_are_copied(pipeline: int, stage: int) -> None:
    run = train(Adam(), [Fault("kill", pipeline, stage, step=4)])
    assert failures(run) == [(pipeline, stage)]
    assert moves(run) == [(0, 1, 6)]


def test_layers_that_draw_among_three_stages() -> None:
    still, moved = Regression(dropout=0.2).double(), Regression(dropout=0.2).double()
    data = dataset(24 * 20)
    fit(still, 2, 3, data=data, max_steps=20)
    callbacks = [Move({2: (1, 1, 7)}, ahead=True), Slowly()]
    run = fit(moved, 2, 3, data=data, max_steps=20, callbacks=callbacks, strategy={"adapt": "reroute"})
    assert moves(run) == [(0, 1, 2, 9)]
    assert came_ahead(run) == [6]
    assert difference(still.state_dict(), moved.state_dict()) < TOLERANCE


MOMENTS = 30
"""As many as each worker has in this move at least."""


@pytest.mark.parametrize(
    ("rank", "moment"), sampled([(rank, moment) for rank in range(6) for moment in range(1, MOMENTS + 1)], 2)
)
def test_a_worker_may_be_killed_at_any_moment_of_a_move_that_was_prepared(rank: int, moment: int) -> None:
    run = exact_fit(
        Adam().double(),
        2,
        3,
        data=dataset(24 * 20),
        max_steps=20,
        strategy={"adapt": "reroute"},
        callbacks=[Move({2: (1, 1, 4)}, ahead=True), Slowly(), KilledWhileLayersMove(rank, moment)],
    )
    assert moves(run) == [(0, 1, 2, 6)]
    assert failures(run) == [divmod(rank, 3)]
