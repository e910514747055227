"""Configuration of a run, from the coordinator's command line and the request of the first worker.

Concept: the request of the first worker settles the :class:`RunConfig` (:func:`settle`). The requests of all others
must be equal, as far as the command line leaves it open (:func:`difference`): a worker with another request runs
another script, or the same script with other options. The grid is part of the script, so the command line cannot
overrule it; it can overrule the rest, and a warning names what.

Must not know: sockets, planners' results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, cast

from lightning_recycle.control.plans.drift import DriftOptions
from lightning_recycle.control.plans.layout_choice import Adapt
from lightning_recycle.control.plans.run_planner import RunPlanner
from lightning_recycle.control.protocol.corruption import POLICIES
from lightning_recycle.control.protocol.detection import PATIENCE
from lightning_recycle.control.protocol.messages import RunRequest, Unfit
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning.grid import Grid
from lightning_recycle.planning.planner import get_planner
from lightning_recycle.planning.problem import Technique
from lightning_recycle.planning.profile import MemoryLimit, check_memory_limit

__all__ = [
    "CoordinatorOptions",
    "Overrides",
    "RunConfig",
    "WorkerProcess",
    "difference",
    "settle",
]

_MOST_WORKERS = 100_000

_WORDS = {
    "decoupled": "ReCycleStrategy(decoupled=...)",
    "staggered": "ReCycleStrategy(staggered=...), or what lets stages wait for each other",
    "planner": "ReCycleStrategy(planner=...)",
    "in_flight_limit": "ReCycleStrategy(in_flight_limit=...)",
    "memory": "ReCycleStrategy(memory=...)",
    "recompute": "ReCycleStrategy(activation_checkpointing=...)",
    "adapt": "ReCycleStrategy(adapt=...)",
    "timeout": "HeartbeatCallback(timeout=...)",
    "last_holder_timeout": "HeartbeatCallback(last_holder_timeout=...)",
    "coordinator_timeout": "HeartbeatCallback(coordinator_timeout=...)",
    "start_timeout": "ReCycleStrategy(start_timeout=...)",
    "machine_error_retries": "ReCycleStrategy(machine_error_retries=...)",
    "monitor": "PlanMonitor(threshold, window, horizon_steps)",
    "on_corruption": "ReCycleStrategy(on_corruption=...)",
    "check_every": "ReCycleStrategy(check_every=...)",
    "verify": "ReCycleStrategy(verify=...)",
}
"""Where a script says each of the wants."""


@dataclass(frozen=True)
class Overrides:
    """What the command line says, by the names of :class:`RunRequest`; None where it says nothing.

    ``pipelines``, ``stages`` and ``microbatches``: the grid.
    """

    pipelines: int | None = None
    stages: int | None = None
    microbatches: int | None = None
    decoupled: bool | None = None
    staggered: bool | None = None
    planner: str | None = None
    adapt: str | None = None
    timeout: float | None = None
    last_holder_timeout: float | None = None
    coordinator_timeout: float | None = None
    start_timeout: float | None = None
    machine_error_retries: int | None = None
    monitor: tuple[float, int, int] | None = None
    on_corruption: str | None = None
    verify: float | None = None

    @property
    def grid(self) -> Grid | None:
        """The grid, if the command line says all of it."""
        if self.pipelines is None or self.stages is None or self.microbatches is None:
            return None
        return Grid(self.pipelines, self.stages, self.microbatches)

    def check(self) -> None:
        """Raises ConfigurationError for what no script could agree with."""
        sizes = [self.pipelines or 1, self.stages or 1, self.microbatches or 1]
        _check(_overruled(self, RunRequest("", Grid(*sizes), False)))


@dataclass(frozen=True)
class RunConfig:
    """What was settled for a run.

    Args:
        wants: everything that all workers must want, as far as the command line leaves it open.
        overruled: what the command line says otherwise than the script, in words.
    """

    wants: RunRequest
    overruled: tuple[str, ...] = ()

    @property
    def grid(self) -> Grid:
        return self.wants.grid

    def planner(self) -> RunPlanner:
        """The planner of the run."""
        wants = self.wants
        technique = Technique(decoupled=bool(wants.decoupled), staggered=wants.staggered)
        memory = cast(MemoryLimit, wants.memory)
        return RunPlanner(
            wants.grid,
            wants.planner,
            technique,
            wants.in_flight_limit,
            memory=memory,
            recompute=wants.recompute,
            chooses_split=wants.decoupled == "auto" and wants.entry == "fit",
        )

    def options(self) -> CoordinatorOptions:
        """The options of its coordinator."""
        wants = self.wants
        return CoordinatorOptions(
            heartbeat_timeout=wants.timeout,
            last_holder_timeout=max(wants.timeout, wants.last_holder_timeout),
            coordinator_timeout=wants.coordinator_timeout,
            start_timeout=wants.start_timeout,
            adapt=cast(Adapt, wants.adapt) if wants.entry == "fit" else "reroute",
            machine_error_retries=wants.machine_error_retries,
            drift=None if wants.monitor is None else DriftOptions(*wants.monitor),
            on_corruption=wants.on_corruption,
            check_every=wants.check_every if isinstance(wants.check_every, int) else 0,
            verify=wants.verify,
        )


def settle(given: Overrides, wants: RunRequest | None) -> RunConfig:
    """The terms of a run whose first worker wants ``wants``; None: it does not say.

    Raises:
        ConfigurationError: if they contradict the command line's grid, or cannot work.
    """
    if wants is None:
        if given.grid is None:
            raise ConfigurationError(
                "This worker does not say what it wants, and the coordinator was not told the grid: start"
                " recycle-coordinator with --pipelines, --stages and --microbatches."
            )
        return RunConfig(_overruled(given, RunRequest("", given.grid, False)))
    if wants.needs_launcher:
        raise ConfigurationError(
            f"ReCycleStrategy({', '.join(wants.needs_launcher)}) needs a launching process, which starts all workers"
            " itself; with recycle-coordinator and recycle-run, leave it out."
        )
    grid, asked = wants.grid, (given.pipelines, given.stages, given.microbatches)
    own = (grid.pipelines, grid.stages, grid.microbatches if wants.microbatches_given else None)
    if any(None not in pair and pair[0] != pair[1] for pair in zip(asked, own, strict=True)):
        run = " x ".join("any" if size is None else str(size) for size in asked)
        raise ConfigurationError(
            f"This script wants a grid of {grid}, the coordinator has {run} (pipelines x stages x micro-batches): use"
            " the same devices * num_nodes, pipeline_parallel_size and num_microbatches in both, or start"
            " recycle-coordinator without --pipelines, --stages and --microbatches."
        )
    settled = _overruled(given, wants)
    _check(settled)
    differing = [
        f"{_WORDS[name]} is {getattr(wants, name)!r} in the script, and {getattr(settled, name)!r} by the command line"
        for name in _WORDS
        if getattr(wants, name) != getattr(settled, name)
    ]
    return RunConfig(settled, tuple(differing))


def difference(given: Overrides, terms: RunConfig, wants: RunRequest | None) -> Unfit | None:
    """Why a worker that wants ``wants`` cannot take part in a run of ``terms``; None if it can."""
    if wants is None:
        return None  # it takes what there is
    if terms.wants.entry not in ("", wants.entry):  # empty: the first worker did not say
        where = f"it is at Trainer.{wants.entry}(), the others are at Trainer.{terms.wants.entry}()."
        return Unfit(where, late=True)
    why = _difference(given, terms, wants)
    return None if why is None else Unfit(why)


def _difference(given: Overrides, terms: RunConfig, wants: RunRequest) -> str | None:
    """Why a worker that is at the same entry point cannot take part."""
    try:
        settled = settle(given, wants).wants
    except ConfigurationError as error:
        return str(error)
    if not wants.microbatches_given:
        settled = replace(settled, grid=replace(settled.grid, microbatches=terms.grid.microbatches))
    if settled.grid != terms.grid:
        return (
            f"This script wants a grid of {settled.grid}, the run has {terms.grid} (pipelines x stages x"
            " micro-batches), as its first worker wanted: start all workers with the same script and the same options."
        )
    for name, words in _WORDS.items():
        mine, theirs = getattr(settled, name), getattr(terms.wants, name)
        if mine != theirs:
            return (
                f"{words} is {mine!r} in this script, and {theirs!r} in the run, as its first worker wanted: start all"
                " workers with the same script and the same options."
            )
    return None


def _overruled(given: Overrides, wants: RunRequest) -> RunRequest:
    """``wants`` with what the command line says instead."""
    grid = wants.grid
    sizes = (given.pipelines, given.stages, given.microbatches)
    own = (grid.pipelines, grid.stages, grid.microbatches)
    merged = Grid(*(mine if size is None else size for size, mine in zip(sizes, own, strict=True)))
    names = {field.name for field in fields(Overrides)} & {field.name for field in fields(RunRequest)}
    said = {name: value for name in sorted(names) if (value := getattr(given, name)) is not None}
    return replace(wants, grid=merged, **said)


def _check(wants: RunRequest) -> None:
    """Raises ConfigurationError for what cannot work."""
    if wants.decoupled not in ("auto", True, False):
        raise ConfigurationError(f"decoupled={wants.decoupled!r}: a script wants True, False or 'auto'.")
    if wants.on_corruption not in POLICIES:
        raise ConfigurationError(f"--on-corruption {wants.on_corruption}: give one of {', '.join(POLICIES)}.")
    if wants.check_every != "auto" and not (isinstance(wants.check_every, int) and wants.check_every >= 0):
        raise ConfigurationError(f"check_every={wants.check_every!r}: give 'auto', a number of steps, or 0 for never.")
    get_planner(wants.planner)
    check_memory_limit(cast(MemoryLimit, wants.memory))
    if wants.grid.num_workers > _MOST_WORKERS:
        raise ConfigurationError(f"A grid of {wants.grid} has more than {_MOST_WORKERS} workers: give a smaller one.")
    amounts: dict[str, tuple[Any, bool]] = {
        "--timeout": (wants.timeout, 0 < wants.timeout < math.inf),
        "--last-holder-timeout": (wants.last_holder_timeout, 0 < wants.last_holder_timeout < math.inf),
        "--coordinator-timeout": (wants.coordinator_timeout, 0 < wants.coordinator_timeout < math.inf),
        "--start-timeout": (wants.start_timeout, 0 < wants.start_timeout < math.inf),
        "--machine-error-retries": (wants.machine_error_retries, wants.machine_error_retries >= 0),
        "--verify": (wants.verify, 0 <= wants.verify <= 1),
        "in_flight_limit": (wants.in_flight_limit, wants.in_flight_limit is None or wants.in_flight_limit >= 1),
    }
    for name, (value, is_right) in amounts.items():
        if not is_right:
            least = {
                "--machine-error-retries": "an integer of at least 0",
                "--verify": "a share of the time, from 0 to 1",
                "in_flight_limit": "at least 1",
            }
            raise ConfigurationError(f"{name} {value}: give {least.get(name, 'a number of seconds, more than 0')}.")


class WorkerProcess(Protocol):
    """What the coordinator must know of a local worker process."""

    @property
    def sentinel(self) -> int: ...

    def describe_exit(self, timeout: float) -> str | None:
        """Returns how the process ended, or None if it is still alive after ``timeout`` seconds."""

    def kill(self) -> None: ...

    def show_stack(self) -> None:
        """Lets the process write to its stderr where it is, if it can; called right before it is killed."""

    def release(self) -> None:
        """Nobody asks about it any more: its resources in this process may be freed once it has ended."""


@dataclass(frozen=True)
class CoordinatorOptions:
    """Time bounds of the control plane, in seconds, and how lost workers are replaced.

    Args:
        heartbeat_timeout: silence after which a worker is declared dead if a peer is well; no operation counts as
            stuck before it, either.
        last_holder_timeout: silence after which a worker is declared dead whoever else there is.
        coordinator_timeout: silence of the coordinator after which its workers give it up.
        start_timeout: time for all workers to join, and for a replacement to be ready; who takes much longer to
            connect than the others is given up before.
        report_timeout: time for all survivors to stop and report; longer than any single operation.
        grace: time between a broken connection and a regroup of workers that are all alive.
        patience: time for operations whose usual duration is not known, and for any if no peer is well.
        restart_workers: whether replacements of lost workers are started.
        max_restarts: bound for the whole run.
        adapt: when layers move to another stage, see :class:`~lightning_recycle.ReCycleStrategy`.
        normalize: whether a healthy worker moves to another stage when that pays.
        machine_error_retries: how often work is run again that raised an exception which a fault of the machine may
            explain.
        on_corruption: what follows for a worker that holds wrong bits, see
            :class:`~lightning_recycle.control.protocol.corruption.Checks`.
        check_every: steps between two checks of that, likewise; 0 for as many as the workers ask for.
        verify: the share of the time in which workers may compute each other's micro-batches where that does not fit
            into idle times; 0 for no such checks.
        drift: when to change the plan because operations do not take the times it assumes; None for never.
    """

    heartbeat_timeout: float = 5.0
    last_holder_timeout: float = 300.0
    coordinator_timeout: float = 60.0
    start_timeout: float = 300.0
    report_timeout: float = PATIENCE
    grace: float = 0.5
    patience: float = PATIENCE
    restart_workers: bool = False
    max_restarts: int = 10
    adapt: Adapt = "reroute"
    normalize: bool = False
    machine_error_retries: int = 1
    on_corruption: str = "evict"
    check_every: int = 0
    verify: float = 0.0
    drift: DriftOptions | None = None
