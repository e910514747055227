"""Step boundaries: pauses to let workers in and out, and to change plans. Pure.

A loss changes the roster at once, in the middle of a step. Everything else waits for a *step boundary*, so that nothing
is redone: workers that are ready to join, workers that want to leave, moves to another stage. The live workers are
asked where they are (Pause, Paused) and begin no further step; then they are told at which step to stop (Boundary); a
new generation begins when all are there (Reached). A worker that joins gets the state of its stage from a peer
in that generation; until then it holds nothing and does not count as a replica. A *newcomer* that holds other values
than those who were there before is dismissed, and what it took part in and not all have applied is computed again. Its
position gets one more worker, then it stays empty.

Another plan for the same workers (PlanReady) also begins at a step boundary, but no worker stops there: the Boundary
carries the plan, and each worker switches to it when it reaches that step. If a generation begins before, its own plan
holds, which is the shell's business (Resume). A plan that needs other connections is such a generation's: all stop at
the boundary and connect what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lightning_recycle.control.protocol import generation, messages
from lightning_recycle.control.protocol.state import (
    Command,
    Evict,
    MembershipState,
    MovePlanned,
    Next,
    PauseState,
    PlanReady,
    Record,
    Send,
    after,
)


def on_ready(state: MembershipState, event: messages.Ready) -> Next:
    """A worker is set up and waits to be let in."""
    if event.rank in state.roster.live or event.rank in state.roster.parked:
        return state, ()
    return state.with_roster(ready=state.roster.ready | {event.rank}), ()


def drop_candidate(state: MembershipState, rank: int) -> Next:
    """A process that was to join is gone, and with it the move to its position; or a parked one."""
    roster = state.roster.without_parked({rank})
    moves = {other: mover for other, mover in roster.moves.items() if other != rank}
    return state.updated(roster=roster.updated(ready=roster.ready - {rank}, moves=moves)), ()


def on_move_planned(state: MembershipState, event: MovePlanned) -> Next:
    """A worker leaves for another position when its successor there enters."""
    return state.with_roster(moves={**state.roster.moves, event.rank: event.mover}), ()


def on_leave(state: MembershipState, event: messages.Leave) -> Next:
    """A worker wants to leave."""
    ending = state.roster.ending | ({event.rank} if event.with_run else set())
    return state.with_roster(leaving=state.roster.leaving | {event.rank}, ending=ending), ()


def on_plan_ready(state: MembershipState, event: PlanReady) -> Next:
    """There is a better plan for the workers of this generation."""
    fits = event.roster == state.roster.ranks and state.generation.number >= 0 and not state.generation.regrouping
    return (state.with_generation(plan=event) if fits else state), ()


def pause_if_wanted(state: MembershipState) -> Next:
    """Asks all where they are if something is to change, and nothing is changing already."""
    now = state.generation
    if now.number < 0 or now.regrouping or now.pause is not None or now.becomes or state.roster.joining:
        return state, ()
    is_layout_due = state.layout.wanted is not None
    if not any(_wanted(state)) and now.plan is None and not is_layout_due:
        return state, ()
    state = state.with_generation(pause=PauseState(now.pauses))
    return state, (Send(state.roster.ranks, messages.Pause(now.number, now.pauses)),)


def _wanted(state: MembershipState) -> tuple[frozenset[int], frozenset[int]]:
    """Who enters and who leaves at the next step boundary. Positions enter whole, and leave whole: the siblings of who
    leaves are parked. No stage is left without a position that has its state.
    """
    roster = state.roster
    positions = state.positions
    ready = roster.ready - roster.live
    enter = frozenset(rank for position in positions.whole(ready) for rank in positions.ranks(position))
    wanted = roster.leaving | {mover for rank, mover in roster.moves.items() if rank in enter}
    leave: set[int] = set()
    for rank in sorted(wanted & roster.live):
        if state.holding(state.stage_of(rank), without=leave | {rank}):
            leave.add(rank)
    # A worker that moves must be able to leave; else its device would hold two workers.
    enter = frozenset(rank for rank in enter if roster.moves.get(rank, -1) in leave or rank not in roster.moves)
    return enter, frozenset(leave)


def on_paused(state: MembershipState, event: messages.Paused) -> Next:
    """A worker reports the newest step that it has begun; when all have, they learn where to stop."""
    pause, plan = state.generation.pause, state.generation.plan
    if pause is None or (event.generation, event.number) != (state.generation.number, pause.number):
        return state, ()
    if pause.boundary is not None:
        return state, ()
    pause = replace(pause, begun={**pause.begun, event.rank: event.step})
    state = state.with_generation(pause=pause)
    if pause.begun.keys() != state.roster.live:
        return state, ()
    # A worker that enters has not heard the losses that are known already.
    boundary = max(max(pause.begun.values()) + 1, state.steps.summed)
    if plan is not None and not plan.reconnects and state.layout.wanted is None and not any(_wanted(state)):
        return _change_plan(state, plan, boundary)
    state = state.with_generation(pause=replace(pause, boundary=boundary))
    message = messages.Boundary(state.generation.number, boundary)
    return state, (Send(state.roster.ranks, message),)


def _change_plan(state: MembershipState, plan: PlanReady, boundary: int) -> Next:
    """All run ``plan`` from ``boundary`` on, without stopping there."""
    message = messages.Boundary(state.generation.number, boundary)
    state = state.with_generation(pause=None, pauses=state.generation.pauses + 1, plan=None)
    return state, (Send(state.roster.ranks, message, plan.schedule), Record("replanned", boundary, None, plan.details))


def on_at_boundary(state: MembershipState, event: messages.Reached) -> Next:
    """A worker waits at the boundary; when all do, those who enter and leave do so in a new generation."""
    pause, layout, plan = state.generation.pause, state.layout.wanted, state.generation.plan
    if pause is None or event.generation != state.generation.number or event.step != pause.boundary:
        return state, ()
    pause = replace(pause, arrived=pause.arrived | {event.rank})
    state = state.with_generation(pause=pause)
    if pause.arrived != state.roster.live:
        return state, ()
    enter, leave = _wanted(state)
    commands: list[Command] = [Record("paused", event.step)]
    if layout is not None and not (enter or leave):
        return after(tuple(commands), generation.begin(state, layout.cuts))
    if plan is not None and not (enter or leave):
        commands.append(Record("replanned", event.step, None, plan.details))
    moved = {mover: rank for rank, mover in state.roster.moves.items() if rank in enter}
    for rank in sorted(leave):
        if rank in moved:
            commands.append(Record("moved", event.step, rank, {"to": state.place(moved[rank])}))
        else:
            commands.append(Record("left", event.step, rank))
    state = _let_in(state.without(leave), enter, event.step)
    return after(tuple(commands), generation.begin(state))


def _let_in(state: MembershipState, enter: frozenset[int], step: int) -> MembershipState:
    """The state in which the workers ``enter`` are live, and get the state of their stage at ``step``."""
    roster = state.roster
    roster = roster.updated(
        live=roster.live | enter,
        joining=enter,
        newcomers={**roster.newcomers, **dict.fromkeys(enter, step)},
        ready=roster.ready - enter,
        moves={rank: mover for rank, mover in roster.moves.items() if rank not in enter},
    )
    applied = {**state.steps.applied, **dict.fromkeys(enter, step - 1)}
    return state.updated(roster=roster, steps=state.steps.updated(passed=0, applied=applied))


def on_entered(state: MembershipState, event: messages.Reached) -> Next:
    """A worker that joins has the state of its stage."""
    if event.rank not in state.roster.joining:
        return state, ()
    state = state.with_roster(joining=state.roster.joining - {event.rank})
    return state, (Record("rejoined", state.steps.version, event.rank),)


# ---------------------------------------------------------------------- newcomers that differ


def on_differs(state: MembershipState, event: messages.Differs) -> Next:
    """A worker that has just joined does not hold what its donor gave."""
    if event.rank not in state.roster.newcomers:
        return state, ()
    return dismiss(state, event.step, {event.rank: event.cause})


def dismiss(state: MembershipState, step: int, causes: Mapping[int, str]) -> Next:
    """Dismisses newcomers, by rank, that hold other values after ``step`` than the others."""
    commands: list[Command] = []
    for rank, cause in sorted(causes.items()):
        before = state.roster.dismissed
        state = state.with_roster(dismissed={**before, rank: (*before.get(rank, ()), step)})
        details = {"cause": cause, "stays_empty": rank in state.roster.barred}
        commands += [Record("dismissed", step, rank, details), Evict(rank, cause)]
    return doubt(state), tuple(commands)


def doubt(state: MembershipState) -> MembershipState:
    """A newcomer is lost. If it was not compared after the newest step, it may have taken part in the next one with
    wrong values: all run that again. No worker has applied it, as its loss is not known.
    """
    if state.returned is None and state.steps.version == state.steps.summed:
        return state
    return state.with_steps(unproven=state.steps.summed).with_generation(passes=frozenset())
