"""Provider of plans: for any failed workers the plan that is ready, one that is stored, or one made at once.

Concept: the fault-free plan is made before the workers start, by the planner that the user chose. Then plans are made
ahead, one for each distribution over the stages that the next failure may lead to: first by the heuristic, which takes
a second, then by the chosen planner if that is another one, however long it takes.

A failure gets the plan that is ready, one from the plan library, or the heuristic's, made at once. In a large grid that
takes seconds, so the coordinator asks :meth:`PlanProvider.is_ready` before it asks for a plan: it goes on serving until
it is. The library is asked for the same plans as a planner: whatever fits is used at once, and improved later if it was
made for other costs or limits.

Contract: called from the coordinator's thread; what takes long is a job of the
:class:`~lightning_recycle.control.plans.planning_queue.PlanningQueue`.

Must not know: connections, rosters, what is measured and when.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_recycle.control.plans.assumptions import Assumptions, OperationSeconds, costs_from, names_of
from lightning_recycle.control.plans.plan_maker import PlanMaker, ReadyPlan, ReadyPlans, check_travels
from lightning_recycle.control.plans.planning_queue import Job, PlanningQueue, Urgency
from lightning_recycle.planning.costs import Costs
from lightning_recycle.planning.grid import Grid, Worker
from lightning_recycle.planning.normalization import (
    distribution_of,
    most_in_a_stage,
    next_failures,
    normalize,
)
from lightning_recycle.planning.plan_library import PlanLibrary
from lightning_recycle.planning.planner import get_planner
from lightning_recycle.planning.planning_options import PlanningOptions
from lightning_recycle.planning.problem import Problem, lower_bound
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.planning.timing import retime

log = logging.getLogger(__name__)

_APART_FROM = 1_000  # operations: smaller schedules take less time than starting a process and hold up nobody
_MOVE_SECONDS = 1.0  # for which a move to another stage holds everybody up, roughly
_MOVE_HORIZON = 1000  # steps within which it must pay
_MOVE_GAIN = 0.05  # of the period, at least: measured times are not exact


@dataclass
class _PlanInNeed:
    """The plan for ``problem`` that workers wait for; None if it could not be made."""

    problem: Problem
    is_done: bool = False
    plan: ReadyPlan | None = None

    def serves(self, problem: Problem) -> bool:
        """Whether it is made for the failed and slow workers of ``problem``."""
        own = self.problem
        return (own.failed, own.worker_factors) == (problem.failed, problem.worker_factors)


@dataclass(frozen=True)
class _PlansAhead:
    """The plans that may follow now: two jobs, one after the other.

    The first makes plans by the quick planner, in this order: for the workers that train now, if their plan does not
    fit into memory or it is known since whether backwards should be split; for every next failure; for the memory that
    was measured, if their plan is for another one. The second asks the planner that the user chose for the same plans.
    Neither makes more plans than can be kept, nor again those that are ready and were made for nearly the same problem.
    A plan for the workers that train now is published. One that cannot be made is logged and left out.

    Args:
        maker: makes plans.
        assumed: the assumptions of the plans.
        ready: keeps them.
        publish: called with better plans for the workers that train.
        failed: the failed workers.
        seconds: what operations took.
        running: the plan of the workers that train, if a better one is wanted.
    """

    maker: PlanMaker
    assumed: Assumptions
    ready: ReadyPlans
    publish: Callable[[ReadyPlan], None]
    failed: frozenset[Worker]
    seconds: OperationSeconds
    running: Schedule | None

    def make(self) -> Job:
        """The job that makes plans for the present workers and for the next failure, by the quick planner."""
        present, running = self._problem(self.failed), self.running
        # Another plan for the present workers: at once if theirs does not fit into memory, or it is known since whether
        # it should split backwards.
        is_open = self.assumed.splitting is not None and self.maker.choice(present) is None
        at_once = running is not None and (is_open or not _keeps_to(running, present))
        if at_once:
            yield from self._make(present, offer=True)
        for problem in self._one_more(present):
            yield from self._make(problem)
        if running is not None and not at_once and running.problem.memories != present.memories:
            yield from self._make(present, offer=True)

    def improve(self) -> Job:
        """The job that asks the planner that the user chose."""
        present = self._problem(self.failed)
        if self.running is not None:
            yield from self._improve(present, offer=True)
        for problem in self._one_more(present):
            yield from self._improve(problem)

    def _problem(self, failed: frozenset[Worker]) -> Problem:
        return self.assumed.problem(failed, self.seconds)

    def _one_more(self, present: Problem) -> list[Problem]:
        """A problem for each distribution of failures that the next one may lead to, as far as plans can be kept."""
        capacity = self.ready.capacity - (self.running is not None)
        return [self._problem(failed) for failed in next_failures(present)][:capacity]

    def _make(self, problem: Problem, offer: bool = False) -> Job:
        """Makes a plan by the quick planner, unless the one that is ready will do; ``offer``: in any case, for the
        workers that train now.
        """
        ready = self.ready.find(problem)
        if ready is not None and not offer and ready.serves(problem):
            yield None
            return
        try:
            found = self.maker.stored(problem)
            if found is None:
                found = yield from self.maker.make(problem, self.assumed, "better" if offer else "ahead")
        except Exception as error:  # the plan that runs goes on, and a failure without a plan gets one at once
            if offer:
                log.warning("No plan was found for what was measured: %s", error)
            else:
                log.warning("No plan could be made ahead for the failure of %s: %s", names_of(problem.failed), error)
            return
        ready = self.ready.find(problem) if offer else None
        if ready is None or _replaces(found.schedule, ready.schedule, problem):
            self.ready.keep(found)
        if offer:
            self.publish(found)

    def _improve(self, problem: Problem, offer: bool = False) -> Job:
        """Asks the planner that the user chose; ``offer``: the plan is for the workers that train now."""
        yield None
        ready = self.ready.find(problem)
        if ready is not None and ready.final and ready.serves(problem):
            return
        try:
            found = yield from self.maker.search(problem, self.assumed, "better" if offer else "ahead")
        except Exception as error:  # as above; the quick planner's plan stays
            log.warning(
                "%r found no plan for the failure of %s: %s", self.maker.chosen, names_of(problem.failed), error
            )
            found = None
        if found is not None and (ready is None or _replaces(found.schedule, ready.schedule, problem)):
            self.ready.keep(found)
            if offer:
                self.publish(found)
        elif ready is not None:
            self.ready.keep(replace(ready, final=True))  # it is not asked again


def _keeps_to(schedule: Schedule, problem: Problem) -> bool:
    """Whether ``schedule`` fits into the memory of ``problem``."""
    return schedule.problem.memories == problem.memories or schedule.fits(problem)


def _replaces(schedule: Schedule, ready: Schedule, problem: Problem) -> bool:
    """Whether ``schedule``, made for ``problem``, is to be kept instead of the plan that is ready."""
    if ready.problem.technique != schedule.problem.technique or not _keeps_to(ready, problem):
        return True
    return schedule.period < retime(ready, schedule.problem.costs).period * (1 - 1e-9)


class PlanProvider:
    """Has a plan for whichever workers fail, and has the plans for the next failures made ahead.

    Args:
        grid: the grid of the run.
        planning: who plans, with which techniques and how much memory.
        costs: of the operations, in seconds; None to measure them.
        library: where plans are looked for and stored.
        chooses_split: whether the workers try what splitting backwards costs, where ``planning`` leaves that open. With
            a ``library``, whose plans are of one technique, nothing is left open.

    Raises:
        ConfigurationError: for a planner that cannot be sent to the planning process.

    Attributes:
        source: where the newest plan is from; see :class:`~lightning_recycle.control.plans.plan_maker.ReadyPlan`.
        maker: makes single plans.
        assumptions: what they are made for.
        background: makes plans ahead; better ones are published there, as
            :class:`~lightning_recycle.control.plans.plan_maker.ReadyPlan`.
    """

    def __init__(
        self,
        grid: Grid,
        planning: PlanningOptions,
        costs: Costs | None = None,
        library: PlanLibrary | None = None,
        chooses_split: bool = True,
    ) -> None:
        self.source = ""
        self.background = PlanningQueue()
        self._grid = grid
        chosen = get_planner(planning.planner)
        check_travels(chosen)
        self.maker = PlanMaker(chosen, library, 3 * grid.global_microbatches * grid.stages >= _APART_FROM)
        self.assumptions = Assumptions(grid, planning, costs, chooses_split and library is None)
        self._ready = ReadyPlans(grid)
        self._needed: _PlanInNeed | None = None

    def prepare(self) -> None:
        """Makes the fault-free plan, with the planner that the user chose, however long that takes."""
        problem = self.assumptions.problem(frozenset(), {})
        stored = self.maker.stored(problem)
        if stored is None:
            stored = self.maker.make_at_once(problem, self.assumptions, self.maker.chosen, "ahead")
        self._ready.keep(stored)

    # ------------------------------------------------------------------ the plan for those who train

    def is_ready(self, failed: frozenset[Worker], seconds: OperationSeconds) -> bool:
        """Whether :meth:`plan` has its answer at once. If not, the plan is being made, an earlier one for other workers
        is given up, and the coordinator is woken when the plan is there.
        """
        problem = self.assumptions.problem(failed, seconds)
        needed = self._needed
        if needed is not None and needed.serves(problem):
            return needed.is_done
        self._needed = None
        self.background.drop(Urgency.NEEDED)
        if not self.maker.is_large or self._at_hand(problem) is not None:
            return True
        self._needed = _PlanInNeed(problem)
        self.background.begin(Urgency.NEEDED, self._make_in_need(self._needed))
        return False

    def plan(self, failed: frozenset[Worker], seconds: OperationSeconds) -> Schedule:
        """The schedule for ``failed``: the one made ahead or stored, or at once the heuristic's."""
        problem = self.assumptions.problem(failed, seconds)
        needed, self._needed = self._needed, None
        made = needed.plan if needed is not None and needed.serves(problem) else None
        found = made or self._at_hand(problem)
        if found is None:
            found = made = self.maker.make_at_once(problem, self.assumptions, self.maker.quick, "made")
        if made is not None:
            self._ready.keep(made)
        self.source = found.source
        return found.schedule

    def _at_hand(self, problem: Problem) -> ReadyPlan | None:
        """The plan that was made ahead, or is stored."""
        found = self._ready.find(problem)
        if found is None or not _keeps_to(found.schedule, problem):
            found = self.maker.stored(problem, needed=True)
            if found is not None:
                self._ready.keep(found)
        return found

    def _make_in_need(self, needed: _PlanInNeed) -> Job:
        try:
            needed.plan = yield from self.maker.make(needed.problem, self.assumptions.snapshot(), "made")
        except Exception:  # the coordinator asks for the plan itself, and sees what is wrong with it
            log.exception("A plan that is needed could not be made")
        needed.is_done = True
        self.background.wake()

    # ------------------------------------------------------------------ what changes

    def adopt(self, schedule: Schedule) -> None:
        """Plans for the times that ``schedule`` assumes from now on, and keeps it as the plan for its workers."""
        self.assumptions.adopt(schedule)
        self.maker.library = None
        self._ready.keep(ReadyPlan(schedule, schedule.problem, "better", final=True))

    def problem(self, failed: frozenset[Worker], seconds: OperationSeconds) -> Problem:
        """The problem if ``failed`` have failed, and operations take ``seconds``, with the technique of the plan that
        runs.
        """
        return self.maker.as_chosen(self.assumptions.problem(failed, seconds), self.assumptions)

    def begin_anew(self, schedule: Schedule | None) -> None:
        """The layers lie in another way: what was planned is forgotten, except for a ``schedule`` for this layout."""
        self._drop_plans_ahead()
        self._ready, self.maker.library = ReadyPlans(self._grid), None
        if schedule is not None:
            self._ready.keep(ReadyPlan(schedule, schedule.problem, "better", final=not self.maker.improves))

    # ------------------------------------------------------------------ what may come

    def plan_ahead(self, failed: frozenset[Worker], seconds: OperationSeconds, running: Schedule | None = None) -> None:
        """Begins to plan for every failure that may follow ``failed``; replaces an earlier request.

        Args:
            failed: the failed workers.
            seconds: what operations took.
            running: what the others run, if a better plan for them is wanted.
        """
        taken = {stage: dict(names) for stage, names in seconds.items()}
        assumed, publish = self.assumptions.snapshot(), self.background.publish
        ahead = _PlansAhead(self.maker, assumed, self._ready, publish, failed, taken, running)
        self._drop_plans_ahead()
        self.background.begin(Urgency.AHEAD, ahead.make())
        if self.maker.improves or self.maker.library is not None:
            self.background.begin(Urgency.SEARCH, ahead.improve())

    def _drop_plans_ahead(self) -> None:
        self.background.drop(Urgency.AHEAD)
        self.background.drop(Urgency.SEARCH)

    # ------------------------------------------------------------------ moves of workers

    def propose_move(self, failed: frozenset[Worker], vacant: Worker, seconds: OperationSeconds) -> Worker | None:
        """A healthy worker of another stage that should take the position ``vacant``, if there is one.

        There is one if failure normalization prefers the failure in another stage and the shorter period pays for the
        transfer (see ``_MOVE_SECONDS``). Nobody moves before the operations are measured.
        """
        costs = self.assumptions.costs
        if costs is None and len(seconds) < self._grid.stages:
            return None
        costs = costs or costs_from(seconds, self._grid.stages)
        actual = distribution_of(self._grid, failed)
        everybody = Problem(self._grid, costs, technique=self.assumptions.technique)
        wanted = normalize(everybody, len(failed), most=most_in_a_stage(everybody, len(failed)))
        if wanted[vacant.stage] >= actual[vacant.stage]:
            return None

        def period(gone: frozenset[Worker]) -> float:
            return lower_bound(replace(everybody, failed=gone))

        movers = {
            worker.stage: worker
            for worker in self._grid.workers()  # the last of each stage: the leader is among the first pipelines
            if worker not in failed and wanted[worker.stage] > actual[worker.stage]
        }
        best = min(sorted(movers.values(), reverse=True), key=lambda mover: period(failed - {vacant} | {mover}))
        now = period(failed)
        gain = now - period(failed - {vacant} | {best})
        return best if gain > _MOVE_GAIN * now and gain * _MOVE_HORIZON > _MOVE_SECONDS else None

    def close(self) -> None:
        """The run is over: gives up all plans, and waits until nothing plans on."""
        self.background.close()
