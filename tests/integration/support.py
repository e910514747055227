"""Models, data and runs for the tests that train with real processes.

Classes live in a module of their own, so that worker processes can import them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_recycle import LayerSpec, PipelineModule, ReCycleStrategy
from lightning_recycle.callbacks import Fault, FaultInjectionCallback

GLOBAL_MICROBATCHES = 12
GLOBAL_BATCH = 24
STEPS = 10


class Regression(PipelineModule):
    """Six layers in float64; with ``dropout`` two more that draw."""

    def __init__(self, dropout: float = 0.0, specs: bool = False, clip_scale: float = 1.0) -> None:
        super().__init__()
        self.dropout, self.specs, self.clip_scale = dropout, specs, clip_scale

    def configure_pipeline(self) -> list[Any]:
        torch.manual_seed(0)
        linear = LayerSpec if self.specs else lambda cls, *args: cls(*args)
        layers: list[Any] = [linear(nn.Linear, 8, 16), nn.Tanh(), linear(nn.Linear, 16, 16)]
        if self.dropout:
            layers += [nn.Dropout(self.dropout), nn.Linear(16, 16), nn.Dropout(self.dropout)]
        layers += [nn.ReLU(inplace=True), nn.Linear(16, 4), nn.Linear(4, 1)]
        return layers

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.clip_scale * (output - target).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Scheduled(Regression):
    """With a learning rate that falls every step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples with random augmentation."""

    def __len__(self) -> int:
        return GLOBAL_BATCH * STEPS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.full((8,), index / len(self), dtype=torch.float64) + torch.randn(8, dtype=torch.float64)
        return x, x.sum(0, keepdim=True)


def dataset(num_samples: int = GLOBAL_BATCH * STEPS) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, 8, generator=generator, dtype=torch.float64)
    y = torch.randn(num_samples, 1, generator=generator, dtype=torch.float64)
    return TensorDataset(x, y)


def plain_loop(
    model: PipelineModule, data: TensorDataset, steps: int = STEPS, clip_norm: float | None = None
) -> dict[str, Tensor]:
    """Trains a copy of ``model`` in this process, without anything of this project's; returns its state dict."""
    reference = copy.deepcopy(model)
    layers = nn.Sequential(*reference.layers)
    configured = reference.configure_optimizers()
    optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
    scheduler = configured["lr_scheduler"]["scheduler"] if isinstance(configured, dict) else None
    for step in range(steps):
        x, y = data[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]
        optimizer.zero_grad()
        reference.loss(layers(x), y).backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(layers.parameters(), clip_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return reference.state_dict()


def trainer(
    pipelines: int, stages: int, faults: Sequence[Fault] = (), strategy: dict[str, Any] | None = None, **kwargs: Any
) -> L.Trainer:
    """A quiet Trainer on ``pipelines`` x ``stages`` workers, with the same global micro-batches on every grid."""
    options: dict[str, Any] = {
        "max_steps": STEPS,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    callbacks = [FaultInjectionCallback(list(faults)), *kwargs.pop("callbacks", [])]
    arguments = {"pipeline_parallel_size": stages, "num_microbatches": GLOBAL_MICROBATCHES // pipelines}
    return L.Trainer(
        accelerator="cpu",
        devices=pipelines * stages,
        strategy=ReCycleStrategy(**{**arguments, **(strategy or {})}),
        callbacks=callbacks,
        **{**options, **kwargs},
    )


def fit(
    model: PipelineModule, pipelines: int, stages: int, faults: Sequence[Fault] = (), data: Any = None, **kwargs: Any
) -> L.Trainer:
    """Trains ``model`` and returns the trainer."""
    loader, val = kwargs.pop("loader", {}), kwargs.pop("val", None)
    run = trainer(pipelines, stages, faults, **kwargs)
    train = DataLoader(dataset() if data is None else data, batch_size=GLOBAL_BATCH // pipelines, **loader)
    run.fit(model, train, val)
    return run


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest absolute difference between two state dicts with the same names."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def failures(run: L.Trainer) -> list[tuple[int, int]]:
    """The workers that were lost, in order."""
    return [event.worker for event in run.strategy.history if event.kind == "failure"]


def committed_steps(run: L.Trainer) -> list[int]:
    return [event.step for event in run.strategy.history if event.kind == "step"]
