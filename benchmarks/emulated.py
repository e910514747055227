"""The schedule is what runs: measured step time against the plan, with operations of a fixed length.

    .venv/bin/python benchmarks/emulated.py            # about five minutes
    .venv/bin/python benchmarks/emulated.py --quick    # the cases with a goal, fewer steps, about two minutes
    .venv/bin/python benchmarks/emulated.py --lanes    # one batch on one to six lanes, and a worker that joins

Layers whose F, B and W sleep, under the real strategy, so that a few cores carry all workers and the plan is known
exactly. Three examples:

- the running example, 3 pipelines x 4 stages x 6 micro-batches in 12 worker processes; every operation
  takes a slot (20 ms), and the plan slots x 20 ms;
- the model of ``make demo`` on its grid, 2 x 2 x 4 in 4 processes; its stages' F, B and W take in slots what they were
  measured to take in seconds in the first steps of this run (``profile=``), the mean of all being one slot;
- one batch of 3 pipelines x 2 stages x 4 micro-batches on one to twice as many lanes; and what it costs the others that
  a worker joins (goal: less than half a step).

The time of a step beyond the plan is the runtime's own: messages, all-reduce, commit, and the Python of all
workers that share the cores. In addition, pairs of schedules are compared: the measured gain of the faster one against
the predicted one (goal: within 3 %).
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import torch
from harness import Spread, console, describe_machine, fit, step_seconds
from overhead import MICROBATCHES, PIPELINES, SIZES, STAGES
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import (
    LayerSpec,
    PipelineModule,
    PlanningOptions,
    RecoveryOptions,
    ReCycleStrategy,
    defer_weight_grad,
)
from lightning_recycle.callbacks import Fault, FaultInjectionCallback
from lightning_recycle.planning import Costs, Grid, Problem, Technique, Worker, plan, retime
from lightning_recycle.planning.costs import Profile, StageProfile, load_profile, save_profile
from lightning_recycle.planning.planner import Switch

GRID = Grid(pipelines=3, stages=4, microbatches=6)
DEMO_GRID = Grid(PIPELINES, STAGES, MICROBATCHES)
LANES_GRID = Grid(pipelines=3, stages=2, microbatches=4)
SLOT = 0.020  # seconds
LANES_SLOT = 0.050
JOIN_SLOT = 0.035  # steps of about half a second
GOAL = 1.03
_FIRST_COUNTED = 3  # steps before those whose processor time counts
PROFILED_STEPS = 14  # the profiler looks at the first ones


# ---------------------------------------------------------------------- the model


class _Slots:
    """Sleeps and keeps account: each sleep is shortened by the excess of earlier ones.

    ``time.sleep`` returns late, the more so when all cores are busy: 0.1 to 0.3 ms of 20 ms here, which no operation of
    fixed length would. So single sleeps differ by that, and their mean is the slot.
    """

    wanted = 0.0
    seconds = 0.0
    late = 0.0
    waited = 0.0  # for a core, within sleeps

    @classmethod
    def sleep(cls, seconds: float) -> None:
        began, waited = time.perf_counter(), _seconds_without_core()
        time.sleep(max(0.0, seconds - cls.late))
        took = time.perf_counter() - began
        cls.waited += _seconds_without_core() - waited
        cls.late += took - seconds
        cls.wanted += seconds
        cls.seconds += took


class _SleepingFunction(torch.autograd.Function):
    """x + shift; forward, input gradient and weight gradient take ``draw(0)``, ``draw(1)`` and ``draw(2)`` seconds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: nn.Parameter, draw: Callable[[int], float]) -> Tensor:
        ctx.shift, ctx.draw = shift, draw
        _Slots.sleep(draw(0))
        return x + shift

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (grad_output,) = grad_outputs
        draw = ctx.draw

        def weight_gradient() -> Tensor:
            _Slots.sleep(draw(2))
            return grad_output.sum(0)

        _Slots.sleep(draw(1))
        return grad_output, defer_weight_grad(ctx.shift, weight_gradient), None


class SleepingLayer(nn.Module):
    """A layer of one tiny parameter whose F, B and W take ``factors`` x ``slot`` seconds, with ``noise`` (the standard
    deviation, as a part of that) only on average.
    """

    def __init__(self, slot: float, noise: float = 0.0, factors: tuple[float, ...] = (1.0, 1.0, 1.0)) -> None:
        super().__init__()
        self.slot, self.noise, self.factors = slot, noise, factors
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _SleepingFunction.apply(x, self.shift, self.draw)
        return output

    def draw(self, operation: int) -> float:
        """Seconds of an operation: F (0), B (1) or W (2)."""
        seconds = self.slot * self.factors[operation]
        return seconds * max(0.1, random.gauss(1.0, self.noise)) if self.noise else seconds


class SleepingModel(PipelineModule):
    """One sleeping layer per stage, with ``costs`` in slots (by default one for everything)."""

    def __init__(self, stages: int, slot: float, noise: float = 0.0, costs: Costs | None = None) -> None:
        super().__init__()
        self.stages, self.slot, self.noise = stages, slot, noise
        self.costs = costs or Costs.uniform(stages)

    def configure_pipeline(self) -> list[nn.Module | LayerSpec]:
        costs = self.costs
        factors = zip(costs.forward, costs.backward_input, costs.backward_weight, strict=True)
        return [LayerSpec(SleepingLayer, self.slot, self.noise, of_stage) for of_stage in factors]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@cache
def _schedstat() -> int:
    return os.open("/proc/self/schedstat", os.O_RDONLY)  # of the main thread


def _seconds_without_core() -> float:
    """How long the main thread has been ready to run while others had the cores."""
    return int(os.pread(_schedstat(), 100, 0).split()[1]) / 1e9


class _SleepRecorder(L.Callback):
    """Writes to ``directory`` how much longer than wanted each worker slept, as a ratio, its processor time, and how
    long it waited for a core outside of sleeps, which repay that.
    """

    def __init__(self, directory: str) -> None:
        self.directory, self.began, self.waited, self.at = Path(directory), 0.0, 0.0, 0

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == _FIRST_COUNTED:  # imports and first calls do not count
            self.began, self.at = time.process_time(), trainer.global_step
            self.waited = _seconds_without_core() - _Slots.waited

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        ratio, steps = _Slots.seconds / _Slots.wanted, max(1, trainer.global_step - self.at)
        computed = (time.process_time() - self.began) / steps
        waited = (_seconds_without_core() - _Slots.waited - self.waited) / steps
        (self.directory / str(trainer.strategy.grid_rank)).write_text(f"{ratio} {computed} {waited}")

    def read(self) -> tuple[float, float, float]:
        """The mean ratio; of a step the processor time of all workers together, and a worker's mean wait for a core."""
        found = [[*map(float, path.read_text().split())] for path in self.directory.iterdir()]
        ratios, computed, waited = zip(*found, strict=True)
        return sum(ratios) / len(ratios), sum(computed), sum(waited) / len(waited)


# ---------------------------------------------------------------------- a case


@dataclass(frozen=True)
class Case:
    """A schedule to measure; ``failed`` is the worker that is killed before. ``costs`` in slots, None: one each.
    ``clips``: whether gradients are clipped by their norm, which never is so large. ``warmup``: steps that do not
    count, of which "auto" needs some to choose. ``slot``: in seconds. ``lanes``: the workers of each stage; None:
    one for each pipeline.
    """

    name: str
    split_backward: Switch
    staggered: bool = False
    failed: Worker | None = None
    has_goal: bool = False
    grid: Grid = GRID
    costs: Costs | None = None
    clips: bool = False
    warmup: int = 4
    slot: float = SLOT
    lanes: int | None = None

    @property
    def recovery(self) -> RecoveryOptions:
        if self.lanes is None:
            return RecoveryOptions()
        most = max(self.lanes, self.grid.pipelines)
        return RecoveryOptions(
            num_pipelines=self.grid.pipelines, min_pipelines=1, max_pipelines=most, rebalance="never"
        )

    @property
    def known_costs(self) -> Costs:
        return self.costs or Costs.uniform(self.grid.stages)

    def planned_slots(self) -> float:
        """Slots from step to step if every operation takes exactly its costs, under the limits that the strategy
        applies.
        """
        present = self.lanes or self.grid.pipelines
        grid = replace(self.grid, lanes=max(present, self.grid.pipelines))
        failed = {self.failed} if self.failed is not None else set()
        failed |= {worker for worker in grid.workers() if worker.pipeline >= present}
        limits = None if failed else (2 * grid.stages - 1,) * grid.stages
        technique = Technique(split_backward=bool(self.split_backward), staggered=self.staggered)
        return plan(Problem(grid, self.known_costs, frozenset(failed), technique, limits)).period


CASES = (
    Case("fault-free, 1F1B", split_backward=False, has_goal=True),
    Case("fault-free, split backward", split_backward=True),
    Case("fault-free, split backward, staggered", split_backward=True, staggered=True),
    Case("fault-free, auto, staggered", split_backward="auto", staggered=True, warmup=14),
    Case("fault-free, split backward, staggered, clipping", split_backward=True, staggered=True, clips=True),
    Case("(1, 2) dead, adaptive only", split_backward=False, failed=Worker(1, 2)),
    Case("(1, 2) dead, split backward", split_backward=True, failed=Worker(1, 2), has_goal=True),
    Case("(1, 2) dead, split backward, staggered", split_backward=True, staggered=True, failed=Worker(1, 2)),
)


LANE_CASES = tuple(
    Case(f"{LANES_GRID}, {n} lanes", True, True, has_goal=True, grid=LANES_GRID, slot=LANES_SLOT, lanes=n)
    for n in range(1, 2 * LANES_GRID.pipelines + 1)
)


def demo_cases(costs: Costs) -> tuple[Case, ...]:
    """1F1B and the zero-bubble plans of ``make demo``'s grid, with ``costs`` in slots."""
    first = Case("demo, fault-free, 1F1B", split_backward=False, grid=DEMO_GRID, costs=costs)
    split = replace(first, name="demo, fault-free, split backward", split_backward=True)
    return first, split, replace(split, name="demo, fault-free, split backward, staggered", staggered=True)


PAIRS = (
    ("staggering wins", "(1, 2) dead, split backward", "(1, 2) dead, split backward, staggered"),
    ("zero-bubble wins, running example", "fault-free, 1F1B", "fault-free, split backward, staggered"),
    ("auto finds it, running example", "fault-free, 1F1B", "fault-free, auto, staggered"),
    ("zero-bubble wins, demo, not staggered", "demo, fault-free, 1F1B", "demo, fault-free, split backward"),
    ("zero-bubble wins, demo", "demo, fault-free, 1F1B", "demo, fault-free, split backward, staggered"),
)
"""(what is compared, slower case, faster case)."""
QUICK_PAIRS = (PAIRS[0], PAIRS[4])


def profile_demo() -> Costs:
    """Trains the model of ``make demo`` for a few steps on its grid, and returns what its stages cost, in slots."""
    size = next(size for size in SIZES if size.name == "tiny")
    loader = DataLoader(TensorDataset(*size.data(PROFILED_STEPS)), batch_size=size.batch_size)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "profile.json"
        # Split backwards, so that stages whose B and W are not fused are measured one by one.
        strategy = ReCycleStrategy(STAGES, MICROBATCHES, planning=PlanningOptions(profile=path, split_backward=True))
        fit(size.build(), loader, strategy, devices=DEMO_GRID.num_workers, steps=PROFILED_STEPS)
        seconds = load_profile(path).costs()
    parts = (seconds.forward, seconds.backward_input, seconds.backward_weight)
    mean = sum(map(sum, parts)) / (len(parts) * STAGES)
    forward, backward_input, backward_weight = (tuple(round(value / mean, 2) for value in part) for part in parts)
    nothing = (0.0,) * STAGES
    return Costs(forward, backward_input, backward_weight, nothing, nothing)


@dataclass(frozen=True)
class Measurement:
    """Measurements of one case.

    Args:
        seconds: durations of the measured steps.
        slots: period of the schedule that ran, if every F, B and W took exactly its costs and all else nothing. The
            strategy re-plans with measured times, so this could be more than :meth:`Case.planned_slots`.
        mean_sleep: what a sleep of one slot really took, in seconds.
        computing: processor time of a step, of all workers together, in seconds.
        waiting: how long a worker waited for a core in a step, on average, in seconds.
    """

    seconds: Spread
    slots: float
    mean_sleep: float
    computing: float
    waiting: float


def measure(case: Case, steps: int, warmup: int | None = None, slot: float | None = None) -> Measurement:
    """Trains until ``steps`` steps of ``case`` are measured, after ``warmup`` others in the same generation."""
    warmup, slot = case.warmup if warmup is None else warmup, slot or case.slot
    callbacks: list[L.Callback] = []
    first, grid, costs = warmup, case.grid, case.known_costs
    if case.failed is not None:
        fault = Fault("kill", case.failed.pipeline, case.failed.stage, step=warmup)
        callbacks.append(FaultInjectionCallback([fault]))
        first = 2 * warmup
    samples = torch.zeros((first + steps) * grid.global_microbatches, 4)
    loader = DataLoader(TensorDataset(samples, samples), batch_size=grid.microbatches)
    model = SleepingModel(grid.stages, slot, costs=costs)
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory() as sleeps:
        profile = None
        if case.costs is not None:
            profile = Path(directory) / "profile.json"
            save_profile(profile, profile_of(costs, slot))
        strategy = ReCycleStrategy(
            grid.stages,
            grid.microbatches,
            planning=PlanningOptions(split_backward=case.split_backward, staggered=case.staggered, profile=profile),
            recovery=case.recovery,
        )
        recorder = _SleepRecorder(sleeps)
        callbacks.append(recorder)
        trainer = fit(
            model,
            loader,
            strategy,
            devices=(case.lanes or grid.pipelines) * grid.stages,
            steps=first + steps,
            callbacks=callbacks,
            gradient_clip_val=1.0 if case.clips else None,
        )
        ratio, computing, waiting = recorder.read()
    ran = retime(strategy.schedules[-1], costs).period
    return Measurement(Spread.of(step_seconds(trainer, first)), ran, slot * ratio, computing, waiting)


def measure_join(steps: int) -> tuple[float, float]:
    """Seconds of a step with the worker that joins, and how much longer the first such step takes."""
    grid = LANES_GRID
    samples = torch.zeros(steps * grid.global_microbatches, 4)
    loader = DataLoader(TensorDataset(samples, samples), batch_size=grid.microbatches)
    recovery = RecoveryOptions(max_restarts=1, rebalance="never")
    planning = PlanningOptions(split_backward=True)
    strategy = ReCycleStrategy(grid.stages, grid.microbatches, planning=planning, recovery=recovery)
    faults = FaultInjectionCallback([Fault("kill", grid.pipelines - 1, 0, step=2)])
    model = SleepingModel(grid.stages, JOIN_SLOT)
    trainer = fit(model, loader, strategy, devices=grid.num_workers, steps=steps, callbacks=[faults])
    (joined,) = (event.step for event in strategy.history if event.kind == "rejoined")
    after = Spread.of(step_seconds(trainer, joined + 2)).median
    return after, step_seconds(trainer, joined, joined + 1)[0] - after


def profile_of(costs: Costs, slot: float) -> Profile:
    """The profile of stages whose F, B and W cost so many slots of ``slot`` seconds."""
    operations = zip(costs.forward, costs.backward_input, costs.backward_weight, strict=True)
    return Profile(tuple(StageProfile(*(slot * slots for slots in of_stage)) for of_stage in operations))


# ---------------------------------------------------------------------- the tables


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="eight steps of the cases that have a goal")
    parser.add_argument("--lanes", action="store_true", help="the batch on one to six lanes alone")
    parser.add_argument("--slot", type=float, default=LANES_SLOT, help="seconds of a slot of the lanes (0.05)")
    parser.add_argument("--steps", type=int, default=15, help="steps to measure of each case")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    costs = Costs.uniform(STAGES) if options.lanes else profile_demo()
    pairs = () if options.lanes else QUICK_PAIRS if options.quick else PAIRS
    compared = {name for _, slower, faster in pairs for name in (slower, faster)}
    on_lanes = [replace(case, slot=options.slot) for case in LANE_CASES if not options.quick or case.lanes in (1, 3, 6)]
    others = () if options.lanes else (*CASES, *demo_cases(costs))
    cases = [c for c in (*others, *on_lanes) if c.has_goal or c.name in compared or not options.quick]
    steps = 8 if options.quick else options.steps
    measured = {case.name: measure(case, steps) for case in cases}

    slots = f"slots of {1e3 * SLOT:.0f} ms (lanes: {1e3 * options.slot:.0f} ms)"
    table = Table(title=f"Step time against plan, {GRID} if nothing else is said, {slots}, {steps} steps each")
    numbers = ("planned", "ran", "plan ms", "measured ms", "ratio", "goal", "mean sleep", "CPU ms", "wait ms")
    for heading in ("case", *numbers):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    planned = {case.name: case.planned_slots() for case in cases}
    for case in cases:
        found, seconds = measured[case.name], planned[case.name] * case.slot
        ratio = found.seconds.median / seconds
        table.add_row(
            case.name,
            f"{planned[case.name]:g}",
            f"{found.slots:g}",
            f"{1e3 * seconds:.0f}",
            found.seconds.milliseconds(0),
            f"{ratio:.3f}",
            "" if not case.has_goal else f"{GOAL} {'met' if ratio <= GOAL else 'missed'}",
            f"{1e3 * found.mean_sleep:.2f}",
            f"{1e3 * found.computing:.0f}",
            f"{1e3 * found.waiting:.1f}",
        )
    console.print(table)
    console.print(
        "planned, ran: slots. Measured: median (min to max). Ratio: measured median / plan. CPU: all workers, a step."
        " Wait: how long a worker waits for a core in a step.",
        highlight=False,
    )
    after, stall = measure_join(40)
    console.print(
        f"a worker joins: steps of {1e3 * after:.0f} ms; it held up the others for {1e3 * stall:.0f} ms,"
        f" {stall / after:.2f} of a step (goal: 0.5, {'met' if stall < after / 2 else 'missed'}).",
        highlight=False,
    )
    if options.lanes:
        console.print(f"{time.monotonic() - began:.0f} s. {describe_machine()}", highlight=False)
        return
    stages = zip(costs.forward, costs.backward_input, costs.backward_weight, strict=True)
    shown = "; ".join(f"stage {stage}: {of[0]:g}, {of[1]:g}, {of[2]:g}" for stage, of in enumerate(stages))
    console.print(
        f"demo: {DEMO_GRID.pipelines} x {DEMO_GRID.stages} x {DEMO_GRID.microbatches}; slots of F, B, W, as"
        f" measured: {shown}.",
        highlight=False,
    )

    wins = Table(title="What the faster schedule wins: step time of the slower one / its own")
    for heading in ("compared", "planned slots", "predicted", "measured", "measured / predicted", "goal"):
        wins.add_column(heading, justify="left" if heading in ("compared", "goal") else "right")
    for name, slower, faster in pairs:
        predicted = planned[slower] / planned[faster]
        won = measured[slower].seconds.median / measured[faster].seconds.median
        wins.add_row(
            name,
            f"{planned[slower]:g} / {planned[faster]:g}",
            f"{predicted:.3f}",
            f"{won:.3f}",
            f"{won / predicted:.3f}",
            f"{2 - GOAL:.2f} {'met' if won / predicted >= 2 - GOAL else 'missed'}",
        )
    console.print(wins)
    console.print(f"{time.monotonic() - began:.0f} s. {describe_machine()}", highlight=False)


if __name__ == "__main__":
    main()
