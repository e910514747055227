"""Fault injection: failures on purpose, at an exact point of the schedule."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import lightning.pytorch as pl
from typing_extensions import override

from lightning_recycle.errors import ConfigurationError, InjectedFaultError
from lightning_recycle.planning.grid import Grid
from lightning_recycle.planning.ops import Op, OpKind
from lightning_recycle.resilience.messages import FaultInjected

__all__ = ["Fault", "FaultInjectionCallback"]

_KINDS = ("kill", "exception")
_POINTS: dict[str, tuple[OpKind, ...]] = {
    "forward": (OpKind.FORWARD,),
    "backward_input": (OpKind.BACKWARD_INPUT, OpKind.BACKWARD),
    "backward_weight": (OpKind.BACKWARD_WEIGHT, OpKind.BACKWARD),
    "reduce": (OpKind.REDUCE,),
    "optimizer": (OpKind.STEP,),
}


@dataclass(frozen=True)
class Fault:
    """One failure.

    Args:
        kind: "kill" (SIGKILL) or "exception" (an infrastructure error in the worker).
        pipeline: of the worker that fails.
        stage: of the worker that fails.
        step: optimizer step, counted from 0.
        at: right before the worker's first operation of this kind in that step: "forward", "backward_input",
            "backward_weight", "reduce" or "optimizer". Where the schedule fuses the backward, both backward points
            are the fused operation.
        microbatch: only before the operation on micro-batch ``microbatch`` (of any pipeline; 0 to M - 1).

    Raises:
        ConfigurationError: for an unknown kind or point, or a negative number.
    """

    kind: str
    pipeline: int
    stage: int
    step: int
    at: str = "forward"
    microbatch: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ConfigurationError(f"{self}: unknown kind {self.kind!r}; use one of {', '.join(map(repr, _KINDS))}.")
        if self.at not in _POINTS:
            raise ConfigurationError(f"{self}: unknown point {self.at!r}; use one of {', '.join(map(repr, _POINTS))}.")
        for name in ("pipeline", "stage", "step"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ConfigurationError(f"{self}: {name} must be an integer of at least 0.")
        if self.microbatch is not None and self.at in ("reduce", "optimizer"):
            raise ConfigurationError(f"{self}: {self.at!r} happens once a step; leave microbatch out.")

    def matches(self, step: int, op: Op) -> bool:
        """Whether the fault is due before ``op`` of ``step`` (on the right worker)."""
        if step != self.step or op.kind not in _POINTS[self.at]:
            return False
        return self.microbatch is None or (op.microbatch is not None and op.microbatch.index == self.microbatch)


class FaultInjectionCallback(pl.Callback):
    """Makes workers fail.

    Args:
        faults: what fails when; each happens once.
    """

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self.faults = tuple(faults)
        for fault in self.faults:
            if not isinstance(fault, Fault):
                raise ConfigurationError(f"FaultInjectionCallback expects Fault(...) objects, got {fault!r}.")

    def check(self, grid: Grid) -> None:
        """Raises ConfigurationError for a fault outside ``grid``."""
        for fault in self.faults:
            if fault.pipeline >= grid.pipelines or fault.stage >= grid.stages:
                raise ConfigurationError(
                    f"{fault}: there is no worker ({fault.pipeline}, {fault.stage}) in a grid of {grid.pipelines}"
                    " pipelines"
                    f" x {grid.stages} stages."
                )
            if fault.microbatch is not None and not 0 <= fault.microbatch < grid.microbatches:
                raise ConfigurationError(f"{fault}: microbatch must be one of 0 to {grid.microbatches - 1}.")

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        executor = getattr(trainer.strategy, "executor", None)
        if executor is None:
            if self.faults:
                raise ConfigurationError(
                    f"FaultInjectionCallback needs strategy='recycle', not {type(trainer.strategy).__name__}:"
                    " with another strategy a fault would end the run."
                )
            return
        mine = [f for f in self.faults if (f.pipeline, f.stage) == (executor.worker.pipeline, executor.worker.stage)]

        def fail_if_due(step: int, op: Op) -> None:
            for fault in mine:
                if fault.matches(step, op):
                    mine.remove(fault)
                    executor.announce_fault(FaultInjected(trainer.global_rank, fault.kind, str(op), time.time()))
                    _fail(fault)

        if mine:
            executor.before_operation.append(fail_if_due)


def _fail(fault: Fault) -> NoReturn:
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # SIGKILL is delivered before this returns
    raise InjectedFaultError(f"Injected: {fault}")
