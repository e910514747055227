"""A training script for 2 x 2 workers that begins with 1 x 2.

``elastic_script.py OUTPUT STEPS SECONDS`` writes the trained weights to OUTPUT; a step takes at least SECONDS.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from support.models import GLOBAL_BATCH, Regression, dataset
from support.options import recycle_strategy
from support.training import QUIET
from torch.utils.data import DataLoader


class Paced(Regression):
    seconds = 0.0

    def on_train_start(self) -> None:
        print("rank", self.trainer.strategy.grid_rank, "pid", os.getpid(), flush=True)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        print("step", self.global_step, flush=True)
        time.sleep(self.seconds)


def main() -> None:
    output, steps, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    model = Paced().double()
    model.seconds = seconds
    strategy = recycle_strategy(2, 6, num_pipelines=2, min_pipelines=1)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=steps, **QUIET)
    trainer.fit(model, DataLoader(dataset(GLOBAL_BATCH * steps), batch_size=GLOBAL_BATCH // 2))
    temporary = output.with_suffix(f".{os.getpid()}")
    torch.save(model.state_dict(), temporary)
    temporary.rename(output)


if __name__ == "__main__":
    main()
