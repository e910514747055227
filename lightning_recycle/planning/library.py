"""The plan library: plans computed ahead and kept on disk, ready in milliseconds when workers fail.

Concept: a directory with one file for each problem. The file's name is a digest of everything that determines the
plan: the whole problem (grid, costs, failed workers, technique, limits), the planner with its settings, and the
versions of the package and of the plan file. Change any of these, and the library has no plan yet.

Contract: nothing in the directory is trusted. A file counts if it says that it answers this question, its checksum
is right, and its schedule passes the validator; otherwise it is reported once and treated as absent, so that the
next :meth:`PlanLibrary.compute` or :meth:`~PlanLibrary.put` replaces it. Files appear whole or not at all; several
processes may share a directory.

Must not know: who needs a plan, and when.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from os import PathLike
from pathlib import Path
from typing import Any

from lightning_recycle.errors import PlanningError, ReCycleError
from lightning_recycle.files import write_json
from lightning_recycle.planning.child_process import Report, run_in_child
from lightning_recycle.planning.normalization import normalize, normalized_failures
from lightning_recycle.planning.planfile import plan_to_json, read_plan
from lightning_recycle.planning.planner import Planner, get_planner, solve
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.result import PlanResult, proven
from lightning_recycle.planning.schedule import PLAN_SCHEMA, Schedule
from lightning_recycle.planning.validation import validate

__all__ = ["LIBRARY_SCHEMA", "PlanLibrary", "normalized_problem"]

log = logging.getLogger(__name__)

LIBRARY_SCHEMA = 1
"""Version of the entries' format; part of their names."""


def normalized_problem(problem: Problem, failures: int) -> Problem:
    """``problem`` with that *number* of failed workers, in the stages where they cost least (failure normalization).

    A library then needs one plan for each number instead of one for each set of failed workers.

    Raises:
        ConfigurationError: when ``failures`` is not an integer of at least 0.
        PlanningError: when a stage would have no live worker.
    """
    distribution = normalize(
        problem.grid,
        problem.costs,
        failures,
        technique=problem.technique,
        in_flight_limit=problem.in_flight_limit,
    )
    return replace(problem, failed=normalized_failures(problem.grid, distribution))


class PlanLibrary:
    """The plans of one planner in a directory, which is created when the first plan is stored.

    Args:
        path: the directory.
        planner: a planner or its name; plans of other planners are ignored.
    """

    def __init__(self, path: str | PathLike[str], planner: str | Planner = "heuristic") -> None:
        self.path = Path(path)
        self.planner = get_planner(planner)
        self._planner_description = _describe(self.planner)
        self._known: dict[str, PlanResult] = {}
        self._reported: set[str] = set()
        self._lock = threading.Lock()

    def get(self, problem: Problem) -> Schedule | None:
        """The stored schedule for ``problem``, or None."""
        result = self.lookup(problem)
        return None if result is None else result.schedule

    def lookup(self, problem: Problem) -> PlanResult | None:
        """Like :meth:`get`, with status and bound."""
        question = self._question(problem)
        name = _digest(question)
        with self._lock:
            known = self._known.get(name)
        if known is not None:
            return known
        path = self.path / f"{name}.json"
        try:
            with open(path, encoding="utf-8") as file:
                entry = json.load(file)
            result = _read(entry, question, problem)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError, ReCycleError) as error:
            self._report(name, f"The plan in {path} is not used and will be computed again: {_one_line(error)}")
            return None
        with self._lock:
            self._known[name] = result
        return result

    def put(self, result: PlanResult | Schedule) -> Path:
        """Store a plan of this library's planner; returns its file.

        Raises:
            PlanningError: when the schedule is not valid, or the file cannot be written.
        """
        if isinstance(result, Schedule):
            result = proven(result, type(self.planner).__name__)
        validate(result.schedule)
        question = self._question(result.schedule.problem)
        name = _digest(question)
        plan = plan_to_json(result)
        path = self.path / f"{name}.json"
        try:
            write_json(path, {"question": question, "checksum": _digest(plan), "plan": plan})
        except OSError as error:
            raise PlanningError(f"cannot store a plan in {path}: {error.strerror or error}.") from error
        with self._lock:
            self._known[name] = result
            self._reported.discard(name)
        return path

    def compute(
        self, problems: Iterable[Problem], processes: int | None = None, progress: bool = False
    ) -> list[PlanResult]:
        """The plans of all ``problems``, in order; those not stored yet are computed and stored.

        Args:
            problems: the problems to plan.
            processes: number of problems to plan at once; by default one per core.
            progress: whether to show a progress bar on the terminal.

        Raises:
            PlanningError: when there is no plan for one of them; the others are stored all the same.
        """
        wanted = list(problems)
        results = {problem: self.lookup(problem) for problem in wanted}
        missing = [problem for problem, result in results.items() if result is None]
        errors: list[ReCycleError] = []
        at_once = max(1, min(processes or os.cpu_count() or 1, len(missing)))
        bar = _ProgressBar(progress, len(results), len(results) - len(missing))
        with bar, ThreadPoolExecutor(at_once) as pool:
            waiting = {pool.submit(_plan_in_child, problem, self.planner): problem for problem in missing}
            for done in as_completed(waiting):
                try:
                    fresh = done.result()
                    self.put(fresh)
                    results[waiting[done]] = fresh
                except ReCycleError as error:
                    errors.append(error)
                bar.advance()
        if errors:
            raise errors[0]
        return [result for problem in wanted if (result := results[problem]) is not None]

    def _question(self, problem: Problem) -> dict[str, Any]:
        return {
            "library": LIBRARY_SCHEMA,
            "plan": PLAN_SCHEMA,
            # Dynamically: planning imports nothing above itself.
            "package": importlib.import_module("lightning_recycle").__version__,
            "planner": self._planner_description,
            "problem": _describe(problem),
        }

    def _report(self, name: str, message: str) -> None:
        with self._lock:
            if name in self._reported:
                return
            self._reported.add(name)
        log.warning("%s", message)


def _read(entry: Any, question: Mapping[str, Any], problem: Problem) -> PlanResult:
    """The plan in a file's content.

    Raises:
        PlanningError: when it is not the plan for ``question``.
    """
    if not isinstance(entry, Mapping) or not isinstance(entry.get("plan"), Mapping):
        raise PlanningError("it is not an entry of a plan library.")
    if entry.get("question") != question:
        raise PlanningError("it is the plan of another problem, planner or version.")
    if entry.get("checksum") != _digest(entry["plan"]):
        raise PlanningError("its checksum is wrong.")
    result = read_plan(entry["plan"])
    # What was asked, in full: the plan file holds only what an executor needs to know of it.
    schedule = replace(result.schedule, problem=problem)
    validate(schedule)
    return replace(result, schedule=schedule)


def _describe(value: Any) -> Any:
    """Everything that ``value`` consists of, as JSON; equal values have equal descriptions in every process."""
    if isinstance(value, Enum):
        return _describe(value.value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, Mapping):
        pairs = [[_describe(key), _describe(item)] for key, item in value.items()]
        return sorted(pairs, key=json.dumps)
    if isinstance(value, (set, frozenset)):
        return sorted((_describe(item) for item in value), key=json.dumps)
    if isinstance(value, Sequence):
        return [_describe(item) for item in value]
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if is_dataclass(value):
        parts = {item.name: getattr(value, item.name) for item in fields(value)}
    else:
        parts = dict(vars(value)) if hasattr(value, "__dict__") else {}
    return {"type": name, **{part: _describe(parts[part]) for part in sorted(parts)}}


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _plan_in_child(problem: Problem, planner: Planner) -> PlanResult:
    received: list[tuple[str, Any]] = []
    end = run_in_child(f"{__name__}:_child", (problem, planner), lambda kind, value: received.append((kind, value)))
    for kind, value in received:
        if kind == "result":
            return value  # type: ignore[no-any-return]
        raise PlanningError(str(value))
    # A user's own planner may not be transferable to another process; then it plans here.
    log.info("Planning in a separate process failed (%s); planning here.", end.failure)
    return solve(problem, planner)


def _child(task: tuple[Problem, Planner], report: Report) -> None:
    try:
        report("result", solve(*task))
    except ReCycleError as error:
        report("error", _one_line(error))


class _ProgressBar:
    """A bar on the terminal while the ``with`` block runs, or nothing."""

    def __init__(self, show: bool, total: int, done: int) -> None:
        self._show, self._total, self._done = show, total, done
        self._bar: Any = None

    def __enter__(self) -> None:
        if self._show:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
            self._bar.add_task("Planning ahead", total=self._total, completed=self._done)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self) -> None:
        """One more plan is done."""
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0])
