"""Measurements of a worker's operations, and their reports.

Every operation is timed. In some of the first steps a worker also measures what a micro-batch holds
(:mod:`~lightning_recycle.runtime.executor.memory_meter`), what a split backward costs, and, if the run is profiled, its
links and messages (:mod:`~lightning_recycle.runtime.executor.profiling`). Each of these ends with a report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_recycle.control.client import ControlClient
from lightning_recycle.control.protocol import messages
from lightning_recycle.planning.grid import OpKind
from lightning_recycle.planning.profile import SplitTrial
from lightning_recycle.planning.program import Program, Task
from lightning_recycle.runtime.executor.memory_meter import MemoryMeter, peak_bytes
from lightning_recycle.runtime.executor.profiling import SplitTrials, StageProfiler, Timings
from lightning_recycle.runtime.stage.stage import Kept

__all__ = ["StepMeasurements"]

_NOTHING = nullcontext()


class StepMeasurements:
    """The measurements of one worker.

    Args:
        client: the connection to the coordinator.
        device: where the tensors are.
        profiler: measures the stage, if it is to be profiled.
        held: returns the tensors that this process holds between two steps besides those of the stage; None if the
            memory is not to be measured.
        tries_splitting: whether it is measured in the first steps what it costs to split backwards.

    Attributes:
        timings: seconds by kind of operation.
    """

    def __init__(
        self,
        client: ControlClient,
        device: torch.device,
        profiler: StageProfiler | None = None,
        held: Callable[[], Iterable[Tensor]] | None = None,
        tries_splitting: bool = False,
    ) -> None:
        self.timings = Timings()
        self._client, self._device, self._profiler, self._held = client, device, profiler, held
        self._trials = SplitTrials(device) if tries_splitting else None
        self._tried: SplitTrial | None = None
        self._meter: MemoryMeter | None = None

    def hold(self, of_stage: Callable[[], Iterable[Tensor]]) -> None:
        """The worker has other layers; ``of_stage``: returns the tensors that it holds for them between two steps."""
        held = self._held
        self._meter = None if held is None else MemoryMeter(self._device, lambda: [*of_stage(), *held()])

    def follow(self, program: Program) -> None:
        """The worker follows another program from now on."""
        if self._meter is not None:
            self._meter.may_split = program.decoupled or self._trials is not None
            self._meter.recomputes = any(task.recomputed for task in program.tasks)

    def measure_links(self, stage: int, is_last: bool, exchange: Callable[[int, int, bool], None]) -> None:
        """As :meth:`~lightning_recycle.runtime.executor.profiling.StageProfiler.measure_links`, if it is profiled."""
        if self._profiler is not None:
            with self._client.waiting("its neighbours"):
                self._profiler.measure_links(stage, is_last, exchange)

    # ------------------------------------------------------------------ a step

    def begin(self, step: int | None, program: Sequence[Task], buffers: Iterable[Tensor]) -> None:
        """A step begins.

        Args:
            step: the step; None: only a part of a step, which is not measured.
            program: the tasks of the step.
            buffers: those for messages.
        """
        if self._meter is not None:
            self._meter.begin(step, buffers)
        if self._trials is not None:
            self._trials.begin(step, program)

    def operation(self, kind: OpKind, stretch: Callable[[float], None] | None = None) -> AbstractContextManager[None]:
        """The context of an operation; ``stretch``: see
        :meth:`~lightning_recycle.runtime.executor.profiling.Timings.measure`.
        """
        timed = self.timings.measure(kind, self._device, stretch)
        return timed if self._meter is None else self._meter.operation(timed)

    def profiled(self, step: int) -> AbstractContextManager[None]:
        """The context of an F or R of ``step``, for the profile."""
        return self._profiler.forward(step) if self._profiler is not None else _NOTHING

    def after_forward(self, kept: Callable[[], Kept]) -> AbstractContextManager[None]:
        """The context of an F, for the bytes that are held after it; ``kept``: see
        :meth:`~lightning_recycle.runtime.executor.memory_meter.MemoryMeter.forward`.
        """
        return _NOTHING if self._meter is None else self._meter.forward(kept)

    def after_backward(self, waiting: Callable[[], Iterable[Tensor]]) -> AbstractContextManager[None]:
        """The context of a B, for the bytes that wait for its W."""
        return _NOTHING if self._meter is None else self._meter.backward(waiting)

    def trying(self, kind: OpKind, task: Task) -> AbstractContextManager[None]:
        """The context of an operation, for the trial of split backwards."""
        return _NOTHING if self._trials is None else self._trials.operation(kind, task.index)

    def splits(self, task: Task) -> bool:
        """Whether a backward that the plan fuses is split because that is measured."""
        meter, trials = self._meter, self._trials
        return (meter is not None and meter.splits) or (trials is not None and trials.splits(task.index))

    def received(self, value: Any) -> None:
        """``value`` has come from another stage for one micro-batch."""
        if self._meter is not None:
            self._meter.received(value)

    def sent(self, value: Any) -> None:
        """``value`` goes to another stage for one micro-batch."""
        if self._profiler is not None:
            self._profiler.sent(value)
        if self._meter is not None:
            self._meter.sent(value)

    # ------------------------------------------------------------------ reports

    def applied(self, step: int, facts: messages.Facts) -> messages.Applied:
        """The report of ``step``, which was applied."""
        measured = self.timings.take_step()
        seconds, peak = dict(self.timings.seconds), peak_bytes(self._device)
        return messages.Applied(self._client.rank, step, seconds, measured, facts, peak)

    def report(self, step: int) -> None:
        """Sends what is complete after ``step``, which was applied."""
        rank = self._client.rank
        if self._trials is not None and (tried := self._trials.result()) is not None:
            self._client.send(messages.Tried(rank, tried))
            self._trials, self._tried = None, tried
        if self._profiler is not None and step == self._profiler.last_step:
            self._finish_profile(self._profiler)
        if self._meter is not None and (footprint := self._meter.footprint()) is not None:
            self._client.send(messages.Measured(rank, footprint))
            if self._profiler is not None and self._meter.splits:
                self._profiler.waiting_bytes = footprint.after_backward
            self._meter = None

    def _finish_profile(self, profiler: StageProfiler) -> None:
        seconds = self.timings.seconds
        measured = profiler.profile(seconds if self._tried is None else self._tried.divided(seconds))
        steps = profiler.last_step - profiler.first_step + 1
        self._client.send(messages.Profiled(self._client.rank, measured, profiler.latency, profiler.bandwidth, steps))
        self._profiler = None
