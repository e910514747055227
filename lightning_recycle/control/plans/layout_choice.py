"""Choice of another layout of a run's layers: its facts, questions and decisions.

Concept: each worker reports once its layers (:class:`~lightning_recycle.control.protocol.messages.LayerFacts`). With
measured times and memory, :func:`~lightning_recycle.planning.layouts.plan_layout` is asked when operations have
been measured, and when workers are lost or return; in the background, while training goes on with re-routing alone.

Contract: called from the coordinator's thread. Answers are published by the planning queue, as
:class:`~lightning_recycle.planning.layouts.LayoutPlan`.

Must not know: connections, generations; how layers move.
"""

from __future__ import annotations

import logging
import operator
from functools import partial
from typing import Any, Literal, TypeAlias

from lightning_recycle.control.plans.assumptions import Measurements, OperationSeconds
from lightning_recycle.control.plans.plan_provider import PlanProvider
from lightning_recycle.control.plans.planning_queue import Job, Urgency
from lightning_recycle.control.protocol.messages import Cuts, LayerFacts
from lightning_recycle.control.protocol.state import LayoutReady
from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.child_process import Question, UnexpectedError
from lightning_recycle.planning.costs import Costs, Memory
from lightning_recycle.planning.grid import Grid, Worker
from lightning_recycle.planning.layer_cuts import LayerCosts, has_ties, held_ranges, parts_of
from lightning_recycle.planning.layouts import Candidate, FailureRecord, LayoutPlan, plan_layout
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.planning.timing import MicrobatchVariation

log = logging.getLogger(__name__)

Rebalance: TypeAlias = Literal["auto", "always", "never"]
"""Whether layers move: where that pays until the next failure; wherever steps get shorter; or never."""

_BANDWIDTH = 1e9  # bytes/s of a link before it is measured
_NEVER = 1e12  # seconds
_STEPS_BEFORE_LAYOUTS = 10  # from then on what operations take counts as known
_LEAST_GAIN = 0.05  # of a step: measured times are not exact
_SWITCH_SECONDS = 0.5  # for which all wait in a change, apart from the time to send layers


class LayoutChoice:
    """Chooses layouts of one run; ``cuts``: the current one, empty if unknown."""

    def __init__(self, rebalance: Rebalance, provider: PlanProvider, measured: Measurements) -> None:
        self.cuts: Cuts = ()
        self._rebalance = rebalance
        self._provider, self._measurements = provider, measured
        self._background = provider.background
        self._layers: LayerCosts | None = None  # the costs of the layers in the newest question
        self._facts: dict[int, tuple[LayerFacts, int]] = {}  # by layer: the facts of its worker, and its place in them
        self._obstacle = ""  # why layers cannot move
        self._whole = ""  # why stages cannot share them
        self._newest: Candidate | None = None  # of the newest answer
        self._due = self._patience = _STEPS_BEFORE_LAYOUTS  # steps until layouts are looked for anyway
        self._record = FailureRecord()

    def add_facts(self, facts: LayerFacts) -> None:
        """Adds the layers that a worker has measured."""
        self._obstacle, self._whole = self._obstacle or facts.fixed, self._whole or facts.whole
        for place in range(len(facts.seconds)):
            self._facts[facts.first + place] = facts, place
        if not self.cuts:
            self.cuts = facts.cuts

    # ------------------------------------------------------------------ asking

    def begin(self, schedule: Schedule, failed_before: frozenset[Worker]) -> None:
        """A generation begins; asks for its layout if other workers are failed now."""
        if schedule.failed - failed_before:
            self._record = self._record.after(0, 0.0, failed=True)
        if schedule.failed != failed_before:
            self._patience = _STEPS_BEFORE_LAYOUTS
            self._ask(schedule)

    def stepped(self, schedule: Schedule, seconds: float | None) -> None:
        """A step of ``schedule`` was committed, ``seconds`` after the previous one if any."""
        if seconds is not None:
            self._record = self._record.after(len(schedule.live_workers), seconds)
        if self._measurements.steps == self._due:
            self._ask(schedule)

    def _ask(self, schedule: Schedule) -> None:
        is_known = bool(self.cuts) and len(self._facts) == self.cuts[-1]
        if self._rebalance == "never" or not is_known or self._measurements.steps < _STEPS_BEFORE_LAYOUTS:
            return
        seconds = self._measurements.known_seconds
        problem = self._provider.problem(schedule.failed, seconds)
        self._layers = self._costs(problem.costs, seconds, problem.memory)
        question = partial(
            plan_layout,
            problem,
            self._layers,
            self.cuts,
            next_change=self._record.next_change(sum(problem.live_counts())) if self._rebalance == "auto" else _NEVER,
            switch=_SWITCH_SECONDS,
            least_gain=_LEAST_GAIN,
            fixed=self._obstacle,
            whole=self._whole,
        )
        self._background.begin(Urgency.LAYOUT, self._look_for(question))

    def _look_for(self, question: Question) -> Job:
        try:
            self._background.publish((yield question))
        except UnexpectedError as error:  # no code of the user takes part; the run goes on with the layout it has
            log.error(
                "The search for a layout failed: %s. The layers stay where they are. This is a defect of "
                "lightning_recycle: please report it with this traceback:\n%s",
                error,
                error.trace.rstrip(),
            )
        except PlanningError as error:
            log.warning("No layout was looked for: %s", error)

    # ------------------------------------------------------------------ deciding

    def decide(self, plan: LayoutPlan, schedule: Schedule) -> tuple[LayoutReady | None, tuple[str, ...]]:
        """The change by a published plan, if for the workers of ``schedule``; reasons."""
        before, cuts = plan.reroute.cuts, plan.chosen.cuts
        if before != self.cuts:
            return None, ()
        self._newest = plan.chosen
        if plan.reroute.problem.failed != schedule.failed:
            return None, ()
        stays = cuts == before
        why = "" if stays else self._objection(cuts) or self._doubts(plan.gain, schedule)
        reasons = (*plan.why(), *([f"it stays: {why}"] if why else []))
        if stays or why:
            return None, reasons
        details = {
            "gain": plan.gain,
            "step_before": plan.reroute.period,
            "step_after": plan.chosen.period,
            "bytes": plan.chosen.bytes,
            "stall": plan.chosen.stall,
            "next_change": plan.next_change,
        }
        roster = tuple(schedule.grid.rank(worker) for worker in schedule.live_workers)
        return LayoutReady(roster, cuts, details), reasons

    def _doubts(self, gain: float, schedule: Schedule) -> str:
        """Why a layout that saves ``gain`` of a step is not taken yet.

        Without failures only measurements speak for it. It is looked for again when more is known.
        """
        doubt = self._measurements.levels.doubt(schedule.grid.stages)
        if schedule.failed or gain > doubt:
            return ""
        self._due, self._patience = self._measurements.steps + self._patience, 2 * self._patience
        return f"no worker is lost, and the times of the stages are known to {100 * doubt:.0f} % only"

    def _objection(self, cuts: Cuts) -> str:
        """Why the layout ``cuts`` is impossible, beyond the planner's knowledge; or empty."""
        layers = range(int(cuts[-1]))
        facts = [self._facts[layer][0] for layer in layers]
        trains = [self._facts[layer][0].trains[self._facts[layer][1]] for layer in layers]
        for stage, part in enumerate(parts_of(cuts)):
            if not any(trains[layer] for layer, share in part.items() if share == 1):
                return f"stage {stage} would have nothing to train"
        if has_ties(facts[0].tied, cuts) != has_ties(facts[0].tied, self.cuts):
            return "layers that share a weight would come to lie on one stage, or on several"
        return ""

    # ------------------------------------------------------------------ consequences

    def relaid(self, cuts: Cuts, grid: Grid) -> None:
        """All have the layout ``cuts``, other times and memory from the next generation."""
        seconds = self._measurements.operation_seconds
        if self._layers is not None and len(seconds) == grid.stages:
            seconds = self._seconds_under(cuts, seconds)
        self.cuts = cuts
        self._measurements.relaid(seconds)
        chosen = self.choice_of(cuts)
        memory = None if chosen is None else chosen.problem.memory  # until it is measured
        self._provider.assumptions.relaid(seconds, memory, self._variation(cuts, grid))
        if chosen is None or chosen.judgement is None or chosen.judgement.schedule is None:
            self._provider.begin_anew(None)
        else:
            self._provider.begin_anew(chosen.judgement.schedule.under(chosen.problem))

    def _seconds_under(self, cuts: Cuts, seconds: OperationSeconds) -> dict[int, dict[str, float]]:
        """Seconds of operations under ``cuts``, from those under the present layout."""
        assert self._layers is not None, "a layout was chosen"
        split, fused = (self._layers.costs(cuts, split_backward=splits) for splits in (True, False))
        found: dict[int, dict[str, float]] = {}
        for stage, names in seconds.items():
            f, both = split.forward[stage], fused.backward_input[stage]
            known = {"F": f, "R": f, "B": split.backward_input[stage], "W": split.backward_weight[stage], "BW": both}
            known |= {"REDUCE": split.reduce[stage], "STEP": split.optimizer[stage]}
            found[stage] = {name: known[name] for name in names if name in known}
        return found

    def choice_of(self, cuts: Cuts) -> Candidate | None:
        """The layout ``cuts`` as it was chosen, with its plan."""
        newest = self._newest
        return None if newest is None or newest.cuts != cuts else newest

    def _variation(self, cuts: Cuts, grid: Grid) -> tuple[MicrobatchVariation, MicrobatchVariation] | None:
        """How micro-batches differ under ``cuts``, with split and with fused backwards.

        None if they do not, or no worker has measured the layers.
        """
        if self._layers is None:
            return None
        split, fused = (
            self._layers.variation(cuts, grid, split_backward=split_backward) for split_backward in (True, False)
        )
        return None if split is None or fused is None else (split, fused)

    def _costs(self, costs: Costs, seconds: OperationSeconds, memory: Memory | None) -> LayerCosts:
        """The measured costs of all layers, made to agree with the stages' ``costs``."""

        def each(name: str) -> tuple[float, ...]:
            return tuple(getattr(facts, name)[index] for _, (facts, index) in sorted(self._facts.items()))

        state = tuple(map(sum, zip(each("parameter_bytes"), each("optimizer_bytes"), strict=True)))
        measured: dict[str, Any] = {}
        if memory is not None:
            held = [sum(state[layer] for layer in layers) for layers in held_ranges(self.cuts)]
            other_bytes = [max(0.0, fixed - layer_bytes) for fixed, layer_bytes in zip(memory.fixed, held, strict=True)]
            measured = {
                "memory_limit": max(0.0, min(map(operator.sub, memory.capacity, other_bytes))),
                "held_bytes": memory.after_forward,
                "waiting_bytes": memory.after_backward,
            }
        if all("BW" in seconds.get(stage, {}) for stage in range(costs.stages)):
            measured["backward"] = [seconds[stage]["BW"] for stage in range(costs.stages)]
        profile = self._measurements.profile
        return LayerCosts.from_stages(
            costs,
            self.cuts,
            weights=each("seconds"),
            output_bytes=each("output_bytes"),
            parameter_bytes=each("parameter_bytes"),
            optimizer_bytes=each("optimizer_bytes"),
            latency=0.0 if profile is None else profile.latency,
            bandwidth=(0.0 if profile is None else profile.bandwidth) or _BANDWIDTH,
            **measured,
        )
