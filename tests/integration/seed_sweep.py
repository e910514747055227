"""Trains once for each seed that is given, in one process, and prints what each run computed and found in its
environment, as a line of JSON: ``seed_sweep.py 1 2``.
"""

import json
import os
import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import lightning as L
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.models import GLOBAL_BATCH, Noisy, Regression
from support.training import QUIET
from torch.utils.data import DataLoader

from lightning_recycle import ReCycleStrategy

AT_IMPORT = os.environ.get("SWEEP_SEED")
"""What a worker finds when it imports the script."""


class Tells(L.Callback):
    """Writes down what each worker finds."""

    def __init__(self) -> None:
        self.folder = Path(mkdtemp())

    def on_fit_start(self, trainer: L.Trainer, *_: Any) -> None:
        found = {
            "at import": AT_IMPORT,
            "set": os.environ.get("SWEEP_SEED"),
            "deleted": os.environ.get("ONLY_IN_RUN_1"),
            "threads": torch.get_num_threads(),
        }
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(found))


def run(number: int, seed: int) -> None:
    os.environ["SWEEP_SEED"] = str(seed)
    os.environ["OMP_NUM_THREADS"] = str(number)
    os.environ.pop("ONLY_IN_RUN_1", None)
    if number == 1:
        os.environ["ONLY_IN_RUN_1"] = "yes"
    L.seed_everything(seed, verbose=False)
    module, tells = Regression(dropout=0.5, specs=True).double(), Tells()
    strategy = ReCycleStrategy(num_microbatches=2)
    trainer = L.Trainer(accelerator="cpu", devices=2, max_steps=4, strategy=strategy, callbacks=[tells], **QUIET)
    trainer.fit(module, DataLoader(Noisy(), batch_size=GLOBAL_BATCH // 2, shuffle=True))
    weights = {name: tensor.tolist() for name, tensor in module.state_dict().items()}
    found = [json.loads(path.read_text()) for path in sorted(tells.folder.iterdir())]
    print("RUN " + json.dumps({"weights": weights, "found": found}), flush=True)


if __name__ == "__main__":
    for position, argument in enumerate(sys.argv[1:], start=1):
        run(position, int(argument))
