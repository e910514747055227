"""Parking: what is left of positions that have lost a member. Pure.

Concept: the roster of a generation holds whole positions only. When a member of a position is lost, its siblings are
*parked*: they leave the roster, but stay connected and keep what they hold. A parked worker hears the Regroup whose
roster lacks it, stops, and waits. It goes on receiving losses, and answers to control collectives and early stops, and
what it sent before counts: if it comes back, it has missed nothing.

If a stage has no whole position left, parked workers of its columns are put together into one at once
(:func:`assemble`), with the states that they have; the reports of that generation show whether the others can go on
from these. So a stage is lost only when one of its columns is. As long as the stage has a whole position, what is
parked stays parked: to enter it would have to take another state.

That state is of use for a short time: no stage can go back more than a step. A parked worker that is two steps behind
is released (:func:`release_outdated`), as is one that has missed what all did in one generation, such as a validation,
what they decided at one place: to stop early, or what they heard from a coordinator that is gone. Its place is then
vacant like that of its lost sibling. New processes for both enter together at a step boundary, each with the state of
its own column.

Must not know: why a worker was lost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lightning_recycle.control.protocol.recovery import WorkerStatus, committed_version
from lightning_recycle.control.protocol.state import Command, Evict, MembershipState, Next, Record

_STEPS = 2  # behind the others, from which on what a parked worker holds is of no use


def park(state: MembershipState, rank: int) -> Next:
    """``rank`` leaves the roster, and its siblings with it. Those that have a state are parked. The others have nothing
    to keep: they have not got their state yet, or the training has not begun.
    """
    siblings = state.positions.siblings(rank) & state.roster.live
    useless = siblings if state.generation.number < 0 else siblings & state.roster.joining
    cause = f"worker {state.name(rank)}, a member of the same position, was lost before it had its state"
    return state.without({rank}, drop=useless), tuple(Evict(sibling, cause) for sibling in sorted(useless))


def assemble(state: MembershipState, stage: int, without: Collection[int] = ()) -> Next:
    """Puts a whole position of ``stage`` together from what is left of it, where no live position holds its state;
    changes nothing if one of its columns has no worker with a state, but those of ``without``.

    Of each column the worker that has applied most steps takes part, of these the one that was parked last. Workers
    without a state, and those of ``without``, have to begin anew.
    """
    before, positions = state, state.positions
    left = {rank for rank in state.roster.live if state.stage_of(rank) == stage}
    useless = left & state.roster.joining.union(without)
    state = state.without(left, drop=left)
    versions = {rank: state.version_of(rank) for rank in sorted(left - useless)}
    state = state.updated(roster=state.roster.with_parked(versions, before.roster.newcomers))
    chosen: list[int] = []
    for column in range(stage * state.members, (stage + 1) * state.members):
        of_column = [rank for rank in reversed(state.roster.parked) if positions.column(rank) == column]
        if not of_column:
            return before, ()
        chosen.append(max(of_column, key=state.version_of))
    pipeline = positions.pipeline(chosen[0])
    for rank in chosen[1:]:
        state = state.with_roster(moved=state.positions.exchanged(rank, pipeline))
    roster = state.roster
    state = state.with_roster(
        live=roster.live.union(chosen),
        parked={rank: version for rank, version in roster.parked.items() if rank not in chosen},
        assembled=roster.assembled.union(chosen),
    ).with_steps(passed=0)
    cause = "it has no state from which its stage can go on"
    return state, tuple(Evict(rank, cause) for rank in sorted(useless))


def without_latecomers(state: MembershipState, statuses: Mapping[int, WorkerStatus]) -> Next:
    """The state without the workers that joined too late to go back with those that were put together: those that have
    no state yet, and those that have not kept the parameters of the step that runs again. If a stage has no others,
    parked ones take their places; unchanged if it has not enough of these.

    Args:
        state: all live workers have reported.
        statuses: what they hold that have a state.
    """
    version = committed_version(statuses, state.steps.summed)
    late = {rank for rank, one in statuses.items() if one.version > version and not one.has_shadow}
    if any(one.version > version for one in statuses.values()):
        late |= state.roster.joining
    if not late:
        return state, ()
    before, commands = state, tuple[Command, ...]()
    for stage in range(state.grid.stages):
        if not state.holding(stage, without=late):
            rest, useless = assemble(state, stage, without=late)
            if rest is state:
                return before, ()
            state, commands = rest, commands + useless
    if state is not before:
        return state, commands
    positions = state.positions.expand(late)
    cause = "it joined too late to run a step again"
    return state.without(late, drop=positions), tuple(Evict(rank, cause) for rank in sorted(positions))


def release_outdated(state: MembershipState) -> Next:
    """Releases the parked workers whose state nobody can go back to any more."""
    return release(state, {rank for rank in state.roster.parked if _is_outdated(state, rank)})


def _is_outdated(state: MembershipState, rank: int) -> bool:
    return state.version_of(rank) + _STEPS <= state.steps.version


def release(state: MembershipState, ranks: Collection[int]) -> Next:
    """Releases the parked workers ``ranks``."""
    if not ranks:
        return state, ()
    commands = tuple(Record("released", state.steps.version, rank) for rank in sorted(ranks))
    return state.updated(roster=state.roster.without_parked(ranks)), commands
