"""Values that are not finite: the model's or a device's, as events and commands of the state machine. Pure.

A worker that meets a NaN or an infinity (NotFinite) stops, so nobody commits the step. In the next generation the step
is *inspected*: whoever makes such a value of finite ones disputes its own result, and its stage votes
(:mod:`~lightning_recycle.control.protocol.checking`). If the peers get finite values it was the device. If they get the
same, or nobody makes the value (it is in the data, or in the parameters of all), the step is *excused*: it runs again,
and is taken as it is. If the value does not come again, there is nothing left to do.

Contract: a step is inspected once, unless a loss interrupts that, and a model that often has such values is soon not
asked any more.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.corruption import (
    EXCUSES_ALL,
    FINITE,
    IS_FINITE,
    MAX_EXCUSED,
    Culprit,
    Dispute,
)
from lightning_recycle.control.protocol.state import Command, MembershipState, Record

__all__ = ["add_not_finite", "excuse", "is_about_numbers", "settle", "who_made_it"]

_Next = tuple[MembershipState, tuple[Command, ...]]


def add_not_finite(state: MembershipState, event: messages.NotFinite) -> _Next | None:
    """A worker has met a value that is not finite. None if that is of no interest any more; else a generation must
    begin, as that worker waits for one.
    """
    if event.generation != state.generation or state.regrouping:
        return None
    if state.checks.inspects == event.step:
        return excuse(state, event.step, "no worker makes it of finite values")
    which = f"the loss of micro-batch {event.microbatch}" if event.microbatch >= 0 else "the gradient of its stage"
    details = {"cause": f"{which} is not finite", "then": "inspected"}
    state = replace(state, checks=replace(state.checks, inspects=event.step))
    return state, (Record("not_finite", event.step, event.rank, details),)


def is_about_numbers(dispute: Dispute) -> bool:
    """Whether the question is if a value is finite."""
    return dispute.accused == dispute.recorder


def who_made_it(dispute: Dispute) -> Culprit | str:
    """The worker whose device made a value that is not finite; or why it is nobody's, in words, when all have voted."""
    accused = dispute.accused
    others = {rank: vote for rank, vote in dispute.votes.items() if rank != accused}
    finite = tuple(sorted(rank for rank, (sums, _) in others.items() if sums.get(FINITE) == IS_FINITE))
    if not others:
        return "it has no peer"
    if not all(repeats for _, repeats in others.values()):
        return "its peers get other values each time"
    if 2 * len(finite) <= len(others):
        return "its peers get such a value, too"
    kinds = tuple(sorted(dispute.claims[accused].keys() - {FINITE}))
    return Culprit(accused, kinds, finite, dispute.devices.get(accused, ""))


def excuse(state: MembershipState, step: int, why: str) -> _Next:
    """What ``step`` has of such values is the model's, or the data's."""
    count = state.checks.excuses + 1
    until = step if count < MAX_EXCUSED else EXCUSES_ALL
    checks = replace(state.checks, inspects=-1, excused=until, excuses=count)
    cause = f"what is not finite is the model's or the data's: {why}"
    then = "kept" if count < MAX_EXCUSED else "kept, and not asked for again"
    return replace(state, checks=checks), (Record("not_finite", step, None, {"cause": cause, "then": then}),)


def settle(state: MembershipState) -> _Next:
    """If all have applied the inspected step, the value has not come again."""
    step = state.checks.inspects
    if not 0 <= step < state.version:
        return state, ()
    state = replace(state, checks=replace(state.checks, inspects=-1))
    details = {"cause": "all values are finite now; no worker made the other one again", "then": "gone"}
    return state, (Record("not_finite", step, None, details),)
