"""A training script of which the number of workers changes.

``elastic_script.py OUTPUT STEPS SIZES [WANTED ...]``: SIZES is D,S,M and the least and the most pipelines, such as
``2,2,6,1,2``. WANTED is STEP=WORKERS: from that step on it waits until so many workers are there. The trained weights
go to OUTPUT.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from support.growth import AwaitWorkers
from support.models import GLOBAL_BATCH, Regression, dataset
from support.options import recycle_strategy
from support.training import QUIET
from torch.utils.data import DataLoader


class Talking(Regression):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        print("step", self.global_step, "workers", len(strategy.live_workers), "pid", os.getpid(), flush=True)


def main() -> None:
    output, steps = Path(sys.argv[1]), int(sys.argv[2])
    pipelines, stages, microbatches, least, most = map(int, sys.argv[3].split(","))
    wanted = dict(tuple(map(int, text.split("="))) for text in sys.argv[4:])
    model = Talking().double()
    numbers = {"num_pipelines": pipelines, "min_pipelines": least, "max_pipelines": most}
    strategy = recycle_strategy(stages, microbatches, **numbers)
    callbacks = [AwaitWorkers(wanted, steps)]
    trainer = L.Trainer(accelerator="cpu", devices=16, strategy=strategy, max_steps=steps, callbacks=callbacks, **QUIET)
    trainer.fit(model, DataLoader(dataset(GLOBAL_BATCH * steps), batch_size=GLOBAL_BATCH // pipelines))
    temporary = output.with_suffix(f".{os.getpid()}")
    torch.save(model.state_dict(), temporary)
    temporary.rename(output)
    time.sleep(0.1)


if __name__ == "__main__":
    main()
