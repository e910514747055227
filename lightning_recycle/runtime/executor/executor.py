"""The executor: runs a worker's part of the schedule, and of the recovery when one is announced.

The schedule is data. :meth:`Executor.run_step` walks through this worker's program; receives are posted at the start of
the step and sends leave as soon as their value exists, so communication follows from the program and needs no
operations of its own. A stage steps its optimizer when its own gradient is reduced, much of it in the background, and
goes on to the next step; a copy of the previous version's parameters (the shadow) stays until the next STEP. If stages
must know something of each other before they step, or staggering is off, a commit through the coordinator comes first.
If that is the norm of the whole gradient, a stage may step on the guess that it is small, and again if it was wrong.

When a generation is announced, whatever the executor is doing ends with :class:`Interrupted` or
:class:`CommunicationError`. It then reports what it holds, reconnects, brings itself to the committed version, and
runs its step again or, if its own part is done, serves others that do. None of that shows outside :meth:`run_step`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_recycle.control.client import ControlClient, Interrupted
from lightning_recycle.control.payload import unpack_all
from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.fault_attribution import OUTSIDE
from lightning_recycle.control.protocol.recovery import (
    Action,
    Adopt,
    Apply,
    AwaitPeers,
    CommitTogether,
    Forget,
    Give,
    Serve,
    Settle,
    Take,
    WorkerStatus,
    actions,
    part_of,
)
from lightning_recycle.control.protocol.state import stage_leads
from lightning_recycle.data.steps import StepHandle, StepSource
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning.grid import Grid, Op, OpKind, Worker
from lightning_recycle.planning.profile import SplitTrial
from lightning_recycle.planning.program import Program, Task
from lightning_recycle.runtime.checks.finite_checks import FiniteChecks
from lightning_recycle.runtime.checks.microbatch_records import MicrobatchWatcher, Recomputation
from lightning_recycle.runtime.checks.verification import Verifier
from lightning_recycle.runtime.comm.communicator import (
    Channel,
    CommunicationError,
    Communicator,
    Incoming,
    UnreachableError,
)
from lightning_recycle.runtime.comm.state_transfer import receive_object, send_object
from lightning_recycle.runtime.executor.executor_callbacks import ExecutorCallbacks, RecordOutput, StepResult
from lightning_recycle.runtime.executor.forwards import Forwards
from lightning_recycle.runtime.executor.memory_meter import MemoryMeter, peak_bytes
from lightning_recycle.runtime.executor.profiling import SplitTrials, StageProfiler, Timings
from lightning_recycle.runtime.executor.speculative_commit import CommitPayload, SpeculativeCommits, norm_of
from lightning_recycle.runtime.executor.state_repair import repair_state
from lightning_recycle.runtime.machine_errors import is_device_error, place_of, readers_may_die
from lightning_recycle.runtime.stage.gradient_reduction import BucketedReduction
from lightning_recycle.runtime.stage.gradients import AccumulatedGradients, GradientBuffers, Share
from lightning_recycle.runtime.stage.layer_exchange import FixedLayers, LayerKeeper, LayerMoves
from lightning_recycle.runtime.stage.stage import Stage
from lightning_recycle.runtime.stage.stage_bundle import Shadow, StageBundle, StageTies

__all__ = ["Executor"]

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_READING = "reading data"
_NOTHING = nullcontext()
_WHOLE_STEP = Share()
_RECOVER = "RECOVER"  # kind of a worker's own work during a recovery
_ANNOUNCEMENT_TIMEOUT = 60.0  # seconds from a broken connection to the coordinator's verdict
_LAYERS_TIMEOUT = 1800.0  # seconds for others to get the layers that they lack; who is stuck is found by its heartbeats


@dataclass
class _Step:
    """A step as Lightning asked for it: where its data is and how it is applied."""

    handle: StepHandle
    apply: Callable[[StepResult], None]
    share: Share
    result: StepResult | None = None


class Executor:
    """Runs one worker's part of every step.

    Args:
        worker: the worker's position.
        grid: the grid of the run.
        client: the connection to the coordinator.
        communicator: the connection to the other workers.
        stage: the layers of this stage.
        parameters: the parameters of this stage.
        gradients: the gradients of this stage.
        callbacks: answers what is not the executor's business.
        needs_norm: whether each step needs the norm of all gradients.
        needs_overflow: whether each step needs to know of infinities and NaNs among all gradients.
        staggered: whether a stage may step before the others hold their gradients.
        shadow_on_host: whether the previous version's parameters are kept in host memory.
        presumes: norm of all gradients -> whether a step is what it is without knowing the norm. With it a stage steps
            on the guess that it is, unless what is known says otherwise; without it all stages know the norm first.
        profiler: measures the stage, if it is to be profiled.
        ties: weights that several stages hold; with them all stages commit a step together.
        held: returns the tensors that this process holds between two steps besides the parameters, their gradients and
            their previous version; None if the memory is not to be measured.
        layers: changes the layers that this worker has; None if they stay.
        device_name: the name of its device, by which its machine knows it.
        tries_splitting: whether it is measured in the first steps what it costs to split backwards.

    Attributes:
        version: the number of steps applied to the parameters; with gradient accumulation, of batches.
        accumulated: the gradients of the batches since the newest step of the optimizer.
        before_operation: called with (step, operation) before each operation.
        after_operation: called with (step, operation) after each operation.
        stretch_operation: called with the seconds that an F, R, B, W or BW has computed; the time that the call takes
            counts as computing. For fault injection.
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
        callbacks: ExecutorCallbacks,
        needs_norm: bool = False,
        needs_overflow: bool = False,
        staggered: bool = True,
        shadow_on_host: bool = False,
        profiler: StageProfiler | None = None,
        ties: StageTies | None = None,
        presumes: Callable[[float], bool] | None = None,
        held: Callable[[], Iterable[Tensor]] | None = None,
        layers: LayerKeeper | None = None,
        device_name: str = "",
        tries_splitting: bool = False,
    ) -> None:
        self.worker = worker
        self.grid = grid
        self.version = 0
        self.before_operation: list[Callable[[int, Op], None]] = []
        self.after_operation: list[Callable[[int, Op], None]] = []
        self.stretch_operation: Callable[[float], None] | None = None
        self._client = client
        self._communicator = communicator
        self._held = held
        self._callbacks = callbacks
        self._needs_norm, self._needs_overflow = needs_norm, needs_overflow
        self._profiler = profiler
        self._trials = SplitTrials(communicator.device) if tries_splitting else None
        self._tried: SplitTrial | None = None
        self._leads: dict[int, int] = {}
        self._ahead: tuple[int, frozenset[int]] = (-1, frozenset())  # a step that is run again, and stages done with it
        ties = ties or StageTies()
        self._moving = LayerMoves(
            layers or FixedLayers({tie.stages for tie in ties.ties}), grid, worker, client, communicator
        )
        waits = needs_overflow or not staggered or bool(ties.ties)
        self._guesses = (
            None if waits or presumes is None else SpeculativeCommits(client, worker.stage, grid.stages, presumes)
        )
        self._commits = waits or (needs_norm and presumes is None)
        self._redoes_whole_steps = bool(ties.ties)  # what is REDUCED, but not applied, cannot be kept for a redo
        self._shadow_on_host = shadow_on_host
        self._device_name = device_name
        self._hold(StageBundle(stage, parameters, gradients, ties))
        self._is_last = worker.stage == grid.stages - 1
        self._reduced = False
        self._payload: CommitPayload | None = None
        self._steps: dict[int, _Step] = {}
        self._timings = Timings()
        self._joining = False
        self._whole_program = Program()
        self._program: tuple[Task, ...] = ()
        self._idle_peer = False
        self._incoming: dict[Task, Incoming] = {}
        self._losses: dict[int, float | Tensor] = {}  # on a device: whoever reads one waits for it
        self._outputs: dict[int, bytes] = {}
        self._has_read_ahead = False
        self._place = (0, "")  # the step and the operation to which an exception belongs
        self._is_past = False  # whether it is past the point up to which it can do the same again
        self._reads_from: StepSource | None = None
        self._has_own = False  # an exception was judged to be the user's own
        communicator.report_progress_to(client.progressed)
        client.on_interrupt = communicator.abort  # ends whatever the main thread exchanges with others
        client.regroup = self.regroup

    def _hold(self, bundle: StageBundle) -> None:
        """From now on this worker has these layers. Nothing is under way."""
        self._stage, self._gradients, self._ties = bundle.stage, bundle.gradients, bundle.ties
        self._parameters = bundle.parameters
        self._forwards = Forwards(self.worker, self.grid, self._client, self._communicator, bundle.stage)
        self._reduction = BucketedReduction(
            self._communicator.sums, self._gradients, self._stage, lambda: self.is_settled
        )
        self.accumulated = AccumulatedGradients(self._gradients, self._parameters, bundle.accumulated)
        # A single stage is never ahead of others: what it has applied is what is committed.
        is_ahead = not self._commits and (self.grid.stages > 1 or self._guesses is not None)
        self._shadow = Shadow(self._parameters, self._shadow_on_host) if is_ahead else None
        self._meter = None if self._held is None else MemoryMeter(self._communicator.device, self._all_held)
        # A guess, or the user's own backward, may differ.
        comparing = self._guesses is None and self._stage.differentiates_itself
        recompute = Recomputation(
            self._stage, self._parameters, self.grid.global_microbatches, self._callbacks.computing_again
        )
        self._verifier = Verifier(
            self._client,
            self._communicator,
            self._stage,
            recompute,
            self.grid,
            self._device_name,
            comparing,
        )
        # A scaled loss overflows now and then, and a peer computes what differentiates itself in its own way.
        explains = self.grid.pipelines > 1 and not self._needs_overflow and self._stage.differentiates_itself
        self._finite = FiniteChecks(self._client, self._stage, recompute, self._verifier, explains)
        self._watchers: tuple[MicrobatchWatcher, ...] = (self._verifier, self._finite)

    # ------------------------------------------------------------------ a step

    def run_step(
        self, handle: StepHandle, apply: Callable[[StepResult], None], share: Share = _WHOLE_STEP
    ) -> StepResult:
        """Runs step :attr:`version` until this worker has applied it.

        Args:
            handle: the step's data.
            apply: called exactly once, with the gradients in place; steps the optimizer if ``share`` ends a step of it.
            share: what the step is of a step of the optimizer.
        """
        number = self.version
        step = _Step(handle, apply, share)
        self._steps = {number: step, **{n: s for n, s in self._steps.items() if n == number - 1}}
        self._reads_from = handle.loader
        self._stage.remember_modes()
        has_begun = False

        def run() -> None:
            nonlocal has_begun
            if not has_begun:
                self._place = (number, _READING)
                handle.loader.begin_step(handle)
                has_begun = True
            if self.version == number:  # otherwise a recovery has applied it
                program = self._client.begin_step(number)
                if program is not None:
                    self._follow(program)
                self._run_program(number)

        self._retried(run)
        assert step.result is not None
        return step.result

    def _follow(self, program: Program) -> None:
        self._whole_program = program
        self._program, self._idle_peer = program.tasks, program.idle_peer
        self._verifier.follow(program)
        if self._meter is not None:
            self._meter.may_split = program.decoupled or self._trials is not None
            self._meter.recomputes = any(task.recomputed for task in self._program)

    def _run_program(self, step: int) -> None:
        """Runs the program for ``step``; if this stage is done with it, only the part that other stages need."""
        part = part_of(step, self.version, self._reduced, self._idle_peer)
        givers = self._givers(step)
        self._verifier.begin(step, part.reduces and step == self.version)
        program = self._verifier.tasks
        if not part.reduces:
            left_out = [OpKind.BACKWARD_WEIGHT, *([] if givers else [OpKind.REDUCE])]
            program = tuple(t for t in program if t.op.kind not in left_out)
        self._stage.clear()
        self._losses, self._outputs = {}, {}
        self._has_read_ahead = False
        self._finite.begin(step)
        early = part.reduces and not (self._verifier.needs_last_gradients or self._finite.inspects or givers)
        self._reduction.begin(part.buffers, program if early else (), givers, self._verifier.target)
        self._incoming = {
            task: self._communicator.messages.post_receive(_channel(task.op), task.source, task.index)
            for task in program
            if task.source is not None
        }
        if self._meter is not None:
            self._meter.begin(step if part.reduces else None, self._communicator.messages.buffers())
        if self._trials is not None:
            self._trials.begin(step if part.reduces else None, program)
        if part.awaits_peers:
            self._await_peers()
        forwards_left = sum(task.op.kind is OpKind.FORWARD for task in program)
        for task in program:
            if self._client.interrupted:
                raise Interrupted
            self._settle(waits=False)
            kind = task.op.kind
            self._client.doing(step, task.label, kind.value, task.index)
            self._place = (step, task.label)
            for hook in self.before_operation:
                hook(step, task.op)
            if kind is OpKind.FORWARD:
                self._forward(step, task)
                forwards_left -= 1
                if self._is_last and not forwards_left:
                    if step == self.version:
                        self._settle()
                    losses = {index: float(loss) for index, loss in self._losses.items()}
                    if step == self.version:
                        self._finite.losses(step, losses)
                    proven_in = self._client.generation if self._verifier.leaves_open(step) else None
                    self._client.send(messages.Losses(self._client.rank, step, losses, self._outputs, proven_in))
            elif kind is OpKind.RECOMPUTE:
                self._recompute(step, task)
            elif kind in (OpKind.BACKWARD, OpKind.BACKWARD_INPUT):
                self._backward(step, task)
                if not part.reduces:  # there is no W that would free what it waits with
                    self._stage.forget(task.index)
            elif kind is OpKind.BACKWARD_WEIGHT:
                self._verifier.adds_gradients(task)
                with self._measured(kind):
                    self._stage.backward_weight(task.index, self._reduction.during_weights(task))
            elif kind is OpKind.CHECK:
                self._verifier.check(step)
            elif kind is OpKind.REDUCE and part.reduces:
                self._reduce(step)
            elif kind is OpKind.REDUCE:
                with self._client.waiting("stages with the same weights"):
                    self._reduction.give(step)
            elif kind is OpKind.STEP and part.applies:
                self._commit_and_apply()
            for after in self.after_operation:
                after(step, task.op)
            if kind in (OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT):
                for watcher in self._watchers:
                    watcher.completed(task)
                self._reduction.completed(task)
        self._communicator.messages.end_step()

    def _forward(self, step: int, task: Task) -> None:
        inputs = target = None
        if task.op.stage == 0 or self._is_last:
            assert task.op.microbatch is not None
            data = self._steps[step]
            with self._client.busy(_READING):
                self._place = (step, _READING)
                read = data.handle.loader.fetch(data.handle, task.op.microbatch)
                self._place = (step, task.label)
                inputs, target = self._callbacks.split(read, data.handle.index)
                self._callbacks.begin_microbatch(task.index)
        if task.source is not None:
            inputs = self._receive(step, task)
        stage, meter = self._stage, self._meter
        for watcher in self._watchers:
            watcher.takes(step, task, inputs, target)
        split = task.decoupled or self._splits_anyway(task)
        watched = _NOTHING if meter is None else meter.forward(lambda: stage.kept(inputs))
        with self._profiled(step), self._measured(OpKind.FORWARD), watched, self._trying(OpKind.FORWARD, task):
            output = stage.forward(step, task.index, inputs, target, decoupled=split, recomputed=task.recomputed)
            if self._is_last:
                loss = self._stage.loss(step, task.index, output, target, self.grid.global_microbatches)
                self._losses[task.index] = loss.clone() if loss.is_cuda else float(loss)
                if self._callbacks.records_outputs:
                    with self._client.busy("a hook that sees outputs"):
                        self._outputs[task.index] = self._callbacks.record_output(
                            output, target, self._samples(step, task)
                        )
        for watcher in self._watchers:
            watcher.computed(task, output, self._losses.get(task.index))
        if task.destination is not None:
            if self._profiler is not None:
                self._profiler.sent(output)
            if meter is not None:
                meter.sent(output)
            self._communicator.messages.send(_channel(task.op), output, task.destination, task.index)

    def _recompute(self, step: int, task: Task) -> None:
        if task.op.stage == 0:
            self._callbacks.begin_microbatch(task.index)
        with self._profiled(step), self._measured(OpKind.RECOMPUTE):
            self._stage.recompute(task.index, decoupled=task.decoupled)

    def _backward(self, step: int, task: Task) -> None:
        grads = None if task.source is None else self._receive(step, task)
        kind, meter = task.op.kind, self._meter
        self._verifier.adds_gradients(task)
        with self._measured(kind):
            if kind is OpKind.BACKWARD and not self._splits_anyway(task):
                with self._trying(kind, task), self._reduction.during_backward(task):
                    input_grads = self._stage.backward(task.index, grads)
            else:
                watched = _NOTHING if meter is None else meter.backward(lambda: self._stage.waiting(task.index))
                with watched, self._trying(OpKind.BACKWARD_INPUT, task):
                    input_grads = self._stage.backward_input(task.index, grads)
                if kind is OpKind.BACKWARD:
                    with self._trying(OpKind.BACKWARD_WEIGHT, task):
                        self._stage.backward_weight(task.index)
        for watcher in self._watchers:
            watcher.differentiated(task, grads, input_grads)
        if task.destination is not None and input_grads is not None:
            self._communicator.messages.send(_channel(task.op), input_grads, task.destination, task.index)

    def _splits_anyway(self, task: Task) -> bool:
        """Whether a backward that the plan fuses is split because that is measured."""
        meter, trials = self._meter, self._trials
        return (meter is not None and meter.splits) or (trials is not None and trials.splits(task.index))

    def _trying(self, kind: OpKind, task: Task) -> AbstractContextManager[None]:
        return _NOTHING if self._trials is None else self._trials.operation(kind, task.index)

    def _reduce(self, step: int) -> None:
        self._settle()
        self._timings.await_device(self._client.progressed)
        with self._client.waiting("peers"), self._measured(OpKind.REDUCE):
            self._reduction.finish()
        told = self._told(step)
        self._finite.gradient(step, told.squared_norm, self._gradients.of_step(step))
        self._payload, self._reduced = told, True

    def _givers(self, step: int) -> dict[tuple[int, ...], int]:
        """By the stages that hold weights in common, if some are done with ``step``: who gives the others its sum."""
        again, ahead = self._ahead
        givers = self._ties.givers(ahead) if step == again else {}
        return {stages: self._leads[giver] for stages, giver in givers.items()}

    def _told(self, step: int) -> CommitPayload:
        """What others must know of this stage's reduced gradient of ``step``."""
        totals = (step, self._steps[step].share)
        return CommitPayload(
            self.accumulated.squared_norm(*totals, without=self._ties.not_counted) if self._needs_norm else math.nan,
            self._needs_overflow and not self.accumulated.is_finite(*totals),
        )

    def _commit_and_apply(self) -> None:
        if self._guesses is not None:
            self._apply_at_once_or_later(self._guesses, self.version)
        elif self._commits:
            self._apply(self._client.commit(self.version, self._payload))
        else:
            self._apply({})

    def _apply(self, payloads: Mapping[int, CommitPayload], guesses: bool = False) -> None:
        """Steps the optimizer with the reduced gradient of step :attr:`version`; ``payloads`` by stage. ``guesses``:
        whether they are not known yet.
        """
        number = self.version
        step = self._steps[number]
        norm = 0.0 if guesses else norm_of(payloads)
        overflow = any(payload.overflow for payload in payloads.values())
        known = self._client.await_loss(number)
        self._finite.applied(known.loss)
        result = StepResult(known.loss, norm, known.outputs, known.after_step, overflow, known.check_next)
        self.accumulated.add(number, step.share)
        with self._timings.measure(OpKind.STEP, self._communicator.device):
            if self._shadow is not None:
                self._shadow.update()
            if guesses:
                self._callbacks.keep_optimizer()
            # From here on the step counts as applied: a regroup within (a user's collective) must not apply it again.
            self.version += 1
            self._reduced = False
            if guesses:
                assert self._guesses is not None
                self._guesses.unsettled = True
            else:
                self._payload = None
            self._is_past = True
            with self._client.busy("the optimizer and its hooks"):  # some optimizers take long now and then
                step.apply(result)
            if not self._commits and self._guesses is None:  # otherwise nobody needs them once they have been clipped
                self._gradients.look_for_changes()
        step.result = result
        measured, facts = self._timings.take_step(), self._callbacks.describe_step(number)
        seconds, peak = dict(self._timings.seconds), peak_bytes(self._communicator.device)
        self._client.send(messages.Applied(self._client.rank, number, seconds, measured, facts, peak))
        self._is_past = False
        if self._trials is not None and (tried := self._trials.result()) is not None:
            self._client.send(messages.Tried(self._client.rank, tried))
            self._trials, self._tried = None, tried
        if self._profiler is not None and number == self._profiler.last_step:
            self._finish_profile(self._profiler)
        if self._meter is not None and (footprint := self._meter.footprint()) is not None:
            self._client.send(messages.Measured(self._client.rank, footprint))
            if self._profiler is not None and self._meter.splits:
                self._profiler.waiting_bytes = footprint.after_backward
            self._meter = None

    # ------------------------------------------------------------------ steps on a guess

    def _apply_at_once_or_later(self, guesses: SpeculativeCommits, step: int) -> None:
        """Tells the others of this stage's gradient, and applies it now if a guess may do; else when all have told."""
        assert self._payload is not None
        on_a_guess = guesses.is_likely(self._payload) and not self._callbacks.must_know(step)
        guesses.tell(step, self._payload, on_a_guess)
        if on_a_guess and not guesses.is_known(step):
            self._apply({}, guesses=True)
        else:
            self._apply(guesses.await_known(step))

    def _settle(self, waits: bool = True) -> None:
        """If the newest step was made on a guess, learns whether that was right; only if that is known already, without
        ``waits``. Nothing that follows from a guess may be reduced, or leave the executor.

        Raises:
            Interrupted: when a generation was announced, in which a wrong guess is corrected.
        """
        guesses, step = self._guesses, self.version - 1
        if guesses is not None and guesses.unsettled and (waits or guesses.is_known(step)):
            guesses.await_known(step)
            guesses.unsettled, self._payload = False, None

    @property
    def is_settled(self) -> bool:
        """Whether the parameters are what they will be."""
        return self._guesses is None or not self._guesses.unsettled

    def settle_newest(self) -> None:
        """Returns when the parameters are what they will be. To be called before anything looks at them."""
        if not self.is_settled:
            self._retried(self._settle)

    def _is_undone(self) -> bool:
        """Whether a new generation drops what this worker has computed, which may have followed from a wrong guess."""
        try:
            if not self._is_past:
                self._settle()
        except Interrupted:
            return True
        return False

    def _settle_in_recovery(self, step: int, known: Mapping[int, CommitPayload]) -> None:
        """What all stages have told of ``step``, which this worker applied on a guess, is ``known``."""
        assert self._guesses is not None
        self._guesses.unsettled, self._payload = False, None
        if not self._guesses.are_right(known):
            self._step_again(step, norm_of(known))

    def _step_again(self, step: int, norm: float) -> None:
        assert self._shadow is not None
        started = time.perf_counter()
        with self._client.busy("STEP", OpKind.STEP.value):
            self._shadow.restore()
            self.accumulated.attach(step)
            self._callbacks.step_again(norm)
        log.info("Step %d was made again with its true norm, %g, in %.4f s.", step, norm, time.perf_counter() - started)

    # ------------------------------------------------------------------ forward only

    def evaluate(
        self, handle: StepHandle, split: Callable[[Any], tuple[Any, Any]], record: RecordOutput
    ) -> dict[int, bytes]:
        """Runs the batch ``handle`` forward through the pipelines, once more if a worker fails meanwhile.

        Args:
            handle: the batch.
            split: turns a collated micro-batch into (input, target) on the device.
            record: called on the last stage with (output, target, number of samples) of each micro-batch.

        Returns:
            What ``record`` returned, by global micro-batch, on every worker.

        Raises:
            ConfigurationError: if workers have read different samples.
        """

        self._reads_from = handle.loader

        def run() -> Mapping[int, tuple[int, dict[int, bytes]]]:
            if self._client.interrupted:
                raise Interrupted
            self._place = (self.version, f"evaluation of batch {handle.index}")
            recorded = self._forwards.run_batch(self._program, handle, self.version, split, record)
            return self._exchanged(f"batch {handle.index}", (handle.loader.digest(handle), recorded))

        parts = self._retried(run)
        if len({digest for digest, _ in parts.values()}) > 1:
            raise ConfigurationError(
                f"Workers have read different samples for batch {handle.index} of an evaluation, or before it. A stream"
                " must give every process the same: not depend on its rank, the time, or the order of a set."
            )
        return {index: data for _, (_, part) in sorted(parts.items()) for index, data in part.items()}

    def _exchanged(self, name: str, mine: Any) -> Mapping[int, Any]:
        """The parts of all workers of the generation; a failure before they are complete ends with Interrupted."""
        before, self._is_past = self._is_past, True  # with this part the others may have all parts, and go on
        try:
            parts = self._client.arrive_in_generation(name, mine)
        except Interrupted:
            self._is_past = before  # nobody has them
            raise
        self._is_past = before
        return parts

    def forward_whole(self, value: Any, draw: int, deliver: Callable[[Any], Any]) -> Any:
        """Runs ``value`` forward through one worker of each stage, once more if a worker fails meanwhile. All workers
        call it at the same place outside of steps, or in the hooks of STEP.

        Args:
            value: input of the first layer; several are a tuple. It is also the target where layers take one.
            draw: tells the randomness of this call from that of others in the same version, and of micro-batches.
            deliver: called with the output of the last layer where it was computed.

        Returns:
            What ``deliver`` returned, on every worker.
        """
        self._reads_from = None
        place = self._place

        def run() -> Mapping[int, tuple[Any] | None]:
            if self._client.interrupted:
                raise Interrupted
            self._place = (self.version, "self(x)")
            self._client.doing(self.version, "self(x)")
            output = self._forwards.run_value(value, self._leads, self.version, draw)
            mine = (deliver(output),) if self._forwards.leads_last(self._leads) else None
            return self._exchanged("output of self(x)", mine)

        parts = self._retried(run)
        self._place = place
        (output,) = next(part for part in parts.values() if part is not None)
        return output

    # ------------------------------------------------------------------ a failure

    def announce_fault(self, fault: messages.FaultInjected) -> None:
        """Tells the coordinator that this worker is about to fail on purpose, for the record."""
        self._client.send(fault)

    def alter_next_message(self, alter: Callable[[Any], Any]) -> None:
        """The next value that this worker sends to another stage is what ``alter`` makes of it. For fault injection."""
        self._communicator.messages.alter_next = alter

    def join(self) -> None:
        """Enters a running training at a step boundary, with the state that a peer gives."""
        self._joining = True
        self._client.wait_to_enter()
        self.regroup()

    def regroup(self) -> None:
        """Takes part in the announced generation, and in any that follows before this worker has done its part."""
        self._retried(lambda: None, recover=True)

    def _retried(self, attempt: Callable[[], _T], recover: bool = False) -> _T:
        """Returns ``attempt()``; when a failure ends it, this worker takes part in the recovery and attempts it again.

        Args:
            attempt: a function that may end with :class:`Interrupted` or :class:`CommunicationError`.
            recover: whether a recovery is due at once.
        """
        while True:
            try:
                if recover:
                    self._recover()
                    recover = False
                result = attempt()
            except Interrupted:
                recover = True
            except CommunicationError as error:
                self._await_verdict(error)
                recover = True
            except Exception as error:
                if not self._is_undone():
                    with readers_may_die():
                        self._await_another_try(error)
                recover = True
            else:
                self._client.doing(self.version, "hooks and callbacks")
                return result

    def _recover(self) -> None:
        """Enters the announced generation: reports, connects, and does what the decision asks of this worker."""
        self._stage.clear()
        self._incoming = {}
        announced = self._client.enter_generation()
        version = -1 if self._joining else self.version
        if self._reduced and (self._verifier.leaves_open(self.version) or announced.unproven == self.version):
            self._reduced, self._payload = False, None
        status = WorkerStatus(self.worker.stage, version, self._reduced, not self.is_settled)
        self._client.doing(self.version, "recovery", _RECOVER)
        self._place = (self.version, "recovery")
        resume = self._client.report(status, self._payload, self._moving.cuts)
        if resume.generation > 0:
            self._callbacks.on_recovery(resume.decision.version)
        if not self._joining and (bundle := self._moving.decided(resume.cuts)) is not None:
            self._take_up(bundle)
        self._connect(resume, announced)
        with self._client.busy("taking over from the last leader"):  # loggers and progress bars are the user's
            self._callbacks.on_generation()
        if self._profiler is not None and resume.generation == 0:
            rank, pair = self._client.rank, self._communicator.messages.exchange
            with self._client.waiting("its neighbours"):
                self._profiler.measure_links(self.worker.stage, self._is_last, lambda by, *how: pair(rank + by, *how))
        ahead = frozenset() if self._redoes_whole_steps else resume.decision.ahead
        self._ahead = resume.decision.version, ahead
        commits: Mapping[int, CommitPayload] = unpack_all(resume.commits)
        if self._guesses is not None and commits:
            self._guesses.known = commits
        for action in actions(
            self._client.rank, status, resume.decision, resume.donors, self._commits, self._redoes_whole_steps
        ):
            if isinstance(action, CommitTogether):
                commits = self._client.commit(action.step, self._payload)
            else:
                self._carry_out(action, resume, commits)
        self._finite.follow(resume.inspects, resume.excused)
        repair_state(resume.heals, self._client, self._communicator, self._callbacks)
        if resume.vote is not None:
            self._verifier.vote(resume.vote)
        if self._guesses is not None and self._guesses.unsettled:  # the others have yet to tell of the step
            self._guesses.tell(self.version - 1, self._payload, guesses=True)
        if resume.becomes:
            self._get_ready(resume)

    def _get_ready(self, resume: messages.Resume) -> None:
        """Exchanges layers with the workers of other stages; ends with another generation, which has the layout that
        these are for, or has lost somebody.

        Raises:
            Interrupted: then.
        """
        self._client.doing(self.version, "layers", _RECOVER)
        self._moving.exchange(resume)
        self._client.send(messages.LayersHeld(self._client.rank, resume.generation))
        self._client.await_announcement(_LAYERS_TIMEOUT)
        raise Interrupted

    def _take_up(self, bundle: StageBundle) -> None:
        self._hold(bundle)
        self._follow(self._whole_program)  # so does what is new with the layers
        self._stage.remember_modes()
        self._reduced, self._payload = False, None

    def _connect(self, resume: messages.Resume, announced: messages.Regroup) -> None:
        """Connects this worker with those that it needs in the generation; from now on its schedule holds."""
        program = resume.program
        assert program is not None, "the coordinator adds it"
        stages = {rank: self.grid.worker(rank).stage for rank in resume.roster}
        peers = [rank for rank, stage in stages.items() if stage == self.worker.stage]
        self._leads = stage_leads(self.grid, resume.roster)
        tie_rosters = {
            tied: [rank for rank, stage in stages.items() if stage in tied]
            for tied in self._moving.tied_stages(resume.cuts)
            if self.worker.stage in tied
        }
        rank = self._client.rank
        exchanges: list[tuple[int, ...]] = [*resume.donors.items(), *resume.heals.items()]
        if resume.vote is not None:
            exchanges += [(resume.vote.recorder, voter) for voter in resume.vote.voters]
        transfers = {other for pair in exchanges if rank in pair for other in pair} | self._moving.partners(resume)
        with self._client.waiting("connections"):
            self._communicator.configure(
                resume.generation,
                {*program.neighbours, *transfers},
                peers,
                tie_rosters,
                announced.check_links,
                announced.keeps_connections,
            )
            self._reduction.drop()
        self._follow(program)
        self._client.send(messages.Connected(self._client.rank, resume.generation))

    def _carry_out(self, action: Action, resume: messages.Resume, commits: Mapping[int, CommitPayload]) -> None:
        """Does one of the actions of a recovery; ``commits``: the payloads for :meth:`_apply`."""
        match action:
            case Give():
                with self._client.busy("taking a snapshot"):
                    snapshot = self._callbacks.take_snapshot()
                with self._client.waiting("the transfer of state"):
                    for rank in action.ranks:
                        if rank in resume.strangers:
                            self._moving.give_all(rank)
                        send_object(self._communicator, snapshot, rank)
            case Take():
                if self._client.rank in resume.strangers:
                    self._take_up(self._moving.take_all(action.donor, resume.cuts))
                with self._client.waiting("the transfer of state"):
                    snapshot = receive_object(self._communicator, action.donor)
                with self._client.busy("taking over the state"):
                    self._callbacks.restore_snapshot(snapshot)
                self.version = resume.decision.version
                self._joining = False
                self._client.send(messages.Entered(self._client.rank, resume.generation))
            case Apply():
                with self._stage.as_in_training(), self._client.busy("STEP", OpKind.STEP.value):
                    self._apply(commits)
            case Settle():
                self._settle_in_recovery(action.step, commits)
            case Adopt():
                with self._client.waiting("a gradient"):
                    for buffer in self._gradients.of_step(action.step):
                        self._communicator.sums.broadcast(buffer, action.donor)
                if action.lacks:
                    self._payload, self._reduced = self._told(action.step), True
            case AwaitPeers():
                self._await_peers()
            case Forget():
                self._reduced, self._payload = False, None
            case Serve():
                self._serve(action.step)

    def _await_peers(self) -> None:
        with self._client.waiting("peers"):
            self._communicator.sums.all_reduce(torch.zeros(1))

    def _serve(self, step: int) -> None:
        """Runs a step that this worker has applied, with the parameters of that step."""
        assert self._shadow is not None, "without the shadow no stage applies a step before all others can"
        try:
            with self._stage.as_in_training(), self._shadow.in_place(), self._callbacks.as_in_step(step):
                self._run_program(step)
        finally:
            self.accumulated.attach(self.version - 1)

    def _await_verdict(self, error: CommunicationError) -> None:
        """Tells the coordinator that communication broke and waits for its verdict."""
        if not self._client.interrupted:
            log.debug("Worker %s: %s", self.worker, error)
            unreachable = error.ranks if isinstance(error, UnreachableError) else ()
            self._client.send(messages.Broken(self._client.rank, self._client.generation, str(error), unreachable))
            self._client.await_announcement(_ANNOUNCEMENT_TIMEOUT)

    def settle(self, error: Exception) -> None:
        """Returns if ``error``, which was raised outside of steps, is the user's own. Does not return if a fault of the
        machine may explain it and others go on without this worker.
        """
        with readers_may_die():
            self._is_own(error, (OUTSIDE, place_of(error)), exact=False)

    def _is_own(self, error: Exception, place: tuple[int, str], exact: bool) -> bool:
        """Whether ``error`` is the user's own, which the coordinator decides if a fault of the machine may explain it.
        Does not return if this worker is evicted.

        Args:
            error: the exception.
            place: the step and the operation to which it belongs.
            exact: whether this worker can do the same again.
        """
        if not self._has_own:
            self._has_own = not self._callbacks.is_suspect(error) or self._client.is_own(
                *place, error, exact=exact, sticky=is_device_error(error)
            )
        return self._has_own

    def _await_another_try(self, error: Exception) -> None:
        """Returns if this worker is to do again what raised ``error``.

        Raises:
            Exception: ``error``, if it is the user's own.
        """
        # What the optimizer and the hooks of its step have done cannot be undone, nor what others were told.
        exact = not self._is_past and (self._reads_from is None or self._reads_from.can_read_again)
        if self._is_own(error, self._place, exact):
            raise error
        step, operation = self._place
        log.warning("Worker %s does %s of step %d once more after %r.", self.worker, operation, step, error)
        self._client.await_announcement(_ANNOUNCEMENT_TIMEOUT)
        if self._reads_from is not None:
            self._reads_from.read_again()

    # ------------------------------------------------------------------ profiling

    def _profiled(self, step: int) -> AbstractContextManager[None]:
        return self._profiler.forward(step) if self._profiler is not None else _NOTHING

    def _finish_profile(self, profiler: StageProfiler) -> None:
        seconds = self._timings.seconds
        measured = profiler.profile(seconds if self._tried is None else self._tried.divided(seconds))
        steps = profiler.last_step - profiler.first_step + 1
        self._client.send(messages.Profiled(self._client.rank, measured, profiler.latency, profiler.bandwidth, steps))
        self._profiler = None

    def _all_held(self) -> Iterable[Tensor]:
        """The tensors that this worker holds between two steps."""
        assert self._held is not None, "only a worker that measures its memory asks"
        shadow = [] if self._shadow is None else self._shadow.on(self._communicator.device)
        return chain(
            self._parameters, self._gradients.tensors(), self.accumulated.state().values(), shadow, self._held()
        )

    # ------------------------------------------------------------------ small things

    def _receive(self, step: int, task: Task) -> Any:
        if not self._has_read_ahead and step == self.version:
            self._has_read_ahead = True  # the first wait of a step is the longest: the pipeline fills
            data = self._steps[step]
            with self._client.busy(_READING):
                self._place = (step + 1, _READING)
                data.handle.loader.read_ahead(data.handle)
                self._place = (step, task.label)
        with self._client.waiting(f"rank {task.source}"):
            value = self._communicator.messages.receive(self._incoming[task])
        if self._meter is not None and task.op.kind is OpKind.FORWARD:
            self._meter.received(value)
        return value

    def _measured(self, kind: OpKind) -> AbstractContextManager[None]:
        stretch = None if kind is OpKind.REDUCE else self.stretch_operation  # most of a REDUCE is waiting for peers
        timed = self._timings.measure(kind, self._communicator.device, stretch)
        return timed if self._meter is None else self._meter.operation(timed)

    def _samples(self, step: int, task: Task) -> int:
        data = self._steps[step]
        assert task.op.microbatch is not None
        return data.handle.loader.num_samples(data.handle, task.op.microbatch)


def _channel(op: Op) -> Channel:
    return Channel.ACTIVATIONS if op.kind is OpKind.FORWARD else Channel.GRADIENTS
