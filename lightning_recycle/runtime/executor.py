"""The executor: runs a worker's part of the schedule, and of the recovery when one is announced.

The schedule is data. :meth:`Executor.run_step` walks through this worker's program; receives are posted at the start
of the step and sends leave as soon as their value exists, so communication follows from the program and needs no
operations of its own. A step ends with the commit: nobody applies a step before every stage holds its reduced gradient.

When a generation is announced, whatever the executor is doing ends with :class:`Interrupted` or
:class:`CommunicationError`; it then reports what it holds, connects anew, does what the decision says, and runs the
step again if it was not committed. Nothing of that shows outside :meth:`run_step`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_recycle.planning.grid import Grid, Microbatch, Worker
from lightning_recycle.planning.ops import Op, OpKind
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.resilience.client import ControlClient, Interrupted
from lightning_recycle.resilience.messages import Activity, Broken, Connected, FaultInjected, Report, Resume
from lightning_recycle.resilience.recovery import Action, WorkerStatus
from lightning_recycle.runtime.communicator import Channel, CommunicationError, Communicator, Incoming
from lightning_recycle.runtime.data import MicrobatchLoader, StepHandle, global_index
from lightning_recycle.runtime.gradients import GradientBuffers
from lightning_recycle.runtime.stage import Stage

__all__ = ["CommitPayload", "Executor", "StepResult"]

log = logging.getLogger(__name__)

_SMOOTHING = 0.2  # weight of the newest measurement in the operation times
_ANNOUNCEMENT_TIMEOUT = 60.0  # seconds from a broken connection to the coordinator's word on it


@dataclass(frozen=True)
class CommitPayload:
    """What a stage tells all others when it is REDUCED.

    Args:
        squared_norm: of its reduced gradient; NaN if nobody wants it.
        loss: mean over the global batch; on the last stage only.
        operation_seconds: this worker's mean time of each kind of operation, without waiting, by name.
    """

    squared_norm: float
    loss: float | None
    operation_seconds: dict[str, float]


@dataclass(frozen=True)
class StepResult:
    """What every worker knows when a step is committed: the mean loss and, if wanted, the norm of all gradients."""

    loss: float
    gradient_norm: float


@dataclass
class _Timings:
    """Smoothed seconds by kind of operation. REDUCE keeps its minimum: the rest of it is waiting for peers."""

    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, kind: OpKind, seconds: float) -> None:
        old = self.seconds.get(kind.value)
        if old is None:
            self.seconds[kind.value] = seconds
        elif kind is OpKind.REDUCE:
            self.seconds[kind.value] = min(old, seconds)
        else:
            self.seconds[kind.value] = (1 - _SMOOTHING) * old + _SMOOTHING * seconds


class Executor:
    """Runs one worker.

    Args:
        worker: its position.
        grid: of the run.
        client: connection to the coordinator.
        communicator: connection to the other workers.
        stage: the layers.
        gradients: their gradients; the last stage has one extra, the sum of the losses.
        split: turns a collated micro-batch into (input, target) on the device.
        needs_norm: whether the norm of the gradient is wanted with each step.
    """

    def __init__(
        self,
        worker: Worker,
        grid: Grid,
        client: ControlClient,
        communicator: Communicator,
        stage: Stage,
        gradients: GradientBuffers,
        split: Callable[[Any], tuple[Any, Any]],
        needs_norm: bool = False,
    ) -> None:
        self.worker = worker
        self.grid = grid
        self.version = 0
        self.schedule: Schedule | None = None
        self.before_operation: list[Callable[[int, Op], None]] = []
        self.on_generation: Callable[[], None] = lambda: None
        self._client = client
        self._communicator = communicator
        self._stage = stage
        self._gradients = gradients
        self._split = split
        self._needs_norm = needs_norm
        self._is_last = worker.stage == grid.stages - 1
        self._reduced = False
        self._payload: CommitPayload | None = None
        self._result: StepResult | None = None
        self._timings = _Timings()
        self._incoming: dict[Op, Incoming] = {}
        self._handle = StepHandle(0, 0)
        self._loader: MicrobatchLoader | None = None
        self._apply: Callable[[StepResult], None] | None = None
        client.on_interrupt = self._on_interrupt
        client.regroup = self.regroup

    # ------------------------------------------------------------------ a step

    def run_step(self, loader: MicrobatchLoader, handle: StepHandle, apply: Callable[[StepResult], None]) -> StepResult:
        """Runs step :attr:`version` until it is committed and applied.

        Args:
            loader: where the micro-batches of the step come from.
            handle: the step's data.
            apply: steps the optimizer; called exactly once, with what the commit tells.
        """
        self._loader, self._handle, self._apply = loader, handle, apply
        loader.begin_step(handle)
        target = self.version + 1
        while self.version < target:
            try:
                if self._client.interrupted:
                    self.regroup()
                else:
                    self._run_program()
            except Interrupted:
                continue
            except CommunicationError as error:
                self._await_verdict(error)
        assert self._result is not None
        return self._result

    def _run_program(self) -> None:
        assert self.schedule is not None
        program = self.schedule.program(self.worker)
        self._gradients.begin()
        self._post_receives(program)
        for op in program:
            if self._client.interrupted:
                raise Interrupted
            self._client.activity = Activity(self.version, str(op), "", time.monotonic())
            for hook in self.before_operation:
                hook(self.version, op)
            if op.kind is OpKind.FORWARD:
                self._forward(op)
            elif op.kind in (OpKind.BACKWARD, OpKind.BACKWARD_INPUT):
                self._backward(op)
            elif op.kind is OpKind.BACKWARD_WEIGHT:
                with self._timed(op):
                    self._stage.backward_weight(self._index(op))
            elif op.kind is OpKind.REDUCE:
                self._reduce(op)
            elif op.kind is OpKind.STEP:
                self._commit()

    def _post_receives(self, program: tuple[Op, ...]) -> None:
        """Posts every receive of the step, in the order in which the program needs them."""
        self._incoming = {}
        for op in program:
            source = self._input_source(op)
            if source is not None:
                self._incoming[op] = self._communicator.post_receive(
                    _channel(op), self.grid.rank(source), self._index(op)
                )

    def _input_source(self, op: Op) -> Worker | None:
        """The worker whose output ``op`` needs, if it is another one."""
        assert self.schedule is not None
        if op.kind is OpKind.FORWARD and op.stage > 0:
            return self.schedule.route(op.stage - 1, _microbatch(op))
        if op.kind in (OpKind.BACKWARD, OpKind.BACKWARD_INPUT) and not self._is_last:
            return self.schedule.route(op.stage + 1, _microbatch(op))
        return None

    def _forward(self, op: Op) -> None:
        assert self.schedule is not None
        microbatch, index = _microbatch(op), self._index(op)
        decoupled = self.schedule.problem.technique.decoupled
        inputs = target = None
        if op.stage == 0 or self._is_last:
            assert self._loader is not None
            inputs, target = self._split(self._loader.fetch(self._handle, microbatch))
        if op.stage > 0:
            inputs = self._receive(op)
        with self._timed(op):
            output = self._stage.forward(self.version, index, inputs, decoupled=decoupled)
            if self._is_last:
                loss = self._stage.loss(index, output, target, self.grid.global_microbatches)
                self._gradients.extras[0] += loss.to(self._gradients.extras.dtype)
        if not self._is_last:
            destination = self.schedule.route(op.stage + 1, microbatch)
            self._communicator.send(_channel(op), output, self.grid.rank(destination), index)

    def _backward(self, op: Op) -> None:
        assert self.schedule is not None
        grads = None if self._is_last else self._receive(op)
        with self._timed(op):
            if op.kind is OpKind.BACKWARD:
                input_grads = self._stage.backward(self._index(op), grads)
            else:
                input_grads = self._stage.backward_input(self._index(op), grads)
        if input_grads is not None:
            destination = self.schedule.route(op.stage - 1, _microbatch(op))
            self._communicator.send(_channel(op), input_grads, self.grid.rank(destination), self._index(op))

    def _reduce(self, op: Op) -> None:
        self._gradients.check()
        with self._timed(op):
            for buffer in self._gradients.buffers:
                self._communicator.all_reduce(buffer)
        self._communicator.flush()
        self._incoming = {}
        loss = float(self._gradients.extras[0]) / self.grid.global_microbatches if self._is_last else None
        squared_norm = self._gradients.squared_norm() if self._needs_norm else math.nan
        self._payload = CommitPayload(squared_norm, loss, dict(self._timings.seconds))
        self._reduced = True

    def _commit(self) -> None:
        committed = self._client.commit(self.version, self._payload)
        self._step(committed.payloads)

    def _step(self, payloads: Any) -> None:
        """Applies the step that all stages have agreed on; ``payloads`` by stage."""
        losses = [payload.loss for payload in payloads.values() if payload.loss is not None]
        norm = sum(payload.squared_norm for _, payload in sorted(payloads.items())) ** 0.5
        self._result = StepResult(losses[0], norm)
        self._gradients.attach()
        assert self._apply is not None
        started = time.perf_counter()
        self._apply(self._result)
        self._timings.add(OpKind.STEP, time.perf_counter() - started)
        self.version += 1
        self._reduced = False
        self._payload = None

    # ------------------------------------------------------------------ a failure

    def announce_fault(self, fault: FaultInjected) -> None:
        """Tells the coordinator that this worker is about to fail on purpose, for the record."""
        self._client.send(fault)

    def regroup(self) -> None:
        """Takes part in the announced generation, and in any that follows before it is complete."""
        self._stage.clear()
        self._incoming = {}
        while True:
            announced = self._client.enter_generation()
            status = WorkerStatus(self.worker.stage, self.version, self._reduced)
            report = Report(self._client.rank, announced.generation, status, self._payload if self._reduced else None)
            try:
                resume = self._client.report(report)
                stage_roster = [r for r in resume.roster if self.grid.worker(r).stage == self.worker.stage]
                self._communicator.configure(resume.generation, resume.roster, stage_roster)
                self._settle(resume)
            except Interrupted:
                continue
            except CommunicationError as error:
                self._await_verdict(error)
                continue
            self._client.send(Connected(self._client.rank, resume.generation))
            self.on_generation()
            return

    def _settle(self, resume: Resume) -> None:
        """Brings this worker to the committed version."""
        self.schedule = resume.schedule
        action = resume.decision.actions[self._client.rank]
        donor = resume.decision.donors.get(self.worker.stage)
        if donor is not None:
            for buffer in self._gradients.buffers:
                self._communicator.broadcast(buffer, donor)
        if action is Action.ADOPT:
            self._payload, self._reduced = resume.commits[self.worker.stage], True
        if action in (Action.APPLY, Action.ADOPT):
            self._step(resume.commits)
        self._reduced = False
        self._payload = None

    def _await_verdict(self, error: CommunicationError) -> None:
        """Tells the coordinator that communication broke and waits until it says what holds now."""
        if not self._client.interrupted:
            log.debug("Worker %s: %s", self.worker, error)
            self._client.send(Broken(self._client.rank, self._client.generation, str(error)))
            self._client.await_announcement(_ANNOUNCEMENT_TIMEOUT)

    def _on_interrupt(self) -> None:
        """Receiver thread: ends whatever the main thread exchanges with others in a generation that is over."""
        self._communicator.abort(self._client.generation)

    # ------------------------------------------------------------------ small things

    def _receive(self, op: Op) -> Any:
        activity = self._client.activity
        source = self._input_source(op)
        self._client.activity = Activity(activity.step, activity.operation, f"worker {source}", time.monotonic())
        value = self._communicator.receive(self._incoming[op])
        self._client.activity = activity
        return value

    def _index(self, op: Op) -> int:
        return global_index(self.grid, _microbatch(op))

    def _timed(self, op: Op) -> _Stopwatch:
        return _Stopwatch(self._timings, op.kind, self._gradients.extras)


class _Stopwatch:
    def __init__(self, timings: _Timings, kind: OpKind, probe: Tensor) -> None:
        self._timings, self._kind, self._cuda = timings, kind, probe.is_cuda

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, exception_type: Any, *_: Any) -> None:
        if self._cuda:
            torch.cuda.current_stream().synchronize()
        if exception_type is None:
            self._timings.add(self._kind, time.perf_counter() - self._started)


def _channel(op: Op) -> Channel:
    return Channel.ACTIVATIONS if op.kind is OpKind.FORWARD else Channel.GRADIENTS


def _microbatch(op: Op) -> Microbatch:
    assert op.microbatch is not None
    return op.microbatch
