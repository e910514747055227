"""A question to the planner of layouts, and the process that answers some.

Contract: the process has the lowest priority, and ends with the wish for its answers.

Must not know: when questions are asked, and what becomes of the answers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_recycle.control.protocol.messages import Cuts
from lightning_recycle.errors import ReCycleError
from lightning_recycle.planning.child_process import Report, lowest_priority, run_in_child
from lightning_recycle.planning.layouts.layer_costs import LayerCosts
from lightning_recycle.planning.layouts.layout_candidates import Changing, LayoutPlan, Way
from lightning_recycle.planning.layouts.layout_search import plan_layout
from lightning_recycle.planning.problem import Problem

__all__ = ["CHANGING", "LayoutQuestion", "find_layouts"]

_LEAST_GAIN = 0.05  # of a step: measured times are not exact
_SWITCH_SECONDS = 0.5  # for which a change holds everybody up, besides the bytes that have to be sent
_WAYS: tuple[Way, ...] = ("layers",)  # workers change their stage by themselves: see Vacancies

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


def find_layouts(
    questions: Sequence[LayoutQuestion],
    found: Callable[[int, LayoutPlan | str], None],
    cancelled: threading.Event,
    time_limit: float | None = None,
) -> str:
    """Answers questions in a process of its own, one after the other.

    Args:
        questions: some questions.
        found: called with the number of a question and its plan, or the reason why there is none.
        cancelled: gives up when it is set.
        time_limit: seconds after which it gives up; None for no limit.

    Returns:
        Why the process ended early; empty if it did not.
    """

    def received(_: str, answer: Any) -> None:
        found(*answer)

    end = run_in_child(f"{__name__}:_child", tuple(questions), received, time_limit, cancelled)
    return end.failure or ""


def _child(questions: tuple[LayoutQuestion, ...], report: Report) -> None:
    lowest_priority()
    for number, question in enumerate(questions):
        answer: LayoutPlan | str
        try:
            answer = plan_layout(
                question.problem,
                question.layers,
                question.cuts,
                next_change=question.next_change,
                changing=CHANGING,
                fixed=question.fixed,
                whole=question.whole,
                ways=_WAYS,
            )
        except ReCycleError as error:
            answer = str(error)
        report("answer", (number, answer))
