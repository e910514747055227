"""Simulated workers: what a worker's two threads do, without tensors, sockets or clocks.

The main thread is a generator that follows the executor and the control client line by line; it yields what it waits
for. The receiver thread is :meth:`SimulatedWorker.receive`. In the place of tensors there are exact counts: the
gradient of global micro-batch m counts as 16 ** m, so the sum of a reduction says which micro-batches went in how
often, and the parameters are the list of the gradients that were applied.

A worker breaks off with an AssertionError where it is made to do what would spoil the training.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from lightning_recycle.control.protocol.messages import (
    Answer,
    Applied,
    Arrive,
    AtBoundary,
    Boundary,
    Broken,
    Commit,
    Committed,
    Entered,
    Leave,
    Losses,
    Pause,
    Paused,
    Ready,
    Regroup,
    Report,
    Resume,
    StepLoss,
)
from lightning_recycle.control.protocol.recovery import WorkerStatus
from lightning_recycle.control.protocol.state import RESULT, Joined, stage_leads
from lightning_recycle.planning.grid import Grid

__all__ = [
    "Fact",
    "Network",
    "Plan",
    "Schedule",
    "SimulatedWorker",
    "full_gradient",
    "loss_of",
    "plan_for",
    "script",
]

Schedule = tuple[tuple[int, ...], int]
"""A schedule: the roster that it is for, and which of many it is."""

Fact = tuple[int, str, int, int]
"""What a worker gave to others: (generation, what, step, rank)."""

Waits = Generator[Any, None, None]
"""Yields a set of facts (data of other workers), a condition (the coordinator's word), or seconds (work of its own)."""


class Interrupted(Exception):
    """As the client's."""


class CommunicationError(Exception):
    """As the communicator's; with the ranks that cannot be reached, as its UnreachableError."""

    def __init__(self, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(ranks)
        self.ranks = ranks


class Dies(BaseException):
    """The process ends right here."""


class Network(Protocol):
    """What a worker needs of the world."""

    grid: Grid
    commits: bool
    between: tuple[str, ...]
    facts: dict[Fact, Any]

    def send(self, worker: SimulatedWorker, message: Any) -> None: ...

    def tell(self, worker: SimulatedWorker, what: str, step: int, value: Any) -> None: ...

    def entered(self, worker: SimulatedWorker) -> None: ...

    def begins(self, worker: SimulatedWorker, step: int) -> None: ...

    def applied(self, worker: SimulatedWorker, step: int, gradient: int) -> None: ...

    def has(self, worker: SimulatedWorker, fact: Fact) -> bool: ...

    def unreachable(self, worker: SimulatedWorker) -> tuple[int, ...]: ...

    def delay(self) -> float: ...


def full_gradient(grid: Grid) -> int:
    """The sum of the gradients of all micro-batches, each once."""
    return sum(16**m for m in range(grid.global_microbatches))


def loss_of(step: int, microbatch: int) -> float:
    return float(10 * step + microbatch)


@dataclass(frozen=True)
class Plan:
    """What the schedule says to one worker: its micro-batches, the ranks before, after and beside it, and whether there
    is one beside it that has no micro-batches.
    """

    microbatches: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    peers: tuple[int, ...]
    idle_peer: bool


@lru_cache(maxsize=16384)
def plan_for(grid: Grid, schedule: Schedule, rank: int) -> Plan:
    """Schedule 0: each micro-batch goes through its own pipeline; where a worker is missing there, through its peers by
    turns. Odd ones: they are dealt in another order. Even ones: one worker of each stage runs all, the others none.
    """
    roster, variant = schedule
    stage = rank % grid.stages

    def route(of_stage: int) -> list[int]:
        """Rank by micro-batch."""
        live = [r for r in roster if r % grid.stages == of_stage]
        if variant:
            turns = range(grid.global_microbatches)
            return [live[(variant // 2 if variant % 2 == 0 else m + variant) % len(live)] for m in turns]
        homes = [(m % grid.pipelines) * grid.stages + of_stage for m in range(grid.global_microbatches)]
        return [home if home in live else live[m % len(live)] for m, home in enumerate(homes)]

    mine = tuple(m for m, holder in enumerate(route(stage)) if holder == rank)
    before = tuple(sorted({route(stage - 1)[m] for m in mine})) if stage else ()
    after = tuple(sorted({route(stage + 1)[m] for m in mine})) if stage < grid.stages - 1 else ()
    peers = tuple(r for r in roster if r % grid.stages == stage)
    return Plan(mine, before, after, peers, not set(peers) <= set(route(stage)))


@lru_cache(maxsize=256)
def script(between: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """What every worker's Lightning does after its set-up, in order: steps, and what comes after each of them."""
    items: list[tuple[str, int]] = [("collective", -1)]
    for step, then in enumerate(between):
        items.append(("step", step))
        if then:
            items.append((then, step))
    return (*items, ("end", 0), ("result", 0))


class SimulatedWorker:
    """One process that is, or wants to be, worker ``rank``.

    Args:
        network: the world around it.
        rank: its position.
        process: a number that no other process has.
        joins: whether the training has begun without it.
    """

    def __init__(self, network: Network, rank: int, process: int, joins: bool) -> None:
        self.network = network
        self.grid = network.grid
        self.rank = rank
        self.stage = rank % network.grid.stages
        self.is_last = self.stage == network.grid.stages - 1
        self.process = process
        self.joins = joins
        # what the world knows of the process
        self.alive = True
        self.fuse = 0  # actions until it dies, 0 for never
        self.frozen = 0.0  # until when nothing of it runs
        self.stuck = 0.0  # until when its main thread does not run
        self.unread: list[Any] = []  # while it is frozen
        self.waiting: Any = None
        self.interruptible = False
        self.late = False  # what it waits for is there, but it has not noticed yet
        self.broken: set[int] = set()  # ranks to which its connections are broken in this generation
        # the client
        self.generation = -1
        self.roster: tuple[int, ...] = ()
        self.announced = -1
        self.regroup_message: Regroup | None = None
        self.resume: Resume | None = None
        self.committed: Committed | None = None
        self.answers: dict[int, Answer] = {}
        self.losses: dict[int, float] = {}
        self.next_collective = 0
        self.begun = -1
        self.paused_generation = -1
        self.newest_pause = (-1, -1)
        self.plans: list[Boundary] = []
        self.schedule: Schedule = ((), 0)
        self.boundary: int | None = None
        # the executor
        self.version = 0
        self.reduced = False
        self.payload: Any = None
        self.has_state = not joins
        self.parameters: list[int] = []  # the gradients applied, by step
        self.shadow = -1  # version that the shadow holds
        self.buffers: list[tuple[int, int]] = [(-1, 0), (-1, 0)]  # (step, reduced gradient), of even and odd steps
        self.position = 0  # in the script
        self.done = False
        self.thread = self.main()

    def __repr__(self) -> str:
        return f"worker {self.rank} (process {self.process})"

    # ------------------------------------------------------------------ actions; a process may die right after each

    def send(self, message: Any) -> None:
        self.network.send(self, message)
        self.burn()

    def tell(self, what: str, step: int, value: Any = None) -> None:
        self.network.tell(self, what, step, value)
        self.burn()

    def burn(self) -> None:
        if self.fuse:
            self.fuse -= 1
            if not self.fuse:
                raise Dies

    # ------------------------------------------------------------------ the receiver thread

    def receive(self, message: Any) -> None:
        match message:
            case Regroup():
                self.regroup_message = message
                self.announced = message.generation
            case Resume():
                self.resume = message
            case StepLoss():
                self.losses[message.step] = message.loss
            case Pause():
                if (message.generation, message.number) > self.newest_pause:
                    self.newest_pause = (message.generation, message.number)
                    self.paused_generation, self.boundary = message.generation, None
                self.network.send(self, Paused(self.rank, message.generation, self.begun, message.number))
            case Boundary(schedule=None):
                if message.generation == self.paused_generation:
                    self.boundary = message.step
            case Boundary():
                if message.generation == self.paused_generation:
                    self.paused_generation = -1
                    self.plans.append(message)
            case Committed():
                self.committed = message
            case Answer():
                self.answers[message.number] = message

    # ------------------------------------------------------------------ waiting

    @property
    def interrupted(self) -> bool:
        return self.announced > self.generation

    def wait(self, ready: Callable[[], Any], interruptible: bool = True) -> Waits:
        """For the coordinator's word."""
        if ready():
            return
        if interruptible and self.interrupted:
            raise Interrupted
        self.interruptible = interruptible
        yield ready

    def exchange(self, what: str, step: int, ranks: Iterable[int]) -> Waits:
        """Until all of ``ranks`` have given it."""
        if self.interrupted:
            raise CommunicationError
        keys = ((self.generation, what, step, rank) for rank in ranks)
        missing = {key for key in keys if not self.network.has(self, key)}
        if missing:
            self.interruptible = True
            yield missing

    def received(self, what: str, step: int, ranks: Iterable[int]) -> list[Any]:
        return [self.network.facts[(self.generation, what, step, rank)] for rank in ranks]

    # ------------------------------------------------------------------ the main thread

    def main(self) -> Waits:
        if self.joins:
            yield self.network.delay() * 10  # imports and set-up
            self.send(Ready(self.rank))
            yield from self.wait(lambda: self.interrupted, interruptible=False)
        else:
            yield self.network.delay()
            self.send(Joined(self.rank))
            yield from self.arrive("set-up", self.rank, regroups=False)
            yield from self.wait(lambda: self.interrupted, interruptible=False)
        yield from self.regroup()
        items = script(self.network.between)
        while not self.done:
            kind, number = items[self.position]
            if kind == "step":
                yield from self.run_step(number)
            elif kind == "validation":
                yield from self.validate(number)
            elif kind == "result":
                yield from self.deliver()
            else:
                yield from self.arrive(f"{kind} {number}", self.position)
            self.position += 1

    def run_step(self, number: int) -> Waits:
        """Executor.run_step."""
        assert self.version == number, "Lightning sees a step twice, or not at all"
        while self.version == number:
            try:
                yield from self.begin_step(number)
                yield from self.program(number)
            except Interrupted:
                yield from self.regroup()
            except CommunicationError as error:
                yield from self.await_verdict(error)
                yield from self.regroup()

    def begin_step(self, step: int) -> Waits:
        """ControlClient.begin_step."""
        said = False
        while True:
            if self.interrupted:
                raise Interrupted
            paused = self.paused_generation == self.generation and step > self.begun
            boundary = self.boundary if paused else None
            if not paused or (boundary is not None and step < boundary):
                self.begun = max(self.begun, step)
                due = [plan for plan in self.plans if plan.step <= step]
                self.plans = self.plans[len(due) :]
                if due:
                    self.schedule = due[-1].schedule
                return
            if boundary is not None and not said:
                said = True
                self.send(AtBoundary(self.rank, self.generation, step))
            known = (self.paused_generation, boundary)
            yield from self.wait(lambda known=known: (self.paused_generation, self.boundary) != known)  # type: ignore[misc]

    def arrive(self, name: str, payload: Any, regroups: bool = True) -> Waits:
        """ControlClient.arrive."""
        number, self.next_collective = self.next_collective, self.next_collective + 1
        self.send(Arrive(self.rank, number, name, payload))
        while True:
            try:
                yield from self.wait(lambda: number in self.answers, interruptible=regroups)
            except Interrupted:
                yield from self.regroup()
            else:
                return

    def validate(self, number: int) -> Waits:
        """Work of all in one generation, closed by ControlClient.arrive_in_generation; begun again in the next one."""
        while True:
            try:
                plan = plan_for(self.grid, self.schedule, self.rank)
                if plan.before:
                    yield from self.exchange("V", number, plan.before)
                self.tell("V", number)
                place = self.next_collective
                part = (self.generation, sum(16**m for m in plan.microbatches))
                self.send(Arrive(self.rank, place, f"validation {number}", part, self.generation))
                yield from self.wait(lambda n=place: n in self.answers)  # type: ignore[misc]
            except Interrupted:
                yield from self.regroup()
            except CommunicationError as error:
                yield from self.await_verdict(error)
                yield from self.regroup()
            else:
                self.next_collective = place + 1
                parts = self.answers[place].payloads
                assert {g for g, _ in parts.values()} == {self.generation}, f"parts of other generations: {parts}"
                mine = sum(part for rank, (_, part) in parts.items() if rank % self.grid.stages == self.stage)
                assert mine == full_gradient(self.grid), f"the metrics are those of {mine:#x}"
                return

    def regroup(self) -> Waits:
        """Executor.regroup."""
        while True:
            announced = self.regroup_message
            assert announced is not None
            self.generation, self.roster = announced.generation, announced.roster
            self.broken = set()
            self.plans = []
            self.network.entered(self)
            status = WorkerStatus(self.stage, self.version if self.has_state else -1, self.reduced)
            generation = self.generation
            try:
                self.send(Report(self.rank, generation, status, self.payload))
                yield from self.wait(lambda: self.resume is not None and self.resume.generation == self.generation)
                resume = self.resume
                assert resume is not None
                if announced.check_links:
                    yield from self.check_links()
                self.tell("connects", 0)
                yield from self.exchange("connects", 0, self.roster)
                self.schedule = resume.schedule
                yield from self.exchange_state(resume)
                yield from self.catch_up(resume)
                if self.version > resume.decision.version:
                    assert not self.network.commits, "there is no shadow: no stage may have applied before all could"
                    yield from self.program(resume.decision.version)
            except Interrupted:
                continue
            except CommunicationError as error:
                yield from self.await_verdict(error)
                continue
            return

    def check_links(self) -> Waits:
        """Communicator.configure, before it connects."""
        self.tell("doorbell", 0)
        yield from self.exchange("doorbell", 0, self.roster)
        yield self.network.delay()
        if self.interrupted:
            raise CommunicationError
        if unreachable := self.network.unreachable(self):
            raise CommunicationError(unreachable)

    def await_verdict(self, error: CommunicationError) -> Waits:
        if not self.interrupted:
            self.send(Broken(self.rank, self.generation, "connection reset", error.ranks))
            yield from self.wait(lambda: self.interrupted, interruptible=False)

    def exchange_state(self, resume: Resume) -> Waits:
        """Executor._exchange_state."""
        if self.rank in resume.donors.values():
            assert self.has_state, "it gives a state that it does not have"
            assert self.version == resume.decision.version, "it gives the state of another step"
            state = (list(self.parameters), self.position, self.next_collective, self.version)
            self.tell("state", resume.decision.version, state)
        donor = resume.donors.get(self.rank)
        if donor is not None:
            assert not self.has_state, "its state is overwritten"
            yield from self.exchange("state", resume.decision.version, (donor,))
            (state,) = self.received("state", resume.decision.version, (donor,))
            yield self.network.delay() * 0.1
            parameters, self.position, self.next_collective, self.version = state
            self.parameters = list(parameters)
            self.has_state = True
            self.send(Entered(self.rank, self.generation))
        assert self.has_state, "it is to go on without a state"

    def catch_up(self, resume: Resume) -> Waits:
        """Executor._catch_up."""
        version = resume.decision.version
        adoptions = [a for a in resume.decision.adoptions if a.stage == self.stage]
        for adoption in adoptions:
            step = adoption.step
            if step == version and self.version < version:
                yield from self.apply(resume.commits)
            if self.rank == adoption.donor:
                self.tell("gives", step, self.gradient_of(step))
            yield from self.exchange("gives", step, (adoption.donor,))
            (gradient,) = self.received("gives", step, (adoption.donor,))
            self.buffers[step % 2] = (step, gradient)
            if self.version == step and not self.reduced:
                self.reduced, self.payload = True, (self.stage, step)
        if adoptions:
            self.tell("adopts", version)
            yield from self.exchange("adopts", version, [r for r in self.roster if r % self.grid.stages == self.stage])
        if self.version < version:
            payloads = resume.commits
            if self.network.commits and any(a.step == version - 1 for a in resume.decision.adoptions):
                yield from self.commit(version - 1)
                assert self.committed is not None
                payloads = self.committed.payloads
            yield from self.apply(payloads)
        assert self.version - version in (0, 1), "it goes on from another version than the others"

    def program(self, step: int) -> Waits:
        """Executor._run_program: forwards from the stage before, input gradients from the stage after."""
        done = step < self.version or self.reduced
        scratch = step + 1 if done else step
        self.buffers[scratch % 2] = (-1, 0)
        has = self.version if step == self.version else self.shadow
        assert has == step, f"it computes step {step} with the parameters of version {has}"
        assert self.schedule[0] == self.roster, f"it runs {self.schedule}, but the roster is {self.roster}"
        self.network.begins(self, step)
        plan = plan_for(self.grid, self.schedule, self.rank)
        if plan.idle_peer:
            self.tell("begins", step)
            yield from self.exchange("begins", step, plan.peers)
        if plan.before:
            yield from self.exchange("F", step, plan.before)
        self.tell("F", step)
        if self.is_last:
            self.send(Losses(self.rank, step, {m: loss_of(step, m) for m in plan.microbatches}))
        elif plan.after:
            yield from self.exchange("B", step, plan.after)
        self.tell("B", step)
        if not done:
            self.tell("W", step, sum(16**m for m in plan.microbatches))
            yield from self.exchange("W", step, plan.peers)
            self.buffers[step % 2] = (step, sum(self.received("W", step, plan.peers)))
            self.reduced, self.payload = True, (self.stage, step)
        if step == self.version:
            payloads: Mapping[int, Any] = {}
            if self.network.commits:
                yield from self.commit(step)
                assert self.committed is not None
                payloads = self.committed.payloads
            yield from self.apply(payloads)

    def commit(self, step: int) -> Waits:
        self.send(Commit(self.rank, self.generation, step, self.payload))
        place = (self.generation, step)
        yield from self.wait(
            lambda: self.committed is not None and (self.committed.generation, self.committed.step) == place
        )

    def apply(self, payloads: Mapping[int, Any]) -> Waits:
        """Executor._apply."""
        step = self.version
        assert self.reduced, "it applies a gradient that it does not hold"
        yield from self.wait(lambda: step in self.losses)
        if self.network.commits:
            expected = {stage: (stage, step) for stage in range(self.grid.stages)}
            assert dict(payloads) == expected, f"it applies step {step} with the norms {dict(payloads)}"
        gradient = self.gradient_of(step)
        self.network.applied(self, step, gradient)
        self.parameters.append(gradient)
        self.shadow, self.version, self.reduced, self.payload = step, step + 1, False, None
        self.burn()
        self.send(Applied(self.rank, step, {}))

    def gradient_of(self, step: int) -> int:
        held, gradient = self.buffers[step % 2]
        assert held == step, f"it should have the gradient of step {step} and has that of step {held}"
        return gradient

    def deliver(self) -> Waits:
        """ReCycleStrategy.deliver_result: asked again when a stage's speaker died on the way."""
        while True:
            speaks = stage_leads(self.grid, self.roster)[self.stage] == self.rank
            number = self.next_collective
            yield from self.arrive(RESULT, tuple(self.parameters) if speaks else None)
            delivered = {rank % self.grid.stages for rank, yes in self.answers[number].payloads.items() if yes}
            if len(delivered) == self.grid.stages:
                self.done = True
                return

    def ask_to_leave(self) -> None:
        self.network.send(self, Leave(self.rank))
