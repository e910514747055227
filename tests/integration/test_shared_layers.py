"""Neighbouring stages share layers: nothing changes but who runs them."""

import os
import random
import signal
import time
from ast import literal_eval
from collections.abc import Collection
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback
from support.models import GLOBAL_BATCH, Regression, Scheduled, dataset
from support.sampling import sampled
from support.training import TOLERANCE, difference, exact_fit, failures, fit, on_one_device
from test_buckets import MOMENTS as MOMENTS_OF_A_SUM
from test_buckets import Watcher
from test_moving_layers import SHARED, STAY, Move, moves
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_recycle import ConfigurationError
from lightning_recycle.callbacks import Fault
from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.model.layers import AbsentLayer
from lightning_recycle.runtime.communicator import CommunicationError
from lightning_recycle.runtime.gradients import BucketedReduction


@pytest.mark.parametrize("staggered", sampled([True, False], 1, rest=pytest.mark.long))
@pytest.mark.parametrize(
    "fault",
    sampled(
        [
            Fault("kill", pipeline, stage, 5, at=at, when=when)
            for pipeline in range(2)
            for stage in range(3)
            for at in ("forward", "backward_input", "reduce", "optimizer")
            for when in ("before", "after")
        ],
        1,
    ),
    ids=str,
)
def test_a_worker_dies_while_stages_share_layers(fault, staggered):
    callbacks = [Move(SHARED)]
    run = exact_fit(Scheduled().double(), 2, 3, [fault], callbacks=callbacks, strategy={**STAY, "staggered": staggered})
    assert failures(run) == [(fault.pipeline, fault.stage)]
    assert len(moves(run)) == 1


class Asks(Callback):
    """Asks for layouts that cannot be."""

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        with pytest.raises(ConfigurationError, match="a whole layer of its own"):
            trainer.strategy.move_layers([1.5, 0.9, 3.6])
        for sizes in ([1.5, 2.5, 1.5], [6, 0, 0], [1, 5], [1, 1, 2, 2]):
            with pytest.raises(ConfigurationError, match="is not a layout of 6 layers over 3 stages: give each"):
                trainer.strategy.move_layers(sizes)


def test_what_is_no_layout_is_refused():
    fit(Regression().double(), 1, 3, callbacks=[Asks()], max_steps=1, strategy=STAY)


class Halves(Callback):
    """Changes gradients in place, where users do."""

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class PartsWays(Callback):
    """In ``step`` workers part ways once all gradients are summed.

    One is killed, those in ``lack`` lack the sums, as if they had not arrived, and the others have them, and step.
    """

    def __init__(self, step: int, killed: int, lack: Collection[int]) -> None:
        self.step, self.killed, self.lack = step, killed, lack

    def on_fit_start(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        if strategy.executor is None:
            return
        original, rank = BucketedReduction.finish, strategy.grid_rank
        is_moved = 1  # the layers, which takes two generations

        def sums(reduction: BucketedReduction) -> None:
            due = trainer.global_step == self.step and strategy.generation == 1 + is_moved
            original(reduction)
            if due and rank in {self.killed, *self.lack}:
                time.sleep(0.3)  # the others step
                if rank == self.killed:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise CommunicationError("as if the last part had not arrived")

        BucketedReduction.finish = sums


def ways(seed: int) -> tuple[int, list[int]]:
    """Of six workers, who is killed, and who lacks the sums."""
    chance = random.Random(seed)
    killed = chance.randrange(6)
    likely = [chance.choice((0.0, 0.5, 1.0)) for _ in range(3)]  # of each stage
    return killed, [rank for rank in range(6) if rank != killed and chance.random() < likely[rank % 3]]


@pytest.mark.parametrize("kind", sampled(["staggered", "together", "clipped"], 1, rest=pytest.mark.long))
@pytest.mark.parametrize("seed", sampled(range(16), 1))
def test_some_workers_have_the_sums_over_two_stages_and_others_do_not(seed, kind):
    killed, lack = ways(seed)
    run = exact_fit(
        Scheduled(clip_scale=100.0 if kind == "clipped" else 1.0).double(),
        2,
        3,
        callbacks=[Move(SHARED), PartsWays(5, killed, lack)],
        strategy={**STAY, "staggered": kind != "together"},
        gradient_clip_val=0.05 if kind == "clipped" else None,
    )
    assert failures(run) == [divmod(killed, 3)]
    assert len(moves(run)) == 1


@pytest.mark.parametrize(("cap", "split_backward"), sampled([(1e-4, True), (None, False)], 1, rest=pytest.mark.long))
@pytest.mark.parametrize(
    ("worker", "number", "moment"),
    sampled(
        [
            (worker, number, moment)
            for worker in [(pipeline, stage) for pipeline in range(2) for stage in range(3)]
            for number in range(2 if worker[1] == 1 else 1)
            for moment in MOMENTS_OF_A_SUM
        ],
        1,
    ),
)
def test_a_worker_dies_while_gradients_are_summed(worker, number, moment, cap, split_backward):
    dies = Watcher(kill=(worker, number, moment), step=5)
    strategy = {**STAY, "bucket_cap_mb": cap, "split_backward": split_backward}
    run = exact_fit(Scheduled().double(), 2, 3, callbacks=[Move(SHARED), dies], strategy=strategy)
    assert failures(run) == [worker]
    assert len(moves(run)) == 1


class WaitsBeforeItsLastGradients(Callback):
    """In ``step`` workers of the last stage begin their last W when the first worker has ended its REDUCE.

    Each notes in a file of its own whether that W is of a micro-batch that runs a shared layer elsewhere, and whether
    the wait has ended.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        executor = strategy.executor
        reduced = self.folder / "reduced"

        def ended(step: int, op: Any) -> None:
            if strategy.grid_rank == 0 and step == self.step and op.kind.value == "REDUCE":
                reduced.touch()

        def begins(step: int, op: Any) -> None:
            if step != self.step or executor.worker.stage < executor.grid.stages - 1:
                return
            last = [task for task in executor.runner.program if task.op.kind.value == "W"][-1]
            if op is last.op:
                limit = time.monotonic() + 20
                while not reduced.exists() and time.monotonic() < limit:
                    time.sleep(0.01)
                found = bool(executor.runner.stage.untouched(last.index)), reduced.exists()
                (self.folder / f"{strategy.grid_rank}").write_text(repr(found))

        executor.after_operation.append(ended)
        executor.before_operation.append(begins)


@pytest.mark.parametrize("pipelines", sampled([1, 2], 1, rest=pytest.mark.long))
def test_nobody_waits_for_gradients_of_micro_batches_that_run_a_shared_layer_elsewhere(tmp_path, pipelines):
    callbacks = [Move({1: (2.75, 3.25)}), WaitsBeforeItsLastGradients(tmp_path, 6)]
    run = exact_fit(Scheduled().double(), pipelines, 2, callbacks=callbacks, strategy={**STAY, "split_backward": True})
    assert moves(run) == [(0, 2.75, 6)]
    for rank in range(1, 2 * pipelines, 2):
        assert literal_eval((tmp_path / f"{rank}").read_text()) == (True, True)


class UsesALayerInItsLoss(Scheduled):
    """Where the last stage holds it: ``later`` steps after that began, and at ``from_step`` at the earliest."""

    def __init__(self, from_step: int = 0, later: int = 0) -> None:
        super().__init__()
        self.from_step, self.later, self.held_since = from_step, later, -1

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        layer: Any = self.layers[2]
        if not isinstance(layer, AbsentLayer) and self.held_since < 0:
            self.held_since = max(self.from_step, self.trainer.global_step)
        uses = 0 <= self.held_since <= self.trainer.global_step - self.later
        return super().loss(output, target) + (layer.weight.square().mean() if uses else 0.0)


MANY_STEPS = 40  # when a move takes place depends on the machine


@pytest.mark.long
def test_a_loss_may_use_a_shared_layer():
    data = dataset(GLOBAL_BATCH * MANY_STEPS)
    moved = UsesALayerInItsLoss().double()
    strategy = {**STAY, "split_backward": True}
    run = fit(moved, 2, 2, data=data, max_steps=MANY_STEPS, callbacks=[Move({1: (2.75, 3.25)})], strategy=strategy)
    (step,) = (event.step for event in run.strategy.history if event.kind == "layers_moved")
    reference = UsesALayerInItsLoss(from_step=step).double()
    on_one_device(max_steps=MANY_STEPS).fit(reference, DataLoader(data, batch_size=GLOBAL_BATCH))
    assert 1 <= step < MANY_STEPS
    assert difference(moved.state_dict(), reference.state_dict()) < TOLERANCE


def test_a_loss_that_begins_to_use_a_shared_layer_is_an_error_and_not_another_result():
    with pytest.raises(UnsupportedFeatureError, match="that two stages share got a gradient"):
        fit(
            UsesALayerInItsLoss(later=2).double(), 2, 2, data=dataset(GLOBAL_BATCH * MANY_STEPS), max_steps=MANY_STEPS,
            callbacks=[Move({1: (2.75, 3.25)})], strategy={**STAY, "split_backward": True},
        )  # fmt: skip


@pytest.mark.long
def test_a_sum_is_given_as_it_was_before_hooks_changed_it():
    still, moved = Scheduled().double(), Scheduled().double()
    fit(still, 2, 2, strategy=STAY, callbacks=[Halves()])
    moving = Move({1: (2.5, 3.5)})
    run = fit(moved, 2, 2, strategy=STAY, callbacks=[moving, Halves(), PartsWays(5, 1, [3])])
    assert failures(run) == [(0, 1)]
    assert difference(still.state_dict(), moved.state_dict()) < TOLERANCE
