"""Options that the coordinator carries out, and the configuration of a run.

Concept: the request of the first worker settles the :class:`RunConfig` (:func:`settle`). Later requests must be equal,
as far as the command line leaves it open (:func:`difference`): otherwise the script or its options differ. The command
line can overrule settings, with a warning.

Must not know: sockets, planners' results.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypeVar

from lightning_recycle.arguments import (
    SECONDS,
    SHARE,
    Check,
    OptionGroup,
    choice,
    integer,
    option,
    shared_options,
    suggests_options,
)
from lightning_recycle.control.plans.drift import DriftOptions
from lightning_recycle.control.plans.plan_provider import PlanProvider
from lightning_recycle.control.plans.run_plans import Rebalance
from lightning_recycle.control.protocol.messages import RunRequest, Setting, Unfit
from lightning_recycle.control.protocol.state import POLICIES
from lightning_recycle.errors import ConfigurationError, counted
from lightning_recycle.planning.grid import Positions
from lightning_recycle.planning.planner import PlanningOptions

MachineErrors: TypeAlias = Sequence[type[BaseException] | str] | Callable[[BaseException], bool]
"""Exceptions that are suspected besides the usual ones, as classes or their dotted names; or a predicate of
exceptions."""

_STARTS_WITHOUT_REPLACEMENTS = 10


def _may_be_exception(entry: Any) -> bool:
    """Whether ``entry`` is, or may name, an exception: nothing is imported for that."""
    if isinstance(entry, str):
        module, _, name = entry.rpartition(".")
        loaded = sys.modules.get(module or "builtins")
        entry = Exception if loaded is None else getattr(loaded, name, None)
    return isinstance(entry, type) and issubclass(entry, Exception)


_MACHINE_ERRORS = Check(
    lambda value: not isinstance(value, (str, type)) and (isinstance(value, Sequence) or callable(value)),
    "give a list of classes that derive from Exception, or of their full dotted names, such as"
    " ['botocore.exceptions.ClientError'], or a function that takes an exception and returns whether a fault of the"
    " machine may explain it",
)


@suggests_options
@dataclass(frozen=True)
class RecoveryOptions(OptionGroup):
    """Recovery from lost workers.

    Args:
        max_restarts: how many lost workers are replaced by new processes in the whole run; 0 for none. A replacement
            gets its state from a peer. Workers that a cluster manager starts are replaced by that.
        on_stage_lost: when no worker holds a stage any more, "raise" StageLostError, "restart" from the newest
            checkpoint, or "auto": restart if the Trainer writes checkpoints. A restart uses all devices that are left:
            at most ``max_restarts`` times from the same checkpoint, or 10 times if that is 0, and twice if that ends in
            the same step. The run says at its beginning what "auto" means there.
        rebalance: when layers move between stages: "auto", where that pays until the next expected failure; "always";
            or "never". The step must get at least 5 % shorter, also with "always". What has been measured decides, from
            the tenth step on, and again whenever workers are lost or return.
            :meth:`~lightning_recycle.ReCycleStrategy.move_layers` works with all three.
        shadow: where the parameters from before the newest step are kept: "device" or "host". With ``staggered=False``
            none are kept.
        start_timeout: seconds for workers to connect, and for replacements to be ready.
        num_pipelines: the number D of pipelines whose batches make the global batch; by default as many as the devices
            form. With fewer devices, positions are vacant until workers join.
        min_pipelines: the number of workers of each stage with which the run may begin; by default all D. It begins
            when no further one has connected for 5 s, or after ``start_timeout``; the others may join at any step
            boundary.
        max_pipelines: the number of workers of each stage that may share the micro-batches of the D pipelines; by
            default D. At most one for each micro-batch.
        machine_errors: further exceptions that a fault of the machine may explain: classes, dotted names, or a
            function. They count besides those of :func:`~lightning_recycle.runtime.machine_errors.is_machine_error`; a
            function takes any exception, returns whether it is one, and decides alone.
        machine_error_retries: how often work that raised such an exception runs again before the exception counts as
            your own; 0 for never. It runs on a peer if there is one.

    Raises:
        ConfigurationError: for values that cannot work.
    """

    max_restarts: int = option(0, integer(0))
    on_stage_lost: Literal["auto", "raise", "restart"] = option(
        "auto", choice("auto", "raise", "restart"), by_launcher=True
    )
    rebalance: Rebalance = option("auto", choice("auto", "always", "never"), shared="when layers move to other stages")
    shadow: Literal["device", "host"] = option("device", choice("device", "host"))
    start_timeout: float = option(
        300.0,
        SECONDS,
        shared="seconds from the first worker to the last; the run then begins without the missing ones",
    )
    num_pipelines: int | None = option(None, integer(1, otherwise="for as many as the devices form"))
    min_pipelines: int | None = option(
        None,
        integer(1, otherwise="for all"),
        shared="workers of each stage with which the run begins; by default all",
    )
    max_pipelines: int | None = option(None, integer(1, otherwise="for no more than the batch has"))
    machine_errors: MachineErrors = option((), _MACHINE_ERRORS)
    machine_error_retries: int = option(1, integer(0), shared="how often work that raised a machine error is run again")

    def __post_init__(self) -> None:
        super().__post_init__()
        for entry in () if callable(self.machine_errors) else self.machine_errors:
            if not _may_be_exception(entry):
                self._refuse("machine_errors", f"{entry!r} is not an exception class: {_MACHINE_ERRORS.remedy}")
        if self.num_pipelines is not None:
            self.lanes(self.num_pipelines)
        if self.min_pipelines is not None and (self.max_pipelines or self.min_pipelines) < self.min_pipelines:
            self._refuse("min_pipelines", f"the most are max_pipelines={self.max_pipelines}: give at most that many")

    def lanes(self, pipelines: int, microbatches: int | None = None) -> int:
        """Number of workers that each stage of ``pipelines`` pipelines may have.

        ``microbatches``: of a pipeline, if known. Raises ConfigurationError for options that do not fit.
        """
        self.check_start(pipelines)
        most = self.max_pipelines or pipelines
        if most < pipelines:
            self._refuse("max_pipelines", f"the run has {counted(pipelines, 'pipeline')}: give at least that many")
        if microbatches is not None and most > pipelines * microbatches:
            batch = f"{counted(pipelines, 'pipeline')} with num_microbatches={microbatches}"
            remedy = f"{batch} have work for {pipelines * microbatches}: give at most that many, or more micro-batches"
            self._refuse("max_pipelines", remedy)
        return most

    def least(self, pipelines: int) -> int:
        """The workers of each stage with which a run of ``pipelines`` begins."""
        return self.min_pipelines or pipelines

    def check_start(self, pipelines: int) -> None:
        """Raises ConfigurationError if a run of ``pipelines`` pipelines can never begin."""
        if (self.min_pipelines or 0) > pipelines:
            self._refuse("min_pipelines", f"the run has {counted(pipelines, 'pipeline')}: give at most that many")

    def without_changes(self) -> RecoveryOptions:
        """These options for an evaluation, which lacks step boundaries for changes."""
        return replace(self, max_restarts=0, rebalance="never")

    @property
    def most_starts(self) -> int:
        """Limit of processes started for lost workers, and of restarts.

        The latter from the same checkpoint.
        """
        return self.max_restarts or _STARTS_WITHOUT_REPLACEMENTS


@dataclass(frozen=True)
class HeartbeatTimeouts(OptionGroup):
    """Seconds of silence that the HeartbeatCallback allows.

    See :class:`~lightning_recycle.callbacks.HeartbeatCallback`.

    Args:
        timeout: of a worker, until it is lost.
        last_holder_timeout: of a worker that no peer can stand in for.
        coordinator_timeout: of the coordinator, until its workers give it up.
    """

    timeout: float = option(5.0, SECONDS, shared="seconds of silence until a worker is lost")
    last_holder_timeout: float = option(
        300.0, SECONDS, shared="seconds of silence until a worker is lost that no peer can stand in for"
    )
    coordinator_timeout: float = option(
        60.0, SECONDS, shared="seconds of silence of this coordinator until its workers give it up"
    )

    _owner = "HeartbeatCallback"  # whose arguments they are


@suggests_options
@dataclass(frozen=True)
class VerificationOptions(OptionGroup):
    """How workers that compute wrong bits are found, and the response.

    See the page on silent corruption.

    Args:
        on_corruption: for a worker that holds other bits than most of its peers: "evict" it, as if it had failed, or
            "raise" an error.
        checksum_every: the number of steps between comparisons of parameters and optimizer states within a stage;
            "auto" takes a thousandth of the time, 0 is never.
        verify: the share of the time, such as 0.01, for computing micro-batches of peers again to compare the bits; 0
            for never. Checks that fit into idle times do not count. For a PipelineModule whose layers are
            deterministic.

    Raises:
        ConfigurationError: for values that cannot work.
    """

    on_corruption: Literal["evict", "raise"] = option(
        "evict", choice(*POLICIES), shared="what follows for a worker with wrong bits"
    )
    checksum_every: Literal["auto"] | int = option(
        "auto",
        Check(
            lambda value: value == "auto" or integer(0).accepts(value),
            "give 'auto', a number of steps, or 0 for no checks",
        ),
        shared="steps between two comparisons of parameters",
    )
    verify: float = option(0.0, SHARE, shared="share of the time in which workers compute each other's micro-batches")

    @property
    def steps_asked_for(self) -> int | None:
        """Steps between two comparisons, 0 for none; None where measured times decide."""
        return self.checksum_every if isinstance(self.checksum_every, int) else None


_Group = TypeVar("_Group")

Settings: TypeAlias = Mapping[str, Setting]
"""Options that all workers must agree on, by names such as "recovery.rebalance"."""

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
    """Settings among ``options`` of type ``group`` that all workers must agree on."""
    return {f"{group}.{item.name}": getattr(options, item.name) for item in shared_options(type(options))}


def where(setting: str) -> str:
    """Where a script has a setting, in words."""
    group, _, name = setting.partition(".")
    return GROUPS[group][1].format(name)


@dataclass(frozen=True)
class RunConfig:
    """Settled configuration of a run.

    ``wants``: the request that all workers must share. ``overruled``: differences by the command line, in words.
    """

    wants: RunRequest
    overruled: tuple[str, ...] = ()

    @property
    def positions(self) -> Positions:
        return Positions(self.wants.grid, self.wants.members)

    @property
    def planning(self) -> PlanningOptions:
        return _group(PlanningOptions, self.wants)

    def planner(self) -> PlanProvider:
        return PlanProvider(self.wants.grid, self.planning, chooses_split=self.wants.entry == "fit")

    def options(self) -> CoordinatorOptions:
        heartbeat, recovery = _group(HeartbeatTimeouts, self.wants), _group(RecoveryOptions, self.wants)
        monitored = any(name.startswith(f"{_OPTIONAL}.") for name in self.wants.settings)
        return CoordinatorOptions(
            heartbeat=replace(heartbeat, last_holder_timeout=max(heartbeat.timeout, heartbeat.last_holder_timeout)),
            recovery=recovery if self.wants.entry == "fit" else recovery.without_changes(),
            verification=_group(VerificationOptions, self.wants),
            drift=_group(DriftOptions, self.wants) if monitored else None,
        )


def settle(overrides: Settings, wants: RunRequest | None) -> RunConfig:
    """Configuration of a run: its first worker's ``wants``, then ``overrides``.

    Raises ConfigurationError if they cannot work.
    """
    if wants is None:
        raise ConfigurationError("This worker says nothing of its run: start its script with RECYCLE_COORDINATOR.")
    if wants.needs_launcher:
        raise ConfigurationError(
            f"{', '.join(wants.needs_launcher)} needs a launching process, which starts all workers"
            " itself; with recycle-coordinator and recycle-run, leave it out."
        )
    settled = replace(wants, settings={**wants.settings, **overrides})
    check_settings(settled.settings)
    _group(RecoveryOptions, settled).check_start(wants.grid.pipelines)
    if wants.grid.num_workers * wants.members > _MOST_WORKERS:
        raise ConfigurationError(f"A grid of {wants.grid} has more than {_MOST_WORKERS} workers: give a smaller one.")
    script, ran = complete_settings(wants), complete_settings(settled)
    differing = [
        f"{where(name)} is {script.get(name)!r} in the script, and {ran[name]!r} by the command line"
        for name in ran
        if script.get(name) != ran[name]
    ]
    return RunConfig(settled, tuple(differing))


def difference(given: Settings, terms: RunConfig, wants: RunRequest | None) -> Unfit | None:
    """Why a worker that asks for ``wants`` cannot join a run of ``terms``, or None."""
    if wants is None:
        return None  # it takes what there is
    if terms.wants.entry != wants.entry:
        where = f"it is at Trainer.{wants.entry}(), the others are at Trainer.{terms.wants.entry}()."
        return Unfit(where, late=True)
    why = _difference(given, terms, wants)
    return other_device(terms.wants.device, wants) if why is None else Unfit(why)


def other_device(device: str, wants: RunRequest | None) -> Unfit | None:
    """Why a worker's device does not fit ``device``; None if it does, or is unknown."""
    if wants is None or "" in (device, wants.device) or wants.device == device:
        return None
    return Unfit(
        f"This worker computes on {wants.device!r}, the run on {device!r}: all need the same kind of device."
        " Look why this machine has another (its driver, torch's build, hidden devices), or name a kind that all have:"
        " Trainer(accelerator='cpu')."
    )


def _difference(given: Settings, terms: RunConfig, wants: RunRequest) -> str | None:
    """Why a worker that is at the same entry point cannot take part."""
    try:
        settled = settle(given, wants).wants
    except ConfigurationError as error:
        return str(error)
    if not wants.microbatches_given:
        settled = replace(settled, grid=replace(settled.grid, microbatches=terms.wants.grid.microbatches))
    requested, running = complete_settings(settled), complete_settings(terms.wants)
    compared = [
        ("Its grid (pipelines x stages x micro-batches)", str(settled.grid), str(terms.wants.grid)),
        ("The number of processes of a position", settled.members, terms.wants.members),
        *((where(name), requested.get(name), running.get(name)) for name in {**running, **requested}),
    ]
    for what, wanted, actual in compared:
        if wanted != actual:
            return (
                f"{what} is {wanted!r} in this script, and {actual!r} in the run, as its first worker wanted: start all"
                " workers with the same script and the same options."
            )
    return None


def _group(kind: type[_Group], wants: RunRequest) -> _Group:
    """Options of a type among the settings of ``wants``, defaults where missing.

    Raises ConfigurationError for values that cannot work.
    """
    (prefix,) = (name for name, (group, _) in GROUPS.items() if group is kind)
    return kind(**_of_group(prefix, wants.settings))


def complete_settings(wants: RunRequest) -> dict[str, Setting]:
    """Settings of ``wants``, with defaults for missing ones."""
    defaults: dict[str, Setting] = {}
    for name, (group, _) in GROUPS.items():
        if name != _OPTIONAL:
            defaults |= settings_of(name, group())
    return {**defaults, **wants.settings}


def check_settings(settings: Settings) -> None:
    """Raises ConfigurationError for settings that no script could agree with."""
    known = {f"{name}.{item.name}" for name, (group, _) in GROUPS.items() for item in shared_options(group)}
    if unknown := sorted(settings.keys() - known):
        raise ConfigurationError(f"This coordinator knows no setting {unknown[0]!r}: use the same version everywhere.")
    for prefix, (group, _) in GROUPS.items():
        group(**_of_group(prefix, settings))


def _of_group(prefix: str, settings: Settings) -> dict[str, Any]:
    """Settings of a group, by the names of its options."""
    return {name.removeprefix(f"{prefix}."): value for name, value in settings.items() if name.startswith(f"{prefix}.")}


class WorkerProcess(ABC):
    """A worker's process, for who started it; ``sentinel`` is readable at its end."""

    sentinel: int
    _released = False

    @abstractmethod
    def describe_exit(self, timeout: float) -> str | None:
        """How the process ended; None if it is alive after ``timeout`` seconds."""

    @abstractmethod
    def kill(self) -> None:
        """Ends the process, if it is alive."""

    @abstractmethod
    def close(self) -> None:
        """Frees its descriptors in this process; it must have ended."""

    def release(self) -> None:
        """Lets the group close it once it has ended."""
        self._released = True

    @property
    def is_over(self) -> bool:
        return self._released and self.describe_exit(0.0) is not None


@dataclass(frozen=True)
class CoordinatorOptions:
    """Time bounds of the control plane, in seconds, and options that it carries out.

    Args:
        heartbeat: no operation counts as stuck before its ``timeout``, either.
        report_timeout: for all survivors to stop and report; longer than any single operation.
        grace: between a broken connection and a regroup of workers that are all alive.
        patience: for operations of unknown duration, and for any if no peer is well.
        verification: "auto" intervals are those that the workers ask for.
        drift: when to change the plan for other times of operations; None for never.
    """

    heartbeat: HeartbeatTimeouts = HeartbeatTimeouts()
    report_timeout: float = PATIENCE
    grace: float = 0.5
    patience: float = PATIENCE
    recovery: RecoveryOptions = RecoveryOptions(rebalance="never")
    verification: VerificationOptions = VerificationOptions()
    drift: DriftOptions | None = None
