"""Runs on positions of several processes, and the plain loop that they must equal."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from support.blocks import WIDTH, blocks
from support.options import recycle_strategy
from support.training import QUIET
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import PipelineModule
from lightning_recycle.planning import Op

STEPS, BATCH = 4, 4  # samples of a pipeline in a step


def make_parallel(layers: Any, mesh: Any) -> None:
    for block in layers:
        parallelize_module(block, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


class Ordinary(L.LightningModule):
    """As it would be written for ModelParallelStrategy."""

    def __init__(self) -> None:
        super().__init__()
        self.model = blocks()

    def configure_model(self) -> None:
        make_parallel(self.model, self.device_mesh)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        assert any(isinstance(p, DTensor) for p in self.parameters()), "the layers are sharded"
        return (self.model(x) - y).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val", (self.model(x) - y).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Piped(PipelineModule):
    def __init__(self) -> None:
        super().__init__()
        self.given = list(blocks())

    def configure_pipeline(self) -> nn.Sequential:
        return nn.Sequential(*self.given)

    def configure_model(self) -> None:
        super().configure_model()
        make_parallel(self.layers, self.device_mesh)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Alone(Ordinary):
    def configure_model(self) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return (self.model(x) - y).square().mean()


class Kill(L.Callback):
    """Kills the first process of ``rank`` before its operation number ``operation`` of ``step``."""

    def __init__(self, rank: int, step: int, operation: int) -> None:
        self.rank, self.step, self.operation, self.seen = rank, step, operation, 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy: Any = trainer.strategy
        if strategy.grid_rank == self.rank and strategy.incarnation == 0:
            strategy.executor.before_operation.append(self.count)

    def count(self, step: int, _: Op) -> None:
        if step == self.step:
            if self.seen == self.operation:
                os.kill(os.getpid(), signal.SIGKILL)
            self.seen += 1


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(96, WIDTH, generator=generator, dtype=torch.double) for _ in range(2))
    return TensorDataset(x, y)


def fit(module: L.LightningModule, grid: tuple[int, int, int], *callbacks: L.Callback, **kwargs: Any) -> L.Trainer:
    """Trains ``module`` on (pipelines, stages, members)."""
    pipelines, stages, members = grid
    validates, ckpt_path = kwargs.pop("validates", False), kwargs.pop("ckpt_path", None)
    data, batch = kwargs.pop("data", None) or dataset(), kwargs.pop("batch", BATCH)
    options = {"pipeline_parallel_size": stages, "num_microbatches": 2, "tensor_parallel_size": members}
    strategy = recycle_strategy(**{**options, **kwargs.pop("strategy", {})})
    trainer = L.Trainer(
        accelerator="cpu",
        devices=pipelines * stages * members,
        strategy=strategy,
        callbacks=list(callbacks),
        **{"max_steps": STEPS, **QUIET, **kwargs},
    )
    train, val = (DataLoader(data, batch_size=batch) for _ in range(2))
    trainer.fit(module, train, val if validates else None, ckpt_path=ckpt_path)
    return trainer


def plain_loop(
    pipelines: int,
    clip: float | None = None,
    steps: int = STEPS,
    layers: nn.Sequential | None = None,
    clips: Callable[..., Any] = nn.utils.clip_grad_norm_,
) -> nn.Sequential:
    layers, data = blocks() if layers is None else layers, dataset()
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.01)
    for step in range(steps):
        begin = step * pipelines * BATCH % len(data)
        x, y = data[begin : begin + pipelines * BATCH]
        optimizer.zero_grad()
        (layers(x) - y).square().mean().backward()
        if clip is not None:
            clips(layers.parameters(), clip)
        optimizer.step()
    return layers


def error(module: L.LightningModule, expected: nn.Module) -> float:
    found = {name.split(".", 1)[1]: p for name, p in module.named_parameters()}
    return max(float((found[name] - p).abs().max()) for name, p in expected.named_parameters())


def lost(trainer: L.Trainer) -> int:
    strategy: Any = trainer.strategy
    return sum(event.kind == "failure" for event in strategy.history)


def kinds(trainer: L.Trainer) -> list[str]:
    strategy: Any = trainer.strategy
    return [event.kind for event in strategy.history]


class Waits(L.Callback):
    """Each step waits until a replacement is in, if one of ``of`` workers was lost."""

    def __init__(self, after: int, of: int = 4) -> None:
        self.after, self.of = after, of

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        if trainer.global_step > self.after and len(strategy.live_workers) < self.of:
            time.sleep(1.0)


class KillTwo(L.Callback):
    """Kills two processes before an operation of a step: those of ``ranks``."""

    def __init__(self, *ranks: int, step: int, operation: int) -> None:
        self.kills = [Kill(rank, step, operation) for rank in ranks]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for kill in self.kills:
            kill.on_train_start(trainer, pl_module)


class Victim(L.Callback):
    """Something that happens to the first process of ``rank``."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def is_it(self, trainer: L.Trainer) -> bool:
        strategy: Any = trainer.strategy
        return bool(strategy.grid_rank == self.rank and strategy.incarnation == 0)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class AtHook(Victim):
    """Dies in a hook of this callback, when it is called for the ``number``-th time."""

    def __init__(self, rank: int, hook: str, number: int = 0) -> None:
        super().__init__(rank)
        self.hook, self.left = hook, number
        setattr(self, hook, self.happen)

    def happen(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if self.is_it(trainer):
            if not self.left:
                die()
            self.left -= 1


class AtPoint(Victim):
    """Dies at a point of the run."""

    def __init__(self, rank: int, point: str, step: int) -> None:
        super().__init__(rank)
        self.place = point, step

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        strategy: Any = trainer.strategy
        if self.is_it(trainer):
            strategy.at_point.append(lambda *place: die() if place == self.place else None)
