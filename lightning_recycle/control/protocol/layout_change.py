"""Changes of the layout: layers that go to other stages, and their donors. Pure.

Concept: a layout is the same for all pipelines, so a layer that goes to another stage goes to all workers of that
stage. Each of them gets it from a worker of the stage that has it. That is a transaction in two generations, at a step
boundary. In the first all hold what they have and get what they lack; nothing runs. When all of them have it
(:class:`~lightning_recycle.control.protocol.messages.Milestone`) the layout is decided: the second generation has it,
and workers drop what they no longer need. A loss in the first generation undoes the change, as everybody still has what
it had. A loss after it undoes nothing, as everybody holds what it needs.

Must not know: what a layer is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_recycle.control.protocol import generation
from lightning_recycle.control.protocol.messages import Cuts, LayoutWanted, Reached
from lightning_recycle.control.protocol.state import LayoutReady, LayoutState, MembershipState, Next, Record, after
from lightning_recycle.planning.cuts import are_bounds, held_ranges
from lightning_recycle.planning.grid import Grid, Worker


@dataclass(frozen=True, slots=True)
class Transfer:
    """Rank ``donor`` gives the parts ``layers`` to rank ``receiver``."""

    donor: int
    receiver: int
    layers: tuple[int, ...]


def is_layout(cuts: Cuts, stages: int) -> bool:
    """Whether ``cuts`` gives each of ``stages`` stages at least one part of its own."""
    return len(cuts) == stages + 1 and are_bounds(cuts)


def ranges(cuts: Cuts) -> tuple[range, ...]:
    """The parts that each stage has; neighbours may share one."""
    return held_ranges(cuts)


def has_ties(groups: Iterable[Iterable[int]], cuts: Cuts) -> bool:
    """Whether some of the parts of one of ``groups``, which share a weight, lie on several stages."""
    stages: dict[int, set[int]] = {}
    for stage, parts in enumerate(ranges(cuts)):
        for part in parts:
            stages.setdefault(part, set()).add(stage)
    return any(len(set().union(*(stages[part] for part in group))) > 1 for group in groups)


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
    """A worker has what it needs of the layout to come; when all have, it holds, whoever is lost from now on."""
    becomes, wanted = state.generation.becomes, state.layout.wanted
    if not becomes or not state.generation.runs(event.generation):
        return state, ()
    state = state.with_generation(held=state.generation.held | {event.rank})
    if state.generation.held != state.roster.live:
        return state, ()
    details: dict[str, Any] = {"before": state.layout.cuts, "cuts": becomes}
    if wanted is not None and wanted.cuts == becomes:
        details.update(wanted.details)
        wanted = None
    state = state.updated(layout=LayoutState(becomes, wanted))
    return after((Record("layers_moved", state.steps.version, None, details),), generation.begin(state))


def transfers(grid: Grid, roster: Collection[int], before: Cuts, after: Cuts) -> tuple[Transfer, ...]:
    """Transfers of layers, in the order in which every worker sends and receives: then no worker waits for another one
    that waits.

    A worker gets layers from its own pipeline where it can, else from those of the other stage in turn.
    """
    workers: Mapping[int, list[int]] = {
        stage: sorted(rank for rank in roster if grid.worker(rank).stage == stage) for stage in range(grid.stages)
    }
    had = ranges(before)
    giver_of = {layer: giver for giver, layers in reversed(list(enumerate(had))) for layer in layers}
    found = []
    for giver in range(grid.stages):
        for taker, gets in enumerate(ranges(after)):
            layers = tuple(layer for layer in gets if giver_of[layer] == giver and layer not in had[taker])
            if not layers:
                continue
            for turn, receiver in enumerate(workers[taker]):
                own = grid.rank(Worker(grid.worker(receiver).pipeline, giver))
                donor = own if own in workers[giver] else workers[giver][turn % len(workers[giver])]
                found.append(Transfer(donor, receiver, layers))
    return tuple(found)
