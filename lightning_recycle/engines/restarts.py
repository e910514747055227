"""Restarts of processes that ended, and the exit status of a set of them. Pure.

A worker that lost its coordinator, was evicted, or was killed is no fault of the program: another process takes its
place. All other ends are final, and a process that dies at once, again and again, is given up. Statuses are those of
:mod:`subprocess`, or 128 + the signal's number, as a shell says it.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_recycle.control.client import EXIT_INTERRUPTED, EXIT_LEFT, EXIT_LOST_COORDINATOR, EXIT_STOPPED

_SIGNALS = range(1, 65)


@dataclass(frozen=True)
class RestartLimits:
    """How often a process is started again.

    Args:
        max_restarts: for each process, over the whole run.
        quick: seconds; a process that lasted less than this died at once.
        most_quick: so many such ends in a row, and it is given up.
        first_pause, longest_pause: seconds before the second start after quick ends, and at most; the pause doubles.
    """

    max_restarts: int = 100
    quick: float = 20.0
    most_quick: int = 5
    first_pause: float = 1.0
    longest_pause: float = 30.0


@dataclass(frozen=True)
class RestartRecord:
    """How often a process was restarted, and how many ends in a row were quick."""

    restarts: int = 0
    quick: int = 0


@dataclass(frozen=True)
class RestartAfter:
    """Start it again after ``pause`` seconds."""

    slot: RestartRecord
    pause: float


@dataclass(frozen=True)
class FinalStatus:
    """It is not started again; ``given_up`` says why, if its end alone is no reason."""

    status: int
    given_up: str = ""


def ended(
    slot: RestartRecord, status: int, lasted: float, is_ending: bool, policy: RestartLimits
) -> RestartAfter | FinalStatus:
    """Decision after the end of a process that ran for ``lasted`` seconds."""
    if is_ending or not is_lost(status):
        return FinalStatus(status)
    quick = slot.quick + 1 if lasted < policy.quick else 0
    if slot.restarts >= policy.max_restarts:
        return FinalStatus(status, f"it was restarted {slot.restarts} times (--max-restarts)")
    if quick >= policy.most_quick:
        return FinalStatus(status, f"it ended {quick} times in a row within {policy.quick:g} s")
    pause = min(policy.longest_pause, policy.first_pause * 2 ** (quick - 2)) if quick > 1 else 0.0
    return RestartAfter(replace(slot, restarts=slot.restarts + 1, quick=quick), pause)


def is_lost(status: int) -> bool:
    """Whether a process ended through no fault of its own."""
    return status < 0 or status == EXIT_LOST_COORDINATOR or _signal_of(status) is not None


def is_error(status: int) -> bool:
    """Whether a process ended by itself, with an error of its program."""
    return status not in (0, EXIT_STOPPED, EXIT_LEFT, EXIT_INTERRUPTED) and not is_lost(status)


def verdict(ends: Sequence[tuple[int, bool]], asked: int | None, finished: bool = False) -> int:
    """The exit status for all processes together.

    A run in which one process finished has finished, whatever was lost on the way; but an error of the program is one,
    also after the training, unless it is that of a replacement. ``ends``: the final status of each process, and whether
    it was the first of its slot; ``asked``: the signal that was to end the run.
    """
    statuses = [status for status, _ in ends]
    finished = finished or 0 in statuses
    errors = [status for status, was_first in ends if is_error(status) and (was_first or not finished)]
    if errors:
        return errors[0]
    if finished:
        return 0
    if asked is not None:
        return 128 + asked
    for wanted in (EXIT_STOPPED, EXIT_LOST_COORDINATOR):
        if wanted in statuses:
            return wanted
    return exit_status(statuses[0]) if statuses else 0


def exit_status(status: int) -> int:
    """``status`` as a process can end with it."""
    return 128 - status if status < 0 else status


def in_words(status: int) -> str:
    """How a process ended, for people."""
    number = -status if status < 0 else _signal_of(status)
    if number is not None:
        try:
            return f"killed by {signal.Signals(number).name}"
        except ValueError:  # a real-time signal
            return f"killed by signal {number}"
    meanings = {
        0: "finished",
        EXIT_LOST_COORDINATOR: "lost its coordinator, or was evicted",
        EXIT_STOPPED: "was stopped, as the run ended otherwise",
        EXIT_LEFT: "left, as it was asked to",
    }
    return f"exit status {status}" + (f", {meanings[status]}" if status in meanings else "")


def _signal_of(status: int) -> int | None:
    """The signal that killed a process, as a shell says it; none for polite signals."""
    number = status - 128
    return number if number in _SIGNALS and status not in (EXIT_INTERRUPTED, EXIT_LEFT) else None
