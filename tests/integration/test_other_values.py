"""A replacement that holds other values than most workers goes, and nothing of it stays in the weights."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from support.growth import AwaitReplacement, happened, rejoined
from support.models import GLOBAL_BATCH, Regression, dataset
from support.sampling import sampled
from support.training import committed_steps, difference, failures, fit, plain_loop

from lightning_recycle import ReCycleError
from lightning_recycle.callbacks import Fault

TOLERANCE = 1e-10
LENGTH = 14  # steps
DATA = dataset(GLOBAL_BATCH * LENGTH)


class WrongReplacement(L.Callback):
    """Changes the learning rate, on a position's first ``wrong`` replacements only."""

    def __init__(self, wrong: int) -> None:
        self._wrong = wrong

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        if 0 < strategy.incarnation <= self._wrong:
            for group in strategy.optimizers[0].param_groups:
                group["lr"] = 0.5


def grow(model: Regression, pipelines: int, stages: int, wrong: int) -> L.Trainer:
    """Loses worker (1, 0); its first replacements, which come at steps 4 and 8, are ``wrong``."""
    return fit(
        model,
        pipelines,
        stages,
        [Fault("kill", 1, 0, step=2)],
        data=DATA,
        max_steps=LENGTH,
        strategy={"max_restarts": 10},
        callbacks=[AwaitReplacement([4, 8]), WrongReplacement(wrong)],
    )


@pytest.mark.parametrize("stages", sampled([1, 2], 1, rest=pytest.mark.long))
def test_a_replacement_with_another_learning_rate_is_evicted_and_the_weights_are_exact(stages: int) -> None:
    model = Regression().double()
    run = grow(model, 3, stages, wrong=1)
    (found,) = happened(run, "outvoted")
    assert found.worker == (1, 0)
    assert "lr is " in found.details["cause"]
    assert not found.details["stays_empty"]
    assert failures(run) == rejoined(run) == [(1, 0)] * 2
    assert difference(model.state_dict(), plain_loop(Regression().double(), DATA, LENGTH)) < TOLERANCE
    assert committed_steps(run) == list(range(LENGTH))


@pytest.mark.long
def test_after_two_such_evictions_the_position_stays_empty() -> None:
    model = Regression().double()
    run = grow(model, 3, 1, wrong=100)
    assert not happened(run, "corruption")  # its device is well
    assert [found.details["stays_empty"] for found in happened(run, "outvoted")] == [False, True]
    assert len(happened(run, "restarting")) == 2
    assert difference(model.state_dict(), plain_loop(Regression().double(), DATA, LENGTH)) < TOLERANCE
    assert committed_steps(run) == list(range(LENGTH))


def test_of_two_that_differ_nobody_knows_who_is_right() -> None:
    with pytest.raises(ReCycleError, match="hold different values that must be the same: lr is"):
        grow(Regression().double(), 2, 1, wrong=1)
