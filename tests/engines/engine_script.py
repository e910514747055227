"""A training script as a user writes it, for 2 x 2 workers of one machine.

``engine_script.py OUTPUT [STEPS [SECONDS]]`` writes the trained weights to OUTPUT; a step takes at least SECONDS.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from support.models import GLOBAL_BATCH, Regression, dataset
from support.training import QUIET
from torch.utils.data import DataLoader

from lightning_recycle import ReCycleStrategy


class Paced(Regression):
    seconds = 0.0

    def on_train_start(self) -> None:
        print("rank", self.trainer.strategy.grid_rank, "pid", os.getpid(), flush=True)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        print("step", self.global_step, flush=True)
        time.sleep(self.seconds)


def main() -> None:
    output, steps, seconds = Path(sys.argv[1]), *(float(text) for text in [*sys.argv[2:4], "8", "0"][:2])
    model = Paced().double()
    model.seconds = seconds
    devices = int(os.environ.get("DEVICES", "4"))
    strategy = ReCycleStrategy(pipeline_parallel_size=2, num_microbatches=6)
    trainer = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_steps=int(steps), **QUIET)
    trainer.fit(model, DataLoader(dataset(GLOBAL_BATCH * int(steps)), batch_size=GLOBAL_BATCH // 2))
    temporary = output.with_suffix(f".{os.getpid()}")
    torch.save(model.state_dict(), temporary)
    temporary.rename(output)


if __name__ == "__main__":
    main()
