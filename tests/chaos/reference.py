"""The state that every scenario of a recipe must end in.

The judge is Lightning itself, on one device, without anything of this project's but the order of the data. Only where
layers draw random numbers, which ones is the project's own affair: there it is a single undisturbed worker.
"""

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import lightning as L
from torch.utils.data import DataLoader, Sampler

from chaos.scenario import EPOCH, GLOBAL_BATCH, STEPS, Recipe
from chaos.state import State, collect
from chaos.training import SEED, grid_trainer, make_model, trainer_options, training_loader, validation_loader
from lightning_recycle.data.map_style import MicrobatchLoader
from lightning_recycle.planning.grid import Grid, Microbatch


@functools.cache
def reference(recipe: Recipe) -> State:
    """What an undisturbed training of ``recipe`` leaves, and what one must leave that went on from a checkpoint."""
    with tempfile.TemporaryDirectory(prefix="recycle-chaos-reference-") as name:
        directory = Path(name)
        model, validation = make_model(recipe), validation_loader(recipe, 1)
        options = trainer_options(recipe, directory)
        if recipe.dropout:
            trainer, loader = grid_trainer(1, 1, {}, options), training_loader(1)
        else:
            trainer = L.Trainer(devices=1, strategy="auto", **options)
            loader = DataLoader(training_loader(1).dataset, GLOBAL_BATCH, sampler=_Order())
        trainer.fit(model, loader, validation)
        assert trainer.global_step == recipe.steps, f"{recipe} ends at step {trainer.global_step}"
        return collect(trainer, model, directory)


class _Order(Sampler[int]):
    """The order in which a grid reads its shuffled data."""

    def __init__(self) -> None:
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
        return iter(self._epochs[self._epoch])
