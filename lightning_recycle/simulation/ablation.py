"""What each technique gains: the step time as techniques are switched on one by one, against two baselines.

Source: ReCycle (arXiv 2405.14009), section 3, whose running example takes 36, 29 and 27 slots against 27
without failures.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_recycle.planning import Costs, Grid, Problem, Technique, Worker
from lightning_recycle.simulation.steps import DEFAULT_EFFORT, planned_seconds
from lightning_recycle.simulation.training_model import one_f_one_b_seconds

__all__ = ["Ablation", "ablation"]


@dataclass(frozen=True, slots=True)
class Ablation:
    """Step times in the unit of the costs.

    Args:
        one_f_one_b: 1F1B without failures.
        zero_bubble: the decoupled schedule without failures, at most S micro-batches in flight, one optimizer step for
            all stages.
        adaptive: re-routing only, with the failures.
        decoupled: the same with a split backward.
        staggered: the same with a separate optimizer step per stage: all of ReCycle.
    """

    one_f_one_b: float
    zero_bubble: float
    adaptive: float
    decoupled: float
    staggered: float


def ablation(
    grid: Grid,
    failed: Iterable[Worker],
    costs: Costs | None = None,
    *,
    in_flight_limit: tuple[int, ...] | None = None,
    effort: int = DEFAULT_EFFORT,
) -> Ablation:
    """The three techniques one by one.

    Args:
        grid: the grid.
        failed: the dead workers.
        costs: durations; by default one slot each for F, B and W, and none for the rest.
        in_flight_limit: the most micro-batches a worker of each stage may hold, in all but the 1F1B baseline.
        effort: effort of the planner; 0 for its plain rule, which is the paper's.
    """
    durations = costs or Costs.uniform(grid.stages)
    gone = frozenset(failed)
    limit = tuple(min(grid.stages, most) for most in in_flight_limit or (grid.stages,) * grid.stages)
    one = Grid(1, grid.stages, grid.microbatches)

    def seconds(technique: Technique) -> float:
        return planned_seconds(Problem(grid, durations, gone, technique, in_flight_limit), effort)

    return Ablation(
        one_f_one_b=one_f_one_b_seconds(durations, grid.microbatches),
        # Baselines are planned as well as possible, whatever the effort for the plans compared with them.
        zero_bubble=planned_seconds(Problem(one, durations, frozenset(), Technique(True, False), limit)),
        adaptive=seconds(Technique(False, False)),
        decoupled=seconds(Technique(True, False)),
        staggered=seconds(Technique(True, True)),
    )
