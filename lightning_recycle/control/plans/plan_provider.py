"""Plans for any failed workers, ready, stored or made at once; the planning queue.

Concept: a *job* is a generator that yields pure questions and gets their answers; a newer one replaces that of its
:class:`Urgency`. The most urgent job goes on, in a thread; the planning process answers
(:mod:`~lightning_recycle.planning.child_process`), or the thread itself for :class:`InThread`. Interrupted questions
are asked again. Jobs publish results, which the coordinator is woken to take.

| urgency | questions | replaced or dropped |
|---|---|---|
| NEEDED | the plan that workers wait for | when other workers have failed |
| AHEAD | plans for the failures that may come next | when roster, costs, memory or layout have changed |
| LAYOUT | the best layout for the workers that train | with the next change of roster |
| DRIFT | a plan for the present times | with the next question |

The provider asks them:

| plan | planner |
|---|---|
| without failures, before the workers start | that of the user |
| ahead: for each distribution of the next failure over the stages | the same, or the heuristic if that asks a solver |
| in need: neither made ahead nor in the plan library | the heuristic |

:meth:`PlanProvider.prepare` plans in the thread that calls it. Later the heuristic plans small grids in this process,
and all else is made in the planning process, if there can be one; :meth:`PlanProvider.request_plan` lets the
coordinator serve meanwhile. Plans of the library are used at once if they fit, and made again in the background if they
were made for other costs or limits. With ``split_backward="auto"`` plans are fused until all stages have tried
splitting; then both plans are made, and the better one is kept
(:func:`~lightning_recycle.planning.split_backward.choose_technique`).

Plans are kept by their problem up to renaming of workers
(:func:`~lightning_recycle.planning.routing.representative`): the fault-free one, and within the memory limit those
used last.

Contract: called from the coordinator's thread; slow work, except :meth:`PlanProvider.prepare` before the start, is a
job of the :class:`PlanningQueue`, whose every wait has a bound. No job can end its thread; :meth:`PlanningQueue.close`
ends the planning process, and awaits the thread for 30 s.

Must not know: connections, rosters, what is measured and when.
"""

from __future__ import annotations

import logging
import pickle
import threading
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from typing import Any, TypeAlias

from lightning_recycle.control.plans.assumptions import Assumptions, OperationSeconds, names_of
from lightning_recycle.errors import ConfigurationError, PlanningError
from lightning_recycle.planning.child_process import (
    Cancelled,
    PlanningProcess,
    ProcessLostError,
    Question,
    UnexpectedError,
    cancelled_by,
)
from lightning_recycle.planning.costs import Costs, cost_difference
from lightning_recycle.planning.exact_planner import ExactPlanner
from lightning_recycle.planning.failure_distribution import next_failures
from lightning_recycle.planning.grid import Grid, Worker
from lightning_recycle.planning.heuristic_planner import HeuristicPlanner
from lightning_recycle.planning.plan_library import PlanLibrary
from lightning_recycle.planning.planner import Planner, PlanningOptions, get_planner, solve
from lightning_recycle.planning.problem import Problem
from lightning_recycle.planning.routing import CompactSchedule, alike, renamed, representative
from lightning_recycle.planning.schedule import PlanResult, Schedule
from lightning_recycle.planning.split_backward import SplitCosts, TechniqueChoice, choose_technique
from lightning_recycle.planning.timing import retime

log = logging.getLogger(__name__)

_END_SECONDS = 30.0  # for a user's version of the heuristic that does not look whether its plan is wanted


class Urgency(IntEnum):
    """Priority of a planning job."""

    NEEDED = 0
    AHEAD = 1
    LAYOUT = 2
    DRIFT = 3


@dataclass(frozen=True)
class InThread:
    """A question for the heuristic, answered in this process; it can be interrupted."""

    question: Question


Job: TypeAlias = Generator[Question | InThread | None, Any, None]
"""Yields questions and gets the answers, or :class:`~lightning_recycle.errors.PlanningError` where there is none. None
is not a question, but a moment in which a more urgent job may go first.
"""


@dataclass(eq=False)
class _StartedJob:
    """A job, and the question that it waits for."""

    urgency: Urgency
    job: Job
    question: Question | InThread | None = None
    interrupted: threading.Event = field(default_factory=threading.Event)
    """Set: the question is given up."""
    dropped: bool = False


class PlanningQueue:
    """Planning jobs of one run, done one at a time, the most urgent first.

    ``wake``: called from another thread when :meth:`take` has something, or a plan in need was made or failed.
    """

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._process = PlanningProcess()
        self._published: list[Any] = []
        self._changed = threading.Condition()
        self._jobs: dict[Urgency, _StartedJob] = {}
        self._current: _StartedJob | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def begin(self, urgency: Urgency, job: Job) -> None:
        """Begins ``job`` instead of the one of that urgency; interrupts less urgent ones."""
        with self._changed:
            if self._closed:
                return
            self._drop(urgency)
            self._jobs[urgency] = _StartedJob(urgency, job)
            if self._current is not None and self._current.urgency > urgency:
                self._current.interrupted.set()
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="recycle-planner", daemon=True)
                self._thread.start()

    def drop(self, urgency: Urgency) -> None:
        with self._changed:
            self._drop(urgency)

    def publish(self, found: Any) -> None:
        """Passes a result to :meth:`take`; called by jobs."""
        with self._changed:
            self._published.append(found)
        self.wake()

    def take(self) -> list[Any]:
        """All results since the last call."""
        with self._changed:
            taken, self._published = self._published, []
        return taken

    def close(self) -> None:
        """Gives up on all jobs; awaits the thread, 30 s at most, and ends the process."""
        with self._changed:
            self._closed = True
            for urgency in Urgency:
                self._drop(urgency)
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)
        self._process.close()

    def _drop(self, urgency: Urgency) -> None:
        dropped = self._jobs.pop(urgency, None)
        if dropped is not None:
            dropped.dropped = True
            dropped.interrupted.set()

    def _run(self) -> None:
        while (started := self._most_urgent()) is not None:
            try:
                self._advance(started)
                continue
            except Cancelled:
                continue  # asked again, unless it was dropped
            except StopIteration:
                pass
            except Exception:  # the others must go on
                log.exception("Planning ended early")
            with self._changed:
                if self._jobs.get(started.urgency) is started:
                    del self._jobs[started.urgency]

    def _most_urgent(self) -> _StartedJob | None:
        """The job to go on with; None at the end of the run."""
        with self._changed:
            self._current = None
            while not self._jobs and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            selected = self._current = self._jobs[min(self._jobs)]
            selected.interrupted.clear()
            return selected

    def _advance(self, started: _StartedJob) -> None:
        """Has the job's question answered, and gets the next one.

        Raises Cancelled when the question was given up, StopIteration when the job has ended.
        """
        answer, error = None, None
        try:
            answer = self._answer(started)
        except PlanningError as caught:
            error = caught
        if not started.dropped:
            started.question = started.job.send(answer) if error is None else started.job.throw(error)

    def _answer(self, started: _StartedJob) -> Any:
        question = started.question
        if question is None:
            return None
        if not isinstance(question, InThread):
            return self._process.ask(question, started.interrupted, urgent=started.urgency == Urgency.NEEDED)
        try:
            with cancelled_by(started.interrupted):
                return question.question()
        except PlanningError:
            raise
        except Exception as error:  # the run has to do without this plan
            raise UnexpectedError(str(error) or repr(error), traceback.format_exc()) from error


_KEPT_OPERATIONS = 2_000_000  # in the schedules that are kept; about 180 bytes each
_SIMILAR_COSTS = 0.1  # of the mean operation: a plan for costs that differ less is not made again
_GOOD_ENOUGH_GAP = 0.001  # of a period: a stored plan that is so near to the lower bound needs no other
_MIN_OPERATIONS_FOR_PROCESS = 1_000  # smaller schedules take less time than starting a process, and delay no message

_PlanKey: TypeAlias = tuple[frozenset[Worker], tuple[tuple[Worker, float], ...]]


def _operations(grid: Grid) -> int:
    return 3 * grid.global_microbatches * grid.stages


def num_to_keep(schedules: Sequence[Schedule]) -> int:
    """How many of the last ``schedules`` may be kept: at least one."""
    left, count = _KEPT_OPERATIONS, 0
    for schedule in reversed(schedules):
        left -= _num_operations(schedule)
        if left < 0 and count:
            break
        count += 1
    return count


def _num_operations(schedule: Schedule) -> int:
    """Memory of ``schedule`` as a number of operations; if compact, of lanes."""
    if isinstance(schedule, CompactSchedule):
        return len(schedule.workers)
    return _operations(schedule.grid)


@dataclass(frozen=True, slots=True)
class ReadyPlan:
    """A plan and its origin.

    ``original_problem``: that it was made for; the plan's own has fused backwards if these were better. ``source``:
    "library"; "ahead", made before it was needed; "made", when it was needed; or "better", found while another one ran.
    ``is_final``: whether the planner of plans ahead cannot improve it. ``choice``: of split or fused backwards, if both
    were tried. ``seconds``: of planning. ``backend``: what computed it, if it was made here; otherwise "library".
    """

    schedule: Schedule
    original_problem: Problem
    source: str
    is_final: bool
    choice: TechniqueChoice | None = None
    seconds: float = 0.0
    backend: str = "library"

    def serves(self, problem: Problem) -> bool:
        """Whether planning ``problem`` would lead to this plan."""
        is_near = cost_difference(self.original_problem.costs, problem.costs) <= _SIMILAR_COSTS
        return is_near and alike(replace(self.original_problem, costs=problem.costs), problem)

    def is_replaced_by(self, schedule: Schedule, problem: Problem) -> bool:
        """Whether to keep ``schedule``, made for ``problem``, instead."""
        current = self.schedule
        if current.problem.technique != schedule.problem.technique or not _fits_memory(current, problem):
            return True
        return schedule.period < retime(current, schedule.problem.costs).period * (1 - 1e-9)


def _fits_memory(schedule: Schedule, problem: Problem) -> bool:
    """Whether ``schedule`` fits into the memory of ``problem``."""
    return schedule.problem.memories == problem.memories or schedule.fits(problem)


class ReadyPlans:
    """The plans that are kept for a run on ``grid``; usable from several threads."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._plans: dict[_PlanKey, ReadyPlan] = {}  # the one used last is the last
        self._lock = threading.Lock()

    def find(self, problem: Problem) -> ReadyPlan | None:
        """The plan for the failed and slow workers of ``problem``, for any costs."""
        key = _key_of(problem)
        with self._lock:
            found = self._plans.pop(key, None)
            if found is None:
                return None
            self._plans[key] = found
        own = found.schedule.problem
        schedule = renamed(found.schedule, replace(own, failed=problem.failed, worker_factors=problem.worker_factors))
        return replace(found, schedule=schedule)

    def choice(self, problem: Problem) -> TechniqueChoice | None:
        """Choice of split or fused backwards for the workers of ``problem``."""
        with self._lock:
            found = self._plans.get(_key_of(problem))
        return None if found is None else found.choice

    def keep(self, plan: ReadyPlan) -> None:
        """Keeps a plan; drops the least recently used over the limit, not the fault-free."""
        key = _key_of(plan.schedule.problem)
        with self._lock:
            self._plans.pop(key, None)
            self._plans[key] = plan
            forgettable = [key for key in self._plans if key != (frozenset(), ())]
            kept = num_to_keep([self._plans[key].schedule for key in forgettable])
            for key in forgettable[: len(forgettable) - kept]:
                del self._plans[key]

    @property
    def capacity(self) -> int:
        """Number of plans like the largest one here that can be kept."""
        with self._lock:
            sizes = [_num_operations(plan.schedule) for plan in self._plans.values()]
            largest = max(sizes, default=_operations(self._grid))
        return max(1, _KEPT_OPERATIONS // largest)


def _key_of(problem: Problem) -> _PlanKey:
    """Properties that plans share if one can be made of another by renaming workers."""
    common = representative(problem)
    return common.failed, common.worker_factors


PlanAnswer: TypeAlias = tuple[PlanResult, TechniqueChoice | None]
"""A plan, and the comparison of split with fused backwards, if that was asked."""


def make_plan(problem: Problem, planner: Planner, splitting: SplitCosts | None = None) -> PlanAnswer:
    """The plan of ``planner`` for ``problem``, or PlanningError; a pure question."""
    if splitting is None or not problem.technique.split_backward:
        return solve(problem, planner), None
    return choose_technique(problem, splitting, partial(solve, planner=planner))


class PlanProvider:
    """Plans for whichever workers fail, those for the next failures made ahead.

    Raises ConfigurationError for a planner that cannot be sent to the planning process.

    Args:
        costs: of the operations, in seconds; None to measure them.
        library: where plans are looked for and stored.
        chooses_split: whether the workers try what splitting backwards costs, where ``planning`` leaves that open. With
            a ``library``, whose plans are of one technique, nothing is left open.

    Attributes:
        source: of the newest plan; see :class:`ReadyPlan`.
        planner: plans ahead: the user's choice; where that asks a solver, the heuristic.
        background: makes plans ahead; those for the workers that train are published there, as :class:`ReadyPlan`.
    """

    def __init__(
        self,
        grid: Grid,
        planning: PlanningOptions,
        costs: Costs | None = None,
        library: PlanLibrary | None = None,
        chooses_split: bool = True,
    ) -> None:
        self.source = ""
        self.background = PlanningQueue()
        self._users_planner = get_planner(planning.planner)
        _check_travels(self._users_planner)
        self.assumptions = Assumptions(grid, planning, costs, chooses_split and library is None)
        self.planner = HeuristicPlanner() if isinstance(self._users_planner, ExactPlanner) else self._users_planner
        self._heuristic = self.planner if isinstance(self.planner, HeuristicPlanner) else HeuristicPlanner()
        self._grid = grid
        self._is_large = _operations(grid) >= _MIN_OPERATIONS_FOR_PROCESS
        self._library = library
        self._ready = ReadyPlans(grid)
        self._needed_plan: tuple[_PlanKey, threading.Event] | None = None  # that workers wait for; set: it is there

    def prepare(self) -> None:
        """Makes the fault-free plan with the user's planner, however long that takes."""
        problem = self.assumptions.problem(frozenset(), {})
        self._ready.keep(self._plan_in_library(problem) or self._make_here(problem, self._users_planner, "ahead"))

    # ------------------------------------------------------------------ the plan for those who train

    def request_plan(self, failed: frozenset[Worker], seconds: OperationSeconds) -> bool:
        """Requests the plan of :meth:`plan`; returns whether that has it at once.

        If not, the plan is being made instead of an earlier one for other workers, and the coordinator is woken when it
        is there.
        """
        problem = self.assumptions.problem(failed, seconds)
        wanted = problem.failed, problem.worker_factors
        if self._needed_plan is None or self._needed_plan[0] != wanted:
            self._needed_plan = None
            self.background.drop(Urgency.NEEDED)
            if not self._is_large or self._plan_at_hand(problem) is not None:
                return True
            self._needed_plan = wanted, threading.Event()
            self.background.begin(Urgency.NEEDED, self._make_in_need(problem, self._ready, self._needed_plan[1]))
        return self._needed_plan[1].is_set()

    def plan(self, failed: frozenset[Worker], seconds: OperationSeconds) -> Schedule:
        """Schedule without ``failed``: made ahead, stored, or at once by the heuristic."""
        problem = self.assumptions.problem(failed, seconds)
        self._needed_plan = None
        found = self._plan_at_hand(problem)
        if found is None:
            found = self._make_here(problem, self._heuristic, "made")
            self._ready.keep(found)
        self.source = found.source
        return found.schedule

    def choice(self, problem: Problem) -> TechniqueChoice | None:
        return self._ready.choice(problem)

    def _plan_at_hand(self, problem: Problem) -> ReadyPlan | None:
        """The plan that was made ahead, or is stored."""
        found = self._ready.find(problem)
        if found is None or not _fits_memory(found.schedule, problem):
            found = self._plan_in_library(problem, needed=True)
            if found is not None:
                self._ready.keep(found)
        return found

    def _make_in_need(self, problem: Problem, ready: ReadyPlans, is_done: threading.Event) -> Job:
        try:
            ready.keep((yield from self._make(problem, self.assumptions.snapshot(), self._heuristic, "made")))
        except Exception:  # the coordinator asks for the plan itself, and sees what is wrong with it
            log.exception("A plan that is needed could not be made")
        is_done.set()
        self.background.wake()

    # ------------------------------------------------------------------ what changes

    def adopt(self, schedule: Schedule) -> None:
        """Plans for the times of ``schedule`` from now on, and keeps it."""
        self.assumptions.adopt(schedule)
        self._library = None
        self._keep_better(schedule, self.choice(schedule.problem), is_final=True)

    def problem(self, failed: frozenset[Worker], seconds: OperationSeconds) -> Problem:
        """Problem without ``failed``, with the technique of the plan that runs."""
        problem, splitting = self.assumptions.problem(failed, seconds), self.assumptions.splitting
        choice = self.choice(problem)
        return problem if splitting is None or choice is None or choice.splits else splitting.of_fused(problem)

    def begin_anew(self, schedule: Schedule | None) -> None:
        """Forgets plans of the old layout; ``schedule`` is a plan for the new one."""
        self.background.drop(Urgency.AHEAD)
        choice = None if schedule is None else self.choice(schedule.problem)
        self._ready, self._library = ReadyPlans(self._grid), None
        if schedule is not None:
            self._keep_better(schedule, choice, is_final=self.planner is self._heuristic)

    def _keep_better(self, schedule: Schedule, choice: TechniqueChoice | None, is_final: bool) -> None:
        self._ready.keep(ReadyPlan(schedule, schedule.problem, "better", is_final, choice))

    # ------------------------------------------------------------------ what may come

    def plan_ahead(self, failed: frozenset[Worker], seconds: OperationSeconds, running: Schedule | None = None) -> None:
        """Plans for every failure that may follow ``failed``; replaces such a request.

        ``running``: the plan of the others, if a better one is wanted: first if it does not fit into memory, or the
        choice of split backwards is known since; after those for the next failures if other memory was measured, or the
        heuristic made it in need.
        """
        taken = {stage: dict(names) for stage, names in seconds.items()}
        self.background.begin(
            Urgency.AHEAD, self._make_ahead(failed, taken, running, self.assumptions.snapshot(), self._ready)
        )

    def _make_ahead(
        self,
        failed: frozenset[Worker],
        seconds: OperationSeconds,
        running: Schedule | None,
        assumed: Assumptions,
        ready: ReadyPlans,
    ) -> Job:
        present = assumed.problem(failed, seconds)
        at_once = later = False
        if running is not None:
            ready_plan = ready.find(present)
            is_open = assumed.splitting is not None and ready.choice(present) is None
            at_once = is_open or not _fits_memory(running, present)
            later = running.problem.memories != present.memories or (ready_plan is not None and not ready_plan.is_final)
        if at_once:
            yield from self._improve(present, assumed, ready, is_running=True)
        capacity = ready.capacity - (running is not None)
        for next_failed in next_failures(present)[:capacity]:
            yield from self._improve(assumed.problem(next_failed, seconds), assumed, ready)
        if later and not at_once:
            yield from self._improve(present, assumed, ready, is_running=True)

    def _improve(self, problem: Problem, assumed: Assumptions, ready: ReadyPlans, is_running: bool = False) -> Job:
        """Makes a plan, unless the one that is ready will do.

        ``is_running``: in any case, for the workers that train now. Without a result, which is logged, the current plan
        goes on, or a failure gets one in need.
        """
        yield None
        known = ready.find(problem)
        if known is not None and not is_running and known.is_final and known.serves(problem):
            return
        found = self._plan_in_library(problem)
        if found is None or not found.is_final:
            computed = yield from self._make_or_none(problem, assumed, "better" if is_running else "ahead")
            found = computed or found
        if found is not None and (known is None or known.is_replaced_by(found.schedule, problem)):
            ready.keep(found)
        elif known is not None:  # it is not asked again
            ready.keep(replace(known, is_final=True, choice=found.choice if found is not None else known.choice))
        if found is not None and is_running:
            self.background.publish(found)

    def _make_or_none(
        self, problem: Problem, assumed: Assumptions, source: str
    ) -> Generator[Any, Any, ReadyPlan | None]:
        for planner in (self.planner,) if self.planner is self._heuristic else (self.planner, self._heuristic):
            try:
                return (yield from self._make(problem, assumed, planner, source))
            except Exception as error:  # of a user's planner, too
                purpose = "what was measured" if source == "better" else f"the failure of {names_of(problem.failed)}"
                log.warning("%r found no plan for %s: %s", planner, purpose, error)
        return None

    # ------------------------------------------------------------------ one plan

    def _plan_in_library(self, problem: Problem, *, needed: bool = False) -> ReadyPlan | None:
        """The plan in the library; ``needed``: workers wait for it."""
        library = self._library  # another thread may take it away meanwhile
        if library is None:
            return None
        stored = library.lookup(problem)
        if stored is None:
            failed = ", ".join(map(str, sorted(problem.failed))) or "no failure"
            level = logging.WARNING if needed else logging.INFO
            log.log(level, "The plan library has none for %s: %s.", failed, library.miss(problem))
            return None
        is_final = stored.gap <= _GOOD_ENOUGH_GAP or library.has(problem)
        return ReadyPlan(stored.schedule, stored.schedule.problem, "library", is_final)

    def _make_here(self, problem: Problem, planner: Planner, source: str) -> ReadyPlan:
        """The plan of ``planner``, made in this thread; PlanningError when there is none."""
        answer = make_plan(problem, self.assumptions.planner(planner), self.assumptions.splitting)
        return self._ready_plan(problem, planner, source, answer)

    def _make(
        self, problem: Problem, assumed: Assumptions, planner: Planner, source: str
    ) -> Generator[Any, Any, ReadyPlan]:
        question = partial(make_plan, problem, assumed.planner(planner), assumed.splitting)
        is_heuristic = isinstance(planner, HeuristicPlanner)
        answer = None
        if self._is_large or not is_heuristic:
            try:
                answer = yield question
            except ProcessLostError as error:
                if not is_heuristic:
                    raise
                log.warning("The planning process is no use (%s): planning in a thread of the coordinator.", error)
        if answer is None:
            answer = yield InThread(question)
        return self._ready_plan(problem, planner, source, answer)

    def _ready_plan(self, problem: Problem, planner: Planner, source: str, answer: PlanAnswer) -> ReadyPlan:
        """The answer of ``planner`` as a plan, stored if it is the user's and better."""
        (result, choice), library = answer, self._library
        if result.warning is not None:
            log.warning("%s", result.warning)
        if library is not None and planner is self._users_planner:
            try:
                stored = library.get(problem)
                if stored is None or result.schedule.period < stored.period * (1 - _GOOD_ENOUGH_GAP):
                    library.put(result)
            except PlanningError as error:  # the plan is good, whether it can be stored or not
                log.warning("%s", error)
        is_final = source != "made" or planner is self.planner
        return ReadyPlan(result.schedule, problem, source, is_final, choice, result.seconds, result.backend)

    def close(self) -> None:
        """Ends all planning at the end of the run, as :meth:`PlanningQueue.close`."""
        self.background.close()


def _check_travels(planner: Planner) -> None:
    """Raises ConfigurationError if ``planner`` cannot be sent to another process.

    Its class cannot be imported there, or it has a lock. The heuristic, also a user's version of it, plans in this
    process where it has to.
    """
    if isinstance(planner, HeuristicPlanner):
        return
    why = ""
    try:
        pickle.dumps(planner)
    except Exception as error:  # whatever a user's class raises
        why = str(error)
    if type(planner).__module__ == "__main__":
        why = "its class is in the script"
    if why:
        raise ConfigurationError(
            f"planner={planner!r} plans in a process beside the coordinator, and cannot be sent there: {why}. Define"
            " its class in a module that can be imported, without open files or locks."
        )
