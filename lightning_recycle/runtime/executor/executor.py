"""The executor: a worker's steps, evaluations and recoveries.

:meth:`Executor.run_step` has the program of a step run (:mod:`~lightning_recycle.runtime.executor.step_runner`) until
this worker has applied it. When a generation is announced, the current attempt ends with :class:`Interrupted` or
:class:`CommunicationError`. The worker then reports what it holds, reconnects, brings itself to the committed version,
and runs its step again or, if its own part is done, serves others that do. None of that shows outside. An exception
that a fault of this machine may explain is judged by the coordinator: this worker does the same again, is evicted, or
the exception is raised as the user's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

from torch import Tensor, nn

from lightning_recycle.control.payload import unpack_all
from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.fault_attribution import OUTSIDE
from lightning_recycle.control.protocol.member import Interrupted
from lightning_recycle.control.protocol.positions import Positions
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
)
from lightning_recycle.data.steps import StepHandle
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning.grid import Microbatch, Op, OpKind
from lightning_recycle.planning.program import Program, Task
from lightning_recycle.runtime.comm.groups import CommunicationError, UnreachableError
from lightning_recycle.runtime.comm.state_transfer import receive_object, send_object
from lightning_recycle.runtime.comm.wire import Channel
from lightning_recycle.runtime.executor.executor_callbacks import RecordOutput, StepResult
from lightning_recycle.runtime.executor.speculative_commit import CommitPayload
from lightning_recycle.runtime.executor.step_runner import READING, Step, StepRunner
from lightning_recycle.runtime.machine_errors import is_device_error, place_of, readers_may_die
from lightning_recycle.runtime.stage.gradients import GradientBuffers, Share
from lightning_recycle.runtime.stage.stage_bundle import LayerKeeper, LayerMoves

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_WHOLE_STEP = Share()
_RECOVER = "RECOVER"  # kind of a worker's own work during a recovery
_ANNOUNCEMENT_TIMEOUT = 60.0  # seconds from a broken connection to the coordinator's verdict
_LAYERS_TIMEOUT = 1800.0  # seconds for others to get the layers that they lack; a stuck worker is found by heartbeats


class Executor:
    """The steps, evaluations and recoveries of one worker."""

    def __init__(self, runner: StepRunner, layers: LayerKeeper | None = None) -> None:
        self.worker, self.grid = runner.worker, runner.grid
        self._runner, self._forwards = runner, Forwards(runner)
        self._client, self._communicator, self._callbacks = runner.client, runner.communicator, runner.callbacks
        tied = {tie.stages for tie in runner.ties.ties}
        self._moving = LayerMoves(layers, tied, self.grid, self.worker, self._client, self._communicator)
        self._joining = False
        self._has_own_exception = False  # an exception was judged to be the user's own
        self._communicator.on_progress = self._client.progressed
        self._communicator.waiting = self._client.waiting
        self._client.on_interrupt = self._communicator.abort  # ends whatever the main thread exchanges with others
        self._client.regroup = self.regroup
        self._communicator.report_hooks_to(self._enters_hook, self._lose_sibling)

    @property
    def version(self) -> int:
        """The number of steps applied to the parameters (batches, with accumulation)."""
        return self._runner.version

    @version.setter
    def version(self, version: int) -> None:
        self._runner.version = version

    @property
    def gradients(self) -> GradientBuffers:
        """The gradients that parameters hold between steps, and those of each step."""
        return self._runner.gradients

    def train(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replaces the parameters of the layers; for a single stage."""
        self._runner.train(parameters)

    def statistics(self, step: int) -> Sequence[Tensor]:
        """The sums added to running statistics by micro-batches of the newest ``step``."""
        return self._runner.gradients.statistics(step)

    def reseed(self, seed: int) -> None:
        """Makes ``seed`` the seed of the run, before its first step."""
        self._runner.stage.seed = seed

    @property
    def is_settled(self) -> bool:
        """Whether the parameters are final, and no guess may be corrected."""
        return self._runner.is_settled

    @property
    def before_operation(self) -> list[Callable[[int, Op], None]]:
        """Called with (step, operation) before each operation."""
        return self._runner.before_operation

    @property
    def after_operation(self) -> list[Callable[[int, Op], None]]:
        """Called with (step, operation) after each operation."""
        return self._runner.after_operation

    @property
    def seconds_for_siblings(self) -> float:
        """The time that collectives of the layers have taken so far."""
        return self._communicator.seconds_for_siblings

    @property
    def stretch_operation(self) -> Callable[[float], None] | None:
        """Called with the seconds that an operation has computed: see StepRunner."""
        return self._runner.timings.stretch

    @stretch_operation.setter
    def stretch_operation(self, stretch: Callable[[float], None] | None) -> None:
        self._runner.timings.stretch = stretch

    # ------------------------------------------------------------------ a step

    def run_step(
        self, handle: StepHandle, apply: Callable[[StepResult], None], share: Share = _WHOLE_STEP
    ) -> StepResult:
        """Runs step :attr:`version` until this worker has applied it.

        Args:
            apply: called exactly once, with the gradients in place; steps the optimizer if ``share`` ends a step of it.
        """
        number = self.version
        step = Step(handle, apply, share)
        self._runner.steps = {number: step, **{n: s for n, s in self._runner.steps.items() if n == number - 1}}
        self._runner.attempt.reads_from = handle.loader
        self._runner.stage.remember_modes()
        has_begun = False

        def run() -> None:
            nonlocal has_begun
            if not has_begun:
                self._runner.attempt.place = (number, READING)
                handle.loader.begin_step(handle)
                has_begun = True
            if self.version == number:  # otherwise a recovery has applied it
                program = self._client.begin_step(number)
                if program is not None:
                    self._runner.follow(self._in_plane(program))
                self._runner.run_program(number)

        self._retried(run)
        assert step.result is not None
        return step.result

    def settle_newest(self) -> None:
        """Waits until the parameters are final, before anything looks at them."""
        if not self.is_settled:
            self._retried(self._runner.settle)

    # ------------------------------------------------------------------ attempts

    def _retried(self, attempt: Callable[[], _T], recover: bool = False) -> _T:
        """Returns ``attempt()``, made again after each failure and recovery.

        ``recover``: whether a recovery is due first.
        """
        with self._runner.attempt.computing(True):
            self._client.leave_hook()
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
                    self._client.leave_hook()
                    self._client.doing(self.version, "hooks and callbacks")
                    return result

    def _is_undone(self) -> bool:
        """Whether a new generation drops this worker's results, as of a wrong guess."""
        try:
            if not self._runner.attempt.is_past:
                self._runner.settle()
        except Interrupted:
            return True
        return False

    def _await_verdict(self, error: CommunicationError) -> None:
        """Reports to the coordinator that communication broke and waits for its verdict."""
        if not self._client.interrupted:
            log.debug("Worker %s: %s", self.worker, error)
            unreachable = error.ranks if isinstance(error, UnreachableError) else ()
            self._client.send(messages.Broken(self._client.rank, self._client.generation, str(error), unreachable))
            self._client.await_announcement(_ANNOUNCEMENT_TIMEOUT)

    def _is_own(self, error: Exception, place: tuple[int, str], exact: bool) -> bool:
        """Whether ``error`` is the user's own; does not return if this worker is evicted.

        ``place``: the step and operation that raised it; ``exact``: whether this worker can do the same again. The
        coordinator decides if a fault of the machine may explain the error.
        """
        if not self._has_own_exception:
            self._has_own_exception = not self._callbacks.is_suspect(error) or self._client.is_own(
                *place, error, exact=exact, sticky=is_device_error(error)
            )
        return self._has_own_exception

    def _await_another_try(self, error: Exception) -> None:
        """Returns if this worker is to do again what raised ``error``.

        Raises:
            Exception: ``error``, if it is the user's own.
        """
        # What the optimizer and the hooks of its step have done cannot be undone, nor what was reported to others.
        data = self._runner.attempt.reads_from
        exact = not self._runner.attempt.is_past and (data is None or data.can_read_again)
        if self._is_own(error, self._runner.attempt.place, exact):
            raise error
        step, operation = self._runner.attempt.place
        log.warning("Worker %s does %s of step %d once more after %r.", self.worker, operation, step, error)
        self._client.await_announcement(_ANNOUNCEMENT_TIMEOUT)
        if data is not None:
            data.read_again()

    # ------------------------------------------------------------------ forward only

    def evaluate(
        self, handle: StepHandle, split: Callable[[Any], tuple[Any, Any]], record: RecordOutput
    ) -> dict[int, bytes]:
        """Runs the batch ``handle`` forward through the pipelines, despite failures.

        Args:
            record: called on the last stage with (output, target, number of samples) of each micro-batch.

        Returns:
            What ``record`` returned, by global micro-batch, on every worker.

        Raises:
            ConfigurationError: if workers have read different samples.
        """

        self._runner.attempt.reads_from = handle.loader

        def run() -> Mapping[int, tuple[int, dict[int, bytes]]]:
            if self._client.interrupted:
                raise Interrupted
            self._runner.attempt.place = (self.version, f"evaluation of batch {handle.index}")
            recorded = self._forwards.run_batch(handle, split, record)
            return self._exchanged(f"batch {handle.index}", (handle.loader.digest(handle), recorded))

        parts = self._retried(run)
        if len({digest for digest, _ in parts.values()}) > 1:
            raise ConfigurationError(
                f"Workers have read different samples for batch {handle.index} of an evaluation, or before it. A stream"
                " must give every process the same: not depend on its rank, the time, or the order of a set."
            )
        return {index: data for _, (_, part) in sorted(parts.items()) for index, data in part.items()}

    def _exchanged(self, name: str, mine: Any) -> Mapping[int, Any]:
        """The parts of all workers of the generation; Interrupted if it ends before."""
        attempt = self._runner.attempt
        before, attempt.is_past = attempt.is_past, True  # with this part the others may have all parts, and go on
        try:
            parts = self._client.arrive_in_generation(name, mine)
        except Interrupted:
            attempt.is_past = before  # no worker has them
            raise
        attempt.is_past = before
        return parts

    def forward_whole(self, value: Any, draw: int, deliver: Callable[[Any], Any]) -> Any:
        """Runs ``value`` through one worker of each stage, despite failures.

        All workers call it at the same place outside of steps, or in the hooks of STEP.

        Args:
            draw: tells the randomness of this call from that of others in the same version, and of micro-batches.
            deliver: called with the output of the last layer where it was computed.

        Returns:
            What ``deliver`` returned, on every worker.
        """
        self._runner.attempt.reads_from = None
        place = self._runner.attempt.place

        def run() -> Mapping[int, tuple[Any] | None]:
            if self._client.interrupted:
                raise Interrupted
            self._runner.attempt.place = (self.version, "self(x)")
            self._client.doing(self.version, "self(x)")
            output = self._forwards.run_value(value, draw)
            mine = (deliver(output),) if self._forwards.leads_last else None
            return self._exchanged("output of self(x)", mine)

        parts = self._retried(run)
        self._runner.attempt.place = place
        (output,) = next(part for part in parts.values() if part is not None)
        return output

    # ------------------------------------------------------------------ collectives of the position in hooks

    def _enters_hook(self) -> bool:
        """Whether the next collective of the position is that of a hook.

        A hook cannot be run again. Its siblings have come there, too, when this returns.
        """
        if self._runner.attempt.computes or self._joining or self._client.joining:
            return False
        self._client.enter_hook()
        return True

    def _lose_sibling(self, error: CommunicationError) -> NoReturn:
        """Ends this worker in a hook whose collective broke, as a sibling is gone.

        It waits like any that is parked, and ends when it is to go on.
        """
        self._await_verdict(error)
        while self._client.rank not in self._client.enter_generation().roster:
            self._client.doing(self.version, "parked")
            self._client.await_announcement(None)
        self._client.resign(f"cannot go on in a hook, where a collective of its position broke ({error})")

    # ------------------------------------------------------------------ a failure

    def announce_fault(self, fault: messages.FaultInjected) -> None:
        """Reports to the coordinator that this worker is about to fail on purpose."""
        self._client.send(fault)

    def alter_next_message(self, alter: Callable[[Any], Any]) -> None:
        """Sends the next value to another stage as ``alter`` changes it (a fault)."""
        self._communicator.alter_next = alter

    def join(self) -> None:
        """Enters a running training at a step boundary, with the state that a peer gives."""
        self._joining = True
        self._client.wait_to_enter()
        self.regroup()

    def regroup(self) -> None:
        """Takes part in the announced generation, and in any that follows before the end."""
        self._retried(lambda: None, recover=True)

    def settle(self, error: Exception) -> None:
        """Returns if ``error``, raised outside of steps, is the user's own.

        Does not return if a fault of the machine may explain it and others go on without this worker.
        """
        with readers_may_die():
            self._is_own(error, (OUTSIDE, place_of(error)), exact=False)

    def _recover(self) -> None:
        """Enters the announced generation, and does what its decision asks."""
        runner = self._runner
        runner.before_recovery()
        announced = self._client.enter_generation()
        if self._client.rank not in announced.roster:
            self._client.doing(self.version, "parked")
            self._client.await_announcement(None)
            raise Interrupted
        version = -1 if self._joining else self.version
        if runner.reduced and (runner.verifier.leaves_open(self.version) or announced.unproven == self.version):
            runner.forget()
        status = WorkerStatus(self._column, version, runner.reduced, not self.is_settled, runner.has_shadow)
        self._client.doing(self.version, "recovery", _RECOVER)
        runner.attempt.place = (self.version, "recovery")
        resume = self._client.report(status, runner.payload, self._moving.cuts)
        if resume.generation > 0:
            self._callbacks.on_recovery(resume.decision.version, bool(resume.decision.ahead))
        if not self._joining and (bundle := self._moving.decided(resume.cuts)) is not None:
            runner.take_up(bundle)
        self._connect(resume, announced)
        with self._client.busy("taking over from the last leader"):  # loggers and progress bars are the user's
            self._callbacks.on_generation()
        if resume.generation == 0:
            runner.measure_links()
        ahead = frozenset() if runner.redoes_whole_steps else resume.decision.ahead
        runner.ahead = resume.decision.version, self._stages_in_plane(ahead)
        siblings = self._positions.siblings(self._client.rank)
        runner.siblings_done = all(self._positions.column(sibling) in resume.decision.ahead for sibling in siblings)
        commits: Mapping[int, CommitPayload] = unpack_all(resume.commits)
        if runner.guesses is not None and commits:
            runner.guesses.known = commits
        rules = runner.commits, runner.redoes_whole_steps, resume.settled
        for action in actions(self._client.rank, status, resume.decision, resume.donors, *rules):
            if isinstance(action, CommitTogether):
                commits = self._client.commit(action.step, runner.payload)
            else:
                self._carry_out(action, resume, commits)
        runner.finite.follow(resume.inspects, resume.excused)
        if resume.vote is not None:
            runner.verifier.vote(resume.vote)
        if runner.guesses is not None and runner.guesses.unsettled:  # the others have yet to report the step
            runner.guesses.tell(self.version - 1, runner.payload, guesses=True)
        if resume.becomes:
            self._get_ready(resume)

    @property
    def _positions(self) -> Positions:
        """The assignment of workers to positions in the generation that was entered."""
        return replace(self._runner.positions, moved=self._client.member.moved)

    @property
    def _column(self) -> int:
        return self._positions.column(self._client.rank)

    def _stages_in_plane(self, columns: Collection[int]) -> frozenset[int]:
        """The stages whose column in this worker's plane is among ``columns``."""
        members = self._positions.members
        plane = self._column % members
        return frozenset(column // members for column in columns if column % members == plane)

    def _in_plane(self, program: Program) -> Program:
        """``program`` of a position, between the members of this worker's plane."""
        positions, plane = self._positions, self._positions.member(self._client.rank)
        if positions.members == 1:
            return program
        return program.renamed(lambda place: positions.rank(self.grid.worker(place), plane), *self._communicator.parts)

    def _get_ready(self, resume: messages.Resume) -> None:
        """Exchanges layers with other stages, and waits for the generation that uses them.

        Raises:
            Interrupted: then.
        """
        self._client.doing(self.version, "layers", _RECOVER)
        self._moving.exchange(resume)
        self._client.send(messages.Reached(self._client.rank, resume.generation, messages.Milestone.LAYERS_HELD))
        self._client.await_announcement(_LAYERS_TIMEOUT)
        raise Interrupted

    def _connect(self, resume: messages.Resume, announced: messages.Regroup) -> None:
        """Connects this worker for the generation, and follows its program."""
        program = resume.program
        assert program is not None, "the coordinator adds it"
        positions, plane = self._positions, self._positions.member(self._client.rank)
        stages = {rank: positions.stage(rank) for rank in resume.roster if positions.member(rank) == plane}
        peers = [rank for rank, stage in stages.items() if stage == self.worker.stage]
        leads = positions.column_leaders(resume.roster)
        self._runner.stage_leaders = {
            column // positions.members: rank for column, rank in leads.items() if rank in stages
        }
        program = self._in_plane(program)
        tie_rosters = {
            tied: [rank for rank, stage in stages.items() if stage in tied]
            for tied in self._moving.tied_stages(resume.cuts)
            if self.worker.stage in tied
        }
        rank = self._client.rank
        exchanges: list[tuple[int, ...]] = [*resume.donors.items()]
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
                positions.ranks(positions.position(rank)),
            )
            self._runner.drop_reductions()
        self._runner.follow(program)
        self._client.send(messages.Reached(self._client.rank, resume.generation, messages.Milestone.CONNECTED))

    def _carry_out(self, action: Action, resume: messages.Resume, commits: Mapping[int, CommitPayload]) -> None:
        """Does one action of a recovery; ``commits``: the payloads to apply a step by."""
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
                    self._runner.take_up(self._moving.take_all(action.donor, resume.cuts))
                with self._client.waiting("the transfer of state"):
                    snapshot = receive_object(self._communicator, action.donor)
                with self._client.busy("taking over the state"):
                    self._callbacks.restore_snapshot(snapshot)
                self.version = resume.decision.version
                self._joining = False
                self._client.send(messages.Reached(self._client.rank, resume.generation, messages.Milestone.ENTERED))
            case Apply():
                with self._runner.stage.as_in_training(), self._client.busy("STEP", OpKind.STEP.value):
                    self._runner.apply(commits)
            case Settle():
                self._runner.settle_in_recovery(action.step, commits)
            case Adopt():
                is_committed = action.step < resume.decision.version
                self._runner.adopt(action.step, action.donor, action.lacks, is_committed)
            case AwaitPeers():
                self._runner.await_peers()
            case Forget():
                self._runner.forget()
            case Serve():
                self._runner.serve(action.step)


class Forwards:
    """The forwards of one worker, each an attempt that leaves nothing but its result."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self._client, self._communicator = runner.client, runner.communicator
        self._is_last = runner.worker.stage == runner.grid.stages - 1
        self._part, self._parts = runner.communicator.parts
        self._beyond = runner.grid.global_microbatches * self._parts  # tag of messages that belong to no micro-batch

    def run_batch(
        self, handle: StepHandle, split: Callable[[Any], tuple[Any, Any]], record: RecordOutput
    ) -> dict[int, bytes]:
        """Runs the forwards of this worker's program, but for empty micro-batches.

        Workers that compute parts of a micro-batch run all or none of them: the layers exchange parameters. One whose
        own part has no samples runs another's, and drops the result.
        """
        loader, version = handle.loader, self._runner.version
        sizes: dict[Task, int] = {}
        reads: dict[Task, Microbatch] = {}
        for task in self._runner.program:
            if task.op.kind is OpKind.FORWARD and task.op.microbatch is not None:
                sizes[task] = loader.num_samples(handle, task.op.microbatch)
                for part in self._alternatives(task.op.microbatch):
                    if loader.num_samples(handle, part):
                        reads[task] = part
                        break
        forwards = list(reads)
        incoming = {
            task: self._communicator.post_receive(Channel.ACTIVATIONS, task.source, task.index)
            for task in forwards
            if task.source is not None
        }
        recorded: dict[int, bytes] = {}
        for task in forwards:
            if self._client.interrupted:
                raise Interrupted
            self._client.doing(version, f"evaluation {task.label}")
            inputs = target = None
            if task.op.stage == 0 or self._is_last:
                inputs, target = split(loader.fetch(handle, reads[task]))
            if task.source is not None:
                with self._client.waiting(f"rank {task.source}"):
                    inputs = self._communicator.receive(incoming[task])
            output = self._runner.stage.evaluate(version, task.index, inputs, target)
            if self._is_last:
                made = record(output, target, sizes[task])
                if sizes[task]:
                    recorded[task.index] = made
            if task.destination is not None:
                self._communicator.send(Channel.ACTIVATIONS, output, task.destination, task.index)
        self._communicator.end_step()
        self._runner.stage.clear()
        return recorded

    def _alternatives(self, microbatch: Microbatch) -> Iterator[Microbatch]:
        """``microbatch``, then those of the other workers of its position."""
        first = microbatch.pipeline - self._part
        for shift in range(self._parts):
            yield replace(microbatch, pipeline=first + (self._part + shift) % self._parts)

    @property
    def leads_last(self) -> bool:
        """Whether this worker speaks for the last stage."""
        return self._is_last and self._runner.stage_leaders[self._runner.worker.stage] == self._client.rank

    def run_value(self, value: Any, draw: int) -> Any:
        """Runs this stage on ``value``, if this worker speaks for it, and passes it on."""
        stage, leads = self._runner.worker.stage, self._runner.stage_leaders
        if leads[stage] != self._client.rank:
            return None
        inputs = value
        if stage > 0:
            incoming = self._communicator.post_receive(Channel.ACTIVATIONS, leads[stage - 1], self._beyond)
            with self._client.waiting(f"rank {leads[stage - 1]}"):
                inputs = self._communicator.receive(incoming)
        output = self._runner.stage.run(self._runner.version, draw, inputs, value)
        if not self._is_last:
            self._communicator.send(Channel.ACTIVATIONS, output, leads[stage + 1], self._beyond)
        self._runner.stage.clear()
        return output
