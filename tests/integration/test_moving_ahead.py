"""Layers are copied to other workers while the training goes on, before they move."""

from typing import Any

import pytest
import torch
from support.models import Regression, Scheduled, dataset
from support.training import TOLERANCE, difference, exact_fit, failures, fit
from test_moving_layers import Move, moves
from torch import Tensor

from lightning_recycle.callbacks import Fault

SLOW = Fault("slow", 0, 0, step=0, factor=20.0, steps=60)  # so that copies are there before the training ends


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


@pytest.mark.parametrize("model", [Scheduled(), Adam()], ids=["SGD", "AdamW"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_what_was_copied_follows_the_steps(model: Regression, clip: float | None) -> None:
    run = exact_fit(
        model.double(),
        2,
        2,
        [SLOW],
        dataset(24 * 60),
        max_steps=60,
        callbacks=[Move({2: (1, 5), 30: (4, 2)}, ahead=True)],
        strategy={"adapt": "reroute"},
        gradient_clip_val=clip,
    )
    assert moves(run) == [(0, 1, 6), (0, 4, 6)]
    assert came_ahead(run) == [2, 2]
