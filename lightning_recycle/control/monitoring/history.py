"""History of a run: events, log lines, counters, a summary; its goodput.

Times are in seconds since the epoch, durations in seconds. Each event is also one line of JSON in the log
``lightning_recycle.events`` (level INFO, steps DEBUG). :class:`Digest` adds up each event as it happens, in constant
time and bounded size: a run may have millions of steps.

:class:`Goodput` divides a run's worker-seconds by the simulator's causes. Between two entries of the record the run is
in one *phase*, and each position spends the time on one cause of :class:`lightning_recycle.simulation.Cause`:

============== =============================================================================================
useful         F, B and W of steps that count, each once: the steps times the mean seconds of their operations
bubble         the rest of training time: pipeline bubbles, communication, REDUCE, STEP, hooks, checkpoints
idle           alive without taking part: until all are connected for the first time ("starting"), and spares
redone         computations of a step that runs again ("interrupted"), forwards run twice ("recomputation")
reconfiguring  from a death until all are connected again ("recovering"), waits for roster changes ("joining")
failed         vacant positions ("vacant")
============== =============================================================================================

Contract of goodput: no clock, times are arguments. All seconds are worker-seconds, never shrink, and add up to
(positions + spares) times the time up to the newest commit, or up to now outside of training. O(1) for each event.

Must not know: the simulator, which takes a moment to import. A test compares the names.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from lightning_recycle.control.monitoring.logs import plain
from lightning_recycle.control.protocol.messages import FaultInjected
from lightning_recycle.control.protocol.state import MembershipState, Record
from lightning_recycle.errors import counted
from lightning_recycle.planning.grid import Grid, Positions

log = logging.getLogger(__name__)

PARTS: Mapping[str, tuple[str, ...]] = {
    "useful": ("training",),
    "bubble": ("training",),
    "idle": ("starting", "spare"),
    "redone": ("interrupted", "recomputation"),
    "reconfiguring": ("recovering", "joining"),
    "failed": ("vacant",),
}
"""The values of :class:`lightning_recycle.simulation.Cause`, and what they are divided into."""


class Phase(str, Enum):
    """Phase of a run."""

    STARTING = "starting"
    TRAINING = "training"
    RECOVERING = "recovering"
    JOINING = "joining"
    """All wait at a step boundary for a change of the roster."""


class Goodput:
    """Worker-seconds of a run by cause: ``positions`` workers, from ``now`` on."""

    def __init__(self, positions: int, now: float) -> None:
        self.phase = Phase.STARTING
        self._positions = positions
        self._live = positions
        self._spares = 0
        self._spares_since = now
        self._mark = now  # everything before is accounted for
        self._seconds: dict[tuple[str, str], float] = {}
        self._training = 0.0  # that is not divided into useful time and bubbles yet
        self._steps = 0  # in it
        self._interrupted = 0.0  # of a step of which nobody knows yet whether it runs again
        self._silent_since: dict[tuple[int, int] | None, float] = {}

    def seconds(self, now: float) -> dict[str, dict[str, float]]:
        """Worker-seconds by cause and phase; all of them are there."""
        if self.phase is not Phase.TRAINING:  # otherwise a failure may still show that the step is lost
            self._pass(now)
        self.spares_are(self._spares, now)
        return {
            cause: {phase: self._seconds.get((cause, phase), 0.0) for phase in phases}
            for cause, phases in PARTS.items()
        }

    def spares_are(self, count: int, now: float) -> None:
        """Sets the number of waiting spares; called again and again."""
        self._add("idle", "spare", self._spares * max(0.0, now - self._spares_since))
        self._spares, self._spares_since = count, now

    def divide(self, useful: float, again: float = 0.0) -> None:
        """Divides the steps since the previous call.

        ``useful``: worker-seconds of F, B and W in a step, each once. ``again``: worker-seconds of repeated
        computations in a step.
        """
        if not self._steps:
            return
        useful = min(self._training, self._steps * useful)
        again = min(self._training - useful, self._steps * again)
        self._add("useful", "training", useful)
        self._add("redone", "recomputation", again)
        self._add("bubble", "training", self._training - useful - again)
        self._training, self._steps = 0.0, 0

    def happened(self, event: Event, live: int, joining: bool) -> None:
        """Takes in an event; ``live`` workers are in, some perhaps still ``joining``."""
        time, worker, details, seconds = event.time, event.worker, event.details, event.seconds or 0.0
        match event.kind:
            case "step":
                self._pass(time)
                self._steps += 1
            case "suspected" | "evicted" if "seconds" in details:
                self._silent_since[worker] = time - details["seconds"]
            case "cleared":
                self._silent_since.pop(worker, None)
                if self.phase is Phase.TRAINING:  # all have waited for it
                    self._pass(time - seconds)
                    self.phase = Phase.RECOVERING
                    self._pass(time)
                    self.phase = Phase.TRAINING
            case "failure":
                died = min(time - seconds, self._silent_since.pop(worker, time))
                self._interrupt(died)
                self._live = live
                self._pass(time)
            case "disturbance":
                self._interrupt(time)
            case "paused":
                self._pass(time)
                self.phase = Phase.JOINING
            case "resumed":
                if details.get("redone"):
                    self._add("redone", "interrupted", self._interrupted)
                else:
                    self._training += self._interrupted
                self._interrupted = 0.0
            case "regrouped" | "rejoined" | "replanned" if not joining:
                self._pass(time)
                self.phase = Phase.TRAINING
        if live != self._live:
            self._pass(time)
            self._live = live

    def _interrupt(self, time: float) -> None:
        """Training stops at ``time``; work since the newest commit may be lost."""
        if self.phase is Phase.TRAINING:
            trained = self._training
            self._pass(time)
            self._interrupted += self._training - trained
            self._training = trained
            self.phase = Phase.RECOVERING
        else:
            self._pass(time)

    def _pass(self, time: float) -> None:
        """Accounts for the time up to ``time``, spent in one phase by the same workers."""
        passed = max(0.0, time - self._mark)  # a clock may have been set back
        self._mark = max(self._mark, time)
        self._add("failed", "vacant", (self._positions - self._live) * passed)
        spent = self._live * passed
        if self.phase is Phase.TRAINING:
            self._training += spent
        else:
            self._add("idle" if self.phase is Phase.STARTING else "reconfiguring", self.phase.value, spent)

    def _add(self, cause: str, phase: str, seconds: float) -> None:
        if seconds:
            self._seconds[cause, phase] = self._seconds.get((cause, phase), 0.0) + seconds


_events = logging.getLogger("lightning_recycle.events")

_STEPS_KEPT = 10_000  # at least; a week can have a million


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of ``strategy.history``.

    Args:
        kind: what happened; the page on events lists the kinds and their ``details``. Where a failure is being
            recovered, ``seconds`` of "resumed", "regrouped" and "recovered" count from it.
        time: seconds since the epoch.
        generation: the generation at that time.
        step: the optimizer step concerned.
        worker: (pipeline, stage), where one is concerned.
        details: further facts, by name.
        host: the machine of the worker's process, by the name it gave (``RECYCLE_NODE``, or the host name); None where
            no process is concerned.
        pid: its process id there.
    """

    kind: str
    time: float
    generation: int
    step: int
    worker: tuple[int, int] | None = None
    seconds: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    host: str | None = None
    pid: int | None = None


_STAYS = " Its position stays empty: a replacement would differ, too."

_LINES: Mapping[str, tuple[int, str]] = {
    "failure": (
        logging.WARNING,
        "Worker {worker} was lost at step {step}: {cause}{process}. {live}.",
    ),
    "dismissed": (logging.ERROR, "Worker {worker}, which has joined the training, is dismissed: {cause}.{stays}"),
    "rejoined": (logging.INFO, "Worker {worker}{process} joins at step {step}. {live}."),
    "left": (
        logging.INFO,
        "Worker {worker}{process} leaves before step {step}, as it was asked to. {live}.",
    ),
    "disputed": (
        logging.WARNING,
        "Worker {worker} {cause}, in micro-batch {microbatch} of step {step}: all of its stage compute it.",
    ),
    "not_finite": (logging.WARNING, "Step {step}: {who}{cause}. It is {then}."),
    "incomparable": (logging.WARNING, "Workers do not check each other's computations any more: {cause}."),
    "disturbance": (logging.WARNING, "The workers connect again at step {step}: {cause}"),
    "stop_requested": (
        logging.INFO,
        "Worker {worker} wants to stop training before step {step}: all stop after one of the next steps.",
    ),
}
"""Log message of the coordinator for an event, by its kind."""


def corruption_line(name: str, record: Record) -> str:
    """A record of kind "corruption" in words; ``name``: its worker's, if known."""
    details = record.details
    who = f"Worker {name} on device {details['device']} is wrong: " if name else ""
    since = details["since"]
    if details["proof"] == "computation":
        return (
            f"{who}{details['cause']}. It is {details['then']}. Nothing of step {record.step} is kept; what"
            " earlier steps took from micro-batches of this worker that no peer computed again may be wrong as well."
        )
    before = "no earlier check shows when that began" if since < 0 else f"all were equal after step {since}"
    return (
        f"{who}{details['cause']}. It is {details['then']}. Its effect on the steps since then stays in the"
        f" weights ({before})."
    )


class History:
    """Events of a run on ``grid``, with ``members`` processes at each position."""

    def __init__(self, grid: Grid, members: int = 1) -> None:
        self.events: list[Event] = []  # all of them, except that only the newest "step" are kept
        self._steps_kept = 0
        self._positions = Positions(grid, members)
        self._losses: dict[int, float] = {}  # of steps that are not committed yet
        self.peaks: dict[int, int] = {}  # the most bytes of memory that the newest process at each rank has held
        self._most: dict[int, int] = {}  # the same of all workers of a stage
        self.processes: dict[int, tuple[str, int]] = {}  # host and process id of the newest one at each rank
        self.digest = Digest(self._positions.num_workers, time.time())
        self._earlier: Mapping[str, float] = {}  # totals under an earlier coordinator
        self._stall_seconds = 0.0  # for which checkpoints have held up a worker, in all
        self._injected_faults: dict[int, FaultInjected] = {}
        self._failure_time: float | None = None
        self._recovering = False  # survivors have agreed where to go on, and have not committed a step since
        self.step_seconds: float | None = None
        """From the previous step to the newest one."""
        self._last_step_time: float | None = None
        self._paused_time: float | None = None

    @property
    def counters(self) -> dict[str, float]:
        """Totals of the run, with all names from the start, for logs with fixed columns."""
        since = {name: float(self.digest.counts[kind]) for name, kind in _COUNTED.items()}
        since["recovery_seconds"] = self.digest.recovery_seconds
        totals = {name: self._earlier.get(name, 0.0) + value for name, value in since.items()}
        return {**totals, "checkpoint_stall_seconds": self._stall_seconds}

    def continue_from(self, counters: Mapping[str, float]) -> None:
        """The run has had these totals under an earlier coordinator."""
        self._earlier = counters
        self.stalled(counters.get("checkpoint_stall_seconds", 0.0))

    def introduce(self, rank: int, host: str, pid: int) -> None:
        """From now on events of ``rank`` concern this process."""
        self.processes[rank] = host, pid
        self.peaks.pop(rank, None)

    def fault_injected(self, message: FaultInjected) -> None:
        """Remembers when a worker is about to fail on purpose: the time of its death."""
        self._injected_faults[message.rank] = message

    def held(self, rank: int, peak_bytes: int) -> None:
        if peak_bytes:
            stage = self._positions.stage(rank)
            self.peaks[rank] = peak_bytes
            self._most[stage] = max(self._most.get(stage, 0), peak_bytes)

    def stalled(self, seconds: float) -> None:
        """Checkpoints have held up a worker for ``seconds`` in all."""
        self._stall_seconds = max(self._stall_seconds, seconds)

    def ended(self, state: MembershipState) -> None:
        if self._most:
            peaks = tuple(map(self._most.get, range(self._positions.grid.stages)))
            self.add("memory", state, details={"peak_bytes": peaks})
            self._most = {}

    def add_loss(self, step: int, loss: float) -> None:
        """Remembers the mean loss of ``step`` until that is committed."""
        self._losses[step] = loss

    def add(
        self,
        kind: str,
        state: MembershipState,
        rank: int | None = None,
        details: Mapping[str, Any] | None = None,
        *,
        step: int | None = None,
        seconds: float | None = None,
    ) -> None:
        worker, host, pid = None, None, None
        if rank is not None:
            position = state.positions.position(rank)
            worker = (position.pipeline, position.stage)
            host, pid = self.processes.get(rank, (None, None))
        event = Event(
            kind,
            time.time(),
            state.generation.number,
            state.steps.version if step is None else step,
            worker,
            seconds,
            dict(details or {}),
            host,
            pid,
        )
        level = logging.DEBUG if kind == "step" else logging.INFO
        if _events.isEnabledFor(level):  # logged first: who sees the event finds it in the log
            fields = plain(event)
            _events.log(level, "%s", json.dumps(fields), extra={"event": fields})
        self.events.append(event)
        self.digest.add(event, len(state.roster.live), bool(state.roster.joining))
        if kind == "step":
            self._count_step()

    def _count_step(self) -> None:
        self._steps_kept += 1
        if self._steps_kept < 2 * _STEPS_KEPT:
            return
        steps = (index for index, event in enumerate(self.events) if event.kind == "step")
        gone = set(itertools.islice(steps, _STEPS_KEPT))
        self.events[:] = [event for index, event in enumerate(self.events) if index not in gone]
        self._steps_kept -= _STEPS_KEPT

    def record(self, record: Record, state: MembershipState) -> None:
        """Adds a record of the state machine, with its durations."""
        now = time.time()
        details = dict(record.details)
        seconds: float | None = None
        match record.kind:
            case "failure":
                seconds = self._fail(record, details, now)
            case "step":
                seconds = now - self._last_step_time if self._last_step_time is not None else None
                self._last_step_time, self.step_seconds = now, seconds
                if record.step in self._losses:
                    details["loss"] = self._losses.pop(record.step)
            case "resumed":
                if details.get("redone"):
                    self.add("redone", state, step=record.step, details={"ahead": details["ahead"]})
                if self._failure_time is not None:
                    seconds = now - self._failure_time
                    self._recovering = True
                elif self._last_step_time is None or self._paused_time is None:
                    self._last_step_time = now
            case "paused":
                self._paused_time = now
            case "rejoined":
                seconds = now - self._paused_time if self._paused_time is not None else None
        self._log(record, details, state)
        self.add(record.kind, state, record.rank, details, step=record.step, seconds=seconds)
        if record.kind == "step" and self._recovering and self._failure_time is not None:
            self._recovering = False
            recovered = now - self._failure_time
            self.add("recovered", state, step=record.step, seconds=recovered)
            self._failure_time = None

    def _log(self, record: Record, details: Mapping[str, Any], state: MembershipState) -> None:
        worker = "" if record.rank is None else state.positions.name(record.rank)
        if record.kind == "corruption":
            log.error("%s", corruption_line(worker, record))
        elif record.kind in _LINES:
            level, line = _LINES[record.kind]
            known = {"cause": "", "who": f"Worker {worker}: " if worker else "", "worker": worker, **details}
            known["process"] = self._process(record.rank)
            known["stays"] = _STAYS if details.get("stays_empty") else ""
            begun, roster = state.generation.number >= 0, state.roster  # the live ones before are awaited, too
            present = len(roster.live if begun else roster.joined & roster.live)
            live = f"{'Live' if begun else 'Connected'} workers: {present} of {state.positions.num_workers}"
            log.log(level, "%s", line.format(step=record.step, live=live, **known))

    def suspect(self, rank: int, cause: str, seconds: float, limit: float, reason: str, state: MembershipState) -> None:
        details = {"cause": cause, "seconds": seconds, "limit": limit, "waits": reason}
        self.add("suspected", state, rank, details)
        log.warning(
            "Worker %s is suspected at step %d: %s. It is waited for until %g s have passed, because %s.",
            state.positions.name(rank),
            state.steps.version,
            cause,
            limit,
            reason,
        )

    def clear(self, rank: int, seconds: float, state: MembershipState) -> None:
        """A worker that was waited for is well again."""
        self.add("cleared", state, rank, seconds=seconds)
        log.warning("Worker %s is well again after %.1f s.", state.positions.name(rank), seconds)

    def _process(self, rank: int | None) -> str:
        known = None if rank is None else self.processes.get(rank)
        return "" if known is None else f" (process {known[1]} on {known[0] or 'an unnamed host'})"

    def connected(self, state: MembershipState) -> None:
        """All workers of the generation are connected."""
        seconds = time.time() - self._failure_time if self._failure_time is not None else None
        self.add("regrouped", state, details={"roster": state.roster.ranks}, seconds=seconds)
        if state.generation.number == 0 and len(state.roster.live) == state.positions.num_workers:
            log.info("The run begins with all %d workers.", state.positions.num_workers)

    def _fail(self, record: Record, details: dict[str, Any], now: float) -> float:
        injected = self._injected_faults.pop(record.rank, None) if record.rank is not None else None
        died = injected.time if injected is not None else now
        details["kind"] = injected.kind if injected is not None else "unknown"
        if injected is not None:
            details["operation"] = injected.operation
        if self._failure_time is None:
            self._failure_time = died
        return now - died


# ---------------------------------------------------------------------- sums


_COUNTED = {
    "failures": "failure",
    "redone_steps": "redone",
    "rejoined_workers": "rejoined",
    "corruptions": "corruption",
    "replans": "replanned",
}
"""Kinds of events by the names of their counters."""

_EVENTS_KEPT, _FAILURES_KEPT = 200, 20
_STEPS_OF_A_RATE = 64


class Digest:
    """Sums over the events of a run on ``positions`` positions that began at ``now``.

    Attributes:
        events: the newest ones that are no steps, the oldest first; ``failures``: likewise.
        suspected: by position, since when a worker that is waited for is silent or stuck, and why.
        step: the newest committed step; -1 if there is none; ``loss``: its mean, if known.
        recovery_seconds: from failures to the next commits, in all.
        found_by: the origin of the plan, if it changed within a generation.
    """

    def __init__(self, positions: int, now: float) -> None:
        self.began = now
        self.counts: Counter[str] = Counter()
        self.events: deque[Event] = deque(maxlen=_EVENTS_KEPT)
        self.failures: deque[Event] = deque(maxlen=_FAILURES_KEPT)
        self.suspected: dict[tuple[int, int], tuple[float, str]] = {}
        self.step = -1
        self.loss: float | None = None
        self.goodput = Goodput(positions, now)
        self.recovery_seconds = 0.0
        self.found_by = ""
        self._durations: deque[float] = deque(maxlen=_STEPS_OF_A_RATE)  # of steps in a row that nothing disturbed
        self._follows = False  # the next step follows another one, and nothing happened in between

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds of the newest steps under the present plan; None if there are none."""
        return sum(self._durations) / len(self._durations) if self._durations else None

    def add(self, event: Event, live: int, joining: bool) -> None:
        """Adds an event up; ``live`` workers are in, some perhaps still ``joining``."""
        self.counts[event.kind] += 1
        details: Mapping[str, object] = event.details
        self.goodput.happened(event, live, joining)
        if event.kind == "step":
            loss = details.get("loss")
            self.step, self.loss = event.step, loss if isinstance(loss, float) else None
            if self._follows and event.seconds is not None:
                self._durations.append(event.seconds)
            self._follows = True
            return
        self.events.append(event)
        match event.kind:
            case "failure":
                self.failures.append(event)
            case "recovered":
                self.recovery_seconds += event.seconds or 0.0
            case "suspected" if "waits" in details and event.worker is not None:
                seconds = details.get("seconds")
                since = event.time - (seconds if isinstance(seconds, (int, float)) else 0.0)
                self.suspected[event.worker] = since, str(details.get("cause", ""))
            case "resumed" | "replanned":
                self.found_by = str(details.get("found_by", details.get("plan", "")))
                self._durations.clear()
        if event.kind in ("cleared", "failure", "left") and event.worker is not None:
            self.suspected.pop(event.worker, None)
        if event.kind in ("resumed", "paused", "cleared"):
            self._follows = False


# ---------------------------------------------------------------------- summary


def summary(history: Sequence[Event], positions: Positions) -> list[str]:
    """Summary lines of a run with this record; none if it made no step."""
    steps = [event for event in history if event.kind == "step"]
    if not steps:
        return []
    begin = next(event for event in history if event.kind in ("resumed", "step"))
    done, seconds = steps[-1].step + 1, steps[-1].time - begin.time
    lines = [
        f"Run: at step {done:,} after {seconds:.1f} s{_loss(steps)}, {_workers(history, positions)}{_memory(history)}."
    ]
    kinds = Counter(event.kind for event in history)
    first, *later = [set(event.details["roster"]) for event in history if event.kind == "regrouped"] or [set()]
    newcomers = min(kinds["rejoined"], len(set().union(*later) - first))  # at positions that were vacant from the start
    numbers = {
        "failure": kinds["failure"],
        "redone step": kinds["redone"],
        "replacement": kinds["rejoined"] - newcomers,
        "newcomer": newcomers,
    }
    counts = [counted(number, name) for name, number in numbers.items() if number]
    if (lost := _lost_seconds(history)) or counts:
        lines.append(f"{', '.join(counts) or 'No failures'}; {lost:.1f} s lost.")
    return lines + _backwards(history)


def _memory(history: Sequence[Event]) -> str:
    """The most that a worker has held, and of which stage it was."""
    told = [event.details["peak_bytes"] for event in history if event.kind == "memory"]
    peaks = [(peak, stage) for stages in told for stage, peak in enumerate(stages) if peak is not None]
    if not peaks:
        return ""
    most, stage = max(peaks)
    return f", the largest with {most / 1e9:.3g} GB of memory (stage {stage})"


def _loss(steps: Sequence[Event]) -> str:
    first, last = (step.details.get("loss") for step in (steps[0], steps[-1]))
    if last is None or math.isnan(last):  # a step that optimizes by itself need not return one
        return ""
    if first is None or math.isnan(first) or steps[0].step:
        return f", loss {last:.4g}"
    return f", loss {first:.4g} at first and {last:.4g} now"


def _workers(history: Sequence[Event], positions: Positions) -> str:
    rosters = [event.details["roster"] for event in history if event.kind == "regrouped"]
    alive = len(rosters[-1]) if rosters else positions.num_workers
    if alive == positions.num_workers:
        return counted(alive, "worker")
    left = " left" if any(event.kind in ("failure", "left") for event in history) else ""  # others never came
    return f"{alive} of {positions.num_workers} workers{left}"


def _backwards(history: Sequence[Event]) -> list[str]:
    """The effect of splitting backwards, if the newest plan does so by choice."""
    chosen = [event.details if event.kind == "chosen" else event.details.get("backward") for event in history]
    newest = next((facts for facts in reversed(chosen) if facts), None)
    if newest is None or not newest["split"]:
        return []
    cost, wins = 100 * newest["cost"], 100 * (newest["wins"] or 0.0)
    return [f"The backward pass is split in two, for {cost:.1f} % more computing time and {wins:.1f} % shorter steps."]


def _lost_seconds(history: Sequence[Event]) -> float:
    """Seconds of recoveries, joins, waits, and of restarts after a lost stage."""
    lost = sum(event.seconds or 0.0 for event in history if event.kind in ("recovered", "rejoined", "cleared"))
    stage_lost: Event | None = None
    for event in history:
        if event.kind == "stage_lost":
            stage_lost = event
        elif event.kind == "step" and stage_lost is not None:
            lost += event.time - stage_lost.time
            stage_lost = None
    return lost
