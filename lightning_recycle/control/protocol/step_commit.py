"""Steps: losses, commits, and values that must be the same on all workers. Pure.

The losses of a step are collected by micro-batch, whoever computed them and however often. No worker applies a step
before they are known to all; where workers check each other's computations that is not before all have passed the step
in one generation, as a wrong result of one may be in those of all. A step counts as committed once every live worker
has applied it; the facts that workers report of it are compared. A worker that joined while the training was going on,
and holds other values than most of those that must hold the same, is evicted; any other difference ends the run. As
long as there are such newcomers, no worker applies a step before the one before it has been compared, so what followed
from wrong values is in no parameters but those of the worker that goes. Where stages must agree before they step (see
Commit), they are answered once every live worker is REDUCED.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain
from typing import Any

from lightning_recycle.control.protocol import control_collectives, corruption_response, messages, saves
from lightning_recycle.control.protocol.state import (
    Command,
    Evict,
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
    "doubt",
    "forget_unproven",
    "on_restored",
    "settle",
]

_SAME_ON_ALL = (
    "Hooks, callbacks and schedulers must do the same on all workers: decide on values that are the same everywhere,"
    " such as trainer.callback_metrics, and keep what you base decisions on in state_dict(), so that a replacement has"
    " it."
)
_INPUTS = -1  # the scope of values that the gradients of the step depend on


def settle(state: MembershipState) -> Next:
    """After a worker is gone: commits the step, and answers the collectives, that waited only for it."""
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


def doubt(state: MembershipState) -> MembershipState:
    """A newcomer is lost. If it was not compared after the newest step, it may have taken part in the next one with
    wrong values: all run that again. No worker has applied it, as its loss is not known.
    """
    if state.returned is None and state.steps.version == state.steps.summed:
        return state
    return state.with_steps(unproven=state.steps.summed).with_generation(passes=frozenset())


def _sum_up(state: MembershipState, step: int) -> Next:
    """Sends the loss of ``step`` to all if it is known, and proven where it must be."""
    steps = state.steps
    known, outputs = steps.losses.get(step, {}), steps.outputs.get(step, {})
    if len(known) < state.grid.global_microbatches:
        return state, ()
    if step == steps.unproven and state.generation.passes != state.roster.live:
        return state, ()
    if state.roster.newcomers and steps.version < step:
        return state, ()  # one of them may have taken part in it with other values than the others
    loss = sum(known[index] for index in sorted(known)) / len(known)
    state = state.with_generation(passes=frozenset()).with_steps(
        losses={other: value for other, value in steps.losses.items() if other > step},
        outputs={other: value for other, value in steps.outputs.items() if other > step},
        summed=step + 1,
    )
    # All take from this one message whether the run stops or ends after the step, so all do it after the same one.
    check_next = state.checks.is_announced_by(step)
    message = messages.StepLoss(
        step, loss, outputs=outputs, after_step=steps.after_step, check_next=check_next, saves=saves.status(state)
    )
    return state, (Send(state.heard, message),)


def add_applied(state: MembershipState, event: messages.Applied) -> Next:
    """A worker has applied a step, which counts once all have. Ends the run if the worker now differs from the
    others; while there are newcomers, they are compared when all have applied it.
    """
    if event.step <= state.steps.applied.get(event.rank, -1):
        return state, ()
    if state.roster.newcomers:
        told = _with_all(state, event)
    else:
        told, difference = _compared(state, event)
        if difference:
            return end(state, _differ(event.step, difference))
    facts = {**state.steps.facts, event.step: told}
    state = corruption_response.add_checked(state, event)
    applied = {**state.steps.applied, event.rank: event.step}
    state, commands = count_steps(state.with_steps(facts=facts, applied=applied))
    if not state.roster.newcomers or state.outcome is not None:
        return state, commands
    state, loss = _sum_up(state, state.steps.summed)  # which may have waited for that
    return state, commands + loss


def _differ(step: int, difference: str) -> Failed:
    return Failed(
        f"After step {step} workers hold different values that must be the same: {difference}. {_SAME_ON_ALL}"
    )


def _scopes(state: MembershipState, event: messages.Applied) -> tuple[tuple[int | None, Mapping[str, float]], ...]:
    """Values that must be the same on all workers (None, and :data:`_INPUTS`), and on those of a stage."""
    facts = event.facts
    return (None, facts.everywhere), (_INPUTS, facts.inputs), (state.column_of(event.rank), facts.stage)


def _with_all(state: MembershipState, event: messages.Applied) -> Mapping[int | None, tuple[Reported, ...]]:
    """The reported facts of the step, with all that ``event`` adds."""
    told = state.steps.facts.get(event.step, {})
    return {**told, **{scope: (*told.get(scope, ()), (event.rank, mine)) for scope, mine in _scopes(state, event)}}


def _compared(state: MembershipState, event: messages.Applied) -> tuple[Mapping[int | None, tuple[Reported, ...]], str]:
    """The reported facts of the step, with what ``event`` adds; and names and values in which its worker differs from
    the first that reported them, empty if there are none. To compare with one is enough, however many there are: the
    others were equal to it. Nearly always all that a worker tells is what another one has told, which is seen at once.
    """
    told = dict(state.steps.facts.get(event.step, {}))
    differ = []
    for stage, mine in _scopes(state, event):
        others = tuple(one for one in told.get(stage, ()) if one[0] in state.roster.live)
        if any(theirs == mine for _, theirs in others):
            continue
        told[stage] = (*others, (event.rank, mine))
        for name, value in mine.items():
            first, theirs = next(((rank, facts[name]) for rank, facts in others if name in facts), (event.rank, value))
            if not _same(value, theirs):
                differ.append(_in_words(state, name, (first, theirs), (event.rank, value)))
    return told, "; ".join(sorted(differ))


def _in_words(state: MembershipState, name: str, one: tuple[int, float], other: tuple[int, float]) -> str:
    (first, theirs), (rank, value) = one, other
    return f"{name} is {theirs!r} on worker {state.name(first)} and {value!r} on {state.name(rank)}"


def _vote(state: MembershipState, step: int) -> Next:
    """Compares what all live workers hold after ``step``, and evicts newcomers that most others contradict."""
    wrong: dict[int, list[str]] = {}
    is_clear = True
    for scope, told in state.steps.facts.get(step, {}).items():
        values = {rank: facts for rank, facts in told if rank in state.roster.live}
        first = next(iter(values.values()), {})
        if all(facts == first for facts in values.values()):
            continue
        right = max(values, key=lambda rank: sum(not _names(values[rank], facts) for facts in values.values()))
        differing = {rank: names for rank, facts in values.items() if (names := _names(values[right], facts))}
        # What inputs led to, all have applied.
        is_clear = is_clear and scope != _INPUTS and 2 * len(differing) < len(values)
        for rank, names in differing.items():
            wrong.setdefault(rank, []).extend(
                _in_words(state, name, (right, values[right][name]), (rank, values[rank][name])) for name in names
            )
    if not wrong:
        return state, ()
    is_clear = is_clear and wrong.keys() <= state.roster.newcomers
    if not is_clear or any(not state.holding(state.stage_of(rank), without=wrong) for rank in wrong):
        return end(state, _differ(step, "; ".join(sorted(chain.from_iterable(wrong.values())))))
    commands: list[Command] = []
    for rank, words in sorted(wrong.items()):
        cause = f"after step {step} {'; '.join(sorted(words))}: most workers agree, and it has joined them"
        outvoted = state.roster.outvoted
        state = state.with_roster(outvoted={**outvoted, rank: (*outvoted.get(rank, ()), step)})
        details = {"cause": cause, "stays_empty": rank in state.roster.barred}
        commands += [Record("outvoted", step, rank, details), Evict(rank, cause)]
    return doubt(state), tuple(commands)


def _names(right: Mapping[str, float], other: Mapping[str, float]) -> list[str]:
    """The names whose values differ."""
    return [name for name in right.keys() & other.keys() if not _same(right[name], other[name])]


def _same(a: float, b: float) -> bool:
    """Floats may come from the mathematical libraries of different machines; integers are counters and digests."""
    return a == b or (isinstance(a, float) and math.isclose(a, b, rel_tol=1e-12)) or (a != a and b != b)


def count_steps(state: MembershipState) -> Next:
    """Counts the steps that every live worker has applied."""
    # The usual case, found without looking at all workers: each is passed by once in a step.
    steps, live = state.steps, state.roster.live
    for rank in range(steps.passed, state.num_workers):
        if rank in live and steps.applied.get(rank, -1) < steps.version:
            return (state if rank == steps.passed else state.with_steps(passed=rank)), ()
    version = min(steps.applied[rank] for rank in live) + 1
    records = tuple(Record("step", step) for step in range(steps.version, version))
    facts = {step: told for step, told in steps.facts.items() if step >= version}
    commands: tuple[Command, ...] = records
    for step in range(steps.version, version):
        state, voted = _vote(state, step)
        commands += voted
        if state.outcome is not None:
            return state, commands
    is_equal = len(commands) == len(records)
    state = state.with_steps(version=version, passed=0, facts=facts).with_faults(disturbances=0)
    state, settled = corruption_response.settle_inspection(state)
    if not (is_equal and state.checks.due(version)):  # whoever has other values, and goes, has other bits, too
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
        payloads.setdefault(state.column_of(rank), commit.payload)
    guessed = any(commit.guesses for commit in commits.values())
    state = state.with_generation(commits={}, committed=event.step).with_steps(answered=(event.step, payloads))
    return state, (
        Send(state.roster.ranks, messages.Committed(state.generation.number, event.step, payloads, guessed)),
    )
