"""Planners that tell where they work. A module of its own, so that other processes can import it."""

import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_recycle.planning import Problem, Schedule, heuristic


@dataclass(frozen=True)
class Reporting:
    """Writes process id and priority to ``report``."""

    report: Path

    def plan(self, problem: Problem) -> Schedule:
        self.report.write_text(f"{os.getpid()} {os.getpriority(os.PRIO_PROCESS, 0)}")
        return heuristic(problem)


@dataclass(frozen=True)
class Sleeping:
    """Writes its process id to ``report``, and is not done for a long time."""

    report: Path

    def plan(self, problem: Problem) -> Schedule:
        self.report.write_text(str(os.getpid()))
        time.sleep(600)
        return heuristic(problem)


@dataclass(frozen=True)
class Unpicklable:
    """Has a lock."""

    lock: Any = field(default_factory=threading.Lock)

    def plan(self, problem: Problem) -> Schedule:
        return heuristic(problem)
