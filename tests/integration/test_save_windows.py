"""Whenever the writer of a checkpoint dies, its file counts for all, or for none."""

import itertools
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from saving import CompleteOnly, listed, saves
from support.growth import happened
from support.sampling import sampled
from support.training import TOLERANCE, difference

from lightning_recycle.control.protocol.messages import SaveEnded
from lightning_recycle.session.checkpoint_files import load_sharded

POINTS = ("whole", "announced", "named", "ended")
"""The file is whole on the disk; its announcement was answered; it has its name; the coordinator knows that."""

STEPS = 10


def kill(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Dies(L.Callback):
    """Ends the writer at ``point`` of its file ``number``; and ``then_leader`` the next leader, as soon as it leads."""

    def __init__(self, point: str, number: int, then_leader: bool) -> None:
        self._point, self._left, self._then_leader = point, number, then_leader

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.strategy.incarnation:
            return
        client = trainer.strategy.session.client
        if trainer.is_global_zero and self._point in ("whole", "announced"):
            client.await_naming = self._around(client.await_naming, lambda *_: True)
        elif trainer.is_global_zero:
            client.send = self._around(client.send, lambda message: isinstance(message, SaveEnded))
        if self._then_leader and (client.rank, trainer.world_size) == (1, 3):
            client.on_leader = kill

    def _around(self, call: Callable[..., None], counts: Callable[..., bool]) -> Callable[..., None]:
        def watched(*arguments: Any) -> None:
            self._left -= counts(*arguments)
            is_due = counts(*arguments) and self._left == 0
            if is_due and self._point in ("whole", "named"):
                kill()
            call(*arguments)
            if is_due:
                kill()

        return watched


def savers(folder: Path) -> list[ModelCheckpoint]:
    every: dict[str, Any] = {"every_n_train_steps": 2}
    return [
        ModelCheckpoint(folder / "newest", "{step}", monitor="step", mode="max", save_top_k=2, save_last=True, **every),
        ModelCheckpoint(folder / "one", "best", monitor="step", mode="max", save_last="link", every_n_train_steps=3),
    ]


def weights_in(path: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """The step and the weights of a checkpoint."""
    found = load_sharded(path) if path.is_dir() else torch.load(path, weights_only=False)
    return found["global_step"], found["state_dict"]


CASES = [
    (grid, sharded, point, number, seed)
    for (grid, sharded), point, number, seed in itertools.product(
        itertools.product(((3, 1), (2, 2)), (False, True)), POINTS, (1, 2, 4, 5), range(4)
    )
]


@pytest.fixture(scope="module")
def known(tmp_path_factory) -> Callable[[tuple[int, int]], dict[int, dict[str, torch.Tensor]]]:
    """The weights of each step, in the undisturbed run of a grid."""
    found: dict[tuple[int, int], dict[int, dict[str, torch.Tensor]]] = {}

    def of(grid: tuple[int, int]) -> dict[int, dict[str, torch.Tensor]]:
        if grid not in found:
            folder = tmp_path_factory.mktemp("known")
            saves(grid, [ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)], steps=STEPS)
            found[grid] = dict(weights_in(path) for path in folder.iterdir())
        return found[grid]

    return of


@pytest.mark.parametrize(("grid", "sharded", "point", "number", "seed"), sampled(CASES, 1, seed=5))
def test_files_are_those_that_callbacks_remember_whenever_a_writer_dies(
    grid, sharded, point, number, seed, known, tmp_path
):
    draws = random.Random(f"{grid} {sharded} {point} {number} {seed}")
    dies = Dies(point, number, then_leader=draws.random() < 0.4)
    restarts = {"max_restarts": draws.choice([0, 2])}
    others = [] if sharded else [CompleteOnly()]  # a folder is replaced in two steps
    run = saves(grid, [dies, *savers(tmp_path), *others], sharded=sharded, steps=STEPS, strategy=restarts)
    assert happened(run, "failure")
    complete = {event.details["path"] for event in happened(run, "saved")}
    for callback in run.checkpoint_callbacks:
        assert isinstance(callback, ModelCheckpoint)
        remembered = {*callback.best_k_models, callback.last_model_path}
        assert listed(Path(str(callback.dirpath))) == sorted(os.path.basename(path) for path in remembered)
        assert not [path for path in remembered if "-v" in path]
        for path in remembered:
            assert path in complete or os.path.islink(path)
            step, weights = weights_in(Path(path))
            assert difference(weights, known(grid)[step]) < TOLERANCE
