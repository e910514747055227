"""The model and the data of the chaos runs, and the result of undisturbed training."""

import functools
from typing import Any

import lightning as L
import torch
from support.training import QUIET, plain_loop
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from chaos.scenario import GLOBAL_MICROBATCHES, STEPS
from lightning_recycle.data.addressed import MicrobatchLoader
from lightning_recycle.model.module import PipelineModule
from lightning_recycle.planning.grid import Grid, Microbatch
from lightning_recycle.strategy import ReCycleStrategy

__all__ = ["CLIP_NORM", "GLOBAL_BATCH", "SAMPLES", "SEED", "ChaosModel", "loader", "quiet_trainer", "reference"]

GLOBAL_BATCH = 12
SAMPLES = 96
"""8 steps per epoch."""

CLIP_NORM = 0.2
SEED = 5


class ChaosModel(PipelineModule):
    """Six layers in float64, two more with ``dropout``; it remembers the samples that it was given last."""

    def __init__(self, dropout: bool = False) -> None:
        super().__init__()
        self.dropout = dropout
        self.samples_read: list[int] | None = None

    @override
    def configure_pipeline(self) -> list[nn.Module]:
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12)]
        if self.dropout:
            layers += [nn.Dropout(0.4), nn.Linear(12, 12)]
        layers += [nn.Tanh(), nn.Linear(12, 6), nn.Linear(6, 1)]
        return [layer.double() for layer in layers]

    @override
    def split_batch(self, batch: Any) -> tuple[Any, Any]:
        x, y, index = batch
        self.samples_read = index.tolist()
        return x, y

    @override
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader(pipelines: int, processes: int = 0) -> DataLoader[Any]:
    """The data, shuffled, for ``pipelines``."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    y = torch.randn(SAMPLES, 1, generator=generator, dtype=torch.float64)
    data = TensorDataset(x, y, torch.arange(SAMPLES))
    return DataLoader(data, batch_size=GLOBAL_BATCH // pipelines, shuffle=True, num_workers=processes)


def quiet_trainer(pipelines: int, stages: int, strategy: dict[str, Any], clips: bool, **options: Any) -> L.Trainer:
    """A Trainer that prints and writes nothing of its own."""
    return L.Trainer(
        accelerator="cpu",
        devices=pipelines * stages,
        strategy=ReCycleStrategy(
            pipeline_parallel_size=stages, num_microbatches=GLOBAL_MICROBATCHES // pipelines, seed=SEED, **strategy
        ),
        max_steps=STEPS,
        gradient_clip_val=CLIP_NORM if clips else None,
        **{**QUIET, **options},
    )


@functools.cache
def reference(dropout: bool, clips: bool) -> dict[str, Tensor]:
    """The weights that every scenario must end with."""
    model = ChaosModel(dropout)
    if dropout:  # what it draws is the project's own affair: a single undisturbed worker is the reference
        quiet_trainer(1, 1, {}, clips, callbacks=[]).fit(model, loader(1))
        return dict(model.state_dict())
    return _plain_loop(model, clips)


def _plain_loop(model: ChaosModel, clips: bool) -> dict[str, Tensor]:
    """Uses nothing of this project except the order of the data."""
    data = loader(1)
    order = MicrobatchLoader(data, Grid(1, 1, 1), 0, SEED)
    steps = (order.addresses(*divmod(step, len(order)), Microbatch(0, 0)) for step in range(STEPS))
    x, y, _ = data.dataset[[sample for addresses in steps for _, sample in addresses]]
    return plain_loop(model, TensorDataset(x, y), STEPS, CLIP_NORM if clips else None, GLOBAL_BATCH)
