"""Plan files, and the library: a directory of compressed plans made ahead.

*Files*: docs/planner.md has the format of ``plan.json``. Each loaded plan has passed the validator.

*Library*: the first part of a file's name stands for planner, version, grid, techniques and the numbers of failed and
slow workers of each stage, as plans are renamed (:mod:`~lightning_recycle.planning.routing`); the second part for
costs and limits. A plan serves a problem with the same first part if its costs differ by at most a quarter of the mean
operation (it is timed again; a common factor is not a difference) and it fits into memory. The nearest costs win, then
the shortest plan.

Nothing in the directory is trusted: damaged files and invalid schedules are reported once and treated as absent. Files
appear whole or not at all; several processes may share a directory.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import zlib
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, is_dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import track

from lightning_recycle.arguments import __version__
from lightning_recycle.errors import PlanningError, ReCycleError
from lightning_recycle.files import read_json, refusing, typed_content, write_atomically, write_json
from lightning_recycle.planning.child_process import Reporter, run_in_child
from lightning_recycle.planning.costs import cost_difference
from lightning_recycle.planning.grid import Worker
from lightning_recycle.planning.planner import Planner, get_planner, solve
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.routing import CompactSchedule, Lane, compact, lane_problem, renamed, representative
from lightning_recycle.planning.schedule import (
    TOLERANCE,
    OperationColumns,
    PlanResult,
    Schedule,
    SolverUse,
    proven,
    schedule_of_columns,
)
from lightning_recycle.planning.timing import retime
from lightning_recycle.planning.validation import InvalidScheduleError, validate

log = logging.getLogger(__name__)

PLAN_SCHEMA = 1
"""Version of the plan file's format; a reader refuses unknown versions."""


@dataclass(frozen=True, slots=True)
class _Program:
    """The operations of one worker in a plan file."""

    pipeline: int
    stage: int
    ops: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Content:
    """The content of a plan file; either ``workers`` or the stages of a ``lane``."""

    problem: Problem
    backend: str
    found_by: str
    solver: SolverUse
    lower_bound: float
    period: float
    workers: tuple[_Program, ...] = ()
    lane: tuple[dict[str, Any], ...] = ()

    @classmethod
    def of(cls, result: PlanResult) -> _Content:
        schedule = result.schedule
        known = schedule.problem, result.backend, result.found_by, result.solver, result.lower_bound, schedule.period
        if isinstance(schedule, CompactSchedule):
            return cls(*known, lane=tuple(each.to_json() for each in schedule.lane.stages))
        columns = {worker: OperationColumns.of(schedule.workers[worker]) for worker in schedule.live_workers}
        return cls(*known, tuple(_Program(w.pipeline, w.stage, each.to_json()) for w, each in columns.items()))

    def schedule(self) -> Schedule:
        """Not validated; KeyError, TypeError or ValueError where operations are damaged."""
        if self.lane:
            one = lane_problem(self.problem)
            stages = tuple(map(OperationColumns.from_json, self.lane))
            if len(stages) != one.grid.stages:
                raise ValueError(f"its lane is none of the grid {one.grid}")
            return replace(compact(self.problem, Lane(one, stages)), period=self.period)
        columns = {Worker(each.pipeline, each.stage): OperationColumns.from_json(each.ops) for each in self.workers}
        return schedule_of_columns(self.problem, columns, self.period)


def plan_to_json(result: PlanResult | Schedule) -> dict[str, Any]:
    """The content of the plan file; a bare schedule counts as the heuristic's."""
    if isinstance(result, Schedule):
        result = proven(result, "heuristic")
    known = {"status": result.status, "gap": result.gap, "makespan": result.schedule.makespan}  # for other readers
    return {"schema": PLAN_SCHEMA, **known, **msgspec.to_builtins(_Content.of(result), order="deterministic")}


def save_plan(path: str | PathLike[str], result: PlanResult | Schedule) -> None:
    """Write ``plan.json``, atomically.

    Raises:
        PlanningError: when the file cannot be written.
    """
    with refusing(f"write the plan to {path}", PlanningError):
        write_json(path, plan_to_json(result))


def load_plan(path: str | PathLike[str]) -> PlanResult:
    """Read and validate a plan file.

    Raises:
        PlanningError: when the file cannot be read, is damaged, of another schema, or its schedule breaks a rule.
    """
    data = read_json(path, "the plan", "compute it again", PlanningError)
    try:
        return read_plan(data)
    except InvalidScheduleError as error:
        raise PlanningError(
            f"the plan {path} breaks {len(error.violations)} rule(s), the first: {error.violations[0]}. "
            "Compute it again."
        ) from error
    except PlanningError as error:
        raise PlanningError(f"{path}: {error}") from error


def read_plan(data: Any) -> PlanResult:
    """The validated plan from the content of a plan file.

    Raises:
        PlanningError: as for :func:`load_plan`.
    """
    content = typed_content(data, _Content, PLAN_SCHEMA, "the plan", "compute it again", PlanningError)
    try:
        schedule = content.schedule()
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise PlanningError(f"the plan is damaged ({error!r}): compute it again.") from error
    validate(schedule)
    bound = content.lower_bound
    if not bound <= schedule.period * (1 + TOLERANCE):
        raise PlanningError(f"the plan is damaged (its period is below its lower_bound {bound:g}): compute it again.")
    # The bound is not computed again: that takes longer than all else here.
    return PlanResult(schedule, content.backend, bound, found_by=content.found_by, solver=content.solver)


_SUFFIX = ".plan.gz"
_TOLERANCE = 0.25  # of the mean operation
_SAME_COSTS = 1e-9  # of the mean operation
_COMPRESSION = 3  # of 9: the rest costs ten times the time for a few percent
_DAMAGE = (OSError, EOFError, zlib.error, ValueError, RecursionError, ReCycleError)
"""Exceptions of reading a damaged file."""


class PlanLibrary:
    """The plans of one planner in a directory, created with the first plan.

    Args:
        path: the directory.
        planner: a planner or its name; plans of other planners are ignored.

    Raises:
        ConfigurationError: when the planner is unknown.
    """

    def __init__(self, path: str | PathLike[str], planner: str | Planner = "heuristic") -> None:
        self.path = Path(path)
        self.planner = get_planner(planner)
        self._reported: set[Path] = set()

    def get(self, problem: Problem) -> Schedule | None:
        """The stored schedule for ``problem``, with its workers and times, or None."""
        result = self.lookup(problem)
        return None if result is None else result.schedule

    def lookup(self, problem: Problem) -> PlanResult | None:
        """Like :meth:`get`, with status and bound."""
        found = self._exact(problem)
        if found is not None:
            return found
        ranked = []
        for stored in self._alike(problem):
            costs = stored.schedule.problem.costs
            difference = cost_difference(problem.costs, costs)
            if difference <= _TOLERANCE and (adapted := _adapted(stored, problem)) is not None:
                same = difference < _SAME_COSTS  # in two units of time
                ranked.append((0.0 if same else difference, adapted.schedule.period, adapted))
        return min(ranked, key=lambda each: each[:2])[2] if ranked else None

    def has(self, problem: Problem) -> bool:
        """Whether a plan for exactly these costs and limits is stored."""
        return self._path(problem).exists()

    def miss(self, problem: Problem) -> str:
        """Why :meth:`lookup` finds nothing for ``problem``, in a few words."""
        if not any(self.path.glob(f"*{_SUFFIX}")):
            return f"{self.path} holds no plans"
        stored = self._alike(problem)
        if not stored:
            return (
                f"no plan for these failures, the grid {problem.grid} and {problem.technique} of the planner "
                f"{self.planner!r} of this version of the package"
            )
        difference = min(cost_difference(problem.costs, each.schedule.problem.costs) for each in stored)
        if difference > _TOLERANCE:
            return f"costs differ by {100 * difference:.0f} %"
        return "workers would hold more than they may"

    def put(self, result: PlanResult | Schedule) -> Path:
        """Store a plan of this library's planner; returns its file.

        Raises:
            PlanningError: when the schedule is not valid, or the file cannot be written.
        """
        if isinstance(result, Schedule):
            result = proven(result, type(self.planner).__name__)
        validate(result.schedule)
        path = self._path(result.schedule.problem)
        content = json.dumps(plan_to_json(result), separators=(",", ":"), allow_nan=False)
        with refusing(f"store a plan in {path}", PlanningError):
            write_atomically(path, gzip.compress(content.encode(), _COMPRESSION, mtime=0))
        self._reported.discard(path)
        return path

    def compute(
        self, problems: Iterable[Problem], processes: int | None = None, progress: bool = False
    ) -> list[PlanResult]:
        """The plans of all ``problems``, in order; missing ones are made and stored.

        Missing: not stored for exactly these costs and limits. Problems that are alike get one plan.

        Args:
            problems: the problems to plan.
            processes: number of problems to plan at once; by default one per core.
            progress: whether to show a progress bar on the terminal.

        Raises:
            PlanningError: when there is no plan for one of them; the others are stored all the same.
        """
        requested = list(problems)
        first = {representative(problem): problem for problem in reversed(requested)}
        results = {common: self._exact(problem) for common, problem in first.items()}
        missing = [common for common, result in results.items() if result is None]
        errors: list[ReCycleError] = []
        at_once = max(1, min(processes or os.cpu_count() or 1, len(missing)))
        with ThreadPoolExecutor(at_once) as pool:
            waiting = {pool.submit(_plan_in_child, first[common], self.planner): common for common in missing}
            done_in_turn: Iterable[Future[PlanResult]] = as_completed(waiting)
            if progress:
                console = Console(stderr=True)
                done_in_turn = track(done_in_turn, "Planning ahead", len(missing), console=console, transient=True)
            for done in done_in_turn:
                try:
                    fresh = done.result()
                    self.put(fresh)
                    results[waiting[done]] = fresh
                except ReCycleError as error:
                    errors.append(error)
        if errors:
            raise errors[0]
        found = [(problem, results[representative(problem)]) for problem in requested]
        return [
            replace(result, schedule=renamed(result.schedule, problem))
            for problem, result in found
            if result is not None
        ]

    # ------------------------------------------------------------------ finding

    def _path(self, problem: Problem) -> Path:
        known = msgspec.to_builtins(representative(problem), order="deterministic")
        details = _digest({name: known.pop(name, None) for name in ("costs", "in_flight_limit", "memory")})
        return self.path / f"{_digest([PLAN_SCHEMA, __version__, _described(self.planner), known])}-{details}{_SUFFIX}"

    def _exact(self, problem: Problem) -> PlanResult | None:
        found = self._read(self._path(problem))
        return None if found is None else _adapted(found, problem)

    def _alike(self, problem: Problem) -> list[PlanResult]:
        """Plans that share all with ``problem`` but costs and limits."""
        question = self._path(problem).name.partition("-")[0]
        read = map(self._read, sorted(self.path.glob(f"{question}-*{_SUFFIX}")))
        return [found for found in read if found is not None]

    def _read(self, path: Path) -> PlanResult | None:
        """The validated plan in a file; None if there is none, or the file is damaged."""
        try:
            found = read_plan(json.loads(gzip.decompress(path.read_bytes())))
            if self._path(found.schedule.problem) != path:
                raise PlanningError("it is not the plan that its name says.")
            return found
        except (FileNotFoundError, NotADirectoryError):
            return None
        except _DAMAGE as error:
            if path not in self._reported:
                self._reported.add(path)
                reason = " ".join(str(error).split()) or type(error).__name__
                log.warning("The plan in %s is not used and will be computed again: %s", path, reason)
            return None


def _adapted(result: PlanResult, problem: Problem) -> PlanResult | None:
    """A stored plan as a plan for ``problem``; None if it exceeds the memory."""
    schedule, stored = result.schedule, result.schedule.problem
    # First the names, for which all else must be equal; then costs and limits.
    mapped = renamed(schedule, replace(stored, failed=problem.failed, worker_factors=problem.worker_factors))
    if stored.costs != problem.costs:
        mapped = retime(mapped, problem.costs)
    elif mapped.problem == problem:
        return replace(result, schedule=mapped)
    mapped = mapped.under(problem)
    try:
        validate(mapped)
    except InvalidScheduleError:
        return None
    return proven(mapped, result.backend, found_by=result.found_by, solver=result.solver)


def _described(planner: Planner) -> str:
    """The planner and its settings; the same for equal planners in every process."""
    settings = repr(planner) if is_dataclass(planner) else repr(sorted(getattr(planner, "__dict__", {}).items()))
    return f"{type(planner).__module__}.{type(planner).__qualname__} {settings}"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, allow_nan=False).encode()).hexdigest()[:32]


def _plan_in_child(problem: Problem, planner: Planner) -> PlanResult:
    received: list[PlanResult] = []
    failure = run_in_child(f"{__name__}:_solve", (problem, planner), lambda _, result: received.append(result))
    if received:
        return received[0]
    # A user's own planner may not be transferable to another process; then it plans here. So an error shows here, too.
    log.info("Planning in a separate process failed (%s); planning here.", failure)
    return solve(problem, planner)


def _solve(task: tuple[Problem, Planner], report: Reporter) -> None:
    report("result", solve(*task))
