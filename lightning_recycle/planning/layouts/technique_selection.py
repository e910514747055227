"""Selection of techniques by measured costs: split backwards, staggered optimizer.

Concept: splitting a backward is not free: B and W together may take longer than the fused BW, by 4 to 17 % of a step
where it was measured on cores that workers share. So a plan with split backwards, at what B and W take, is compared
with one of fused backwards, at what BW takes; and the staggered optimizer, at what it costs a step, with one optimizer
step for all stages. What is simpler is kept unless the other wins by ``least_gain``: fused over split, plain over
staggered.

Contract: pure, deterministic: all who know the same costs choose the same. Everything that was compared is kept in
numbers.

Must not know: who measured, torch.

Units: seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from lightning_recycle.arguments import at_least
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning.grid import OpKind
from lightning_recycle.planning.layouts.layout_candidates import Judge, judged
from lightning_recycle.planning.problem import Problem, Technique

__all__ = ["Switch", "TechniqueChoice", "choose_technique"]

Switch: TypeAlias = bool | Literal["auto"]
"""On, off, or as the costs decide."""

_LEAST_GAIN = 0.005  # of a period


@dataclass(frozen=True)
class TechniqueChoice:
    """The techniques, and what was compared.

    Args:
        technique: the choice.
        compared: each technique that was possible, with its predicted seconds of a step.
        splitting: by how much B + W of all stages take longer than BW, as a fraction of F + BW.
    """

    technique: Technique
    compared: tuple[tuple[Technique, float], ...]
    splitting: float = 0.0

    @property
    def period(self) -> float:
        """Predicted seconds of a step."""
        return dict(self.compared)[self.technique]

    def gain(self, other: Technique) -> float:
        """The part of a step that is saved compared with ``other``; 0 where that is not known."""
        period = dict(self.compared).get(other, self.period)
        return 1.0 - self.period / period if 0.0 < period < math.inf else 0.0

    def why(self) -> tuple[str, ...]:
        """The reasons in numbers, a line each."""
        lines = [f"{_named(self.technique)}: a step of {self.period:.4g} s"]
        lines += [
            f"not {_named(other)}: {period:.4g} s ({100 * (period / self.period - 1):+.1f} %)"
            for other, period in self.compared
            if other != self.technique
        ]
        return (*lines, f"split backwards cost {100 * self.splitting:.1f} % of F and BW")


def choose_technique(
    problem: Problem,
    backward: Sequence[float] | None = None,
    *,
    decoupled: Switch = "auto",
    staggered: Switch = "auto",
    stagger_seconds: float = 0.0,
    least_gain: float = _LEAST_GAIN,
    judge: Judge = judged,
) -> TechniqueChoice:
    """The techniques with the shortest predicted step; the simpler ones where they are within ``least_gain``.

    Args:
        problem: the problem, with what B and W take where they are split; its technique is not used.
        backward: seconds of the fused backward of each stage; by default B + W.
        decoupled, staggered: what the user wants of each technique.
        stagger_seconds: what a step takes longer with the staggered optimizer, besides its plan.
        least_gain: part of a period that a technique must save.
        judge: plans a problem.

    Raises:
        ConfigurationError: when ``backward`` has not one value per stage, or a switch is none.
        PlanningError: when there is no plan.
    """
    costs = problem.costs
    both = tuple(map(sum, zip(costs.backward_input, costs.backward_weight, strict=True)))
    fused = both if backward is None else tuple(at_least("", "backward", value) for value in backward)
    if len(fused) != costs.stages:
        raise ConfigurationError(f"backward has {len(fused)} values for {costs.stages} stages: give one per stage.")
    at_least("", "stagger_seconds", stagger_seconds)
    whole = replace(problem, costs=replace(costs, backward_input=fused, backward_weight=(0.0,) * costs.stages))
    compared = []
    for split in _possible("decoupled", decoupled):
        for apart in _possible("staggered", staggered):
            technique = Technique(decoupled=split, staggered=apart)
            judgement = judge(replace(problem if split else whole, technique=technique), None)
            schedule = judgement.schedule
            if split and len(_possible("decoupled", decoupled)) > 1 and schedule is not None:
                operations = (each for worker in schedule.live_workers for each in schedule.workers[worker])
                if all(each.op.kind is not OpKind.BACKWARD_WEIGHT for each in operations):  # the plan splits nothing
                    continue
            compared.append((technique, judgement.period + (stagger_seconds if apart else 0.0)))
    best = compared[0]
    for other in compared[1:]:  # the simpler ones come first
        if other[1] < best[1] * (1 - least_gain):
            best = other
    work = sum(costs.forward) + sum(fused)
    return TechniqueChoice(best[0], tuple(compared), (sum(both) - sum(fused)) / work if work else 0.0)


def _possible(name: str, switch: Switch) -> tuple[bool, ...]:
    if switch == "auto":
        return False, True
    if not isinstance(switch, bool):
        raise ConfigurationError(f'{name}={switch!r}: give True, False or "auto".')
    return (switch,)


def _named(technique: Technique) -> str:
    return f"{'split' if technique.decoupled else 'fused'} backwards, {'' if technique.staggered else 'not '}staggered"
