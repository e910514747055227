"""What a run promises, checked against everything that the coordinator says and its workers do.

- No two processes act as one worker of a generation, and only its members act in it.
- A step is applied with every micro-batch once, in order, by all stages or by none; its loss is known before that.
- All workers of a generation run a step under the same schedule, which is made for them and is the newest one.
- All are told the same; a generation is resumed once, a collective answered once, a step counted when all have it.
- A worker that is ready is let in, at a step that nobody has begun; nothing is redone, and no stage loses its last one.
- The leader is a live worker with a state, and stays the leader as long as it lives.
- If some cannot reach each other, the fewest are evicted so that the rest all can, and every stage keeps a holder.
- For an exception that a machine may explain, a worker is evicted only if a peer holds its stage, and in a step one of
  each stage (or those that lost their device). It does the work again only if that is exact. It is the user's own when
  it was raised at the same work before, or when nobody is left to try; what everybody meets always ends the run so.
- Whatever a coordinator was killed in the middle of: no two live members are told different things, and the next one
  says no loss, answer or verdict again that a member has heard, but the same.
- The run ends with every stage's result, with an exception that is the user's own, because nobody holds a stage any
  more, or because all that hold a stage cannot reach a worker that the others need.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from itertools import chain, combinations
from typing import Any

from simulated_workers import SimulatedWorker, full_gradient, loss_of

from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol import state as s
from lightning_recycle.control.protocol.control_collectives import StopPlace, last_point, stop_point
from lightning_recycle.planning.grid import Grid

EVICTED = "evicted"
"""The verdict for a worker that raised; the others are :class:`~lightning_recycle.control.protocol.messages.Judged`."""


NOBODY: dict[str, Any] = {"process": messages.Process("", 0), "run": ""}
"""Whoever asks a member what it would say if it returned."""


class Violation(AssertionError):
    """A promise that was not kept."""


class Promises:
    """Watches one run.

    Args:
        grid: the grid of the run.
        steps: the number of steps that it takes.
        members: the processes that the coordinator is connected to, by rank; kept up to date by the run.
        of_position: the members of each position.
    """

    def __init__(self, grid: Grid, steps: int, members: Mapping[int, SimulatedWorker], of_position: int = 1) -> None:
        self.grid = grid
        self.columns = grid.stages * of_position
        self.of_position = of_position
        self.steps = steps
        self.members = members
        self.full = full_gradient(grid)
        self.applied: dict[tuple[int, int], int] = {}  # (column, step) -> gradient
        # (step, the first of two stages) -> the sums of the layers that they share, by the worker that applied them
        self._shared: defaultdict[tuple[int, int], dict[SimulatedWorker, Any]] = defaultdict(dict)
        self._acting: dict[tuple[int, int], SimulatedWorker] = {}  # (generation, rank) -> the process that acts there
        self._leader = -1
        self._rosters: dict[int, tuple[int, ...]] = {}
        self._revivals = 0
        self._is_revived = False  # since the newest generation
        self._heard: dict[Any, list[tuple[SimulatedWorker, Any]]] = defaultdict(list)  # who heard what
        self._resumed: set[int] = set()
        self._schedules: dict[tuple[int, int], Any] = {}  # (generation, step) -> the schedule that all run
        self._expected: list[tuple[int, int, Any]] = []  # (generation, step, schedule): to be run from that step on
        self._planned: dict[int, int] = {}  # generation -> the boundary at which it began
        self._summed: list[int] = []
        self._completed: list[int] = []
        self._committed: set[int] = set()
        self._answered: set[int] = set()
        self._arrivals: set[tuple[int, int]] = set()  # (process, number)
        self.broken_pairs: dict[int, set[s.Pair]] = defaultdict(set)  # the detected ones, by generation
        self._cannot_be_repaired = False
        self.bug_step = -1  # in which a stage raises, whoever computes it; -1 for none
        # stage, place, version, verdict, rank and generation
        self._raised: list[tuple[int, tuple[int, str], int, Any, tuple[int, int]]] = []
        self._judged: set[tuple[int, int]] = set()  # (rank, generation)
        self._is_own = False
        self.wishes: Mapping[int, int] = {}  # rank -> the stop point from which on it wants to stop training early
        self.min_steps = 0
        self._verdicts: dict[int, bool] = {}  # stop point -> whether all stop there
        self._told_at_verdict = 0  # losses that were told when the first wish was not agreed to
        self._agreed_at = -1  # the stop point at which all know that they stop
        self._stopped_at = -1
        self.stopped_at_once = False
        self._batches: dict[int, tuple[SimulatedWorker, Any]] = {}  # by number, who has begun it last, and how
        self._batches_over: dict[int, Any] = {}  # the version at which its outcome is taken up, and the failures
        self._named: set[tuple[int, int]] = set()  # batch and index of files under their names

    # ------------------------------------------------------------------ what workers save

    def on_saves_begun(self, worker: SimulatedWorker, holders: tuple[int, ...], again: bool) -> None:
        """``worker`` comes to the boundary of a batch."""
        mine = (worker.version, holders, again)
        first, known = self._batches.get(worker.pending, (worker, mine))
        if self._is_gone(first):  # an earlier coordinator may have told it what no other has heard
            known = mine
        self._batches[worker.pending] = (worker, mine)
        if known != mine:
            raise Violation(f"{worker} begins batch {worker.pending} with {mine}, others with {known}")

    def on_saves_over(self, worker: SimulatedWorker, status: messages.SaveStatus) -> None:
        """``worker`` takes up how a batch ended."""
        mine = (worker.version, status.failures)
        known = self._batches_over.setdefault(status.batch, mine)
        if known != mine:
            raise Violation(f"{worker} takes up {mine} of batch {status.batch}, others {known}")
        for index, failure in enumerate(status.failures):
            is_named = (status.batch, index) in self._named
            if failure is not None and is_named:
                raise Violation(f"file {index} of batch {status.batch} is given up, and has its name")
            if failure is None and not is_named and index not in status.unnamed:
                raise Violation(f"file {index} of batch {status.batch} is complete, and has no name")

    def on_named(self, worker: SimulatedWorker, batch: int, index: int) -> None:
        """A file gets its name."""
        self._named.add((batch, index))
        over = self._batches_over.get(batch)
        if over is not None and over[1][index] is not None:
            raise Violation(f"{worker} names file {index} of batch {batch}, which was given up")

    def _is_gone(self, worker: SimulatedWorker) -> bool:
        """Whether ``worker`` is dead, or no member any more, which it may have yet to learn."""
        is_replaced = self.members.get(worker.rank, worker) is not worker
        return not worker.alive or is_replaced or worker.rank not in self._rosters[max(self._rosters)]

    # ------------------------------------------------------------------ what workers do

    def on_entry(self, worker: SimulatedWorker) -> None:
        """``worker`` begins to act in its generation."""
        if worker.rank not in worker.roster:
            raise Violation(f"{worker} acts in generation {worker.generation}, which is without it")
        if self._acting.setdefault((worker.generation, worker.rank), worker) is not worker:
            raise Violation(f"two processes hold position {worker.rank} in generation {worker.generation}")

    def acting(self, generation: int, rank: int) -> SimulatedWorker:
        return self._acting[generation, rank]

    def on_exchange(self, worker: SimulatedWorker) -> None:
        """``worker`` gives others something."""
        actor = self._acting[worker.generation, worker.rank]
        if actor is not worker:
            raise Violation(f"{worker} acts in generation {worker.generation}, instead of {actor}")

    def on_begin(self, worker: SimulatedWorker, step: int) -> None:
        """``worker`` runs ``step``."""
        schedule = self._schedules.setdefault((worker.generation, step), worker.schedule)
        if worker.schedule != schedule:
            raise Violation(f"{worker} runs step {step} under schedule {worker.schedule}, others under {schedule}")
        expected = [s for generation, first, s in self._expected if generation == worker.generation and first <= step]
        if worker.schedule != expected[-1]:
            raise Violation(f"{worker} runs step {step} under schedule {worker.schedule} instead of {expected[-1]}")

    def on_arrival(self, worker: SimulatedWorker, message: messages.Arrive) -> None:
        self._arrivals.add((worker.process, message.number))

    def on_applied(self, worker: SimulatedWorker, step: int, gradient: int, summed: int) -> None:
        if gradient != self.full:
            raise Violation(f"{worker} applies step {step} with micro-batches {gradient:#x} instead of {self.full:#x}")
        if len(worker.parameters) != step:
            raise Violation(f"{worker} applies step {step} to version {len(worker.parameters)}")
        if summed <= step:
            raise Violation(f"{worker} applies step {step}, whose loss is not known")
        self.applied[worker.column, step] = gradient
        for column in range(self.columns):
            if step and (column, step - 1) not in self.applied:
                raise Violation(f"column {worker.column} applies step {step} before column {column} step {step - 1}")

    def on_shared(self, worker: SimulatedWorker, step: int, shared: Mapping[int, Any], expected: bool) -> None:
        """``worker`` applies ``step`` with these sums for layers that its stage shares with a neighbour."""
        pairs = [first for first in (worker.stage - 1, worker.stage) if 0 <= first < self.grid.stages - 1]
        if sorted(shared) != (pairs if expected else []):
            raise Violation(f"{worker} applies step {step} with sums for {sorted(shared)} instead of {pairs}")
        for first, parts in shared.items():
            if {stage for _, stage in parts} != {first, first + 1} or len(parts) != 2:
                raise Violation(f"{worker} applies step {step} with {parts} for the layers of {first} and {first + 1}")
            if self.members.get(worker.rank) is not worker:
                continue  # it was lost before, which it has yet to learn
            applied = self._shared[step, first]
            applied[worker] = parts
            for other, others in applied.items():  # not steps of the lost, or undone speculations
                if others != parts and self.members.get(other.rank) is other and other.version > step:
                    raise Violation(f"{worker} applies step {step} with {parts}, {other} with {others}")

    def _latest_stop(self) -> int:
        """The stop point at which all stop, at the latest, as some wanted to and others did not; -1 if none did."""
        steps = [point // len(StopPlace) for point, agreed in self._verdicts.items() if not agreed]
        if not steps:
            return -1
        # Those that were put together may ask at a point before a step whose loss is told already.
        told = self._told_at_verdict if self.of_position > 1 else 0
        return stop_point(max(min(steps) + 1, told + 1), StopPlace.STEP_END)

    def on_stop(self, worker: SimulatedWorker, point: int) -> bool:
        """``worker`` knows at ``point`` that all stop; returns whether enough steps are done to do so."""
        if self._agreed_at < 0:
            self._agreed_at = point
            first = min(self.wishes.values())
            together = len(self.wishes) == self.grid.lanes * self.columns and len(set(self.wishes.values())) == 1
            if together and point != first:
                raise Violation(f"all stop at {point}, and all wanted to at {first}")
            if not self._verdicts.get(point) and point != self._latest_stop():
                raise Violation(f"all stop at {point} after the verdicts {self._verdicts}")
        if point < self._agreed_at:
            raise Violation(f"{worker} stops at {point}, another one at {self._agreed_at}")
        if worker.version < self.min_steps:
            return False
        if self._stopped_at < 0:
            self.stopped_at_once = point == min(self.wishes.values())
            self._stopped_at, self.steps = point, worker.version
        if point != self._stopped_at:
            raise Violation(f"{worker} stops at {point}, another one at {self._stopped_at}")
        return True

    def on_heard(self, worker: SimulatedWorker, message: Any) -> None:
        """``message`` of the coordinator arrives at ``worker``."""
        match message:
            case messages.Answer():
                what: Any = ("answer", message.number)
            case messages.StepLoss():
                what = ("loss", message.step)
            case messages.StopVerdict():
                what = ("verdict", message.point)
            case messages.Regroup():
                what = ("generation", message.generation)
            case _:
                return
        for other, heard in self._heard[what]:
            if heard != message and self.members.get(other.rank) is other:
                raise Violation(f"{worker} is told {message}, and {other} was told {heard}")
        self._heard[what].append((worker, message))

    def _heard_by(self, workers: Collection[SimulatedWorker], kind: str) -> set[int]:
        """The numbers of what some of ``workers`` have heard."""
        heard = ((number, who) for (what, number), who in self._heard.items() if what == kind)
        return {number for number, who in heard if any(worker in workers for worker, _ in who)}

    # ------------------------------------------------------------------ what the coordinator says

    def on_revival(self) -> None:
        """Another coordinator begins."""
        self._revivals += 1
        self._is_revived = True

    def on_all_returned(self, state: s.MembershipState) -> None:
        """All have returned: what no member has heard is as if it had not been said.

        Siblings of one that did not return may still be connected, but are members no more.
        """
        there = {worker for rank, worker in self.members.items() if rank in state.roster.live}
        losses, answers = self._heard_by(there, "loss"), self._heard_by(there, "answer")
        losses |= {worker.version - 1 for worker in there if worker.has_state}
        self._summed = [step for step in self._summed if step <= max(losses, default=-1)]
        self._answered = {number for number in self._answered if number <= max(answers, default=-1)}
        unjudged = (worker.member.report_return(**NOBODY).raised for worker in there)
        waiting = {(raised.rank, raised.generation) for raised in unjudged if raised is not None}
        self._raised = [one for one in self._raised if one[4] not in waiting]
        self._judged -= waiting

    def on_message(self, ranks: tuple[int, ...], message: Any, state: s.MembershipState) -> None:
        if isinstance(message, messages.HookEntered):
            if set(ranks) != state.positions.all_members(ranks[:1]) or not state.roster.live.issuperset(ranks):
                raise Violation(f"{message} goes to {ranks}")
            return
        if set(ranks) != state.roster.live:
            raise Violation(f"{message} goes to {ranks} instead of {state.roster.ranks}")
        members = [worker for rank in ranks if (worker := self.members.get(rank)) is not None]
        match message:
            case messages.Regroup():
                self._check_regroup(message)
            case messages.Resume():
                self._check_resume(message)
            case messages.Answer():
                self._check_answer(message, members, state)
            case messages.StepLoss():
                losses = [loss_of(message.step, m) for m in range(self.grid.global_microbatches)]
                if message.loss != sum(losses) / len(losses):
                    raise Violation(f"the loss of step {message.step} is told as {message.loss}")
                self._summed.append(message.step)
            case messages.Committed():
                again = message.step in self._committed  # a step that is done again, and that a stage has settled
                self._committed.add(message.step)
                for worker in members:
                    if not again and worker.alive and worker.version <= message.step and not worker.reduced:
                        raise Violation(f"step {message.step} is committed before {worker} is reduced")
            case messages.Boundary():
                for worker in members:
                    if worker.generation == message.generation and worker.member.begun >= message.step:
                        raise Violation(
                            f"{worker} has begun step {worker.member.begun}; all are to stop at {message.step}"
                        )
                if message.program is not None:
                    self._expected.append((message.generation, message.step, message.program))
            case messages.StopVerdict():
                self._check_stop_verdict(message)
            case messages.Pause() if state.generation.regrouping:
                raise Violation("a pause in the middle of a regroup")

    def on_message_again(self, message: Any) -> None:
        """A revived coordinator repeats ``message``. A verdict that was written down may be told here first."""
        if isinstance(message, messages.StopVerdict):
            self._check_stop_verdict(message)

    def _check_stop_verdict(self, message: messages.StopVerdict) -> None:
        if not message.agreed and all(self._verdicts.values()):
            self._told_at_verdict = len(self._summed)
        if self._verdicts.setdefault(message.point, message.agreed) != message.agreed:
            raise Violation(f"workers are told different verdicts about stop point {message.point}")

    def _check_regroup(self, message: messages.Regroup) -> None:
        newest = max(self._rosters, default=-1)
        # A killed coordinator may have written down some that nobody has heard of.
        if message.generation <= newest or (message.generation > newest + 1 and not self._is_revived):
            raise Violation(f"generation {message.generation} after {newest}")
        self._is_revived = False
        self._rosters[message.generation] = message.roster
        if message.leader not in message.roster:
            raise Violation(f"rank {message.leader} leads generation {message.generation} without being in it")
        old = self._acting.get((newest, self._leader))
        lives = old is not None and self.members.get(old.rank) is old and old.rank in message.roster
        if old is not None and lives and old.has_state and message.leader != old.rank:
            raise Violation(f"{old} lives, and rank {message.leader} takes the lead from it")
        self._leader = message.leader

    def _check_resume(self, message: messages.Resume) -> None:
        if message.generation in self._resumed or message.roster != self._rosters[message.generation]:
            raise Violation(f"generation {message.generation} is resumed twice, or with another roster")
        self._resumed.add(message.generation)
        if self._leader in message.donors:
            raise Violation(f"rank {self._leader} leads generation {message.generation} without a state")
        if message.commits:
            self._committed.add(message.decision.version - 1)
        self._expected.append((message.generation, 0, message.program))
        if message.generation in self._planned:
            boundary, decision = self._planned[message.generation], message.decision
            if decision.version != boundary or decision.ahead or decision.adoptions:
                raise Violation(f"all stopped at step {boundary}, and yet they have to do {decision}")
        for rank, donor in message.donors.items():
            giver = self.members.get(donor)
            if donor not in message.roster or donor % self.columns != rank % self.columns:
                raise Violation(f"rank {rank} is to get the state of rank {donor}")
            if giver is not None and not giver.has_state:
                raise Violation(f"rank {rank} is to get the state of {giver}, which has none")

    def _check_answer(self, message: messages.Answer, members: list[SimulatedWorker], state: s.MembershipState) -> None:
        if message.number in self._answered:
            raise Violation(f"collective {message.number} is answered twice")
        self._answered.add(message.number)
        if message.payloads.keys() != state.roster.live:
            raise Violation(f"collective {message.number} is answered with the parts of {sorted(message.payloads)}")
        if message.leader not in message.payloads:
            raise Violation(f"rank {message.leader} speaks for collective {message.number} without a part in it")
        for worker in members:
            if worker.rank in state.roster.live and (worker.process, message.number) not in self._arrivals:
                raise Violation(f"collective {message.number} is answered without {worker}")

    def on_evictions(self, evicted: Collection[int], state: s.MembershipState) -> None:
        """``evicted`` are evicted for the broken pairs of ``state``."""
        if not state.generation.broken_pairs <= self.broken_pairs[state.generation.number]:
            raise Violation(f"{evicted} are evicted for {state.generation.broken_pairs}, and nobody found that out")
        possible = smallest_repairs(state.generation.broken_pairs, state)
        if set(evicted) not in possible:
            raise Violation(f"{evicted} are evicted for {state.generation.broken_pairs} instead of one of {possible}")

    def on_verdict(self, raised: messages.Raised, verdict: Any, state: s.MembershipState) -> None:
        """``verdict`` follows from what a worker ``raised``."""
        stage, place = state.positions.stage(raised.rank), (raised.step, raised.operation)
        peers = state.holding(stage, without={raised.rank})
        of_stage = [(other, version, done) for of, other, version, done, _ in self._raised if of == stage]
        before = [done for _, version, done in of_stage if version == state.steps.version]
        used_up = (
            sum(other == place for other, _, _ in of_stage) >= state.faults.retries
            or len(before) > state.faults.retries
        )
        can_repeat = raised.exact and not raised.sticky
        self._raised.append((stage, place, state.steps.version, verdict, (raised.rank, raised.generation)))
        if (raised.rank, raised.generation) in self._judged:
            raise Violation(f"{raised} is judged twice")
        self._judged.add((raised.rank, raised.generation))
        if raised.rank in state.roster.joining:
            if verdict != EVICTED:
                raise Violation(f"{raised}, and nobody needs this worker yet")
        elif verdict == EVICTED:
            if not peers:
                raise Violation(f"rank {raised.rank} is evicted for {raised}, and nobody else holds its stage")
            if used_up or (EVICTED in before and not raised.sticky):
                raise Violation(f"one more worker of stage {stage} is evicted for {raised} after {of_stage}")
        elif verdict.own:
            self._is_own = True
            if state.has_resumed and not used_up and ((peers and not before) or can_repeat):
                raise Violation(f"{raised} counts as the user's own, and somebody can try again")
        elif used_up or not can_repeat or (peers and not before):
            raise Violation(f"rank {raised.rank} is to do again what raised {raised}")

    def on_record(self, record: s.Record, state: s.MembershipState) -> None:
        if record.kind in ("step", "failure"):
            self._cannot_be_repaired = False
        if record.kind == "disturbance" and "broken_pairs" in record.details:
            places = record.details["broken_pairs"]
            ranks = {state.positions.place(rank): rank for rank in range(state.positions.num_workers)}
            pairs = [(ranks[one], ranks[other]) for one, other in places]
            self._check_irreparable(pairs, state)
        if record.kind == "paused":
            self._planned[state.generation.number] = record.step
        elif record.kind == "step":
            if not (self._revivals and record.step in self._completed):  # the next coordinator counts some again
                self._completed.append(record.step)
            for rank in state.roster.ranks:
                worker = self.members.get(rank)
                if worker is not None and worker.has_state and worker.version <= record.step:
                    raise Violation(f"step {record.step} is counted before {worker} has applied it")
        elif record.kind == "revived":
            # It says how many steps are done. That of a step whose news was still on its way when its coordinator was
            # killed is among them, and not told again: workers keep what they said of their newest two.
            self._completed += [step for step in range(record.step) if step not in self._completed]
        elif record.kind == "left" and record.rank is not None:
            stage, gone = state.positions.stage(record.rank), state.positions.all_members({record.rank})
            holders = {w.rank for w in self.members.values() if w.stage == stage and w.has_state} - gone
            if not state.positions.whole(holders & state.roster.live):
                raise Violation(f"worker {record.rank} is let go, and nobody else holds stage {stage}")

    def _check_irreparable(self, pairs: Collection[s.Pair], state: s.MembershipState) -> None:
        if possible := smallest_repairs(pairs, state):
            raise Violation(f"the pairs {pairs} cannot reach each other, and none of {possible} is evicted")
        self._cannot_be_repaired = True

    def on_event(self, state: s.MembershipState) -> None:
        """Called after every event, as long as the run goes on."""
        if not state.roster.joining <= state.roster.live:
            raise Violation(f"{sorted(state.roster.joining)} join without being live")
        if state.generation.pause is not None and state.generation.regrouping:
            raise Violation("a pause in the middle of a regroup")
        if state.roster.ready & state.roster.live:
            raise Violation(f"{sorted(state.roster.ready & state.roster.live)} are members and wait to be let in")
        busy = (
            state.generation.number < 0
            or state.generation.regrouping
            or state.roster.joining
            or state.generation.pause is not None
            or state.generation.becomes
        )
        if not busy and state.positions.whole(state.roster.ready):
            raise Violation(f"{sorted(state.roster.ready)} wait to be let in, and nobody is asked to stop")

    def on_end(self, outcome: Any, state: s.MembershipState) -> None:
        if isinstance(outcome, s.StageLost):
            holders = [w for w in self.members.values() if w.stage == outcome.stage and w.has_state]
            holders = [w for w in holders if not w.is_left_in_hook and not w.uncut]
            if len({w.member.hook_count for w in holders}) > 1:
                return  # they are not in the same hook
            if {w.column for w in holders} == self._columns_of(outcome.stage) and self._can_go_on(holders, state):
                raise Violation(f"stage {outcome.stage} is given up although {holders} hold it")
            return
        if isinstance(outcome, s.Ended):
            held = {tuple(self.members[rank].parameters) for rank in state.roster.live if rank in self.members}
            if held - {(self.full,) * state.steps.version} or (
                state.steps.version == 0 and state.generation.number >= 0
            ):
                raise Violation(f"the run ends after {state.steps.version} steps, and workers have saved {held}")
            return
        if isinstance(outcome, s.Failed):
            pairs = [pair for pair in state.generation.broken_pairs if state.roster.live.issuperset(pair)]
            if pairs:  # and it does not end for what the eviction of one has brought to light
                self._check_irreparable(pairs, state)
            if self._cannot_be_repaired:
                return
            strayed = [w for w in self.members.values() if w.strayed is not None and w.rank in state.roster.live]
            if any(not state.holding(w.stage, without={w.rank}) for w in strayed):
                return  # nobody else holds its stage
        if isinstance(outcome, s.Crashed) and self._is_own:
            return
        if isinstance(outcome, s.Finished) and 0 <= self.bug_step < self.steps:
            raise Violation("the run finished though a stage cannot compute one of its steps")
        if not isinstance(outcome, s.Finished):
            raise Violation(f"the run ended with {outcome}")
        if self._agreed_at < 0 and 0 <= self._latest_stop() <= last_point(self.steps):
            raise Violation(f"the run goes on to its end after the verdicts {self._verdicts}")
        everything = (self.full,) * self.steps
        columns = {rank % self.columns for rank, result in outcome.results.items() if result == everything}
        if len(columns) < self.columns:
            raise Violation(f"the results are {outcome.results}")
        if self._completed != list(range(self.steps)):
            raise Violation(f"the steps counted are {self._completed}")
        told = self._summed
        if self._stopped_at >= 0 and told[-1:] == [
            self.steps
        ]:  # of a step that only workers which were then lost had run
            told = told[:-1]
        if told != list(range(self.steps)):
            raise Violation(f"the losses told are those of steps {told}")
        for rank in state.roster.live:
            worker = self.members.get(rank)
            if worker is not None and tuple(worker.parameters) != everything:
                raise Violation(f"{worker} ends with parameters {worker.parameters}")

    def _columns_of(self, stage: int) -> set[int]:
        return set(range(stage * self.of_position, (stage + 1) * self.of_position))

    def _can_go_on(self, holders: Collection[SimulatedWorker], state: s.MembershipState) -> bool:
        """Whether the best of each column of a stage reach what the others have, or the step before."""
        others = [w for w in self.members.values() if w.rank in state.roster.live and w.has_state]
        best = {w.column: max(o.version + o.reduced for o in holders if o.column == w.column) for w in holders}
        low, most = min(best.values()), max((w.version + w.reduced for w in others), default=0)
        able = {w.column for w in (*holders, *others) if w.version <= low or (w.has_shadow and w.version == low + 1)}
        if self.of_position > 1:  # whether its speculation was right may be forgotten
            able -= {w.column for w in holders if w.speculative}
        return able == set(range(self.columns)) and max(most, *best.values()) - low <= 1


def smallest_repairs(pairs: Collection[s.Pair], state: s.MembershipState) -> list[set[int]]:
    """All sets of the fewest workers without which no broken pair is left and the others can go on."""
    ranks = sorted(set(chain.from_iterable(pairs)))
    positions = state.positions
    for size in range(len(ranks) + 1):
        found = [
            set(evicted)
            for evicted in combinations(ranks, size)
            if all(set(pair) & positions.all_members(evicted) for pair in pairs)
            and all(state.holding(stage, without=evicted) for stage in range(state.positions.grid.stages))
            and _can_recover(state, positions.all_members(evicted))
        ]
        if found:
            return found
    return []


def _can_recover(state: s.MembershipState, evicted: Collection[int]) -> bool:
    """Whether the others' reports are of the same step in all stages, or of adjacent steps."""
    best = [
        max(
            r.status.version + r.status.reduced
            for rank, r in state.generation.reports.items()
            if rank in held.difference(evicted)
        )
        for held in map(state.holders, range(state.positions.columns))
    ]
    return max(best) - min(best) <= 1
