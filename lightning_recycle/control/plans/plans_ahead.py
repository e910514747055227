"""Plans for the failures that may come next, and better ones for the workers that train.

Concept: two jobs, one after the other. The first makes plans by the quick planner, in this order: for the workers
that train now, if their plan does not fit into memory or it is known since whether backwards should be split; for every
next failure; for the memory that was measured, if their plan is for another one. The second asks the planner
that the user chose for the same plans. None makes more plans than can be kept, nor again those that are ready and were
made for nearly the same problem.

Contract: a plan for the workers that train now is published, as a
:class:`~lightning_recycle.planning.result.PlanResult`. A plan that cannot be made is logged and left out.

Must not know: when plans are made, who adopts them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_recycle.control.plans.assumptions import Assumptions, OperationSeconds, names_of, with_fused_backwards
from lightning_recycle.control.plans.background_planner import Job
from lightning_recycle.control.plans.plan_maker import PlanMaker
from lightning_recycle.control.plans.ready_plans import ReadyPlan, ReadyPlans
from lightning_recycle.planning.costs import cost_difference
from lightning_recycle.planning.grid import Worker
from lightning_recycle.planning.normalization import next_failures
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.result import PlanResult, proven
from lightning_recycle.planning.routing import alike
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.planning.timing import retime

__all__ = ["PlansAhead", "keeps_to"]

_SAME_COSTS = 0.1  # of the mean operation: a plan for costs that differ less is not made again

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlansAhead:
    """The plans that may follow now.

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
    publish: Callable[[PlanResult], None]
    failed: frozenset[Worker]
    seconds: OperationSeconds
    running: Schedule | None

    def make(self) -> Job:
        """The job that makes plans for the present workers and for the next failure, by the quick planner."""
        present, running = self._problem(self.failed), self.running
        # Another plan for the present workers: at once if theirs does not fit into memory, or it is known since whether
        # it should split backwards.
        is_open = self.assumed.splitting is not None and self.maker.choices.of(present) is None
        at_once = running is not None and (is_open or not keeps_to(running, present))
        if at_once:
            yield from self._make_for_present(present)
        for problem in self._one_more(present):
            yield from self._get_ready(problem)
        if running is not None and not at_once and running.problem.memories != present.memories:
            yield from self._make_for_present(present)

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

    def _get_ready(self, problem: Problem) -> Job:
        """Makes a plan, unless the one that is ready will do."""
        ready = self.ready.find(problem)
        if ready is not None and self._will_do(ready.schedule, problem):
            yield None
            return
        try:
            found = self.maker.stored(problem)
            if found is None:
                made = yield from self.maker.make(problem, self.assumed)
                found = ReadyPlan(made.schedule, "ahead", final=not self.maker.improves)
            self.ready.keep(found)
        except Exception as error:  # a failure without a plan gets one at once: this job must go on
            log.warning("No plan could be made ahead for the failure of %s: %s", names_of(problem.failed), error)

    def _will_do(self, schedule: Schedule, problem: Problem) -> bool:
        """Whether ``schedule`` is what planning ``problem`` would lead to, or nearly so."""
        own = self.maker.choices.asked(schedule.problem)
        is_near = cost_difference(own.costs, problem.costs) <= _SAME_COSTS
        return is_near and alike(replace(own, costs=problem.costs), problem)

    def _make_for_present(self, problem: Problem) -> Job:
        """Makes and publishes a plan for the workers that train now: for the memory, or the costs of split backwards,
        that were measured.
        """
        try:
            found = self.maker.stored(problem)
            if found is not None:
                result = proven(found.schedule, found.source)
            else:
                result = yield from self.maker.make(problem, self.assumed)
                found = ReadyPlan(result.schedule, "better", final=not self.maker.improves)
        except Exception as error:  # the plan that runs goes on
            log.warning("No plan was found for what was measured: %s", error)
            return
        ready = self.ready.find(problem)
        if ready is None or _replaces(found.schedule, ready.schedule, problem):
            self.ready.keep(found)
        self.publish(result)

    def _improve(self, problem: Problem, offer: bool = False) -> Job:
        """Asks the planner that the user chose; ``offer``: the plan is for the workers that train now."""
        yield None
        ready = self.ready.find(problem)
        if ready is not None and ready.final and self._will_do(ready.schedule, problem):
            return
        choice = self.maker.choices.of(problem)
        if choice is not None and not choice.technique.decoupled:
            problem = with_fused_backwards(problem, self.assumed.splitting)
        try:
            found = yield from self.maker.search(problem, self.assumed)
        except Exception as error:  # as above; the quick planner's plan stays
            log.warning(
                "%r found no plan for the failure of %s: %s", self.maker.chosen, names_of(problem.failed), error
            )
            found = None
        if found is None or (ready is not None and not _replaces(found.schedule, ready.schedule, problem)):
            if ready is not None:
                self.ready.keep(replace(ready, final=True))  # it is not asked again
            return
        self.ready.keep(ReadyPlan(found.schedule, "better" if offer else "ahead", final=True))
        if offer:
            self.publish(found)


def keeps_to(schedule: Schedule, problem: Problem) -> bool:
    """Whether ``schedule`` fits into the memory of ``problem``."""
    return schedule.problem.memories == problem.memories or schedule.fits(problem)


def _shorter(schedule: Schedule, other: Schedule) -> bool:
    """Whether ``schedule`` has a shorter period than ``other`` has under the same costs."""
    return schedule.period < retime(other, schedule.problem.costs).period * (1 - 1e-9)


def _replaces(schedule: Schedule, ready: Schedule, problem: Problem) -> bool:
    """Whether ``schedule``, made for ``problem``, is to be kept instead of the plan that is ready."""
    other_technique = ready.problem.technique != schedule.problem.technique
    return other_technique or not keeps_to(ready, problem) or _shorter(schedule, ready)
