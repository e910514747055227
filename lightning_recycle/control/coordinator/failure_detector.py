"""Failure detector: the coordinator's clocks for heartbeats, progress, startup."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from lightning_recycle.control.coordinator.detection import (
    DetectionState,
    Observation,
    Ruling,
    Sign,
    Standing,
    everybody_waits,
    review,
    sign_of_work,
)
from lightning_recycle.control.options import CoordinatorOptions
from lightning_recycle.control.protocol.messages import Heartbeat
from lightning_recycle.control.protocol.state import MembershipState
from lightning_recycle.planning.grid import Positions

_LEAST_START_TIMEOUT = 10.0  # seconds of silence
_LEAST_DEAF_SECONDS = 5.0
_LEAST_STALL_SECONDS = 1.0
_BUSY_SHARE = 0.8  # of the newest looks at a silent process that computes; the rest is for its first heartbeat to come


class FailureDetector:
    """Clocks for heartbeats and progress of workers, in monotonic seconds."""

    def __init__(
        self, positions: Positions, options: CoordinatorOptions, thread_states: Callable[[int], str] = lambda _: ""
    ) -> None:
        self._positions = positions
        self._options = options
        self._thread_states = thread_states
        self._looks: dict[int, list[tuple[float, bool]]] = {}  # at processes of silent workers: whether they computed
        self._heard: dict[int, float] = {}
        self._beats: dict[int, tuple[Heartbeat, float]] = {}
        self._acted: dict[int, float] = {}
        self._have_applied: set[int] = set()  # ever; a process's first step may take long, however long others took
        self._have_reported: set[int] = set()  # ever; setting up, before the first report, may take long
        self._deadline: float | None = None
        self._regroup_began = 0.0
        self._candidates: dict[int, float] = {}
        self._memory = DetectionState()

    # ------------------------------------------------------------------ what is heard

    def heard(self, rank: int, now: float) -> None:
        self._heard[rank] = now

    def beat(self, rank: int, heartbeat: Heartbeat, now: float) -> None:
        self._heard[rank] = now
        self._beats[rank] = (heartbeat, now)

    def acted(self, rank: int, now: float) -> None:
        """The main thread sent a message: the activity of earlier heartbeats is over."""
        self._acted[rank] = now

    def applied(self, rank: int) -> None:
        self._have_applied.add(rank)

    def reported(self, rank: int) -> None:
        self._have_reported.add(rank)

    def expect(self, rank: int, now: float) -> None:
        """A replacement for ``rank`` sets up from now on."""
        self._candidates.setdefault(rank, now + self._options.recovery.start_timeout)

    def ready(self, rank: int) -> None:
        self._candidates.pop(rank, None)
        self._have_reported.add(rank)

    def forget(self, rank: int) -> None:
        """The process at ``rank`` is gone; another one may come."""
        self._candidates.pop(rank, None)
        self._looks.pop(rank, None)
        self._heard.pop(rank, None)
        self._beats.pop(rank, None)
        self._acted.pop(rank, None)
        self._have_applied.discard(rank)
        self._have_reported.discard(rank)

    @property
    def activities(self) -> dict[int, tuple[str, str]]:
        """Activity of main threads at their newest heartbeats, for people."""
        return {rank: (b.activity.operation, b.activity.waiting_for) for rank, (b, _) in self._beats.items()}

    def forgive(self, now: float) -> None:
        """Restarts the clocks of silence: this process could not hear until now."""
        self._heard = dict.fromkeys(self._heard, now)
        self._beats = {rank: (beat, now) for rank, (beat, _) in self._beats.items()}

    # ------------------------------------------------------------------ what is bounded in time

    def begin_start(self, now: float) -> None:
        """The first worker is expected, or has come."""
        if self._deadline is None:
            self._deadline = now + self._options.recovery.start_timeout

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
        begun = state.generation.number >= 0 and state.roster.live <= self._beats.keys()
        standings = {}
        for rank, unable in stalled.items():
            silence = self._silence(now, rank)
            computes = self._computes(now, rank, max(silence.seconds, unable) > silence.limit / 2)
            silence = replace(silence, computes=computes)
            others = []
            if (
                begun and rank in state.roster.live and Standing(silence).is_heard
            ):  # of a silent worker nothing else is known
                others.append(self._work(now, rank, state, seconds))
            if unable > 0:
                others.append(replace(self._stalled(unable), computes=computes))
            standings[rank] = Standing(silence, tuple(sign for sign in others if sign is not None))
        holders = state.roster.live - state.roster.joining
        self._memory, ruling = review(self._memory, now, standings, holders, state.positions, state.steps.version)
        return ruling

    def everybody_waits(self, now: float, state: MembershipState, seconds: Mapping[int, Mapping[str, float]]) -> bool:
        """Whether a message of the generation was lost: all wait for each other too long."""
        if state.generation.number < 0 or state.generation.regrouping or not state.roster.live <= self._beats.keys():
            return False
        for rank in state.roster.live:
            beat, _ = self._beats[rank]
            # What was waited for in an earlier generation says nothing about this one, nor does what a silent one said.
            current = beat.generation == state.generation.number and Standing(self._silence(now, rank)).is_heard
            if not beat.activity.waiting_for or not current:
                return False
        observations = {rank: self._observe(now, rank, state) for rank in state.roster.live}
        return everybody_waits(
            observations, lambda rank, kind: self._usual(rank, kind, seconds), self._options.heartbeat.timeout
        )

    def late_candidates(self, now: float) -> dict[int, str]:
        """The replacements that are not ready in time."""
        cause = f"it was not ready within {self._options.recovery.start_timeout:g} s"
        return {rank: cause for rank, deadline in self._candidates.items() if now > deadline}

    def late(self, now: float, state: MembershipState) -> dict[int, str]:
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

    def _silence(self, now: float, rank: int) -> Sign:
        timeout = self._options.heartbeat.timeout
        if rank not in self._have_reported:  # imports and unpickling can keep all of its threads from running
            timeout = max(timeout, _LEAST_START_TIMEOUT)
        seconds = now - self._heard.get(rank, now)
        return Sign(
            f"it was silent for more than {timeout:g} s", seconds, timeout, self._options.heartbeat.last_holder_timeout
        )

    def _computes(self, now: float, rank: int, is_quiet: bool) -> bool:
        """Whether a quiet worker's process computes or waits for a disk.

        A stopped one does not, nor one whose threads wait for each other.
        """
        if not is_quiet:
            self._looks.pop(rank, None)
            return False
        looks = self._looks.setdefault(rank, [])
        states = self._thread_states(rank)
        looks.append((now, "R" in states or "D" in states))
        looks[:] = [(at, busy) for at, busy in looks if now - at <= self._options.heartbeat.timeout]
        return "T" not in states and sum(busy for _, busy in looks) >= _BUSY_SHARE * len(looks)

    def _stalled(self, seconds: float) -> Sign:
        timeout = max(_LEAST_STALL_SECONDS, self._options.heartbeat.timeout)
        cause = f"it took no message for more than {timeout:g} s"
        return Sign(cause, seconds, timeout, self._options.heartbeat.last_holder_timeout)

    def _observe(self, now: float, rank: int, state: MembershipState) -> Observation:
        beat, received = self._beats[rank]
        activity = beat.activity
        # What it did in an earlier generation says nothing about this one: only time since it last acted counts.
        return Observation(
            activity.operation,
            activity.kind,
            (state.generation.regrouping and rank in state.generation.reports) or bool(activity.waiting_for),
            min(beat.seconds + now - received, now - self._acted.get(rank, -math.inf)),
            activity.coordinated,
            (activity.step, activity.kind if activity.microbatch < 0 else f"micro-batch {activity.microbatch}"),
        )

    def _work(
        self, now: float, rank: int, state: MembershipState, seconds: Mapping[int, Mapping[str, float]]
    ) -> Sign | None:
        """Seconds that a member has been at the same work, or deaf to a regroup."""
        seen = self._observe(now, rank, state)
        if state.generation.regrouping and rank in self._have_reported and rank not in state.generation.reports:
            deaf = self._deaf(rank)
            siblings = state.positions.siblings(rank) - state.generation.reports.keys()
            # A generation ends no hook that they run together, if one of them still works there.
            if deaf is not None and all(self._beats[sibling][0].activity.waiting_for for sibling in siblings):
                return deaf
        usual = self._usual(rank, seen.kind, seconds) if seen.kind else None
        return sign_of_work(seen, usual, self._options.heartbeat.timeout, self._options.patience)

    def _deaf(self, rank: int) -> Sign | None:
        """Whether a member waits on despite an announced generation, which ends any wait."""
        beat, received = self._beats[rank]
        passed = received - self._regroup_began
        if not beat.activity.waiting_for or beat.seconds <= passed:
            return None
        limit = max(self._options.heartbeat.timeout, _LEAST_DEAF_SECONDS)
        cause = (
            f"it has been waiting for {beat.activity.waiting_for} since before the others regrouped,"
            f" more than {limit:g} s ago"
        )
        return Sign(cause, passed, limit, self._options.patience)

    def _usual(self, rank: int, kind: str, seconds: Mapping[int, Mapping[str, float]]) -> float | None:
        """The usual seconds of an operation.

        An operation that is new to the plan takes at most twice as long as the longest.
        """
        known = seconds.get(self._positions.stage(rank), {})
        if rank not in self._have_applied or not known:
            return None
        return known.get(kind, 2 * max(known.values()))
