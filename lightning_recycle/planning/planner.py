"""Planners by name, the usual call, ``plan(problem)``, and the options of a run.

A planner turns a problem into a schedule; "heuristic" is the default, and
:mod:`~lightning_recycle.planning.exact_planner` has those that ask a solver. :func:`plan` and :func:`solve` never
return a schedule that the validator rejects.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from lightning_recycle.arguments import PATH, SWITCH, Check, OptionGroup, choice, is_integer, option, suggests_options
from lightning_recycle.errors import ConfigurationError, choose_from
from lightning_recycle.planning.costs import MemoryLimit, is_memory_limit
from lightning_recycle.planning.exact_planner import BACKENDS, ExactPlanner
from lightning_recycle.planning.heuristic_planner import HeuristicPlanner
from lightning_recycle.planning.problem import Problem, Technique
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


def get_planner(planner: str | Planner, owner: str = "") -> Planner:
    """The planner of that name; a planner is returned unchanged.

    ``owner``: the class whose argument it is, for the error.

    Raises:
        ConfigurationError: when the name is unknown.
    """
    if isinstance(planner, str):
        if planner not in _REGISTRY:
            names = available_planners()
            raise ConfigurationError.for_option(owner, "planner", planner, choose_from(names), names)
        return _REGISTRY[planner]()
    if not isinstance(planner, Planner):
        remedy = "give a name, such as 'heuristic', or an object with a method plan(problem)"
        raise ConfigurationError.for_option(owner, "planner", planner, remedy)
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


Partition: TypeAlias = Literal["count"] | Sequence[int]
"""How layers are distributed over stages.

Equal numbers of layers; the number of layers of each stage, as integers (``[3, 5, 4]``); or the seconds of each layer,
as floats, for stages of equal seconds.
"""

Switch: TypeAlias = bool | Literal["auto"]
"""On, off, or as the costs decide."""

_MICROBATCHES = re.compile(r"([1-9]\d*) micro-?batch(es)?")


_MEMORY = Check(
    lambda value: is_memory_limit(value) or (isinstance(value, str) and _MICROBATCHES.fullmatch(value) is not None),
    "give 'auto', the bytes of a worker as an integer, a fraction of the device of at most 1.0, or the number of"
    " micro-batches that a worker may hold, such as '4 micro-batches'",
)


_PARTITION = Check(
    lambda value: value == "count" or (isinstance(value, Sequence) and all(is_integer(n, 1) for n in value or [0])),
    "use 'count', or the number of layers of each stage, 1 or more, as in [3, 5, 4]",
    ("count",),
)


@suggests_options
@dataclass(frozen=True)
class PlanningOptions(OptionGroup):
    """How a step is planned, with and without failed workers.

    Args:
        planner: the name of a planner, or an object with ``plan(problem)``. A solver is asked before the run only;
            plans for failures are then the heuristic's, or those of ``plan_library``.
        plan_library: a directory in which plans are looked up, and stored; by default none. ``recycle-plan
            library=...`` fills one before the run. Use it with a ``profile``: plans are found by their costs.
        profile: a file with measured times of the model, or "auto" to write one; by default each run measures its
            own. If the file does not exist, it is measured in the first steps and written. "auto" does that in every
            run, to ``profile.json`` in the Trainer's ``default_root_dir``.
        partition: the layers of each stage at first: equal numbers ("count"), or a list such as ``[3, 5, 4]``.
            ``RecoveryOptions(rebalance)`` moves them by their measured times.
        split_backward: whether backwards are split, so that weight gradients fill idle slots; "auto" where the first
            steps show that this pays. It takes processor time; "auto" splits only where the plan saves more, and
            decides again at every change of the workers. Until then all are fused. With a ``plan_library``, as True.
        staggered: whether a stage steps its optimizer as soon as its own gradient is complete, before other stages;
            "auto" wherever the stages can. The next step then begins there while others finish this one. Costs a copy
            of the stage's parameters and of its gradients. With ``16-mixed``, weights tied across stages, or clipping
            by norm where hooks look at what a step left, every stage waits for all others nevertheless, as do plans.
        memory: the memory of a worker that plans may use: "auto" for 90 % of it, a fraction such as 0.7, bytes, or "4
            micro-batches". On a CPU it is the worker's share of the machine's (or of its container's). A float up to
            1.0 is a fraction of that, an integer the bytes of all tensors of a worker. A number of micro-batches limits
            those that a worker holds between F and W, without regard to bytes. The workers measure in their second step
            what they need; until then a worker holds at most as many micro-batches as in 1F1B.
        activation_checkpointing: whether forwards may be computed again to save memory: "auto", where that makes the
            step shorter, or "never". A stage then keeps the input of a micro-batch instead of its activations, for as
            few micro-batches as needed. The result is the same.

    Raises:
        ConfigurationError: for values that cannot work.
    """

    planner: str | Planner = option("heuristic", shared="name of the planner")
    plan_library: str | os.PathLike[str] | None = option(None, PATH, by_launcher=True)
    profile: str | os.PathLike[str] | None = option(None, PATH, by_launcher=True)
    partition: Literal["count"] | list[int] = option("count", _PARTITION)
    split_backward: Switch = option("auto", SWITCH, shared="split backwards")
    staggered: Switch = option("auto", SWITCH, shared="let each stage step by itself")
    memory: MemoryLimit | str = option("auto", _MEMORY, shared="memory of a worker that plans may use")
    activation_checkpointing: Literal["auto", "never"] = option(
        "auto", choice("auto", "never"), shared="compute forwards again where memory makes the step slow"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        get_planner(self.planner, "PlanningOptions")

    @property
    def technique(self) -> Technique:
        """The techniques that may be used; plans choose where a switch is "auto"."""
        return Technique(split_backward=bool(self.split_backward), staggered=bool(self.staggered))

    @property
    def in_flight_limit(self) -> int | None:
        """The most micro-batches that a worker may hold, if ``memory`` is given so."""
        found = _MICROBATCHES.fullmatch(self.memory) if isinstance(self.memory, str) else None
        return None if found is None else int(found[1])

    @property
    def memory_limit(self) -> MemoryLimit:
        """The limit in bytes, which does not count beside :attr:`in_flight_limit`."""
        return "auto" if isinstance(self.memory, str) else self.memory

    def tries_splitting(self, stages: int) -> bool:
        """Whether workers try what it costs to split the backwards that plans fuse."""
        return self.split_backward == "auto" and stages > 1  # one stage has no idle slots
