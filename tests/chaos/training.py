"""What the chaos runs train: models, data, and a Trainer whose callbacks depend on the recipe alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from support.options import recycle_strategy
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanAbsoluteError, MeanSquaredError
from typing_extensions import override

from chaos.scenario import GLOBAL_BATCH, GLOBAL_MICROBATCHES, SAMPLES, Recipe
from chaos.state import CHECKPOINTS, FinalCheckpoint, Tally
from lightning_recycle.model.module import PipelineModule

SEED = 5
_CLIP_NORM = 0.2
_VALIDATION_SAMPLES = 15
"""The second batch is smaller than the first, and some of its micro-batches are empty."""

_NEVER = 100  # epochs


class ChaosModel(PipelineModule):
    """Six layers in float64, two more with ``dropout``."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.samples_read: list[int] | None = None
        self.on_loss: Callable[[list[int]], None] | None = None
        self._samples: list[int] = []

    @override
    def configure_pipeline(self) -> list[nn.Module]:
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12)]
        if self.recipe.dropout:
            layers += [nn.Dropout(0.4), nn.Linear(12, 12)]
        layers += [nn.Tanh(), nn.Linear(12, 6), nn.Linear(6, 1)]
        return [layer.double() for layer in layers]

    @override
    def configure_model(self) -> None:
        super().configure_model()
        if self.device_mesh is None:
            return
        linear = [number for number, layer in enumerate(self.layers) if isinstance(layer, nn.Linear)]
        for up, down in zip(linear[::2], linear[1::2], strict=False):  # one that is left over is whole on each member
            for number, style in ((up, ColwiseParallel()), (down, RowwiseParallel())):
                layer = parallelize_module(self.layers[number], self.device_mesh["tensor_parallel"], style)
                self.layers[number] = layer

    @override
    def split_batch(self, batch: Any) -> tuple[Any, Any]:
        x, y, index = batch
        self.samples_read = self._samples = index.tolist()
        return x, y

    @override
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self.on_loss is not None:
            self.on_loss(self._samples)
        return (output - target).square().mean()

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class MonitoredModel(ChaosModel):
    """Its learning rate follows what was measured in an epoch."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.train_absolute, self.val_squared = MeanAbsoluteError(), MeanSquaredError()

    def on_training_output(self, output: Tensor, target: Tensor) -> None:
        self.log("train_error", (output - target).square().mean(), on_step=False, on_epoch=True)
        self.log("train_samples", float(len(output)), on_step=False, on_epoch=True, reduce_fx="sum")
        self.train_absolute(output, target)
        self.log("train_absolute", self.train_absolute, on_step=True, on_epoch=True)

    def on_validation_output(self, output: Tensor, target: Tensor) -> None:
        self.val_squared(output, target)
        self.log("val_error", self.val_squared)
        self.log("val_largest", (output - target).abs().max(), reduce_fx="max")

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": self.recipe.monitored}}


class LayersMove(L.Callback):
    """Asks for other layers in each stage, by the step after which it does."""

    def __init__(self, moves: tuple[tuple[int, tuple[int, ...]], ...]) -> None:
        self.moves = dict(moves)

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step in self.moves:
            trainer.strategy.move_layers(self.moves[trainer.global_step])


def make_model(recipe: Recipe) -> ChaosModel:
    return (MonitoredModel if recipe.monitored else ChaosModel)(recipe)


def training_loader(pipelines: int, processes: int = 0) -> DataLoader[Any]:
    """The data, shuffled, for ``pipelines``."""
    return DataLoader(_data(SAMPLES, seed=1), batch_size=GLOBAL_BATCH // pipelines, shuffle=True, num_workers=processes)


def validation_loader(recipe: Recipe, pipelines: int) -> DataLoader[Any] | None:
    if not recipe.monitored:
        return None
    return DataLoader(_data(_VALIDATION_SAMPLES, seed=2), batch_size=GLOBAL_BATCH // pipelines)


def _data(samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    y = torch.randn(samples, 1, generator=generator, dtype=torch.float64)
    return TensorDataset(x, y, torch.arange(samples))


def trainer_options(recipe: Recipe, directory: Path, checkpoints: Path | None = None) -> dict[str, Any]:
    """The arguments of a Trainer that follow from ``recipe``."""
    folder = directory / CHECKPOINTS if checkpoints is None else checkpoints
    callbacks: list[L.Callback] = [Tally(), LearningRateMonitor("step")]
    if recipe.monitored:
        # The first epoch is the best by definition; three more, and it stops.
        patience, delta = (3, 1e9) if recipe.stops else (_NEVER, 0.0)
        callbacks.append(EarlyStopping(recipe.monitored, min_delta=delta, patience=patience))
    if recipe.checkpoint_every:
        callbacks.append(ModelCheckpoint(folder, every_n_train_steps=recipe.checkpoint_every, save_top_k=-1))
    if recipe.keeps_best:
        name = f"best-{{epoch}}-{{{recipe.monitored}:.6f}}"
        callbacks.append(ModelCheckpoint(folder, name, recipe.monitored, save_top_k=2, save_last=True))
    return {
        "accelerator": "cpu", "max_steps": recipe.steps if not recipe.stops else -1,
        "max_epochs": -1 if not recipe.stops else _NEVER, "gradient_clip_val": _CLIP_NORM if recipe.clips else None,
        "callbacks": [*callbacks, FinalCheckpoint(directory)], "logger": CSVLogger(directory, name="csv", version=0),
        "log_every_n_steps": 1, "enable_checkpointing": recipe.saves, "enable_progress_bar": False,
        "enable_model_summary": False, "default_root_dir": directory,
    }  # fmt: skip


def grid_trainer(
    pipelines: int, stages: int, strategy: dict[str, Any], options: dict[str, Any], members: int = 1, begins: int = 0
) -> L.Trainer:
    """A Trainer of ``options`` on a grid; ``members``: the processes of each position; ``begins``: the workers of each
    stage that it starts, if those are not all.
    """
    sizes = {"pipeline_parallel_size": stages, "tensor_parallel_size": members}
    chosen = recycle_strategy(num_microbatches=GLOBAL_MICROBATCHES // pipelines, seed=SEED, **sizes, **strategy)
    return L.Trainer(devices=(begins or pipelines) * stages * members, strategy=chosen, **options)
