"""The state that every scenario of a recipe must end in.

The judge is Lightning itself, on one device, without anything of this project's but the order of the data. Only where
layers draw random numbers, which ones is the project's own affair: there it is a single undisturbed worker.
"""

import functools
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from torch.utils.data import DataLoader, Sampler

from chaos.scenario import EPOCH, GLOBAL_BATCH, STEPS, Recipe
from chaos.state import CHECKPOINTS, WORKERS, State, collect, step_of
from chaos.training import (
    SEED,
    ChaosModel,
    grid_trainer,
    make_model,
    trainer_options,
    training_loader,
    validation_loader,
)
from lightning_recycle.data.map_style import MicrobatchLoader
from lightning_recycle.planning.grid import Grid, Microbatch

_SAVED = "saved.ckpt"


def reference(recipe: Recipe, resumed_at: int = 0) -> State:
    """What an undisturbed training of ``recipe`` leaves.

    Args:
        recipe: what is trained.
        resumed_at: the step of the checkpoint that a second training went on from; 0 if there was only one.
    """
    return _reference(recipe, resumed_at)


@functools.cache
def _reference(recipe: Recipe, resumed_at: int) -> State:
    with tempfile.TemporaryDirectory(prefix="recycle-chaos-reference-") as name:
        directory = Path(name)
        saving = _SavesAt(resumed_at, directory / _SAVED)
        trainer, model = _train(recipe, directory, [saving] if resumed_at and not recipe.checkpoint_every else [])
        state = collect(trainer, model, directory)
        if resumed_at:
            trainer, model = _train(recipe, directory, [], _keep_until(directory, resumed_at), resumed_at)
            again = collect(trainer, model, directory)
            state = {**again, "rows": [*state["rows"], *again["rows"]]}
        assert trainer.global_step == recipe.steps, f"{recipe} ends at step {trainer.global_step}"
        return state


def _keep_until(directory: Path, step: int) -> Path:
    """Leaves in ``directory`` what is there when ``step`` steps have been done; returns the checkpoint of then."""
    shutil.rmtree(directory / WORKERS)
    if (directory / _SAVED).exists():
        return directory / _SAVED
    saved = {step_of(path): path for path in (directory / CHECKPOINTS).iterdir()}
    for later in saved.keys() - range(step + 1):
        saved[later].unlink()
    return saved[step]


def _train(
    recipe: Recipe,
    directory: Path,
    callbacks: Sequence[L.Callback],
    checkpoint: Path | None = None,
    first_step: int = 0,
) -> tuple[L.Trainer, ChaosModel]:
    model, validation = make_model(recipe), validation_loader(recipe, 1)
    options = trainer_options(recipe, directory)
    options["callbacks"] += callbacks
    if recipe.dropout:
        trainer = grid_trainer(1, 1, {}, options)
        loader = training_loader(1)
    else:
        trainer = L.Trainer(devices=1, strategy="auto", **options)
        loader = DataLoader(training_loader(1).dataset, GLOBAL_BATCH, sampler=_Order(first_step))
    trainer.fit(model, loader, validation, ckpt_path=checkpoint, weights_only=False)
    return trainer, model


class _SavesAt(L.Callback):
    """Saves once, after ``step`` steps."""

    def __init__(self, step: int, path: Path) -> None:
        self._step, self._path = step, path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:
            trainer.save_checkpoint(self._path, weights_only=False)


class _Order(Sampler[int]):
    """The order in which a grid reads its shuffled data.

    Args:
        first_step: the step with which the training begins. A DataLoader knows nothing of a checkpoint in the middle of
            an epoch, and Lightning leaves it to the user to leave out what was read before.
    """

    def __init__(self, first_step: int) -> None:
        self._first = divmod(first_step, EPOCH)
        order = MicrobatchLoader(training_loader(1), Grid(1, 1, 1), 0, SEED)
        self._epochs = [
            [sample for step in range(EPOCH) for _, sample in order.addresses(epoch, step, Microbatch(0, 0))]
            for epoch in range(STEPS // EPOCH)
        ]
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning before each epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._epochs[0])

    def __iter__(self) -> Iterator[int]:
        epoch, batches = self._first
        return iter(self._epochs[self._epoch][batches * GLOBAL_BATCH if self._epoch == epoch else 0 :])
