"""Questions for the best layout, and the answers that were found ahead of failures.

Contract: questions are pure and picklable.

Must not know: when questions are asked, and what becomes of the answers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_recycle.control.plans.background_planner import Job
from lightning_recycle.control.protocol.messages import Cuts
from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.layouts.layer_costs import LayerCosts
from lightning_recycle.planning.layouts.layout_candidates import Candidate, Changing, LayoutPlan, Way
from lightning_recycle.planning.layouts.layout_search import plan_layout
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.routing import alike, renamed

__all__ = ["CHANGING", "ForeseenLayouts", "LayoutQuestion"]

_LEAST_GAIN = 0.05  # of a step: measured times are not exact
_SWITCH_SECONDS = 0.5  # for which a change holds everybody up, besides the bytes that have to be sent
_WAYS: tuple[Way, ...] = ("layers",)  # workers change their stage by themselves: see Vacancies
_SAME = 0.1  # of a mean layer's work, of memory and of a link: measured again, all of them differ a little
_TIMES = ("forward", "backward_input", "backward_weight", "backward", "reduce", "optimizer")
_SIZES = ("output_bytes", "held_bytes", "waiting_bytes", "parameter_bytes", "optimizer_bytes")

CHANGING = Changing(switch=_SWITCH_SECONDS, least_gain=_LEAST_GAIN)
"""What a change costs in a run."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayoutQuestion:
    """Which layout is best.

    Args:
        problem: who has failed, who is slow, and what the runtime can do.
        layers: what the layers cost.
        cuts: the layout of now.
        next_change: seconds until the next failure, as expected.
        fixed: why layers cannot move; empty if they can.
        whole: why stages cannot share layers; empty if they can.
    """

    problem: Problem
    layers: LayerCosts
    cuts: Cuts
    next_change: float
    fixed: str = ""
    whole: str = ""

    def answer(self) -> LayoutPlan:
        """The best layout, with all that was compared.

        Raises:
            ConfigurationError, PlanningError: when there is none.
        """
        return plan_layout(
            self.problem,
            self.layers,
            self.cuts,
            next_change=self.next_change,
            changing=CHANGING,
            fixed=self.fixed,
            whole=self.whole,
            ways=_WAYS,
        )

    def is_like(self, other: LayoutQuestion) -> bool:
        """Whether the answer to the one is an answer to the other, for whichever worker of a stage has failed."""
        if (
            self.cuts != other.cuts
            or (self.fixed, self.whole) != (other.fixed, other.whole)
            or not _close(self.layers, other.layers)
        ):
            return False
        # What a layout costs follows from its layers.
        return alike(*(replace(each.problem, costs=self.problem.costs, memory=None) for each in (self, other)))


class ForeseenLayouts:
    """Layouts for the single failures that may come next, looked for while all is well.

    The best layout takes a second or two to find, for which training goes on with re-routing alone. So a question for
    each stage that may lose a worker is asked ahead, and its answer is kept. It serves if nothing that it depends on
    has changed: which worker of a stage fails does not matter, as plans are renamed, and how long the workers that are
    left may expect to go on is weighed again.
    """

    def __init__(self) -> None:
        self._questions: tuple[LayoutQuestion, ...] = ()
        self._plans: dict[int, LayoutPlan] = {}  # by number of the question; another thread fills it

    def look_for(self, questions: Sequence[LayoutQuestion]) -> Job:
        """The job that finds the answers to these; the earlier ones are forgotten."""
        self._questions, self._plans = tuple(questions), {}
        return _found(self._questions, self._plans)

    def plan(self, question: LayoutQuestion) -> LayoutPlan | None:
        """The answer to ``question``, if it was found ahead."""
        for number, known in enumerate(self._questions):
            if number in self._plans and known.is_like(question):
                plan = self._plans[number].expecting(question.next_change, CHANGING)
                return _named(plan, question.problem)
        return None


def _found(questions: tuple[LayoutQuestion, ...], plans: dict[int, LayoutPlan]) -> Job:
    for number, question in enumerate(questions):
        try:
            plans[number] = yield question
        except PlanningError as error:  # it is asked again when it is needed
            log.info("Layout %d of %d was not found ahead: %s", number + 1, len(questions), error)


def _close(one: LayerCosts, other: LayerCosts) -> bool:
    if one.layers != other.layers or (one.memory_limit is None) != (other.memory_limit is None):
        return False
    work = sum(one.work(decoupled=False)) / one.layers
    limits = one.memory_limit or 0.0, other.memory_limit or 0.0
    state = sum(one.state_bytes) / one.layers + sum(one.held_bytes) / one.layers

    def near(names: Sequence[str], unit: float) -> bool:
        pairs = (pair for name in names for pair in zip(getattr(one, name), getattr(other, name), strict=True))
        return all(abs(a - b) <= _SAME * unit for a, b in pairs)

    return (
        near(_TIMES, work)
        and near(_SIZES, state)
        and abs(one.overhead - other.overhead) <= _SAME * work
        and abs(limits[0] - limits[1]) <= _SAME * limits[0]
        and abs(one.bandwidth - other.bandwidth) <= _SAME * one.bandwidth
    )


def _named(plan: LayoutPlan, problem: Problem) -> LayoutPlan:
    """The plan for the workers that have failed in ``problem``, not those that stood for them."""

    def of(candidate: Candidate) -> Candidate:
        if candidate.problem is None:
            return replace(candidate, failed=problem.failed)
        own = replace(candidate.problem, failed=problem.failed, worker_factors=problem.worker_factors)
        judgement = candidate.judgement
        if judgement is not None and judgement.schedule is not None:
            judgement = replace(judgement, schedule=renamed(judgement.schedule, own))
        return replace(candidate, failed=problem.failed, problem=own, judgement=judgement)

    found = tuple(map(of, plan.candidates))
    chosen = next(named for named, each in zip(found, plan.candidates, strict=True) if each is plan.chosen)
    return LayoutPlan(chosen, found, plan.next_change)
