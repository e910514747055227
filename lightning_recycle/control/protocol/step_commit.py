"""Steps: losses, commits, and values that must be the same on all workers. Pure.

The losses of a step are collected by micro-batch, whoever computed them and however often. No worker applies a step
before they are known to all; where workers check each other's computations that is not before all have passed the step
in one generation, as a wrong result of one may be in those of all. A step counts as committed once every live worker
has applied it; the facts that workers report of it are compared, and a difference ends the run. Where stages must agree
before they step (see Commit), they are answered once every live worker is REDUCED.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning_recycle.control.protocol import control_collectives, corruption_response, messages
from lightning_recycle.control.protocol.state import (
    Command,
    Failed,
    MembershipState,
    Next,
    Record,
    Reported,
    Send,
    end,
)

__all__ = [
    "add_applied",
    "add_commit",
    "add_losses",
    "add_pass",
    "count_steps",
    "forget_unproven",
    "on_restored",
    "settle",
]

_SAME_ON_ALL = (
    "Hooks, callbacks and schedulers must do the same on all workers: decide on values that are the same everywhere,"
    " such as trainer.callback_metrics, and keep what you base decisions on in state_dict(), so that a replacement has"
    " it."
)


def settle(state: MembershipState) -> Next:
    """After a worker is gone: completes what waited only for it."""
    state, commands = count_steps(state)
    state, answers = control_collectives.settle(state)
    return state, commands + answers


def on_restored(state: MembershipState, event: messages.Restored) -> Next:
    """The training goes on from a checkpoint."""
    if state.steps.applied or event.version <= state.steps.version:
        return state, ()
    return state.with_steps(version=event.version, passed=0, summed=event.version), ()


def add_losses(state: MembershipState, event: messages.Losses) -> Next:
    """Losses of micro-batches; the mean goes to all once the losses of the whole step are there."""
    steps = state.steps
    if event.step < steps.summed:
        return state, ()  # a redone step, computed again
    if event.generation is not None and not state.generation.runs(event.generation):
        return state, ()  # of an attempt that not all have passed, and that all make again
    known = {**event.losses, **steps.losses.get(event.step, {})}
    outputs = {**event.outputs, **steps.outputs.get(event.step, {})}
    state = state.with_steps(
        losses={**steps.losses, event.step: known},
        outputs={**steps.outputs, event.step: outputs},
        unproven=steps.unproven if event.generation is None else max(steps.unproven, event.step),
    )
    return _sum_up(state, event.step)


def add_pass(state: MembershipState, event: messages.Reached) -> Next:
    """A worker has no doubt about its peers' results in a step."""
    if not state.generation.runs(event.generation) or event.step != state.steps.summed:
        return state, ()
    return _sum_up(state.with_generation(passes=state.generation.passes | {event.rank}), event.step)


def forget_unproven(state: MembershipState) -> MembershipState:
    """When all run a step again that not all have passed: drops its losses, as they drop the rest of it."""
    steps = state.steps
    if steps.unproven < steps.summed:
        return state
    return state.with_steps(
        losses={step: value for step, value in steps.losses.items() if step != steps.unproven},
        outputs={step: value for step, value in steps.outputs.items() if step != steps.unproven},
        unproven=-1,
    )


def _sum_up(state: MembershipState, step: int) -> Next:
    """Sends the loss of ``step`` to all if it is known, and proven where it must be."""
    steps = state.steps
    known, outputs = steps.losses.get(step, {}), steps.outputs.get(step, {})
    if len(known) < state.grid.global_microbatches:
        return state, ()
    if step == steps.unproven and state.generation.passes != state.roster.live:
        return state, ()
    loss = sum(known[index] for index in sorted(known)) / len(known)
    state = state.with_generation(passes=frozenset()).with_steps(
        losses={other: value for other, value in steps.losses.items() if other > step},
        outputs={other: value for other, value in steps.outputs.items() if other > step},
        summed=step + 1,
    )
    # All take from this one message whether the run stops or ends after the step, so all do it after the same one.
    check_next = state.checks.is_announced_by(step)
    message = messages.StepLoss(step, loss, outputs=outputs, after_step=steps.after_step, check_next=check_next)
    return state, (Send(state.roster.ranks, message),)


def add_applied(state: MembershipState, event: messages.Applied) -> Next:
    """A worker has applied a step. Ends the run if it now differs from the others."""
    if event.step <= state.steps.applied.get(event.rank, -1):
        return state, ()
    told, difference = _compared(state, event)
    if difference:
        reason = f"After step {event.step} workers hold different values that must be the same: {difference}."
        return end(state, Failed(f"{reason} {_SAME_ON_ALL}"))
    state = corruption_response.add_checked(state, event)
    applied = {**state.steps.applied, event.rank: event.step}
    return count_steps(state.with_steps(facts={**state.steps.facts, event.step: told}, applied=applied))


def _compared(state: MembershipState, event: messages.Applied) -> tuple[Mapping[int | None, tuple[Reported, ...]], str]:
    """The reported facts of the step, with what ``event`` adds; and names and values in which its worker differs from
    the first that reported them, empty if there are none. To compare with one is enough, however many there are: the
    others were equal to it. Nearly always all that a worker tells is what another one has told, which is seen at once.
    """
    told = dict(state.steps.facts.get(event.step, {}))
    differ = []
    for scope, mine in ((None, event.facts.everywhere), (state.stage_of(event.rank), event.facts.stage)):
        others = tuple(one for one in told.get(scope, ()) if one[0] in state.roster.live)
        if any(theirs == mine for _, theirs in others):
            continue
        told[scope] = (*others, (event.rank, mine))
        for name, value in mine.items():
            first, theirs = next(((rank, facts[name]) for rank, facts in others if name in facts), (event.rank, value))
            if not _same(value, theirs):
                one, other = state.grid.worker(first), state.grid.worker(event.rank)
                differ.append(f"{name} is {theirs!r} on worker {one} and {value!r} on {other}")
    return told, "; ".join(sorted(differ))


def _same(a: float, b: float) -> bool:
    """Floats may come from the mathematical libraries of different machines; integers are counters and digests."""
    return a == b or (isinstance(a, float) and math.isclose(a, b, rel_tol=1e-12)) or (a != a and b != b)


def count_steps(state: MembershipState) -> Next:
    """Counts the steps that every live worker has applied."""
    # The usual case, found without looking at all workers: each is passed by once in a step.
    steps, live = state.steps, state.roster.live
    for rank in range(steps.passed, state.grid.num_workers):
        if rank in live and steps.applied.get(rank, -1) < steps.version:
            return (state if rank == steps.passed else state.with_steps(passed=rank)), ()
    version = min(steps.applied[rank] for rank in live) + 1
    commands: tuple[Command, ...] = tuple(Record("step", step) for step in range(steps.version, version))
    facts = {step: told for step, told in steps.facts.items() if step >= version}
    state = state.with_steps(version=version, passed=0, facts=facts).with_faults(disturbances=0)
    state, settled = corruption_response.settle_inspection(state)
    if not state.checks.due(version):
        return state, commands + settled
    state, caused = corruption_response.compare(state)
    return state, commands + settled + caused


def add_commit(state: MembershipState, event: messages.Commit) -> Next:
    """A worker is REDUCED and asks whether all others are."""
    if not state.generation.runs(event.generation) or event.step <= state.generation.committed:
        return state, ()
    commits = {**state.generation.commits, event.rank: event}
    state = state.with_generation(commits=commits)
    if commits.keys() != state.roster.live:
        return state, ()
    steps = {commit.step for commit in commits.values()}
    if len(steps) > 1:
        return end(state, Failed(f"The workers asked to commit different steps: {sorted(steps)}."))
    payloads: dict[int, Any] = {}
    for rank, commit in sorted(commits.items()):
        payloads.setdefault(state.stage_of(rank), commit.payload)
    guessed = any(commit.guesses for commit in commits.values())
    state = state.with_generation(commits={}, committed=event.step).with_steps(answered=(event.step, payloads))
    return state, (
        Send(state.roster.ranks, messages.Committed(state.generation.number, event.step, payloads, guessed)),
    )
