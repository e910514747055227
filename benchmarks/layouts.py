"""Layers that move after a loss: steps against re-routing alone, and how long a move holds everybody up.

    .venv/bin/python benchmarks/layouts.py              # the two losses, about six minutes
    .venv/bin/python benchmarks/layouts.py --stalls     # moves of 10 MB, 100 MB and 1 GB, some minutes

Layers whose F, B and W sleep, under the real strategy, 4 pipelines x 4 stages x 16 micro-batches in 16 processes, 16
layers a stage; a few cores carry all workers. Workers are killed at one step, and steps are timed once nothing changes
any more: with ``rebalance="never"`` and with "auto", which decides by what it has measured. Goals: 1.2 times
the throughput with one worker dead (whole layers allow 1.23), 1.35 times with half of a stage gone, and the steps that
were predicted, within 3 %. A third case has stages of four layers, of which whole ones allow 1.07 times and shared
ones 1.25, the ideal.

A move of some bytes: a model of large layers on 2 x 2 workers, of which one goes to the other stage and back, besides
the state of AdamW, sent while all wait. The stall is how much longer the step with the move takes than
the others; beside it is what it takes to copy as many bytes once in memory, which no transfer can beat.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import lightning as L
import torch
from emulated import SleepingLayer
from harness import console, describe_machine, fit, step_seconds
from lightning.pytorch.callbacks import Callback
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import LayerSpec, PipelineModule, RecoveryOptions, ReCycleStrategy
from lightning_recycle.callbacks import Fault, FaultInjectionCallback
from lightning_recycle.planning import Grid, Worker

GRID = Grid(pipelines=4, stages=4, microbatches=16)
LAYERS = 16  # of a stage
SLOT = 0.003  # seconds of F, B and W of a layer
KILLED_AT = 14
SETTLED = 6  # steps after the loss
STEPS = 8


class Sleeping(PipelineModule):
    """Layers that sleep, all alike."""

    def __init__(self, layers: int, slot: float) -> None:
        super().__init__()
        self.count, self.slot = layers, slot

    def configure_pipeline(self) -> list[nn.Module | LayerSpec]:
        return [LayerSpec(SleepingLayer, self.slot) for _ in range(self.count)]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@dataclass(frozen=True)
class Case:
    """A loss, how many times the throughput of re-routing is the goal, and how many of ``LAYERS`` are one."""

    name: str
    failed: tuple[Worker, ...]
    goal: float
    thick: int = 1


CASES = (
    Case("one worker dead", (Worker(1, 2),), 1.2),
    Case("half of a stage gone", (Worker(1, 2), Worker(3, 2)), 1.35),
    Case("one worker dead, four layers a stage", (Worker(1, 2),), 1.2, thick=4),
)


@dataclass(frozen=True)
class Measurement:
    """What a run showed.

    Args:
        seconds: of a step after the loss, the median.
        before: of a step without a loss.
        predicted: of a step with the layout that was chosen; 0 if none was.
        cuts: the layout; empty for that of the start.
        stall: how much longer than others the steps took in which layers moved.
    """

    seconds: float
    before: float
    predicted: float = 0.0
    cuts: tuple[float, ...] = ()
    stall: float = 0.0


def measure(case: Case, rebalance: str, grid: Grid = GRID, layers: int = LAYERS, slot: float = SLOT) -> Measurement:
    """Trains through the loss of ``case``."""
    first = KILLED_AT + SETTLED
    faults = [Fault("kill", worker.pipeline, worker.stage, step=KILLED_AT) for worker in case.failed]
    samples = torch.zeros((first + STEPS) * grid.global_microbatches, 4)
    trainer = fit(
        Sleeping(grid.stages * layers // case.thick, slot * case.thick),
        DataLoader(TensorDataset(samples, samples), batch_size=grid.microbatches),
        ReCycleStrategy(grid.stages, grid.microbatches, recovery=RecoveryOptions(rebalance=rebalance)),
        devices=grid.num_workers,
        steps=first + STEPS,
        callbacks=[FaultInjectionCallback(faults)],
    )
    moved = [event for event in trainer.strategy.history if event.kind == "layers_moved" and event.step >= KILLED_AT]
    for event in trainer.strategy.history:
        if event.kind == "layout":
            console.print(*event.details["why"], sep="\n", style="dim")
    before = statistics.median(step_seconds(trainer, 4, KILLED_AT))
    after = statistics.median(step_seconds(trainer, first))
    if not moved:
        return Measurement(after, before)
    details = moved[-1].details
    in_move = max(step_seconds(trainer, moved[-1].step, moved[-1].step + 2))
    return Measurement(after, before, details["step_after"], tuple(details["cuts"]), in_move - after)


# ---------------------------------------------------------------------- the stall of a move


class Wide(PipelineModule):
    """Layers of ``megabytes`` of parameters, gradients not counted."""

    def __init__(self, megabytes: float) -> None:
        super().__init__()
        self.width = int((megabytes * 1e6 / 4) ** 0.5)

    def configure_pipeline(self) -> list[nn.Module | LayerSpec]:
        small = [LayerSpec(nn.Linear, 8, self.width), LayerSpec(nn.Linear, self.width, 8)]
        return [small[0], *(LayerSpec(nn.Linear, self.width, self.width) for _ in range(2)), small[1]]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class _Moves(Callback):
    """One layer goes to the other stage after ``step``."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.strategy.move_layers([1, 3])


@dataclass(frozen=True)
class Stall:
    """What a move has cost.

    Args:
        usual: seconds of a step.
        longest: how much longer the step with the move took.
        all_together: how much longer all steps took from the wish to the end of the move.
    """

    usual: float
    longest: float
    all_together: float


def measure_stall(megabytes: float, step: int = 6, steps: int = 30) -> Stall:
    """Moves a layer of so much state."""
    samples = torch.zeros(steps * 8, 8)
    trainer = fit(
        Wide(megabytes / 3),  # parameters, and two moments
        DataLoader(TensorDataset(samples, samples), batch_size=4),
        ReCycleStrategy(2, 2, recovery=RecoveryOptions(rebalance="never")),
        devices=4,
        steps=steps,
        callbacks=[_Moves(step)],
    )
    (moved,) = (event for event in trainer.strategy.history if event.kind == "layers_moved")
    end = moved.step + 2
    usual = statistics.median([*step_seconds(trainer, 2, step - 1), *step_seconds(trainer, end)])
    meanwhile = step_seconds(trainer, step - 1, end)
    longest = max(step_seconds(trainer, moved.step - 1, end)) - usual
    return Stall(usual, longest, sum(meanwhile) - usual * len(meanwhile))


def copy_seconds(size: float) -> float:
    """Seconds to copy ``size`` bytes once in memory: what no transfer can beat."""
    source = torch.ones(int(size / 4))
    began = time.perf_counter()
    source.clone()
    return time.perf_counter() - began


# ---------------------------------------------------------------------- the tables


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stalls", action="store_true", help="moves of 10 MB, 100 MB and 1 GB")
    parser.add_argument("--slot", type=float, default=SLOT, help="seconds of F, B and W of a layer")
    options = parser.parse_args(arguments)
    console.print(describe_machine())
    if options.stalls:
        columns = "a step", "the step with the move", "all steps meanwhile", "the bytes, copied once"
        table = Table("moved", *columns, title="Stall of a move")
        for megabytes in (10, 100, 1000):
            stall = measure_stall(megabytes)
            table.add_row(
                f"{megabytes} MB",
                f"{stall.usual:.3f} s",
                f"{stall.longest:.3f} s longer",
                f"{stall.all_together:.3f} s longer",
                f"{copy_seconds(megabytes * 1e6):.3f} s",
            )
        console.print(table)
        return
    columns = "re-routed", "layers moved", "times the throughput", "goal", "predicted", "off by", "layout", "the move"
    table = Table("", "before", *columns, title=f"A step after a loss, {GRID}")
    for case in CASES:
        rerouted = measure(case, "never", slot=options.slot)
        moved = measure(case, "auto", slot=options.slot)
        sizes = "/".join(f"{round(end - start, 2):g}" for start, end in pairwise(moved.cuts))
        table.add_row(
            case.name,
            f"{rerouted.before:.3f} s",
            f"{rerouted.seconds:.3f} s",
            f"{moved.seconds:.3f} s",
            f"{rerouted.seconds / moved.seconds:.3f}",
            f"{case.goal}",
            f"{moved.predicted:.3f} s",
            f"{100 * (moved.seconds / moved.predicted - 1):+.1f} %" if moved.predicted else "",
            sizes or "as before",
            f"{moved.stall:.3f} s",
        )
    console.print(table)


if __name__ == "__main__":
    main()
