"""The executor: a worker's steps, evaluations and recoveries.

:meth:`Executor.run_step` has the program of a step run (:mod:`~lightning_recycle.runtime.step_runner`) until
this worker has applied it. A new generation ends the current attempt with :class:`Interrupted` or
:class:`CommunicationError`. The worker then reports its state, reconnects, brings itself to the committed version, and
runs its step again or, if its own part is done, serves other workers. None of that shows outside. An exception that a
fault of this machine may explain is judged by the coordinator: this worker does the same again, is evicted, or the
exception is raised as the user's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

from lightning_recycle.control.client import unpack_all
from lightning_recycle.control.protocol import messages, recovery
from lightning_recycle.control.protocol.member import Interrupted
from lightning_recycle.control.protocol.messages import OUTSIDE, RECOVER
from lightning_recycle.data.step_sources import StepHandle
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning.grid import Microbatch, OpKind
from lightning_recycle.planning.program import Program, Task
from lightning_recycle.runtime.commit_reports import CommitPayload, MicrobatchValues, RecordOutput, StepResult
from lightning_recycle.runtime.communicator import receive_object, send_object
from lightning_recycle.runtime.gradients import AccumulationPart
from lightning_recycle.runtime.groups_and_transports import CommunicationError, UnreachableError
from lightning_recycle.runtime.machine_errors import is_device_error, place_of, readers_may_die
from lightning_recycle.runtime.stage_bundle import LayerKeeper, LayerMoves
from lightning_recycle.runtime.step_runner import READING, Step, StepRunner
from lightning_recycle.runtime.wire import Channel

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_WHOLE_STEP = AccumulationPart()
_ANNOUNCEMENT_TIMEOUT = 60.0  # seconds from a broken connection to the coordinator's verdict
_LAYERS_TIMEOUT = 1800.0  # seconds for others to get the layers that they lack; a stuck worker is found by heartbeats


class Executor:
    """The steps, evaluations and recoveries of one worker."""

    def __init__(self, runner: StepRunner, layers: LayerKeeper | None = None) -> None:
        self.worker, self.grid = runner.worker, runner.grid
        self.runner, self._forwards = runner, Forwards(runner)
        self.client, self.communicator, self._callbacks = runner.client, runner.communicator, runner.callbacks
        tied = {tie.stages for tie in runner.ties.ties}
        self.before_operation, self.after_operation = runner.before_operation, runner.after_operation
        self._layer_moves = LayerMoves(layers, tied, self.grid, self.worker, self.client, self.communicator)
        self._is_joining = False
        self._has_users_exception = False  # an exception was judged to be the user's own
        self.communicator.on_progress = self.client.progressed
        self.communicator.waiting = self.client.waiting
        self.client.on_interrupt = self.communicator.abort  # ends whatever the main thread exchanges with others
        self.client.regroup = self.regroup
        self.communicator.lose_sibling = self._lose_sibling
        if self.communicator.mesh is not None:
            self.communicator.mesh.set_hook_detector(self._await_siblings_in_hook)

    @property
    def version(self) -> int:
        """Number of steps applied to the parameters (batches, with accumulation)."""
        return self.runner.version

    @version.setter
    def version(self, version: int) -> None:
        self.runner.version = version

    # ------------------------------------------------------------------ a step

    def run_step(
        self, handle: StepHandle, apply: Callable[[StepResult], None], accumulation: AccumulationPart = _WHOLE_STEP
    ) -> StepResult:
        """Runs step :attr:`version` until this worker has applied it.

        ``apply`` is called exactly once, with the gradients in place; it steps the optimizer if ``accumulation``
        ends a step of it.
        """
        number = self.version
        step = Step(handle, apply, accumulation)
        self.runner.steps = {number: step, **{n: s for n, s in self.runner.steps.items() if n == number - 1}}
        self.runner.attempt.reads_from = handle.loader
        self.runner.stage.remember_modes()
        has_begun = False

        def attempt() -> None:
            nonlocal has_begun
            if not has_begun:
                self.runner.attempt.place = (number, READING)
                handle.loader.begin_step(handle)
                has_begun = True
            if self.version == number:  # otherwise a recovery has applied it
                program = self.client.begin_step(number)
                if program is not None:
                    self.runner.follow(self._in_plane(program))
                self.runner.run_program(number)

        self._retry(attempt)
        assert step.result is not None
        return step.result

    def confirm_newest(self) -> None:
        """Waits until the parameters are final, before any use of them."""
        if not self.runner.is_confirmed:
            self._retry(self.runner.confirm)

    # ------------------------------------------------------------------ attempts

    def _retry(self, attempt: Callable[[], _T], recover: bool = False) -> _T:
        """Calls ``attempt`` until it succeeds, recovering after each failure.

        ``recover``: whether to recover before the first call.
        """
        with self.runner.attempt.computing(True):
            self.client.leave_hook()
            while True:
                try:
                    if recover:
                        self._recover()
                        recover = False
                    result = attempt()
                except Interrupted:
                    recover = True
                except CommunicationError as error:
                    self._report_broken_link(error)
                    recover = True
                except Exception as error:
                    if not self._is_attempt_void():
                        with readers_may_die():
                            self._raise_unless_repeated(error)
                    recover = True
                else:
                    self.client.leave_hook()
                    self.client.doing(self.version, "hooks and callbacks")
                    return result

    def _is_attempt_void(self) -> bool:
        """Whether a new generation voids this attempt, such as after a wrong speculation."""
        try:
            if not self.runner.attempt.cannot_repeat:
                self.runner.confirm()
        except Interrupted:
            return True
        return False

    def _report_broken_link(self, error: CommunicationError) -> None:
        """Reports broken communication to the coordinator and waits for its verdict."""
        if not self.client.is_interrupted:
            log.debug("Worker %s: %s", self.worker, error)
            unreachable = error.ranks if isinstance(error, UnreachableError) else ()
            self.client.send(messages.Broken(self.client.rank, self.client.generation, str(error), unreachable))
            self.client.await_announcement(_ANNOUNCEMENT_TIMEOUT)

    def _await_error_verdict(self, error: Exception, place: tuple[int, str], exact: bool) -> bool:
        """Whether ``error`` is the user's own; does not return if this worker is evicted.

        ``place``: the step and operation that raised it; ``exact``: whether this worker can do the same again. The
        coordinator decides if a fault of the machine may explain the error.
        """
        if not self._has_users_exception:
            self._has_users_exception = not self._callbacks.is_suspect(error) or self.client.await_verdict(
                *place, error, exact=exact, sticky=is_device_error(error)
            )
        return self._has_users_exception

    def _raise_unless_repeated(self, error: Exception) -> None:
        """Returns if the work that raised ``error`` is to be repeated; else raises it."""
        # What the optimizer and the hooks of its step have done cannot be undone, nor what was reported to others.
        source = self.runner.attempt.reads_from
        exact = not self.runner.attempt.cannot_repeat and (source is None or source.can_read_again)
        if self._await_error_verdict(error, self.runner.attempt.place, exact):
            raise error
        step, operation = self.runner.attempt.place
        log.warning("Worker %s does %s of step %d once more after %r.", self.worker, operation, step, error)
        self.client.await_announcement(_ANNOUNCEMENT_TIMEOUT)
        if source is not None:
            source.read_again()

    # ------------------------------------------------------------------ forward only

    def evaluate(
        self, handle: StepHandle, split: Callable[[Any], tuple[Any, Any]], record: RecordOutput
    ) -> dict[int, bytes]:
        """Runs the batch ``handle`` forward through the pipelines, despite failures.

        ``record`` is called on the last stage with (output, target, number of samples) of each micro-batch. Returns its
        results by global micro-batch, on every worker. Raises ConfigurationError if workers have read different
        samples.
        """

        self.runner.attempt.reads_from = handle.loader

        def attempt() -> Mapping[int, tuple[int, dict[int, bytes]]]:
            if self.client.is_interrupted:
                raise Interrupted
            self.runner.attempt.place = (self.version, f"evaluation of batch {handle.index}")
            recorded = self._forwards.run_batch(handle, split, record)
            return self._exchange(f"batch {handle.index}", (handle.loader.digest(handle), recorded))

        parts = self._retry(attempt)
        if len({digest for digest, _ in parts.values()}) > 1:
            raise ConfigurationError(
                f"Workers have read different samples for batch {handle.index} of an evaluation, or before it. A stream"
                " must give every process the same: not depend on its rank, the time, or the order of a set."
            )
        return {index: data for _, (_, part) in sorted(parts.items()) for index, data in part.items()}

    def _exchange(self, name: str, contribution: Any) -> Mapping[int, Any]:
        """Exchanges ``contribution`` with all live workers; Interrupted by a generation."""
        attempt = self.runner.attempt
        before, attempt.cannot_repeat = attempt.cannot_repeat, True  # with this part the others may go on
        try:
            contributions = self.client.arrive_in_generation(name, contribution)
        except Interrupted:
            attempt.cannot_repeat = before  # no worker has them
            raise
        attempt.cannot_repeat = before
        return contributions

    def forward_whole(
        self,
        value: Any,
        draw: int,
        watched: Callable[[], AbstractContextManager[MicrobatchValues]],
        deliver: Callable[[Any], Any],
    ) -> tuple[Any, list[bytes]]:
        """Runs ``value`` through one worker of each stage, despite failures.

        All workers call it at the same place outside of steps, or in the hooks of STEP. ``draw`` separates the
        randomness of calls and micro-batches in one version. ``watched`` undoes what a forward changes. ``deliver``
        gets the last layer's output where it was computed. Returns its result and the changes of each stage, on every
        worker.
        """
        self.runner.attempt.reads_from = None
        place = self.runner.attempt.place

        def attempt() -> Mapping[int, tuple[bytes, tuple[Any] | None]]:
            if self.client.is_interrupted:
                raise Interrupted
            self.runner.attempt.place = (self.version, "self(x)")
            self.client.doing(self.version, "self(x)")
            with watched() as effects:
                output = self._forwards.run_value(value, draw)
            answer = (deliver(output),) if self._forwards.leads_last_stage else None
            return self._exchange("output of self(x)", (effects.note(b""), answer))

        answers = self._retry(attempt)
        self.runner.attempt.place = place
        (output,) = next(answer for _, answer in answers.values() if answer is not None)
        return output, [note for _, (note, _) in sorted(answers.items())]

    # ------------------------------------------------------------------ collectives of the position in hooks

    def _await_siblings_in_hook(self) -> bool:
        """Awaits the siblings if a hook's collective comes next; returns whether it does."""
        if self.runner.attempt.computes or self._is_joining or self.client.is_joining:
            return False
        self.client.enter_hook()
        return True

    def _lose_sibling(self, error: CommunicationError) -> NoReturn:
        """Ends this worker in a hook whose collective broke, as a sibling is gone."""
        self._report_broken_link(error)
        self.client.resign(f"cannot go on in a hook, where a collective of its position broke ({error})")

    # ------------------------------------------------------------------ a failure

    def join(self) -> None:
        """Enters a running training at a step boundary, with a peer's state."""
        self._is_joining = True
        self.client.wait_to_enter()
        self.regroup()

    def regroup(self) -> None:
        """Takes part in the announced generation, and in any that follows before its end."""
        self._retry(lambda: None, recover=True)

    def judge_error(self, error: Exception) -> None:
        """Returns if ``error``, raised outside of steps, is the user's own.

        Does not return if a fault of the machine may explain it and others go on without this worker.
        """
        with readers_may_die():
            self._await_error_verdict(error, (OUTSIDE, place_of(error)), exact=False)

    def _recover(self) -> None:
        """Enters the announced generation, and carries out its decision.

        Reports this worker's version, waits for all others' reports, connects, and does the actions that the decision
        has for it. Raises Interrupted if a newer generation is announced meanwhile, and after an exchange of layers,
        which a new generation follows.
        """
        runner = self.runner
        runner.before_recovery()
        announced = self.client.enter_generation()
        version = -1 if self._is_joining else self.version
        if runner.reduced and (runner.verifier.leaves_open(self.version) or announced.unproven == self.version):
            runner.forget_gradient()
        status = messages.WorkerStatus(
            self._column, version, runner.reduced, not self.runner.is_confirmed, runner.has_shadow
        )
        self.client.doing(self.version, "recovery", RECOVER)
        runner.attempt.place = (self.version, "recovery")
        resume = self.client.report_and_wait(status, runner.payload, self._layer_moves.cuts)
        if resume.generation > 0:
            self._callbacks.on_recovery(resume.decision.version, bool(resume.decision.ahead))
        if not self._is_joining and (bundle := self._layer_moves.install_layout(resume.cuts)) is not None:
            runner.replace_layers(bundle)
        self._connect(resume, announced)
        with self.client.busy("taking over from the last leader"):  # loggers and progress bars are the user's
            self._callbacks.on_generation()
        if resume.generation == 0:
            runner.measure_links()
        ahead = frozenset() if runner.redoes_whole_steps else resume.decision.ahead
        runner.repeated_step, runner.stages_done = resume.decision.version, self._stages_in_plane(ahead)
        siblings = self.runner.positions.siblings(self.client.rank)
        runner.siblings_done = all(
            self.runner.positions.column(sibling) in resume.decision.ahead for sibling in siblings
        )
        commits: Mapping[int, CommitPayload] = unpack_all(resume.commits)
        if runner.speculation is not None and commits:
            runner.speculation.reports = commits
        rank, decision, tied = self.client.rank, resume.decision, runner.redoes_whole_steps
        for action in recovery.actions(rank, status, decision, resume.donors, runner.commits, tied, resume.confirmed):
            if isinstance(action, recovery.CommitTogether):
                commits = self.client.commit(action.step, runner.payload)
            else:
                self._carry_out(action, resume, commits)
        runner.verifier.inspect(resume.inspects, resume.excused)
        if resume.vote is not None:
            runner.verifier.vote(resume.vote)
        if runner.speculation is not None and runner.speculation.is_unconfirmed:  # others have yet to report the step
            runner.speculation.report(self.version - 1, runner.payload, speculative=True)
        if resume.becomes:
            self._exchange_layers(resume)

    @property
    def _column(self) -> int:
        return self.runner.positions.column(self.client.rank)

    def _stages_in_plane(self, columns: Collection[int]) -> frozenset[int]:
        """The stages whose column in this worker's plane is among ``columns``."""
        members = self.runner.positions.members
        plane = self._column % members
        return frozenset(column // members for column in columns if column % members == plane)

    def _in_plane(self, program: Program) -> Program:
        """``program`` of a position, between the members of this worker's plane."""
        positions, plane = self.runner.positions, self.runner.positions.member(self.client.rank)
        if positions.members == 1:
            return program
        return program.renamed(lambda place: positions.rank(self.grid.worker(place), plane), *self.communicator.parts)

    def _exchange_layers(self, resume: messages.Resume) -> None:
        """Exchanges layers with other stages, and waits for the generation that uses them."""
        self.client.doing(self.version, "layers", RECOVER)
        self._layer_moves.exchange(resume)
        self.client.send(messages.Reached(self.client.rank, resume.generation, messages.Milestone.LAYERS_HELD))
        self.client.await_announcement(_LAYERS_TIMEOUT)
        raise Interrupted

    def _connect(self, resume: messages.Resume, announced: messages.Regroup) -> None:
        """Connects this worker for the generation, and follows its program."""
        program = resume.program
        assert program is not None, "the coordinator adds it"
        positions, plane = self.runner.positions, self.runner.positions.member(self.client.rank)
        stages = {rank: positions.stage(rank) for rank in resume.roster if positions.member(rank) == plane}
        peers = [rank for rank, stage in stages.items() if stage == self.worker.stage]
        leaders = positions.column_leaders(resume.roster)
        self.runner.stage_leaders = {
            column // positions.members: rank for column, rank in leaders.items() if rank in stages
        }
        program = self._in_plane(program)
        tie_rosters = {
            tied: [rank for rank, stage in stages.items() if stage in tied]
            for tied in self._layer_moves.tied_stages(resume.cuts)
            if self.worker.stage in tied
        }
        rank = self.client.rank
        exchanges: list[tuple[int, ...]] = [*resume.donors.items()]
        if resume.vote is not None:
            exchanges += [(resume.vote.recorder, voter) for voter in resume.vote.voters]
        transfer_ranks = self._layer_moves.partners(resume).union(*(pair for pair in exchanges if rank in pair))
        with self.client.waiting("connections"):
            self.communicator.configure(
                resume.generation,
                {*program.neighbours, *transfer_ranks},
                peers,
                tie_rosters,
                announced.check_links,
                positions.ranks(positions.position(rank)),
            )
            self.runner.drop_reductions()
        self.runner.follow(program)
        self.client.send(messages.Reached(self.client.rank, resume.generation, messages.Milestone.CONNECTED))

    def _carry_out(
        self, action: recovery.Action, resume: messages.Resume, commits: Mapping[int, CommitPayload]
    ) -> None:
        """Does one action of a recovery; ``commits``: payloads by which a step is applied."""
        match action:
            case recovery.Give():
                with self.client.busy("taking a snapshot"):
                    snapshot = self._callbacks.take_snapshot()
                with self.client.waiting("the transfer of state"):
                    for rank in action.ranks:
                        if rank in resume.strangers:
                            self._layer_moves.send_all_layers(rank)
                        send_object(self.communicator, snapshot, rank)
            case recovery.Take():
                if self.client.rank in resume.strangers:
                    self.runner.replace_layers(self._layer_moves.receive_all_layers(action.donor, resume.cuts))
                with self.client.waiting("the transfer of state"):
                    snapshot = receive_object(self.communicator, action.donor)
                with self.client.busy("taking over the state"):
                    self._callbacks.restore_snapshot(snapshot)
                self.version = resume.decision.version
                self._is_joining = False
                self.client.send(messages.Reached(self.client.rank, resume.generation, messages.Milestone.ENTERED))
            case recovery.Apply():
                with self.runner.stage.as_in_training(), self.client.busy("STEP", OpKind.STEP.value):
                    self.runner.apply(commits)
            case recovery.Confirm():
                self.runner.confirm_in_recovery(action.step, commits)
            case recovery.Adopt():
                is_committed = action.step < resume.decision.version
                self.runner.adopt(action.step, action.donor, action.lacks, is_committed)
            case recovery.AwaitPeers():
                self.runner.await_peers()
            case recovery.Forget():
                self.runner.forget_gradient()
            case recovery.Serve():
                self.runner.serve(action.step)


class Forwards:
    """Forward passes without training; one that fails is run again from the start."""

    def __init__(self, runner: StepRunner) -> None:
        self.runner = runner
        self.client, self.communicator = runner.client, runner.communicator
        self._is_last = runner.worker.stage == runner.grid.stages - 1
        self._part, self._parts = runner.communicator.parts
        self._value_tag = runner.grid.global_microbatches * self._parts  # tag of messages that belong to no micro-batch

    def run_batch(
        self, handle: StepHandle, split: Callable[[Any], tuple[Any, Any]], record: RecordOutput
    ) -> dict[int, bytes]:
        """Runs the forwards of this worker's program, but for empty micro-batches.

        Workers that compute parts of a micro-batch run all or none of them: the layers exchange parameters. A worker
        whose own part has no samples runs another's, and drops the result.
        """
        loader, version = handle.loader, self.runner.version
        sizes: dict[Task, int] = {}
        reads: dict[Task, Microbatch] = {}
        for task in self.runner.program:
            if task.op.kind is OpKind.FORWARD and task.op.microbatch is not None:
                sizes[task] = loader.num_samples(handle, task.op.microbatch)
                for part in self._microbatches_to_try(task.op.microbatch):
                    if loader.num_samples(handle, part):
                        reads[task] = part
                        break
        forwards = list(reads)
        incoming = {
            task: self.communicator.post_receive(Channel.ACTIVATIONS, task.source, task.index)
            for task in forwards
            if task.source is not None
        }
        recorded: dict[int, bytes] = {}
        for task in forwards:
            if self.client.is_interrupted:
                raise Interrupted
            self.client.doing(version, f"evaluation {task.label}")
            inputs = target = None
            if task.op.stage == 0 or self._is_last:
                inputs, target = split(loader.fetch(handle, reads[task]))
            if task.source is not None:
                with self.client.waiting(f"worker {self.runner.positions.name(task.source)}"):
                    inputs = self.communicator.receive(incoming[task])
            output = self.runner.stage.evaluate(version, task.index, inputs, target)
            if self._is_last:
                output_record = record(output, target, sizes[task])
                if sizes[task]:
                    recorded[task.index] = output_record
            if task.destination is not None:
                self.communicator.send(Channel.ACTIVATIONS, output, task.destination, task.index)
        self.communicator.end_step()
        self.runner.stage.clear()
        return recorded

    def _microbatches_to_try(self, microbatch: Microbatch) -> Iterator[Microbatch]:
        """``microbatch``, then those of the other workers of its position."""
        first = microbatch.pipeline - self._part
        for shift in range(self._parts):
            yield replace(microbatch, pipeline=first + (self._part + shift) % self._parts)

    @property
    def leads_last_stage(self) -> bool:
        return self._is_last and self.runner.stage_leaders[self.runner.worker.stage] == self.client.rank

    def run_value(self, value: Any, draw: int) -> Any:
        """Runs this stage on ``value``, if this worker speaks for it, and passes it on."""
        stage, leaders = self.runner.worker.stage, self.runner.stage_leaders
        if leaders[stage] != self.client.rank:
            return None
        inputs = value
        if stage > 0:
            incoming = self.communicator.post_receive(Channel.ACTIVATIONS, leaders[stage - 1], self._value_tag)
            with self.client.waiting(f"worker {self.runner.positions.name(leaders[stage - 1])}"):
                inputs = self.communicator.receive(incoming)
        output = self.runner.stage.run(self.runner.version, draw, inputs, value)
        if not self._is_last:
            self.communicator.send(Channel.ACTIVATIONS, output, leaders[stage + 1], self._value_tag)
        self.runner.stage.clear()
        return output
