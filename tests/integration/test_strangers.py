"""Strangers at the ports of the workers, before, while and after workers are killed: the run is as without them."""

import os
import time
from typing import Any

import lightning as L
import pytest
from support.growth import AwaitReplacement
from support.models import GLOBAL_BATCH, Regression, dataset
from support.strangers import strangers_at
from support.training import TOLERANCE, committed_steps, difference, failures, fit, plain_loop

from lightning_recycle.callbacks import Fault

STEPS = 30


class Unhurried(L.Callback):
    """Gives strangers time before and after the faults."""

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(0.05)


def evictions(run: L.Trainer) -> list[Any]:
    return [event for event in run.strategy.history if event.kind in ("suspected", "evicted", "disturbance")]


@pytest.mark.long
def test_a_run_with_a_kill_goes_on_among_strangers():
    model, data = Regression().double(), dataset(GLOBAL_BATCH * STEPS)
    expected = plain_loop(model, data, STEPS)
    faults = [Fault("kill", pipeline=1, stage=0, step=10), Fault("kill", pipeline=2, stage=1, step=20)]
    with strangers_at(os.getpid(), seed=20_261_122, count=2) as tallies:
        run = fit(model, 3, 2, faults, data=data, max_steps=STEPS, callbacks=[Unhurried()])
    assert difference(model.state_dict(), expected) < TOLERANCE
    assert committed_steps(run) == list(range(STEPS))
    assert failures(run) == [(1, 0), (2, 1)]
    assert not evictions(run)
    assert sum(tally.tried for tally in tallies) > 50


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_loses_and_replaces_workers_goes_on_among_strangers(seed):
    steps = 90
    model, data = Regression().double(), dataset(GLOBAL_BATCH * steps)
    expected = plain_loop(model, data, steps)
    faults = [Fault("kill", pipeline=i % 2, stage=i // 2 % 2, step=10 + 20 * i) for i in range(4)]
    with strangers_at(os.getpid(), seed=100 * seed, count=2) as tallies:
        callbacks = [Unhurried(), AwaitReplacement([9 + 20 * i for i in range(1, 4)])]
        run = fit(model, 2, 2, faults, data=data, max_steps=steps, strategy={"max_restarts": 10}, callbacks=callbacks)
    assert difference(model.state_dict(), expected) < TOLERANCE
    assert committed_steps(run) == list(range(steps))
    assert len(failures(run)) == len(faults)
    assert not evictions(run)
    assert sum(tally.tried for tally in tallies) > 1000
