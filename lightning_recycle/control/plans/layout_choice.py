"""When the layers of a run should lie in another way: what is known of them, and what to ask the planner.

Concept: each worker reports once what its layers take
(:class:`~lightning_recycle.control.protocol.messages.LayerFacts`). With the times of the stages and the memory that was
measured, that is what :func:`~lightning_recycle.planning.layouts.layout_search.plan_layout` needs. It is asked when the
operations have been measured, and whenever workers are lost or return; in the background, so nothing waits for the
answer. For the single failures that may come next it is asked ahead (:class:`ForeseenLayouts`).

Contract: called from the coordinator's thread. Answers are published by the background planner, as
:class:`LayoutAnswer`.

Must not know: connections, generations; how layers move.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from lightning_recycle.control.plans.assumptions import OperationSeconds
from lightning_recycle.control.plans.background_planner import BackgroundPlanner, Job, Urgency
from lightning_recycle.control.protocol.layout_change import has_ties, ranges
from lightning_recycle.control.protocol.messages import Cuts, LayerFacts
from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.costs import Costs
from lightning_recycle.planning.grid import Grid, Worker
from lightning_recycle.planning.layouts.fractional_cuts import parts_of
from lightning_recycle.planning.layouts.layer_costs import LayerCosts
from lightning_recycle.planning.layouts.layout_candidates import Candidate, Changing, FailureRecord, LayoutPlan, Way
from lightning_recycle.planning.layouts.layout_search import plan_layout
from lightning_recycle.planning.memory import Memory
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.routing import alike, renamed
from lightning_recycle.planning.timing import Turns

__all__ = ["ForeseenLayouts", "LayoutAnswer", "LayoutChoice", "LayoutQuestion", "Rebalance", "Surroundings"]

log = logging.getLogger(__name__)

Rebalance: TypeAlias = Literal["auto", "always", "never"]
"""Whether layers move: where that pays until the next failure; never; or wherever steps get shorter."""

_BANDWIDTH = 1e9  # bytes/s of a link that nobody has measured
_NEVER = 1e12  # seconds
_LEAST_GAIN = 0.05  # of a step: measured times are not exact
_SWITCH_SECONDS = 0.5  # for which a change holds everybody up, besides the bytes that have to be sent
_WAYS: tuple[Way, ...] = ("layers",)  # workers change their stage by themselves: see Vacancies
_SAME = 0.1  # of a mean layer's work, of memory and of a link: measured again, all of them differ a little
_TIMES = ("forward", "backward_input", "backward_weight", "backward", "reduce", "optimizer")
_SIZES = ("output_bytes", "held_bytes", "waiting_bytes", "parameter_bytes", "optimizer_bytes")

CHANGING = Changing(switch=_SWITCH_SECONDS, least_gain=_LEAST_GAIN)
"""What a change costs in a run."""


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


@dataclass(frozen=True)
class Surroundings:
    """What a run has measured besides what is in a problem.

    Args:
        backward: seconds of BW of the stages that have measured it.
        link: latency in seconds and bandwidth in bytes/s, 0 if nobody has measured it.
        record: the failures so far.
    """

    backward: Mapping[int, float]
    link: tuple[float, float]
    record: FailureRecord


@dataclass(frozen=True)
class LayoutAnswer:
    """The best layout, and why.

    Args:
        failed: the workers without whom it is the best.
        before: the layout that it was compared with.
        plan: all that was compared.
    """

    failed: frozenset[Worker]
    before: Cuts
    plan: LayoutPlan

    @property
    def cuts(self) -> Cuts:
        return self.plan.chosen.layout.cuts


class LayoutChoice:
    """Asks for the layouts of one run.

    Args:
        rebalance: when layers move.
        background: answers questions.

    Attributes:
        cuts: the layout of now; empty as long as nobody has told it.
        layers: what the layers were found to cost, when the newest question was asked; None before.
    """

    def __init__(self, rebalance: Rebalance, background: BackgroundPlanner) -> None:
        self.cuts: Cuts = ()
        self.layers: LayerCosts | None = None
        self._rebalance = rebalance
        self._facts: dict[int, tuple[LayerFacts, int]] = {}  # by layer: who told of it, and its place there
        self._fixed = ""  # why layers cannot move
        self._whole = ""  # why stages cannot share them
        self._newest: LayoutAnswer | None = None
        self._declined: LayoutAnswer | None = None
        self._asked = False  # something that nobody has answered yet
        self._background = background
        self._foreseen = ForeseenLayouts()

    def told(self, facts: LayerFacts) -> None:
        """A worker has measured its layers."""
        start = facts.first
        self._fixed, self._whole = self._fixed or facts.fixed, self._whole or facts.whole
        for place in range(len(facts.seconds)):
            self._facts[start + place] = facts, place
        if not self.cuts:
            self.cuts = facts.cuts

    @property
    def is_informed(self) -> bool:
        """Whether there is something to ask: layers may move, and all are known."""
        return self._rebalance != "never" and bool(self.cuts) and len(self._facts) == self.cuts[-1]

    def ask(self, problem: Problem, measured: Surroundings) -> None:
        """Begins to look for the best layout; gives up on an earlier question. What was found ahead is the answer at
        once.

        Args:
            problem: that of the workers who train, with the costs of their stages.
            measured: what else is known.
        """
        question = self._question(problem, measured)
        self.layers = question.layers
        self._asked = True
        known = self._foreseen.plan(question)
        if known is None:
            self._background.begin(Urgency.LAYOUT, self._look_for(question))
        else:
            self._background.drop(Urgency.LAYOUT)
            self._background.publish(LayoutAnswer(problem.failed, self.cuts, known))

    def _look_for(self, question: LayoutQuestion) -> Job:
        try:
            plan = yield question
        except PlanningError as error:
            log.warning("No layout was looked for: %s", error)
        else:
            self._background.publish(LayoutAnswer(question.problem.failed, question.cuts, plan))

    @property
    def is_settled(self) -> bool:
        """Whether those who train keep the layout of now: the newest answer names it, or was declined."""
        newest = self._newest
        return newest is not None and not self._asked and (newest.cuts == self.cuts or newest is self._declined)

    def decline(self, answer: LayoutAnswer) -> None:
        """``answer`` has no consequences."""
        self._declined = answer

    def ask_ahead(self, problems: Iterable[Problem], measured: Surroundings) -> None:
        """Begins to look for the best layouts for ``problems`` that may come next, and forgets what was found for
        others.
        """
        questions = [self._question(problem, measured) for problem in problems]
        self._background.begin(Urgency.FORESEEN, self._foreseen.look_for(questions))

    def _question(self, problem: Problem, measured: Surroundings) -> LayoutQuestion:
        layers = self._costs(problem.costs, measured.backward, problem.memory, measured.link)
        next_change = measured.record.next_change(sum(problem.live_counts())) if self._rebalance == "auto" else _NEVER
        return LayoutQuestion(problem, layers, self.cuts, next_change, self._fixed, self._whole)

    def seconds_under(self, cuts: Cuts, seconds: OperationSeconds) -> dict[int, dict[str, float]]:
        """What operations will take under the layout ``cuts``, of which ``seconds`` is known under that of now."""
        assert self.layers is not None, "a layout was chosen"
        parts = self.layers.forward, self.layers.backward_input, self.layers.backward_weight, self.layers.backward
        found: dict[int, dict[str, float]] = {}
        whole = self.layers.costs(cuts)
        for stage, part in enumerate(parts_of(cuts)):
            f, b, w, both = (sum(values[layer] * share for layer, share in part.items()) for values in parts)
            known = {"F": f, "R": f, "B": b, "W": w, "BW": both}
            known["REDUCE"], known["STEP"] = whole.reduce[stage], whole.optimizer[stage]
            found[stage] = {name: known[name] for name in seconds[stage] if name in known}
        return found

    def choice_of(self, cuts: Cuts) -> Candidate | None:
        """The layout ``cuts`` as it was chosen, with its plan."""
        answer = self._newest
        return None if answer is None or answer.cuts != cuts else answer.plan.chosen

    def turns(self, cuts: Cuts, grid: Grid) -> tuple[Turns, Turns] | None:
        """How micro-batches differ under the layout ``cuts``, with split and with fused backwards; None if they do not,
        or nobody has measured the layers.
        """
        if self.layers is None:
            return None
        split, fused = (self.layers.turns(cuts, grid, decoupled=decoupled) for decoupled in (True, False))
        return None if split is None or fused is None else (split, fused)

    def accept(self, answer: LayoutAnswer) -> bool:
        """Whether a published answer is still of use."""
        if answer.before != self.cuts:
            return False
        self._newest, self._asked = answer, False
        return True

    def objection(self, cuts: Cuts) -> str:
        """Why the layout ``cuts`` cannot be, empty if it can: what the planner does not look at."""
        layers = range(int(cuts[-1]))
        facts = [self._facts[layer][0] for layer in layers]
        trains = [self._facts[layer][0].trains[self._facts[layer][1]] for layer in layers]
        for stage, part in enumerate(parts_of(cuts)):
            if not any(trains[layer] for layer, share in part.items() if share == 1):
                return f"stage {stage} would have nothing to train"
        if has_ties(facts[0].tied, cuts) != has_ties(facts[0].tied, self.cuts):
            return "layers that share a weight would come to lie on one stage, or on several"
        return ""

    def _costs(
        self, costs: Costs, backward: Mapping[int, float], memory: Memory | None, link: tuple[float, float]
    ) -> LayerCosts:
        def each(name: str) -> tuple[float, ...]:
            return tuple(getattr(facts, name)[place] for _, (facts, place) in sorted(self._facts.items()))

        state = tuple(map(sum, zip(each("parameter_bytes"), each("optimizer_bytes"), strict=True)))
        known: dict[str, Any] = {}
        if memory is not None:
            held = [sum(state[layer] for layer in part) for part in ranges(self.cuts)]
            besides = [max(0.0, fixed - own) for fixed, own in zip(memory.fixed, held, strict=True)]
            known = {
                "memory_limit": max(0.0, min(map(operator.sub, memory.capacity, besides))),
                "held_bytes": memory.after_forward,
                "waiting_bytes": memory.after_backward,
            }
        if len(backward) == costs.stages:
            known["backward"] = [backward[stage] for stage in range(costs.stages)]
        latency, bandwidth = link
        return LayerCosts.from_stages(
            costs,
            self.cuts,
            weights=each("seconds"),
            output_bytes=each("output_bytes"),
            parameter_bytes=each("parameter_bytes"),
            optimizer_bytes=each("optimizer_bytes"),
            latency=latency,
            bandwidth=bandwidth or _BANDWIDTH,
            **known,
        )


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
