"""A worker becomes half as fast, and the plan follows; operations are noisy, and the plan stays.

    .venv/bin/python benchmarks/drift.py            # about three minutes
    .venv/bin/python benchmarks/drift.py --quick    # the first case only

Emulated as in ``emulated.py``: operations sleep for a slot, so a few cores carry all workers, and the planner's
knowledge is exact. In the middle of a run an injected fault makes one worker take twice as long for everything; with
``PlanMonitor`` the others take over its excess work. The step time after that is compared with the period of the best
plan that the planner has for those speeds: the difference is the runtime's own costs and the monitor's estimation
errors. In the other case every operation takes a random time, 20 % around a slot, and nothing must happen.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import torch
from emulated import SleepingModel
from harness import Spread, console, describe_machine, fit
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import ReCycleStrategy
from lightning_recycle.callbacks import Fault, FaultInjectionCallback, PlanMonitor
from lightning_recycle.control.monitoring.history import Event
from lightning_recycle.planning import Costs, Grid, Problem, Worker, plan, retime

SLOT = 0.030  # seconds
FACTOR = 2.0
GOAL = 0.9  # of the throughput that the planner says is possible
WINDOW = 8  # steps


@dataclass(frozen=True)
class Case:
    """A run of ``before`` steps in which nothing happens, and ``after`` steps with a worker that is slow, if any."""

    name: str
    grid: Grid
    slow: Worker | None = None
    noise: float = 0.0
    before: int = 10
    after: int = 60

    @property
    def problem(self) -> Problem:
        """What the strategy plans at first, in slots."""
        return Problem(
            self.grid, Costs.uniform(self.grid.stages), in_flight_limit=(2 * self.grid.stages - 1,) * self.grid.stages
        )

    def slots(self) -> tuple[float, float, float]:
        """Planned periods: before, with the slow worker under the old plan, and under the best plan for it."""
        healthy = plan(self.problem)
        factors = {} if self.slow is None else {self.slow: FACTOR}
        best = plan(replace(self.problem, worker_factors=factors))  # type: ignore[arg-type]
        return healthy.period, retime(healthy, self.problem.costs, factors).period, best.period


CASES = (
    Case("(1, 1) slow", Grid(3, 2, 6), Worker(1, 1)),
    Case("(0, 0) slow", Grid(4, 2, 4), Worker(0, 0)),
    Case("(1, 2) slow", Grid(2, 4, 6), Worker(1, 2)),
    Case("20 % of noise", Grid(3, 2, 6), noise=0.2),
)


@dataclass(frozen=True)
class Measurement:
    """Measurements of one case.

    Args:
        healthy: seconds per step before the worker became slow.
        slow: seconds per step with the old plan after that; None if there were none.
        recovered: seconds per step with the last plan; None without a new plan.
        replans: the changes of plan.
    """

    healthy: Spread
    slow: Spread | None
    recovered: Spread | None
    replans: tuple[Event, ...]

    def recovery(self, case: Case, slot: float = SLOT) -> float:
        """The fraction of the throughput possible at these speeds."""
        assert self.recovered is not None
        return case.slots()[2] * slot / self.recovered.median


def measure(case: Case, slot: float = SLOT, window: int = WINDOW) -> Measurement:
    """Trains through ``case``."""
    steps, grid = case.before + case.after, case.grid
    callbacks = [PlanMonitor(window=window)]
    if case.slow is not None:
        fault = Fault("slow", case.slow.pipeline, case.slow.stage, case.before, factor=FACTOR, steps=case.after)
        callbacks.append(FaultInjectionCallback([fault]))
    samples = torch.zeros(steps * grid.global_microbatches, 4)
    loader = DataLoader(TensorDataset(samples, samples), batch_size=grid.microbatches)
    strategy = ReCycleStrategy(grid.stages, grid.microbatches)
    model = SleepingModel(grid.stages, slot, case.noise)
    trainer = fit(model, loader, strategy, devices=grid.num_workers, steps=steps, callbacks=callbacks)
    history = trainer.strategy.history
    replans = tuple(event for event in history if event.kind == "replanned")
    seconds = {event.step: event.seconds for event in history if event.kind == "step" and event.seconds is not None}

    def spread(first: int, stop: int) -> Spread | None:
        found = [seconds[step] for step in range(first, stop) if step in seconds]
        return Spread.of(found) if found else None

    # The steps in which something changes belong to neither side: stages are a step apart from each other.
    first_change = replans[0].step if replans else steps
    healthy = spread(3, case.before if case.slow is not None else first_change)
    assert healthy is not None
    slow = spread(case.before + 1, first_change - 1) if case.slow is not None else None
    recovered = spread(replans[-1].step + 2, steps) if replans else None
    return Measurement(healthy, slow, recovered, replans)


# ---------------------------------------------------------------------- the table


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first case only")
    options = parser.parse_args(arguments)

    table = Table(title=f"A worker takes {FACTOR:g} times as long; steps in ms, slots of {1e3 * SLOT:.0f} ms")
    headings = (
        "case",
        "healthy",
        "old plan",
        "new plan",
        "best plan",
        "of possible",
        "goal",
        "new plan at",
        "plans",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for case in CASES[:1] if options.quick else CASES:
        found = measure(case)
        name = f"{case.grid}, {case.name}"
        if case.slow is None:
            goal = "none: met" if not found.replans else "none: missed"
            table.add_row(name, found.healthy.milliseconds(0), "", "", "", "", goal, "", str(len(found.replans)))
            continue
        recovery = found.recovery(case) if found.recovered is not None else 0.0
        table.add_row(
            name,
            found.healthy.milliseconds(0),
            found.slow.milliseconds(0) if found.slow is not None else "",
            found.recovered.milliseconds(0) if found.recovered is not None else "never",
            f"{1e3 * SLOT * case.slots()[2]:.0f}",
            f"{recovery:.3f}",
            f"{GOAL} {'met' if recovery >= GOAL else 'missed'}",
            ", ".join(f"+{event.step - case.before}" for event in found.replans),
            str(len(found.replans)),
        )
    console.print(table)
    console.print("Steps: median (min to max). New plan at: steps after the worker became slow.", highlight=False)
    console.print(describe_machine(), highlight=False)


if __name__ == "__main__":
    main()
