"""The checks of what workers hold, as events and commands of the state machine. Pure.

A check is over when all live workers have applied its step: then those that told are compared
(:mod:`~lightning_recycle.control.protocol.corruption`). A worker that is found wrong is evicted; or it takes over the
state of a peer at the next step boundary, in a generation of the same workers; or the run ends. If nothing says who is
right, the stage has no state that can be trusted, and counts as lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.corruption import Culprit, Undecided, judge
from lightning_recycle.control.protocol.recovery import WorkerStatus
from lightning_recycle.control.protocol.state import (
    Command,
    Evict,
    Failed,
    MembershipState,
    Outcome,
    Record,
    StageLost,
)

__all__ = ["add_checked", "choose_healers", "compare"]

_Next = tuple[MembershipState, tuple[Command, ...]]


def add_checked(state: MembershipState, event: messages.Applied) -> MembershipState:
    """A worker told what it holds after a step."""
    if event.facts.checked is None:
        return state
    return state.updated(checks=state.checks.add(event.rank, event.step, event.facts.checked))


def compare(state: MembershipState) -> _Next:
    """Compares what workers told of the steps that all live ones have applied."""
    commands: tuple[Command, ...] = ()
    for step in sorted(step for step in state.checks.told if step < state.version):
        told = {rank: one for rank, one in state.checks.told[step].items() if rank in state.live}
        rest = {other: value for other, value in state.checks.told.items() if other != step}
        state = state.updated(checks=replace(state.checks, told=rest))
        found: list[Culprit] = []
        for stage in range(state.grid.stages):
            of_stage = {rank: one for rank, one in told.items() if state.stage_of(rank) == stage}
            verdict = judge(of_stage)
            if isinstance(verdict, Undecided):
                record, outcome = _nobody_knows(state, step, stage, verdict)
                return replace(state, outcome=outcome), (*commands, record, outcome)
            found += verdict
        since = state.checks.agreed
        for culprit in found:
            state, caused = _convict(state, step, culprit, since)
            commands += caused
            if state.outcome is not None:
                return state, commands
        checks = state.checks if found else replace(state.checks, agreed=step)
        state = state.updated(checks=checks.plan(step, state.summed, told))
    return state, commands


def _convict(state: MembershipState, step: int, culprit: Culprit, since: int) -> _Next:
    """``culprit`` holds wrong bits after ``step``; after ``since`` it did not."""
    rank, what = culprit.rank, " and ".join(culprit.kinds)
    peers = " and ".join(str(state.grid.worker(other)) for other in culprit.right)
    cause = f"after step {step} its {what} differ from those of its peers {peers}, which are equal"
    heals = state.checks.may_heal(rank)
    details = {
        "cause": cause,
        "kind": what,
        "proof": "state",
        "device": culprit.device,
        "since": since,
        "then": "healed" if heals else "ended" if state.checks.policy == "raise" else "evicted",
    }
    record = Record("corruption", step, rank, details)
    if state.checks.policy == "raise":
        outcome = Failed(f"Worker {state.grid.worker(rank)} holds wrong bits: {cause}. {_contaminated(since, step)}")
        return replace(state, outcome=outcome), (record, outcome)
    if heals:
        return replace(state, checks=state.checks.heal(rank)), (record,)
    return state, (record, Evict(rank, cause))


def _nobody_knows(state: MembershipState, step: int, stage: int, found: Undecided) -> tuple[Record, Outcome]:
    what, since = " and ".join(found.kinds), state.checks.agreed
    groups = " ".join(f"[{', '.join(str(state.grid.worker(rank)) for rank in group)}]" for group in found.groups)
    cause = (
        f"After step {step} workers of stage {stage} hold different bits ({what}): {groups}, in groups that agree; no"
        " group is the largest, so nothing says which of them are right"
    )
    details = {
        "cause": cause, "kind": what, "proof": "undecided", "stage": stage, "since": since, "then": "ended",
    }  # fmt: skip
    record = Record("corruption", step, None, details)
    if state.checks.policy == "raise":
        return record, Failed(f"{cause}. {_contaminated(since, step)}")
    why = f"its {what} differ from its peer's, and nothing says whose are right"
    return record, StageLost(stage, {rank: why for rank in state.live if state.stage_of(rank) == stage})


def _contaminated(since: int, step: int) -> str:
    before = "before that nothing was compared" if since < 0 else f"they were equal after step {since}"
    return (
        f"{before[0].upper()}{before[1:]}, so what was computed since, up to step {step}, may be wrong. A device whose"
        " memory or arithmetic errs does this, and so do hooks or callbacks that change weights on some workers only,"
        " or optimizers that are not deterministic. Start again from a checkpoint that is older than that;"
        " ReCycleStrategy(on_corruption='evict') or 'heal' goes on without the worker, or with a peer's state, where"
        " a majority says what is right."
    )


def choose_healers(state: MembershipState, statuses: Mapping[int, WorkerStatus], version: int) -> dict[int, int]:
    """For each worker that can be healed in this generation, a peer with the right state. All of them are between two
    steps; otherwise they wait for the next boundary.
    """
    between = {rank for rank, status in statuses.items() if (status.version, status.tells_of) == (version, None)}
    found: dict[int, int] = {}
    for rank in state.checks.healing & between:
        healers = state.holders(state.stage_of(rank)) & between
        if healers:
            found[rank] = min(healers)
    return found
