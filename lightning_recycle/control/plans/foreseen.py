"""Layouts for the single failures that may come next, looked for while all is well.

Concept: the best layout takes a second or two to find, for which training goes on with re-routing alone. So one
question for each stage that may lose a worker is asked ahead, all in one process of the lowest priority, and its
answer is kept. When a worker fails, that answer serves if nothing that it depends on has changed: which worker of a
stage fails does not matter, as plans are renamed, and how long the workers that are left may expect to go on is weighed
again.

Contract: called from the coordinator's thread; nothing here waits.

Must not know: when questions are asked, connections.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from lightning_recycle.control.plans.asking import Asking
from lightning_recycle.control.plans.layout_question import CHANGING, LayoutQuestion, find_layouts
from lightning_recycle.planning.layouts.layer_costs import LayerCosts
from lightning_recycle.planning.layouts.layout_candidates import Candidate, LayoutPlan
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.routing import alike, renamed

__all__ = ["ForeseenLayouts"]

log = logging.getLogger(__name__)

_SAME = 0.1  # of a mean layer's work, of memory and of a link: measured again, all of them differ a little
_SECONDS = 600.0  # for all questions together
_TIMES = ("forward", "backward_input", "backward_weight", "backward", "reduce", "optimizer")
_SIZES = ("output_bytes", "held_bytes", "waiting_bytes", "parameter_bytes", "optimizer_bytes")


class ForeseenLayouts:
    """The answers to the newest questions that were asked ahead."""

    def __init__(self) -> None:
        self._questions: tuple[LayoutQuestion, ...] = ()
        self._plans: dict[int, LayoutPlan] = {}  # by number of the question; another thread fills it
        self._asking: Asking[None] = Asking("recycle-layouts-ahead", _nothing)

    def ask(self, questions: Sequence[LayoutQuestion]) -> None:
        """Begins to look for the answers to these, and forgets the earlier ones."""
        self._questions, self._plans = tuple(questions), {}
        self._asking.ask(partial(_look, self._questions, self._plans))

    def plan(self, question: LayoutQuestion) -> LayoutPlan | None:
        """The answer to ``question``, if it was found ahead."""
        for number, known in enumerate(self._questions):
            if number in self._plans and _serves(known, question):
                plan = self._plans[number].expecting(question.next_change, CHANGING)
                return _named(plan, question.problem)
        return None

    def close(self) -> None:
        """Gives up and leaves no process behind."""
        self._asking.close()


def _serves(known: LayoutQuestion, question: LayoutQuestion) -> bool:
    """Whether the answer to the one is an answer to the other."""
    if (
        known.cuts != question.cuts
        or (known.fixed, known.whole) != (question.fixed, question.whole)
        or not _close(known.layers, question.layers)
    ):
        return False
    # What a layout costs follows from its layers.
    return alike(*(replace(each.problem, costs=known.problem.costs, memory=None) for each in (known, question)))


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


def _nothing() -> None:
    """Nobody waits for what is looked for ahead."""


def _look(questions: tuple[LayoutQuestion, ...], plans: dict[int, LayoutPlan], cancelled: threading.Event) -> None:
    def keep(number: int, found: LayoutPlan | str) -> None:
        if isinstance(found, LayoutPlan):
            plans[number] = found  # else it is asked again when it is needed, and then the reason is told

    failure = find_layouts(questions, keep, cancelled, _SECONDS)
    if failure and not cancelled.is_set():
        log.info("%d of %d layouts were found ahead: %s", len(plans), len(questions), failure)
