"""How long a checkpoint holds up training: written while all wait, in the background, and by torch's ``async_save``.

    .venv/bin/python benchmarks/checkpoints.py                 # 10, 100 and 1,000 MB on 2 x 2 workers, half an hour
    .venv/bin/python benchmarks/checkpoints.py --megabytes 10  # a minute

The *stall* is the median time of a step with a checkpoint less that of a step without, in the same run; a step lasts
from its first hook to that of the next step, on the leader. *Beside* is the median time of steps in which a checkpoint
was only being written, as a multiple of steps of that run when nothing was written. The state is weights and Adam's
moments in float32, in one file or a folder on the file system of TMPDIR. Torch's asynchronous save is measured in one
process without a strategy, on the same state, which it copies and writes as a folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import console, describe_machine, fit
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import CheckpointOptions, PipelineModule, ReCycleStrategy

LAYERS, BATCH, MICROBATCHES = 4, 32, 4
WARM_UP = 4  # steps


class Square(PipelineModule):
    """Layers of ``width`` x ``width``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def configure_pipeline(self):
        torch.manual_seed(0)
        return [nn.Linear(self.width, self.width) for _ in range(LAYERS)]

    def loss(self, output, target):
        return (output - target).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-4)


def width_of(megabytes: float) -> int:
    """The width with which weights and moments have so many megabytes."""
    return int((megabytes * 1e6 / (3 * 4 * LAYERS)) ** 0.5)


class Notes(L.Callback):
    """The leader notes when each step begins."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._note(trainer, "step")

    def _note(self, trainer: L.Trainer, what: str) -> None:
        if trainer.is_global_zero:
            with open(self._folder / "times.jsonl", "a") as file:
                print(json.dumps([what, trainer.global_step, time.time()]), file=file)


def measure(megabytes: float, background: bool, sharded: bool, saves: int, every: int) -> dict[str, float]:
    """Seconds of a step, the stall of a checkpoint, and steps beside a write as a multiple of others."""
    width, steps = width_of(megabytes), saves * every + 1
    with tempfile.TemporaryDirectory(prefix="checkpoints_") as name:
        folder = Path(name)
        samples = torch.randn(2 * BATCH, width)
        loader = DataLoader(TensorDataset(samples, samples), batch_size=BATCH)
        strategy = ReCycleStrategy(
            pipeline_parallel_size=2,
            num_microbatches=MICROBATCHES,
            checkpoints=CheckpointOptions(
                background=background, save_distributed_checkpoint=sharded, gather_result=False
            ),
        )
        saving = ModelCheckpoint(folder, every_n_train_steps=every, save_top_k=-1)
        run = fit(Square(width), loader, strategy, devices=4, steps=steps, callbacks=[Notes(folder), saving])
        times = [json.loads(line) for line in (folder / "times.jsonl").read_text().splitlines()]
    begins = {step: at for _, step, at in times}
    lengths = {step: begins[step + 1] - begins[step] for step in begins if step + 1 in begins and step >= WARM_UP}
    written = [
        (begun.time, done.time)
        for begun in run.strategy.history
        if begun.kind == "checkpoint_begun"
        for done in run.strategy.history
        if done.kind == "saved" and done.step == begun.step
    ]
    saving = {step for step in lengths if (step + 1) % every == 0}
    beside = {
        step
        for step in lengths.keys() - saving
        if any(begins[step] < end and begin < begins[step + 1] for begin, end in written)
    }
    free = lengths.keys() - saving - beside

    def median(chosen: set[int]) -> float:
        return statistics.median(lengths[step] for step in chosen) if chosen else float("nan")

    step = median(free)
    spent = statistics.median(end - begin for begin, end in written) if written else float("nan")
    return {"step": step, "stall": median(saving) - step, "beside": median(beside) / step, "writing": spent}


def stall_of_torch(megabytes: float, saves: int) -> dict[str, float]:
    """The seconds that torch's ``save`` takes, and that its ``async_save`` takes to return."""
    width = width_of(megabytes)
    state = {f"layer{i}.{kind}": torch.randn(width, width) for i in range(LAYERS) for kind in ("w", "m", "v")}
    with tempfile.TemporaryDirectory(prefix="checkpoints_") as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            waited, stalls = [], []
            for number in range(saves):
                began = time.perf_counter()
                dcp.save(state, checkpoint_id=f"{folder}/{number}")
                waited.append(time.perf_counter() - began)
                began = time.perf_counter()
                pending: Any = dcp.async_save(state, checkpoint_id=f"{folder}/async{number}")
                stalls.append(time.perf_counter() - began)
                pending.result()
        finally:
            dist.destroy_process_group()
    return {"save": statistics.median(waited), "async_save": statistics.median(stalls)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[10.0, 100.0, 1000.0])
    parser.add_argument("--saves", type=int, default=7)
    parser.add_argument("--every", type=int, default=8, help="steps between two checkpoints")
    options = parser.parse_args(arguments)
    table = Table("state", "format", "step", "stall, waited for", "in the background", "of it", "of a step", "beside")
    torchs = Table("state", "torch's save", "its async_save")
    for megabytes in options.megabytes:
        for sharded in (False, True):
            waits, goes_on = (
                measure(megabytes, background, sharded, options.saves, options.every) for background in (False, True)
            )
            table.add_row(
                f"{megabytes:g} MB",
                "folder" if sharded else "file",
                f"{1e3 * goes_on['step']:.0f} ms",
                f"{1e3 * waits['stall']:.0f} ms",
                f"{1e3 * goes_on['stall']:.1f} ms",
                f"{goes_on['stall'] / waits['stall']:.1%}",
                f"{goes_on['stall'] / goes_on['step']:.1%}",
                f"{goes_on['beside']:.2f}",
            )
        found = stall_of_torch(megabytes, options.saves)
        torchs.add_row(f"{megabytes:g} MB", f"{1e3 * found['save']:.0f} ms", f"{1e3 * found['async_save']:.1f} ms")
    console.print(describe_machine())
    console.print(table)
    console.print(torchs)


if __name__ == "__main__":
    main()
