"""Throughput with as many workers as there are, against the plan: one batch on one to twice as many lanes.

    .venv/bin/python benchmarks/lanes.py            # about three minutes
    .venv/bin/python benchmarks/lanes.py --quick    # one, as many and twice as many lanes as pipelines

The layers of :mod:`emulated`, whose F, B and W sleep, so that a few cores carry all workers and the plan is known
exactly. 3 pipelines x 2 stages x 4 micro-batches; the batch is the same in all rows. Goal: within 3 % of the plan.
"""

from __future__ import annotations

import argparse
import time

import torch
from emulated import GOAL, SleepingModel
from harness import Spread, console, describe_machine, fit, step_seconds
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import PlanningOptions, RecoveryOptions, ReCycleStrategy
from lightning_recycle.planning import Costs, Grid, retime

GRID = Grid(pipelines=3, stages=2, microbatches=4)
SLOT = 0.050  # seconds
WARMUP = 4


def measure(lanes: int, steps: int) -> tuple[Spread, float]:
    """The seconds of a step on ``lanes`` lanes, and the slots of the plan that ran."""
    strategy = ReCycleStrategy(
        GRID.stages,
        GRID.microbatches,
        planning=PlanningOptions(split_backward=True),
        recovery=RecoveryOptions(
            num_pipelines=GRID.pipelines, min_pipelines=1, max_pipelines=max(lanes, GRID.pipelines), rebalance="never"
        ),
    )
    samples = torch.zeros((WARMUP + steps) * GRID.global_microbatches, 4)
    loader = DataLoader(TensorDataset(samples, samples), batch_size=GRID.microbatches)
    model = SleepingModel(GRID.stages, SLOT)
    trainer = fit(model, loader, strategy, devices=lanes * GRID.stages, steps=WARMUP + steps)
    ran = retime(strategy.schedules[-1], Costs.uniform(GRID.stages))
    return Spread.of(step_seconds(trainer, WARMUP)), ran.period


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three rows")
    parser.add_argument("--steps", type=int, default=10, help="steps to measure of each row")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    table = Table(title=f"Step time against plan, batch of {GRID}, slots of {1e3 * SLOT:.0f} ms")
    for heading in ("lanes", "workers", "plan slots", "plan ms", "measured ms", "ratio", "goal"):
        table.add_column(heading, justify="right")
    most = 2 * GRID.pipelines
    for lanes in (1, GRID.pipelines, most) if options.quick else range(1, most + 1):
        seconds, slots = measure(lanes, options.steps)
        ratio = seconds.median / (slots * SLOT)
        table.add_row(
            str(lanes),
            str(lanes * GRID.stages),
            f"{slots:g}",
            f"{1e3 * slots * SLOT:.0f}",
            seconds.milliseconds(0),
            f"{ratio:.3f}",
            f"{GOAL} {'met' if ratio <= GOAL else 'missed'}",
        )
    console.print(table)
    console.print(f"{time.monotonic() - began:.0f} s. {describe_machine()}", highlight=False)


if __name__ == "__main__":
    main()
