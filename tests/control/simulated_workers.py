"""Simulated workers: what a worker's two threads do, without tensors, sockets or clocks.

The product makes all decisions: a worker here holds a ``Member``, asks ``recovery.actions`` what to do in a recovery
and ``recovery.part_of`` which part of a step to do, as executor and control client do. The main thread is a
generator that yields what it waits for; the receiver thread is :meth:`SimulatedWorker.receive`. Instead of tensors
there are exact counts: the gradient of global micro-batch m counts as 16 ** m, so the sum of a reduction says which
micro-batches went in how often, and the parameters are the list of the gradients that were applied.

A worker raises an AssertionError when it is made to do something that would spoil the training.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from lightning_recycle.control.protocol import messages, recovery
from lightning_recycle.control.protocol.control_collectives import StopPlace, batch_number, stop_point
from lightning_recycle.control.protocol.member import Interrupted, Member
from lightning_recycle.control.protocol.messages import OUTSIDE, AfterStep
from lightning_recycle.control.protocol.state import ENDED, RESULT, Joined
from lightning_recycle.planning.grid import Grid, Positions
from lightning_recycle.planning.layer_cuts import transfers

if TYPE_CHECKING:
    from simulated_run import Run

Schedule = tuple[tuple[int, ...], int]
"""A schedule: the roster that it is for, and its number."""

Fact = tuple[int, str, int, int]
"""What a worker gave to others: (generation, what, step, rank)."""

Waits = Generator[Any, None, None]
"""Yields a set of facts (data of other workers), a condition (the coordinator's answer), or seconds (its own work)."""


class CommunicationError(Exception):
    """Like the communicator's; with the ranks that cannot be reached, like its UnreachableError."""

    def __init__(self, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(ranks)
        self.ranks = ranks


Sums: TypeAlias = dict[int, frozenset[tuple[int, int]]]
"""Of layers that a stage shares with the next, by that stage: generations and stages whose gradients were added."""


class Mishap(Exception):
    """An exception that a fault of the machine may explain; ``sticky``: its device is lost."""

    def __init__(self, sticky: bool = False) -> None:
        super().__init__(sticky)
        self.sticky = sticky


class Dies(BaseException):
    """The process ends right here."""


def first_layout(grid: Grid) -> messages.Cuts:
    """Four layers for each stage."""
    return tuple(range(0, 4 * grid.stages + 1, 4))


def full_gradient(grid: Grid) -> int:
    """The sum of the gradients of all micro-batches, each once."""
    return sum(16**m for m in range(grid.global_microbatches))


def loss_of(step: int, microbatch: int) -> float:
    return float(10 * step + microbatch)


@dataclass(frozen=True)
class Plan:
    """The schedule of a position: its micro-batches, the positions before, after and beside it, by number, and whether
    one beside it has no micro-batches. Of a worker: the same with ranks.
    """

    microbatches: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    peers: tuple[int, ...]
    idle_peer: bool


@lru_cache(maxsize=16384)
def plan_for(grid: Grid, schedule: Schedule, rank: int) -> Plan:
    """Schedule 0: each micro-batch goes through its own pipeline; where a worker is missing, its peers take
    turns. Odd ones deal them in another order. In even ones one worker of each stage runs all, the others none.
    """
    roster, variant = schedule
    stage = rank % grid.stages

    def route(of_stage: int) -> list[int]:
        """The rank for each micro-batch."""
        live = [r for r in roster if r % grid.stages == of_stage]
        if grid.lanes > grid.pipelines and not variant:  # further lanes take some of all others' micro-batches
            return [live[m % len(live)] for m in range(grid.global_microbatches)]
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


def plan_of(positions: Positions, schedule: Schedule, rank: int) -> Plan:
    """The part of ``rank``: that of its position, with the workers of its plane."""
    if positions.members == 1:
        return plan_for(positions.grid, schedule, rank)
    grid, member = positions.grid, positions.member(rank)
    roster = tuple(sorted({grid.rank(positions.position(one)) for one in schedule[0]}))
    plan = plan_for(grid, (roster, schedule[1]), grid.rank(positions.position(rank)))

    def in_plane(numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(positions.rank(grid.worker(number), member) for number in numbers)

    return replace(plan, before=in_plane(plan.before), after=in_plane(plan.after), peers=in_plane(plan.peers))


def linked_with(positions: Positions, schedule: Schedule, rank: int) -> frozenset[int]:
    """The ranks that ``rank`` is connected with in a generation that begins with ``schedule``, itself included."""
    plan = plan_of(positions, schedule, rank)
    return frozenset((rank, *plan.before, *plan.after, *plan.peers, *positions.siblings(rank)))


@lru_cache(maxsize=256)
def script(between: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """What every worker's Lightning does after its set-up, in order: steps, and what follows each of them."""
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

    def __init__(self, network: Run, rank: int, process: int, joins: bool) -> None:
        self.network = network
        self.grid = network.grid
        self.rank = rank
        self.columns = network.grid.stages * network.members
        self.column = rank % self.columns
        self.stage = self.column // network.members
        self.is_last = self.stage == network.grid.stages - 1
        self.process = process
        self.joins = joins
        # what the world knows of the process
        self.alive = True
        self.connection = 0  # the epoch of the coordinator that it is connected to
        self.deaf = float("inf")  # from then on nothing of that one arrives any more
        self.fuse = 0  # actions until it dies, 0 for never
        self.mishap = 0  # actions until it raises, 0 for never
        self.loses_device = False  # and then its device is lost
        self.frozen = 0.0  # no thread of it runs before that time
        self.stuck = 0.0  # its main thread does not run before that time
        self.unread: list[Any] = []  # while it is frozen
        self.waiting: Any = None
        self.interruptible = False
        self.late = False  # what it waits for is there, but it has not noticed yet
        self.broken: set[int] = set()  # ranks to which its connections are broken in this generation
        self.position_is_cut = False  # its connections to its siblings
        self.uncut = False  # whether what it waits for ends only with these
        self.is_left_in_hook = False  # a hook of its was broken off
        self.member = Member(rank, joins)
        self.schedule: Schedule = ((), 0)
        self.linked: frozenset[int] = frozenset()  # whom it is connected with
        # the executor
        self.version = 0
        self.reduced = False
        self.payload: Any = None
        self.after_step = AfterStep.GO_ON
        self.stop_agreed = False
        self.is_told_to_wait = False
        self.just_joined = joins
        self.has_state = not joins
        self.strayed: int | None = None  # the step since which it has other values than the others
        self.open = -1  # the step that all must have passed
        self.payloads: Mapping[int, Any] = {}  # of the commit that is being applied
        self.speculates = False  # whether it goes on without the answer to its commit of this step
        self.speculative = False  # and has done so
        self.parameters: list[int] = []  # the gradients applied, by step
        self.shadow = -1  # version that the shadow holds
        self.cuts = first_layout(network.grid)  # the layout of the layers that it has
        self.beside: tuple[Any, int] | None = None  # the one for which it holds layers, and their version
        self.buffers: list[tuple[int, int]] = [(-1, 0), (-1, 0)]  # (step, reduced gradient), of even and odd steps
        self.shared: list[Sums] = [{}, {}]  # the same for layers that neighbouring stages share
        self.ahead: tuple[int, frozenset[int]] = (-1, frozenset())  # a step that is run again, and stages done with it
        self.place = (OUTSIDE, "set-up")  # of an exception
        self.is_past = False
        self.position = 0  # in the script
        # CheckpointBatches
        self.batches = 0
        self.pending = -1  # the batch that has begun and whose outcome it does not know
        self.given_up = False  # whether one is to be asked for again
        self.unnamed: tuple[tuple[int, int], ...] = ()  # batches and indices of whole files without a surely given name
        self.is_writing = False  # whether its thread has a part to do
        self.questions = -1  # the number of the newest question of that thread
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
        if self.mishap and self.generation >= 0 and not self.member.is_joining:
            self.mishap -= 1
            if not self.mishap:
                raise Mishap(self.loses_device)

    # ------------------------------------------------------------------ what it knows

    @property
    def generation(self) -> int:
        return self.member.generation

    @property
    def roster(self) -> tuple[int, ...]:
        return self.member.roster

    @property
    def has_shadow(self) -> bool:
        return self.columns > 1 and not self.network.commits and self.shadow == self.version - 1

    @property
    def positions(self) -> Positions:
        return Positions(self.grid, self.network.members)

    @property
    def plan(self) -> Plan:
        return plan_of(self.positions, self.schedule, self.rank)

    @property
    def is_interrupted(self) -> bool:
        return self.member.is_interrupted

    def receive(self, message: Any) -> None:
        """The receiver thread."""
        for reply in self.member.receive(message):
            self.network.send(self, reply)
        if isinstance(message, messages.Regroup):  # Connections.abort
            spares = self.member.in_hook and self.positions.siblings(self.rank).issubset(message.roster)
            if not (spares or self.position_is_cut):
                self.position_is_cut = True
                self.network.position_cut(self)

    # ------------------------------------------------------------------ waiting

    def wait(self, ready: Callable[[], Any], interruptible: bool = True) -> Waits:
        """Waits for the coordinator's answer."""
        if ready():
            return
        if interruptible and self.is_interrupted:
            raise Interrupted
        self.interruptible = interruptible
        yield ready

    def exchange(self, what: str, step: int, ranks: Iterable[int]) -> Waits:
        """Waits until all of ``ranks`` have given it."""
        if self.is_interrupted:
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
        """Session.errors_judged."""
        try:
            yield from self.life()
        except Mishap as error:
            yield from self.settle((OUTSIDE, f"hook at {self.position}"), error, exact=False)

    def settle(self, place: tuple[int, str], error: Mishap, exact: bool) -> Waits:
        """Returns if it is to do the same again: ControlClient.await_verdict, and what follows."""
        raised = messages.Raised(self.rank, self.generation, *place, "OSError", "", exact, error.sticky)
        self.network.send(self, raised)
        yield from self.wait(lambda: self.member.exception_verdict() is not None, interruptible=False)
        judged = self.member.exception_verdict()
        assert judged is not None
        if judged.own:
            self.network.send(self, messages.Crash(self.rank, False, "OSError", None, ""))
            raise Dies
        yield from self.wait(lambda: self.is_interrupted, interruptible=False)

    def life(self) -> Waits:
        if self.joins:
            yield self.network.delay() * 10  # imports and set-up
            self.send(messages.Ready(self.rank))
            yield from self.wait(lambda: self.is_interrupted, interruptible=False)
            self.member.is_joining = False
        else:
            yield self.network.delay()
            self.send(Joined(self.rank))
            yield from self.arrive("set-up", self.rank, regroups=False)
            yield from self.wait(lambda: self.is_interrupted, interruptible=False)
        yield from self.regroup()
        items = script(self.network.between)
        while not self.done:
            kind, number = items[self.position]
            if ("before", number) in self.network.hooks and kind == "step" and not self.just_joined:
                yield from self.hook(("before", number))
            if kind == "step":
                if (yield from self.stops_after(number)):
                    self.position = len(items) - 3  # what follows it is the end
            elif kind == "validation":
                yield from self.validate(number)
            elif kind == "result":
                yield from self.deliver()
            elif kind == "end":
                yield from self.complete_saves()
                yield from self.arrive(f"{kind} {number}", self.position)
            else:
                yield from self.arrive(f"{kind} {number}", self.position)
            if ("after", number) in self.network.hooks and kind in ("collective", "validation"):
                yield from self.hook(("after", number))
            self.position += 1

    def hook(self, place: tuple[str, int]) -> Waits:
        """Two collectives of its position in a hook: ControlClient.enter_hook, and MemberGroup.run."""
        if place[0] != "in":
            yield from self.confirmed()
        while True:
            number = self.member.hook_count
            self.send(messages.Reached(self.rank, self.generation, messages.Milestone.IN_HOOK, number))
            try:
                yield from self.wait(self.member.try_enter_hook)
            except Interrupted:
                yield from self.regroup()
            else:
                break
        self.network.in_hook(self, place)
        siblings = self.positions.siblings(self.rank)
        for number in range(2):
            what = f"{number} of hook {place}"
            self.tell(what, self.member.hook_count, None)
            keys = ((self.generation, what, self.member.hook_count, rank) for rank in siblings)
            missing = {key for key in keys if not self.network.has(self, key)}
            self.uncut = True
            try:
                if self.position_is_cut:
                    raise CommunicationError
                if missing:
                    self.interruptible = True
                    yield missing
            except CommunicationError as error:
                yield from self.lose_sibling(error)
            finally:
                self.uncut = False

    def lose_sibling(self, error: CommunicationError) -> Waits:
        """Executor._lose_sibling."""
        self.is_left_in_hook = True
        self.network.left_in_hook(self)
        if not self.is_interrupted:
            self.send(messages.Broken(self.rank, self.generation, "connection reset", error.ranks))
            yield from self.wait(lambda: self.is_interrupted, interruptible=False)
        raise Dies

    def stops_after(self, number: int) -> Generator[Any, None, bool]:
        """A turn of Lightning's epoch loop; returns whether it is the last one."""
        if number and not self.just_joined and (yield from self.stops_at(StopPlace.EPOCH)):
            return True
        yield from self.run_step(number)
        self.just_joined = False
        if self.after_step is AfterStep.END:  # SaveAndEnd.end
            yield from self.arrive("checkpoint", self.position)
            yield from self.arrive(ENDED, self.position)
        return (yield from self.stops_at(StopPlace.STEP_END))

    def stops_at(self, place: StopPlace) -> Generator[Any, None, bool]:
        """StopRequests.agree, and what Lightning makes of it."""
        point = stop_point(self.version, place)
        if not self.stop_agreed:
            if self.after_step is AfterStep.STOP:
                self.stop_agreed = True
            else:
                if self.network.wants_stop(self, point) and not self.is_told_to_wait:
                    self.stop_agreed = yield from self.request_stop(point)
                    self.is_told_to_wait = not self.stop_agreed
                if not self.stop_agreed:
                    for reply in self.member.pass_stop_point(point):
                        self.send(reply)
        return self.stop_agreed and self.network.may_stop(self, point)

    def request_stop(self, point: int) -> Generator[Any, None, bool]:
        """ControlClient.request_stop_and_wait."""
        self.send(messages.StopWish(self.rank, point))
        while True:
            try:
                yield from self.wait(lambda: self.member.stop_verdict(point) is not None)
            except Interrupted:
                yield from self.regroup()
            else:
                verdict = self.member.stop_verdict(point)
                assert verdict is not None
                return verdict.agreed

    def run_step(self, number: int) -> Waits:
        """Executor.run_step."""
        assert self.version == number, "Lightning sees a step twice, or not at all"

        def run() -> Waits:
            if self.version == number:
                yield from self.begin_step(number)
                yield from self.program(number)

        yield from self.retried(run)
        self.hear_of_saves()
        self.begin_saves()

    # ------------------------------------------------------------------ CheckpointBatches

    def begin_saves(self) -> None:
        """CheckpointBatches.seal, where two checkpoints are asked for after each step unless a batch is pending."""
        status = self.member.saves
        if not self.network.saves or self.pending >= 0 or not status.holders:
            return
        self.pending = batch_number(status, self.batches)
        self.batches += 1
        self.network.begins_saves(self, status.holders, self.given_up)
        self.given_up = False
        paths = tuple(f"{self.pending}.{index}" for index in range(2))
        writer = status.holders[-1]
        self.send(messages.SaveBegun(self.rank, self.pending, self.version, writer, paths, (False, True)))
        if writer == self.rank:
            self.is_writing = True
            self.network.writes(self, self.pending, 0)

    def hear_of_saves(self) -> None:
        """CheckpointBatches.apply_outcome."""
        status = self.member.saves
        if self.pending < 0 or status.batch != self.pending:
            return
        self.network.takes_up(self, status)
        self.pending = -1
        self.given_up = any(status.failures)
        self.unnamed = tuple((status.batch, index) for index in status.unnamed)
        self.name_files()

    def name_files(self) -> None:
        """CheckpointBatches.name_files; when it takes up the outcome, and when it becomes the leader."""
        if self.member.leader == self.rank:
            for file in self.unnamed:
                self.network.names(self, *file)
            self.unnamed = ()

    def complete_saves(self) -> Waits:
        """CheckpointBatches.complete."""
        if self.pending >= 0:
            yield from self.wait(lambda: not self.is_writing, interruptible=False)
            yield from self.arrive("checkpoint", None)
            self.hear_of_saves()
            assert self.pending < 0, "all are done with their parts, and the outcome is not known"

    def retried(self, attempt: Callable[[], Waits], recover: bool = False) -> Waits:
        """Executor._retry."""
        while True:
            try:
                if recover:
                    yield from self.recover()
                    recover = False
                yield from attempt()
            except Interrupted:
                recover = True
            except CommunicationError as error:
                if not self.is_interrupted:
                    self.send(messages.Broken(self.rank, self.generation, "connection reset", error.ranks))
                    yield from self.wait(lambda: self.is_interrupted, interruptible=False)
                recover = True
            except Mishap as error:
                yield from self.settle(self.place, error, exact=not self.is_past)
                recover = True
            else:
                return

    def begin_step(self, step: int) -> Waits:
        """ControlClient.begin_step."""
        while True:
            answer = self.member.begin(step)
            for reply in answer.replies:
                self.send(reply)
            if answer.pause is None:
                if answer.program is not None:
                    self.schedule = answer.program
                return
            yield from self.wait(lambda pause=answer.pause: self.member.pause != pause)

    def arrive(self, name: str, payload: Any, regroups: bool = True) -> Waits:
        """ControlClient.arrive."""
        yield from self.confirmed()
        message = self.member.arrive(name, payload)
        self.send(message)
        yield from self.await_answer_of_all(message, regroups)

    def await_answer_of_all(self, message: messages.Arrive, regroups: bool) -> Waits:
        """ControlClient._hiding_failures."""
        while True:
            try:
                yield from self.await_answer(message, interruptible=regroups)
            except Interrupted:
                yield from self.regroup()
            else:
                return

    def await_answer(self, arrival: messages.Arrive, interruptible: bool = True) -> Waits:
        self.answer: Any = None

        def answered() -> bool:
            self.answer = self.answer or self.member.answer(arrival.number)
            return self.answer is not None

        yield from self.wait(answered, interruptible)

    def validate(self, number: int) -> Waits:
        """Work of all in one generation, ended by ControlClient.arrive_in_generation; restarted in the next one."""

        def run() -> Waits:
            self.place = (self.version, f"validation {number}")
            yield from self.know_newest()
            plan = self.plan
            yield from self.meet(f"validation {number}", self.version)
            if plan.before:
                yield from self.exchange("V", number, plan.before)
            self.tell("V", number)
            part = (self.generation, sum(16**m for m in plan.microbatches))
            message = self.member.arrive_in_generation(f"validation {number}", part)
            self.is_past = True
            self.send(message)
            try:
                yield from self.await_answer(message)
            except Interrupted:
                self.is_past = False
                raise
            self.is_past = False

        yield from self.retried(run)
        parts = self.answer.payloads
        assert {g for g, _ in parts.values()} == {self.generation}, f"parts of other generations: {parts}"
        mine = sum(part for rank, (_, part) in parts.items() if rank % self.columns == self.column)
        assert mine == full_gradient(self.grid), f"the metrics are those of {mine:#x}"

    # ------------------------------------------------------------------ a recovery

    def regroup(self) -> Waits:
        yield from self.retried(lambda: iter(()), recover=True)

    def recover(self) -> Waits:
        """Executor._recover."""
        announced = self.member.enter()
        unproven = announced.unproven
        self.broken, self.linked = set(), frozenset()
        self.place = (self.version, "recovery")
        self.network.entered(self)
        version = self.version if self.has_state else -1
        if self.reduced and (self.leaves_open(self.version) or unproven == self.version):
            self.reduced, self.payload = False, None
        status = messages.WorkerStatus(self.column, version, self.reduced, self.speculative, self.has_shadow)
        begun = self.member.begun
        self.send(messages.Report(self.rank, self.generation, status, self.payload, begun, self.cuts))
        yield from self.wait(lambda: self.member.resume_message() is not None)
        resume = self.member.resume_message()
        assert resume is not None
        self.position_is_cut = self.is_interrupted
        network = self.network
        if self.has_state:
            self.take_up(resume.cuts)
        self.schedule = resume.program  # the whole: what a program is, the protocol does not know
        kept = self.linked
        self.linked = kept.union(
            self.roster if network.meshed else linked_with(self.positions, self.schedule, self.rank),
            self.partners(resume),
        )
        if announced.check_links:
            yield from self.check_links()
        self.tell("connects", 0)
        yield from self.exchange("connects", 0, sorted(self.linked - kept))
        self.payloads = resume.commits
        self.ahead = (resume.decision.version, frozenset() if network.tied else resume.decision.ahead)
        for action in recovery.actions(
            self.rank,
            status,
            resume.decision,
            resume.donors,
            network.commits,
            network.tied or network.whole,
            resume.confirmed,
        ):
            yield from self.carry_out(action, resume)
        if self.speculative:
            self.tell_of(self.version - 1)
        if resume.becomes:
            yield from self.get_ready(resume)
        assert self.cuts == self.layout(resume.cuts), f"it goes on with the layers of {self.cuts}"
        assert self.has_state, "it is to go on without a state"
        assert self.version - resume.decision.version in (0, 1), "it goes on from another version than the others"

    def leaves_open(self, step: int) -> bool:
        """Verifier.leaves_open."""
        return step == self.open and not self.member.knows_loss(step)

    def layout(self, cuts: messages.Cuts) -> messages.Cuts:
        return cuts or first_layout(self.grid)

    def take_up(self, cuts: messages.Cuts) -> None:
        """LayerMoves.decided."""
        beside, self.beside = self.beside, None
        if self.cuts != self.layout(cuts):
            assert beside == (cuts, self.version), f"it holds the layers of {beside} for {cuts} and step {self.version}"
            self.cuts = cuts

    def partners(self, resume: messages.Resume) -> frozenset[int]:
        """LayerMoves.partners."""
        if not resume.becomes:
            return frozenset()
        found = transfers(self.grid, resume.roster, self.layout(resume.cuts), resume.becomes)
        pairs = [(one.donor, one.receiver) for one in found]
        return frozenset(rank for pair in pairs if self.rank in pair for rank in pair)

    def get_ready(self, resume: messages.Resume) -> Waits:
        """Executor._exchange_layers."""
        assert not self.speculative, "it gives layers of a speculative step"
        assert self.version == resume.decision.version, "it gives layers of another step"
        before = self.layout(resume.cuts)
        assert self.cuts == before
        assert self.linked.issuperset(self.partners(resume)), "it has no connection for layers"
        for one in transfers(self.grid, resume.roster, before, resume.becomes):
            if one.donor == self.rank:
                self.tell(f"layers {one.layers} for {one.receiver}", self.version)
            elif one.receiver == self.rank:
                yield from self.exchange(f"layers {one.layers} for {self.rank}", self.version, (one.donor,))
        self.beside = (resume.becomes, self.version)
        self.send(messages.Reached(self.rank, self.generation, messages.Milestone.LAYERS_HELD))
        yield from self.wait(lambda: self.is_interrupted, interruptible=False)
        raise Interrupted

    def check_links(self) -> Waits:
        """Communicator.configure, before it connects."""
        self.tell("doorbell", 0)
        yield from self.exchange("doorbell", 0, sorted(self.linked))
        yield self.network.delay()
        if self.is_interrupted:
            raise CommunicationError
        if unreachable := self.network.unreachable(self):
            raise CommunicationError(unreachable)

    def carry_out(self, action: recovery.Action, resume: messages.Resume) -> Waits:
        """Executor._carry_out."""
        version = resume.decision.version
        match action:
            case recovery.Give():
                assert self.has_state, "it gives a state that it does not have"
                assert self.version == version, "it gives the state of another step"
                assert self.strayed is None, "it gives a state that is wrong"
                assert not self.speculative, "it gives a speculative state"
                member = self.member
                numbers = (member.next_collective, member.hook_count)
                saves = (member.saves, self.batches, self.pending, self.given_up, self.unnamed)
                state = (list(self.parameters), self.position, numbers, self.version, self.stop_agreed, saves)
                for rank in resume.strangers:
                    assert rank in resume.donors, "whom nobody knows is to get layers"
                self.tell("state", version, state)
            case recovery.Take():
                assert not self.has_state, "its state is overwritten"
                yield from self.exchange("state", version, (action.donor,))
                (state,) = self.received("state", version, (action.donor,))
                yield self.network.delay() * 0.1
                parameters, self.position, numbers, self.version, self.stop_agreed, saves = state
                self.member.saves, self.batches, self.pending, self.given_up, self.unnamed = saves
                self.member.next_collective, self.member.hook_count = numbers
                self.parameters = list(parameters)
                if self.rank in resume.strangers:
                    self.cuts = self.layout(resume.cuts)
                self.has_state = True
                self.send(messages.Reached(self.rank, self.generation, messages.Milestone.ENTERED))
                if self.network.miscopies(self):
                    self.strayed = version - 1
                    self.send(messages.Differs(self.rank, version - 1, "parameters differ"))
                    raise Dies
            case recovery.Apply():
                yield from self.apply()
            case recovery.Confirm():
                self.payloads = resume.commits
                self.confirm_step(action.step)
            case recovery.Adopt() if self.network.whole:  # ManualStepRunner.adopt
                assert not action.lacks or action.step == version, "it has not done a step that is to be applied"
            case recovery.Adopt():
                step = action.step
                if self.rank == action.donor:
                    self.tell("gives", step, (self.gradient_of(step), self.shared[step % 2]))
                yield from self.exchange("gives", step, (action.donor,))
                ((gradient, shared),) = self.received("gives", step, (action.donor,))
                self.buffers[step % 2], self.shared[step % 2] = (step, gradient), dict(shared)
                if action.lacks:
                    self.reduced, self.payload = True, (self.column, step)
            case recovery.AwaitPeers():
                self.tell("adopts", version)
                peers = [rank for rank in self.roster if rank % self.columns == self.column]
                yield from self.exchange("adopts", version, peers)
            case recovery.CommitTogether():
                yield from self.commit(action.step)
            case recovery.Forget():
                self.reduced, self.payload = False, None
            case recovery.Serve():
                assert not self.network.commits, "there is no shadow: no stage may have applied before all could"
                assert self.columns > 1, "there is no shadow: a single stage is ahead of nobody"
                yield from self.program(action.step)

    def program(self, step: int) -> Waits:
        """Executor._run_program: forwards from the stage before, input gradients from the stage after."""
        plan = self.plan
        if self.network.whole:
            yield from self.whole_step(step, plan)
            return
        again, ahead = self.ahead
        columns = range(self.stage * self.network.members, (self.stage + 1) * self.network.members)
        siblings_done = step != again or ahead.issuperset(columns)
        part = recovery.part_of(step, self.version, self.reduced, plan.idle_peer, siblings_done)
        self.buffers[part.buffer_step % 2], self.shared[part.buffer_step % 2] = (-1, 0), {}
        has = self.version if step == self.version else self.shadow
        assert has == step, f"it computes step {step} with the parameters of version {has}"
        assert self.schedule[0] == self.roster, f"it runs {self.schedule}, but the roster is {self.roster}"
        assert self.linked.issuperset((*plan.before, *plan.after, *plan.peers)), "it has no connection to some of them"
        self.place = (step, "program")
        yield from self.meet("step", step)
        self.member.in_hook = False
        self.network.begins(self, step)
        if self.strayed is not None and step > self.strayed:
            self.network.spoil(self, step)
        if self.network.has_bug(self, step):
            raise Mishap
        if part.awaits_peers:
            self.tell("begins", step)
            yield from self.exchange("begins", step, plan.peers)
        if plan.before:
            yield from self.exchange("F", step, plan.before)
        yield from self.meet("F of the layers", step)
        self.open = step if self.network.has_checks(step) and not self.member.knows_loss(step) else -1
        errs = self.open >= 0 and bool(plan.microbatches) and self.network.errs(self, step)
        right = self.is_right(step) and all(self.received("F", step, plan.before))
        self.tell("F", step, right)
        if step == self.version:
            yield from self.know_newest()
        if self.is_last:
            assert right, f"it tells losses of step {step} that follow from a wrong speculation"
            wrong = 1e3 * self.network.is_spoiled(self, step)
            losses = {m: loss_of(step, m) + wrong for m in plan.microbatches}
            proven_in = self.generation if self.leaves_open(step) else None
            self.send(messages.Losses(self.rank, step, losses, generation=proven_in))
        elif plan.after:
            yield from self.exchange("B", step, plan.after)
            right = right and all(self.received("B", step, plan.after))
        yield from self.meet("B of the layers", step)
        self.tell("B", step, right)
        begun = self.begin_shared(step) if part.reduces else {}  # may be before the last weight gradients, and a check
        if errs:
            mine, first = {"output": bytes(16)}, {"output": bytes(15) + b"1"}
            self.send(messages.Disputed(self.rank, self.generation, step, 0, self.rank, mine, first))
            yield from self.wait(lambda: False)
        elif self.open >= 0:
            self.send(messages.Reached(self.rank, self.generation, messages.Milestone.PASSED, step))
        if part.computes_weights and self.network.gathers:
            yield from self.meet("W of the layers", step)
        if part.reduces:
            assert right or not plan.microbatches, f"it reduces what follows from a wrong speculation: {step}"
            self.tell("W", step, sum(16**m for m in plan.microbatches) + self.network.is_spoiled(self, step) / 2)
            yield from self.exchange("W", step, plan.peers)
            self.buffers[step % 2] = (step, sum(self.received("W", step, plan.peers)))
            if self.network.tied:  # the stages that hold copies add their gradients: all or none
                self.tell("ties", step)
                yield from self.exchange("ties", step, self.roster)
            yield from self.end_shared(step, begun)
            self.reduced, self.payload = True, (self.column, step)
        else:
            yield from self.end_shared(step, self.begin_shared(step))
        if part.applies:
            if self.network.commits:
                yield from self.commit(step)
            if self.network.speculates:
                yield from self.step_speculatively(step)
            else:
                yield from self.apply()

    def meet(self, where: str, step: int) -> Waits:
        """A collective of the members of its position."""
        siblings = self.positions.siblings(self.rank)
        if siblings:
            self.tell(where, step, self.schedule)
            yield from self.exchange(where, step, siblings)
            assert set(self.received(where, step, siblings)) == {self.schedule}, "its siblings run another schedule"

    def begin_shared(self, step: int) -> dict[int, tuple[int, ...]]:
        """BucketedReduction._begin, of layers that neighbouring stages share; here each stage and the next share one.

        Returns for each of them, by the first stage, whose parts make the sum: all workers of both stages, or one that
        has the sum of an attempt before.
        """
        again, ahead = self.ahead
        ahead = ahead if step == again else frozenset()
        parts: dict[int, tuple[int, ...]] = {}
        for first in (self.stage - 1, self.stage):
            stages = (first, first + 1)
            if not self.network.shares or first < 0 or first + 1 == self.grid.stages or ahead.issuperset(stages):
                continue
            have_sums = [stage for stage in stages if stage in ahead]
            mine = self.shared[step % 2][first] if self.stage in ahead else frozenset({(self.generation, self.stage)})
            self.tell(f"layers of {first} and {first + 1}", step, mine)
            workers = tuple(rank for rank in self.roster if rank % self.grid.stages in stages)
            leads = self.positions.column_leaders(self.roster)
            parts[first] = tuple(leads[stage] for stage in have_sums[:1]) or workers
        return parts

    def end_shared(self, step: int, begun: dict[int, tuple[int, ...]]) -> Waits:
        """BucketedReduction._end."""
        for first, parts in begun.items():
            what = f"layers of {first} and {first + 1}"
            yield from self.exchange(what, step, parts)
            if step != self.ahead[0] or self.stage not in self.ahead[1]:
                self.shared[step % 2][first] = frozenset().union(*self.received(what, step, parts))

    # ------------------------------------------------------------------ speculative steps

    def is_right(self, step: int) -> bool:
        """Whether the parameters with which it computes ``step`` are what they will be."""
        return not (self.speculative and step == self.version and self.network.is_wrong(step - 1))

    def tell_of(self, step: int) -> None:
        """Executor._tell."""
        payload = self.column, step
        self.send(messages.Commit(self.rank, self.generation, step, payload, self.speculates))

    def step_speculatively(self, step: int) -> Waits:
        """Executor._commit_and_apply, where the optimizer may step before all are REDUCED."""
        self.speculates = self.network.may_speculate(self)
        self.tell_of(step)
        if not self.speculates:
            yield from self.wait(lambda: self.member.commit_answer(step) is not None)
        committed = self.member.commit_answer(step)
        if committed is None:
            yield from self.apply(speculative=True)
            return
        yield from self.undo_if_wrong(step)
        self.payloads = committed.payloads
        yield from self.apply()

    def undo_if_wrong(self, step: int) -> Waits:
        """All have told of ``step``: if somebody has speculated wrongly, a new generation begins."""
        committed = self.member.commit_answer(step)
        assert committed is not None
        if committed.speculative and self.network.is_wrong(step):
            self.send(messages.Undo(self.rank, self.generation, step))
            yield from self.wait(lambda: self.is_interrupted, interruptible=False)
            raise Interrupted

    def know_newest(self) -> Waits:
        """StepRunner.confirm: waits until it knows whether its speculation was right."""
        if self.speculative:
            step = self.version - 1
            yield from self.wait(lambda: self.member.commit_answer(step) is not None)
            yield from self.undo_if_wrong(step)
            self.speculative = False

    def confirm_step(self, step: int) -> None:
        """Executor._correct: what all have told of ``step`` is in :attr:`payloads`."""
        expected = {column: (column, step) for column in range(self.columns)}
        assert dict(self.payloads) == expected, f"it confirms step {step} with the norms {dict(self.payloads)}"
        assert self.speculative, "it has made no speculative step"
        assert step == self.version - 1
        self.speculative = False

    def confirmed(self) -> Waits:
        """Before anything that others see: Executor.confirm_newest, with the regroup that it may need."""
        while self.speculative:
            try:
                yield from self.know_newest()
            except Interrupted:
                yield from self.regroup()

    def whole_step(self, step: int, plan: Plan) -> Waits:
        """ManualStepRunner.run_program: reductions in the middle of the step, and a last one when it is done."""
        self.reduced, self.payload = False, None
        assert self.version == step, f"it does step {step} on the parameters of version {self.version}"
        assert self.schedule[0] == self.roster, f"it runs {self.schedule}, but the roster is {self.roster}"
        assert self.linked.issuperset((*plan.before, *plan.after, *plan.peers)), "it has no connection to some of them"
        self.place = (step, "program")
        self.network.begins(self, step)
        if self.network.has_bug(self, step):
            raise Mishap
        yield from self.meet("step", step)
        for what in ("W", "W2"):
            self.tell(what, step, sum(16**m for m in plan.microbatches))
            yield from self.exchange(what, step, plan.peers)
            self.buffers[step % 2] = (step, sum(self.received(what, step, plan.peers)))
        self.reduced, self.payload = True, (self.column, step)
        self.tell("done", step)
        yield from self.exchange("done", step, plan.peers)
        if plan.microbatches:
            self.send(messages.Losses(self.rank, step, {m: loss_of(step, m) for m in plan.microbatches}))
        yield from self.commit(step)
        yield from self.apply()

    def commit(self, step: int) -> Waits:
        self.send(messages.Commit(self.rank, self.generation, step, self.payload))
        yield from self.wait(lambda: self.member.commit_answer(step) is not None)
        committed = self.member.commit_answer(step)
        assert committed is not None
        self.payloads = committed.payloads

    def apply(self, speculative: bool = False) -> Waits:
        """Executor._apply."""
        step = self.version
        assert self.reduced, "it applies a gradient that it does not hold"
        yield from self.wait(lambda: self.member.loss(step) is not None)
        loss = self.member.loss(step)
        assert loss is not None
        self.after_step = loss.after_step
        if self.network.commits or (self.network.speculates and not speculative):
            expected = {column: (column, step) for column in range(self.columns)}
            assert dict(self.payloads) == expected, f"it applies step {step} with the norms {dict(self.payloads)}"
        self.is_past = True
        gradient = self.gradient_of(step)
        self.network.applied(self, step, gradient, self.shared[step % 2])
        self.parameters.append(gradient)
        self.shadow, self.version, self.reduced = step, step + 1, False
        self.payload, self.speculative = (self.payload, True) if speculative else (None, False)
        self.burn()
        if ("in", step) in self.network.hooks:
            yield from self.hook(("in", step))
        if self.strayed is None and self.network.strays(self, step):
            self.strayed = step
        options = {"lr": 1.0 if self.strayed is None else 2.0}
        self.send(messages.Applied(self.rank, step, {}, {}, messages.Facts(options, options)))
        self.is_past = False

    def gradient_of(self, step: int) -> int:
        held, gradient = self.buffers[step % 2]
        assert held == step, f"it should have the gradient of step {step} and has that of step {held}"
        return gradient

    def deliver(self) -> Waits:
        """ReCycleStrategy.deliver_result: asked again if a stage's speaker died meanwhile."""
        while True:
            speaks = self.positions.column_leaders(self.roster)[self.column] == self.rank
            yield from self.arrive(RESULT, tuple(self.parameters) if speaks else None)
            delivered = {rank % self.columns for rank, yes in self.answer.payloads.items() if yes}
            if len(delivered) == self.columns:
                self.done = True
                return

    def ask_to_leave(self) -> None:
        self.network.send(self, messages.Leave(self.rank))
