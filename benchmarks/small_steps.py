"""What a step costs beyond its computing: a trivial module with one stage, beside Lightning's DDP.

    python benchmarks/small_steps.py [--workers 4] [--steps 400] [--rounds 2]

One linear layer of 32 x 2 and a batch of 8 per worker, SGD, with and without ``self.log`` in the step. The sides take
turns, each in fresh processes. Printed for each run: milliseconds per step by the clock, of processor time of a
worker, and of that in its main thread.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from harness import console, describe_machine, quieten
from lightning.pytorch.strategies import DDPStrategy
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import ReCycleStrategy

WARMUP = 20


class Trivial(L.LightningModule):
    """One linear layer."""

    def __init__(self, logs: bool) -> None:
        super().__init__()
        self.logs = logs
        self.net = torch.nn.Linear(32, 2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch[0]).square().mean()
        if self.logs:
            self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Clocks(L.Callback):
    """Writes what the steps after the warm-up took into ``folder``."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int) -> None:
        if index == WARMUP:
            torch.set_num_threads(1)
            self.began = time.perf_counter(), time.process_time(), time.thread_time()

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.global_rank == 0:
            ended = time.perf_counter(), time.process_time(), time.thread_time()
            took = [1e3 * (b - a) / (trainer.global_step - WARMUP) for a, b in zip(self.began, ended, strict=True)]
            Path(self.folder, "took").write_text(" ".join(map(str, took)))


def measure(strategy: Any, workers: int, steps: int, logs: bool) -> list[float]:
    """Milliseconds per step: by the clock, of processor time of a worker, and in its main thread."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cpu",
            devices=workers,
            strategy=strategy,
            max_steps=steps,
            callbacks=[Clocks(folder)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Trivial(logs), DataLoader(TensorDataset(torch.randn(8 * workers * steps, 32)), batch_size=8))
        return [float(value) for value in Path(folder, "took").read_text().split()]


def main(arguments: list[str] | None = None) -> None:
    """Measures both sides by turns and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args(arguments)
    quieten()
    torch.set_num_threads(1)
    table = Table("side", "self.log", "ms per step", "processor, ms", "main thread, ms")
    for _ in range(options.rounds):
        for logs in (True, False):
            for name in ("DDP", "ours"):
                strategy = (
                    DDPStrategy(start_method="fork") if name == "DDP" else ReCycleStrategy(pipeline_parallel_size=1)
                )
                took = measure(strategy, options.workers, options.steps, logs)
                table.add_row(name, "yes" if logs else "no", *(f"{value:.2f}" for value in took))
    console.print(table)
    console.print(describe_machine())


if __name__ == "__main__":
    main()
