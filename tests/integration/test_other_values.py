"""A replacement that holds other values than its peers ends the run, and the error names them."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from support.growth import AwaitReplacement
from support.models import GLOBAL_BATCH, Regression, dataset
from support.training import fit

from lightning_recycle import ReCycleError
from lightning_recycle.callbacks import Fault

LENGTH = 14  # steps


class WrongReplacement(L.Callback):
    """Changes the learning rate, on replacements only."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        if strategy.incarnation > 0:
            for group in strategy.optimizers[0].param_groups:
                group["lr"] = 0.5


def test_a_replacement_with_another_learning_rate_ends_the_run() -> None:
    with pytest.raises(ReCycleError, match="hold different values that must be the same: lr is"):
        fit(
            Regression().double(),
            2,
            1,
            [Fault("kill", 1, 0, step=2)],
            data=dataset(GLOBAL_BATCH * LENGTH),
            max_steps=LENGTH,
            strategy={"max_restarts": 10},
            callbacks=[AwaitReplacement([4]), WrongReplacement()],
        )
