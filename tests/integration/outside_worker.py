"""A training script as a cluster manager starts it, once for each worker.

``outside_worker.py STEPS SECONDS OUTPUT [validate] [await]`` writes the trained weights to OUTPUT, unless another
worker did. With ``await`` the training does not go on beyond its first steps while a worker is missing.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from support.growth import AwaitReplacement
from support.models import GLOBAL_BATCH, Regression, dataset
from support.training import QUIET, difference, plain_loop
from torch.utils.data import DataLoader

from lightning_recycle import ReCycleStrategy


class Slow(Regression):
    seconds = 0.0

    def on_train_start(self) -> None:
        print("rank", self.trainer.strategy.grid_rank, flush=True)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        print("step", self.global_step, flush=True)
        time.sleep(self.seconds)


def error(output: Path, steps: int) -> float:
    """How far the weights in ``output`` are from those of an undisturbed training."""
    weights, _ = torch.load(output, weights_only=True)
    return difference(weights, plain_loop(Slow().double(), dataset(GLOBAL_BATCH * steps), steps))


def main() -> None:
    print("begins", 1, flush=True)
    steps, seconds, output = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
    model = Slow().double()
    model.seconds = seconds
    strategy = ReCycleStrategy(pipeline_parallel_size=2, num_microbatches=6)
    callbacks = [AwaitReplacement(range(8, steps))] if "await" in sys.argv else []
    trainer = L.Trainer(
        accelerator="cpu", devices=2, num_nodes=2, strategy=strategy, max_steps=steps, callbacks=callbacks, **QUIET
    )
    loader = DataLoader(dataset(GLOBAL_BATCH * steps), batch_size=GLOBAL_BATCH // 2)
    trainer.fit(model, loader)
    metrics: Any = None
    if "validate" in sys.argv:
        (metrics,) = trainer.validate(model, DataLoader(dataset(20), batch_size=10), verbose=False)
    temporary = output.with_suffix(f".{os.getpid()}")
    torch.save((model.state_dict(), metrics), temporary)
    temporary.rename(output)


if __name__ == "__main__":
    main()
