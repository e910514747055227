"""Layouts for every next failure: what a run would move if one more worker of a stage were lost.

Contract: pure. One plan for each stage that can lose a worker: which of its workers fails does not matter, unless some
are slow, and then the first that is not counts.

Must not know: who keeps the layouts, torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lightning_recycle.planning.change_rate import FailureRecord
from lightning_recycle.planning.grid import Worker
from lightning_recycle.planning.layer_costs import LayerCosts
from lightning_recycle.planning.layout_judging import Judge, judged
from lightning_recycle.planning.layout_plans import Changing, LayoutPlan
from lightning_recycle.planning.layouts import plan_layout
from lightning_recycle.planning.problem import Problem

__all__ = ["layouts_ahead", "next_losses"]


def next_losses(problem: Problem) -> Iterator[Worker]:
    """For each stage with at least two live workers, one that stands for all that may fail next."""
    slow = dict(problem.worker_factors)
    for stage in range(problem.grid.stages):
        live = problem.live_workers(stage)
        if len(live) > 1:
            yield next((worker for worker in live if worker not in slow), live[0])


def layouts_ahead(
    problem: Problem,
    layers: LayerCosts,
    cuts: Sequence[int],
    *,
    record: FailureRecord | None = None,
    changing: Changing | None = None,
    fixed: str = "",
    judge: Judge = judged,
) -> Iterator[tuple[Worker, LayoutPlan]]:
    """For each stage with at least two live workers, one that fails next and the best layout then.

    Args:
        problem: the present problem; its failed workers stay failed.
        layers, cuts, changing, fixed, judge: as for :func:`~lightning_recycle.planning.layouts.plan_layout`.
        record: failures so far; by default the prior alone.

    Raises:
        ConfigurationError, PlanningError: as ``plan_layout``.
    """
    seen = record or FailureRecord()
    slow = dict(problem.worker_factors)
    for lost in next_losses(problem):
        after = replace(
            problem,
            failed=problem.failed | {lost},
            worker_factors=tuple((worker, factor) for worker, factor in slow.items() if worker != lost),
        )
        remaining = sum(after.live_counts())
        yield (
            lost,
            plan_layout(
                after,
                layers,
                cuts,
                next_change=seen.next_change(remaining),
                changing=changing,
                fixed=fixed,
                judge=judge,
            ),
        )
