"""Generations: their beginning, and disturbances that begin another one. Pure.

A *generation* begins when all workers have joined and whenever the roster changes: all live workers are told to stop
(Regroup), report what they hold (Report), and go on together from one committed version (Resume). What counts in one
generation only is in :class:`~lightning_recycle.control.protocol.state.Generation`, of which each begins with a new
value.

If communication breaks and no death explains it (Broken, GraceElapsed), the same workers connect again. Each of them
first checks whom it can reach. If some cannot reach each other, as few workers as possible are evicted so that all
others can, and treated as dead.

An exception that a fault of the machine may explain (Raised) is settled by running the same work again: on a peer, when
the worker that raised is evicted, or in place, when it is the last holder of its stage
(:mod:`~lightning_recycle.control.protocol.fault_attribution`).

If a guess was wrong with which workers had stepped (Undo), the same workers connect again, too; it counts as no trouble
of the network.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

from lightning_recycle.control.protocol import control_collectives, fault_attribution, messages
from lightning_recycle.control.protocol.fault_attribution import Verdict
from lightning_recycle.control.protocol.recovery import decide
from lightning_recycle.control.protocol.state import (
    Command,
    Evict,
    Failed,
    Generation,
    GraceElapsed,
    MembershipState,
    Next,
    Record,
    Send,
    StartGrace,
    after,
    end,
)
from lightning_recycle.errors import ReCycleError

MAX_DISTURBANCES = 3
"""Regroups in a row without a loss and without a committed step, after which the run is abandoned."""


def begin(state: MembershipState, becomes: messages.Cuts = ()) -> Next:
    """All live workers stop and report.

    Args:
        state: before.
        becomes: the layout that they then get ready for.
    """
    state = with_leader(control_collectives.forget_retracted(state))
    wish = state.layout.wanted
    state = state.updated(
        generation=Generation(state.generation.number + 1, regrouping=True, becomes=becomes),
        layout=state.layout.updated(wanted=wish if wish is not None and wish.is_for(state.roster.ranks) else None),
    )
    checks = state.faults.disturbances > 0
    unproven = state.steps.unproven if state.steps.unproven >= state.steps.summed else -1
    roster = state.roster
    regroup = messages.Regroup(state.generation.number, roster.ranks, roster.leader, checks, unproven, roster.moved)
    return state, (Send(state.heard, regroup),)


def begin_unless_over(state: MembershipState, commands: tuple[Command, ...]) -> Next:
    """Begins a generation after ``commands``, unless they ended the run."""
    return (state, commands) if state.outcome is not None else after(commands, begin(state))


def with_leader(state: MembershipState) -> MembershipState:
    """Returns ``state`` with a live leader: the current one if it lives."""
    roster = state.roster
    if roster.leader in roster.live and roster.leader not in roster.joining:
        return state
    column = state.columns - state.members  # the first member of the last stage
    last = state.holders(column) or roster.live
    return state.with_roster(leader=state.positions.column_leaders(last).get(column, min(roster.live)))


def on_undo(state: MembershipState, event: messages.Undo) -> Next:
    """A guess was wrong: all drop what was computed with it, and the worker that made it corrects it."""
    if not state.generation.runs(event.generation):
        return state, ()
    return after((Record("undone", event.step),), begin(state))


# ---------------------------------------------------------------------- exceptions


def on_raised(state: MembershipState, event: messages.Raised) -> Next:
    """A worker raised a suspected exception: it is evicted, does the work again, or the exception is the user's."""
    if any((past.rank, past.generation) == (event.rank, event.generation) for past in state.faults.raised):
        return state, ()  # said twice
    stage, version = state.stage_of(event.rank), state.steps.version
    if event.rank in state.roster.parked:
        return state, (Evict(event.rank, f"it raised {event.summary}, and was parked"),)
    if event.rank in state.roster.joining:
        verdict = Verdict.EVICT  # no stage needs it yet, and no member has met this exception
    elif not state.has_resumed:
        verdict = Verdict.OWN
    else:
        has_peer = bool(state.holding(stage, without={event.rank}))
        past, retries = state.faults.raised, state.faults.retries
        verdict = fault_attribution.judge(event, stage, version, past, has_peer, retries)
    state = state.with_faults(raised=fault_attribution.remember(event, stage, version, state.faults.raised))
    where = event.operation if event.step == fault_attribution.OUTSIDE else f"{event.operation} of step {event.step}"
    cause = f"it raised {event.summary} ({where})"
    if verdict is Verdict.EVICT:
        return state, (Evict(event.rank, cause),)
    judged = Send((event.rank,), messages.Judged(event.generation, verdict is Verdict.OWN))
    if verdict is Verdict.OWN:
        return state, (judged,)
    commands = (judged, Record("retried", version, event.rank, {"cause": cause}))
    if event.generation < state.generation.number:
        return state, commands  # the newer one waits for its report
    return after(commands, begin(state))


# ---------------------------------------------------------------------- broken connections without a death


def on_broken(state: MembershipState, event: messages.Broken) -> Next:
    """A worker lost connections of this generation: a death may still explain it."""
    if not state.generation.runs(event.generation):
        return state, ()
    pairs = {(min(event.rank, other), max(event.rank, other)) for other in event.unreachable}
    state = state.with_generation(broken_pairs=state.generation.broken_pairs | pairs)
    return state, (StartGrace(event.generation, f"worker {state.name(event.rank)}: {event.reason}"),)


def on_grace_elapsed(state: MembershipState, event: GraceElapsed) -> Next:
    """A connection broke between two live workers: connects the same workers again, or evicts as few as possible."""
    if not state.generation.runs(event.generation):
        return state, ()
    pairs = state.generation.broken_pairs
    if pairs:  # they were told to check their links: reconnecting has been tried
        evicted = _choose_evictions(state)
        if evicted is not None:
            return state, tuple(Evict(rank, _cut_off_from(state, rank)) for rank in evicted)
    if state.faults.disturbances >= MAX_DISTURBANCES:
        return end(state, Failed(_why_given_up(state, event.reason)))
    state = state.with_faults(disturbances=state.faults.disturbances + 1)
    details: dict[str, Any] = {"cause": event.reason}
    if pairs:
        details["broken_pairs"] = tuple((state.place(a), state.place(b)) for a, b in sorted(pairs))
    if state.generation.becomes:  # no layout is so important that what breaks it may end the run
        details["layers_stay"] = state.generation.becomes
        state = state.with_layout(wanted=None)
    record: Command = Record("disturbance", state.steps.version, None, details)
    return after((record,), begin(state))


def _choose_evictions(state: MembershipState) -> tuple[int, ...] | None:
    """The workers without which no broken pair is left; None if some that cannot reach each other must stay.

    A position goes whole, so positions are chosen, each by its first member. Of each the member goes that is in most
    broken pairs, which parks its siblings.
    """
    pairs, positions = state.generation.broken_pairs, state.positions
    first = {rank: positions.rank(positions.position(rank)) for rank in state.roster.live}
    between = {(min(first[a], first[b]), max(first[a], first[b])) for a, b in pairs}
    holders = [{positions.rank(one) for one in state.holding(stage)} for stage in range(state.grid.stages)]
    gone = fault_attribution.choose_evictions(
        between, holders, first.get(state.roster.leader, -1), partial(_can_recover, state)
    )
    if gone is None:
        return None
    broken = Counter(rank for pair in pairs for rank in pair if first[rank] in gone)
    worst = {first[rank]: rank for rank in sorted(broken, key=lambda rank: (broken[rank], rank))}
    return tuple(sorted(worst.values()))


def _can_recover(state: MembershipState, evicted: frozenset[int]) -> bool:
    """Whether the others could go on from what they reported; without a connection none has moved on since."""
    evicted = state.positions.expand(evicted)
    statuses = {
        rank: report.status
        for rank, report in state.generation.reports.items()
        if rank not in evicted and report.status.version >= 0
    }
    try:
        decide(statuses, state.steps.summed)
    except ReCycleError:
        return False
    return True


def _cut_off_from(state: MembershipState, rank: int) -> str:
    """Why ``rank`` is evicted, in words."""
    others = sorted({other for pair in state.generation.broken_pairs if rank in pair for other in pair} - {rank})
    names = " and ".join(map(state.name, others))
    return f"it and worker{'s' if len(others) > 1 else ''} {names} cannot reach each other"


def _why_given_up(state: MembershipState, last: str) -> str:
    times, worker = MAX_DISTURBANCES + 1, state.name
    reason = f"Communication between live workers failed {times} times in a row at step {state.steps.version}, "
    reason += f"at last because: {last.rstrip('.')}. "
    if state.generation.broken_pairs:
        pairs = ", ".join(f"{worker(a)} and {worker(b)}" for a, b in sorted(state.generation.broken_pairs))
        reason += f"These cannot reach each other, and the others cannot go on without one of each two: {pairs}. "
    return reason + "Check the network between the workers; the warnings above say what went wrong before."
