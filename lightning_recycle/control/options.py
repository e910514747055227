"""Options of recovery and of verification, which the coordinator carries out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from lightning_recycle.control.plans.layout_choice import Rebalance
from lightning_recycle.control.protocol.state import POLICIES
from lightning_recycle.option_table import (
    BOOLEAN,
    SECONDS,
    SHARE,
    Check,
    OptionGroup,
    choice,
    integer,
    option,
    suggests_options,
)

MachineErrors: TypeAlias = Sequence[type[BaseException] | str] | Callable[[BaseException], bool]
"""Exceptions that are suspected besides the usual ones, as classes or their dotted names; or a predicate of
exceptions."""

_STARTS_WITHOUT_REPLACEMENTS = 10


@suggests_options
@dataclass(frozen=True)
class RecoveryOptions(OptionGroup):
    """Recovery from lost workers.

    Args:
        max_restarts: how many lost workers are replaced in the whole run by new processes, which get their state from a
            peer; 0 for none, so that the others go on without them. Workers that a cluster manager starts are replaced
            by that.
        on_stage_lost: "raise" StageLostError when all replicas of a stage are lost, or "restart" from the newest
            checkpoint on all devices that are left, whichever processes were alive: at most ``max_restarts`` times from
            the same checkpoint, or 10 times if that is 0, and twice if that ends in the same step. "auto": "restart" if
            the Trainer has a callback that writes checkpoints and one is there, as the run says when it begins.
        move_workers: whether a healthy worker moves to another stage if failures are distributed badly and there is no
            replacement.
        rebalance: whether layers move between stages while the run goes on: "auto", where a step gets at least 5 %
            shorter and that pays for the move until the next failure is expected; "always", wherever it gets shorter by
            as much; or "never". What has been measured decides, from the tenth step on, and again whenever workers are
            lost or return. :meth:`~lightning_recycle.ReCycleStrategy.move_layers` works with all three.
        shadow: where the parameters of the previous version are kept, "device" or "host"; with ``staggered=False``
            none are kept.
        start_timeout: the seconds that workers have to connect, and replacements to be ready.
        num_pipelines: D, whose batches make the global batch; by default as many pipelines as the devices form. With
            fewer devices, positions are vacant until workers join.
        min_pipelines: the run begins once each stage has that many workers and no further one has connected for 5 s;
            the others may join at any step boundary. By default it waits for all D, until ``start_timeout``.
        max_pipelines: this many workers of each stage, at most, share the micro-batches of the D pipelines, at most one
            for each micro-batch; by default D.
        machine_errors: exceptions that a fault of a worker's machine may explain, besides those of
            :func:`~lightning_recycle.runtime.machine_errors.is_machine_error`: their classes or dotted names. Or a
            function that takes any exception and returns whether it is one; it decides alone.
        machine_error_retries: how often work that raised such an exception runs again, on a peer if there is one,
            before it counts as your own; 0 for never.

    Raises:
        ConfigurationError: for values that cannot work.
    """

    max_restarts: int = option(0, integer(0))
    on_stage_lost: Literal["auto", "raise", "restart"] = option(
        "auto", choice("auto", "raise", "restart"), by_launcher=True
    )
    move_workers: bool = option(False, BOOLEAN, by_launcher=True)
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
    machine_errors: MachineErrors = option(())
    machine_error_retries: int = option(
        1, integer(0), shared="how often work that raised an exception of a machine is run again"
    )

    def lanes(self, pipelines: int) -> int:
        """Number of workers that each stage of ``pipelines`` pipelines may have.

        Raises:
            ConfigurationError: if ``max_pipelines`` is less.
        """
        if (self.max_pipelines or pipelines) < pipelines:
            self._refuse("max_pipelines", f"the run has {pipelines} pipelines: give at least that many")
        return self.max_pipelines or pipelines

    def least(self, pipelines: int) -> int:
        """The workers of each stage with which a run of so many ``pipelines`` begins."""
        return self.min_pipelines or pipelines

    def check_start(self, pipelines: int) -> None:
        """Raises ConfigurationError if a run of ``pipelines`` pipelines can never begin."""
        if (self.min_pipelines or 0) > pipelines:
            self._refuse("min_pipelines", f"the run has {pipelines} pipelines: give at most that many")

    def without_changes(self) -> RecoveryOptions:
        """These options for an evaluation, which has no step boundaries at which a worker could enter or move."""
        return replace(self, max_restarts=0, move_workers=False, rebalance="never")

    @property
    def most_starts(self) -> int:
        """How many processes may be started in place of lost workers, or of workers that move without replacements; and
        how often a run begins again from the same checkpoint.
        """
        return self.max_restarts or _STARTS_WITHOUT_REPLACEMENTS


@dataclass(frozen=True)
class HeartbeatTimeouts(OptionGroup):
    """Seconds of silence that :class:`~lightning_recycle.callbacks.HeartbeatCallback` allows.

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


@suggests_options
@dataclass(frozen=True)
class VerificationOptions(OptionGroup):
    """How workers that compute wrong bits are found, and the response; see the page on silent corruption.

    Args:
        on_corruption: what happens to a worker that is found to hold other bits than the majority of its peers: "evict"
            it, as if it had failed, or "raise" an error.
        checksum_every: after how many steps the workers of a stage compare the bits of their parameters and optimizer
            states: "auto", so that this takes a thousandth of the time; 0 for never.
        verify: the share of the time in which the workers of a stage may compute each other's micro-batches once more
            and compare the bits, such as 0.01, where that does not fit into idle times; 0 for no such checks. For a
            PipelineModule whose layers are deterministic.

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
        """The steps between two comparisons, 0 for none; None where measured times decide."""
        return self.checksum_every if isinstance(self.checksum_every, int) else None
