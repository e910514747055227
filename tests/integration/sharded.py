"""Runs on positions of several processes, and the plain loop that they must equal."""

import math
import os
import signal
import time
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import lightning as L
import torch
from support.blocks import WIDTH, blocks
from support.options import recycle_strategy
from support.training import QUIET, TOLERANCE
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import PipelineModule
from lightning_recycle.launch.launcher import INCARNATIONS_PER_START
from lightning_recycle.planning import Op

STEPS, BATCH = 4, 4  # samples of a pipeline in a step
TENSOR, FSDP, BOTH = (2, 1, 2), (2, 1, 2, 1), (2, 1, 2, 2)
"""Pipelines, stages, FSDP shards if there are any, and tensor parallelism."""


def make_parallel(layers: Any, mesh: Any) -> None:
    """Divides each of ``layers`` over ``mesh`` as for Lightning's ``ModelParallelStrategy``."""
    for block in layers:
        if mesh["tensor_parallel"].size() > 1:
            parallelize_module(block, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if mesh["data_parallel"].size() > 1:
            fully_shard(block, mesh=mesh["data_parallel"])


class Ordinary(L.LightningModule):
    """As it would be written for ModelParallelStrategy; without a mesh it is trained alone."""

    def __init__(self) -> None:
        super().__init__()
        self.model = blocks()

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        if mesh is None:
            return
        make_parallel(self.model, mesh)
        if mesh["data_parallel"].size() > 1:
            fully_shard(self.model, mesh=mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if self.device_mesh is not None and self.device_mesh["tensor_parallel"].size() > 1:
            assert any(isinstance(p, DTensor) for p in self.parameters()), "the layers are sharded"
        loss = (self.model(x) - y).square().mean()
        self.log("train", loss, on_step=False, on_epoch=True)
        return loss

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
        if self.device_mesh is not None:
            make_parallel(self.layers, self.device_mesh)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Kill(L.Callback):
    """Kills the first process of ``rank`` in an attempt of the run, before its operation number ``operation`` of
    ``step``.
    """

    def __init__(self, rank: int, step: int, operation: int, attempt: int = 0) -> None:
        self.rank, self.step, self.operation, self.seen = rank, step, operation, 0
        self.incarnation = attempt * INCARNATIONS_PER_START

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy: Any = trainer.strategy
        if strategy.grid_rank == self.rank and strategy.incarnation == self.incarnation:
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


def fit(module: L.LightningModule, grid: tuple[int, ...], *callbacks: L.Callback, **kwargs: Any) -> L.Trainer:
    """Trains ``module`` on (pipelines, stages, [FSDP shards,] tensor parallelism)."""
    validates, ckpt_path = kwargs.pop("validates", False), kwargs.pop("ckpt_path", None)
    data, batch = kwargs.pop("data", None) or dataset(), kwargs.pop("batch", BATCH)
    train, val = (DataLoader(each, batch_size=batch) for each in (data, kwargs.pop("val", None) or data))
    trainer = trainer_for(grid, *callbacks, **kwargs)
    trainer.fit(module, train, val if validates else None, ckpt_path=ckpt_path)
    return trainer


def trainer_for(grid: tuple[int, ...], *callbacks: L.Callback, **kwargs: Any) -> L.Trainer:
    _, stages, *shards, tensor = grid
    options = {"pipeline_parallel_size": stages, "num_microbatches": 2, "tensor_parallel_size": tensor}
    options |= {"fsdp_size": shards[0]} if shards else {}
    strategy = recycle_strategy(**{**options, **kwargs.pop("strategy", {})})
    more = {"max_steps": STEPS, **QUIET, **kwargs}
    return L.Trainer(accelerator="cpu", devices=math.prod(grid), strategy=strategy, callbacks=list(callbacks), **more)


def parts_of(grid: tuple[int, ...]) -> int:
    """The number of parts of a global batch, of ``BATCH`` samples each."""
    return grid[0] * (grid[2] if len(grid) > 3 else 1)


def plain_loop(
    parts: int,
    clip: float | None = None,
    steps: int = STEPS,
    layers: nn.Sequential | None = None,
    clips: Callable[..., Any] = nn.utils.clip_grad_norm_,
) -> nn.Sequential:
    """Trains on one device with the batches of ``parts`` pipelines, or FSDP's shards of them."""
    layers, data = blocks() if layers is None else layers, dataset()
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.01)
    for step in range(steps):
        begin = step * parts * BATCH % len(data)
        x, y = data[begin : begin + parts * BATCH]
        optimizer.zero_grad()
        (layers(x) - y).square().mean().backward()
        if clip is not None:
            clips(layers.parameters(), clip)
        optimizer.step()
    return layers


def error(module: L.LightningModule, expected: nn.Module) -> float:
    found = {name.split(".", 1)[1]: p for name, p in module.named_parameters()}
    return max(float((found[name] - p).detach().abs().max()) for name, p in expected.named_parameters())


def lost(trainer: L.Trainer) -> int:
    return sum(event.kind == "failure" for event in trainer.strategy.history)


def exact_fit(
    module: L.LightningModule,
    grid: tuple[int, ...],
    *callbacks: L.Callback,
    losses: int | None = None,
    layers: nn.Sequential | None = None,
    **kwargs: Any,
) -> L.Trainer:
    """:func:`fit`, whose weights must be those of :func:`plain_loop`, with as many losses as there are kills, unless
    ``losses`` are given; and with replacements in the end, if the run has them.
    """
    parts = parts_of(grid) * kwargs.get("batch", BATCH) // BATCH * kwargs.get("accumulate_grad_batches", 1)
    steps, clip = kwargs.get("max_steps", STEPS), kwargs.get("gradient_clip_val")
    clips = getattr(nn.utils, f"clip_grad_{kwargs.get('gradient_clip_algorithm', 'norm')}_")
    trainer = fit(module, grid, *callbacks, **kwargs)
    history: Any = trainer.strategy.history
    assert lost(trainer) == (sum(hasattr(one, "rank") for one in callbacks) if losses is None else losses), history
    if any(isinstance(callback, Waits) for callback in callbacks):
        assert any(event.kind == "rejoined" for event in history), history
    assert error(module, plain_loop(parts, clip, steps, layers, clips)) < TOLERANCE
    return trainer


class Waits(L.Callback):
    """Each step waits until a replacement is in, if one of ``of`` workers was lost."""

    def __init__(self, after: int, of: int = 4) -> None:
        self.after, self.of = after, of

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step > self.after and len(trainer.strategy.live_workers) < self.of:
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
        return bool(trainer.strategy.grid_rank == self.rank and trainer.strategy.incarnation == 0)


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
        if self.is_it(trainer):
            trainer.strategy.at_point.append(lambda *place: die() if place == self.place else None)


def run_collectives_by(replaced: Callable[..., Any]) -> None:
    """Replaces ``MemberGroup.run``, also as what collectives are called by."""
    from lightning_recycle.runtime.position_mesh import MemberGroup

    MemberGroup.run = replaced
    for name, method in list(vars(MemberGroup).items()):
        if isinstance(method, partialmethod):
            setattr(MemberGroup, name, partialmethod(replaced, *method.args))


class AtCollective(Victim):
    """Dies before its collective number ``number`` of ``step``, or after it; without a number, counts them in
    ``report``.
    """

    def __init__(self, rank: int, step: int, number: int | None, when: str = "before", report: Path | None = None):
        super().__init__(rank)
        self.step, self.number, self.when, self.report, self.seen = step, number, when, report, 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self.is_it(trainer):
            return
        from lightning_recycle.runtime.position_mesh import MemberGroup

        strategy: Any = trainer.strategy
        run: Callable[..., Any] = MemberGroup.run

        def counted(group: Any, *args: Any, **options: Any) -> Any:
            is_due = strategy.executor.version == self.step and self.seen == self.number
            self.seen += strategy.executor.version == self.step
            if is_due and self.when == "before":
                die()
            work = run(group, *args, **options)
            if is_due:
                die()
            if self.report is not None:
                self.report.write_text(str(self.seen))
            return work

        run_collectives_by(counted)


def name(value: Any) -> str:
    """Of a parameter of a test."""
    if isinstance(value, L.Callback):
        facts = (f"{v}" for v in vars(value).values() if isinstance(v, (int, str, tuple)))
        return f"{type(value).__name__}-{'-'.join(facts)}"
    return " ".join(map(name, value)) if isinstance(value, list) else getattr(value, "__name__", str(value))
