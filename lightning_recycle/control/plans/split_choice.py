"""``decoupled="auto"``: which plans split backwards, chosen by what the workers have tried.

Concept: until all stages have tried what splitting costs, every plan is fused. From then on a problem is asked with
what B and W take; both plans are made, and the better one is kept
(:func:`~lightning_recycle.planning.layouts.technique_selection.choose_technique`). A plan counts as what it takes
without waiting for processors that workers share, but not as less than what keeps these busy.

Contract: usable from several threads; remembers the choice for each distribution of failures, and what it was asked.

Must not know: how plans are made and kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_recycle.control.plans.ready_plans import PlanKey, key_of
from lightning_recycle.errors import PlanningError
from lightning_recycle.planning.bounds import lower_bound
from lightning_recycle.planning.grid import Grid, Worker
from lightning_recycle.planning.layouts.layout_candidates import Judgement
from lightning_recycle.planning.layouts.technique_selection import TechniqueChoice, choose_technique
from lightning_recycle.planning.problem import Problem, Technique
from lightning_recycle.planning.profile import SplitCosts, SplitTrial
from lightning_recycle.planning.result import PlanResult
from lightning_recycle.planning.timing import Turns

__all__ = ["Splitting", "facts_of"]

_KEPT = 4_096  # choices; as many plans are never kept


@dataclass(frozen=True)
class _Chosen:
    """A choice.

    Args:
        asked: what was to be planned.
        choice: what was compared.
        planned: the problem of the plan that was kept.
    """

    asked: Problem
    choice: TechniqueChoice
    planned: Problem


class Splitting:
    """The choices of a run on ``grid``."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._costs: SplitCosts | None = None
        self._chosen: dict[PlanKey, _Chosen] = {}

    @property
    def is_tried(self) -> bool:
        """Whether it is known what splitting costs."""
        return self._costs is not None

    def tried(self, trials: Mapping[Worker, SplitTrial]) -> None:
        """These workers have tried it, at least one of each stage."""
        self._costs = SplitCosts(self._grid, dict(trials))

    def asked(self, problem: Problem, fused: Sequence[bool]) -> Problem:
        """What is to be planned: fused while nothing is known, else with the costs of split backwards.

        Args:
            problem: the problem with measured costs.
            fused: for each stage, whether they are those of fused backwards.
        """
        known, staggered = self._costs, problem.technique.staggered
        if known is None:
            return replace(problem, technique=Technique(False, staggered))
        return replace(problem, technique=Technique(True, staggered), costs=known.of_split(problem.costs, fused))

    def fused(self, problem: Problem) -> Problem:
        """What was :meth:`asked`, with fused backwards."""
        known = self._costs
        technique = Technique(False, problem.technique.staggered)
        if known is None or not problem.technique.decoupled:
            return replace(problem, technique=technique)
        half = tuple(value / 2 for value in known.of_fused(problem.costs, (False,) * self._grid.stages))
        costs = replace(problem.costs, backward_input=half, backward_weight=half)
        return replace(problem, technique=technique, costs=costs)

    def make(self, problem: Problem, make: Callable[[Problem], PlanResult]) -> PlanResult:
        """The better one of the two plans for what was :meth:`asked`.

        Args:
            problem: the question.
            make: makes a plan.

        Raises:
            PlanningError: when there is none.
        """
        known = self._costs
        if known is None or not problem.technique.decoupled:
            return make(problem)
        made: dict[bool, PlanResult] = {}
        computing, shortest = known.computing, math.inf

        def judge(wanted: Problem, _: Turns | None) -> Judgement:
            nonlocal shortest
            split = wanted.technique.decoupled
            wanted = problem if split else self.fused(problem)
            least = known.least_seconds(wanted)
            if split:
                bound = max(least, computing * lower_bound(wanted))
                if bound >= shortest:
                    return Judgement(bound)  # no plan can be better
            try:
                made[split] = make(wanted)
            except PlanningError:
                if not split:
                    raise
                return Judgement(math.inf)  # what waits between B and W has no room
            schedule = made[split].schedule
            period = max(least, computing * schedule.period)
            shortest = min(shortest, period)
            return Judgement(period, schedule=schedule)

        backward = known.of_fused(problem.costs, (False,) * self._grid.stages)
        choice = choose_technique(problem, backward, staggered=problem.technique.staggered, judge=judge)
        kept = made[choice.technique.decoupled]
        self._chosen[key_of(problem)] = _Chosen(problem, choice, kept.schedule.problem)
        while len(self._chosen) > _KEPT:
            del self._chosen[next(iter(self._chosen))]
        return kept

    def choice(self, problem: Problem) -> TechniqueChoice | None:
        """The newest choice for the failed and slow workers of ``problem``."""
        found = self._chosen.get(key_of(problem))
        return None if found is None else found.choice

    def origin(self, problem: Problem) -> Problem:
        """What was asked when the plan with this problem was chosen; ``problem`` itself where none was."""
        found = self._chosen.get(key_of(problem))
        if found is None or (found.planned.technique, found.planned.costs) != (problem.technique, problem.costs):
            return problem
        return found.asked


def facts_of(choice: TechniqueChoice) -> dict[str, Any]:
    """A choice in numbers, for the record of a run: ``split``, whether backwards are; ``cost``, how much longer they
    take then, as a part of F and BW; ``wins``, what the split plan saves of a step, less than nothing where it loses;
    ``fused_seconds`` and ``split_seconds``, what a step takes at least by the two plans, as far as they differ.
    """
    seconds = {technique.decoupled: period for technique, period in choice.compared if period < math.inf}
    found = {"split": choice.technique.decoupled, "cost": choice.splitting, "wins": 0.0}
    found |= {f"{'split' if split else 'fused'}_seconds": period for split, period in seconds.items()}
    if len(seconds) == 2 and seconds[False]:
        found["wins"] = 1.0 - seconds[True] / seconds[False]
    return found
