"""How many workers an engine is asked for, which it is to end, and which machines' workers are to leave. Pure.

Concept: the coordinator tells who is at which position, the engine knows its workers by the machine and the process id
of each, and which machines are about to go. Every empty position needs a worker that is on its way. So does one whose
worker is about to leave: its replacement then waits as a spare, and takes over at the boundary where the other leaves.

The same rule brings the first workers of a run: at its begin all positions are empty.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Process", "Staffing", "staffing"]

Process: TypeAlias = tuple[str, int]
"""The name of a machine, and a process id there."""


@dataclass(frozen=True)
class Staffing:
    """What is to be done.

    Args:
        request: the number of workers to ask for.
        leave: the machines whose workers are to leave at a step boundary.
        end: the workers to end at once: the run has given them up, or has no use for them.
    """

    request: int
    leave: frozenset[str]
    end: frozenset[int]


def staffing(
    positions: Mapping[int, Process | None],
    workers: Mapping[int, Process | None],
    placed: Collection[int],
    going: Collection[str],
) -> Staffing:
    """What follows from who is where.

    Args:
        positions: by rank who is there, None for an empty position.
        workers: by their keys the workers that were asked for and have not ended; None for one that has not started.
        placed: the keys of those that have been seen at a position.
        going: the machines that are about to go.
    """
    there = {process for process in positions.values() if process is not None}
    vacant = sum(process is None for process in positions.values())
    leaving = [process for process in there if process[0] in going]
    given_up = {key for key in placed if key in workers and workers[key] not in there}
    idle = {key for key, process in workers.items() if key not in given_up and process not in there}
    stranded = {key for key in idle if _machine(workers[key]) in going}
    request = vacant + len(leaving) - len(idle - stranded)
    return Staffing(
        max(0, request), frozenset(machine for machine, _ in leaving), frozenset(given_up) | frozenset(stranded)
    )


def _machine(process: Process | None) -> str | None:
    return None if process is None else process[0]
