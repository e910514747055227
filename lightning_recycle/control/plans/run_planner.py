"""Plans for a running training, whichever workers have failed.

The coordinator asks here when a generation begins. The fault-free plan is made before the workers start, by the planner
that the user chose. Then plans are made ahead in a thread (:mod:`~lightning_recycle.control.plans.ahead`), one for each
distribution over the stages that the next failure may lead to, and for two more while time and memory last: first by
the heuristic, which takes a second, then by the chosen planner if that is another one, however long it takes. Its
plan for the workers that train now is offered to those who run the heuristic's (:meth:`RunPlanner.take_better`).

A failure gets the plan that is ready, one from the plan library, or the heuristic's, made at once. In a large grid the
heuristic plans in a process of its own (:mod:`~lightning_recycle.control.plans.planning_process`), and the coordinator
asks :meth:`RunPlanner.is_ready` before it asks for a plan: it goes on serving until it is. Costs come from a
profile or, without one, from what the run has measured so far; once a plan for other times is adopted
(:mod:`~lightning_recycle.control.plans.drift`), they are that plan's.

Memory limits every plan: at first the number of micro-batches that fault-free 1F1B holds, then the bytes that the
workers have measured. What runs then is compared with a plan for the memory there is. The library is asked for the same
plans as a planner: whatever fits is used at once, and improved later if it was made for other costs or limits.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from lightning_recycle.control.plans.ahead import PlanningAhead
from lightning_recycle.control.plans.asking import taken
from lightning_recycle.control.plans.needed import PlanInNeed
from lightning_recycle.control.plans.planning_process import PlanningProcess, ProcessLostError
from lightning_recycle.control.plans.ready_plans import ReadyPlan, ReadyPlans
from lightning_recycle.control.plans.searching import search
from lightning_recycle.control.plans.split_choice import Splitting
from lightning_recycle.errors import PlanningError
from lightning_recycle.planning import (
    Costs,
    Grid,
    HeuristicPlanner,
    PlanResult,
    Problem,
    Schedule,
    Technique,
    Worker,
    distribution_of,
    get_planner,
    lower_bound,
    normalize,
    normalized_failures,
    retime,
    solve,
)
from lightning_recycle.planning.costs import cost_difference
from lightning_recycle.planning.heuristic.heuristic_planner import PlannerInTurns
from lightning_recycle.planning.layouts.layout_candidates import Candidate
from lightning_recycle.planning.layouts.technique_selection import TechniqueChoice
from lightning_recycle.planning.library import PlanLibrary
from lightning_recycle.planning.memory import Memory
from lightning_recycle.planning.normalization import distributions, most_in_a_stage, next_failures, usual_limit
from lightning_recycle.planning.profile import Footprint, MemoryLimit, SplitTrial, memory_of
from lightning_recycle.planning.result import proven
from lightning_recycle.planning.routing import alike, representative
from lightning_recycle.planning.timing import Turns

__all__ = ["OperationSeconds", "RunPlanner", "costs_from"]

log = logging.getLogger(__name__)

OperationSeconds: TypeAlias = Mapping[int, Mapping[str, float]]
"""Mean seconds of each kind of operation, by stage and name; empty before the first step."""

_END_SECONDS = 10.0  # for a plan that is not wanted any more to be given up
_SECONDS_FOR_TWO = 20.0  # that planning for two more failures may take; for one there is no bound but memory
_AS_GOOD = 0.001  # of a period: a stored plan that is so near to the lower bound needs no other
_SAME_COSTS = 0.1  # of the mean operation: a plan for costs that differ less is not made again
_APART_FROM = 1_000  # operations: smaller schedules take less time than starting a process and hold up nobody
_QUICK_OPERATIONS = 5_000  # of a schedule that is timed again while the coordinator waits
_MOST_TIMED = 64  # such schedules
_MOVE_SECONDS = 1.0  # for which a move to another stage holds everybody up, roughly
_MOVE_HORIZON = 1000  # steps within which it must pay
_MOVE_GAIN = 0.05  # of the period, at least: measured times are not exact

_Factors: TypeAlias = tuple[tuple[Worker, float], ...]


def costs_from(seconds: OperationSeconds, stages: int) -> Costs:
    """Costs in seconds from measured operations; one slot each while a stage has not measured all of its operations.

    A fused backward (BW) counts as half B, half W.
    """
    needed = ({"F", "B", "W"}, {"F", "BW"})
    if any(not any(names <= seconds.get(stage, {}).keys() for names in needed) for stage in range(stages)):
        return Costs.uniform(stages)

    def of(name: str, fused_share: float = 0.0) -> tuple[float, ...]:
        return tuple(seconds[s].get(name, fused_share * seconds[s].get("BW", 0.0)) for s in range(stages))

    return Costs(of("F"), of("B", 0.5), of("W", 0.5), of("REDUCE"), of("STEP"))


class RunPlanner:
    """Makes the schedules of one run.

    Args:
        grid: the grid of the run.
        planner: a planner or its name.
        technique: what the runtime can do.
        in_flight_limit: the limit per worker; by default :func:`~lightning_recycle.planning.normalization.usual_limit`.
        costs: of the operations, in seconds; measured by default (one slot each before anything is measured).
        library: where plans are looked for and stored.
        memory: what may be used of a worker's device, see :class:`~lightning_recycle.ReCycleStrategy`; with
            ``in_flight_limit`` only that counts.
        recompute: whether forwards may be computed again where memory makes a plan slow.
        chooses_split: whether plans split backwards only where that is faster by what the workers have tried; else as
            ``technique`` says, as always with a ``library``, whose plans are of one technique.
        apart_from: number of operations of a schedule from which on the heuristic plans in a process of its own.

    Attributes:
        source: where the newest plan is from; see :class:`~lightning_recycle.control.plans.ready_plans.ReadyPlan`.
        on_better: called from another thread when :meth:`take_better` has something, or a plan :meth:`is_ready`.
    """

    def __init__(
        self,
        grid: Grid,
        planner: Any,
        technique: Technique,
        in_flight_limit: int | None = None,
        costs: Costs | None = None,
        library: PlanLibrary | None = None,
        memory: MemoryLimit = "auto",
        recompute: bool = True,
        apart_from: int = _APART_FROM,
        chooses_split: bool = False,
    ) -> None:
        self.source = ""
        self.on_better: Callable[[], None] = lambda: None
        self._grid = grid
        self._planner = planner
        self._chosen = get_planner(planner)
        self._quick = self._chosen if isinstance(self._chosen, HeuristicPlanner) else HeuristicPlanner()
        self._technique = technique
        self._splitting = None
        if chooses_split and library is None and grid.stages == 1:
            self._technique = replace(technique, decoupled=False)  # one stage has no idle slots
        elif chooses_split and library is None:
            self._splitting = Splitting(grid)
        self._in_flight_limit = in_flight_limit
        self._costs = costs
        self._costs_fused = False  # whether they are of fused backwards
        self._library = library
        self._factors: _Factors = ()
        self._ready = ReadyPlans(grid)
        self._memory_limit, self._recompute = memory, recompute
        self._footprints: Mapping[Worker, Footprint] = {}
        self._assumed: Memory | None = None  # of another layout, until it is measured
        self._turns: tuple[Turns, Turns] | None = None  # see relaid
        self._refused: set[str] = set()  # why there is no plan within memory, as far as it has been said
        self._ahead = PlanningAhead()
        self._better: queue.SimpleQueue[PlanResult] = queue.SimpleQueue()
        large = 3 * grid.global_microbatches * grid.stages >= apart_from
        self._process = PlanningProcess() if large else None
        self._needed: PlanInNeed | None = None
        self._given_up: list[PlanInNeed] = []  # that may not have ended

    def prepare(self) -> None:
        """Makes the fault-free plan, with the planner that the user chose, however long that takes."""
        problem = self._problem(frozenset(), {})
        stored = self._stored(problem)
        self._ready.keep(stored or ReadyPlan(self._made(problem, self._chosen).schedule, "ahead", final=True))

    def is_ready(self, failed: frozenset[Worker], seconds: OperationSeconds) -> bool:
        """Whether :meth:`plan` has its answer at once; if not, the plan is being made, and ``on_better`` is called when
        it is there. Plans for others that were being made are given up.
        """
        problem = self._problem(failed, seconds)
        needed = self._needed
        if needed is not None and needed.serves(problem):
            return needed.is_done
        self._give_up()
        if self._process is None or self._at_hand(problem) is not None:
            return True
        self._ahead.begin(iter(()))  # this one comes first
        self._needed = PlanInNeed(problem, lambda wanted: self._in_need(wanted).schedule, lambda: self.on_better())
        return False

    def plan(self, failed: frozenset[Worker], seconds: OperationSeconds) -> Schedule:
        """The schedule for ``failed``: the one made ahead or stored, or at once the heuristic's."""
        problem = self._problem(failed, seconds)
        needed, self._needed = self._needed, None
        if needed is not None and needed.schedule is not None and needed.serves(problem):
            found: ReadyPlan | None = self._made_in_need(needed.schedule)
        else:
            found = self._at_hand(problem)
        if found is None:
            found = self._made_in_need(self._made(problem, self._quick).schedule)
        self.source = found.source
        return found.schedule

    def _at_hand(self, problem: Problem) -> ReadyPlan | None:
        """The plan that was made ahead, or is stored."""
        found = self._ready.find(problem)
        if found is None or not _keeps_to(found.schedule, problem):
            found = self._stored(problem, needed=True)
            if found is not None:
                self._ready.keep(found)
        return found

    def _made_in_need(self, schedule: Schedule) -> ReadyPlan:
        found = ReadyPlan(schedule, "made", final=self._quick is self._chosen)
        self._ready.keep(found)
        return found

    def adopt(self, schedule: Schedule) -> None:
        """Plans for the times that ``schedule`` assumes from now on, and keeps it as the plan for its workers."""
        problem = schedule.problem
        self._costs, self._factors, self._library = problem.costs, problem.worker_factors, None
        self._costs_fused = not problem.technique.decoupled
        self._ready.keep(ReadyPlan(schedule, "better", final=True))

    def problem(self, failed: frozenset[Worker], seconds: OperationSeconds) -> Problem:
        """What is planned if ``failed`` have failed, and operations take ``seconds``, with the technique of the plan
        that runs.
        """
        problem = self._problem(failed, seconds)
        choice = self.choice(problem)
        if self._splitting is not None and choice is not None and not choice.technique.decoupled:
            return self._splitting.fused(problem)
        return problem

    def relaid(
        self,
        seconds: OperationSeconds,
        chosen: Candidate | None,
        turns: tuple[Turns, Turns] | None,
    ) -> None:
        """The layers lie in another way. What was planned is forgotten.

        Args:
            seconds: what operations take now.
            chosen: the layout with the plan for those who train, if it was chosen. Its memory counts until it is
                measured.
            turns: how micro-batches differ where backwards may be split, and where they are fused; None if they do not.
        """
        self._ahead.begin(iter(()))
        self._ready = ReadyPlans(self._grid)
        self._turns = turns
        self._footprints, self._library, self._assumed = {}, None, None
        if self._costs is not None:
            self._costs = replace(costs_from(seconds, self._grid.stages), communication=self._costs.communication)
        if chosen is not None and chosen.problem is not None:
            self._assumed = chosen.problem.memory
            if chosen.judgement is not None and chosen.judgement.schedule is not None:
                schedule = chosen.judgement.schedule.under(chosen.problem)
                self._ready.keep(ReadyPlan(schedule, "better", final=self._quick is self._chosen))

    def measured(self, footprints: Mapping[Worker, Footprint]) -> None:
        """Plans for the memory that these workers have measured, at least one of each stage."""
        self._footprints = dict(footprints)

    def tried(self, trials: Mapping[Worker, SplitTrial]) -> None:
        """Plans from now on by what splitting costs these workers, at least one of each stage, if that is a choice."""
        if self._splitting is not None:
            self._splitting.tried(trials)

    def choice(self, problem: Problem) -> TechniqueChoice | None:
        """The newest choice between split and fused backwards for the failed and slow workers of ``problem``."""
        return None if self._splitting is None else self._splitting.choice(problem)

    def forget(self, workers: Iterable[Worker]) -> None:
        """New processes hold the positions ``workers``: nothing is known of their speed."""
        gone = frozenset(workers)
        self._factors = tuple((worker, factor) for worker, factor in self._factors if worker not in gone)

    @property
    def planner(self) -> Any:
        """The planner that the user chose."""
        return self._planner

    @property
    def improves(self) -> bool:
        """Whether another planner than the one for plans in need may find better ones."""
        return self._quick is not self._chosen

    @property
    def communication(self) -> float:
        """Seconds that a message between neighbouring stages takes, as far as known."""
        return self._costs.communication if self._costs is not None else 0.0

    # ------------------------------------------------------------------ making one plan

    def _problem(self, failed: frozenset[Worker], seconds: OperationSeconds) -> Problem:
        """What is to be planned if ``failed`` have failed."""
        stages = self._grid.stages
        problem = Problem(
            grid=self._grid,
            costs=self._costs or costs_from(seconds, stages),
            failed=failed,
            technique=self._technique,
            worker_factors=tuple((worker, factor) for worker, factor in self._factors if worker not in failed),
        )
        if self._splitting is not None:
            problem = self._splitting.asked(problem, self._fused_stages(seconds))
        if self._in_flight_limit is not None:
            return replace(problem, in_flight_limit=(self._in_flight_limit,) * stages)
        measured = bool(self._footprints) or self._assumed is not None
        limit = usual_limit(self._grid, failed, measured=measured)
        if not self._footprints:
            return replace(problem, in_flight_limit=limit, memory=self._assumed)
        try:
            memory = memory_of(self._grid, failed, self._footprints, self._memory_limit, recompute=self._recompute)
            return replace(problem, in_flight_limit=limit, memory=memory)
        except PlanningError as error:
            if (reason := str(error)) not in self._refused:
                self._refused.add(reason)
                log.warning(
                    "No plan for the failure of %s fits into memory: %s Going on with one micro-batch at a time.",
                    _names(failed),
                    reason,
                )
            return replace(problem, in_flight_limit=(1,) * stages)

    def _fused_stages(self, seconds: OperationSeconds) -> tuple[bool, ...]:
        """For each stage, whether what is known of its backwards is what fused ones take."""
        if self._costs is not None:
            return (self._costs_fused,) * self._grid.stages
        return tuple({"B", "W"} > seconds.get(stage, {}).keys() & {"B", "W"} for stage in range(self._grid.stages))

    def _stored(self, problem: Problem, needed: bool = False) -> ReadyPlan | None:
        """The plan in the library; ``needed``: workers wait for it."""
        library = self._library  # another thread may adopt a plan meanwhile
        if library is None:
            return None
        stored = library.lookup(problem)
        if stored is None:
            failed = ", ".join(map(str, sorted(problem.failed))) or "no failure"
            level = logging.WARNING if needed else logging.INFO
            log.log(level, "The plan library has none for %s: %s.", failed, library.miss(problem))
            return None
        return ReadyPlan(stored.schedule, "library", final=stored.gap <= _AS_GOOD or library.has(problem))

    def _apart(self, problem: Problem, planner: Any, urgent: bool = False) -> PlanResult:
        """The plan of ``planner``, from the planning process if there is one; otherwise, and where that is no use, made
        in this thread.
        """
        if self._process is None:
            return solve(problem, planner)
        try:
            return self._process.solve(problem, planner, urgent=urgent)
        except ProcessLostError as error:
            log.warning("The planning process is no use (%s): planning in a thread of the coordinator.", error)
            return solve(problem, planner)

    def _in_need(self, problem: Problem) -> PlanResult:
        """The plan that workers wait for."""
        return self._made(problem, self._quick, partial(self._apart, urgent=True))

    def _made(
        self,
        problem: Problem,
        planner: Any,
        make: Callable[[Problem, Any], PlanResult] = solve,
        chooses: bool = True,
    ) -> PlanResult:
        """The plan of ``planner``; ``make`` says where it is made, ``chooses``, whether the one with fused backwards if
        that is better.

        Plans of the planner that the user chose are stored in the library, unless it has one as good.
        """
        is_chosen = planner is self._chosen
        if self._turns is not None and isinstance(planner, HeuristicPlanner):
            planner = PlannerInTurns(planner, *self._turns)
        if self._splitting is not None and chooses:
            result = self._splitting.make(problem, lambda wanted: make(wanted, planner))
        else:
            result = make(problem, planner)
        if result.warning is not None:
            log.warning("%s", result.warning)
        library = self._library
        if library is not None and is_chosen:
            try:
                stored = library.get(problem)
                if stored is None or result.schedule.period < stored.period * (1 - _AS_GOOD):
                    library.put(result)
            except PlanningError as error:  # the plan is good, whether it can be stored or not
                log.warning("%s", error)
        return result

    def retime(self, schedule: Schedule, seconds: OperationSeconds) -> Schedule:
        """Returns ``schedule`` with the times that follow from the measured operations."""
        if not seconds:
            return schedule
        problem, measured = schedule.problem, {}
        for stage, by_name in seconds.items():
            lead = min(problem.live_workers(stage))  # the worker that measured them
            factor = problem.factor(lead)
            measured[stage] = {name: value if name == "REDUCE" else value / factor for name, value in by_name.items()}
        return retime(schedule, replace(costs_from(measured, self._grid.stages), communication=self.communication))

    def propose_move(self, failed: frozenset[Worker], vacant: Worker, seconds: OperationSeconds) -> Worker | None:
        """A healthy worker of another stage that should take the position ``vacant``, if there is one.

        There is one if failure normalization prefers the failure in another stage and the shorter period pays for the
        transfer (see ``_MOVE_SECONDS``). Nobody moves before the operations are measured.
        """
        costs = self._costs or costs_from(seconds, self._grid.stages)
        if len(seconds) < self._grid.stages and self._costs is None:
            return None
        actual = distribution_of(self._grid, failed)
        wanted = normalize(
            self._grid,
            costs,
            len(failed),
            technique=self._technique,
            period=self._true_periods(len(failed), costs),
            most=most_in_a_stage(Problem(self._grid, costs, technique=self._technique), len(failed)),
        )
        if wanted[vacant.stage] >= actual[vacant.stage]:
            return None

        def period(gone: frozenset[Worker]) -> float:
            return lower_bound(Problem(self._grid, costs, gone, self._technique))

        movers = {
            worker.stage: worker
            for worker in self._grid.workers()  # the last of each stage: the leader is among the first pipelines
            if worker not in failed and wanted[worker.stage] > actual[worker.stage]
        }
        if not movers:
            return None
        best = min(sorted(movers.values(), reverse=True), key=lambda mover: period(failed - {vacant} | {mover}))
        now = period(failed)
        gain = now - period(failed - {vacant} | {best})
        return best if gain > _MOVE_GAIN * now and gain * _MOVE_HORIZON > _MOVE_SECONDS else None

    def _true_periods(self, failures: int, costs: Costs) -> Callable[[tuple[int, ...]], float] | None:
        """The periods of all distributions of ``failures``, if plans for them are ready and small; else None."""
        if 3 * self._grid.global_microbatches * self._grid.stages > _QUICK_OPERATIONS:
            return None
        periods: dict[tuple[int, ...], float] = {}
        for distribution in distributions(self._grid, failures):
            gone = normalized_failures(self._grid, distribution)
            ready = self._ready.find(Problem(self._grid, costs, gone))
            if ready is None or len(periods) == _MOST_TIMED:
                return None
            periods[distribution] = retime(ready.schedule, costs).period
        return periods.__getitem__

    # ------------------------------------------------------------------ what may come

    def plan_ahead(self, failed: frozenset[Worker], seconds: OperationSeconds, running: Schedule | None = None) -> None:
        """Begins to plan for every failure that may follow ``failed``; replaces an earlier request.

        Args:
            failed: who has failed.
            seconds: what operations took.
            running: what the others run, if a better plan for them is wanted.
        """
        self._ahead.begin(self._plan_ahead(failed, {stage: dict(names) for stage, names in seconds.items()}, running))

    def take_better(self) -> list[PlanResult]:
        """The plans found since the last call for those that were running."""
        return taken(self._better)

    def close(self) -> None:
        """Stops planning ahead: gives up the plan that is being made, and waits until the thread has ended."""
        self._give_up()
        self._ahead.close()
        if self._process is not None:
            self._process.close()
        for given_up in self._given_up:
            given_up.join(_END_SECONDS)

    def _give_up(self) -> None:
        """Nobody waits any more for the plan that is needed."""
        needed, self._needed = self._needed, None
        if needed is not None:
            needed.give_up()
            self._given_up = [*(earlier for earlier in self._given_up if not earlier.join(0.0)), needed]

    def _plan_ahead(
        self, failed: frozenset[Worker], seconds: OperationSeconds, running: Schedule | None
    ) -> Iterator[None]:
        """Makes one plan after the other, in the planning thread."""
        present = self._problem(failed, seconds)
        kept = self._ready.capacity - (running is not None)
        # Another plan for those who train now: at once if theirs does not fit into memory, or it is known since whether
        # it should split backwards.
        fits = running is None or _keeps_to(running, present)
        is_open = running is not None and self._splitting is not None and self._splitting.is_tried
        if not fits or (is_open and self.choice(present) is None):
            fits = False
            self._make_for_present(present)
            yield
        one_more = [self._problem(more, seconds) for more in next_failures(present)]
        for problem in one_more[:kept]:
            self._get_ready(problem)
            yield
        if running is not None and fits and running.problem.memories != present.memories:
            self._make_for_present(present)
            yield
        two_more: dict[Problem, Problem] = {}
        for problem in one_more:
            if len(one_more) + len(two_more) > kept:  # more than can be kept
                break
            for more in next_failures(problem):
                then = self._problem(more, seconds)
                two_more.setdefault(representative(then), then)
        deadline = time.monotonic() + _SECONDS_FOR_TWO
        for number, problem in enumerate(two_more.values()):
            if len(one_more) + number >= kept or time.monotonic() > deadline:
                planned = min(len(one_more), kept) + number
                log.info("Planned ahead for %d distributions of the next failures; there is no room for more.", planned)
                break
            self._get_ready(problem)
            yield
        if self.improves or self._library is not None:
            for problem in [*([] if running is None else [present]), *one_more[:kept]]:
                self._improve(problem, offer=running is not None and problem is present)
                yield

    def _get_ready(self, problem: Problem) -> None:
        """Makes a plan, unless the one that is ready will do."""
        ready = self._ready.find(problem)
        if ready is not None and self._will_do(ready.schedule, problem):
            return
        try:
            found = self._stored(problem)
            if found is None:
                made = self._made(problem, self._quick, self._apart)
                found = ReadyPlan(made.schedule, "ahead", final=not self.improves)
            self._ready.keep(found)
        except Exception as error:  # a failure without a plan gets one at once: this thread must go on
            log.warning("No plan could be made ahead for the failure of %s: %s", _names(problem.failed), error)

    def _will_do(self, schedule: Schedule, problem: Problem) -> bool:
        """Whether ``schedule`` is what planning ``problem`` would lead to, or nearly so."""
        own = schedule.problem if self._splitting is None else self._splitting.origin(schedule.problem)
        return cost_difference(own.costs, problem.costs) <= _SAME_COSTS and alike(
            replace(own, costs=problem.costs), problem
        )

    def _make_for_present(self, problem: Problem) -> None:
        """Makes a plan for those who train now, whose plan is for another memory, or was made before it was known what
        splitting costs, and offers it.
        """
        try:
            found = self._stored(problem)
            if found is not None:
                result = proven(found.schedule, found.source)
            else:
                result = self._made(problem, self._quick, self._apart)
                found = ReadyPlan(result.schedule, "better", final=not self.improves)
        except Exception as error:  # the plan that runs goes on
            log.warning("No plan was found for what was measured: %s", error)
            return
        ready = self._ready.find(problem)
        if ready is None or _replaces(found.schedule, ready.schedule, problem):
            self._ready.keep(found)
        self._offer(result)

    def _offer(self, result: PlanResult) -> None:
        """Offers a plan to those who train now."""
        self._better.put(result)
        self.on_better()

    def _improve(self, problem: Problem, offer: bool) -> None:
        """Asks the planner that the user chose; ``offer``: the plan is for those who train now."""
        ready = self._ready.find(problem)
        if ready is not None and ready.final and self._will_do(ready.schedule, problem):
            return
        chosen = self.choice(problem)
        if chosen is not None and not chosen.technique.decoupled and self._splitting is not None:
            problem = self._splitting.fused(problem)
        try:
            found = self._made(problem, self._chosen, search, chooses=False)
        except Exception as error:  # as above; the heuristic's plan stays
            log.warning("%r found no plan for the failure of %s: %s", self._chosen, _names(problem.failed), error)
            if ready is not None:
                self._ready.keep(replace(ready, final=True))  # it is not asked again
            return
        if ready is not None and not _replaces(found.schedule, ready.schedule, problem):
            self._ready.keep(replace(ready, final=True))
            return
        self._ready.keep(ReadyPlan(found.schedule, "better" if offer else "ahead", final=True))
        if offer:
            self._offer(found)


def _keeps_to(schedule: Schedule, problem: Problem) -> bool:
    """Whether ``schedule`` fits into the memory of ``problem``."""
    return schedule.problem.memories == problem.memories or schedule.fits(problem)


def _shorter(schedule: Schedule, other: Schedule) -> bool:
    """Whether ``schedule`` has a shorter period than ``other`` has under the same costs."""
    return schedule.period < retime(other, schedule.problem.costs).period * (1 - 1e-9)


def _replaces(schedule: Schedule, ready: Schedule, problem: Problem) -> bool:
    """Whether ``schedule``, made for ``problem``, is to be kept instead of the plan that is ready."""
    other_technique = ready.problem.technique != schedule.problem.technique
    return other_technique or not _keeps_to(ready, problem) or _shorter(schedule, ready)


def _names(workers: Iterable[Worker]) -> str:
    return ", ".join(map(str, sorted(workers))) or "nobody"
