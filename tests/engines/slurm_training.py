"""A training script for jobs of SLURM: ``slurm_training.py FOLDER STEPS SECONDS [FAULT...] [await] [fail] [members]``.

FOLDER is the Trainer's; the trained weights go to FOLDER/trained.pt. A fault is KIND:PIPELINE:STAGE:AT, and happens in
the first run of a job only. With ``await`` the training does not go on beyond its first steps while a worker is
missing, with ``fail`` it raises an exception in its fourth. With STEP=WORKERS the run begins with one pipeline, may
have six, and waits from that step on until so many workers are there. With ``members`` two processes hold a position,
and print which one and on which node.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.growth import AwaitReplacement, AwaitWorkers
from support.models import GLOBAL_BATCH, Divided, Regression, dataset
from support.training import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_recycle import CheckpointOptions, RecoveryOptions, ReCycleStrategy
from lightning_recycle.callbacks import Fault, FaultInjectionCallback


class Pause(nn.Module):
    """Makes steps last: signals arrive in the middle of one."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self._seconds)
        return x


class Slow(Regression):
    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self._seconds = seconds

    def configure_pipeline(self) -> list[Any]:
        return [Pause(self._seconds), *super().configure_pipeline(), Pause(self._seconds)]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        print("step", self.global_step, flush=True)
        if "fail" in sys.argv and self.global_step == 3:
            raise ValueError("the user's mistake")


class SlowMembers(Slow, Divided):
    def on_train_start(self) -> None:
        print(f"position {self.trainer.strategy.grid_rank // 2} is on {os.environ['SLURMD_NODENAME']}", flush=True)


def main() -> None:
    folder, steps, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    first = os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
    faults = [fault_of(text) for text in sys.argv[4:] if ":" in text] if first else []
    callbacks: list[L.Callback] = [FaultInjectionCallback(faults)]
    if "await" in sys.argv:
        callbacks.append(AwaitReplacement(range(8, steps)))
    wanted = dict(tuple(map(int, text.split("="))) for text in sys.argv[4:] if "=" in text)
    recovery = RecoveryOptions()
    if wanted:
        callbacks.append(AwaitWorkers(wanted, steps))
        recovery = RecoveryOptions(num_pipelines=2, min_pipelines=1, max_pipelines=6)
    members = 2 if "members" in sys.argv else 1
    if members > 1:
        callbacks.append(ModelCheckpoint(folder, "trained", every_n_train_steps=steps))
    nodes, tasks = int(os.environ["SLURM_NNODES"]), int(os.environ["SLURM_NTASKS"])
    trainer = L.Trainer(
        accelerator="cpu",
        devices=tasks // nodes,
        num_nodes=nodes,
        strategy=ReCycleStrategy(
            pipeline_parallel_size=2 // members,
            num_microbatches=6,
            tensor_parallel_size=members,
            checkpoints=CheckpointOptions(signal_timeout=3.0),
            recovery=recovery,
        ),
        max_steps=steps,
        callbacks=callbacks,
        default_root_dir=folder,
        **{**QUIET, "enable_checkpointing": members > 1},
    )
    model = (SlowMembers if members > 1 else Slow)(seconds / 6).double()
    trainer.fit(model, DataLoader(dataset(GLOBAL_BATCH * steps), batch_size=GLOBAL_BATCH // 2))
    folder.mkdir(exist_ok=True)
    temporary = folder / f"trained.{os.getpid()}"
    weights = model.state_dict()
    if members > 1:  # the module holds this member's part of them
        weights = torch.load(folder / "trained.ckpt", weights_only=True)["state_dict"]
    torch.save(weights, temporary)
    temporary.rename(folder / "trained.pt")


def fault_of(text: str) -> Fault:
    kind, pipeline, stage, at = text.split(":")
    if at.isdigit():
        return Fault(kind, int(pipeline), int(stage), step=int(at))
    return Fault(kind, int(pipeline), int(stage), at=at)


if __name__ == "__main__":
    main()
