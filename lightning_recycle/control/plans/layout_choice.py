"""When the layers of a run should lie in another way: what is known of them, and what to ask the planner.

Concept: each worker tells once what its layers take (:class:`~lightning_recycle.control.protocol.messages.LayerFacts`).
With what the stages take now, and the memory that they have measured, that is what
:func:`~lightning_recycle.planning.layouts.layout_search.plan_layout` needs. It is asked when the operations have been
measured, and whenever workers are lost or return; in a process of the lowest priority, so nobody waits for the answer.
For the single failures that may come next it is asked ahead (:mod:`~lightning_recycle.control.plans.foreseen`).

Contract: called from the coordinator's thread; ``wake`` from another one, when :meth:`LayoutChoice.take_answers` has
something.

Must not know: connections, generations; how layers move.
"""

from __future__ import annotations

import logging
import operator
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from lightning_recycle.control.plans.asking import Asking
from lightning_recycle.control.plans.foreseen import ForeseenLayouts
from lightning_recycle.control.plans.layout_question import LayoutQuestion, find_layouts
from lightning_recycle.control.plans.run_planner import OperationSeconds
from lightning_recycle.control.protocol.layout_change import has_ties, ranges
from lightning_recycle.control.protocol.messages import Cuts, LayerFacts
from lightning_recycle.planning.costs import Costs
from lightning_recycle.planning.grid import Grid, Worker
from lightning_recycle.planning.layouts.fractional_cuts import parts_of
from lightning_recycle.planning.layouts.layer_costs import LayerCosts
from lightning_recycle.planning.layouts.layout_candidates import Candidate, FailureRecord, LayoutPlan
from lightning_recycle.planning.memory import Memory
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.timing import Turns

__all__ = ["Adapt", "LayoutAnswer", "LayoutChoice", "Surroundings"]

log = logging.getLogger(__name__)

Adapt: TypeAlias = Literal["auto", "reroute", "layers"]
"""Whether layers move: where that pays until the next failure; never; or wherever steps get shorter."""

_BANDWIDTH = 1e9  # bytes/s of a link that nobody has measured
_NEVER = 1e12  # seconds


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
        adapt: when layers move.
        wake: called from another thread when an answer is there.

    Attributes:
        cuts: the layout of now; empty as long as nobody has told it.
        layers: what the layers were found to cost, when the newest question was asked; None before.
    """

    def __init__(self, adapt: Adapt, wake: Callable[[], None]) -> None:
        self.cuts: Cuts = ()
        self.layers: LayerCosts | None = None
        self._adapt = adapt
        self._facts: dict[int, tuple[LayerFacts, int]] = {}  # by layer: who told of it, and its place there
        self._fixed = ""  # why layers cannot move
        self._whole = ""  # why stages cannot share them
        self._newest: LayoutAnswer | None = None
        self._declined: LayoutAnswer | None = None
        self._asked = False  # something that nobody has answered yet
        self._asking: Asking[LayoutAnswer] = Asking("recycle-layouts", wake)
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
        return self._adapt != "reroute" and bool(self.cuts) and len(self._facts) == self.cuts[-1]

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
            self._asking.ask(partial(_answer, question))
        else:
            self._asking.answer(LayoutAnswer(problem.failed, self.cuts, known))

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
        self._foreseen.ask([self._question(problem, measured) for problem in problems])

    def _question(self, problem: Problem, measured: Surroundings) -> LayoutQuestion:
        layers = self._costs(problem.costs, measured.backward, problem.memory, measured.link)
        next_change = measured.record.next_change(sum(problem.live_counts())) if self._adapt == "auto" else _NEVER
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

    def take_answers(self) -> list[LayoutAnswer]:
        """What has been found since the last call, if it is still of use."""
        found = [answer for answer in self._asking.take_answers() if answer.before == self.cuts]
        if found:
            self._newest, self._asked = found[-1], False
        return found

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

    def close(self) -> None:
        """Gives up and leaves no process behind."""
        self._asking.close()
        self._foreseen.close()

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


def _answer(question: LayoutQuestion, cancelled: threading.Event) -> LayoutAnswer | None:
    received: list[LayoutPlan | str] = []
    failure = find_layouts((question,), lambda _, found: received.append(found), cancelled)
    found = received[0] if received else failure
    if isinstance(found, LayoutPlan):
        return LayoutAnswer(question.problem.failed, question.cuts, found)
    if not cancelled.is_set():
        log.warning("No layout was looked for: %s", found)
    return None
