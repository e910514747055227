"""Layers move between stages or are shared by neighbours while training goes on: nothing changes but who runs them."""

import copy
import itertools
import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from support.growth import AwaitReplacement, happened
from support.models import GLOBAL_BATCH, Regression, Scheduled, dataset
from support.sampling import sampled
from support.training import TOLERANCE, difference, exact_fit, failures, fit, plain_loop
from torch import Tensor, nn
from typing_extensions import override

from lightning_recycle.callbacks import Fault
from lightning_recycle.control.client import ControlClient
from lightning_recycle.model.parts import LayerParts
from lightning_recycle.runtime import communicator as communicator_module
from lightning_recycle.runtime import stage_bundle
from lightning_recycle.runtime.executor import Executor
from lightning_recycle.runtime.step_runner import StepRunner
from lightning_recycle.session import stage_layers


class Move(Callback):
    """Asks for layouts: sizes of the stages, by the step after which it does."""

    def __init__(self, moves: Mapping[int, Sequence[int]]) -> None:
        self.moves = moves

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        sizes = self.moves.get(trainer.global_step)
        if sizes is not None:
            trainer.strategy.move_layers(sizes)


class MoveByBatch(Move):
    """Counts batches instead of steps of the optimizer."""

    @override
    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        sizes = self.moves.get(batch_idx)
        if sizes is not None:
            trainer.strategy.move_layers(sizes)


class KilledWhileLayersMove(Callback):
    """Kills the worker ``rank`` at a moment of its part in the moves of layers: right before or right after one of the
    things that it does there, counted from 1.
    """

    def __init__(self, rank: int, moment: int) -> None:
        self.rank, self.moment = rank, moment

    @override
    def on_fit_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.strategy.executor is None or trainer.strategy.grid_rank != self.rank:
            return
        for owner, name in [
            (stage_bundle, "send_object"),
            (stage_bundle, "receive_object"),
            (communicator_module, "_send_in_pieces"),
            (communicator_module, "_receive_in_pieces"),
            (stage_bundle.LayerMoves, "exchange"),
            (stage_layers.StageLayers, "pack_layers"),
            (stage_layers.StageLayers, "install_layers"),
            (LayerParts, "exchange"),
            (Executor, "_exchange_layers"),
            (StepRunner, "replace_layers"),
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
    return [tuple(event.details["cuts"]) for event in happened(run, "layers_moved")]


STAY: dict[str, Any] = {"rebalance": "never"}
SHARED = {1: (2.4, 2.1, 1.5)}
"""Of six layers two neighbours share the third and the fifth, which have weights."""


def layouts(seed: int, layers: int, stages: int, count: int) -> list[tuple[float, ...]]:
    """Random sizes of stages, most of which share a layer with the next one."""
    chance = random.Random(seed)
    found: list[tuple[float, ...]] = []
    while len(found) < count:
        bounds = sorted(round(chance.uniform(1, layers - 1), chance.choice((0, 1, 2))) for _ in range(stages - 1))
        sizes = tuple(round(b - a, 2) for a, b in zip([0, *bounds], [*bounds, layers], strict=True))
        whole = [(-(-a // 1), b // 1) for a, b in zip([0, *bounds], [*bounds, layers], strict=True)]
        if all(begin < end for begin, end in whole) and (not found or found[-1] != sizes):
            found.append(sizes)
    return found


@pytest.mark.parametrize(("seed", "stages"), sampled([(seed, stages) for seed in range(20) for stages in (2, 3, 4)], 1))
def test_random_layouts_of_layers_that_draw(seed, stages):
    still, moved = (Regression(specs=seed % 2 == 0, dropout=0.2).double() for _ in range(2))
    fit(still, 1, 1)
    sizes = layouts(seed, 9, stages, 4)
    run = fit(moved, 2, stages, callbacks=[Move(dict(zip((1, 3, 5, 7), sizes, strict=True)))], strategy=STAY)
    assert len(moves(run)) == 4
    assert difference(still.state_dict(), moved.state_dict()) < TOLERANCE


def test_a_worker_that_joins_gets_the_layers_of_its_stage():
    """It was started with those of the beginning."""
    run = exact_fit(
        Scheduled().double(), 2, 3, [Fault("kill", 0, 1, step=4), Fault("kill", 1, 0, step=9)],
        dataset(GLOBAL_BATCH * 16), max_steps=16,
        callbacks=[Move({**SHARED, 13: (1, 2.3, 2.7)}), AwaitReplacement([7, 12])],
        strategy={**STAY, "max_restarts": 10},
    )  # fmt: skip
    assert moves(run) == [(0, 2.4, 4.5, 6), (0, 1, 3.3, 6)]
    assert len(happened(run, "rejoined")) == 2


@pytest.mark.parametrize("clip", sampled([0.05, 1.0], 1, rest=pytest.mark.long))
def test_norms_count_each_layer_once(clip):
    faults, moving = [Fault("kill", 1, 1, 6, at="optimizer")], Move({**SHARED, 7: (3, 2, 1)})
    run = exact_fit(Scheduled().double(), 2, 3, faults, callbacks=[moving], strategy=STAY, gradient_clip_val=clip)
    assert len(moves(run)) == 2


@pytest.mark.parametrize("staggered", sampled([True, False], 1, rest=pytest.mark.long))
def test_between_the_batches_of_one_step(staggered):
    still, moved = Scheduled().double(), Scheduled().double()
    strategy = {**STAY, "staggered": staggered}
    options: dict[str, Any] = {"accumulate_grad_batches": 3, "max_steps": 4, "strategy": strategy}
    data, moving = dataset(GLOBAL_BATCH * 12), MoveByBatch({2: (2.5, 3.5), 4: (4.5, 1.5), 7: (2, 4)})
    fit(still, 1, 1, data=data, **options)
    run = fit(moved, 2, 2, [Fault("kill", 0, 1, 6)], data=data, callbacks=[moving], **options)
    assert len(moves(run)) == 3
    assert difference(still.state_dict(), moved.state_dict()) < TOLERANCE


LAYOUTS: dict[str, tuple[dict[int, Any], tuple[int, ...]]] = {
    "whole layers": ({2: (1, 1, 4), 6: (3, 2, 1)}, (56, 66, 58) * 2),
    "shared layers": ({2: (2.4, 2.1, 1.5), 6: (1.5, 3.3, 1.2)}, (48, 56, 40) * 2),
}
"""Two moves, and as many moments as each worker has in them at least, by rank."""
MOMENTS = [
    (kind, rank, moment)
    for kind, (_, counts) in LAYOUTS.items()
    for rank, count in enumerate(counts)
    for moment in range(1, count + 1)
]


@pytest.mark.parametrize(("kind", "rank", "moment"), sampled(MOMENTS, 1))
def test_a_worker_may_be_killed_at_any_moment_of_a_move(kind, rank, moment):
    wanted, _ = LAYOUTS[kind]
    data = dataset(GLOBAL_BATCH * 12)
    callbacks = [Move(wanted), KilledWhileLayersMove(rank, moment)]
    run = exact_fit(Scheduled().double(), 2, 3, data=data, max_steps=12, strategy=STAY, callbacks=callbacks)
    assert moves(run) == [
        tuple(round(cut, 9) for cut in itertools.accumulate(sizes, initial=0)) for sizes in wanted.values()
    ]
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
        return [nn.Sequential(nn.Linear(a, b), Slow()) for a, b in itertools.pairwise(widths)]


class StopOnceMoved(Callback):
    """Ends the training when layers have moved by themselves, however long it took to measure them."""

    @override
    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.cuts = trainer.strategy.session.steps.layers.cuts

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.strategy.session.steps.layers.cuts != self.cuts


@pytest.mark.long
def test_layers_move_to_where_they_take_less_time():
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
