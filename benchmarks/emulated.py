"""The schedule is what runs: measured step time against the plan, with operations of a fixed length.

    .venv/bin/python benchmarks/emulated.py            # about a minute
    .venv/bin/python benchmarks/emulated.py --quick    # fewer steps

The running example of the design, 3 pipelines x 4 stages x 6 micro-batches, in 12 worker processes under the real
strategy. Every stage is one layer whose F, B and W each sleep for a slot (20 ms), so that a few cores carry all workers
and the plan is known exactly: slots x 20 ms. What the measured step takes beyond it is the runtime's own: messages,
all-reduce, commit, and the Python of twelve workers that share the cores.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from harness import Spread, console, describe_machine, fit, step_seconds
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import LayerSpec, PipelineModule, ReCycleStrategy, defer_weight_grad
from lightning_recycle.callbacks import Fault, FaultInjectionCallback
from lightning_recycle.planning import Costs, Grid, Problem, Technique, Worker, plan, retime

__all__ = ["CASES", "Case", "Measurement", "SleepingLayer", "SleepingModel", "main", "measure"]

GRID = Grid(pipelines=3, stages=4, microbatches=6)
SLOT = 0.020  # seconds
GOAL = 1.03


# ---------------------------------------------------------------------- the model


class _Slots:
    """Sleeps, and keeps account: each sleep is shortened by what the ones before took too long.

    ``time.sleep`` returns late, the more so when all cores are busy: 0.1 to 0.3 ms of 20 ms here, which no operation of
    fixed length would. So single sleeps differ by that, and their mean is the slot.
    """

    count = 0
    seconds = 0.0
    late = 0.0

    @classmethod
    def sleep(cls, seconds: float) -> None:
        began = time.perf_counter()
        time.sleep(max(0.0, seconds - cls.late))
        took = time.perf_counter() - began
        cls.late += took - seconds
        cls.count += 1
        cls.seconds += took


class _SleepingFunction(torch.autograd.Function):
    """x + shift; its forward, input gradient and weight gradient take a slot each, more or less."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: nn.Parameter, draw: Callable[[], float]) -> Tensor:
        ctx.shift, ctx.draw = shift, draw
        _Slots.sleep(draw())
        return x + shift

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (grad_output,) = grad_outputs
        draw = ctx.draw

        def weight_gradient() -> Tensor:
            _Slots.sleep(draw())
            return grad_output.sum(0)

        _Slots.sleep(draw())
        return grad_output, defer_weight_grad(ctx.shift, weight_gradient), None


class SleepingLayer(nn.Module):
    """A layer of one tiny parameter whose every operation takes ``slot`` seconds, with ``noise`` (the standard
    deviation, as a part of that) only on average.
    """

    def __init__(self, slot: float, noise: float = 0.0) -> None:
        super().__init__()
        self.slot, self.noise = slot, noise
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _SleepingFunction.apply(x, self.shift, self.draw)
        return output

    def draw(self) -> float:
        """Seconds of an operation."""
        return self.slot * max(0.1, random.gauss(1.0, self.noise)) if self.noise else self.slot


class SleepingModel(PipelineModule):
    """One sleeping layer per stage."""

    def __init__(self, stages: int, slot: float, noise: float = 0.0) -> None:
        super().__init__()
        self.stages, self.slot, self.noise = stages, slot, noise

    def configure_pipeline(self) -> list[nn.Module | LayerSpec]:
        return [LayerSpec(SleepingLayer, self.slot, self.noise) for _ in range(self.stages)]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _SleepRecorder(L.Callback):
    """Writes the mean sleep of each worker to ``directory``."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        (self.directory / str(trainer.global_rank)).write_text(str(_Slots.seconds / _Slots.count))

    def mean(self) -> float:
        means = [float(path.read_text()) for path in self.directory.iterdir()]
        return sum(means) / len(means)


# ---------------------------------------------------------------------- a case


@dataclass(frozen=True)
class Case:
    """A schedule to measure; ``failed`` is the worker that is killed before."""

    name: str
    decoupled: bool
    staggered: bool = False
    failed: Worker | None = None
    has_goal: bool = False

    def planned_slots(self) -> float:
        """Slots from step to step if every operation takes exactly one, under the limits that the strategy applies."""
        failed = frozenset({self.failed} if self.failed is not None else ())
        limits = None if failed else (2 * GRID.stages - 1,) * GRID.stages
        technique = Technique(decoupled=self.decoupled, staggered=self.staggered)
        return plan(Problem(GRID, Costs.uniform(GRID.stages), failed, technique, limits)).period


CASES = (
    Case("fault-free, 1F1B", decoupled=False, has_goal=True),
    Case("fault-free, decoupled", decoupled=True),
    Case("fault-free, decoupled, staggered", decoupled=True, staggered=True),
    Case("(1, 2) dead, adaptive only", decoupled=False, failed=Worker(1, 2)),
    Case("(1, 2) dead, decoupled", decoupled=True, failed=Worker(1, 2), has_goal=True),
    Case("(1, 2) dead, decoupled, staggered", decoupled=True, staggered=True, failed=Worker(1, 2)),
)


@dataclass(frozen=True)
class Measurement:
    """Of one case.

    Args:
        seconds: of the measured steps.
        slots: period of the schedule that ran, if every F, B and W took exactly one slot and all else nothing. The
            strategy re-plans with measured times, so this could be more than :meth:`Case.planned_slots`.
        mean_sleep: what a sleep of one slot really took, in seconds.
    """

    seconds: Spread
    slots: float
    mean_sleep: float


def measure(case: Case, steps: int, warmup: int = 4, slot: float = SLOT) -> Measurement:
    """Trains until ``steps`` steps of ``case`` are measured, after ``warmup`` others in the same generation."""
    callbacks: list[L.Callback] = []
    first = warmup
    if case.failed is not None:
        fault = Fault("kill", case.failed.pipeline, case.failed.stage, step=warmup)
        callbacks.append(FaultInjectionCallback([fault]))
        first = 2 * warmup
    samples = torch.zeros((first + steps) * GRID.global_microbatches, 4)
    loader = DataLoader(TensorDataset(samples, samples), batch_size=GRID.microbatches)
    strategy = ReCycleStrategy(GRID.stages, GRID.microbatches, decoupled=case.decoupled, staggered=case.staggered)
    model = SleepingModel(GRID.stages, slot)
    with tempfile.TemporaryDirectory() as directory:
        recorder = _SleepRecorder(directory)
        callbacks.append(recorder)
        trainer = fit(model, loader, strategy, devices=GRID.num_workers, steps=first + steps, callbacks=callbacks)
        mean_sleep = recorder.mean()
    ran = retime(strategy.schedules[-1], Costs.uniform(GRID.stages)).period
    return Measurement(Spread.of(step_seconds(trainer, first)), ran, mean_sleep)


# ---------------------------------------------------------------------- the table


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="five steps of the two cases that have a goal")
    parser.add_argument("--steps", type=int, default=15, help="steps to measure of each case")
    options = parser.parse_args(arguments)
    cases = [case for case in CASES if case.has_goal or not options.quick]
    steps = 5 if options.quick else options.steps

    grid = f"{GRID.pipelines} x {GRID.stages} x {GRID.microbatches}"
    table = Table(title=f"Step time against plan, {grid}, slots of {1e3 * SLOT:.0f} ms, {steps} steps each")
    for heading in ("case", "planned", "ran", "plan ms", "measured ms", "ratio", "goal", "mean sleep"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for case in cases:
        measured = measure(case, steps)
        slots = case.planned_slots()
        ratio = measured.seconds.median / (slots * SLOT)
        table.add_row(
            case.name,
            f"{slots:g}",
            f"{measured.slots:g}",
            f"{1e3 * slots * SLOT:.0f}",
            measured.seconds.milliseconds(0),
            f"{ratio:.3f}",
            "" if not case.has_goal else f"{GOAL} {'met' if ratio <= GOAL else 'missed'}",
            f"{1e3 * measured.mean_sleep:.2f}",
        )
    console.print(table)
    console.print("planned, ran: slots. Measured: median (min to max). Ratio: measured median / plan.", highlight=False)
    console.print(describe_machine(), highlight=False)


if __name__ == "__main__":
    main()
