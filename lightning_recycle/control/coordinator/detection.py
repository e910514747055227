"""Failure detection: silent and slow workers, given up or waited for. Pure.

Suspicion is not proof. An exit or a broken connection is a fact; silence and slowness are not: a library may hold the
interpreter, a model may recompile, a sequence may be long. Giving up a worker helps only if another can do its work:

- A worker is given up only while a peer of its stage is *well*: heard and at work within half of its limit. Only that
  time counts. So the last holder of a stage is never given up on suspicion, nor are replicas or a machine that stall at
  once.
- Work may be slow by itself. A later worker at the same place (micro-batch of the step; for silence the step of the
  stage) may take ten times as long. So may a silent worker whose process is seen to compute.
- After its *bound* a worker is given up anyway.

Only workers that do *not* wait are suspected (:func:`sign_of_work`): nearly all wait nearly always, and the culprit is
the one inside an operation for longer than its usual time, as measured in this run, times a factor; at least the
heartbeat's timeout. Work without a usual time (first steps, reading data, hooks, validation, checkpoints) has
``patience``. If all wait for each other a message was lost (:func:`everybody_waits`): the same workers connect again.

Contract: :func:`review` is called repeatedly with what is known and the memory that it returned before.

Must not know: messages, sockets, clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from lightning_recycle.control.options import PATIENCE
from lightning_recycle.planning.grid import OpKind, Positions, Worker

_RISE = 10.0  # factor on a limit for each excuse: a worker that was held up at the same place before, a busy process

StepPoint: TypeAlias = tuple[int, str]
"""Position of a worker in its work: the step, and the micro-batch or else the kind of operation."""

_Intervals: TypeAlias = tuple[tuple[float, float], ...]  # (begin, end), in order, apart from each other


@dataclass(frozen=True, slots=True)
class Sign:
    """Something that speaks against a worker once it lasts for too long.

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
class Standing:
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
class _HeldUp:
    """A suspicion: its time, the step, and the place if that is known."""

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
    held_up: tuple[_HeldUp, ...] = ()
    waited: Mapping[int, float] = field(default_factory=dict)


def review(
    memory: DetectionState,
    now: float,
    standings: Mapping[int, Standing],
    holders: Collection[int],
    positions: Positions,
    step: int,
) -> tuple[DetectionState, Ruling]:
    """Rules over all workers at once.

    ``memory``: of the previous call. ``now``: seconds of a monotonic clock. ``standings``: by rank, also of joining
    processes. ``holders``: the ranks that hold the state of their stage. ``positions``: a worker is vouched for by
    another position of its stage all of whose members are well. ``step``: the number of committed steps.
    """
    stages = {rank: positions.stage(rank) for rank in standings}
    well: dict[int, set[Worker]] = {}
    for position in positions.whole({rank for rank in holders if rank in standings and standings[rank].is_well}):
        well.setdefault(position.stage, set()).add(position)
    vouched = {rank for rank, stage in stages.items() if well.get(stage, set()) - {positions.position(rank)}}
    memory = _follow(memory, now, standings, vouched, step)
    evict: dict[int, Overdue] = {}
    waits: dict[int, Overdue] = {}
    for rank, standing in sorted(standings.items()):
        for sign in standing.signs:
            if sign.seconds <= sign.limit:
                continue
            before = _held_up_alike(memory.held_up, now, rank, stages[rank], sign, step)
            others = [positions.name(other) for other in sorted(before)]
            reason = _why_waited(others, sign.computes, rank in vouched, stages[rank])
            counted = _counted(sign.seconds, _excuses(memory, rank, sign is standing.silence), now)
            found = _judge(sign, counted, rank in vouched, len(before) + sign.computes, reason)
            if found is not None and not found.reason:
                evict[rank] = found
                break
            if found is not None:
                waits.setdefault(rank, found)
    return _conclude(memory, now, standings, stages, step, evict, waits)


def _judge(sign: Sign, counted: float, vouched: bool, excuses: int, reason: str) -> Overdue | None:
    """Ruling over a sign over its limit; None if that is about to be decided.

    ``counted``: its seconds that count against the worker. ``vouched``: whether a peer is well. ``excuses``: how many
    others were held up at the same place before, and one more if its process computes. ``reason``: for waiting, if any.
    """
    bound = max(sign.limit, sign.bound)
    limit = min(bound, sign.limit * _RISE**excuses) if vouched else bound
    if sign.seconds > bound or (vouched and counted > limit):
        note = f"; it was given {limit:g} s because {reason}" if limit > sign.limit else ""
        return Overdue(sign.cause + note, sign.seconds, limit)
    return None if sign.seconds > limit else Overdue(sign.cause, sign.seconds, limit, reason)


def _follow(
    memory: DetectionState, now: float, standings: Mapping[int, Standing], vouched: Collection[int], step: int
) -> DetectionState:
    """The memory with the time since the newest review, classified for each worker."""
    since = now if memory.time is None else memory.time
    alone: dict[int, _Intervals] = {}
    unheard: dict[int, _Intervals] = {}
    for rank, standing in standings.items():
        is_alone, is_heard = rank not in vouched, standing.is_heard
        if not is_alone and is_heard and rank not in memory.alone and rank not in memory.unheard:
            continue  # nearly always
        oldest = now - max(sign.seconds for sign in standing.signs)
        times = _after(oldest, memory.alone.get(rank, ()))
        if is_alone and now > since:
            times = _merged([*times, (since, now)])
        if times:
            alone[rank] = times
        times = _after(oldest, memory.unheard.get(rank, ()))
        if not is_heard:
            times = _merged([*times, (now - standing.silence.seconds, now)])
        if times:
            unheard[rank] = times
    held_up = tuple(held for held in memory.held_up if held.step >= step - 1)  # stages differ by one step at most
    return DetectionState(now, alone, unheard, held_up, memory.waited)


def _conclude(
    memory: DetectionState,
    now: float,
    standings: Mapping[int, Standing],
    stages: Mapping[int, int],
    step: int,
    evict: Mapping[int, Overdue],
    waits: Mapping[int, Overdue],
) -> tuple[DetectionState, Ruling]:
    """Remembers the ruling; workers that are waited for are named once."""
    begun = {rank: found for rank, found in waits.items() if rank not in memory.waited}
    left = {rank: seconds for rank, seconds in memory.waited.items() if rank in standings and rank not in evict}
    cleared = {rank: seconds for rank, seconds in left.items() if standings[rank].is_well}
    waited = {rank: standings[rank].exceeded or left[rank] for rank in left.keys() - cleared.keys()}
    waited.update({rank: found.seconds for rank, found in begun.items()})
    new = (_HeldUp(rank, stages[rank], step, now, standings[rank].place) for rank in (*evict, *begun))
    held_up = (*memory.held_up, *new)
    return DetectionState(now, memory.alone, memory.unheard, held_up, waited), Ruling(evict, begun, cleared)


def _held_up_alike(
    held_up: Iterable[_HeldUp], now: float, rank: int, stage: int, sign: Sign, step: int
) -> frozenset[int]:
    """Workers whose delay explains ``sign``: it began later, at the same place."""
    began = now - sign.seconds
    if sign.place is None:  # what the worker is at is not known
        alike = (held for held in held_up if (held.stage, held.step) == (stage, step))
    else:
        alike = (held for held in held_up if held.place == sign.place)
    return frozenset(held.rank for held in alike if held.rank != rank and held.time <= began)


def _why_waited(before: Sequence[str], computes: bool, vouched: bool, stage: int) -> str:
    if not vouched:
        return f"no other worker that holds stage {stage} is well"
    if computes:
        return "its process computes"
    workers, were = ("workers", "were") if len(before) > 1 else ("worker", "was")
    return f"{workers} {' and '.join(before)} {were} held up there before"


def _excuses(memory: DetectionState, rank: int, is_silence: bool) -> _Intervals:
    """Intervals that do not count against ``rank``: without a well peer, or silent."""
    alone = memory.alone.get(rank, ())
    return alone if is_silence else _merged([*alone, *memory.unheard.get(rank, ())])


def _counted(seconds: float, excuses: _Intervals, now: float) -> float:
    """Remainder of the newest ``seconds`` without ``excuses``."""
    begin = now - seconds
    return seconds - sum(end - max(begin, start) for start, end in excuses if end > begin)


def _after(oldest: float, intervals: _Intervals) -> _Intervals:
    return tuple(interval for interval in intervals if interval[1] > oldest)


def _merged(intervals: Iterable[tuple[float, float]]) -> _Intervals:
    found: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return tuple(found)


_FACTOR = 10.0  # times the usual duration of an operation
_RECOVERY_SECONDS = 5.0  # at least, for a worker's own work during a recovery


@dataclass(frozen=True, slots=True)
class Observation:
    """Observed activity of a worker's main thread.

    ``operation``: for people. ``kind``: of an operation of the schedule or "RECOVER", if it has a usual duration.
    ``waiting``: for another process. ``seconds``: of this activity. ``coordinated``: whether it waits for the
    coordinator. ``place``: the same for all workers at the same work; None if unknown.
    """

    operation: str
    kind: str
    waiting: bool
    seconds: float
    coordinated: bool = False
    place: StepPoint | None = None


def sign_of_work(seen: Observation, usual: float | None, timeout: float, patience: float = PATIENCE) -> Sign | None:
    """Sign of a worker that has been at the same work; None if it waits for others.

    ``usual``: seconds of that kind of operation there; None if unknown. ``timeout``: seconds that every operation may
    take, ``patience``: those without a usual duration.
    """
    if seen.waiting:
        return None
    limit = _limit(seen.kind, usual, timeout, patience)
    cause = (
        f"it has been in {seen.operation!r} for {seen.seconds:.1f} s without waiting for anybody, more than the"
        f" {limit:.1f} s that it may take"
    )
    return Sign(cause, seen.seconds, limit, patience, seen.place)


def everybody_waits(
    observations: Mapping[int, Observation], usual: Callable[[int, str], float | None], timeout: float
) -> bool:
    """Whether all workers wait for each other for longer than any operation can take.

    ``usual``: (rank, kind) -> usual seconds, None if unknown. ``timeout``: seconds that every operation may take.
    """
    if not observations:
        return False
    times = [usual(rank, kind) or 0.0 for rank in observations for kind in map(str, OpKind)]
    limit = max(2 * timeout, _FACTOR * max(times))
    waiting = all(seen.waiting and seen.seconds > limit for seen in observations.values())
    return waiting and not all(seen.coordinated for seen in observations.values())


def _limit(kind: str, usual: float | None, timeout: float, patience: float) -> float:
    if kind == "RECOVER":
        return max(timeout, _RECOVERY_SECONDS)
    return patience if usual is None else max(timeout, _FACTOR * usual)
