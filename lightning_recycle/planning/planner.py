"""Planners by name, and the usual call, ``plan(problem)``.

A planner turns a problem into a schedule; "heuristic" is the default, and :mod:`exact_planner` has those that ask a
solver. :func:`plan` and :func:`solve` never return a schedule that the validator rejects.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol, runtime_checkable

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning.exact_planner import BACKENDS, ExactPlanner
from lightning_recycle.planning.heuristic_planner import HeuristicPlanner
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.schedule import PlanResult, Schedule, proven
from lightning_recycle.planning.validation import validate

log = logging.getLogger(__name__)


@runtime_checkable
class Planner(Protocol):
    """Anything with a ``plan`` method."""

    def plan(self, problem: Problem) -> Schedule:
        """A schedule for ``problem``, made once for all workers.

        Raises:
            PlanningError: when there is none.
        """
        ...


_REGISTRY: dict[str, Callable[[], Planner]] = {
    "heuristic": HeuristicPlanner,
    **{backend: partial(ExactPlanner, backend) for backend in BACKENDS},
}


def register_planner(name: str, factory: Callable[[], Planner]) -> None:
    """Make ``factory()`` available as ``planner=name``.

    Raises:
        ConfigurationError: when the name is taken.
    """
    if name in _REGISTRY:
        raise ConfigurationError(f"a planner named {name!r} exists already: choose another name.")
    _REGISTRY[name] = factory


def available_planners() -> tuple[str, ...]:
    """The names that :func:`get_planner` knows."""
    return tuple(sorted(_REGISTRY))


def get_planner(planner: str | Planner) -> Planner:
    """The planner of that name; a planner is returned unchanged.

    Raises:
        ConfigurationError: when the name is unknown.
    """
    if isinstance(planner, str):
        if planner not in _REGISTRY:
            raise ConfigurationError(f"unknown planner {planner!r}: choose one of {', '.join(available_planners())}.")
        return _REGISTRY[planner]()
    if not isinstance(planner, Planner):
        raise ConfigurationError(
            f"{planner!r} is not a planner: give a name, e.g. 'heuristic', or an object with a method plan(problem)."
        )
    return planner


def plan(problem: Problem, planner: str | Planner = "heuristic") -> Schedule:
    """The validated schedule of ``problem``.

    Raises:
        ConfigurationError: when the planner is unknown.
        PlanningError: when there is no schedule, or the planner returned an invalid one.
    """
    result = solve(problem, planner)
    if result.warning is not None:
        log.warning("%s", result.warning)
    return result.schedule


def solve(problem: Problem, planner: str | Planner = "heuristic") -> PlanResult:
    """Like :func:`plan`, with bound, status, time and warnings.

    Raises:
        ConfigurationError: when the planner is unknown.
        PlanningError: when there is no schedule, or the planner returned an invalid one.
    """
    chosen = get_planner(planner)
    started = time.monotonic()
    if isinstance(chosen, ExactPlanner):
        result = chosen.solve(problem)
    else:
        name = "heuristic" if isinstance(chosen, HeuristicPlanner) else type(chosen).__name__
        schedule = chosen.plan(problem)
        result = proven(schedule, name, seconds=time.monotonic() - started)
    validate(result.schedule)
    return result
