"""Layers move between stages while the training goes on: nothing changes but where they are."""

import copy
import os
import signal
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from support.models import Regression, Scheduled, dataset
from support.sampling import sampled
from support.training import TOLERANCE, difference, exact_fit, failures, fit, plain_loop
from torch import Tensor, nn
from typing_extensions import override

from lightning_recycle.callbacks import Fault
from lightning_recycle.control.client import ControlClient
from lightning_recycle.model.parts import LayerParts
from lightning_recycle.runtime.comm import state_transfer
from lightning_recycle.runtime.executor.executor import Executor
from lightning_recycle.runtime.executor.step_runner import StepRunner
from lightning_recycle.runtime.stage import stage_bundle
from lightning_recycle.session import stage_layers


class Move(Callback):
    """Asks for layouts: sizes of the stages, by the step after which it does."""

    def __init__(self, moves: Mapping[int, Sequence[int]]) -> None:
        self.moves = moves

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        sizes = self.moves.get(trainer.global_step)
        if sizes is not None:
            trainer.strategy.move_layers(sizes)  # type: ignore[attr-defined]


class MoveByBatch(Move):
    """Counts batches instead of steps of the optimizer."""

    @override
    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        sizes = self.moves.get(batch_idx)
        if sizes is not None:
            trainer.strategy.move_layers(sizes)  # type: ignore[attr-defined]


class KilledWhileLayersMove(Callback):
    """Kills the worker ``rank`` at a moment of its part in the moves of layers: right before or right after one of the
    things that it does there, counted from 1.
    """

    def __init__(self, rank: int, moment: int) -> None:
        self.rank, self.moment = rank, moment

    @override
    def on_fit_start(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        if strategy.executor is None or strategy.grid_rank != self.rank:
            return
        for owner, name in [
            (stage_bundle, "send_object"),
            (stage_bundle, "receive_object"),
            (state_transfer, "_send"),
            (state_transfer, "_receive"),
            (stage_bundle.LayerMoves, "exchange"),
            (stage_layers.StageLayers, "give"),
            (stage_layers.StageLayers, "take_up"),
            (LayerParts, "exchange"),
            (Executor, "_get_ready"),
            (StepRunner, "take_up"),
            (Executor, "_connect"),
            (ControlClient, "await_announcement"),
        ]:
            setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._passes()
            result = function(*args, **kwargs)
            self._passes()
            return result

        return counted

    def _passes(self) -> None:
        self.moment -= 1
        if self.moment == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def moves(run: L.Trainer) -> list[tuple[int, ...]]:
    strategy: Any = run.strategy
    return [tuple(event.details["cuts"]) for event in strategy.history if event.kind == "layers_moved"]


@pytest.mark.parametrize("model", sampled([Regression(), Scheduled()], 1, rest=pytest.mark.long))
def test_layers_move_between_two_stages(model: Regression) -> None:
    run = exact_fit(model.double(), 2, 2, callbacks=[Move({2: (1, 5), 5: (4, 2)})])
    assert moves(run) == [(0, 1, 6), (0, 4, 6)]


@pytest.mark.long
def test_layers_that_were_recipes_move() -> None:
    still, moved = Regression(specs=True).double(), Regression(specs=True).double()
    fit(still, 2, 2)
    run = fit(moved, 2, 2, callbacks=[Move({2: (1, 5), 5: (4, 2)})])
    assert len(moves(run)) == 2
    assert difference(still.state_dict(), moved.state_dict()) < TOLERANCE


@pytest.mark.long
def test_layers_that_draw_move_among_three_stages() -> None:
    still, moved = Regression(dropout=0.2).double(), Regression(dropout=0.2).double()
    fit(still, 2, 3)
    run = fit(moved, 2, 3, callbacks=[Move({1: (1, 1, 7), 4: (3, 5, 1), 7: (2, 2, 5)})])
    assert moves(run) == [(0, 1, 2, 9), (0, 3, 8, 9), (0, 2, 4, 9)]
    assert difference(still.state_dict(), moved.state_dict()) < TOLERANCE


@pytest.mark.parametrize("culprit", [(1, 0), pytest.param((1, 1), marks=pytest.mark.long)])
def test_computations_are_checked_after_layers_have_moved(culprit: tuple[int, int]) -> None:
    run = exact_fit(
        Regression().double(),
        3,
        2,
        [Fault("bitflip", *culprit, step=7, target="matmul", every=1)],
        callbacks=[Move({2: (1, 5)})],
        strategy={"verify": 1.0, "checksum_every": 0, "rebalance": "never"},
    )
    assert moves(run) == [(0, 1, 6)]
    strategy: Any = run.strategy
    assert [(e.worker, e.step) for e in strategy.history if e.kind == "corruption"] == [(culprit, 7)]


@pytest.mark.long
def test_a_worker_that_joins_gets_the_layers_of_its_stage() -> None:
    """It was started with those of the beginning."""
    faults = [Fault("kill", 0, 1, step=5), Fault("kill", 1, 0, step=16)]
    slow = Fault("slow", 0, 0, step=0, factor=30.0, steps=40)
    run = exact_fit(
        Scheduled().double(),
        2,
        2,
        [*faults, slow],
        dataset(24 * 60),
        max_steps=60,
        callbacks=[Move({2: (1, 5), 30: (4, 2)})],
        strategy={"max_restarts": 10, "rebalance": "never"},
    )
    assert moves(run) == [(0, 1, 6), (0, 4, 6)]
    kinds = [event.kind for event in run.strategy.history]
    assert kinds.count("rejoined") >= 1


@pytest.mark.parametrize("clip", sampled([0.05, 1.0], 1, rest=pytest.mark.long))
def test_with_clipping_by_norm(clip: float) -> None:
    run = exact_fit(Scheduled().double(), 2, 3, callbacks=[Move({2: (1, 1, 4), 5: (3, 2, 1)})], gradient_clip_val=clip)
    assert len(moves(run)) == 2


@pytest.mark.parametrize("staggered", sampled([True, False], 1, rest=pytest.mark.long))
def test_between_the_batches_of_one_step(staggered: bool) -> None:
    still, moved = Scheduled().double(), Scheduled().double()
    options: dict[str, Any] = {"accumulate_grad_batches": 3, "max_steps": 4, "strategy": {"staggered": staggered}}
    fit(still, 2, 2, data=dataset(24 * 12), **options)
    run = fit(moved, 2, 2, data=dataset(24 * 12), callbacks=[MoveByBatch({2: (1, 5), 4: (4, 2), 7: (2, 4)})], **options)
    assert len(moves(run)) == 3
    assert difference(still.state_dict(), moved.state_dict()) < TOLERANCE


MOMENTS = (56, 66, 58) * 2
"""As many as each worker has in these moves at least, by rank."""


@pytest.mark.parametrize(
    ("rank", "moment"),
    sampled([(rank, moment) for rank, count in enumerate(MOMENTS) for moment in range(1, count + 1)], 2),
)
def test_a_worker_may_be_killed_at_any_moment_of_a_move(rank: int, moment: int) -> None:
    run = exact_fit(
        Scheduled().double(),
        2,
        3,
        data=dataset(24 * 12),
        max_steps=12,
        strategy={"rebalance": "never"},
        callbacks=[Move({2: (1, 1, 4), 6: (3, 2, 1)}), KilledWhileLayersMove(rank, moment)],
    )
    assert moves(run) == [(0, 1, 2, 6), (0, 3, 5, 6)]
    assert failures(run) == [divmod(rank, 3)]


class Slow(nn.Module):
    """Takes a while, and nobody else's processor."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.01)
        return x


class Lopsided(Regression):
    """Six slow layers, five of them on the second stage."""

    def configure_pipeline(self) -> list[Any]:
        torch.manual_seed(0)
        widths = (8, 16, 16, 16, 16, 16, 1)
        return [nn.Sequential(nn.Linear(a, b), Slow()) for a, b in pairwise(widths)]


class StopOnceMoved(Callback):
    """Ends the training when layers have moved by themselves, however long it took to measure them."""

    @override
    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.cuts = trainer.strategy.session.steps.layers.cuts  # type: ignore[attr-defined]

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.strategy.session.steps.layers.cuts != self.cuts  # type: ignore[attr-defined]


def test_layers_move_to_where_they_take_less_time() -> None:
    model, data = Lopsided().double(), dataset(24 * 400)
    before = copy.deepcopy(model)
    strategy = {"partition": [1, 5]}
    run = fit(model, 2, 2, data=data, max_steps=400, strategy=strategy, callbacks=[StopOnceMoved()])
    assert difference(model.state_dict(), plain_loop(before, data, run.global_step)) < TOLERANCE
    ((first, middle, last),) = moves(run)
    assert (first, last) == (0, 6)
    assert 2 <= middle <= 4
    (event,) = [event for event in run.strategy.history if event.kind == "layers_moved"]
    assert event.details["step_after"] < 0.9 * event.details["step_before"]
    assert any(
        "layers" in line for event in run.strategy.history if event.kind == "layout" for line in event.details["why"]
    )


@pytest.mark.long
def test_layers_stay_where_they_are_wanted() -> None:
    strategy = {"partition": [1, 5], "rebalance": "never"}
    run = exact_fit(Lopsided().double(), 2, 2, data=dataset(24 * 16), max_steps=16, strategy=strategy)
    assert moves(run) == []
