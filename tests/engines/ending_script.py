"""A training script of two workers that ends in a way that a test chooses.

``ending_script.py STAGES STEPS SECONDS [raise] [CHECKPOINT.ckpt]``: with ``raise`` the worker at rank 0 raises in step
2; with a path they resume from there.
"""

import os
import sys
import time
from typing import Any

import lightning as L
from support.models import GLOBAL_BATCH, Regression, dataset
from support.training import QUIET
from torch.utils.data import DataLoader

from lightning_recycle import ReCycleStrategy

STAGES, STEPS, SECONDS = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])


class Ending(Regression):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        print("step", self.global_step, "rank", self.trainer.strategy.grid_rank, "pid", os.getpid(), flush=True)
        time.sleep(SECONDS)
        if "raise" in sys.argv and self.global_step == 2 and self.trainer.strategy.grid_rank == 0:
            raise RuntimeError("the user's own")


if __name__ == "__main__":
    strategy = ReCycleStrategy(pipeline_parallel_size=STAGES, num_microbatches=6)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=STEPS, **QUIET)
    loader = DataLoader(dataset(GLOBAL_BATCH * STEPS), batch_size=GLOBAL_BATCH // 2)
    trainer.fit(Ending().double(), loader, ckpt_path=next((word for word in sys.argv if word.endswith(".ckpt")), None))
