"""Fast to recover: from SIGKILL to the next committed step, and what that time is made of.

    .venv/bin/python benchmarks/recovery.py            # ten kills, about two minutes
    .venv/bin/python benchmarks/recovery.py --quick    # three kills

Each kill is a run of its own of the example GPT on 2 x 2 workers: at a seeded random step and point of the schedule a
random worker kills itself with SIGKILL. The parts are read from ``trainer.strategy.history``:

- detect: SIGKILL until the coordinator declares the worker dead;
- agree: until all survivors have stopped and reported, and the decision and the new plan are made;
- regroup: until all survivors are connected anew;
- redo: until the step is committed.

The goal is the time of one redone step plus 250 ms; that step is the median of those that the survivors make later in
the same run. Where a step survived the failure because all its gradients were reduced already (it is rolled forward),
the next step that runs counts.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from harness import Spread, console, describe_machine, fit, step_seconds
from overhead import MICROBATCHES, PIPELINES, SIZES, STAGES, Size
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import ReCycleStrategy
from lightning_recycle.callbacks import Fault, FaultInjectionCallback
from lightning_recycle.resilience.messages import Event

__all__ = ["Recovery", "main", "random_fault", "read_recovery", "run"]

SEED = 20_261_120
GOAL = 0.250  # seconds beyond one redone step
FIRST_STEP, LAST_STEP, STEPS_AFTER = 6, 12, 10


@dataclass(frozen=True)
class Recovery:
    """One kill; all in seconds.

    Args:
        fault: what was injected.
        detect: part of the total, as are the next three.
        agree: with the plan.
        regroup: connections.
        redo: the step.
        step_before: median step before the failure.
        step_after: median step of the survivors.
        rolled_forward: whether the step that was under way did not have to be redone.
    """

    fault: Fault
    detect: float
    agree: float
    regroup: float
    redo: float
    step_before: float
    step_after: float
    rolled_forward: bool

    @property
    def total(self) -> float:
        """From SIGKILL to the next committed step."""
        return self.detect + self.agree + self.regroup + self.redo

    @property
    def beyond_step(self) -> float:
        """The total without the time of one step of the survivors."""
        return self.total - self.step_after


def random_fault(draw: random.Random) -> Fault:
    """A SIGKILL at a random worker, step, operation and micro-batch."""
    at = draw.choice(("forward", "backward_input", "backward_weight", "reduce", "optimizer"))
    return Fault(
        "kill",
        pipeline=draw.randrange(PIPELINES),
        stage=draw.randrange(STAGES),
        step=draw.randint(FIRST_STEP, LAST_STEP),
        at=at,
        microbatch=draw.randrange(MICROBATCHES) if at not in ("reduce", "optimizer") else None,
    )


def run(size: Size, fault: Fault) -> Recovery:
    """Trains until some steps after ``fault``."""
    steps = fault.step + 1 + STEPS_AFTER
    loader = DataLoader(TensorDataset(*size.data(steps)), batch_size=size.batch_size)
    strategy = ReCycleStrategy(STAGES, MICROBATCHES)
    callbacks = [FaultInjectionCallback([fault])]
    trainer = fit(size.build(), loader, strategy, devices=PIPELINES * STAGES, steps=steps, callbacks=callbacks)
    before = step_seconds(trainer, 2, fault.step)
    after = step_seconds(trainer, fault.step + 3)
    return read_recovery(trainer.strategy.history, fault, statistics.median(before), statistics.median(after))


def read_recovery(history: Sequence[Event], fault: Fault, step_before: float, step_after: float) -> Recovery:
    """Takes the parts of the one recovery in ``history``."""
    failure = next(event for event in history if event.kind == "failure")
    assert failure.seconds is not None
    later = history[history.index(failure) :]
    resumed, regrouped = (next(e for e in later if e.kind == kind) for kind in ("resumed", "regrouped"))
    connected = later.index(regrouped)
    rolled_forward = any(e.kind == "step" for e in later[:connected])
    committed = next(e for e in later[connected:] if e.kind == "step")
    return Recovery(
        fault,
        failure.seconds,
        resumed.time - failure.time,
        regrouped.time - resumed.time,
        committed.time - regrouped.time,
        step_before,
        step_after,
        rolled_forward,
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three kills of the smallest model")
    parser.add_argument("--kills", type=int, default=10, help="number of runs, each with one kill")
    parser.add_argument("--seed", type=int, default=SEED, help="of the kills")
    options = parser.parse_args(arguments)
    size = SIZES[0] if options.quick else SIZES[1]
    draw = random.Random(options.seed)
    recoveries = []
    kills = Table(title=f"{size.name}, {PIPELINES} x {STAGES} workers; milliseconds")
    for heading in ("killed", "step, at", "detect", "agree", "regroup", "redo", "total", "a step then", "beyond it"):
        kills.add_column(heading, justify="left" if heading in ("killed", "step, at") else "right")
    for _ in range(3 if options.quick else options.kills):
        recovery = run(size, random_fault(draw))
        recoveries.append(recovery)
        fault = recovery.fault
        where = f"{fault.step}, {fault.at}" + ("" if fault.microbatch is None else f" {fault.microbatch}")
        kills.add_row(
            f"({fault.pipeline}, {fault.stage})",
            where + (" (rolled forward)" if recovery.rolled_forward else ""),
            *_milliseconds(recovery.detect, recovery.agree, recovery.regroup, recovery.redo, recovery.total),
            *_milliseconds(recovery.step_after, recovery.beyond_step),
        )
    console.print(kills)

    summary = Table(title=f"{len(recoveries)} kills; milliseconds")
    for heading in ("part", "median", "min", "max"):
        summary.add_column(heading, justify="left" if heading == "part" else "right")
    parts = {
        "detect": [r.detect for r in recoveries],
        "agree (with the plan)": [r.agree for r in recoveries],
        "regroup": [r.regroup for r in recoveries],
        "redo": [r.redo for r in recoveries],
        "total, SIGKILL to the next commit": [r.total for r in recoveries],
        "a step before": [r.step_before for r in recoveries],
        "a step of the survivors": [r.step_after for r in recoveries],
        "total without one step": [r.beyond_step for r in recoveries],
    }
    for name, values in parts.items():
        spread = Spread.of(values)
        summary.add_row(name, *_milliseconds(spread.median, spread.low, spread.high))
    console.print(summary)
    beyond = statistics.median(r.beyond_step for r in recoveries)
    console.print(
        f"Goal: median total without one step <= {1e3 * GOAL:.0f} ms: {'met' if beyond <= GOAL else 'missed'}."
    )
    console.print(describe_machine(), highlight=False)


def _milliseconds(*seconds: float) -> list[str]:
    return [f"{1e3 * value:.0f}" for value in seconds]


if __name__ == "__main__":
    main()
