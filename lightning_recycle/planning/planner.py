"""Planners by name, and the one call that everybody uses: ``plan(problem)``.

Concept: a planner turns a problem into a schedule. There is one by default, "heuristic"; others register under their
names.

Contract: :func:`plan` never returns a schedule that the validator rejects.

Must not know: what is inside a planner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning.heuristic import HeuristicPlanner
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.planning.validation import validate

__all__ = ["Planner", "available_planners", "get_planner", "plan", "register_planner"]


@runtime_checkable
class Planner(Protocol):
    """Anything with a ``plan`` method."""

    def plan(self, problem: Problem) -> Schedule:
        """A schedule for ``problem``; deterministic, so that all workers can compute the same one.

        Raises:
            PlanningError: when there is none.
        """
        ...


_REGISTRY: dict[str, Callable[[], Planner]] = {"heuristic": HeuristicPlanner}


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
    """The planner of that name; a planner is returned as it is.

    Raises:
        ConfigurationError: when the name is unknown.
    """
    if isinstance(planner, str):
        if planner not in _REGISTRY:
            raise ConfigurationError(f"unknown planner {planner!r}: choose one of {', '.join(available_planners())}.")
        return _REGISTRY[planner]()
    if not isinstance(planner, Planner):
        raise ConfigurationError(
            f"{planner!r} is no planner: give a name, e.g. 'heuristic', or an object with a method plan(problem)."
        )
    return planner


def plan(problem: Problem, planner: str | Planner = "heuristic") -> Schedule:
    """The validated schedule of ``problem``.

    Raises:
        ConfigurationError: when the planner is unknown.
        PlanningError: when there is no schedule, or the planner returned a wrong one.
    """
    schedule = get_planner(planner).plan(problem)
    validate(schedule)
    return schedule
