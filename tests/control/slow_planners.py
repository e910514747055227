"""Planners that tell where they work. A module of its own, so that other processes can import it."""

import os
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_recycle.errors import PlanningError
from lightning_recycle.planning import HeuristicPlanner, Problem, Schedule, heuristic
from lightning_recycle.planning.child_process import check_cancelled


@dataclass(frozen=True)
class Failing:
    """Finds no plan."""

    def plan(self, problem: Problem) -> Schedule:
        raise PlanningError("no licence")


@dataclass(frozen=True)
class Exiting:
    """Ends its process."""

    def plan(self, problem: Problem) -> Schedule:
        os._exit(3)


@dataclass(frozen=True)
class Heavy(Failing):
    """Does not fit into the buffer of a connection."""

    ballast: bytes = bytes(8_000_000)


@dataclass(frozen=True)
class Endless:
    """A question without an answer."""

    def __call__(self) -> None:
        time.sleep(600)


@dataclass(frozen=True)
class Unpicklable:
    """Has a lock."""

    lock: Any = field(default_factory=threading.Lock)

    def plan(self, problem: Problem) -> Schedule:
        return heuristic(problem)


@dataclass(frozen=True)
class Gated(HeuristicPlanner):
    """The heuristic; in another process than ``home`` it tells its process id in ``report`` and waits for ``gate``."""

    report: Path = Path()
    gate: Path = Path()
    home: int = 0

    def plan(self, problem: Problem) -> Schedule:
        if os.getpid() != self.home:
            report = self.report.with_suffix(f".{threading.get_native_id()}")  # two may be asked for at a time
            report.write_text(str(os.getpid()))
            report.rename(self.report)
            while not self.gate.exists():
                check_cancelled()
                time.sleep(0.01)
        return heuristic(problem, self.effort)


@dataclass(frozen=True)
class Modules(HeuristicPlanner):
    """Writes to ``report`` what its process has imported, and its priority."""

    report: Path = Path()

    def plan(self, problem: Problem) -> Schedule:
        priority = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        self.report.write_text(f"{priority} {' '.join(sys.modules)}")
        return heuristic(problem, self.effort)
