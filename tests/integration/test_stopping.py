"""``trainer.should_stop``, set by a callback on all workers or on some: all stop at the same step."""

import os
import random
import signal
import threading
import time
from collections.abc import Collection
from typing import Any

import lightning as L
import pytest
import torch
from support.growth import AwaitReplacement, happened, rejoined
from support.models import GLOBAL_BATCH, Regression, dataset
from support.sampling import sampled
from support.training import difference, failures, fit, on_one_device, plain_loop
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle.callbacks import Fault

EPOCH = 4  # steps
EPOCHS = 4
DATA = dataset(GLOBAL_BATCH * EPOCH)
PASSES = TensorDataset(*(torch.cat([tensor] * EPOCHS) for tensor in DATA.tensors))


class Stops(L.Callback):
    """Asks to stop in ``hook`` from step ``step`` on, on the workers ``ranks``; counts the validations."""

    def __init__(self, hook: str, step: int, ranks: Collection[int] | None = None) -> None:
        self.validations = 0
        setattr(self, hook, self._stop)
        self._step, self._ranks = step, ranks

    def _stop(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.sanity_checking or (
            self._ranks is not None and getattr(trainer.strategy, "grid_rank", 0) not in self._ranks
        ):
            return
        if trainer.global_step >= self._step:
            trainer.should_stop = True

    def on_validation_epoch_end(self, *_: Any) -> None:
        self.validations += 1

    def state_dict(self) -> dict[str, Any]:
        return {"validations": self.validations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.validations = state["validations"]


def train(*callbacks: Any, faults: Any = (), grid: tuple[int, int] = (2, 2), **kwargs: Any) -> tuple[L.Trainer, Any]:
    model = Regression().double()
    val = DataLoader(DATA, batch_size=GLOBAL_BATCH // 2)
    run = fit(
        model, *grid, faults, data=DATA, val=val, max_epochs=EPOCHS, max_steps=-1, callbacks=list(callbacks), **kwargs
    )
    assert difference(model.state_dict(), plain_loop(Regression().double(), PASSES, run.global_step)) < 1e-10
    return run, model


@pytest.mark.parametrize(("hook", "step"), [
    pytest.param("on_train_start", 0, marks=pytest.mark.long),
    ("on_train_batch_end", 6),
    ("on_validation_end", 6),
    *(
        pytest.param(hook, step, marks=pytest.mark.exhaustive)
        for hook, step in [
            ("on_fit_start", 0),
            ("on_train_epoch_start", 0),
            ("on_train_epoch_start", 3),
            ("on_train_batch_start", 6),
            ("on_before_optimizer_step", 6),
            ("on_validation_start", 6),
            ("on_validation_batch_end", 6),
            ("on_train_epoch_end", 6),
        ]
    ),
])  # fmt: skip
def test_where_all_workers_ask_they_stop_like_a_single_device(hook, step):
    alone, ours = Stops(hook, step), Stops(hook, step)
    expected = on_one_device(max_epochs=EPOCHS, max_steps=-1, callbacks=[alone])
    loader = DataLoader(DATA, batch_size=GLOBAL_BATCH)
    expected.fit(Regression().double(), loader, loader)
    run, _ = train(ours)
    assert (run.global_step, run.current_epoch, ours.validations) == (
        expected.global_step,
        expected.current_epoch,
        alone.validations,
    )
    assert ours.validations >= step // EPOCH
    assert run.should_stop == expected.should_stop
    assert not happened(run, "stop_requested")


@pytest.mark.parametrize(
    "ranks",
    [{3}, pytest.param({0}, marks=pytest.mark.exhaustive), pytest.param({0, 1, 2}, marks=pytest.mark.exhaustive)],
)
@pytest.mark.parametrize(("hook", "step"), [
    ("on_train_batch_end", 6),
    *(
        pytest.param(hook, step, marks=pytest.mark.exhaustive)
        for hook, step in [
            ("on_train_start", 0),
            ("on_train_epoch_start", 4),
            ("on_train_batch_start", 6),
            ("on_before_optimizer_step", 6),
            ("on_validation_end", 6),
            ("on_train_epoch_end", 6),
        ]
    ),
])  # fmt: skip
def test_where_only_some_ask_all_stop_together_after_one_of_the_next_steps(hook, step, ranks):
    run, _ = train(Stops(hook, step, ranks))
    assert step < run.global_step <= step + 4  # the hooks of validations and epochs come when those end
    assert run.should_stop
    assert len(happened(run, "stop_requested")) == 1
    assert not happened(run, "disturbance")


class OwnClock(L.Callback):
    """One worker asks to stop after a while of its own, in any hook of a step; then it may die."""

    def __init__(self, rank: int, seconds: float, dies: bool) -> None:
        self._rank, self._seconds, self._dies = rank, seconds, dies
        self._begun = 0.0

    def on_train_start(self, *_: Any) -> None:
        self._begun = time.monotonic()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        time.sleep(0.02)
        if getattr(trainer.strategy, "grid_rank", 0) == self._rank and time.monotonic() - self._begun > self._seconds:
            trainer.should_stop = True
            if self._dies:
                threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGKILL)).start()


@pytest.mark.parametrize("seed", sampled(range(2), 1, rest=pytest.mark.long))
def test_a_worker_that_asks_by_its_own_clock_and_dies_leaves_the_others_well(seed):
    draw = random.Random(seed)
    clock = OwnClock(draw.randrange(6), draw.uniform(0.05, 0.3), dies=True)
    run, _ = train(clock, grid=(3, 2))
    assert len(failures(run)) <= 1  # it dies while it waits for the answer, or after the run
    assert not happened(run, "disturbance")


@pytest.mark.long
def test_who_joins_after_all_have_agreed_to_stop_stops_with_them():
    faults = [Fault("kill", 1, 0, step=3)]
    strategy = {"max_restarts": 10}
    run, _ = train(
        Stops("on_train_batch_end", 2), AwaitReplacement([5]), faults=faults, strategy=strategy, min_steps=10
    )
    assert (run.global_step, rejoined(run), happened(run, "stop_requested")) == (10, [(1, 0)], [])
