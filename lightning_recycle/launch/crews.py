"""Which engine starts the workers of a launching process: this machine, or Ray. The one place that knows the names.

A crew starts, watches and ends worker processes wherever they are; the launcher asks it for one after the other, and
the coordinator for replacements. Whatever a launching process does otherwise does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol

from lightning_recycle.control.coordinator.coordinator import Coordinator
from lightning_recycle.control.joining.run_config import WorkerProcess
from lightning_recycle.launch.processes import Crew
from lightning_recycle.planning.grid import Grid

__all__ = ["AnyCrew", "crew_of", "room_of"]


class AnyCrew(Protocol):
    """All worker processes that one run starts. A context manager: none survives it.

    Attributes:
        payload: to be passed as, or within, the argument of each worker.
        host: the address of this machine as the workers reach it.
    """

    payload: Any
    host: str

    def start(self, argument: Any, name: str) -> WorkerProcess:
        """Starts a worker; callable from any thread.

        Raises:
            WorkerStartError: if the run is over, or workers cannot be started from here at all.
        """

    def attend(self, coordinator: Coordinator) -> None:
        """The coordinator serves from now on, and may be asked to let workers leave."""

    def end(self, patience: float) -> None:
        """Waits ``patience`` seconds for all workers to end, then kills the rest."""

    def __enter__(self) -> AnyCrew: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None, /
    ) -> None: ...


def crew_of(
    engine: str,
    target: Callable[[Any], None],
    payload: Any,
    grid: Grid,
    resources: Mapping[str, float],
    start_timeout: float,
) -> AnyCrew:
    """A crew of the workers that ``engine`` starts.

    Args:
        engine: "local" or "ray".
        target: what a worker runs; takes one argument.
        payload: what every worker needs.
        grid: the grid of the run.
        resources: what a worker needs, for an engine that shares out resources.
        start_timeout: seconds that an engine may take to have room for all workers.

    Raises:
        ConfigurationError: if the payload cannot be pickled, or the engine is not installed.
        WorkerStartError: if there is no room for the workers in time.
    """
    if engine == "ray":
        from lightning_recycle.launch.ray_crew import RayCrew

        return RayCrew(target, payload, grid, resources, start_timeout)
    return Crew(target, payload)


def room_of(engine: str, resources: Mapping[str, float], wanted: int) -> int | None:
    """How many workers ``engine`` has room for when none of a run are left, ``wanted`` at most; None if that is not the
    engine's to say, as with the devices of this machine, which do not go.
    """
    if engine == "ray":
        from lightning_recycle.launch.ray_crew import room_in_cluster

        return room_in_cluster(resources, wanted)
    return None
