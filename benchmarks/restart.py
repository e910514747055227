"""Seconds until a run goes on that has lost all workers while a checkpoint was being written.

    .venv/bin/python benchmarks/restart.py            # ten restarts, a minute
    .venv/bin/python benchmarks/restart.py --runs 3

A run on 2 x 2 workers writes a checkpoint of 8 MB at 4 MB/s. Meanwhile one worker gets SIGKILL; ``--apart`` seconds
later, when its replacement is being started, so do the three others. The run starts again from the checkpoint before.
Measured: from the loss of the stage until the new workers have met, and until the end of their first step.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from harness import Spread, console, describe_machine, quieten
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_recycle import RecoveryOptions, ReCycleStrategy
from lightning_recycle.session.checkpoint_files import WholeCheckpointIO

EVERY = 10  # steps from one checkpoint to the next


class SlowIO(WholeCheckpointIO):
    """Names a file a second after it is complete."""

    @override
    def save_checkpoint(
        self, checkpoint: Any, path: Any, storage_options: Any = None, before_naming: Any = None
    ) -> None:
        def later(temporary: Path) -> None:
            time.sleep(1.0)
            if before_naming is not None:
                before_naming(temporary)

        super().save_checkpoint(checkpoint, path, storage_options, later)


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        time.sleep(0.02)
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Pids(L.Callback):
    """Leaves the number of each worker's process in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        if not strategy.incarnation:
            (self._folder / f"{os.getpid()}.pid").touch()


def restart(apart: float) -> tuple[float, float]:
    """Seconds from the loss of all workers to their successors' meeting, and to the end of the first step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=4,
            max_steps=4 * EVERY,
            strategy=ReCycleStrategy(
                pipeline_parallel_size=2,
                recovery=RecoveryOptions(max_restarts=5),
                checkpoint_io=SlowIO(),
            ),
            callbacks=[Pids(folder), ModelCheckpoint(folder / "saved", "{step}", every_n_train_steps=EVERY)],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )

        def kill() -> None:
            while not list((folder / "saved").glob(f".step={2 * EVERY}.*")):  # it is being written
                time.sleep(0.002)
            first, *others = (int(path.stem) for path in folder.glob("*.pid"))
            os.kill(first, signal.SIGKILL)
            time.sleep(apart)
            for pid in others:
                os.kill(pid, signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
        data = torch.randn(16 * 4 * EVERY, 16)
        trainer.fit(Model(), DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=8))
    history = list(trainer.strategy.history)  # type: ignore[attr-defined]
    lost = next(n for n, event in enumerate(history) if event.kind == "stage_lost")
    met, step = (next(e.time for e in history[lost:] if e.kind == kind) for kind in ("resumed", "step"))
    return met - history[lost].time, step - history[lost].time


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--apart", type=float, default=0.3, help="seconds between the first kill and the others")
    options = parser.parse_args(arguments)
    quieten()
    met, step = zip(*(restart(options.apart) for _ in range(options.runs)), strict=True)
    console.print(
        f"Workers have met again after {Spread.of(met).milliseconds(0)} ms, median (range) of {options.runs}."
    )
    console.print(f"The first step has ended after {Spread.of(step).milliseconds(0)} ms.")
    console.print(describe_machine())


if __name__ == "__main__":
    main()
