"""Calls of this package's functions, and messages, per step and worker of the smallest GPT.

    .venv/bin/python benchmarks/step_calls.py            # 2 x 2 and 2 x 1, half a minute
    .venv/bin/python benchmarks/step_calls.py --functions 40

Time on a shared machine is noise, and calls are not. They are counted in the thread that trains, in the middle of a
training, and shown by package as the mean over steps and workers. Generators count each time that they are resumed;
messages are calls that send something over sockets or Gloo.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
from harness import console, fit
from overhead import MICROBATCHES, PIPELINES, SEED, SIZES, Plan
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset

import lightning_recycle
from lightning_recycle import PlanningOptions, ReCycleStrategy

PACKAGE = f"{Path(lightning_recycle.__file__).parent}/"
WARMUP, STEPS = 20, 20
SENDS = ("send", "sendall", "sendmsg")


class CallCounter(L.Callback):
    """Counts between two steps, and leaves what it has counted in a file of its worker."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARMUP:
            self.calls: Counter[str] = Counter()
            sys.setprofile(self._count)
        elif batch_idx == WARMUP + STEPS:
            sys.setprofile(None)
            path = Path(self.directory) / f"{trainer.strategy.grid_rank}.json"  # type: ignore[attr-defined]
            path.write_text(json.dumps(self.calls))

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return
        module = code.co_filename[len(PACKAGE) : -3]
        if event == "call":
            self.calls[f"{module}:{code.co_qualname if sys.version_info >= (3, 11) else code.co_name}"] += 1
        elif event == "c_call" and argument.__name__ in SENDS:
            self.calls[f"{module}!{argument.__name__}"] += 1


def count(stages: int) -> Counter[str]:
    """Calls and messages by function, summed over workers and steps."""
    size, workers = SIZES[-1], PIPELINES * stages
    plan = Plan(size, turns=1, warmup=WARMUP + STEPS)
    loader = DataLoader(TensorDataset(*size.data(plan.steps)), batch_size=size.batch_size)
    with tempfile.TemporaryDirectory() as directory:
        # Otherwise measured times choose the kind of backward.
        strategy = ReCycleStrategy(stages, MICROBATCHES, seed=SEED, planning=PlanningOptions(split_backward=False))
        fit(size.build(), loader, strategy, devices=workers, steps=plan.steps, callbacks=[CallCounter(directory)])
        found: Counter[str] = Counter()
        for rank in range(workers):
            found.update(json.loads((Path(directory) / f"{rank}.json").read_text()))
    return Counter({name: calls / (workers * STEPS) for name, calls in found.items()})  # type: ignore[misc]


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", type=int, default=0, help="also show so many functions")
    options = parser.parse_args()
    found = {stages: count(stages) for stages in (2, 1)}
    for by_function in (False, *([True] if options.functions else [])):
        table = Table("calls per step and worker", *(f"{PIPELINES} x {stages}" for stages in found))
        sums = {}
        for stages, calls in found.items():
            sums[stages] = Counter[str]()
            for name, number in calls.items():
                module, is_call, _ = name.partition(":")
                if by_function:
                    sums[stages][name] += number
                else:
                    package = "/".join(module.split("/")[:2]) if "/" in module else module
                    sums[stages][package if is_call else "messages"] += number
                    sums[stages]["all calls"] += number if is_call else 0
        rows = sums[2].most_common(options.functions if by_function else None)
        for name, _ in rows:
            table.add_row(name, *(f"{sums[stages][name]:.1f}" for stages in found))
        console.print(table)


if __name__ == "__main__":
    main()
