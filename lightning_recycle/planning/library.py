"""Plan library: plans computed ahead and kept on disk, ready when workers fail.

Concept: a directory with one compressed file for each plan: a line that says what the plan is for, and a line with its
operations. A stored plan is found by what it needs. It serves a problem if it was made

- by the same planner, for the same grid and techniques;
- for as many failed (and slow) workers in each stage: which ones does not matter, as the plan is renamed
  (:mod:`~lightning_recycle.planning.routing`);
- for costs that differ by at most ``tolerance``; it is timed again with those of the problem. A common factor is no
  difference: it changes no plan;

and if its workers hold no more than the problem allows, whatever limits it was made for. Of several the one for the
nearest costs is taken, then the shortest.

Contract: nothing in the directory is trusted. A file counts if it was written by this version of the package, its
checksum is right and its schedule passes the validator; otherwise it is reported once and treated as absent, so that
the next :meth:`PlanLibrary.compute` or :meth:`~PlanLibrary.put` replaces it. :meth:`PlanLibrary.miss` says why there
is no plan. Files appear whole or not at all; several processes may share a directory.

Must not know: who needs a plan, and when.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from os import PathLike
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from lightning_recycle.arguments import __version__, at_least
from lightning_recycle.errors import PlanningError, ReCycleError
from lightning_recycle.files import write_atomically
from lightning_recycle.planning.child_process import Report, run_in_child
from lightning_recycle.planning.compact_schedule import CompactSchedule
from lightning_recycle.planning.costs import cost_difference
from lightning_recycle.planning.plan_files import PLAN_SCHEMA, plan_to_json, problem_of, read_plan
from lightning_recycle.planning.planner import Planner, get_planner, solve
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.result import PlanResult, proven
from lightning_recycle.planning.routing import renamed, representative
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.planning.timing import retime
from lightning_recycle.planning.validation import InvalidScheduleError, validate

__all__ = ["LIBRARY_SCHEMA", "PlanLibrary"]

log = logging.getLogger(__name__)

LIBRARY_SCHEMA = 2
"""Version of the entries' format."""

_SUFFIX = ".plan.gz"
_TOLERANCE = 0.25  # of the mean operation
_SAME_COSTS = 1e-9  # of the mean operation
_KEPT_OPERATIONS = 1_000_000  # in the plans that stay in memory; about 180 bytes each
_COMPRESSION = 3  # of 9: the rest costs ten times the time for a few percent
_DAMAGE = (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError, RecursionError, ReCycleError)
"""Exceptions of reading a damaged file."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """Header of a file: the problem of its plan, and who made it.

    Args:
        path: the file.
        package: version of the package that wrote it.
        planner: the planner's description.
        problem: the representative of the problem.
        period: the plan's, as a multiple of the time that the operations of a micro-batch take.
    """

    path: Path
    package: Any
    planner: Any
    problem: Problem
    period: float


class PlanLibrary:
    """The plans of one planner in a directory, which is created when the first plan is stored.

    Args:
        path: the directory.
        planner: a planner or its name; plans of other planners are ignored.
        tolerance: how far costs may differ, as :func:`~lightning_recycle.planning.costs.cost_difference` measures it.

    Raises:
        ConfigurationError: when the planner is unknown or the tolerance negative.
    """

    def __init__(
        self, path: str | PathLike[str], planner: str | Planner = "heuristic", tolerance: float = _TOLERANCE
    ) -> None:
        self.path = Path(path)
        self.planner = get_planner(planner)
        self.tolerance = at_least("PlanLibrary", "tolerance", tolerance)
        self._planner_description = _describe(self.planner)
        self._package = __version__
        self._known: OrderedDict[Problem, PlanResult] = OrderedDict()  # the newest last
        self._index: dict[Path, tuple[tuple[int, int], _Entry | None]] = {}  # with the file's time and size
        self._reported: set[Path] = set()
        self._lock = threading.Lock()

    def get(self, problem: Problem) -> Schedule | None:
        """The stored schedule for ``problem``, with its workers and times, or None."""
        result = self.lookup(problem)
        return None if result is None else result.schedule

    def lookup(self, problem: Problem) -> PlanResult | None:
        """Like :meth:`get`, with status and bound."""
        with self._lock:
            known = self._known.get(problem)
        if known is None:
            known = self._find(problem)
            if known is not None:
                self._keep(known)
        return known

    def has(self, problem: Problem) -> bool:
        """Whether a plan for exactly these costs and limits is stored: the planner has nothing to add to it."""
        return any(entry.problem == representative(problem) for entry in self._matching(problem))

    def miss(self, problem: Problem) -> str:
        """Why :meth:`lookup` finds nothing for ``problem``, in a few words."""
        entries = self._entries()
        if not entries:
            return f"{self.path} holds no plans"
        for fits, reason in self._conditions(problem):
            left = [entry for entry in entries if fits(entry)]
            if not left:
                return reason
            entries = left
        difference = min(cost_difference(problem.costs, entry.problem.costs) for entry in entries)
        if difference > self.tolerance:
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
        question = {
            "library": LIBRARY_SCHEMA,
            "plan": PLAN_SCHEMA,
            "package": self._package,
            "planner": self._planner_description,
            "problem": _describe(representative(result.schedule.problem)),
        }
        path = self.path / f"{_digest(question)}{_SUFFIX}"
        try:
            write_atomically(path, _to_bytes(result, self._package, self._planner_description))
        except OSError as error:
            raise PlanningError(f"cannot store a plan in {path}: {error.strerror or error}.") from error
        with self._lock:
            self._known.clear()  # what was the nearest plan may not be it any more
            self._reported.discard(path)
        self._keep(result)
        return path

    def compute(
        self, problems: Iterable[Problem], processes: int | None = None, progress: bool = False
    ) -> list[PlanResult]:
        """The plans of all ``problems``, in order; those not stored yet, for exactly these costs and limits, are
        computed and stored. One plan is made for all problems that are alike.

        Args:
            problems: the problems to plan.
            processes: number of problems to plan at once; by default one per core.
            progress: whether to show a progress bar on the terminal.

        Raises:
            PlanningError: when there is no plan for one of them; the others are stored all the same.
        """
        wanted = list(problems)
        first = {representative(problem): problem for problem in reversed(wanted)}
        results = {common: self._find(problem, exact=True) for common, problem in first.items()}
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
        found = [(problem, results[representative(problem)]) for problem in wanted]
        return [
            replace(result, schedule=renamed(result.schedule, problem))
            for problem, result in found
            if result is not None
        ]

    # ------------------------------------------------------------------ finding

    def _find(self, problem: Problem, exact: bool = False) -> PlanResult | None:
        """The plan made for ``problem``; unless ``exact``, else the shortest that serves, for the nearest costs."""
        ranked = []
        asked = representative(problem)
        for entry in self._matching(problem):
            other = entry.problem != asked
            difference = cost_difference(problem.costs, entry.problem.costs)
            if not other if exact else difference <= self.tolerance:
                difference = 0.0 if difference < _SAME_COSTS else difference  # the same costs in two units of time
                ranked.append(((other, difference, entry.period, entry.path.name), entry))
        for _, entry in sorted(ranked, key=lambda each: each[0]):
            try:
                found = _adapted(_read(entry.path), problem)
            except _DAMAGE as error:
                self._report(entry.path, error)
                continue
            if found is not None:
                return found
        return None

    def _matching(self, problem: Problem) -> list[_Entry]:
        """The plans that have all in common with ``problem`` but costs and limits."""
        conditions = self._conditions(problem)
        return [entry for entry in self._entries() if all(fits(entry) for fits, _ in conditions)]

    def _conditions(self, problem: Problem) -> list[tuple[Callable[[_Entry], bool], str]]:
        """Conditions of a stored plan for ``problem``, each with the reason for a miss where no plan meets it."""
        asked = representative(problem)
        counts = [len(problem.failed) - sum(w.stage != s for w in problem.failed) for s in range(problem.grid.stages)]
        failures = " and ".join(f"{count} in stage {stage}" for stage, count in enumerate(counts) if count)
        failed = (asked.failed, asked.worker_factors)
        slow = f", {len(asked.worker_factors)} slow workers" if asked.worker_factors else ""
        return [
            (lambda e: bool(e.package == self._package), "its plans were made by another version of the package"),
            (
                lambda e: bool(e.planner == self._planner_description),
                f"its plans are not of the planner {self.planner!r}",
            ),
            (lambda e: e.problem.grid == asked.grid, f"no plan for the grid {asked.grid}"),
            (lambda e: e.problem.technique == asked.technique, f"no plan for {asked.technique}"),
            (
                lambda e: (e.problem.failed, e.problem.worker_factors) == failed,
                f"no plan for failures {failures}{slow}" if failures else f"no plan without failures{slow}",
            ),
        ]

    def _entries(self) -> list[_Entry]:
        """Headers of the files of the directory, without those that are damaged."""
        found: dict[Path, tuple[tuple[int, int], _Entry | None]] = {}
        try:
            with os.scandir(self.path) as files:
                listed = [(Path(file.path), file.stat()) for file in files if file.name.endswith(_SUFFIX)]
        except OSError:  # there is no directory before the first plan is stored
            listed = []
        with self._lock:
            known = dict(self._index)
        for path, stat in sorted(listed):
            stamp = (stat.st_mtime_ns, stat.st_size)
            if path in known and known[path][0] == stamp:
                found[path] = known[path]
                continue
            entry = None
            try:
                entry = _entry(path)
            except FileNotFoundError:  # another process replaces it
                continue
            except _DAMAGE as error:
                self._report(path, error)
            found[path] = (stamp, entry)
        with self._lock:
            self._index = found
        return [entry for _, entry in found.values() if entry is not None]

    def _keep(self, result: PlanResult) -> None:
        """Keeps a plan in memory, and forgets those that were not used for longest."""
        grid, schedule = result.schedule.grid, result.schedule
        is_compact = isinstance(schedule, CompactSchedule)
        size = len(schedule.workers) if is_compact else 3 * grid.global_microbatches * grid.stages
        with self._lock:
            self._known[schedule.problem] = result
            while len(self._known) > max(1, _KEPT_OPERATIONS // size):
                self._known.popitem(last=False)

    def _report(self, path: Path, error: BaseException) -> None:
        with self._lock:
            if path in self._reported:
                return
            self._reported.add(path)
        log.warning("The plan in %s is not used and will be computed again: %s", path, _one_line(error))


# ------------------------------------------------------------------ files


def _to_bytes(result: PlanResult, package: str, planner: Any) -> bytes:
    plan = plan_to_json(result)
    operations = _json({name: plan.pop(name) for name in ("workers", "lane") if name in plan})
    header = {"library": LIBRARY_SCHEMA, "package": package, "planner": planner, "plan": plan}
    header["checksum"] = _checksum(header, operations)
    return gzip.compress(f"{_json(header)}\n{operations}\n".encode(), _COMPRESSION, mtime=0)


def _entry(path: Path) -> _Entry:
    """Header of a file; its operations are not read."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        header = _header(file.readline())
    problem = problem_of(header["plan"])  # the operations are not needed to know it
    costs = problem.costs
    work = sum(costs.forward) + sum(costs.backward_input) + sum(costs.backward_weight)
    period = header["plan"]["period"] / (work or 1.0)
    return _Entry(path, header["package"], header["planner"], representative(problem), period)


def _header(line: str) -> dict[str, Any]:
    header = json.loads(line)
    if not isinstance(header, dict) or not isinstance(header.get("plan"), dict):
        raise PlanningError("it is not an entry of a plan library.")
    return header


def _read(path: Path) -> PlanResult:
    """The validated plan in a file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        header = _header(file.readline())
        operations = file.read().rstrip("\n")
    checksum = header.pop("checksum", None)
    if checksum != _checksum(header, operations):
        raise PlanningError("its checksum is wrong.")
    return read_plan({**header["plan"], **json.loads(operations)})


def _checksum(header: Mapping[str, Any], operations: str) -> str:
    return hashlib.sha256(f"{json.dumps(header, sort_keys=True)}\n{operations}".encode()).hexdigest()


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


# ------------------------------------------------------------------ questions


def _adapted(result: PlanResult, problem: Problem) -> PlanResult | None:
    """A stored plan as a plan for ``problem``; None if a worker would hold more than it may."""
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
    end = run_in_child(f"{__name__}:_solve", (problem, planner), lambda *message: received.append(message))
    for kind, value in received:
        if kind == "result":
            return value  # type: ignore[no-any-return]
        raise PlanningError(str(value))
    # A user's own planner may not be transferable to another process; then it plans here.
    log.info("Planning in a separate process failed (%s); planning here.", end.failure)
    return solve(problem, planner)


def _solve(task: tuple[Problem, Planner], report: Report) -> None:
    try:
        report("result", solve(*task))
    except ReCycleError as error:
        report("error", _one_line(error))
