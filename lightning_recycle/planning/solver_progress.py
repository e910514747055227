"""Progress of a running solver: a line on the terminal, or in the log now and then.

Must not know: solvers; it shows numbers.
"""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

__all__ = ["SolverProgress"]

log = logging.getLogger(__name__)

_LOG_SECONDS = 5.0  # at least, between two lines in the log


class _SecondsLeft(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{max(0.0, (task.total or 0.0) - (task.elapsed or 0.0)):.0f} s left")


class SolverProgress:
    """A context that shows bound, incumbent, gap and the seconds left: on a terminal in a line of standard error that
    goes when the context ends; elsewhere in the log at level INFO, at most every few seconds.

    Args:
        solver: its name.
        time_limit: seconds that it may take.
    """

    def __init__(self, solver: str, time_limit: float) -> None:
        self._solver, self._time_limit = solver, time_limit
        self._started = time.monotonic()
        self._logged = -float("inf")
        self._line: Progress | None = None
        if sys.stderr is not None and sys.stderr.isatty():
            columns = SpinnerColumn(), TextColumn("{task.description}"), _SecondsLeft()
            self._line = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._line.add_task(solver, total=time_limit)

    def __enter__(self) -> SolverProgress:
        if self._line is not None:
            self._line.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._line is not None:
            self._line.stop()

    def show(self, bound: float, period: float) -> None:
        """Show the present bound and the period of the best plan, in the unit of the costs."""
        gap = 100 * (period / bound - 1) if bound > 0.0 else 0.0
        text = f"{self._solver}: period {period:g}, bound {bound:g}, gap {gap:.2g} %"
        now = time.monotonic()
        if self._line is not None:
            self._line.update(self._task, description=text)
        elif now - self._logged >= _LOG_SECONDS:
            self._logged = now
            log.info("planner %s, %.0f s left", text, max(0.0, self._started + self._time_limit - now))
