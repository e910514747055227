"""Configuration of a run, from the command line and the first worker's request.

Concept: the request of the first worker settles the :class:`RunConfig` (:func:`settle`). The requests of all others
must be equal, as far as the command line leaves it open (:func:`difference`): a worker with another request runs
another script, or the same script with other options. The grid is part of the script, so the command line cannot
overrule it; it can overrule the rest, and a warning names what.

Must not know: sockets, planners' results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from lightning_recycle.arguments import whole
from lightning_recycle.control.options import HeartbeatTimeouts, RecoveryOptions, VerificationOptions
from lightning_recycle.control.plans.drift import DriftOptions
from lightning_recycle.control.plans.plan_provider import PlanProvider
from lightning_recycle.control.protocol.messages import RunRequest, Setting, Unfit
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.option_table import shared_options
from lightning_recycle.planning.grid import Grid
from lightning_recycle.planning.planning_options import PlanningOptions

_Group = TypeVar("_Group")

_MOST_WORKERS = 100_000

GROUPS: dict[str, tuple[type[Any], str]] = {
    "planning": (PlanningOptions, "ReCycleStrategy(planning=PlanningOptions({}=...))"),
    "recovery": (RecoveryOptions, "ReCycleStrategy(recovery=RecoveryOptions({}=...))"),
    "verification": (VerificationOptions, "ReCycleStrategy(verification=VerificationOptions({}=...))"),
    "heartbeat": (HeartbeatTimeouts, "HeartbeatCallback({}=...)"),
    "monitor": (DriftOptions, "PlanMonitor({}=...)"),
}
"""The options that all workers of a run must agree on, by the first part of a setting's name: the dataclass whose
shared fields are meant, and where a script has them. There are settings of "monitor" where there is a PlanMonitor."""

_OPTIONAL = "monitor"

PATIENCE = 1800.0
"""Seconds for what has no usual duration."""


def settings_of(group: str, options: Any) -> dict[str, Setting]:
    """The settings that all workers must agree on among ``options``, of the type of ``group``."""
    return {f"{group}.{item.name}": getattr(options, item.name) for item in shared_options(type(options))}


def where(setting: str) -> str:
    """Where a script has a setting, in words."""
    group, _, name = setting.partition(".")
    return GROUPS[group][1].format(name)


@dataclass(frozen=True)
class Overrides:
    """The command line of the coordinator; what it leaves open is None, or missing from ``settings``.

    ``pipelines``, ``stages`` and ``microbatches``: the grid. ``members``: the processes of each of its positions.
    ``settings``: as in :class:`RunRequest`.
    """

    pipelines: int | None = None
    stages: int | None = None
    microbatches: int | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict)
    members: int | None = None

    @property
    def grid(self) -> Grid | None:
        """The grid, if the command line says all of it."""
        if self.pipelines is None or self.stages is None or self.microbatches is None:
            return None
        return Grid(self.pipelines, self.stages, self.microbatches)

    def check(self) -> None:
        """Raises ConfigurationError for what no script could agree with."""
        whole("recycle-coordinator", "processes_per_position", self.members or 1, 1)
        sizes = [self.pipelines or 1, self.stages or 1, self.microbatches or 1]
        _check(_overruled(self, RunRequest("", Grid(*sizes), False)))


@dataclass(frozen=True)
class RunConfig:
    """Settled configuration of a run.

    Args:
        wants: everything that all workers must want, as far as the command line leaves it open.
        overruled: what the command line says otherwise than the script, in words.
    """

    wants: RunRequest
    overruled: tuple[str, ...] = ()

    @property
    def grid(self) -> Grid:
        return self.wants.grid

    @property
    def members(self) -> int:
        """The processes of each position of the grid."""
        return self.wants.members

    @property
    def num_workers(self) -> int:
        return self.grid.num_workers * self.members

    @property
    def planning(self) -> PlanningOptions:
        return _group(PlanningOptions, self.wants)

    def planner(self) -> PlanProvider:
        """The planner of the run."""
        return PlanProvider(self.grid, self.planning, chooses_split=self.wants.entry == "fit")

    def options(self) -> CoordinatorOptions:
        """The options of its coordinator."""
        heartbeat, recovery = _group(HeartbeatTimeouts, self.wants), _group(RecoveryOptions, self.wants)
        monitored = any(name.startswith(f"{_OPTIONAL}.") for name in self.wants.settings)
        return CoordinatorOptions(
            heartbeat=replace(heartbeat, last_holder_timeout=max(heartbeat.timeout, heartbeat.last_holder_timeout)),
            recovery=recovery if self.wants.entry == "fit" else recovery.without_changes(),
            verification=_group(VerificationOptions, self.wants),
            drift=_group(DriftOptions, self.wants) if monitored else None,
        )


def settle(given: Overrides, wants: RunRequest | None) -> RunConfig:
    """The terms of a run whose first worker wants ``wants``; None: it does not say.

    Raises:
        ConfigurationError: if they contradict the command line's grid, or cannot work.
    """
    if wants is None:
        if given.grid is None:
            raise ConfigurationError(
                "This worker names no grid, and the coordinator was given none: start"
                " recycle-coordinator with --pipelines, --stages and --microbatches."
            )
        return RunConfig(_overruled(given, RunRequest("", given.grid, False)))
    if wants.needs_launcher:
        raise ConfigurationError(
            f"{', '.join(wants.needs_launcher)} needs a launching process, which starts all workers"
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
    if given.members not in (None, wants.members):
        raise ConfigurationError(
            f"This script wants {wants.members} processes for each position, the coordinator has {given.members}: start"
            " recycle-coordinator without --processes-per-position, or with that of the script."
        )
    settled = _overruled(given, wants)
    _check(settled)
    script, ran = complete_settings(wants), complete_settings(settled)
    differing = [
        f"{where(name)} is {script.get(name)!r} in the script, and {ran[name]!r} by the command line"
        for name in ran
        if script.get(name) != ran[name]
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
    return other_device(terms.wants.device, wants) if why is None else Unfit(why)


def other_device(device: str, wants: RunRequest | None) -> Unfit | None:
    """Why a worker cannot take part in a run on devices of the kind ``device``; None if it can, or nobody says."""
    if wants is None or "" in (device, wants.device) or wants.device == device:
        return None
    return Unfit(
        f"This worker computes on {wants.device!r}, the run on {device!r}: all need the same kind of device."
        " Look why this machine has another (its driver, torch's build, hidden devices), or name a kind that all have:"
        " Trainer(accelerator='cpu')."
    )


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
    if settled.members != terms.members:
        return (
            f"This script wants {settled.members} processes for each position, the run has {terms.members}, as its"
            " first worker wanted: start all workers with the same script and the same options."
        )
    mine, theirs = complete_settings(settled), complete_settings(terms.wants)
    for name in {**theirs, **mine}:
        if mine.get(name) != theirs.get(name):
            return (
                f"{where(name)} is {mine.get(name)!r} in this script, and {theirs.get(name)!r} in the run, as its first"
                " worker wanted: start all workers with the same script and the same options."
            )
    return None


def _overruled(given: Overrides, wants: RunRequest) -> RunRequest:
    """``wants`` with what the command line says instead."""
    grid = wants.grid
    sizes = (given.pipelines, given.stages, given.microbatches)
    own = (grid.pipelines, grid.stages, grid.microbatches)
    merged = Grid(*(mine if size is None else size for size, mine in zip(sizes, own, strict=True)))
    if merged.pipelines == grid.pipelines:
        merged = replace(merged, lanes=grid.lanes)
    members = wants.members if given.members is None else given.members
    return replace(wants, grid=merged, settings={**wants.settings, **given.settings}, members=members)


def _group(kind: type[_Group], wants: RunRequest) -> _Group:
    """The options of a type among the settings of ``wants``; those that are missing have their defaults.

    Raises:
        ConfigurationError: for values that cannot work.
    """
    (prefix,) = (f"{name}." for name, (group, _) in GROUPS.items() if group is kind)
    values = {name.removeprefix(prefix): value for name, value in wants.settings.items() if name.startswith(prefix)}
    return kind(**values)


def complete_settings(wants: RunRequest) -> dict[str, Setting]:
    """The settings of ``wants``, with the defaults of those that are missing."""
    defaults: dict[str, Setting] = {}
    for name, (group, _) in GROUPS.items():
        if name != _OPTIONAL:
            defaults |= settings_of(name, group())
    return {**defaults, **wants.settings}


def _check(wants: RunRequest) -> None:
    """Raises ConfigurationError for what cannot work."""
    known = {f"{name}.{item.name}" for name, (group, _) in GROUPS.items() for item in shared_options(group)}
    if unknown := sorted(wants.settings.keys() - known):
        raise ConfigurationError(f"This coordinator knows no setting {unknown[0]!r}: use the same version everywhere.")
    for group, _ in GROUPS.values():
        _group(group, wants)
    _group(RecoveryOptions, wants).check_start(wants.grid.pipelines)
    if wants.grid.num_workers * wants.members > _MOST_WORKERS:
        raise ConfigurationError(f"A grid of {wants.grid} has more than {_MOST_WORKERS} workers: give a smaller one.")


class WorkerProcess(Protocol):
    """A local worker process, as far as the coordinator needs it."""

    @property
    def sentinel(self) -> int: ...

    def describe_exit(self, timeout: float) -> str | None:
        """Returns how the process ended, or None if it is still alive after ``timeout`` seconds."""

    def kill(self) -> None: ...

    def release(self) -> None:
        """It is not needed any more: its resources in this process may be freed once it has ended."""


@dataclass(frozen=True)
class CoordinatorOptions:
    """Time bounds of the control plane, in seconds, and the options that it carries out.

    Args:
        heartbeat: what silence means; no operation counts as stuck before its ``timeout``, either.
        report_timeout: time for all survivors to stop and report; longer than any single operation.
        grace: time between a broken connection and a regroup of workers that are all alive.
        patience: time for operations whose usual duration is not known, and for any if no peer is well.
        recovery: how lost workers are replaced.
        verification: how wrong bits are found; "auto" intervals are those that the workers ask for.
        drift: when to change the plan because operations do not take the times it assumes; None for never.
    """

    heartbeat: HeartbeatTimeouts = HeartbeatTimeouts()
    report_timeout: float = PATIENCE
    grace: float = 0.5
    patience: float = PATIENCE
    recovery: RecoveryOptions = RecoveryOptions(rebalance="never")
    verification: VerificationOptions = VerificationOptions()
    drift: DriftOptions | None = None
