"""Which plan all workers of a run follow, and when they change to another one.

Concept: the coordinator reports events and gets schedules. All come from here, so no two workers can disagree::

    RunPlans              which plan, when
      DriftMonitor        whether operations still take the times that the plan assumes
      LayoutChoice        whether the layers should lie in another way
      PlanProvider        the plan without the failed workers: ready, stored, or made
        Assumptions       the problem that a plan is made for
      PlanningQueue       answers slow questions, in a process beside the coordinator

| event | question |
|---|---|
| a generation begins | its plan (:mod:`~lightning_recycle.control.plans.plan_provider`), the best layout for it |
| 3rd step of a plan; memory or split backwards were measured | plans for the next failures |
| 10th step of the run, workers lost or back | the best layout (:class:`LayoutChoice`) |
| operations no longer take the times of the plan | a plan for those (:mod:`~lightning_recycle.control.plans.drift`) |

For a layout each worker reports once its layers (:class:`~lightning_recycle.control.protocol.messages.LayerFacts`); it
is looked for in the background, while training goes on with re-routing alone.

Contract: every method is called from the coordinator's thread, which is woken for :meth:`RunPlans.better`.

Must not know: connections; of a generation's roster, more than the failed workers; how layers move.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias

from lightning_recycle.control.plans.assumptions import Measurements, OperationSeconds
from lightning_recycle.control.plans.drift import DriftMonitor, DriftOptions, DriftQuestion, Proposal
from lightning_recycle.control.plans.plan_provider import Job, PlanProvider, ReadyPlan, Urgency, num_to_keep
from lightning_recycle.control.protocol.messages import Applied, Cuts, LayerFacts, Measured, Returned
from lightning_recycle.control.protocol.state import LayoutReady, PlanReady
from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.child_process import Question, UnexpectedError
from lightning_recycle.planning.costs import Costs, Memory, Profile
from lightning_recycle.planning.grid import Grid, Worker
from lightning_recycle.planning.layer_cuts import LayerCosts, has_ties, held_ranges, parts_of
from lightning_recycle.planning.layouts import Candidate, FailureRecord, LayoutPlan, plan_layout
from lightning_recycle.planning.program import links
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.planning.split_backward import TechniqueChoice
from lightning_recycle.planning.timing import MicrobatchVariation, retime

log = logging.getLogger(__name__)

Rebalance: TypeAlias = Literal["auto", "always", "never"]
"""Whether layers move: where that pays until the next failure; wherever steps get shorter; or never."""

_BANDWIDTH = 1e9  # bytes/s of a link before it is measured
_NEVER = 1e12  # seconds
_STEPS_BEFORE_LAYOUTS = 10  # from then on what operations take counts as known
_LEAST_GAIN_OF_LAYOUT = 0.05  # of a step: measured times are not exact
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
            least_gain=_LEAST_GAIN_OF_LAYOUT,
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
        newest = self._newest
        return None if newest is None or newest.cuts != cuts else newest

    def _variation(self, cuts: Cuts, grid: Grid) -> tuple[MicrobatchVariation, MicrobatchVariation] | None:
        """How micro-batches differ under ``cuts``, split and fused; None if not measured."""
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


_STEPS_BEFORE_PLANNING_AHEAD = 3  # the first ones are slower than the rest
_LEAST_GAIN = 0.005  # of a step: what a better plan must save; switching to it costs a message
_LEAST_GAIN_OF_MEMORY = 0.02  # what using the memory there is must save; times of the first steps are not exact


class RunPlans:
    """Chooses what the workers of ``grid`` run, from the plans of ``provider``.

    ``drift``: when to change the plan for other times of operations; None for never. ``on_profile``: called with the
    profile of the model once all stages have measured. ``wake``: called from another thread when :meth:`better` has
    something new, or :meth:`request_plan` changes. ``rebalance``: when layers move.

    Attributes:
        schedules: the newest schedules that were run, with the times measured in them.
        number: how many plans were begun.
        layouts: where the layers are, and whether they should move.
    """

    def __init__(
        self,
        grid: Grid,
        provider: PlanProvider,
        drift: DriftOptions | None,
        on_profile: Callable[[Profile], None],
        wake: Callable[[], None],
        rebalance: Rebalance = "never",
    ) -> None:
        self.schedules: list[Schedule] = []
        self.measurements = Measurements(grid)
        self.number = 0
        self._grid = grid
        self._provider = provider
        self._background = provider.background
        self._background.wake = wake
        self._drift = None if drift is None else DriftMonitor(drift, provider.planner)
        self.layouts = LayoutChoice(rebalance, provider, self.measurements)
        self._on_profile = on_profile
        self._recorded_choice: TechniqueChoice | None = None  # the newest choice that the record has
        self._notes: list[tuple[str, dict[str, Any]]] = []  # not taken yet
        self._steps = 0  # since the newest schedule began
        self._links: Mapping[Worker, frozenset[Worker]] = {}  # who is connected with whom in the newest generation

    # ------------------------------------------------------------------ what all run

    def request_plan(self, failed: frozenset[Worker], joining: Iterable[Worker]) -> bool:
        """Requests the schedule of :meth:`plan_generation`; returns whether it is there."""
        self._provider.assumptions.forget(joining)
        return self._provider.request_plan(failed, self.operation_seconds)

    def plan_generation(self, failed: frozenset[Worker], joining: Iterable[Worker], step: int) -> Schedule:
        self._retime_newest()
        self._provider.assumptions.forget(joining)
        schedule = self._provider.plan(failed, self.operation_seconds)
        before = self.schedules[-1].failed if self.schedules else frozenset[Worker]()
        self._begin(schedule, step)
        self._links = links(schedule)
        self.layouts.begin(schedule, before)
        return schedule

    def change(self, schedule: Schedule, step: int) -> None:
        """All run ``schedule`` from ``step`` on, in the same generation."""
        self._retime_newest()
        self._begin(schedule, step)

    def _begin(self, schedule: Schedule, step: int) -> None:
        self.number += 1
        self.measurements.begin(schedule)
        self.schedules.append(schedule)
        del self.schedules[: -num_to_keep(self.schedules)]
        self._steps = 0
        if self._drift is not None:
            self._drift.begin(schedule, step, self._provider.assumptions.communication)

    def _retime_newest(self) -> None:
        """Gives the newest schedule, now over, the times that were measured in it."""
        if self.schedules and self._steps:
            self.schedules[-1] = self._provider.assumptions.retime(self.schedules[-1], self.operation_seconds)

    @property
    def timed(self) -> Callable[[], Schedule] | None:
        """Function for the plan with measured times, for any thread; None before."""
        if not self.schedules or not self.operation_seconds:
            return None
        return partial(self._provider.assumptions.retime, self.schedules[-1], dict(self.operation_seconds))

    @property
    def operation_seconds(self) -> OperationSeconds:
        return self.measurements.operation_seconds

    @property
    def computing_seconds(self) -> tuple[float, float] | None:
        return self.measurements.computing_seconds(self.schedules[-1]) if self.schedules else None

    # ------------------------------------------------------------------ what is measured

    def applied(self, worker: Worker, message: Applied, is_stage_leader: bool) -> None:
        self.measurements.applied(worker, message, is_stage_leader)
        if self._drift is not None:
            self._drift.observe(worker, message.step, message.step_seconds)

    def returned(self, worker: Worker, message: Returned) -> None:
        """Takes in the measurements of ``worker`` again, after a restart."""
        if message.facts:
            self.measurements.took(worker.stage, message.facts[-1].operation_seconds)
        if message.measured is not None:
            self.take(worker, message.measured)

    def take(self, worker: Worker, message: Measured) -> None:
        newest = self.schedules[-1] if self.schedules else None
        if message.profiled is not None:
            profile = self.measurements.profiled(worker.stage, message.profiled)
            if profile is not None:
                self._on_profile(profile)
        if message.footprint is not None:
            footprints = self.measurements.footprints
            footprints[worker] = message.footprint
            if newest is not None and footprints.keys() >= set(newest.live_workers):
                self._provider.assumptions.measured(footprints)
                self._plan_ahead_again()
        if message.layers is not None:
            self.layouts.add_facts(message.layers)
        if message.trial is not None:
            trials = self.measurements.trials
            trials[worker] = message.trial
            if newest is not None and trials.keys() >= set(newest.live_workers) - newest.idle_workers():
                self._provider.assumptions.tried(trials)
                self._plan_ahead_again()

    def stepped(self, seconds: float | None) -> None:
        """A step was committed, ``seconds`` after the previous one."""
        self._steps += 1
        self.measurements.steps += 1
        if not self.schedules:
            return
        if self._steps == _STEPS_BEFORE_PLANNING_AHEAD:
            self.plan_ahead()
        self.layouts.stepped(self.schedules[-1], seconds)
        if self._drift is not None:
            self._drift.stepped(seconds)
            if (question := self._drift.question()) is not None:
                self._background.begin(Urgency.DRIFT, self._look_for_better(question))

    # ------------------------------------------------------------------ what may come

    def plan_ahead(self) -> None:
        if not self.schedules:
            return  # the coordinator was started again; its first generation begins in a moment
        newest = self.schedules[-1]
        # A better one for these workers can begin only at a step boundary, so there must be steps.
        self._provider.plan_ahead(newest.failed, self.operation_seconds, newest if self._steps else None)

    def _plan_ahead_again(self) -> None:
        if self._steps >= _STEPS_BEFORE_PLANNING_AHEAD:
            self.plan_ahead()

    def better(self) -> list[PlanReady | LayoutReady]:
        """The better plans and layouts found since the last call."""
        changes: list[PlanReady | LayoutReady | None] = []
        for result in self._background.take():
            if isinstance(result, ReadyPlan):
                changes.append(self._change_if_better(result))
            elif isinstance(result, LayoutPlan):
                ready, why = self.layouts.decide(result, self.schedules[-1])
                changes.append(ready)
                if why:
                    self._notes.append(("layout", {"why": why}))
            else:
                changes.append(self._accepted(*result))
        return [ready for ready in changes if ready is not None]

    def _look_for_better(self, question: DriftQuestion) -> Job:
        """Job that looks for a plan for the present times; publishes its proposal."""
        proposal: Proposal | None = None
        try:
            proposal = yield question.answer
        except PlanningError as error:
            log.warning("No plan was found for the times that the operations take now: %s", error)
        self._background.publish((question, proposal))

    def _change_if_better(self, ready_plan: ReadyPlan) -> PlanReady | None:
        """The change to ``ready_plan`` if it saves time or memory is short."""
        schedule, newest = ready_plan.schedule, self.schedules[-1]
        problem = schedule.problem
        current = replace(newest.problem, costs=problem.costs, in_flight_limit=None, memory=None)
        if current != replace(problem, in_flight_limit=None, memory=None, technique=newest.problem.technique):
            return None  # other workers are failed or slow now
        choice = ready_plan.choice
        if choice is not None and choice is not self._recorded_choice:
            self._recorded_choice = choice
            self._notes.append(("chosen", choice.facts))
        if problem.technique != newest.problem.technique:
            if choice is None or choice.splits != problem.technique.split_backward:
                return None  # what runs was chosen since
            old_period = schedule.period / (1 - choice.gain)
            return self._change_to(schedule, choice.gain, old_period, ready_plan.seconds, ready_plan.backend)
        other_memory = newest.problem.memories != problem.memories
        old_period = retime(newest, problem.costs).period
        gain = 1.0 - schedule.period / old_period if old_period else 0.0
        if other_memory and not newest.fits(problem):
            log.warning("The plan that runs needs more memory than there is: changing to one that needs less.")
        elif gain < (_LEAST_GAIN_OF_MEMORY if other_memory else _LEAST_GAIN):
            log.debug("%s found no better plan than the one that runs (%.2f %%).", ready_plan.backend, 100 * gain)
            return None
        return self._change_to(schedule, gain, old_period, ready_plan.seconds, ready_plan.backend)

    def _accepted(self, question: DriftQuestion, proposal: Proposal | None) -> PlanReady | None:
        assert self._drift is not None
        gain = self._drift.accepts(question, proposal)
        if gain is None or proposal is None or proposal.schedule is None:
            return None
        schedule = proposal.schedule
        self._provider.adopt(schedule)
        return self._change_to(schedule, gain, proposal.before, proposal.seconds, "drift")

    def origin(self) -> dict[str, Any]:
        """Details of the newest plan for the record: source, and choice of backwards."""
        facts = self._backward(self.schedules[-1]) if self.schedules else {}
        if facts:
            self._recorded_choice = self._provider.choice(self.schedules[-1].problem)
        return {"plan": self._provider.source, **facts}

    def take_notes(self) -> list[tuple[str, dict[str, Any]]]:
        """Comparisons since the last call, as kinds and details of events.

        "chosen" (:attr:`~lightning_recycle.planning.split_backward.TechniqueChoice.facts`) and "layout".
        """
        taken, self._notes = self._notes, []
        return taken

    def _backward(self, schedule: Schedule) -> dict[str, Any]:
        choice = self._provider.choice(schedule.problem)
        if choice is None or choice.splits != schedule.problem.technique.split_backward:
            return {}
        return {"backward": choice.facts}

    def _change_to(self, schedule: Schedule, gain: float, before: float, seconds: float, found_by: str) -> PlanReady:
        factors = tuple((w.pipeline, w.stage, factor) for w, factor in schedule.problem.worker_factors)
        details = {
            "gain": gain,
            "before": before,
            "after": schedule.period,
            "worker_factors": factors,
            "planning_seconds": seconds,
            "found_by": found_by,
            **self._backward(schedule),
        }
        roster = tuple(self._grid.rank(worker) for worker in schedule.live_workers)
        reconnects = any(other not in self._links.get(worker, ()) for worker, other in schedule.exchanges())
        return PlanReady(roster, schedule, details, reconnects)

    def close(self) -> None:
        self._provider.close()
        self._retime_newest()
