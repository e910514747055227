"""The coordinator's options, and what it must know of a worker process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lightning_recycle.control.plans.drift import DriftOptions
from lightning_recycle.control.plans.layout_choice import Adapt
from lightning_recycle.control.protocol.progress import PATIENCE

__all__ = ["CoordinatorOptions", "WorkerProcess"]


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
