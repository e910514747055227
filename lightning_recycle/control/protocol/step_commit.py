"""Steps: losses, commits, equal values, changes at step boundaries. Pure.

Losses are collected by micro-batch, however often computed. No worker applies a step before its losses are known; where
workers check each other's computations, not before all have passed it in one generation. A step *counts* once every
live worker has applied it; then the reported facts are compared. The longest-serving workers are right if they agree: a
newcomer that differs is dismissed; any other difference ends the run. While there are newcomers, no worker applies a
step before the previous one has been compared, so wrong values reach no other parameters. Commits (Commit) come before
that: they are answered once every live worker has contributed, REDUCED or SPECULATIVE; after a wrong speculation (Undo)
the same workers connect again.

A lost worker leaves the roster at once; all else changes at a *step boundary*, so nothing is redone: workers report
where they are
(Pause, Paused), learn where to stop (Boundary), and a generation begins when all are there (Reached). In it a joining
worker gets its stage's state; until then it is not a replica. A plan for the same workers (PlanReady) comes with the
Boundary and takes effect without a stop, unless it needs other connections. If a generation begins before, its own plan
holds (Resume).

A layout changes in two generations: in the first all keep their layers and get those they lack, and nothing runs; once
all hold them (:class:`~lightning_recycle.control.protocol.messages.Milestone`) the second has the layout, and they drop
the rest. A worker lost in the first generation undoes the change; one lost later does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from lightning_recycle.control.protocol import control_collectives, fault_attribution, messages, recovery
from lightning_recycle.control.protocol.messages import LayoutWanted, Reached
from lightning_recycle.control.protocol.recovery import begin_generation
from lightning_recycle.control.protocol.state import (
    Command,
    Failed,
    LayoutReady,
    LayoutState,
    MembershipState,
    Next,
    PauseState,
    PlanReady,
    Record,
    Reported,
    Send,
    after,
    end,
)

_SAME_ON_ALL = (
    "Hooks, callbacks and schedulers must do the same on all workers: decide on values that are the same everywhere,"
    " such as trainer.callback_metrics, and keep what you base decisions on in state_dict(), so that a replacement has"
    " it."
)


_INPUTS = -1  # the scope of values that the gradients of the step depend on


def settle_steps(state: MembershipState) -> Next:
    """Counts steps and answers collectives that waited only for a lost worker."""
    state, commands = count_steps(state)
    state, answers = control_collectives.settle_collectives(state)
    return state, commands + answers


def on_restored(state: MembershipState, event: messages.Restored) -> Next:
    """The training starts from a checkpoint."""
    if state.steps.applied or event.version <= state.steps.version:
        return state, ()
    return state.with_steps(version=event.version, applied_below=0, summed=event.version), ()


def on_losses(state: MembershipState, event: messages.Losses) -> Next:
    """Losses of micro-batches; the mean goes to all once the step's are there."""
    steps = state.steps
    if event.step < steps.summed:
        return state, ()  # a redone step, computed again
    if event.generation is not None and not state.generation.runs(event.generation):
        return state, ()  # of an attempt that not all have passed, and that all make again
    losses = {**event.losses, **steps.losses.get(event.step, {})}
    outputs = {**event.outputs, **steps.outputs.get(event.step, {})}
    state = state.with_steps(
        losses={**steps.losses, event.step: losses},
        outputs={**steps.outputs, event.step: outputs},
        unproven=steps.unproven if event.generation is None else max(steps.unproven, event.step),
    )
    return _sum_up(state, event.step)


def on_passed(state: MembershipState, event: messages.Reached) -> Next:
    """A worker has no doubt about its peers' results in a step."""
    if not state.generation.runs(event.generation) or event.step != state.steps.summed:
        return state, ()
    return _sum_up(state.with_generation(passes=state.generation.passes | {event.rank}), event.step)


def forget_unproven(state: MembershipState) -> MembershipState:
    """Drops losses of a step that not all have passed, as workers drop the rest of it."""
    steps = state.steps
    if steps.unproven < steps.summed:
        return state
    return state.with_steps(
        losses={step: value for step, value in steps.losses.items() if step != steps.unproven},
        outputs={step: value for step, value in steps.outputs.items() if step != steps.unproven},
        unproven=-1,
    )


def _sum_up(state: MembershipState, step: int) -> Next:
    """Sends the mean loss of ``step`` to all, if all losses have come and may count."""
    steps = state.steps
    losses, outputs = steps.losses.get(step, {}), steps.outputs.get(step, {})
    if len(losses) < state.positions.grid.global_microbatches:
        return state, ()
    if step == steps.unproven and state.generation.passes != state.roster.live:
        return state, ()
    if state.roster.newcomers and steps.version < step:
        return state, ()  # one of them may have taken part in it with other values than the others
    loss = sum(losses[index] for index in sorted(losses)) / len(losses)
    state = state.with_generation(passes=frozenset()).with_steps(
        losses={other: value for other, value in steps.losses.items() if other > step},
        outputs={other: value for other, value in steps.outputs.items() if other > step},
        summed=step + 1,
    )
    # All take from this one message whether the run stops or ends after the step, so all do it after the same one.
    check_next = state.checks.is_announced_by(step)
    message = messages.StepLoss(
        step,
        loss,
        outputs=outputs,
        after_step=steps.after_step,
        check_next=check_next,
        saves=control_collectives.save_status(state),
    )
    return state, (Send(state.roster.ranks, message),)


def on_applied(state: MembershipState, event: messages.Applied) -> Next:
    """A worker has applied a step, which counts once all have.

    Ends the run if the worker differs from the others; while there are newcomers, all are compared at the end.
    """
    if event.step <= state.steps.applied.get(event.rank, -1):
        return state, ()
    applied = {**state.steps.applied, event.rank: event.step}
    if state.roster.newcomers:
        reported = _add_facts(state, event)
    else:
        reported, difference = _compare_facts(state, event)
        if difference:
            return end(state, _difference_failure(event.step, difference))
    facts = {**state.steps.facts, event.step: reported}
    if event.facts.checked is not None:
        state = state.updated(checks=state.checks.add(event.rank, event.step, event.facts.checked))
    state, commands = count_steps(state.with_steps(facts=facts, applied=applied))
    if not state.roster.newcomers or state.outcome is not None:
        return state, commands
    state, loss = _sum_up(state, state.steps.summed)  # which may have waited for that
    return state, commands + loss


def _difference_failure(step: int, difference: str) -> Failed:
    return Failed(
        f"After step {step} workers hold different values that must be the same: {difference}. {_SAME_ON_ALL}"
    )


def _scopes(state: MembershipState, event: messages.Applied) -> tuple[tuple[int | None, Mapping[str, float]], ...]:
    """(scope, reported values): None and :data:`_INPUTS` for all workers, the column."""
    facts = event.facts
    return (None, facts.everywhere), (_INPUTS, facts.inputs), (state.positions.column(event.rank), facts.stage)


def _add_facts(state: MembershipState, event: messages.Applied) -> Mapping[int | None, tuple[Reported, ...]]:
    reported = state.steps.facts.get(event.step, {})
    mine = {scope: (*reported.get(scope, ()), (event.rank, facts)) for scope, facts in _scopes(state, event)}
    return {**reported, **mine}


def _compare_facts(
    state: MembershipState, event: messages.Applied
) -> tuple[Mapping[int | None, tuple[Reported, ...]], str]:
    """Facts of the step with those of ``event``, and in words the values that differ.

    One comparison, with the first reporter, is enough: the others were equal to it.
    """
    reported = dict(state.steps.facts.get(event.step, {}))
    differ = []
    for scope, mine in _scopes(state, event):
        others = tuple((rank, facts) for rank, facts in reported.get(scope, ()) if rank in state.roster.live)
        if any(theirs == mine for _, theirs in others):
            continue
        reported[scope] = (*others, (event.rank, mine))
        for name, value in mine.items():
            first, theirs = next(((rank, facts[name]) for rank, facts in others if name in facts), (event.rank, value))
            if not _equal_values(value, theirs):
                differ.append(_in_words(state, name, (first, theirs), (event.rank, value)))
    return reported, "; ".join(sorted(differ))


def _in_words(state: MembershipState, name: str, a: tuple[int, float], b: tuple[int, float]) -> str:
    """The difference of value ``name``; ``a``, ``b``: (rank, value)."""
    return f"{name} is {a[1]!r} on worker {state.positions.name(a[0])} and {b[1]!r} on {state.positions.name(b[0])}"


def _judge_newcomers(state: MembershipState, step: int) -> Next:
    """Compares all live workers after ``step``; dismisses newcomers that differ."""
    wrong: dict[int, list[str]] = {}
    is_clear, newcomers = True, state.roster.newcomers
    for scope, reported in state.steps.facts.get(step, {}).items():  # first what must be the same on all
        values = {rank: facts for rank, facts in reported if rank in state.roster.live and rank not in wrong}
        first = next(iter(values.values()), {})
        if all(facts == first for facts in values.values()):
            continue
        since = min(newcomers.get(rank, -1) for rank in values)
        oldest = {rank: facts for rank, facts in values.items() if newcomers.get(rank, -1) == since}
        agreeing = {
            rank: sum(not _differing_names(mine, facts) for facts in oldest.values()) for rank, mine in oldest.items()
        }
        right = max(agreeing, key=agreeing.__getitem__)
        differing = {rank: names for rank, facts in values.items() if (names := _differing_names(values[right], facts))}
        # What inputs led to, all have applied.
        is_clear = is_clear and scope != _INPUTS and 2 * len(differing.keys() & oldest.keys()) < len(oldest)
        for rank, names in differing.items():
            wrong.setdefault(rank, []).extend(
                _in_words(state, name, (right, values[right][name]), (rank, values[rank][name])) for name in names
            )
    if not wrong:
        return state, ()
    is_clear = is_clear and wrong.keys() <= newcomers.keys()
    if not is_clear or any(not state.holding(state.positions.stage(rank), without=wrong) for rank in wrong):
        return end(state, _difference_failure(step, "; ".join(sorted(chain.from_iterable(wrong.values())))))
    causes = {rank: f"after step {step} {'; '.join(sorted(words))}, and it has joined" for rank, words in wrong.items()}
    return fault_attribution.dismiss(state, step, causes)


def _differing_names(right: Mapping[str, float], other: Mapping[str, float]) -> list[str]:
    """Names of values that both have and that differ."""
    return [name for name in right.keys() & other.keys() if not _equal_values(right[name], other[name])]


def _equal_values(a: float, b: float) -> bool:
    """Equality of values; of floats approximately, as libraries of machines differ."""
    return a == b or (isinstance(a, float) and math.isclose(a, b, rel_tol=1e-12)) or (a != a and b != b)


def count_steps(state: MembershipState) -> Next:
    """Counts the steps that every live worker has applied, and judges what they show.

    Newcomers with other values are dismissed, inspections settled, and checksums compared where they are due. Each of
    these may end the run.
    """
    # The usual case, found without looking at all workers: each is passed by once in a step.
    steps, live = state.steps, state.roster.live
    for rank in range(steps.applied_below, state.positions.num_workers):
        if rank in live and steps.applied.get(rank, -1) < steps.version:
            return (state if rank == steps.applied_below else state.with_steps(applied_below=rank)), ()
    version = min(steps.applied[rank] for rank in live) + 1
    records = tuple(Record("step", step) for step in range(steps.version, version))
    facts = {step: reported for step, reported in steps.facts.items() if step >= version}
    commands: tuple[Command, ...] = records
    for step in range(steps.version, version):
        state, voted = _judge_newcomers(state, step)
        commands += voted
        if state.outcome is not None:
            return state, commands
    is_equal = len(commands) == len(records)
    state = state.with_steps(version=version, applied_below=0, facts=facts).with_faults(disturbances=0)
    state, settled = fault_attribution.settle_inspection(state)
    if not (is_equal and state.checks.due(version)):  # whoever has other values, and goes, has other bits, too
        return state, commands + settled
    state, caused = fault_attribution.compare(state)
    return state, commands + settled + caused


def on_commit(state: MembershipState, event: messages.Commit) -> Next:
    """A worker contributes to the commit of a step, answered once all have."""
    if not state.generation.runs(event.generation) or event.step <= state.generation.commit_answered:
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
        payloads.setdefault(state.positions.column(rank), commit.payload)
    speculative = any(commit.speculative for commit in commits.values())
    state = state.with_generation(commits={}, commit_answered=event.step).with_steps(answered=(event.step, payloads))
    return state, (
        Send(state.roster.ranks, messages.Committed(state.generation.number, event.step, payloads, speculative)),
    )


def on_undo(state: MembershipState, event: messages.Undo) -> Next:
    """A speculation was wrong: all drop its consequences, and its worker corrects it."""
    if not state.generation.runs(event.generation):
        return state, ()
    return after((Record("undone", event.step),), begin_generation(state))


# ---------------------------------------------------------------------- step boundaries


def on_ready(state: MembershipState, event: messages.Ready) -> Next:
    """A worker is set up and waits to be let in."""
    if event.rank in state.roster.live:
        return state, ()
    return state.with_roster(ready=state.roster.ready | {event.rank}), ()


def on_leave(state: MembershipState, event: messages.Leave) -> Next:
    """A worker wants to leave."""
    ending = state.roster.ending | ({event.rank} if event.with_run else set())
    return state.with_roster(leaving=state.roster.leaving | {event.rank}, ending=ending), ()


def on_plan_ready(state: MembershipState, event: PlanReady) -> Next:
    """There is a better plan for the workers of this generation."""
    fits = event.roster == state.roster.ranks and state.generation.number >= 0 and not state.generation.regrouping
    return (state.with_generation(plan=event) if fits else state), ()


def pause_if_wanted(state: MembershipState) -> Next:
    """Asks all where they are if something is to change and nothing else is."""
    now = state.generation
    if now.number < 0 or now.regrouping or now.pause is not None or now.becomes or state.roster.joining:
        return state, ()
    is_layout_due = state.layout.wanted is not None
    if not any(_changes(state)) and now.plan is None and not is_layout_due:
        return state, ()
    state = state.with_generation(pause=PauseState(now.pauses))
    return state, (Send(state.roster.ranks, messages.Pause(now.number, now.pauses)),)


def _changes(state: MembershipState) -> tuple[frozenset[int], frozenset[int]]:
    """Workers that enter and that leave at the next step boundary.

    Whole positions: siblings of a leaving worker leave, too. No stage is left without a position that has its state.
    """
    roster = state.roster
    positions = state.positions
    ready = roster.ready - roster.live
    enter = frozenset(rank for position in positions.whole(ready) for rank in positions.ranks(position))
    leave: set[int] = set()
    for rank in sorted(roster.leaving & roster.live):
        if state.holding(state.positions.stage(rank), without=leave | {rank}):
            leave.add(rank)
    return enter, frozenset(leave)


def on_paused(state: MembershipState, event: messages.Paused) -> Next:
    """A worker reports its newest begun step; when all have, they learn where to stop."""
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
    if plan is not None and not plan.reconnects and state.layout.wanted is None and not any(_changes(state)):
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
    """A worker waits at the boundary; when all do, the next generation begins there."""
    pause, layout, plan = state.generation.pause, state.layout.wanted, state.generation.plan
    if pause is None or event.generation != state.generation.number or event.step != pause.boundary:
        return state, ()
    pause = replace(pause, arrived=pause.arrived | {event.rank})
    state = state.with_generation(pause=pause)
    if pause.arrived != state.roster.live:
        return state, ()
    enter, leave = _changes(state)
    commands: list[Command] = [Record("paused", event.step)]
    if layout is not None and not (enter or leave):
        return after(tuple(commands), recovery.begin_generation(state, layout.cuts))
    if plan is not None and not (enter or leave):
        commands.append(Record("replanned", event.step, None, plan.details))
    commands += [Record("left", event.step, rank) for rank in sorted(leave)]
    state, released = recovery.without_positions(state, leave)
    state = _let_in(state, enter, event.step)
    return after((*commands, *released), recovery.begin_generation(state))


def _let_in(state: MembershipState, enter: frozenset[int], step: int) -> MembershipState:
    """State in which ``enter`` are live at ``step``, to get their stage's state."""
    roster = state.roster
    roster = roster.updated(
        live=roster.live | enter,
        joining=enter,
        newcomers={**roster.newcomers, **dict.fromkeys(enter, step)},
        ready=roster.ready - enter,
    )
    applied = {**state.steps.applied, **dict.fromkeys(enter, step - 1)}
    return state.updated(roster=roster, steps=state.steps.updated(applied_below=0, applied=applied))


def on_entered(state: MembershipState, event: messages.Reached) -> Next:
    """A worker that joins has the state of its stage."""
    if event.rank not in state.roster.joining:
        return state, ()
    state = state.with_roster(joining=state.roster.joining - {event.rank})
    return state, (Record("rejoined", state.steps.version, event.rank),)


# ---------------------------------------------------------------------- layers that go to other stages


def on_layout_wanted(state: MembershipState, event: LayoutWanted) -> Next:
    """A user wants another layout."""
    return on_layout_ready(state, LayoutReady((), event.cuts))


def on_layout_ready(state: MembershipState, event: LayoutReady) -> Next:
    """The layout changes at the next step boundary, if it has to."""
    layout = state.layout
    if state.generation.number < 0 or event.cuts in (layout.cuts, state.generation.becomes):
        return state, ()
    if not event.is_for(state.roster.ranks) or (layout.cuts and layout.cuts[-1] != event.cuts[-1]):
        return state, ()
    if layout.wanted is not None and layout.wanted.cuts == event.cuts and layout.wanted.is_for(event.roster):
        return state, ()  # each worker that wants it sends this
    return state.with_layout(wanted=event), ()


def on_layers_held(state: MembershipState, event: Reached) -> Next:
    """A worker holds the next layout, which takes effect once all do, losses or not."""
    becomes, wanted = state.generation.becomes, state.layout.wanted
    if not becomes or not state.generation.runs(event.generation):
        return state, ()
    state = state.with_generation(layers_held=state.generation.layers_held | {event.rank})
    if state.generation.layers_held != state.roster.live:
        return state, ()
    details: dict[str, Any] = {"before": state.layout.cuts, "cuts": becomes}
    if wanted is not None and wanted.cuts == becomes:
        details.update(wanted.details)
        wanted = None
    state = state.updated(layout=LayoutState(becomes, wanted))
    return after((Record("layers_moved", state.steps.version, None, details),), recovery.begin_generation(state))
