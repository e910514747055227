"""The executor: runs a worker's part of the schedule, and of the recovery when one is announced.

The schedule is data. :meth:`Executor.run_step` walks through this worker's program; receives are posted at the start of
the step and sends leave as soon as their value exists, so communication follows from the program and needs no
operations of its own. A stage steps its optimizer when its own gradient is reduced and goes on to the next step; a copy
of the parameters of the version before (the shadow) stays until the next STEP. Where the stages must know something of
each other before they step (the norm of the whole gradient), or staggering is off, a commit through the coordinator
comes first.

When a generation is announced, whatever the executor is doing ends with :class:`Interrupted` or
:class:`CommunicationError`. It then reports what it holds, connects anew, brings itself to the committed version, and
runs its step again, or serves others that do, if its own part is done. Nothing of that shows outside :meth:`run_step`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_recycle.planning.grid import Grid, Microbatch, Worker
from lightning_recycle.planning.ops import Op, OpKind
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.resilience.client import ControlClient, Interrupted
from lightning_recycle.resilience.messages import (
    Activity,
    Applied,
    Broken,
    Connected,
    FaultInjected,
    Losses,
    Profiled,
    Report,
    Resume,
)
from lightning_recycle.resilience.recovery import WorkerStatus
from lightning_recycle.runtime.communicator import Channel, CommunicationError, Communicator, Incoming
from lightning_recycle.runtime.data import MicrobatchLoader, StepHandle, global_index
from lightning_recycle.runtime.gradients import GradientBuffers
from lightning_recycle.runtime.profiling import StageProfiler, measure_link
from lightning_recycle.runtime.shadow import Shadow
from lightning_recycle.runtime.stage import Stage

__all__ = ["CommitPayload", "Executor", "StepResult"]

log = logging.getLogger(__name__)

_SMOOTHING = 0.2  # weight of the newest measurement in the operation times
_ANNOUNCEMENT_TIMEOUT = 60.0  # seconds from a broken connection to the coordinator's word on it


@dataclass(frozen=True)
class CommitPayload:
    """What a stage tells the others before they step: the squared norm of its gradient (NaN if nobody wants it)."""

    squared_norm: float


@dataclass(frozen=True)
class StepResult:
    """What every worker knows when it steps: the mean loss and, if wanted, the norm of all gradients (else NaN)."""

    loss: float
    gradient_norm: float


@dataclass
class _Step:
    """A step as Lightning asked for it: where its data is and how it is applied."""

    loader: MicrobatchLoader
    handle: StepHandle
    apply: Callable[[StepResult], None]
    result: StepResult | None = None


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
        parameters: theirs.
        gradients: theirs.
        split: turns a collated micro-batch into (input, target) on the device.
        needs_norm: whether the norm of all gradients is wanted with each step.
        staggered: whether a stage may step before the others hold their gradients.
        profiler: if the stage is to be profiled.
    """

    def __init__(
        self,
        worker: Worker,
        grid: Grid,
        client: ControlClient,
        communicator: Communicator,
        stage: Stage,
        parameters: Sequence[nn.Parameter],
        gradients: GradientBuffers,
        split: Callable[[Any], tuple[Any, Any]],
        needs_norm: bool = False,
        staggered: bool = True,
        profiler: StageProfiler | None = None,
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
        self._profiler = profiler
        self._commits = needs_norm or not staggered
        self._shadow = None if self._commits else Shadow(parameters)
        self._is_last = worker.stage == grid.stages - 1
        self._reduced = False
        self._payload: CommitPayload | None = None
        self._steps: dict[int, _Step] = {}
        self._timings = _Timings()
        self._incoming: dict[Op, Incoming] = {}
        self._losses: dict[int, float] = {}
        client.on_interrupt = communicator.abort  # ends whatever the main thread exchanges with others
        client.regroup = self.regroup

    # ------------------------------------------------------------------ a step

    def run_step(self, loader: MicrobatchLoader, handle: StepHandle, apply: Callable[[StepResult], None]) -> StepResult:
        """Runs step :attr:`version` until this worker has applied it.

        Args:
            loader: where the micro-batches of the step come from.
            handle: the step's data.
            apply: steps the optimizer; called exactly once.
        """
        number = self.version
        step = _Step(loader, handle, apply)
        self._steps = {number: step, **{n: s for n, s in self._steps.items() if n == number - 1}}
        loader.begin_step(handle)
        while self.version == number:
            try:
                if self._client.interrupted:
                    raise Interrupted
                self._run_program(number)
            except Interrupted:
                self.regroup()
            except CommunicationError as error:
                self._await_verdict(error)
                self.regroup()
        assert step.result is not None
        return step.result

    def _run_program(self, step: int) -> None:
        """Runs the program for ``step``; only for the benefit of other stages if this one is done with it."""
        assert self.schedule is not None
        done = step < self.version or self._reduced
        program = self.schedule.program(self.worker)
        if self.worker.stage == 0:
            program = fuse_backwards(program)
        # Where nobody computes weight gradients in an operation of their own, F need not prepare for that.
        deferred = {op.microbatch for op in program if op.kind is OpKind.BACKWARD_WEIGHT}
        if done:
            program = tuple(op for op in program if op.kind not in (OpKind.BACKWARD_WEIGHT, OpKind.REDUCE))
        self._stage.clear()
        self._losses = {}
        self._gradients.begin(step + 1 if done else step)  # what is done must not change: the other set is scratch
        self._post_receives(program)
        forwards_left = sum(op.kind is OpKind.FORWARD for op in program)
        for op in program:
            if self._client.interrupted:
                raise Interrupted
            self._client.activity = Activity(step, str(op), "", time.monotonic())
            for hook in self.before_operation:
                hook(step, op)
            if op.kind is OpKind.FORWARD:
                self._forward(step, op, decoupled=op.microbatch in deferred)
                forwards_left -= 1
                if self._is_last and not forwards_left:
                    self._client.send(Losses(self._client.rank, step, self._losses))
            elif op.kind in (OpKind.BACKWARD, OpKind.BACKWARD_INPUT):
                self._backward(op)
            elif op.kind is OpKind.BACKWARD_WEIGHT:
                with self._timed(op):
                    self._stage.backward_weight(self._index(op))
            elif op.kind is OpKind.REDUCE:
                self._reduce(step, op)
            elif op.kind is OpKind.STEP and step == self.version:
                self._commit_and_apply()
        self._communicator.flush()

    def _post_receives(self, program: Sequence[Op]) -> None:
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

    def _forward(self, step: int, op: Op, decoupled: bool) -> None:
        assert self.schedule is not None
        microbatch, index = _microbatch(op), self._index(op)
        inputs = target = None
        if op.stage == 0 or self._is_last:
            data = self._steps[step]
            inputs, target = self._split(data.loader.fetch(data.handle, microbatch))
        if op.stage > 0:
            inputs = self._receive(op)
        with self._profiled(step), self._timed(op):
            output = self._stage.forward(step, index, inputs, decoupled=decoupled)
            if self._is_last:
                self._losses[index] = float(self._stage.loss(index, output, target, self.grid.global_microbatches))
        if not self._is_last:
            destination = self.schedule.route(op.stage + 1, microbatch)
            if self._profiler is not None:
                self._profiler.sent(output)
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

    def _reduce(self, step: int, op: Op) -> None:
        self._gradients.check(step)
        with self._timed(op):
            for buffer in self._gradients.of_step(step):
                self._communicator.all_reduce(buffer)
        squared_norm = self._gradients.squared_norm(step) if self._needs_norm else math.nan
        self._payload = CommitPayload(squared_norm)
        self._reduced = True

    def _commit_and_apply(self) -> None:
        payloads: Mapping[int, CommitPayload] = {}
        if self._commits:
            payloads = self._client.commit(self.version, self._payload).payloads
        self._apply(payloads)

    def _apply(self, payloads: Mapping[int, CommitPayload]) -> None:
        """Steps the optimizer with the reduced gradient of step :attr:`version`; ``payloads`` by stage."""
        number = self.version
        step = self._steps[number]
        norm = sum(payload.squared_norm for _, payload in sorted(payloads.items())) ** 0.5 if payloads else math.nan
        result = StepResult(self._client.await_loss(number), norm)
        self._gradients.attach(number)
        started = time.perf_counter()
        if self._shadow is not None:
            self._shadow.update()
        step.apply(result)
        self._timings.add(OpKind.STEP, time.perf_counter() - started)
        step.result = result
        self.version += 1
        self._reduced = False
        self._payload = None
        self._client.send(Applied(self._client.rank, number, dict(self._timings.seconds)))
        if self._profiler is not None and number == self._profiler.last_step:
            self._finish_profile(self._profiler)

    # ------------------------------------------------------------------ a failure

    def announce_fault(self, fault: FaultInjected) -> None:
        """Tells the coordinator that this worker is about to fail on purpose, for the record."""
        self._client.send(fault)

    def regroup(self) -> None:
        """Takes part in the announced generation, and in any that follows before this worker has done its part."""
        while True:
            self._stage.clear()
            self._incoming = {}
            announced = self._client.enter_generation()
            status = WorkerStatus(self.worker.stage, self.version, self._reduced)
            report = Report(self._client.rank, announced.generation, status, self._payload)
            try:
                resume = self._client.report(report)
                stage_roster = [r for r in resume.roster if self.grid.worker(r).stage == self.worker.stage]
                self._communicator.configure(resume.generation, resume.roster, stage_roster)
                self.schedule = resume.schedule
                self._client.send(Connected(self._client.rank, resume.generation))
                self.on_generation()
                if self._profiler is not None and resume.generation == 0:
                    self._measure_links(self._profiler)
                self._catch_up(resume)
                if self.version > resume.decision.version:
                    self._serve(resume.decision.version)
            except Interrupted:
                continue
            except CommunicationError as error:
                self._await_verdict(error)
                continue
            return

    def _catch_up(self, resume: Resume) -> None:
        """Applies what the committed version requires and adopts the gradients that this worker lacks."""
        version = resume.decision.version
        adoptions = [a for a in resume.decision.adoptions if a.stage == self.worker.stage]
        for adoption in adoptions:
            if adoption.step == version and self.version < version:
                self._apply(resume.commits)
            for buffer in self._gradients.of_step(adoption.step):
                self._communicator.broadcast(buffer, adoption.donor)
            if self.version == adoption.step and not self._reduced:
                norm = self._gradients.squared_norm(adoption.step) if self._needs_norm else math.nan
                self._payload, self._reduced = CommitPayload(norm), True
        if adoptions:  # nobody may go on and overwrite what it gave before all others have it
            self._communicator.all_reduce(torch.zeros(1))
        if self.version < version:
            self._apply(resume.commits)

    def _serve(self, step: int) -> None:
        """Computes this worker's part of a step that it has applied, with the parameters of then, for who redoes it."""
        assert self._shadow is not None, "without the shadow no stage applies a step before all others can"
        with self._shadow.in_place():
            self._run_program(step)

    def _await_verdict(self, error: CommunicationError) -> None:
        """Tells the coordinator that communication broke and waits until it says what holds now."""
        if not self._client.interrupted:
            log.debug("Worker %s: %s", self.worker, error)
            self._client.send(Broken(self._client.rank, self._client.generation, str(error)))
            self._client.await_announcement(_ANNOUNCEMENT_TIMEOUT)

    # ------------------------------------------------------------------ profiling

    def _profiled(self, step: int) -> AbstractContextManager[None]:
        return self._profiler.forward(step) if self._profiler is not None else nullcontext()

    def _measure_links(self, profiler: StageProfiler) -> None:
        """Measures the link to the next stage of the pipeline: even stages begin, then odd ones."""
        rank, stage = self._client.rank, self.worker.stage
        for parity in (0, 1):
            if stage % 2 == parity and not self._is_last:
                profiler.latency, profiler.bandwidth = measure_link(
                    lambda size: self._communicator.exchange(rank + 1, size, initiate=True)
                )
            elif stage % 2 != parity and stage > 0:
                measure_link(lambda size: self._communicator.exchange(rank - 1, size, initiate=False))

    def _finish_profile(self, profiler: StageProfiler) -> None:
        measured = profiler.profile(self._timings.seconds)
        steps = profiler.last_step - profiler.first_step + 1
        self._client.send(Profiled(self._client.rank, measured, profiler.latency, profiler.bandwidth, steps))
        self._profiler = None

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
        return _Stopwatch(self._timings, op.kind, self._communicator.device)


class _Stopwatch:
    def __init__(self, timings: _Timings, kind: OpKind, device: torch.device) -> None:
        self._timings, self._kind, self._cuda = timings, kind, device.type == "cuda"

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, exception_type: Any, *_: Any) -> None:
        if self._cuda:
            torch.cuda.current_stream().synchronize()
        if exception_type is None:
            self._timings.add(self._kind, time.perf_counter() - self._started)


def fuse_backwards(program: Sequence[Op]) -> tuple[Op, ...]:
    """Replaces a B and the W right after it by their BW: the same but cheaper where nobody waits for B, in stage 0."""
    fused: list[Op] = []
    for op in program:
        last = fused[-1] if fused else None
        if (
            op.kind is OpKind.BACKWARD_WEIGHT
            and last is not None
            and last.kind is OpKind.BACKWARD_INPUT
            and last.microbatch == op.microbatch
        ):
            fused[-1] = Op(OpKind.BACKWARD, op.stage, op.microbatch)
        else:
            fused.append(op)
    return tuple(fused)


def _channel(op: Op) -> Channel:
    return Channel.ACTIVATIONS if op.kind is OpKind.FORWARD else Channel.GRADIENTS


def _microbatch(op: Op) -> Microbatch:
    assert op.microbatch is not None
    return op.microbatch
