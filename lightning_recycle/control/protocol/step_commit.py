"""What the workers agree on while the roster stays: losses, commits, applied steps, control collectives. Pure.

The losses of a step are collected by micro-batch, whoever computed them and however often. Nobody applies a step before
they are known to all; where workers check each other's computations that is not before all have passed the step in one
generation, as a wrong result of one may be in those of all. A step counts as committed once every live worker has
applied it; the facts that workers report of it are compared. Whoever joined while the training was going on, and holds
other values than most of those that must hold the same, is evicted; any other difference ends the run. As long as there
are such newcomers, nobody applies a step before the one before it has been compared, so what followed from wrong values
is in no parameters but those of the worker that goes. Where stages must agree
before they step (see Commit), they are answered once every live worker is REDUCED. Control collectives are numbered by
the workers' own program order, outlive generations, and complete when every live worker has arrived. A worker that does
another thing instead, or has begun a later step than those that wait, has left one out and never comes: the run ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from lightning_recycle.control.protocol import control_collectives, corruption_response, messages
from lightning_recycle.control.protocol.state import (
    ENDED,
    RESULT,
    Command,
    Ended,
    Evict,
    Failed,
    Finished,
    MembershipState,
    Outcome,
    Record,
    Send,
    Told,
)

__all__ = [
    "add_applied",
    "add_arrival",
    "add_commit",
    "add_losses",
    "add_pass",
    "check_attendance",
    "count_steps",
    "doubt",
    "end",
    "forget_retracted",
    "forget_unproven",
    "settle",
]

_SAME_ON_ALL = (
    "Hooks, callbacks and schedulers must do the same on all workers: decide on values that are the same everywhere,"
    " such as trainer.callback_metrics, and keep what you base decisions on in state_dict(), so that a replacement has"
    " it."
)
_INPUTS = -1  # the scope of values that the gradients of the step depend on

_ON_ALL = (
    "Whatever waits for all workers (self(x) with several stages, all_gather, reduce, broadcast, barrier, saving a"
    " checkpoint) must be called on all of them, not behind trainer.is_global_zero or rank_zero_only"
)


def end(state: MembershipState, outcome: Outcome) -> tuple[MembershipState, tuple[Command, ...]]:
    """The run is over."""
    return replace(state, outcome=outcome), (outcome,)


def settle(state: MembershipState) -> tuple[MembershipState, tuple[Command, ...]]:
    """After a worker is gone: completes what waited only for it."""
    state, commands = count_steps(state)
    state, verdict = control_collectives.settle_stop(state)
    commands += verdict
    for number in sorted(state.collectives):
        state, answer = _answer_if_complete(state, number)
        commands += answer
    return state, commands


def forget_retracted(state: MembershipState) -> MembershipState:
    """When a generation begins: drops the parts of collectives that count in one generation only, and those of workers
    that are gone. One of them may have gone on where all others stop.
    """
    kept = {
        number: {rank: arrive for rank, arrive in arrived.items() if arrive.generation is None and rank in state.live}
        for number, arrived in state.collectives.items()
    }
    return replace(state, collectives={number: arrived for number, arrived in kept.items() if arrived})


def add_losses(state: MembershipState, event: messages.Losses) -> tuple[MembershipState, tuple[Command, ...]]:
    """Losses of micro-batches; the mean goes to all once the losses of the whole step are there."""
    if event.step < state.summed:
        return state, ()  # a redone step, computed again
    if event.generation is not None and (event.generation != state.generation or state.regrouping):
        return state, ()  # of an attempt that not all have passed, and that all make again
    known = {**event.losses, **state.losses.get(event.step, {})}
    outputs = {**event.outputs, **state.outputs.get(event.step, {})}
    state = state.updated(losses={**state.losses, event.step: known}, outputs={**state.outputs, event.step: outputs})
    if event.generation is not None and event.step > state.unproven:
        state = replace(state, unproven=event.step)
    return _sum_up(state, event.step)


def add_pass(state: MembershipState, event: messages.Passed) -> tuple[MembershipState, tuple[Command, ...]]:
    """A worker has no doubt about its peers' results in a step."""
    if event.generation != state.generation or state.regrouping or event.step != state.summed:
        return state, ()
    return _sum_up(state.updated(passes=state.passes | {event.rank}), event.step)


def forget_unproven(state: MembershipState) -> MembershipState:
    """When all run a step again that not all have passed: drops its losses, as they drop the rest of it."""
    if state.unproven < state.summed:
        return state
    return state.updated(
        losses={step: value for step, value in state.losses.items() if step != state.unproven},
        outputs={step: value for step, value in state.outputs.items() if step != state.unproven},
        unproven=-1,
    )


def doubt(state: MembershipState) -> MembershipState:
    """A newcomer is lost. If it was not compared after the newest step, it may have taken part in the next one with
    wrong values: all run that again. Nobody has applied it, as its loss is not known.
    """
    if state.returned is None and state.version == state.summed:
        return state
    return replace(state, unproven=state.summed, passes=frozenset())


def _sum_up(state: MembershipState, step: int) -> tuple[MembershipState, tuple[Command, ...]]:
    """Tells all the loss of ``step`` if it is known, and proven where it must be."""
    known, outputs = state.losses.get(step, {}), state.outputs.get(step, {})
    if len(known) < state.grid.global_microbatches:
        return state, ()
    if step == state.unproven and state.passes != state.live:
        return state, ()
    if state.newcomers and state.version < step:
        return state, ()  # one of them may have taken part in it with other values than the others
    loss = sum(known[index] for index in sorted(known)) / len(known)
    state = state.updated(
        losses={other: value for other, value in state.losses.items() if other > step},
        outputs={other: value for other, value in state.outputs.items() if other > step},
        summed=step + 1,
        passes=frozenset(),
    )
    # All take from this one message whether the run stops or ends after the step, so all do it after the same one.
    check_next = state.checks.is_announced_by(step)
    told = messages.StepLoss(step, loss, outputs=outputs, after_step=state.after_step, check_next=check_next)
    return state, (Send(state.roster, told),)


def add_applied(state: MembershipState, event: messages.Applied) -> tuple[MembershipState, tuple[Command, ...]]:
    """A worker has applied a step. Ends the run if it now differs from the others; while there are newcomers, they are
    compared when all have applied it.
    """
    if event.step <= state.applied.get(event.rank, -1):
        return state, ()
    if state.newcomers:
        told = _with_all(state, event)
    else:
        told, difference = _compared(state, event)
        if difference:
            return end(state, _differ(event.step, difference))
    facts = {**state.facts, event.step: told}
    state = corruption_response.add_checked(state, event)
    state, commands = count_steps(state.updated(facts=facts, applied={**state.applied, event.rank: event.step}))
    if not state.newcomers or state.outcome is not None:
        return state, commands
    state, loss = _sum_up(state, state.summed)  # which may have waited for that
    return state, commands + loss


def _differ(step: int, difference: str) -> Failed:
    return Failed(
        f"After step {step} workers hold different values that must be the same: {difference}. {_SAME_ON_ALL}"
    )


def _scopes(state: MembershipState, event: messages.Applied) -> tuple[tuple[int | None, Mapping[str, float]], ...]:
    """What must be the same on all workers (None, and :data:`_INPUTS`), and on those of its stage."""
    facts = event.facts
    return (None, facts.everywhere), (_INPUTS, facts.inputs), (state.stage_of(event.rank), facts.stage)


def _with_all(state: MembershipState, event: messages.Applied) -> Mapping[int | None, tuple[Told, ...]]:
    """What is told of the step, with all that ``event`` adds."""
    told = state.facts.get(event.step, {})
    return {**told, **{scope: (*told.get(scope, ()), (event.rank, mine)) for scope, mine in _scopes(state, event)}}


def _compared(state: MembershipState, event: messages.Applied) -> tuple[Mapping[int | None, tuple[Told, ...]], str]:
    """What is told of the step, with what ``event`` adds; and names and values in which its worker differs from who
    told them first, empty if there are none. To compare with one is enough, however many there are: the others were
    equal to it. Nearly always all that a worker tells is what another one has told, which is seen at once.
    """
    told = dict(state.facts.get(event.step, {}))
    differ = []
    for stage, mine in _scopes(state, event):
        others = tuple(one for one in told.get(stage, ()) if one[0] in state.live)
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
    return f"{name} is {theirs!r} on worker {state.grid.worker(first)} and {value!r} on {state.grid.worker(rank)}"


def _vote(state: MembershipState, step: int) -> tuple[MembershipState, tuple[Command, ...]]:
    """Compares what all live workers hold after ``step``, and evicts newcomers that most others contradict."""
    wrong: dict[int, list[str]] = {}
    is_clear = True
    for scope, told in state.facts.get(step, {}).items():
        values = {rank: facts for rank, facts in told if rank in state.live}
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
    is_clear = is_clear and wrong.keys() <= state.newcomers
    if not is_clear or any(not state.holders(state.stage_of(rank)) - wrong.keys() for rank in wrong):
        return end(state, _differ(step, "; ".join(sorted(chain.from_iterable(wrong.values())))))
    commands: list[Command] = []
    for rank, words in sorted(wrong.items()):
        cause = f"after step {step} {'; '.join(sorted(words))}: most workers agree, and it has joined them"
        state = replace(state, outvoted={**state.outvoted, rank: (*state.outvoted.get(rank, ()), step)})
        details = {"cause": cause, "stays_empty": rank in state.barred}
        commands += [Record("outvoted", step, rank, details), Evict(rank, cause)]
    return doubt(state), tuple(commands)


def _names(right: Mapping[str, float], other: Mapping[str, float]) -> list[str]:
    """The names whose values differ."""
    return [name for name in right.keys() & other.keys() if not _same(right[name], other[name])]


def _same(a: float, b: float) -> bool:
    """Floats may come from the mathematical libraries of different machines; integers are counters and digests."""
    return a == b or (isinstance(a, float) and math.isclose(a, b, rel_tol=1e-12)) or (a != a and b != b)


def count_steps(state: MembershipState) -> tuple[MembershipState, tuple[Command, ...]]:
    """Counts the steps that every live worker has applied."""
    # The usual case, found without looking at all workers: each is passed by once in a step.
    for rank in range(state.passed, state.grid.num_workers):
        if rank in state.live and state.applied.get(rank, -1) < state.version:
            return (state if rank == state.passed else state.updated(passed=rank)), ()
    version = min(state.applied[rank] for rank in state.live) + 1
    records = tuple(Record("step", step) for step in range(state.version, version))
    facts = {step: told for step, told in state.facts.items() if step >= version}
    commands: tuple[Command, ...] = records
    for step in range(state.version, version):
        state, voted = _vote(state, step)
        commands += voted
        if state.outcome is not None:
            return state, commands
    is_equal = len(commands) == len(records)
    state = state.updated(version=version, passed=0, disturbances=0, facts=facts)
    state, settled = corruption_response.settle(state)
    if not (is_equal and state.checks.due(version)):  # whoever has other values, and goes, has other bits, too
        return state, commands + settled
    state, caused = corruption_response.compare(state)
    return state, commands + settled + caused


def add_commit(state: MembershipState, event: messages.Commit) -> tuple[MembershipState, tuple[Command, ...]]:
    """A worker is REDUCED and asks whether all others are."""
    if event.generation != state.generation or state.regrouping or event.step <= state.committed:
        return state, ()
    state = state.updated(commits={**state.commits, event.rank: event})
    if state.commits.keys() != state.live:
        return state, ()
    steps = {commit.step for commit in state.commits.values()}
    if len(steps) > 1:
        return end(state, Failed(f"The workers asked to commit different steps: {sorted(steps)}."))
    payloads: dict[int, Any] = {}
    for rank, commit in sorted(state.commits.items()):
        payloads.setdefault(state.stage_of(rank), commit.payload)
    guessed = any(commit.guesses for commit in state.commits.values())
    state = replace(state, commits={}, committed=event.step, answered=(event.step, payloads))
    return state, (Send(state.roster, messages.Committed(state.generation, event.step, payloads, guessed)),)


def add_arrival(state: MembershipState, event: messages.Arrive) -> tuple[MembershipState, tuple[Command, ...]]:
    """A worker has arrived at a control collective."""
    if event.number < state.next_collective:
        return state, ()
    if event.generation is not None and (event.generation != state.generation or state.regrouping):
        return state, ()
    arrived = {**state.collectives.get(event.number, {}), event.rank: event}
    others = {arrive.name for arrive in arrived.values()}
    if len(others) > 1:
        return end(
            state,
            Failed(
                f"The workers disagree about what to do next: control collective {event.number} is called"
                f" {' and '.join(sorted(map(repr, others)))}. Hooks and callbacks must take the same decisions on all"
                f" workers; decide on values that are the same everywhere, such as trainer.callback_metrics. {_ON_ALL}."
            ),
        )
    state = replace(state, collectives={**state.collectives, event.number: arrived})
    return _answer_if_complete(state, event.number)


def check_attendance(state: MembershipState, event: messages.Heartbeat) -> tuple[MembershipState, tuple[Command, ...]]:
    """A worker says which step it has begun. Ends the run if others wait before that step for it to arrive."""
    for _, arrived in sorted(state.collectives.items()):
        waiting = next((one for rank, one in sorted(arrived.items()) if one.begun < event.begun), None)
        if event.rank in arrived or waiting is None:
            continue
        there, gone = state.grid.worker(waiting.rank), state.grid.worker(event.rank)
        return end(
            state,
            Failed(
                f"Worker {there} waits for all others in {waiting.name!r}, and worker {gone} does not come: it has gone"
                f" on to step {event.begun}. {_ON_ALL}, nor where values decide that differ between them."
            ),
        )
    return state, ()


def _answer_if_complete(state: MembershipState, number: int) -> tuple[MembershipState, tuple[Command, ...]]:
    """Answers a collective with the payloads of the live workers once all of them have arrived."""
    arrived = state.collectives[number]
    if not state.live <= arrived.keys():
        return state, ()
    payloads = {rank: arrived[rank].payload for rank in state.roster}
    collectives = {other: value for other, value in state.collectives.items() if other != number}
    state = replace(state, collectives=collectives, next_collective=number + 1)
    name = next(iter(arrived.values())).name
    if name == ENDED:
        return end(state, Ended())
    if name != RESULT:
        return state, (Send(state.roster, messages.Answer(number, payloads, state.leader)),)
    # The payloads stay here: the results are big, and only the supervisor wants them. Workers learn who delivered.
    delivered = {rank: payload is not None for rank, payload in payloads.items()}
    answer = Send(state.roster, messages.Answer(number, delivered, state.leader))
    stages = {state.stage_of(rank) for rank, yes in delivered.items() if yes}
    if len(stages) < state.grid.stages:
        return state, (answer,)  # a stage's speaker died meanwhile: the workers ask again with the new one
    state, stop = end(state, Finished({rank: p for rank, p in payloads.items() if p is not None}))
    return state, (answer, *stop)
