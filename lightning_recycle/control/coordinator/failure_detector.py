"""Failure detector: silent and slow workers, given up or waited for.

Suspicion is not proof. An exit or a broken connection is a fact; silence and slowness are not: a library may hold the
interpreter, a model may recompile, a sequence may be long. Giving up a worker helps only if another can do its work:

- A worker is given up at its limit only while a peer of its stage is *well*: heard and at work within half of its
  limit. Only that time counts. The last holder of a stage, and replicas or a machine that stall at once, have until
  their *bound* (of silence: ``last_holder_timeout``).
- Work may be slow by itself. A later worker at the same place (micro-batch of the step; for silence the step of the
  stage) may take ten times as long. So may a silent worker whose process is seen to compute.
- After its bound a worker is given up anyway.

Of workers at work only those that do *not* wait are suspected (:func:`sign_of_work`): nearly all wait nearly always,
and the culprit is the one inside an operation for longer than its usual time, as measured in this run, times a factor;
at least the heartbeat's timeout. Silence, messages not taken, and a wait despite a regroup count against any worker.
Work without a usual time (first steps, reading data, hooks, validation, checkpoints) has ``patience``. If all wait for
each other a message was lost (:func:`all_wait`): the same workers connect again.

Contract: :func:`review` is pure: it is called repeatedly with what is known and the memory that it returned before.
:class:`FailureDetector` keeps the times of heartbeats, progress and startup for it.

Must not know: sockets, clocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from lightning_recycle.control.options import PATIENCE, CoordinatorOptions
from lightning_recycle.control.protocol.messages import RECOVER, Heartbeat
from lightning_recycle.control.protocol.state import MembershipState
from lightning_recycle.planning.grid import OpKind, Positions, Worker

_EXCUSE_FACTOR = 10.0  # on a limit for each excuse: a worker that was held up at the same place before, a busy process

StepPoint: TypeAlias = tuple[int, str]
"""Position of a worker in its work: the step, and the micro-batch or else the kind of operation."""

_Intervals: TypeAlias = tuple[tuple[float, float], ...]  # (begin, end), in order, apart from each other


@dataclass(frozen=True, slots=True)
class Sign:
    """Evidence against a worker, such as silence, with the time that it may last.

    ``cause``: continues "worker (0, 1) was lost: ". ``seconds``: its duration. ``limit``: seconds allowed where a peer
    is well; ``bound``: seconds allowed anyway, if more. ``place``: None if unknown. ``computes``: whether the process
    is seen to compute meanwhile.
    """

    cause: str
    seconds: float
    limit: float
    bound: float
    place: StepPoint | None = None
    computes: bool = False


@dataclass(frozen=True, slots=True)
class WorkerSigns:
    """Signs against a worker: silence, and others by its last report."""

    silence: Sign
    others: tuple[Sign, ...] = ()

    @property
    def signs(self) -> tuple[Sign, ...]:
        return (self.silence, *self.others)

    @property
    def is_heard(self) -> bool:
        """Whether it was heard recently, so that its last report still holds."""
        return self.silence.seconds <= self.silence.limit / 2

    @property
    def is_well(self) -> bool:
        """Whether nothing speaks against it: it can do the work of others."""
        return all(sign.seconds <= sign.limit / 2 for sign in self.signs)

    @property
    def place(self) -> StepPoint | None:
        return next((sign.place for sign in self.others if sign.place is not None), None)

    @property
    def exceeded(self) -> float:
        """Seconds of the longest sign that has exceeded its limit; 0 if none has."""
        return max((sign.seconds for sign in self.signs if sign.seconds > sign.limit), default=0.0)


@dataclass(frozen=True, slots=True)
class Overdue:
    """A worker over its limit, to be ended or waited for: cause, times and reason."""

    cause: str
    seconds: float
    limit: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Ruling:
    """Ruling over all workers, by rank.

    ``waits``: newly waited for. ``cleared``: well again, with the seconds that the wait lasted.
    """

    evict: Mapping[int, Overdue] = field(default_factory=dict)
    waits: Mapping[int, Overdue] = field(default_factory=dict)
    cleared: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Delay:
    """Delay of a suspected worker, which may excuse later ones at the same place."""

    rank: int
    stage: int
    step: int
    time: float
    place: StepPoint | None


@dataclass(frozen=True, slots=True)
class DetectionState:
    """Memory of :func:`review`, in seconds of one monotonic clock.

    ``time``: of the newest review; None before the first. By rank: ``alone``: when no peer was well; ``unheard``: when
    its work was unknown; ``waited``: seconds that it has been waited for. ``held_up``: suspected workers of recent
    steps.
    """

    time: float | None = None
    alone: Mapping[int, _Intervals] = field(default_factory=dict)
    unheard: Mapping[int, _Intervals] = field(default_factory=dict)
    held_up: tuple[_Delay, ...] = ()
    waited: Mapping[int, float] = field(default_factory=dict)


def review(
    memory: DetectionState,
    now: float,
    signs: Mapping[int, WorkerSigns],
    holders: Collection[int],
    positions: Positions,
    step: int,
) -> tuple[DetectionState, Ruling]:
    """Rules over all workers at once.

    ``memory``: of the previous call. ``now``: seconds of a monotonic clock. ``signs``: by rank, also of joining
    processes. ``holders``: the ranks that hold the state of their stage. ``positions``: a worker is vouched for by
    another position of its stage all of whose members are well. ``step``: the number of committed steps.
    """
    stages = {rank: positions.stage(rank) for rank in signs}
    well: dict[int, set[Worker]] = {}
    for position in positions.whole({rank for rank in holders if rank in signs and signs[rank].is_well}):
        well.setdefault(position.stage, set()).add(position)
    vouched = {rank for rank, stage in stages.items() if well.get(stage, set()) - {positions.position(rank)}}
    memory = _record_elapsed(memory, now, signs, vouched, step)
    evict: dict[int, Overdue] = {}
    waits: dict[int, Overdue] = {}
    for rank, worker_signs in sorted(signs.items()):
        for sign in worker_signs.signs:
            if sign.seconds <= sign.limit:
                continue
            held_up = _held_up_alike(memory.held_up, now, rank, stages[rank], sign, step)
            others = [positions.name(other) for other in sorted(held_up)]
            reason = _reason_to_wait(others, sign.computes, rank in vouched, stages[rank])
            counted = _counted_seconds(sign.seconds, _excused_times(memory, rank, sign is worker_signs.silence), now)
            overdue = _judge(sign, counted, rank in vouched, len(held_up) + sign.computes, reason)
            if overdue is not None and not overdue.reason:
                evict[rank] = overdue
                break
            if overdue is not None:
                waits.setdefault(rank, overdue)
    return _remember_ruling(memory, now, signs, stages, step, evict, waits)


def _judge(sign: Sign, counted: float, vouched: bool, excuses: int, reason: str) -> Overdue | None:
    """Ruling over a sign over its limit; None if the next review may decide it.

    ``counted``: its seconds that count against the worker. ``vouched``: whether a peer is well. ``excuses``: how many
    others were held up at the same place before, and one more if its process computes. ``reason``: for waiting, if any.
    """
    bound = max(sign.limit, sign.bound)
    limit = min(bound, sign.limit * _EXCUSE_FACTOR**excuses) if vouched else bound
    if sign.seconds > bound or (vouched and counted > limit):
        note = f"; it was given {limit:g} s because {reason}" if limit > sign.limit else ""
        return Overdue(sign.cause + note, sign.seconds, limit)
    return None if sign.seconds > limit else Overdue(sign.cause, sign.seconds, limit, reason)


def _record_elapsed(
    memory: DetectionState, now: float, signs: Mapping[int, WorkerSigns], vouched: Collection[int], step: int
) -> DetectionState:
    """The memory with the time since the newest review, classified for each worker."""
    since = now if memory.time is None else memory.time
    alone: dict[int, _Intervals] = {}
    unheard: dict[int, _Intervals] = {}
    for rank, worker_signs in signs.items():
        is_alone, is_heard = rank not in vouched, worker_signs.is_heard
        if not is_alone and is_heard and rank not in memory.alone and rank not in memory.unheard:
            continue  # nearly always
        oldest = now - max(sign.seconds for sign in worker_signs.signs)
        times = _ending_after(oldest, memory.alone.get(rank, ()))
        if is_alone and now > since:
            times = _merge([*times, (since, now)])
        if times:
            alone[rank] = times
        times = _ending_after(oldest, memory.unheard.get(rank, ()))
        if not is_heard:
            times = _merge([*times, (now - worker_signs.silence.seconds, now)])
        if times:
            unheard[rank] = times
    held_up = tuple(delay for delay in memory.held_up if delay.step >= step - 1)  # stages differ by one step at most
    return DetectionState(now, alone, unheard, held_up, memory.waited)


def _remember_ruling(
    memory: DetectionState,
    now: float,
    signs: Mapping[int, WorkerSigns],
    stages: Mapping[int, int],
    step: int,
    evict: Mapping[int, Overdue],
    waits: Mapping[int, Overdue],
) -> tuple[DetectionState, Ruling]:
    """Adds a ruling to the memory; a worker that is waited for is named only once."""
    newly_waited = {rank: overdue for rank, overdue in waits.items() if rank not in memory.waited}
    still_waited = {rank: seconds for rank, seconds in memory.waited.items() if rank in signs and rank not in evict}
    cleared = {rank: seconds for rank, seconds in still_waited.items() if signs[rank].is_well}
    waited = {rank: signs[rank].exceeded or still_waited[rank] for rank in still_waited.keys() - cleared.keys()}
    waited.update({rank: overdue.seconds for rank, overdue in newly_waited.items()})
    delays = (_Delay(rank, stages[rank], step, now, signs[rank].place) for rank in (*evict, *newly_waited))
    held_up = (*memory.held_up, *delays)
    return DetectionState(now, memory.alone, memory.unheard, held_up, waited), Ruling(evict, newly_waited, cleared)


def _held_up_alike(
    held_up: Iterable[_Delay], now: float, rank: int, stage: int, sign: Sign, step: int
) -> frozenset[int]:
    """Workers whose delay explains ``sign``: it began later, at the same place."""
    began = now - sign.seconds
    if sign.place is None:  # what the worker is at is not known
        same_place = (delay for delay in held_up if (delay.stage, delay.step) == (stage, step))
    else:
        same_place = (delay for delay in held_up if delay.place == sign.place)
    return frozenset(delay.rank for delay in same_place if delay.rank != rank and delay.time <= began)


def _reason_to_wait(before: Sequence[str], computes: bool, vouched: bool, stage: int) -> str:
    if not vouched:
        return f"no other worker that holds stage {stage} is well"
    if computes:
        return "its process computes"
    workers, were = ("workers", "were") if len(before) > 1 else ("worker", "was")
    return f"{workers} {' and '.join(before)} {were} held up there before"


def _excused_times(memory: DetectionState, rank: int, is_silence: bool) -> _Intervals:
    """Intervals that do not count against ``rank``: without a well peer, or silent."""
    alone = memory.alone.get(rank, ())
    return alone if is_silence else _merge([*alone, *memory.unheard.get(rank, ())])


def _counted_seconds(seconds: float, excuses: _Intervals, now: float) -> float:
    """Remainder of the newest ``seconds`` without ``excuses``."""
    begin = now - seconds
    return seconds - sum(end - max(begin, start) for start, end in excuses if end > begin)


def _ending_after(oldest: float, intervals: _Intervals) -> _Intervals:
    return tuple(interval for interval in intervals if interval[1] > oldest)


def _merge(intervals: Iterable[tuple[float, float]]) -> _Intervals:
    found: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return tuple(found)


_DURATION_FACTOR = 10.0  # times the usual duration of an operation
_RECOVERY_SECONDS = 5.0  # at least, for a worker's own work during a recovery


@dataclass(frozen=True, slots=True)
class Observation:
    """Observed activity of a worker's main thread.

    ``operation``: for people. ``kind``: of an operation of the schedule or RECOVER, if it has a usual duration.
    ``waiting``: for another process. ``seconds``: of this activity. ``coordinated``: whether it waits for the
    coordinator. ``place``: the same for all workers at the same work; None if unknown.
    """

    operation: str
    kind: str
    waiting: bool
    seconds: float
    coordinated: bool = False
    place: StepPoint | None = None


def sign_of_work(worker: Observation, usual: float | None, timeout: float, patience: float = PATIENCE) -> Sign | None:
    """Sign of a worker that has been at the same work; None if it waits for others.

    ``usual``: seconds of that kind of operation there; None if unknown. ``timeout``: seconds that every operation may
    take, ``patience``: those without a usual duration.
    """
    if worker.waiting:
        return None
    limit = _work_limit(worker.kind, usual, timeout, patience)
    cause = (
        f"it has been in {worker.operation!r} for {worker.seconds:.1f} s without waiting for anybody, more than the"
        f" {limit:.1f} s that it may take"
    )
    return Sign(cause, worker.seconds, limit, patience, worker.place)


def all_wait(
    observations: Mapping[int, Observation], usual: Callable[[int, str], float | None], timeout: float
) -> bool:
    """Whether all workers wait for each other for longer than any operation can take.

    ``usual``: (rank, kind) -> usual seconds, None if unknown. ``timeout``: seconds that every operation may take.
    """
    if not observations:
        return False
    times = [usual(rank, kind) or 0.0 for rank in observations for kind in map(str, OpKind)]
    limit = max(2 * timeout, _DURATION_FACTOR * max(times))
    waiting = all(seen.waiting and seen.seconds > limit for seen in observations.values())
    return waiting and not all(seen.coordinated for seen in observations.values())


def _work_limit(kind: str, usual: float | None, timeout: float, patience: float) -> float:
    if kind == RECOVER:
        return max(timeout, _RECOVERY_SECONDS)
    return patience if usual is None else max(timeout, _DURATION_FACTOR * usual)


_MIN_START_TIMEOUT = 10.0  # seconds of silence
_NOTICE_SECONDS = 20.0  # of a start, between lines about it
_MAX_NAMES = 8  # of workers in such a line
_MIN_DEAF_SECONDS = 5.0
_MIN_STALL_SECONDS = 1.0
_BUSY_SHARE = 0.8  # of the newest looks at a silent process that computes; the rest is for its first heartbeat to come


class FailureDetector:
    """Clocks of workers' heartbeats, progress and startup, in monotonic seconds."""

    def __init__(
        self, positions: Positions, options: CoordinatorOptions, thread_states: Callable[[int], str] = lambda _: ""
    ) -> None:
        self._positions = positions
        self._options = options
        self._thread_states = thread_states
        self._samples: dict[int, list[tuple[float, bool]]] = {}  # of silent workers' threads: whether they computed
        self._last_heard: dict[int, float] = {}
        self._heartbeats: dict[int, tuple[Heartbeat, float]] = {}
        self._last_activity: dict[int, float] = {}
        self._have_applied: set[int] = set()  # ever; a process's first step may take long, however long others took
        self._have_reported: set[int] = set()  # ever; setting up, before the first report, may take long
        self._deadline: float | None = None
        self._regroup_began = 0.0
        self._start_began = 0.0
        self._next_notice = math.inf  # until the run starts, and when all have reported
        self._candidates: dict[int, float] = {}
        self._memory = DetectionState()

    # ------------------------------------------------------------------ what is heard

    def record_message(self, rank: int, now: float) -> None:
        self._last_heard[rank] = now

    def record_heartbeat(self, rank: int, heartbeat: Heartbeat, now: float) -> None:
        self._last_heard[rank] = now
        self._heartbeats[rank] = (heartbeat, now)

    def record_activity(self, rank: int, now: float) -> None:
        """The main thread sent a message: the activity of earlier heartbeats is over."""
        self._last_activity[rank] = now

    def record_applied(self, rank: int) -> None:
        self._have_applied.add(rank)

    def record_report(self, rank: int) -> None:
        self._have_reported.add(rank)

    def expect_candidate(self, rank: int, now: float) -> None:
        """A replacement for ``rank`` sets up from now on."""
        self._candidates.setdefault(rank, now + self._options.recovery.start_timeout)

    def record_ready(self, rank: int) -> None:
        self._candidates.pop(rank, None)
        self._have_reported.add(rank)

    def forget(self, rank: int) -> None:
        """The process at ``rank`` is gone; another one may come."""
        self._candidates.pop(rank, None)
        self._samples.pop(rank, None)
        self._last_heard.pop(rank, None)
        self._heartbeats.pop(rank, None)
        self._last_activity.pop(rank, None)
        self._have_applied.discard(rank)
        self._have_reported.discard(rank)

    @property
    def activities(self) -> dict[int, tuple[str, str]]:
        """Activity of main threads at their newest heartbeats, for people."""
        return {rank: (b.activity.operation, b.activity.waiting_for) for rank, (b, _) in self._heartbeats.items()}

    def restart_timers(self, now: float) -> None:
        """Restarts the clocks of silence: this process could not hear until now."""
        self._last_heard = dict.fromkeys(self._last_heard, now)
        self._heartbeats = {rank: (heartbeat, now) for rank, (heartbeat, _) in self._heartbeats.items()}

    # ------------------------------------------------------------------ what is bounded in time

    def begin_start(self, now: float) -> None:
        """The first worker is expected, or has come."""
        if self._deadline is None:
            self._deadline = now + self._options.recovery.start_timeout
            self._start_began, self._next_notice = now, now + _NOTICE_SECONDS

    def begin_regroup(self, now: float) -> None:
        self._deadline = now + self._options.report_timeout
        self._regroup_began = now

    def end_regroup(self) -> None:
        self._deadline = None

    # ------------------------------------------------------------------ judgements: reasons, by rank

    def review(
        self,
        now: float,
        state: MembershipState,
        stalled: Mapping[int, float],
        seconds: Mapping[int, Mapping[str, float]],
    ) -> Ruling:
        """Rules over workers that are silent or make no progress.

        ``stalled``: for each connected rank, also a joining one, seconds for which it has taken no message.
        ``seconds``: the usual times of operations, by stage and kind.
        """
        begun = state.generation.number >= 0 and state.roster.live <= self._heartbeats.keys()
        signs = {}
        for rank, stalled_seconds in stalled.items():
            silence = self._sign_of_silence(now, rank)
            computes = self._is_computing(now, rank, max(silence.seconds, stalled_seconds) > silence.limit / 2)
            silence = replace(silence, computes=computes)
            other_signs = []
            is_member = begun and rank in state.roster.live
            if is_member and WorkerSigns(silence).is_heard:  # of a silent worker nothing else is known
                other_signs.append(self._sign_of_work(now, rank, state, seconds))
            if stalled_seconds > 0:
                other_signs.append(replace(self._sign_of_stall(stalled_seconds), computes=computes))
            signs[rank] = WorkerSigns(silence, tuple(sign for sign in other_signs if sign is not None))
        holders = state.roster.live - state.roster.joining
        self._memory, ruling = review(self._memory, now, signs, holders, state.positions, state.steps.version)
        return ruling

    def all_wait(self, now: float, state: MembershipState, seconds: Mapping[int, Mapping[str, float]]) -> bool:
        """Whether a message of the generation was lost: all wait for each other too long."""
        generation, live = state.generation, state.roster.live
        if generation.number < 0 or generation.regrouping or not live <= self._heartbeats.keys():
            return False
        for rank in live:
            heartbeat, _ = self._heartbeats[rank]
            # What was waited for in an earlier generation says nothing about this one, nor does what a silent one said.
            is_heard = WorkerSigns(self._sign_of_silence(now, rank)).is_heard
            if not heartbeat.activity.waiting_for or heartbeat.generation != generation.number or not is_heard:
                return False
        observations = {rank: self._observe(now, rank, state) for rank in live}
        return all_wait(
            observations, lambda rank, kind: self._usual_seconds(rank, kind, seconds), self._options.heartbeat.timeout
        )

    def start_notice(
        self, now: float, state: MembershipState, connected: Collection[int], are_launched: bool
    ) -> str | None:
        """Every 20 s until all have set up: the workers that the run waits for.

        ``are_launched``: whether their processes were started here.
        """
        if now < self._next_notice:
            return None
        absent = state.roster.live.difference(connected)
        missing = sorted(absent or state.roster.live - self._have_reported)
        self._next_notice = now + _NOTICE_SECONDS if missing else math.inf
        if not missing:
            return None
        names = ", ".join(map(state.positions.name, missing[:_MAX_NAMES]))
        others = f" and {len(missing) - _MAX_NAMES} more" if len(missing) > _MAX_NAMES else ""
        workers = "worker" if len(missing) == 1 else "workers"
        activity = "setting up" if not absent else "importing" if are_launched else "not connected"
        return f"Waiting for {workers} {names}{others}: {activity}, {now - self._start_began:.0f} s."

    def late_candidates(self, now: float) -> dict[int, str]:
        """The replacements that are not ready in time."""
        cause = f"it was not ready within {self._options.recovery.start_timeout:g} s"
        return {rank: cause for rank, deadline in self._candidates.items() if now > deadline}

    def late_members(self, now: float, state: MembershipState) -> dict[int, str]:
        """The workers that have not joined, or not stopped for a regroup, in time."""
        if self._deadline is None or now <= self._deadline:
            return {}
        self._deadline = None
        if state.generation.number < 0:
            cause = f"it did not start within {self._options.recovery.start_timeout:g} s"
            return dict.fromkeys(sorted(state.roster.live - state.roster.joined), cause)
        if not state.generation.regrouping:
            return {}
        cause = f"it did not stop for a regroup within {self._options.report_timeout:g} s"
        return dict.fromkeys(sorted(self._have_reported & state.roster.live - state.generation.reports.keys()), cause)

    def _sign_of_silence(self, now: float, rank: int) -> Sign:
        timeout = self._options.heartbeat.timeout
        if rank not in self._have_reported:  # imports and unpickling can keep all of its threads from running
            timeout = max(timeout, _MIN_START_TIMEOUT)
        seconds = now - self._last_heard.get(rank, now)
        return Sign(
            f"it was silent for more than {timeout:g} s", seconds, timeout, self._options.heartbeat.last_holder_timeout
        )

    def _is_computing(self, now: float, rank: int, is_quiet: bool) -> bool:
        """Whether a quiet worker's process computes or waits for a disk.

        A stopped one does not, nor one whose threads wait for each other.
        """
        if not is_quiet:
            self._samples.pop(rank, None)
            return False
        samples = self._samples.setdefault(rank, [])
        states = self._thread_states(rank)
        samples.append((now, "R" in states or "D" in states))
        samples[:] = [(at, busy) for at, busy in samples if now - at <= self._options.heartbeat.timeout]
        return "T" not in states and sum(busy for _, busy in samples) >= _BUSY_SHARE * len(samples)

    def _sign_of_stall(self, seconds: float) -> Sign:
        timeout = max(_MIN_STALL_SECONDS, self._options.heartbeat.timeout)
        cause = f"it took no message for more than {timeout:g} s"
        return Sign(cause, seconds, timeout, self._options.heartbeat.last_holder_timeout)

    def _observe(self, now: float, rank: int, state: MembershipState) -> Observation:
        heartbeat, received = self._heartbeats[rank]
        activity = heartbeat.activity
        # What it did in an earlier generation says nothing about this one: only time since it last acted counts.
        return Observation(
            activity.operation,
            activity.kind,
            (state.generation.regrouping and rank in state.generation.reports) or bool(activity.waiting_for),
            min(heartbeat.seconds + now - received, now - self._last_activity.get(rank, -math.inf)),
            activity.coordinated,
            (activity.step, activity.kind if activity.microbatch < 0 else f"micro-batch {activity.microbatch}"),
        )

    def _sign_of_work(
        self, now: float, rank: int, state: MembershipState, seconds: Mapping[int, Mapping[str, float]]
    ) -> Sign | None:
        """Sign against a member too long at one work, or deaf to a regroup; None if none."""
        seen = self._observe(now, rank, state)
        if state.generation.regrouping and rank in self._have_reported and rank not in state.generation.reports:
            deaf = self._sign_of_deafness(rank)
            siblings = state.positions.siblings(rank) - state.generation.reports.keys()
            # A generation ends no hook that they run together, if one of them still works there.
            if deaf is not None and all(self._heartbeats[sibling][0].activity.waiting_for for sibling in siblings):
                return deaf
        usual = self._usual_seconds(rank, seen.kind, seconds) if seen.kind else None
        return sign_of_work(seen, usual, self._options.heartbeat.timeout, self._options.patience)

    def _sign_of_deafness(self, rank: int) -> Sign | None:
        """Whether a member waits on despite an announced generation, which ends any wait."""
        heartbeat, received = self._heartbeats[rank]
        passed = received - self._regroup_began
        if not heartbeat.activity.waiting_for or heartbeat.seconds <= passed:
            return None
        limit = max(self._options.heartbeat.timeout, _MIN_DEAF_SECONDS)
        cause = (
            f"it has been waiting for {heartbeat.activity.waiting_for} since before the others regrouped,"
            f" more than {limit:g} s ago"
        )
        return Sign(cause, passed, limit, self._options.patience)

    def _usual_seconds(self, rank: int, kind: str, seconds: Mapping[int, Mapping[str, float]]) -> float | None:
        """Usual seconds of an operation; twice the longest if it is new to the plan."""
        usual_seconds = seconds.get(self._positions.stage(rank), {})
        if rank not in self._have_applied or not usual_seconds:
            return None
        return usual_seconds.get(kind, 2 * max(usual_seconds.values()))
