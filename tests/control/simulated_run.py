"""A run in a simulated world: the coordinator's state machine, workers, a network, a clock, faults; all from a seed.

``python tests/control/simulated_run.py SEED [ends] [stops] [kills] [plans_late] [layouts] [members=2]
[quorum] [lanes]`` prints a history event by event.

The coordinator's shell is reduced to what the state machine can observe: connections, exits of processes, evictions,
candidates for empty positions. Each connection keeps its order, with random delays; connections are independent of each
other; now and then a message arrives twice. A connection that breaks loses what was not read. What workers give each
other directly travels as facts, which arrive at any later time, or never if the giver dies. A link between two workers
may be cut, for a while or forever: what they give each other is then held back.

The coordinator itself may be killed, at any moment: between two messages that it takes or sends, and before or after it
writes something down. Then another one is started from what was written, and the workers return to it.

What must hold is in :mod:`simulated_promises`, and in the assertions of :mod:`simulated_workers`.
"""

import heapq
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from simulated_promises import EVICTED, NOBODY, Promises, Violation
from simulated_workers import (
    CommunicationError,
    Dies,
    Fact,
    Interrupted,
    Schedule,
    SimulatedWorker,
    Sums,
    first_layout,
    linked_with,
)

from lightning_recycle.control.coordinator.admission import Readmission, ReturnStanding
from lightning_recycle.control.journal import JournaledState, journal_entry
from lightning_recycle.control.options import CoordinatorOptions, HeartbeatTimeouts, RecoveryOptions
from lightning_recycle.control.protocol import membership, messages
from lightning_recycle.control.protocol import state as states
from lightning_recycle.control.protocol.control_collectives import StopPlace, stop_point
from lightning_recycle.control.protocol.fault_attribution import MAX_DISTURBANCES
from lightning_recycle.control.protocol.membership import objection
from lightning_recycle.planning.grid import Grid

GRIDS = [
    *[Grid(2, 2, 1)] * 4, *[Grid(2, 1, 1)] * 2, Grid(3, 1, 2), Grid(2, 2, 2), Grid(3, 2, 1), Grid(2, 3, 1),
    Grid(1, 2, 1), Grid(3, 3, 1),
]  # fmt: skip
GRIDS_OF_MEMBERS = [
    *[Grid(2, 1, 1)] * 3, *[Grid(2, 2, 1)] * 3, *[Grid(3, 1, 1)] * 2, Grid(3, 2, 1), Grid(2, 2, 2), Grid(2, 3, 1),
    Grid(4, 1, 1),
]  # fmt: skip
"""Where positions have several members."""

GRIDS_OF_LANES = [
    *[Grid(1, 2, 3, 3)] * 2, *[Grid(2, 2, 2, 3)] * 2, Grid(1, 1, 2, 2), Grid(1, 1, 3, 3), Grid(2, 1, 2, 4),
    Grid(1, 3, 2, 2), Grid(2, 1, 1, 2),
]  # fmt: skip
"""With more lanes than pipelines."""

FAULTS_END = 1.2  # seconds, after which there is no new fault
DEADLINE = 60.0  # seconds, within which every run must end; without faults one takes about one second
MAX_EVENTS = 50_000
SILENCE = 0.4  # seconds after which a worker that does not run is evicted
GRACE = 0.1
CONNECTING = 0.3  # seconds that connecting may take
DEADLOCK = 0.6  # seconds without progress anywhere after which the same workers connect again
STOP = "stop"  # a worker is told to end
LAST_HOLDER_SILENCE = 3.0  # seconds for which a revived coordinator waits for the last holder of a stage

FAULTS = ("crash", "crash", "fuse", "fuse", "break", "freeze", "stick", "disturb", "leave", "leave", "node")


class CoordinatorDies(BaseException):
    """It is killed right here."""


class NobodyKnows(Exception):
    """Those who held other values than a newcomer have died before they said so."""


class Paper:
    """What the coordinator has written down: like a journal."""

    def __init__(self) -> None:
        self.run, self.is_continued = "a run", True
        self.epoch = 0  # how many coordinators have had it before
        self.kept: JournaledState | None = None
        self.processes: dict[int, messages.Process] = {}


class Run:
    """One simulated history.

    Args:
        seed: the seed of everything.
        trace: called with what happens, for people.
        ends: whether it is told to end at some moment.
        stops: whether workers want to stop training early.
        kills: whether the coordinator is killed.
        plans_late: whether the last report of a generation is held while its plan is made.
        layouts: whether layers move.
        checks: whether workers check each other's computations in some steps, of which some are wrong.
        strays: whether workers that join have other values than the others after some step.
        members: the processes of each position.
        quorum: whether the run begins before all workers have come.
        lanes: whether there are more lanes than pipelines.
        saves: whether checkpoints are written in the background after each step.
        hooks: whether some hooks run collectives of their position.
        idle: whether one worker of each stage runs all micro-batches, the others none, and links break.
    """

    def __init__(
        self,
        seed: int,
        trace: Callable[[str], None] | None = None,
        ends: bool = False,
        stops: bool = False,
        kills: bool = False,
        plans_late: bool = False,
        layouts: bool = False,
        checks: bool = False,
        strays: bool = False,
        members: int = 1,
        quorum: bool = False,
        lanes: bool = False,
        saves: bool = False,
        hooks: bool = False,
        idle: bool = False,
    ) -> None:
        self.chance = random.Random(seed)
        self.random = self.chance.random
        self.trace = trace
        self.grid = self.chance.choice(GRIDS)
        if strays or idle:  # somebody must be right, or work
            self.grid = random.Random(f"grid {seed}").choice([grid for grid in GRIDS if grid.pipelines > 1])
        self.members, self.saves = members, saves
        self._saving = random.Random(f"saves {seed}")
        if members > 1:
            self.grid = random.Random(f"grid {seed}").choice(GRIDS_OF_MEMBERS)
        if lanes:
            self.grid = random.Random(f"grid {seed}").choice(GRIDS_OF_LANES)
        several = random.Random(f"members {seed}")
        self.gathers = several.random() < 0.5  # whether weight gradients of a position's members depend on each other
        self.commits = self.random() < 0.3
        self.whole = self.grid.stages == 1 and random.Random(f"whole {seed}").random() < 0.5
        self.whole = self.whole and members == 1  # not supported, like what stages share
        self.commits = self.commits or self.whole
        self.tied = self.commits and not self.whole and random.Random(f"ties {seed}").random() < 0.5
        self.shares = not self.whole and random.Random(f"shares {seed}").random() < 0.3
        if members > 1:
            self.tied = self.shares = False
        draws = random.Random(f"guesses {seed}")
        self.speculates = not self.commits and draws.random() < 0.5
        self._wrong = frozenset(step for step in range(4) if draws.random() < 0.4)  # where speculation turns out wrong
        self._speculations = draws
        self._checking = random.Random(f"checks {seed}") if checks else None
        self.speculates = self.speculates and not checks
        self._checked = frozenset(step for step in range(4) if self._checking and self._checking.random() < 0.7)
        self._spoiled: set[tuple[int, int]] = set()  # generations and steps in which a worker has erred
        self._straying = random.Random(f"strays {seed}") if strays else None
        self.steps = self.chance.choice((2, 3, 3, 4))
        self.between = tuple(self.chance.choice(("", "", "collective", "validation")) for _ in range(self.steps))
        asking = random.Random(f"hooks {seed}")
        places = [(when, step) for step in range(self.steps) for when in ("before", "in", "after")]
        self.hooks = frozenset(place for place in places if hooks and asking.random() < 0.6)
        self._in_hooks: Counter[tuple[SimulatedWorker, tuple[str, int]]] = Counter()
        self.duplicates = self.random() < 0.5 and not strays  # losses count in whichever generation they come
        self.now = 0.0
        self.state: states.MembershipState = states.initial_state(
            self.grid, random.Random(f"retries {seed}").choice((0, 1, 1, 1, 2)), members
        )
        self.facts: dict[Fact, Any] = {}
        self.outcome: Any = None
        self._kills = random.Random(f"kills {seed}")
        self._kills_left = self._kills.choice((1, 1, 1, 2, 3)) if kills else 0
        self._planning = random.Random(f"planning {seed}") if plans_late else None
        self._coordinator_fuse = 0  # actions until it is killed, 0 for never
        self._is_down = False
        self._paper = Paper()
        self._options = CoordinatorOptions(
            heartbeat=HeartbeatTimeouts(SILENCE, LAST_HOLDER_SILENCE),
            recovery=RecoveryOptions(machine_error_retries=random.Random(f"retries {seed}").choice((0, 1, 1, 1, 2))),
        )
        self._readmission: Any = None
        self._deferred: list[tuple[SimulatedWorker, Any]] = []
        self._told_at_the_end: Any = None  # how the run ended, before the coordinator was killed
        self.met: Counter[str] = Counter()
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._processes = 0
        self._workers: list[SimulatedWorker] = []
        self._connections: dict[int, SimulatedWorker] = {}
        self.promises = Promises(self.grid, self.steps, self._connections, members)
        self._spawns_left = members * (self.chance.choice((0, 2, 4)) + 2 * strays)
        self._up: dict[int, float] = defaultdict(float)  # when the newest message of a connection arrives, by process
        self._down: dict[int, float] = defaultdict(float)
        self._cut: set[int] = set()  # processes whose connection is broken
        self._waiters: dict[Fact, list[tuple[SimulatedWorker, set[Fact]]]] = {}
        self._disturbances_left = MAX_DISTURBANCES
        late = self._latecomers(random.Random(f"quorum {seed}")) if quorum else frozenset[int]()
        for rank in set(range(self.state.positions.num_workers)) - late:
            self._start(rank, joins=False)
        for _ in range(self.chance.choice((0, 1, 1, 2, 2, 3, 4, 5))):
            self._at(self.random() * FAULTS_END, self._fault)
        self._follow_ups = self.chance.choice((0, 1, 2, 3))  # faults right after what the machine does about one
        # Whether all connect with all, or with those alone whom the plan needs; with ties all are needed.
        self.meshed = self.tied or self.shares or random.Random(f"meshed {seed}").random() < 0.3
        self._linked_by: Schedule = ((), 0)  # the plan of the newest generation
        self._usual = 2 if idle else 0  # the schedule of a roster without one of its own, see plan_for()
        self._plans: dict[tuple[int, ...], int] = {}  # the schedule that the coordinator chooses for a roster
        replans = random.Random(f"replans {seed}")
        for number in range(1, 1 + replans.choice((0, 0, 1, 2, 3, 6))):
            self._at(replans.random() * FAULTS_END, self._replan, number, replans.random() * 0.1)
        self._layouts = random.Random(f"layouts {seed}")
        if layouts and self.grid.stages > 1:
            for _ in range(self._layouts.choice((1, 2, 3))):
                self._at(self._layouts.random() * FAULTS_END, self._move_layers)
        self._links = random.Random(f"links {seed}")
        self._cuts: dict[states.Pair, tuple[int, ...]] = {}  # cut links, and which of the two workers find that out
        self._held_back: dict[Fact, set[int]] = {}  # the ranks kept from it by a link that was cut on arrival
        if ends:
            self._at(random.Random(f"ends {seed}").random() * FAULTS_END, self._handle, states.EndWanted())
        wishes = random.Random(f"stops {seed}")
        points = [stop_point(s, p) for s in range(1, self.steps + 1) for p in (StopPlace.STEP_END, StopPlace.EPOCH)]
        self._wishes: dict[int, int] = {}  # rank -> the stop point from which on it wants to stop
        if stops:
            at = wishes.choice(points)
            together = wishes.random() < 0.4  # as a decision on values that all have
            for rank in range(self.state.positions.num_workers):
                if together or wishes.random() < 0.5:
                    self._wishes[rank] = at if together else wishes.choice(points)
            self.promises.wishes = self._wishes
            self.promises.min_steps = wishes.choice((0, 0, 0, wishes.randrange(self.steps + 1)))
        for _ in range(self._kills_left):
            self._at(self._kills.random() * FAULTS_END, self._light_coordinators_fuse)
        self._progressed = 0.0  # when a worker last went on
        cuts = self._links.choice((1, 2, 3) if idle else (0, 0, 0, 1, 1, 2))
        self._disturbances_left -= cuts  # each may cost one
        for _ in range(cuts):
            self._at(self._links.random() * FAULTS_END, self._cut_link)
        self._mishaps = random.Random(f"mishaps {seed}")
        for _ in range(self._mishaps.choice((0, 0, 0, 0, 1, 1, 2, 3))):
            self._at(self._mishaps.random() * FAULTS_END, self._mishap)
        self._bug = (-1, -1)  # stage and step at which whoever computes raises, or none
        if self._mishaps.random() < 0.06:
            self._bug = (self._mishaps.randrange(self.grid.stages), self._mishaps.randrange(self.steps))
            self.promises.bug_step = self._bug[1]

    def _latecomers(self, chance: random.Random) -> frozenset[int]:
        """Positions whose workers come once the run has begun, or never: one of each stage is there, or soon will be.

        The coordinator stops waiting for them at some moment; now and then it asks too early, or more than once.
        """
        ranks = range(self.state.positions.num_workers)
        first = {chance.choice([r for r in ranks if r % self.grid.stages == s]) for s in range(self.grid.stages)}
        late = frozenset(rank for rank in ranks if rank not in first and chance.random() < 0.6)
        self._spawns_left += len(late)
        for moment in (0.0, chance.random() * 0.05, 0.1 + chance.random() * 0.2):
            self._at(moment, self._stop_waiting, chance.choice((1, 1, 1, 2)) if moment < 0.1 else 1)
        self._at(LAST_HOLDER_SILENCE, self._end_start)
        for _ in late:
            self._at(0.1 + chance.random(), self._fill)
        return late

    def _stop_waiting(self, least: int) -> None:
        """The coordinator expects no further worker soon; if it has just been killed, the next one does so."""
        if self._is_down or self.state.returned is not None:
            self._at(0.3, self._stop_waiting, least)
            return
        before, began = self.state.roster, self.state.generation.number >= 0
        absent = frozenset(rank for rank in before.live if rank not in self._connections)
        self._handle(states.StartDue(absent | before.joined, least))
        gone, live = before.live - self.state.roster.live, self.state.roster.live
        self.met["began with fewer"] += bool(gone)
        due = Counter(rank % self.grid.stages for rank in before.live - (absent - before.joined))
        if absent and not began and not gone and all(due[stage] >= least for stage in range(self.grid.stages)):
            raise Violation(f"the workers {sorted(absent)} are waited for though each stage has {least}")
        if gone and (began or not gone <= absent):
            raise Violation(f"the workers {sorted(gone)} are there, and not waited for")
        if gone and any(sum(rank % self.grid.stages == s for rank in live) < least for s in range(self.grid.stages)):
            raise Violation(f"the run begins with {sorted(live)}, and each stage is to have {least}")

    # ------------------------------------------------------------------ the clock

    def run(self) -> Any:
        """Runs to the end; returns the outcome.

        Raises:
            AssertionError: when a promise is not kept.
        """
        agenda, pop = self._agenda, heapq.heappop
        while agenda and self.outcome is None:
            self.now, number, action, args = pop(agenda)
            if self.now > DEADLINE or number > MAX_EVENTS:
                raise Violation(f"no end after {self.now:.1f} s and {number} events; {self._situation()}")
            try:
                action(*args)
            except CoordinatorDies:
                self._kill_coordinator()
            except NobodyKnows:
                self.met["strayed and nobody knows"] += 1
                return states.Failed("nobody is left who knows better")
        if self.outcome is None:
            raise Violation(f"everybody waits; {self._situation()}")
        if self._paper.kept is None or self._paper.kept.over is None:
            self.promises.on_end(self.outcome, self.state)
        return self.outcome

    def _at(self, delay: float, action: Callable[..., None], *args: Any) -> None:
        self._at_time(self.now + delay, action, *args)

    def _at_time(self, moment: float, action: Callable[..., None], *args: Any) -> None:
        self._count += 1
        heapq.heappush(self._agenda, (moment, self._count, action, args))

    def delay(self) -> float:
        """Seconds that a message or a piece of work takes: usually few, now and then ten times as many."""
        chance = self.random()
        return 0.02 * chance if chance < 0.9 else 0.2 * self.random()

    def _say(self, text: str) -> None:
        if self.trace is not None:
            self.trace(f"{self.now:8.4f}  {text}")

    def _situation(self) -> str:
        waits = [f"{w} v{w.version} g{w.generation} at {w.position}" for w in self._workers if w.alive]
        current, live = self.state.generation, self.state.roster.ranks
        return f"generation {current.number}, live {live}, pause {current.pause}; {waits}"

    # ------------------------------------------------------------------ the network, as the workers see it

    def send(self, worker: SimulatedWorker, message: Any) -> None:
        if not isinstance(message, states.Joined):
            worker.member.record_sent(message)
        if isinstance(message, messages.Arrive):
            self.promises.on_arrival(worker, message)
        if worker.process in self._cut or worker.connection != self._paper.epoch:
            return
        if (
            isinstance(message, messages.Losses)
            and self._follow_ups
            and self.random() < 0.05
            and worker in self._victims()
        ):
            self._follow_ups -= 1  # the losses are gone, the gradients are not
            self._break(worker)
            return
        self._up[worker.process] = arrival = max(self._up[worker.process], self.now + self.delay())
        self._at_time(arrival, self._on_message, worker, message, self._paper.epoch)
        if self.duplicates and self.random() < (0.6 if isinstance(message, messages.Report) else 0.2):
            # At once, or so late that it is outdated.
            again = arrival if self.random() < 0.5 else arrival + 5 * self.delay()
            self._at_time(again, self._on_message, worker, message, self._paper.epoch, True)

    def tell(self, worker: SimulatedWorker, what: str, step: int, value: Any) -> None:
        self.promises.on_exchange(worker)
        self._at(self.delay(), self._arrive, (worker.generation, what, step, worker.rank), value)
        if what == "W" and self._follow_ups and self.random() < 0.05:
            self._follow_ups -= 1  # some are REDUCED, some are not
            self._at(self.delay(), self._fault)

    def entered(self, worker: SimulatedWorker) -> None:
        self.promises.on_entry(worker)

    def in_hook(self, worker: SimulatedWorker, place: tuple[str, int]) -> None:
        self.met["hook"] += 1
        self._in_hooks[worker, place] += 1
        if self._in_hooks[worker, place] > 1:
            raise Violation(f"{worker} runs the hook {place} twice")
        if self._follow_ups and self.random() < 0.2:
            self._follow_ups -= 1
            self._at(self.delay(), self._fault)

    def left_in_hook(self, worker: SimulatedWorker) -> None:
        self.met["left in a hook"] += 1
        siblings = [self.promises.acting(worker.generation, rank) for rank in worker.positions.siblings(worker.rank)]
        live, up = self.state.roster.live, self._is_up
        is_lost = worker.rank not in live  # its coordinator died as it said so
        gone = [
            one
            for one in siblings
            if not one.alive
            or one.is_left_in_hook
            or one.rank not in live
            or (up and self._connections.get(one.rank) is not one)
            or worker.broken
            or (min(worker.rank, one.rank), max(worker.rank, one.rank)) in self._cuts
        ]
        if not gone and not is_lost:
            raise Violation(f"{worker} is left in a hook, and {siblings} are there")

    def position_cut(self, worker: SimulatedWorker) -> None:
        siblings = worker.positions.siblings(worker.rank)
        for other in self._workers:
            if other.uncut and other.alive and other.rank in siblings and not other.position_is_cut:
                other.position_is_cut = True
                self._at(0.0, self._poke, other)

    def begins(self, worker: SimulatedWorker, step: int) -> None:
        if self.state.generation.becomes and worker.generation == self.state.generation.number:
            raise Violation(f"worker {worker.rank} begins step {step} while layers are under way")
        self.promises.on_begin(worker, step)

    def applied(self, worker: SimulatedWorker, step: int, gradient: int, shared: Sums) -> None:
        if (worker.column, step) not in self.promises.applied and self._follow_ups and self.random() < 0.2:
            self._follow_ups -= 1  # the first of its stage, before the others
            self._at(self.delay() * 0.5, self._fault)
        self.promises.on_applied(worker, step, gradient, self.state.steps.summed if self._is_up else step + 1)
        self.promises.on_shared(worker, step, shared, self.shares)

    # ------------------------------------------------------------------ the threads of writers, and the disk

    def begins_saves(self, worker: SimulatedWorker, holders: tuple[int, ...], again: bool) -> None:
        self.met["save"] += 1
        self.met["save asked for again"] += again
        self.promises.on_saves_begun(worker, holders, again)

    def takes_up(self, worker: SimulatedWorker, status: messages.SaveStatus) -> None:
        self.met["save complete"] += not any(status.failures)
        self.met["save given up"] += any(status.failures)
        self.met["save without a name"] += bool(status.unnamed)
        self.promises.on_saves_over(worker, status)

    def names(self, worker: SimulatedWorker, batch: int, index: int) -> None:
        """A whole file gets its name, from the writer or the leader."""
        self._say(f"{worker} names file {index} of batch {batch}")
        self.promises.on_named(worker, batch, index)

    def writes(self, worker: SimulatedWorker, batch: int, index: int) -> None:
        """The thread of ``worker`` begins to write a file."""
        self._at(5 * self._saving.random() * self.delay(), self._announces, worker, batch, index)

    def _announces(self, worker: SimulatedWorker, batch: int, index: int) -> None:
        if self._saving.random() < 0.15:
            self.send(worker, messages.SaveEnded(worker.rank, batch, index, messages.SaveFailure("no part", False)))
            self._next_file(worker, batch, index)
            return
        number = worker.questions = worker.questions + 1
        self.send(worker, messages.SaveAnnounced(worker.rank, number, batch, index, f"temporary {batch}.{index}"))
        if self._follow_ups and self._saving.random() < 0.2:
            self._follow_ups -= 1  # around the moment at which the file counts
            self._at(self._saving.random() * 0.06, self._break, worker)
        self._names_when_confirmed(worker, number, batch, index)

    def _names_when_confirmed(self, worker: SimulatedWorker, number: int, batch: int, index: int) -> None:
        if not worker.alive or self.outcome is not None:
            return
        if worker.member.confirmed_query < number or self.now < worker.frozen:
            self._at(0.01 + self.delay(), self._names_when_confirmed, worker, number, batch, index)
            return
        self.names(worker, batch, index)
        self._at(self.delay(), self._ends_file, worker, batch, index)

    def _ends_file(self, worker: SimulatedWorker, batch: int, index: int) -> None:
        if worker.alive:
            self.send(worker, messages.SaveEnded(worker.rank, batch, index))
            self._next_file(worker, batch, index)

    def _next_file(self, worker: SimulatedWorker, batch: int, index: int) -> None:
        if index == 0:
            self.writes(worker, batch, 1)
            return
        worker.is_writing = False
        self._poke(worker)

    def has(self, worker: SimulatedWorker, fact: Fact) -> bool:
        """Whether ``fact`` has arrived at ``worker``."""
        return fact in self.facts and worker.rank not in self._held_back.get(fact, ())

    def _arrive(self, fact: Fact, value: Any) -> None:
        self.facts[fact] = value
        if self._cuts and fact[1] != "doorbell":  # that goes through the coordinator
            self._held_back[fact] = {rank for pair in self._cuts if fact[3] in pair for rank in pair} - {fact[3]}
        self._wake(fact)

    def _wake(self, fact: Fact) -> None:
        """Wakes the workers that waited for ``fact``, which has arrived."""
        held_back = self._held_back.get(fact, ())
        waiters = self._waiters.pop(fact, [])
        if later := [waiter for waiter in waiters if waiter[0].rank in held_back]:
            self._waiters[fact] = later
        for worker, missing in waiters:
            if worker.rank in held_back:
                continue
            missing.discard(fact)
            if worker.waiting is missing and not missing:
                if self.random() < 0.3:  # a peer may have noticed long before
                    worker.late = True
                    self._at(self.delay(), self._notice, worker, missing)
                else:
                    self._poke(worker)

    def _notice(self, worker: SimulatedWorker, missing: set[Fact]) -> None:
        if worker.waiting is missing:
            worker.late = False
            self._poke(worker)

    # ------------------------------------------------------------------ a worker's threads

    def _start(self, rank: int, joins: bool) -> SimulatedWorker:
        self._processes += 1
        worker = SimulatedWorker(self, rank, self._processes, joins)
        worker.connection = self._paper.epoch
        self._workers.append(worker)
        self._connections[rank] = worker
        self._at(0.0, self._advance, worker, None)
        return worker

    def _advance(self, worker: SimulatedWorker, error: type[Exception] | None) -> None:
        """Runs the main thread until it waits again."""
        if not worker.alive:
            return
        worker.late = False
        worker.waiting = None
        if worker.rank in self.state.roster.live:
            self._progressed = self.now
        try:
            wait = next(worker.thread) if error is None else worker.thread.throw(error())
        except StopIteration:
            self._end_if_told()
            return
        except Dies:
            self._say(f"{worker} dies in the middle")
            self._die(worker)
            return
        if isinstance(wait, float):
            alarm: set[Fact] = {(-1, "alarm", 0, 0)}
            worker.waiting, worker.interruptible = alarm, False
            self._at(wait, self._ring, worker, alarm)
            return
        worker.waiting = wait
        if isinstance(wait, set):
            for fact in wait:
                self._waiters.setdefault(fact, []).append((worker, wait))
            if worker.broken:
                self._poke(worker)
            if self._cuts and any(fact[1] == "connects" for fact in wait):
                self._at(CONNECTING, self._end_connecting, worker, wait)

    def _ring(self, worker: SimulatedWorker, alarm: set[Fact]) -> None:
        alarm.clear()
        self._poke(worker)

    def _poke(self, worker: SimulatedWorker) -> None:
        """Lets the main thread go on if there is a reason to."""
        wait = worker.waiting
        if wait is None or not worker.alive or self.now < worker.frozen or self.now < worker.stuck:
            return
        if isinstance(wait, set):
            ended = worker.position_is_cut if worker.uncut else worker.is_interrupted
            self.met["hook goes on"] += worker.uncut and worker.is_interrupted and not ended
            if worker.interruptible and (ended or (wait and self._is_broken(worker, wait))):
                worker.interruptible = False
                self._advance(worker, CommunicationError)
            elif not wait and not worker.late:
                self._advance(worker, None)
        elif wait():
            self._advance(worker, None)
        elif worker.interruptible and worker.is_interrupted:
            self._advance(worker, Interrupted)

    def _is_broken(self, worker: SimulatedWorker, missing: set[Fact]) -> bool:
        return bool(worker.broken) and any(fact[3] in worker.broken for fact in missing)

    def _receive(self, worker: SimulatedWorker, message: Any, epoch: int) -> None:
        if not worker.alive or worker.process in self._cut or epoch != worker.connection or self.now > worker.deaf:
            return
        if self.now < worker.frozen:
            worker.unread.append(message)
            return
        if message == STOP:
            worker.alive = False
            self._end_if_told()
            return
        self.promises.on_heard(worker, message)
        worker.receive(message)
        self._poke(worker)

    def _thaw(self, worker: SimulatedWorker) -> None:
        """It reads what has come, also if its main thread is stuck: later messages do not overtake earlier ones."""
        if self.now < worker.frozen:
            return
        unread, worker.unread = worker.unread, []
        for message in unread:
            self._receive(worker, message, worker.connection)
        self._poke(worker)

    # ------------------------------------------------------------------ the coordinator's shell

    def _on_message(self, worker: SimulatedWorker, message: Any, epoch: int, repeated: bool = False) -> None:
        if epoch != self._paper.epoch or self._is_down:
            return
        if self._connections.get(worker.rank) is worker and worker.process not in self._cut:
            if self.state.returned is not None:
                self._deferred.append((worker, message))
                return
            self._burn()
            # A connection repeats nothing, so what is said of repeated messages holds for the state machine alone.
            if not repeated and (why := objection(self.state, worker.rank, message)):
                raise Violation(f"worker {worker.rank} would lose its connection for {message}: {why}")
            self._handle(message)

    def _handle(self, event: Any, is_planned: bool = False) -> None:
        if self._is_down:
            return
        if self.trace is not None:
            self._say(f"{event}")
        was_over, was_returning = self.state.outcome is not None, self.state.returned is not None
        state, commands = membership.transition(self.state, event)
        if not is_planned and self._is_plan_late(commands):
            self.met["held"] += 1
            self._at_coordinator(self.delay() * 4, self._handle, event, True)
            return
        self.state = state
        if was_over:
            return
        self._burn()
        self._write_down()
        if self.state.outcome is not None:
            self._told_at_the_end = self.state.outcome
        self._burn()
        has_revived = was_returning and self.state.returned is None
        dismissed = {one.rank for one in commands if isinstance(one, states.Record) and one.kind == "dismissed"}
        for rank in dismissed:
            if rank in self._connections and self._connections[rank].strayed is None:
                raise Violation(f"{self._connections[rank]} is evicted, and has the values of the others")
        for worker in self._connections.values():
            is_known = worker.strayed is None or worker.strayed >= self.state.steps.version or worker.rank in dismissed
            if worker.alive and not is_known and not self.older_peers(worker):
                raise NobodyKnows
        live = self.state.roster.live
        ranks = [command.rank for command in commands if isinstance(command, states.Evict) and command.rank in live]
        if evicted := [rank for rank in ranks if rank not in dismissed]:
            self.met["evicted"] += len(evicted)
            if isinstance(event, messages.Raised) or has_revived:
                self.met["evicted after an exception"] += 1
            elif isinstance(event, messages.Disputed):
                self.met["evicted after an error"] += evicted == [event.rank]
            else:
                self.promises.on_evictions(evicted, self.state)
        for command in commands:
            if isinstance(command, states.Record) and command.kind == "revived":
                self.promises.on_all_returned(self.state)
            judged = command.message if isinstance(command, states.Send) else None
            is_raised = isinstance(event, messages.Raised) or has_revived
            is_in = (
                isinstance(command, states.Evict) and command.rank in state.roster.live
            )  # others go with their position
            if isinstance(command, states.Evict) and is_in and is_raised and command.rank not in dismissed:
                self.promises.on_verdict(self._raised_by(command.rank, event), EVICTED, self.state)
            elif isinstance(command, states.Send) and isinstance(judged, messages.Judged):
                self.promises.on_verdict(self._raised_by(command.ranks[0], event), judged, self.state)
        for command in commands:
            if isinstance(command, states.Send):
                message = command.message
                if isinstance(message, messages.Resume):
                    self._linked_by = (message.roster, self._plans.get(message.roster, self._usual))
                    message = replace(message, program=self._linked_by)
                elif command.schedule is not None:
                    message = replace(message, program=command.schedule)
                if not isinstance(message, messages.Judged | messages.MembershipConfirmed):
                    self.promises.on_message(command.ranks, message, self.state)
                self._follow_up(message)
                self._post_all(command.ranks, message)
            elif isinstance(command, states.Resend):
                self.met[f"{type(command.message).__name__} told again"] += bool(command.ranks)
                self.promises.on_message_again(command.message)
                self._post_all(command.ranks, command.message)
            elif isinstance(command, states.StartGrace):
                self._at_coordinator(GRACE, self._handle, states.GraceElapsed(command.generation, "reset"))
            elif isinstance(command, states.Evict):
                continue
            elif isinstance(command, states.Record):
                self._record(command)
            else:
                self._say(f"outcome: {command}")
                self._burn()
                self.outcome = command
        for command in commands:
            if isinstance(command, states.Evict) and command.rank in self._connections:
                self._burn()
                self._gone(self._connections[command.rank], command.cause)
        if self.outcome is None:
            self.promises.on_event(self.state)
        if has_revived:
            deferred, self._deferred = self._deferred, []
            for worker, message in deferred:
                self._on_message(worker, message, self._paper.epoch)

    def _is_plan_late(self, commands: Iterable[Any]) -> bool:
        """Whether the plan of the generation that is about to go on is still being made."""
        resumes = any(isinstance(c, states.Send) and isinstance(c.message, messages.Resume) for c in commands)
        return resumes and self._planning is not None and self._planning.random() < 0.5

    def _raised_by(self, rank: int, event: Any) -> messages.Raised:
        """What ``rank`` raised: ``event``, or what it said when it returned."""
        if isinstance(event, messages.Raised):
            return event
        said = self._connections[rank].member.report_return(**NOBODY).raised
        assert said is not None
        return said

    def _post_all(self, ranks: Iterable[int], message: Any) -> None:
        for rank in ranks:
            if rank in self._connections:
                self._burn()
                self._post(self._connections[rank], message)

    def _at_coordinator(self, delay: float, action: Callable[..., None], *args: Any) -> None:
        """What the coordinator does after a while, if it is still the same."""
        self._at(delay, self._of_epoch, self._paper.epoch, action, *args)

    def _of_epoch(self, epoch: int, action: Callable[..., None], *args: Any) -> None:
        if epoch == self._paper.epoch and not self._is_down:
            action(*args)

    # ------------------------------------------------------------------ the coordinator is killed

    def _light_coordinators_fuse(self) -> None:
        if self._kills_left and not self._coordinator_fuse:
            self._kills_left -= 1
            self._coordinator_fuse = self._kills.randrange(1, 14)

    @property
    def _is_up(self) -> bool:
        """Whether there is a coordinator, and it knows what it has to; one that finds the end written down does not."""
        return not self._is_down and self.state.returned is None and self.state.outcome is None

    def _burn(self) -> None:
        """It does something, and may be killed right before."""
        if self._coordinator_fuse:
            self._coordinator_fuse -= 1
            if not self._coordinator_fuse:
                raise CoordinatorDies

    def _write_down(self) -> None:
        written = journal_entry(self.state)
        if written != self._paper.kept:
            ends, self._paper.kept = self._paper.kept is None or self._paper.kept.over is None, written
            if ends and written is not None and written.over is not None:  # a successor knows of the end only
                self.promises.on_end(self.state.outcome, self.state)
            holders = {rank: self._connections[rank] for rank in self.state.roster.ranks if rank in self._connections}
            self._paper.processes = {rank: messages.Process(str(one.process), 0, "") for rank, one in holders.items()}

    def _kill_coordinator(self) -> None:
        self._say("the coordinator is killed")
        self.met["coordinator killed"] += 1
        if self.state.returned is not None:
            self.met["coordinator killed again"] += 1
        if self.state.generation.pause is not None:
            self.met["coordinator killed during a pause"] += 1
        self._is_down = True
        self._deferred = []
        for worker in self._workers:  # what it has said may still arrive, or not
            worker.deaf = self.now + self._kills.random() * 0.03
        self._at(self._kills.random() * 0.3, self._start_coordinator)

    def _start_coordinator(self) -> None:
        self._paper.epoch += 1
        self._is_down = False
        self._say(f"coordinator {self._paper.epoch} begins with {self._paper.kept}")
        self._readmission = Readmission(self._paper, self.grid, self._options, self.now, self.members)
        self.state = self._readmission.state()
        self._connections.clear()
        self._plans.clear()
        self.promises.on_revival()
        if self.state.generation.number < 0:
            self._at_coordinator(LAST_HOLDER_SILENCE, self._end_start)
        for worker in self._workers:
            if worker.alive and worker.process not in self._cut:
                self._at(0.03 + self.delay(), self._return, worker, self._paper.epoch)
        if self._kills_left and self._kills.random() < 0.5:
            self._light_coordinators_fuse()
        self._at_coordinator(SILENCE / 8, self._await_return)
        self._end_if_told()

    def _returned(self, worker: SimulatedWorker) -> messages.Returned:
        process = messages.Process(str(worker.process), 0, incarnation=int(worker.joins))
        return worker.member.report_return(process=process, run="a run", joining=worker.joins)

    def _return(self, worker: SimulatedWorker, epoch: int) -> None:
        """A worker has found the coordinator."""
        if not worker.alive or worker.process in self._cut or epoch != self._paper.epoch:
            return
        if self._is_down:
            return  # the next one comes soon
        if self.now < worker.frozen:
            self._at(worker.frozen - self.now, self._return, worker, epoch)
            return
        worker.connection, worker.deaf = epoch, float("inf")
        worker.unread = []
        said = self._returned(worker)
        arrival = self._up[worker.process] = self.now + self.delay()
        self._at_time(arrival, self._on_return, worker, said, epoch)

    def _on_return(self, worker: SimulatedWorker, said: messages.Returned, epoch: int) -> None:
        if not worker.alive or worker.process in self._cut or epoch != self._paper.epoch or self._is_down:
            return
        self._burn()
        if self.state.outcome is not None:
            over = self._paper.kept and self._paper.kept.over
            assert over is not None
            if over.answer is not None and said.next_collective <= over.answer.number:
                self.met["the end told again"] += 1
                self._post(worker, over.answer)
            self._post(worker, STOP)
            return
        place = self._readmission.judge(self.state, self._connections.keys(), said)
        self._say(f"{worker} returns: {place.value}")
        if place in (ReturnStanding.LEFT, ReturnStanding.LOST):
            self.met[f"{place.name} returns"] += 1
            self._post(worker, STOP)
            return
        self._connections[worker.rank] = worker
        self._readmission.heard(self.now)
        if place is ReturnStanding.MEMBER:
            self._handle(said)
            return
        self.met[f"{place.name} returns"] += 1
        if place is ReturnStanding.STARTER:
            self._handle(states.Joined(worker.rank))
        for event in chain(*membership.returned_events(said)):
            self._handle(event)

    def _end_start(self) -> None:
        """Who has not joined by now is not waited for."""
        for rank in sorted(self.state.roster.live - self.state.roster.joined):
            if self.state.generation.number < 0:
                self._handle(states.Lost(rank, "it did not start"))

    def _await_return(self) -> None:
        if not any(worker.alive for worker in self._workers):
            self.met["deserted"] += 1
            self._connections.clear()
            self.outcome = states.StageLost(0, {})
            return
        for rank, cause in self._readmission.late(self.now, self.state).items():
            self.met["did not return"] += 1
            if rank in self.state.roster.live:
                self._handle(states.Lost(rank, cause))
        if self.state.outcome is None and self.state.returned is not None:
            self._at_coordinator(SILENCE / 8, self._await_return)

    def _end_if_told(self) -> None:
        """The run is over when all who can know how it ended do."""
        if self._told_at_the_end is not None and not self._is_down:
            kept = {one.token for one in self._paper.processes.values()}
            if all(w.done or not w.alive or w.process in self._cut for w in self._workers if str(w.process) in kept):
                self.outcome = self._told_at_the_end

    def _replan(self, number: int, seconds: float) -> None:
        """Begins to make plan ``number`` for the current workers, which takes ``seconds``."""
        if self.state.generation.number >= 0 and not self._is_down:
            self._at_coordinator(seconds, self._adopt, self.state.roster.ranks, number)

    def _adopt(self, roster: tuple[int, ...], number: int) -> None:
        self._plans[roster] = number
        self._handle(states.PlanReady(roster, (roster, number), {}, self._reconnects((roster, number))))

    def _move_layers(self) -> None:
        """The layers are to lie in another way: as a user wants, or as the planner does for the current workers."""
        if self.state.generation.number >= 0 and not self._is_down:
            parts = range(1, first_layout(self.grid)[-1])
            cuts = (0, *sorted(self._layouts.sample(parts, self.grid.stages - 1)), parts.stop)
            roster = self.state.roster.ranks if self._layouts.random() < 0.5 else ()
            self._at_coordinator(self.delay(), self._handle, states.LayoutReady(roster, cuts))

    def _reconnects(self, schedule: Schedule) -> bool:
        """Whether ``schedule`` needs connections that those who run do not have."""
        if self.meshed or self._linked_by[0] != schedule[0]:
            return False
        linked = (partial(linked_with, self.state.positions, plan) for plan in (schedule, self._linked_by))
        return not all(new <= old for new, old in zip(*(map(link, schedule[0]) for link in linked), strict=True))

    def _post(self, worker: SimulatedWorker, message: Any) -> None:
        self._down[worker.process] = arrival = max(self._down[worker.process], self.now + self.delay())
        self._at_time(arrival, self._receive, worker, message, self._paper.epoch)
        if self.duplicates and self.random() < 0.05 and message != STOP:
            self._at_time(arrival, self._receive, worker, message, self._paper.epoch)

    def _record(self, record: states.Record) -> None:
        self._say(f"{record}")
        self.met[record.kind] += 1
        self.promises.on_record(record, self.state)
        if record.kind in ("left", "released") and record.rank is not None:
            worker = self._connections.pop(record.rank, None)
            if worker is not None:
                self._post(worker, STOP)
            elif record.kind != "released":  # the siblings of one that is lost may have yet to return
                raise Violation(f"rank {record.rank} has {record.kind}, and nobody is there")
        if record.kind in ("left", "failure", "released"):
            self._at(self.random() * 0.3, self._fill)

    def _gone(self, worker: SimulatedWorker, cause: str) -> None:
        """The coordinator knows that the process is dead, or wants it to be."""
        if self._is_down:
            return
        if self._connections.get(worker.rank) is not worker:
            return
        del self._connections[worker.rank]
        if worker.alive:  # killed; if out of reach, it ends when it sees its connection close
            if self.random() < 0.5:
                self._end(worker)
            else:
                self._post(worker, STOP)
        if self.state.generation.pause is not None:
            self.met["loss during a pause"] += 1
        if any(other.alive and other.member.plans for other in self._workers):
            self.met["loss during a change of plan"] += 1
        is_candidate = worker.rank not in self.state.roster.live
        self._handle(states.Lost(worker.rank, cause))
        if is_candidate:
            self.met["candidate lost"] += 1
            self._at(self.random() * 0.3, self._fill)

    def _fill(self) -> None:
        """Starts a process for an empty position."""
        vacant = [rank for rank in self.state.vacant if rank not in self._connections]
        if self.outcome is not None or self.state.generation.number < 0 or not vacant or not self._spawns_left:
            return
        if self._is_down or self.state.returned is not None:
            self._at(0.1, self._fill)
            return
        self._spawns_left -= 1
        rank = self.chance.choice(vacant)
        self._start(rank, joins=True)

    # ------------------------------------------------------------------ faults

    def _victims(self) -> list[SimulatedWorker]:
        """The workers that a fault may hit; seldom the last one that holds its stage."""
        alive = [w for w in self._workers if w.alive and self._connections.get(w.rank) is w]
        if self.random() < 0.1:
            return alive
        holders: dict[int, int] = defaultdict(int)
        for worker in alive:
            holders[worker.column] += worker.has_state
        return [w for w in alive if holders[w.column] > w.has_state]

    def _fault(self) -> None:
        kind = self.chance.choice(FAULTS)
        if kind == "node":
            pipeline = self.chance.randrange(self.grid.lanes)
            for worker in list(self._victims()):
                if self.state.positions.pipeline(worker.rank) == pipeline:
                    self._crash(worker)
            return
        victims = self._victims()
        if not victims:
            return
        worker = self.chance.choice(victims)
        self._say(f"fault: {kind} {worker}")
        if kind == "crash":
            self._crash(worker)
        elif kind == "fuse":
            worker.fuse = self.chance.randrange(1, 12)
        elif kind == "break":
            self._break(worker)
        elif kind in ("freeze", "stick"):
            seconds = self.random() * 2 * SILENCE
            if kind == "freeze":
                worker.frozen = self.now + seconds
            else:
                worker.stuck = self.now + seconds
            self._at(seconds, self._thaw, worker)
            if seconds > SILENCE:
                self._at_coordinator(SILENCE, self._gone, worker, "it was silent")
        elif kind == "disturb":
            self._disturb(worker, self.chance.choice(victims))
        elif worker.position or worker.rank in self.state.roster.joining:
            worker.ask_to_leave()

    def _follow_up(self, message: Any) -> None:
        """Now and then the next fault comes while one is being dealt with."""
        if isinstance(message, messages.Resume):
            for rank in message.donors:
                if self._mishaps.random() < 0.1 and rank in self._connections:
                    self._connections[rank].mishap = self._mishaps.randrange(1, 4)
            decision = message.decision
            self.met["adoption"] += len(decision.adoptions)
            self.met["ahead"] += bool(decision.ahead)
            self.met["stranger"] += bool(message.strangers)
            if message.becomes:
                self.met["layers under way"] += 1
                if self._layouts.random() < 0.3:
                    self._at(self.delay() * 4, self._fault)
            self.met["loss computed again"] += len(decision.ahead) == self.state.positions.columns
            of_stage = Counter(column // self.members for column in decision.ahead)
            self.met["a stage ahead in part"] += any(count < self.members for count in of_stage.values())
            if message.donors and self._follow_ups and self.random() < 0.5:
                self._follow_ups -= 1
                joiner, donor = self.chance.choice(list(message.donors.items()))
                who = "donor" if self.random() < 0.5 else "joiner"
                victim = self._connections.get(donor if who == "donor" else joiner)
                if victim is not None:
                    self.met[f"{who} hit"] += 1
                    self._at(self.delay() * 3, self._crash_if_alive, victim)
        elif isinstance(message, messages.Boundary) and message.program is not None:
            if self._follow_ups and self.random() < 0.5:
                self._follow_ups -= 1
                self._at(self.delay() * 2, self._fault)
        elif isinstance(message, messages.Regroup) and self._follow_ups and self.random() < 0.3:
            self._follow_ups -= 1
            self._at(self.delay(), self._fault)

    def _crash_if_alive(self, worker: SimulatedWorker) -> None:
        if worker.alive and worker in self._victims():
            self._crash(worker)

    def _crash(self, worker: SimulatedWorker) -> None:
        self._say(f"{worker} crashes")
        self._die(worker)

    def _die(self, worker: SimulatedWorker) -> None:
        """Its exit is seen at once, or only its closed connection, after its last messages or instead of them."""
        self._end(worker)
        if self.random() < 0.3:
            self._cut.add(worker.process)
        seen = max(self._up[worker.process], self.now) + self.delay()
        self._at_time(seen, self._of_epoch, self._paper.epoch, self._gone, worker, "it died")

    def _end(self, worker: SimulatedWorker) -> None:
        worker.alive = False
        if self.random() < 0.5:  # with its host: what was in flight is lost
            place = (worker.generation, worker.rank)
            self._agenda[:] = [e for e in self._agenda if e[2] != self._arrive or (e[3][0][0], e[3][0][3]) != place]
            heapq.heapify(self._agenda)
        for other in self._workers:
            if other.alive and worker.rank in other.roster:
                self._at(self.delay(), self._reset, other, worker.rank, other.generation)

    def _reset(self, worker: SimulatedWorker, rank: int, generation: int) -> None:
        """A worker notices that its connection to another one is gone."""
        if worker.generation == generation:
            worker.broken.add(rank)
            self._poke(worker)

    def _break(self, worker: SimulatedWorker) -> None:
        """The connection to the coordinator is lost, with what is in flight; those to the others hold."""
        self._cut.add(worker.process)
        self._at_coordinator(self.delay(), self._gone, worker, "its connection broke")
        self._at(self.delay() * 3, self._lose_coordinator, worker)

    def _lose_coordinator(self, worker: SimulatedWorker) -> None:
        if worker.alive:
            self._end(worker)

    def _disturb(self, one: SimulatedWorker, other: SimulatedWorker) -> None:
        """The connection between two live workers breaks."""
        if self._disturbances_left and one is not other and one.generation == other.generation >= 0:
            self._disturbances_left -= 1
            if self.random() < 0.3:  # nobody noticed, but everybody waits
                self._handle(states.GraceElapsed(self.state.generation.number, "reset"))
                return
            self._reset(one, other.rank, one.generation)
            self._reset(other, one.rank, one.generation)

    # ------------------------------------------------------------------ exceptions

    def _mishap(self) -> None:
        """A worker raises, soon, an exception that a fault of its machine may explain."""
        alive = [w for w in self._workers if w.alive and self._connections.get(w.rank) is w]
        if alive:
            worker = self._mishaps.choice(alive)
            worker.mishap, worker.loses_device = self._mishaps.randrange(1, 8), self._mishaps.random() < 0.25
            self._say(f"fault: {worker} raises after {worker.mishap} actions")

    def is_wrong(self, step: int) -> bool:
        return step in self._wrong

    def may_speculate(self, worker: SimulatedWorker) -> bool:
        return self._speculations.random() < 0.7

    def has_checks(self, step: int) -> bool:
        return step in self._checked and not self.whole

    def errs(self, worker: SimulatedWorker, step: int) -> bool:
        """Whether what it hands on in this attempt is wrong, which it will find out."""
        assert self._checking is not None
        often = 0.1 if self.state.generation.number == 0 else 0.3
        if len(self.state.holders(worker.column)) < 2 or self._checking.random() > often:
            return False
        self._say(f"fault: {worker} computes step {step} wrong")
        self.met["computed wrong"] += 1
        self._spoiled.add((worker.generation, step))
        return True

    def is_spoiled(self, worker: SimulatedWorker, step: int) -> bool:
        return (worker.generation, step) in self._spoiled

    def strays(self, worker: SimulatedWorker, step: int) -> bool:
        """Whether it has other values than the others from ``step`` on: one of the newest, beside an older peer."""
        if self._straying is None or not worker.joins or self._straying.random() > 0.5:
            return False
        if not self.older_peers(worker) or any(w.strayed is not None for w in self._workers if w.alive):
            return False
        since = self.state.roster.newcomers
        if since[worker.rank] < max(since.values()):
            return False
        self._say(f"fault: {worker} has other values after step {step}")
        self.met["strayed"] += 1
        return True

    def miscopies(self, worker: SimulatedWorker) -> bool:
        """Whether what it has got with its state is not what its donor has."""
        if self._straying is None or self._straying.random() > 0.2:
            return False
        self._say(f"fault: {worker} holds something else than its donor")
        self.met["miscopied"] += 1
        return True

    def older_peers(self, worker: SimulatedWorker) -> list[SimulatedWorker]:
        """Live workers that have been there for longer, one of which may have given ``worker`` its state."""
        since = self.state.roster.newcomers
        peers = [w for w in self._connections.values() if w.alive and w.column == worker.column and w.has_state]
        return [w for w in peers if since.get(w.rank, -1) < since.get(worker.rank, -1)]

    def spoil(self, worker: SimulatedWorker, step: int) -> None:
        self._spoiled.add((worker.generation, step))

    def has_bug(self, worker: SimulatedWorker, step: int) -> bool:
        return (worker.stage, step) == self._bug

    # ------------------------------------------------------------------ stopping early

    def wants_stop(self, worker: SimulatedWorker, point: int) -> bool:
        return point >= self._wishes.get(worker.rank, point + 1)

    def may_stop(self, worker: SimulatedWorker, point: int) -> bool:
        return self.promises.on_stop(worker, point)

    # ------------------------------------------------------------------ links that are cut

    def _cut_link(self) -> None:
        """Nothing passes any more between two positions, and nobody is told."""
        ranks = sorted(self.state.roster.live)
        if len(ranks) < 2:
            return
        low, high = sorted(self._links.sample(ranks, 2))
        replaceable = any(len(self.state.holding(self.state.positions.stage(rank))) > 1 for rank in (low, high))
        if not replaceable and self._links.random() < 0.9:
            return
        self._cuts[low, high] = self._links.choice(((low, high), (low, high), (low,), (high,)))
        seconds = self._links.random() * 1.5 if self._links.random() < 0.4 else None
        self._say(f"fault: no link between {low} and {high}, {'forever' if seconds is None else f'for {seconds} s'}")
        self.met["cut"] += 1
        if seconds is not None:
            self._at(seconds, self._heal_link, (low, high))
        self._at(DEADLOCK, self._judge)

    def _heal_link(self, pair: states.Pair) -> None:
        if self._cuts.pop(pair, None) is None:
            return
        self.met["healed"] += 1
        for fact, held_back in list(self._held_back.items()):
            if fact[3] in pair:
                held_back.difference_update(pair)
                self._wake(fact)

    def unreachable(self, worker: SimulatedWorker) -> tuple[int, ...]:
        found = [
            pair for pair, finders in self._cuts.items() if worker.rank in finders and worker.linked.issuperset(pair)
        ]
        self.promises.broken_pairs[worker.generation].update(found)
        return tuple(sorted({rank for pair in found for rank in pair} & worker.linked - {worker.rank}))

    def _end_connecting(self, worker: SimulatedWorker, missing: set[Fact]) -> None:
        """Connecting has taken too long; if others are not there yet, it gets more time."""
        if worker.waiting is missing:
            worker.broken.update(fact[3] for fact in missing if worker.rank in self._held_back.get(fact, ()))
            self._poke(worker)
            self._at(CONNECTING, self._end_connecting, worker, missing)

    def _judge(self) -> None:
        """Checks, while a link is cut, whether everybody waits."""
        if not self._cuts:
            return
        try:  # the coordinator may be killed meanwhile
            if self.now - self._progressed > DEADLOCK and self.state.generation.number >= 0:
                deaf = [worker for worker in self._workers if worker.uncut and worker.rank in self.state.roster.live]
                if not self.state.generation.regrouping:
                    self.met["deadlock"] += 1
                    self._handle(states.GraceElapsed(self.state.generation.number, "reset"))
                elif deaf:  # its siblings and it cannot reach each other
                    self._gone(deaf[0], "it still waits though a generation was announced")
        finally:
            self._at(DEADLOCK / 4, self._judge)


def check_histories(seeds: Iterable[int], **options: Any) -> Counter[str]:
    """Runs the histories of ``seeds``; returns in how many each kind of event was met.

    Args:
        seeds: the numbers of the histories.
        **options: those of :class:`Run`.

    Raises:
        Violation: with the seed, when a promise is not kept.
    """
    met: Counter[str] = Counter()
    for seed in seeds:
        run = Run(seed, **options)
        try:
            met[type(run.run()).__name__] += 1
        except Exception as error:
            raise Violation(f"history {seed}: {type(error).__name__}: {error}") from error
        met["stopped at once"] += run.promises.stopped_at_once
        met.update(kind for kind, times in run.met.items() if times)
    return met


if __name__ == "__main__":
    options: Any = {name: int(value or 1) for name, _, value in (word.partition("=") for word in sys.argv[2:])}
    Run(int(sys.argv[1]), trace=print, **options).run()
