"""The membership state machine against simulated workers, in random orders of delivery, with random crashes.

A simulated worker behaves like the executor: it computes its part of a step as soon as its neighbours have, reduces
when its peers have, steps when the loss is known, drops everything when a generation is announced, reports, connects,
does what the decision says, and goes on. Messages of one connection stay in order; everything else may happen in any
order. A history is a seed: it chooses, again and again, one of the things that can happen next, now and then a crash.
After a while the crashes stop, and the run has to end in bounded time.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from lightning_recycle.control.protocol.membership import transition
from lightning_recycle.control.protocol.messages import (
    Answer,
    Applied,
    Arrive,
    Broken,
    Commit,
    Committed,
    Losses,
    Regroup,
    Report,
    Resume,
    StepLoss,
)
from lightning_recycle.control.protocol.recovery import WorkerStatus
from lightning_recycle.control.protocol.state import (
    RESULT,
    Finished,
    GraceElapsed,
    Joined,
    Lost,
    Record,
    Send,
    StageLost,
    StartGrace,
    initial_state,
    stage_leads,
)
from lightning_recycle.planning.grid import Grid

STEPS = 3
EVENTS = 600  # of a history, before the crashes stop
PATIENCE = 6000  # events after the last crash within which the run must end

Choice = Callable[[], None]


@dataclass
class Simulated:
    """One worker and its connection. ``thread`` is its main thread: it yields what it waits for."""

    rank: int
    stage: int
    up: deque[Any] = field(default_factory=deque)
    down: deque[Any] = field(default_factory=deque)
    alive: bool = True
    generation: int = -1
    roster: tuple[int, ...] = ()
    version: int = 0
    reduced: bool = False
    payload: Any = None
    resume: Resume | None = None
    committed: Committed | None = None
    answer: Answer | None = None
    losses: dict[int, float] = field(default_factory=dict)
    applied: list[Any] = field(default_factory=list)
    thread: Iterator[Callable[[], bool]] = field(default_factory=lambda: iter(()))
    waits_for: Callable[[], bool] | None = None
    finished: bool = False


class Simulation:
    """A run: the state machine, its workers, and what has been promised so far.

    Args:
        grid: of the run; one micro-batch per pipeline.
        crashes: how many workers may crash.
        overlapping: whether one may crash while others still recover from an earlier crash.
        commits: whether a stage asks all others before it steps, as with ``staggered=False`` or global-norm clipping.
    """

    def __init__(self, grid: Grid, crashes: int, *, overlapping: bool, commits: bool) -> None:
        self.grid = grid
        self.crashes_left = crashes
        self.overlapping = overlapping
        self.commits = commits
        self.state = initial_state(grid)
        self.workers = {r: Simulated(r, grid.worker(r).stage) for r in range(grid.num_workers)}
        self.graces: list[int] = []
        self.rosters: dict[int, tuple[int, ...]] = {}
        self.resumed: dict[int, Resume] = {}
        self.completed: list[int] = []
        self.answered: list[int] = []
        self.summed: list[int] = []
        self.facts: set[tuple[Any, ...]] = set()  # what has left a worker for others: it arrives even if that dies
        for worker in self.workers.values():
            worker.up.append(Joined(worker.rank))

    # ------------------------------------------------------------------ the coordinator

    def handle(self, event: Any) -> None:
        self.state, commands = transition(self.state, event)
        for command in commands:
            if isinstance(command, Send):
                self.check(command)
                for rank in command.ranks:
                    self.workers[rank].down.append(command.message)
            elif isinstance(command, StartGrace):
                self.graces.append(command.generation)
            elif isinstance(command, Record) and command.kind == "step":
                self.completed.append(command.step)

    def check(self, command: Send) -> None:
        message = command.message
        assert command.ranks == self.state.roster, "some live worker is not told"
        if isinstance(message, Regroup):
            assert message.generation not in self.rosters, "a generation began twice"
            self.rosters[message.generation] = message.roster
        elif isinstance(message, Resume):
            assert message.generation not in self.resumed, "a generation was resumed twice"
            assert message.roster == self.rosters[message.generation] == command.ranks
            self.resumed[message.generation] = message
        elif isinstance(message, Committed):
            assert message.payloads.keys() == set(range(self.grid.stages))
        elif isinstance(message, Answer):
            self.answered.append(message.number)
            assert message.payloads.keys() == set(command.ranks)
        elif isinstance(message, StepLoss):
            self.summed.append(message.step)
            assert message.loss == sum(range(self.grid.pipelines)) / self.grid.pipelines + message.step

    # ------------------------------------------------------------------ what can happen next

    def choices(self) -> list[Choice]:
        found: list[Choice] = []
        for worker in self.workers.values():
            if worker.up:
                found.append(lambda w=worker: self.handle(w.up.popleft()))
            if worker.alive and worker.down:
                found.append(lambda w=worker: self.receive(w, w.down.popleft()))
            if worker.alive and worker.waits_for is not None and worker.waits_for():
                found.append(lambda w=worker: self.proceed(w))
        found += [lambda g=g: self.elapse(g) for g in self.graces]
        return found

    def elapse(self, generation: int) -> None:
        self.graces.remove(generation)
        self.handle(GraceElapsed(generation, "reset"))

    def victims(self) -> list[Simulated]:
        if not self.crashes_left or not (self.overlapping or self.undisturbed()):
            return []
        return [w for w in self.workers.values() if w.alive]

    def undisturbed(self) -> bool:
        """Whether every earlier failure is dealt with by every survivor."""
        alive = [w for w in self.workers.values() if w.alive]
        recovered = all(("recovered", self.state.generation, w.rank) in self.facts for w in alive)
        return recovered and {w.rank for w in alive} == self.state.live and not self.state.regrouping

    def crash(self, worker: Simulated) -> None:
        self.crashes_left -= 1
        worker.alive = False
        worker.up.append(Lost(worker.rank, "crashed"))  # its last words may still be on the way

    # ------------------------------------------------------------------ a worker's two threads

    def receive(self, worker: Simulated, message: Any) -> None:
        match message:
            case Regroup():
                worker.generation, worker.roster, worker.resume = message.generation, message.roster, None
                status = WorkerStatus(worker.stage, worker.version, worker.reduced)
                worker.up.append(Report(worker.rank, message.generation, status, worker.payload))
                worker.thread = self.main(worker)
                self.proceed(worker)
            case Resume():
                worker.resume = message if message.generation == worker.generation else worker.resume
            case Committed():
                worker.committed = message
            case Answer():
                worker.answer = message
            case StepLoss():
                worker.losses[message.step] = message.loss

    def proceed(self, worker: Simulated) -> None:
        worker.waits_for = next(worker.thread, None)

    def together(self, worker: Simulated, stage: int | None = None) -> list[Simulated]:
        """The workers of the generation, or those of one stage."""
        return [w for rank in worker.roster if (w := self.workers[rank]).stage == stage or stage is None]

    def all_did(self, worker: Simulated, what: str, *where: Any, stage: int | None = None) -> Callable[[], bool]:
        """Whether all of the generation, or of one stage of it, have done something."""
        return lambda: all(
            (what, worker.generation, w.rank, *where) in self.facts for w in self.together(worker, stage)
        )

    def tell(self, worker: Simulated, what: str, *where: Any) -> None:
        self.facts.add((what, worker.generation, worker.rank, *where))

    def main(self, worker: Simulated) -> Iterator[Callable[[], bool]]:
        """Executor.regroup, and then run_step again and again."""
        yield lambda: worker.resume is not None
        resume = worker.resume
        assert resume is not None
        self.tell(worker, "connecting")
        everybody = self.all_did(worker, "connecting")
        a_peer_is_gone = lambda: any(not w.alive for w in self.together(worker))  # noqa: E731
        yield lambda: everybody() or a_peer_is_gone()
        if not everybody():
            worker.up.append(Broken(worker.rank, worker.generation, "connection reset"))
            yield lambda: False
        version = resume.decision.version
        yield from self.catch_up(worker, resume)
        if worker.version > version:
            assert not self.commits, "there is no shadow: no stage may have applied before all others could"
            yield from self.program(worker, version)
        assert worker.version - version in (0, 1)
        assert worker.stage in resume.decision.ahead or (worker.version, worker.reduced) == (version, False)
        self.tell(worker, "recovered")
        while worker.version < STEPS:
            yield from self.program(worker, worker.version)
        yield from self.deliver(worker)

    def catch_up(self, worker: Simulated, resume: Resume) -> Iterator[Callable[[], bool]]:
        """As Executor._catch_up."""
        version = resume.decision.version
        adoptions = [a for a in resume.decision.adoptions if a.stage == worker.stage]
        for adoption in adoptions:
            if adoption.step == version and worker.version < version:
                yield from self.apply(worker, resume.commits)
            if worker.rank == adoption.donor:
                holds = worker.version == adoption.step + 1 or (worker.version == adoption.step and worker.reduced)
                assert holds, "it gives what it does not have"
                self.tell(worker, "gave", adoption.step)
            donor = adoption.donor
            yield lambda donor=donor, step=adoption.step: ("gave", worker.generation, donor, step) in self.facts
            if worker.version == adoption.step and not worker.reduced:
                worker.reduced, worker.payload = True, f"{worker.stage}/{adoption.step}"
        if adoptions:
            self.tell(worker, "adopted")
            yield self.all_did(worker, "adopted", stage=worker.stage)
        if worker.version < version:
            yield from self.apply(worker, resume.commits)

    def program(self, worker: Simulated, step: int) -> Iterator[Callable[[], bool]]:
        """As Executor._run_program: forwards come from the stage before, input gradients from the stage after."""
        done = step < worker.version or worker.reduced
        assert worker.version - step in (0, 1), "it computes with parameters that it does not have"
        if worker.stage > 0:
            yield self.all_did(worker, "forward", step, stage=worker.stage - 1)
        self.tell(worker, "forward", step)
        if worker.stage < self.grid.stages - 1:
            yield self.all_did(worker, "backward", step, stage=worker.stage + 1)
        else:
            peers = [w.rank for w in self.together(worker, worker.stage)]
            mine = [m for m in range(self.grid.pipelines) if peers[m % len(peers)] == worker.rank]
            worker.up.append(Losses(worker.rank, step, {m: float(m + step) for m in mine}))
            yield lambda: True
        self.tell(worker, "backward", step)
        if not done:
            yield self.all_did(worker, "backward", step, stage=worker.stage)
            worker.reduced, worker.payload = True, f"{worker.stage}/{step}"
            yield lambda: True
        if step == worker.version:
            payloads: Any = {}
            if self.commits:
                worker.up.append(Commit(worker.rank, worker.generation, step, worker.payload))
                place = (worker.generation, step)
                yield (
                    lambda: (
                        worker.committed is not None and (worker.committed.generation, worker.committed.step) == place
                    )
                )
                assert worker.committed is not None
                payloads = worker.committed.payloads
            yield from self.apply(worker, payloads)

    def apply(self, worker: Simulated, payloads: Any) -> Iterator[Callable[[], bool]]:
        assert worker.reduced, "it applies a gradient that it does not hold"
        step = worker.version
        yield lambda: step in worker.losses
        worker.applied.append(dict(payloads) if self.commits else step)
        worker.version, worker.reduced, worker.payload = step + 1, False, None
        worker.up.append(Applied(worker.rank, step, {}))

    def deliver(self, worker: Simulated) -> Iterator[Callable[[], bool]]:
        """Each worker's result collective; asked again when a stage's speaker died on the way."""
        while not worker.finished:
            speaks = stage_leads(self.grid, worker.roster)[worker.stage] == worker.rank
            number = -1 if worker.answer is None else worker.answer.number
            if ("arrived", worker.rank, number + 1) not in self.facts:
                self.facts.add(("arrived", worker.rank, number + 1))
                part = f"result {worker.stage}" if speaks else None
                worker.up.append(Arrive(worker.rank, number + 1, RESULT, part))
            yield lambda n=number + 1: worker.answer is not None and worker.answer.number == n
            assert worker.answer is not None
            delivered = {self.grid.worker(rank).stage for rank, yes in worker.answer.payloads.items() if yes}
            worker.finished = len(delivered) == self.grid.stages

    # ------------------------------------------------------------------ a whole run

    def run(self, seed: int, crash_rate: float) -> None:
        chance = random.Random(seed)
        for turn in range(EVENTS + PATIENCE):
            rate = crash_rate if self.undisturbed() else 5 * crash_rate  # failures come in clusters
            victims = self.victims() if turn < EVENTS and chance.random() < rate else []
            choices = self.choices()
            if victims:
                self.crash(chance.choice(victims))
            elif self.state.outcome is None and choices:
                chance.choice(choices)()
            else:
                break
        self.check_end()

    def check_end(self) -> None:
        outcome = self.state.outcome
        if isinstance(outcome, StageLost):
            assert outcome.stage not in {self.grid.worker(rank).stage for rank in self.state.live}
            return
        assert isinstance(outcome, Finished), f"no end after the crashes stopped: {outcome}"
        assert self.completed == list(range(STEPS)), "every step is completed once, in order"
        assert self.summed == list(range(STEPS)), "every loss is told once, in order"
        assert self.answered == sorted(set(self.answered)), "a collective was answered twice"
        norms = [{stage: f"{stage}/{step}" for stage in range(self.grid.stages)} for step in range(STEPS)]
        expected: list[Any] = norms if self.commits else list(range(STEPS))
        for rank in self.state.live:
            assert self.workers[rank].applied == expected, f"worker {rank} applied something else than the others"


GRIDS = [Grid(1, 1, 1), Grid(2, 1, 1), Grid(2, 2, 1), Grid(3, 2, 1), Grid(2, 3, 1), Grid(3, 3, 1)]
COMMITS = pytest.mark.parametrize("commits", [False, True], ids=["staggered", "all stages step together"])


def check_histories(grid: Grid, number: int, *, crashes: int, overlapping: bool, commits: bool) -> None:
    """Runs ``number`` histories with up to ``crashes`` crashes at different rates; the error names the seed."""
    for seed in range(number):
        simulation = Simulation(grid, min(crashes, 1 + seed % 4), overlapping=overlapping, commits=commits)
        try:
            simulation.run(seed, crash_rate=(0.005, 0.01, 0.03)[seed % 3])
        except AssertionError as error:
            raise AssertionError(f"history with seed {seed}: {error}") from error


@COMMITS
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_without_crashes_every_order_of_delivery_ends_with_every_step_applied_once(grid: Grid, commits: bool) -> None:
    check_histories(grid, 20, crashes=0, overlapping=False, commits=commits)


@COMMITS
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_crashes_after_complete_recoveries_lose_no_step_and_never_stop_the_run(grid: Grid, commits: bool) -> None:
    check_histories(grid, 60, crashes=4, overlapping=False, commits=commits)


@COMMITS
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_crashes_at_any_time_even_while_recovering_lose_no_step_and_never_stop_the_run(
    grid: Grid, commits: bool
) -> None:
    check_histories(grid, 300, crashes=4, overlapping=True, commits=commits)
