"""Runner of a step's program: F, B, W, REDUCE and STEP of one stage.

Receives are posted at the start of the step and sends leave as soon as their value exists, so communication follows
from the program without operations of its own. A stage steps its optimizer when its own gradient is reduced, much of it
in the background; a copy of the previous version's parameters (the shadow) stays until the next STEP. If stages depend
on each other's results before they step, or staggering is off, a commit through the coordinator comes first. If they
depend on the norm of the whole gradient alone, a stage may speculate that it is small, and steps again if it
was wrong.

An attempt ends with :class:`Interrupted` or :class:`CommunicationError` when a generation is announced;
:mod:`~lightning_recycle.runtime.executor` then recovers and repeats it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_recycle.control.client import ControlClient
from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.member import Interrupted
from lightning_recycle.control.protocol.recovery import part_of
from lightning_recycle.data.step_sources import StepHandle, StepSource
from lightning_recycle.devices import is_accelerator
from lightning_recycle.planning.grid import Grid, Op, OpKind, Positions, Worker
from lightning_recycle.planning.program import Program, Task
from lightning_recycle.runtime.commit_reports import (
    CommitPayload,
    CommitRules,
    ExecutorCallbacks,
    SpeculativeCommits,
    StepResult,
    norm_of,
)
from lightning_recycle.runtime.communicator import Communicator
from lightning_recycle.runtime.gradients import AccumulationPart, BucketedReduction
from lightning_recycle.runtime.stage_bundle import Shadow, StageBundle
from lightning_recycle.runtime.step_measurements import StepMeasurements
from lightning_recycle.runtime.verification import Recomputation, Verifier
from lightning_recycle.runtime.wire import Channel, Incoming
from lightning_recycle.tensor_memory import pack_tensors, unpack_tensors

log = logging.getLogger(__name__)

READING = "reading data"
_ACTIVATIONS, _GRADIENTS = Channel.ACTIVATIONS, Channel.GRADIENTS


@dataclass
class Step:
    """A batch from Lightning: its data, what steps the optimizer, and its result."""

    handle: StepHandle
    apply: Callable[[StepResult], None]
    accumulation: AccumulationPart
    result: StepResult | None = None


@dataclass
class Attempt:
    """Progress of a worker in its attempt at a step or an evaluation.

    Attributes:
        place: the step and the operation to which an exception belongs.
        cannot_repeat: whether a second attempt could not do the same again.
        reads_from: the source of the data; None if none is read.
        computes: whether the worker is in an attempt, not in a hook that is called only once.
    """

    place: tuple[int, str] = (0, "")
    cannot_repeat: bool = False
    reads_from: StepSource | None = None
    computes: bool = False

    @contextmanager
    def computing(self, computes: bool) -> Iterator[None]:
        before, self.computes = self.computes, computes
        try:
            yield
        finally:
            self.computes = before


class StepRunner:
    """Runs one worker's program of a step: F, R, B, W, REDUCE and STEP.

    Args:
        rules: what stages must know of each other before they step.
        shadow_on_host: whether the previous version's parameters are kept in host memory.

    Attributes:
        version: steps applied to the parameters; with gradient accumulation, batches.
        payload: its report to other stages; that of a speculative step stays.
        stage_leaders: the rank that speaks for each stage.
        repeated_step: a step that is run again; ``stages_done``: the stages that are done with it.
        siblings_done: whether the other members of this worker's position are done with that step, too.
        timings: seconds by kind of operation.
    """

    def __init__(
        self,
        worker: Worker,
        grid: Grid,
        client: ControlClient,
        communicator: Communicator,
        bundle: StageBundle,
        callbacks: ExecutorCallbacks,
        rules: CommitRules,
        measurements: StepMeasurements | None = None,
        shadow_on_host: bool = False,
        device_name: str = "",
        members: int = 1,
    ) -> None:
        self.worker, self.grid, self.positions = worker, grid, Positions(grid, members)
        self.client, self.communicator, self.callbacks = client, communicator, callbacks
        self.version = 0
        self.reduced = False
        self.payload: CommitPayload | None = None
        self.steps: dict[int, Step] = {}
        self.attempt = Attempt()
        self.stage_leaders: dict[int, int] = {}
        self.repeated_step, self.stages_done = -1, frozenset[int]()
        self.siblings_done = True
        self.before_operation: list[Callable[[int, Op], None]] = []
        self.after_operation: list[Callable[[int, Op], None]] = []
        self.rules = rules
        self._device = communicator.device
        self._measurements = measurements or StepMeasurements(client, self._device)
        self.timings = self._measurements.timings
        self._losses_stay_on_device = is_accelerator(self._device)  # a number of the device
        has_ties = bool(bundle.ties.ties)
        needs_commit = rules.overflow or not rules.staggered or has_ties
        self.speculation = (
            None
            if needs_commit or rules.presumes is None
            else SpeculativeCommits(client, self.positions.column(client.rank), self.positions.columns, rules.presumes)
        )
        self.commits = needs_commit or (rules.norm and rules.presumes is None)
        self.redoes_whole_steps = has_ties  # what is REDUCED, but not applied, cannot be kept for a redo
        self._shadow_on_host, self._device_name = shadow_on_host, device_name
        self._shadow_version = -1  # the version of the parameters in the shadow
        self._is_last = worker.stage == grid.stages - 1
        self._whole_program = Program()
        self.program: tuple[Task, ...] = ()
        self._idle_peer = False
        self._incoming: dict[Task, Incoming] = {}
        self._losses: dict[int, float | Tensor] = {}  # on a device: reading one waits for it
        self._outputs: dict[int, bytes] = {}
        self._has_read_ahead = False
        self._statistics: Sequence[Tensor] = ()  # to which this attempt adds
        self._set_up(bundle)

    def _set_up(self, bundle: StageBundle) -> None:
        """Sets up this worker for the layers of ``bundle``; nothing may be under way."""
        stage = bundle.stage
        self.stage, self.gradients, self.ties = stage, bundle.gradients, bundle.ties
        self._parameters, self._not_counted = bundle.parameters, bundle.not_counted
        self._reduction = BucketedReduction(self.communicator, self.gradients, self.stage, lambda: self.is_confirmed)
        # A single column is never ahead of others: what it has applied is what is committed.
        is_ahead = not self.commits and (self.positions.columns > 1 or self.speculation is not None)
        self._shadow = Shadow(self._parameters, self._shadow_on_host) if is_ahead else None
        self._measurements.begin_layers(self._layer_tensors)
        # A speculative step, or the user's own backward, may differ.
        is_comparable = self.speculation is None and stage.differentiates_itself
        self._microbatches = self.grid.global_microbatches
        self._recompute_again = recompute = Recomputation(
            stage, self._parameters, self._microbatches, self.callbacks.recomputing
        )
        # A scaled loss overflows now and then, and a peer computes what differentiates itself in its own way.
        has_replicas = self.grid.lanes > 1 and self.positions.members == 1  # a member cannot compute alone
        may_blame = has_replicas and not self.rules.overflow and stage.differentiates_itself
        self.verifier = Verifier(
            self.client, self.communicator, stage, recompute, self.grid, self._device_name, is_comparable, may_blame
        )
        self._recorder: Verifier | None = None  # if micro-batches of this attempt are recorded

    def replace_layers(self, bundle: StageBundle) -> None:
        self.gradients.give_back()
        for parameter, grad in bundle.moved_gradients.items():
            parameter.grad = grad
        self._set_up(bundle)
        self.follow(self._whole_program)  # so does what is new with the layers
        self.stage.remember_modes()
        self.forget_gradient()

    def replace_parameters(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replaces the parameters of the layers; for a single stage, without a shadow."""
        assert self._shadow is None
        self.gradients.give_back()
        self._parameters = self.gradients.parameters = self._recompute_again.parameters = list(parameters)

    # ------------------------------------------------------------------ a step

    def follow(self, program: Program) -> None:
        """Runs ``program`` from the next step on."""
        self._whole_program = program
        self.program, self._idle_peer = program.tasks, program.idle_peer
        self.verifier.follow(program)

    def run_program(self, step: int) -> None:
        """Runs the program for ``step``, or the part that other stages still need."""
        self.communicator.meet_siblings()  # none of them is left behind in a step that others can complete
        self.client.leave_hook(together=True)
        siblings_done = self.siblings_done if step == self.repeated_step else False
        part = part_of(step, self.version, self.reduced, self._idle_peer, siblings_done)
        givers = self._reduced_tie_givers(step)
        self.verifier.begin(step, part.reduces and step == self.version)
        program = self.verifier.tasks
        if not part.reduces:
            weights = [] if part.computes_weights else [OpKind.BACKWARD_WEIGHT]
            left_out = [*weights, *([] if givers else [OpKind.REDUCE])]
            program = tuple(t for t in program if t.op.kind not in left_out)
        if step == self.version:
            self._protect_lent_gradients(step - 1)  # hooks have run between the steps
        self.stage.clear()
        self._losses, self._outputs = {}, {}
        self._has_read_ahead = False
        self._recorder = self.verifier if self.verifier.records else None
        early = part.reduces and not (self.verifier.needs_last_gradients or givers)
        self._reduction.begin(part.buffer_step, program if early else (), givers, self.verifier.target)
        self._statistics = self.gradients.statistics(part.buffer_step)
        post = self.communicator.post_receive
        self._incoming = {
            task: post(_ACTIVATIONS if task.op.kind is OpKind.FORWARD else _GRADIENTS, task.source, task.index)
            for task in program
            if task.source is not None
        }
        if (first_steps := self._measurements.first_steps) is not None:
            measured, buffers = step if part.reduces else None, self.communicator.buffers()
            first_steps.begin(measured, program, self._whole_program.split_backward, buffers)
        if part.awaits_peers:
            self.await_peers()
        forwards_left = [task.op.kind for task in program].count(OpKind.FORWARD)
        member = self.client.member
        for task in program:
            if member.is_interrupted:
                raise Interrupted
            if self.speculation is not None:
                self.confirm(waits=False)
            kind = task.op.kind
            self.client.doing(step, task.label, kind.value, task.index)
            self.attempt.place = (step, task.label)
            for hook in self.before_operation:
                hook(step, task.op)
            if kind is OpKind.FORWARD:
                self._forward(step, task)
                forwards_left -= 1
                if self._is_last and not forwards_left:
                    if step == self.version:
                        self.confirm()
                    losses, outputs = self._results()
                    if step == self.version:
                        self.verifier.check_losses(step, losses)
                    proven_in = self.client.generation if self.verifier.leaves_open(step) else None
                    self.client.send(messages.Losses(self.client.rank, step, losses, outputs, proven_in))
            elif kind is OpKind.RECOMPUTE:
                self._recompute(step, task)
            elif kind in (OpKind.BACKWARD, OpKind.BACKWARD_INPUT):
                self._backward(step, task)
                if not part.computes_weights:  # there is no W that would free what it waits with
                    self.stage.forget(task.index)
            elif kind is OpKind.BACKWARD_WEIGHT:
                if self._recorder is not None:
                    self._recorder.begin_gradients(task)
                with self._measuring(kind, task):
                    self.stage.backward_weight(task.index, self._reduction.during_weights(task))
            elif kind is OpKind.CHECK:
                self.verifier.check(step)
            elif kind is OpKind.REDUCE and part.reduces:
                self._reduce(step)
            elif kind is OpKind.REDUCE:
                with self.client.waiting("stages with the same weights"):
                    self._reduction.send_sums(step)
            elif kind is OpKind.STEP and part.applies:
                self._commit_and_apply()
            for after in self.after_operation:
                after(step, task.op)
            if kind in (OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT):
                if self._recorder is not None:
                    self._recorder.complete_record(task)
                self._reduction.end_task(task)
        self.communicator.end_step()

    def _forward(self, step: int, task: Task) -> None:
        inputs, target, handle = None, None, self.steps[step].handle
        assert task.op.microbatch is not None
        if task.op.stage == 0 or self._is_last:
            with self.client.busy(READING):
                self.attempt.place = (step, READING)
                raw_microbatch = handle.loader.fetch(handle, task.op.microbatch)
                self.attempt.place = (step, task.label)
                inputs, target = self.callbacks.split(raw_microbatch, handle.index)
        note = b""
        if task.source is not None:
            inputs = self._receive(step, task)
            note = self._incoming[task].note
        if self._recorder is not None:
            self._recorder.record_inputs(step, task, inputs, target)
        first_steps, index, recomputed = self._measurements.first_steps, task.index, task.recomputed
        is_split = task.split_backward or (first_steps is not None and first_steps.is_split(index))
        measured = self._measuring(OpKind.FORWARD, task, inputs)
        with self.callbacks.microbatch(task.index, self._statistics) as values, measured:
            output = self.stage.forward(step, index, inputs, target, split_backward=is_split, recomputed=recomputed)
            if self._is_last:
                loss = self.stage.loss(step, task.index, output, target, self._microbatches)
                self._losses[task.index] = loss.clone() if self._losses_stay_on_device else float(loss)
                if self.callbacks.records_outputs:
                    with self.client.busy("a hook that sees outputs"):
                        samples = handle.loader.num_samples(handle, task.op.microbatch)
                        values.record = self.callbacks.record_output(output, target, samples)
        if self._is_last and (output_bytes := values.output(note)):
            self._outputs[task.index] = output_bytes
        if self._recorder is not None:
            self._recorder.record_output(task, output, self._losses.get(task.index))
        if task.destination is not None:
            if first_steps is not None:
                first_steps.sent(output)
            note = values.note(note)
            self.communicator.send(_ACTIVATIONS, output, task.destination, task.index, note)

    def _results(self) -> tuple[dict[int, float], dict[int, bytes]]:
        """Losses of the micro-batches, and hooks' results for their outputs.

        For partially computed micro-batches the mean losses, and the outputs of all parts.
        """
        losses = {index: float(loss) for index, loss in self._losses.items()}
        _, parts = self.communicator.parts
        if parts == 1:
            return losses, self._outputs
        packed = pack_tensors(self._outputs) if self._outputs else b""
        contributions = self.communicator.exchange([*losses.values()], packed)
        means = (sum(each) / parts for each in zip(*(numbers for numbers, _ in contributions), strict=True))
        outputs = {index: output for _, data in contributions if data for index, output in unpack_tensors(data).items()}
        return {index // parts: mean for index, mean in zip(losses, means, strict=True)}, outputs

    def _recompute(self, step: int, task: Task) -> None:
        first_steps = self._measurements.first_steps
        is_split = task.split_backward or (first_steps is not None and first_steps.is_split(task.index))
        with self.callbacks.recomputing(task.index), self._measuring(OpKind.RECOMPUTE, task):
            self.stage.recompute(task.index, split_backward=is_split)

    def _backward(self, step: int, task: Task) -> None:
        grads = None if task.source is None else self._receive(step, task)
        kind, first_steps = task.op.kind, self._measurements.first_steps
        if self._recorder is not None:
            self._recorder.begin_gradients(task)
        if kind is OpKind.BACKWARD and first_steps is not None and first_steps.is_split(task.index):
            with self.timings.of[kind]:
                with first_steps.part(OpKind.BACKWARD_INPUT, task.index, self.stage):
                    input_grads = self.stage.backward_input(task.index, grads)
                with first_steps.part(OpKind.BACKWARD_WEIGHT, task.index, self.stage):
                    self.stage.backward_weight(task.index)
        elif kind is OpKind.BACKWARD:
            with self._measuring(kind, task), self._reduction.during_backward(task):
                input_grads = self.stage.backward(task.index, grads)
        else:
            with self._measuring(kind, task):
                input_grads = self.stage.backward_input(task.index, grads)
        if self._recorder is not None:
            self._recorder.record_backward(task, grads, input_grads)
        if task.destination is not None and input_grads is not None:
            self.communicator.send(_GRADIENTS, input_grads, task.destination, task.index)

    def _reduce(self, step: int) -> None:
        self.confirm()
        self.timings.await_device(self.client.progressed)
        with self.client.waiting("peers"), self.timings.of[OpKind.REDUCE]:
            self._reduction.finish()
        payload = self._commit_payload(step)
        norm = payload.squared_norm if self.rules.norm else None
        self.verifier.check_gradient(step, norm, self.gradients.of_step(step))
        self.payload, self.reduced = payload, True

    def _protect_lent_gradients(self, step: int) -> None:
        if not self.commits and self.speculation is None:  # otherwise no peer needs them once they have been clipped
            self.gradients.protect_lent(step)

    def _reduced_tie_givers(self, step: int) -> dict[tuple[int, ...], int]:
        """For stages with shared weights that were summed before: the rank that has them."""
        givers = self.ties.givers(self.stages_done) if step == self.repeated_step else {}
        return {stages: self.stage_leaders[giver] for stages, giver in givers.items()}

    def _commit_payload(self, step: int) -> CommitPayload:
        """This stage's report of its reduced gradient of ``step``."""
        if not (self.rules.norm or self.rules.overflow):
            return CommitPayload(math.nan, False)
        reduced, unoptimized = (step, self.steps[step].accumulation), self.callbacks.unoptimized_parameters()
        return CommitPayload(
            self.gradients.squared_norm(*reduced, (*self._not_counted, *unoptimized)) if self.rules.norm else math.nan,
            self.rules.overflow and not self.gradients.is_finite(*reduced, unoptimized),
        )

    def _commit_and_apply(self) -> None:
        """Runs STEP: at once, speculatively, or after a commit, by the rules of the run."""
        if self.speculation is not None:
            self._apply_at_once_or_later(self.speculation, self.version)
        elif self.commits:
            self.apply(self.client.commit(self.version, self.payload))
        else:
            self.apply({})

    def apply(self, payloads: Mapping[int, CommitPayload], speculative: bool = False) -> None:
        """Steps the optimizer with the reduced gradient of step :attr:`version`.

        ``payloads``: the report of each column; empty if ``speculative``, as they are not known yet.
        """
        version = self.version
        step = self.steps[version]
        norm = 0.0 if speculative else norm_of(payloads)
        overflow = any(payload.overflow for payload in payloads.values())
        loss = self.client.await_loss(version)
        self.verifier.record_loss(loss.loss)
        add = partial(self.gradients.add, version, step.accumulation)
        result = StepResult(loss.loss, norm, loss.outputs, loss.after_step, overflow, loss.check_next, add)
        self.gradients.give_back()
        with self.timings.of[OpKind.STEP]:
            if self._shadow is not None:
                self._shadow.update()
                self._shadow_version = version
            if speculative:
                self.callbacks.keep_optimizer_state()
            # From here on the step counts as applied: a regroup within (a user's collective) must not apply it again.
            self.version += 1
            self.reduced = False
            if speculative:
                assert self.speculation is not None
                self.speculation.is_unconfirmed = True
            else:
                self.payload = None
            self.attempt.cannot_repeat = True
            # Some optimizers take long now and then.
            with self.client.busy("the optimizer and its hooks"), self.attempt.computing(False):
                step.apply(result)
            self.client.leave_hook()
            self.stage.clear()  # what layers of FSDP have gathered for a hook are the parameters before the step
            self._protect_lent_gradients(version)
        step.result = result
        self.client.send(self._measurements.applied(version, self.callbacks.describe_step(version)))
        self.attempt.cannot_repeat = False
        self._measurements.report()

    # ------------------------------------------------------------------ speculative steps

    def _apply_at_once_or_later(self, speculation: SpeculativeCommits, step: int) -> None:
        """Applies this stage's gradient speculatively if it may, else after all reports."""
        assert self.payload is not None
        speculative = speculation.is_likely(self.payload) and not self.callbacks.forbids_speculation(step)
        speculation.report(step, self.payload, speculative)
        if speculative and not speculation.is_reported(step):
            self.apply({}, speculative=True)
        else:
            self.apply(speculation.await_reports(step))

    def confirm(self, waits: bool = True) -> None:
        """Confirms a speculative newest step; ``waits``: for all reports on it.

        No consequence of a speculative step may be reduced, or leave the executor. Raises Interrupted when a generation
        was announced, in which a wrong speculation is corrected.
        """
        speculation, step = self.speculation, self.version - 1
        if speculation is not None and speculation.is_unconfirmed and (waits or speculation.is_reported(step)):
            speculation.await_reports(step)
            speculation.is_unconfirmed, self.payload = False, None

    @property
    def has_shadow(self) -> bool:
        """Whether this worker holds the parameters from before its newest step."""
        return self._shadow is not None and self._shadow_version == self.version - 1

    @property
    def is_confirmed(self) -> bool:
        """Whether the parameters are final: no speculation may be corrected."""
        return self.speculation is None or not self.speculation.is_unconfirmed

    def confirm_in_recovery(self, step: int, reports: Mapping[int, CommitPayload]) -> None:
        """Confirms or corrects speculative ``step``; ``reports``: of all columns."""
        assert self.speculation is not None
        was_right = self.speculation.was_right(reports)
        self.speculation.is_unconfirmed, self.payload = False, None
        if not was_right:
            self._repeat_optimizer_step(step, norm_of(reports))

    def _repeat_optimizer_step(self, step: int, norm: float) -> None:
        assert self._shadow is not None
        started = time.perf_counter()
        with self.client.busy("STEP", OpKind.STEP.value):
            self._shadow.restore()
            self.gradients.hand_over_again(step)
            self.callbacks.step_again(norm)
        log.info("Step %d was made again with its true norm, %g, in %.4f s.", step, norm, time.perf_counter() - started)

    # ------------------------------------------------------------------ a recovery

    def adopt(self, step: int, donor: int, lacks: bool, is_committed: bool) -> None:
        """Broadcasts the gradient of ``step`` from ``donor``; who ``lacks`` it is REDUCED."""
        with self.client.waiting("a gradient"):
            for buffer in self.gradients.of_step(step):
                self.communicator.end_collective(self.communicator.begin_collective(buffer, source=donor))
        if lacks:
            self.payload, self.reduced = self._commit_payload(step), True

    def forget_gradient(self) -> None:
        self.reduced, self.payload = False, None

    def before_recovery(self) -> None:
        """Drops micro-batches and receives under way, as a generation was announced."""
        self.stage.clear()
        self._incoming = {}

    def drop_reductions(self) -> None:
        """Forgets begun sums, once the connections of their generation are closed."""
        self._reduction.drop()

    def measure_links(self) -> None:
        """Measures the links to the neighbours, which do the same, if the run is profiled."""
        rank, echo = self.client.rank, self.communicator.echo
        self._measurements.measure_links(self.worker.stage, self._is_last, lambda by, *how: echo(rank + by, *how))

    def await_peers(self) -> None:
        """Returns when all live workers of this stage have come here."""
        with self.client.waiting("peers"):
            self.communicator.all_reduce(torch.zeros(1))

    def serve(self, step: int) -> None:
        """Runs an applied step for stages that lack it, with the parameters from before."""
        assert self._shadow is not None, "without the shadow no stage applies a step before all others can"
        try:
            with self.stage.as_in_training(), self._shadow.in_place(), self.callbacks.as_in_step(step):
                self.run_program(step)
        finally:
            self.gradients.give_back()

    # ------------------------------------------------------------------ small things

    def _layer_tensors(self) -> Iterable[Tensor]:
        shadow = [] if self._shadow is None else self._shadow.copies_on(self._device)
        return chain(self._parameters, self.gradients.tensors(), shadow)

    def _receive(self, step: int, task: Task) -> Any:
        if not self._has_read_ahead and step == self.version:
            self._has_read_ahead = True  # the first wait of a step is the longest: the pipeline fills
            handle = self.steps[step].handle
            with self.client.busy(READING):
                self.attempt.place = (step + 1, READING)
                handle.loader.read_ahead(handle)
                self.attempt.place = (step, task.label)
        assert task.source is not None
        with self.client.waiting(f"worker {self.positions.name(task.source)}"):
            value = self.communicator.receive(self._incoming[task])
        if task.op.kind is OpKind.FORWARD and self._measurements.first_steps is not None:
            self._measurements.first_steps.received(value)
        return value

    def _measuring(self, kind: OpKind, task: Task, inputs: Any = None) -> AbstractContextManager[None]:
        """The context of an F, R, BW, B or W; ``inputs``: of the F."""
        timed = self.timings.of[kind]
        first_steps = self._measurements.first_steps
        return timed if first_steps is None else _nested(timed, first_steps.part(kind, task.index, self.stage, inputs))


@contextmanager
def _nested(outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> Iterator[None]:
    with outer, inner:
        yield
